"""Two workers of one thread against one process of one thread: answers a second, once the models are there.

    python profiling/bench_workers.py [--rounds 3] [--workers 2] [--limit 400] [decode.batch_size=16]

The shipped model on the questions of its world, or what KEY=VALUE names. Both sides take turns, round
after round. `empty`: nothing is kept of evidence when a pass begins, and every worker computes its own;
`warm`: the fourth pass over the same questions, which are dealt otherwise each time. Speed-ups are medians
of those within a round, with their range. Expectation: so many times as there are workers, each on a core.
"""

import time
from collections.abc import Callable
from statistics import median

import torch
from rich.console import Console
from rich.table import Table

from dlm_rag.cli import run_program
from dlm_rag.commands.cli_args import parse_command_line
from dlm_rag.commands.executors import make_job_opening
from dlm_rag.commands.startup import apply_shipped_defaults, gather_questions, prepare_decoder
from dlm_rag.decode.rollout import Rollout
from dlm_rag.errors import RunError
from dlm_rag.machine import get_machine_name
from dlm_rag.progress import report_progress
from dlm_rag.questions import Question
from dlm_rag.workers.placement import WorkerPlacement
from dlm_rag.workers.worker_pool import WorkerPool

OPTIONS: dict[str, tuple[str | int, str]] = {
    "rounds": (3, "of each side"),
    "workers": (2, "on the other side"),
}
PASSES_PER_ROUND = (
    4  # over the questions in a round: the first with an empty pool, the last with a warm one
)


def main(argv: list[str]) -> None:
    words = parse_command_line(__doc__ or "", argv, typed=False, chosen=True, options=OPTIONS)
    count, rounds = words.options["workers"], words.options["rounds"]
    given = [word.partition("=")[0] for word in words.settings]
    config = words.config if "decode.batch_size" in given else words.config_with(["decode.batch_size=16"])
    config = apply_shipped_defaults(config, [])
    questions, batch = gather_questions(config, []), config.decode.batch_size
    prepared = prepare_decoder(config, questions)
    torch.set_num_threads(1)
    seconds: dict[str, list[list[float]]] = {"one": [], "many": []}
    with (
        WorkerPool("local", WorkerPlacement(count, 1, count)) as crew,
        report_progress("rounds", 2 * rounds) as advance,
    ):
        decoder, opening = prepared.load(), make_job_opening(config, prepared, questions)
        for _ in range(rounds):
            decoder.reset_cache()
            times, one = time_passes(lambda: list(decoder.stream(questions)))
            seconds["one"].append(times)
            advance(1)
            crew.open(opening, batch)
            times, many = time_passes(lambda: list(crew.stream(questions, raise_failed_question)))
            seconds["many"].append(times)
            advance(1)
            if responses_by_id(one) != responses_by_id(many):
                raise RunError("workers gave other answers than one process")
    table = Table(
        "pool", "one process", f"{count} workers", "speed-up",
        title=f"{len(questions)} questions, batches of {batch}, {get_machine_name(prepared.device)}",
    )  # fmt: skip
    for name, number in (("empty", 0), ("warm", PASSES_PER_ROUND - 1)):
        sides = [[times[number] for times in found] for found in seconds.values()]
        gains = [one / many for one, many in zip(*sides, strict=True)]
        table.add_row(
            name,
            *(f"{len(questions) / median(side):.1f} answers/s" for side in sides),
            f"{median(gains):.2f} [{min(gains):.2f}, {max(gains):.2f}]",
        )
    Console().print(table)


def time_passes(decode: Callable[[], list[Rollout]]) -> tuple[list[float], list[Rollout]]:
    """Seconds of each pass, and the rollouts of the last."""
    times = []
    for _ in range(PASSES_PER_ROUND):
        begun = time.perf_counter()
        rollouts = decode()
        times.append(time.perf_counter() - begun)
    return times, rollouts


def responses_by_id(rollouts: list[Rollout]) -> dict[str, str]:
    return {rollout.id: rollout.response for rollout in rollouts}


def raise_failed_question(question: Question, error: str) -> Rollout:
    """A benchmark of workers that die is none."""
    raise RunError(f"question '{question.id}': {error}")


if __name__ == "__main__":
    run_program(main)
