"""What the ranges of `nvtx_ranges.py` cost when no profiler listens.

    python profiling/bench_nvtx_ranges.py [questions]

Times an empty stage and an empty step by themselves (median of repeats), counts how many a decode of the
shipped model opens (16 questions at a time; a step is counted for each of its questions, which is too
much), and gives the sum as a share of that decode. Two decodes differ by more than that.
"""

import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import partial
from itertools import count
from statistics import median

from dlm_rag import nvtx_ranges
from dlm_rag.cli import run_program
from dlm_rag.commands.cli_args import parse_command_line, parse_int_args
from dlm_rag.commands.startup import apply_shipped_defaults, gather_questions, prepare_decoder
from dlm_rag.errors import ConfigError

CALLS, REPEATS = 20_000, 9


def main(argv: list[str]) -> None:
    limit, *more = parse_int_args(__doc__ or "", argv, "questions", [40])
    if more:
        raise ConfigError("the one word of this benchmark is a number of questions")
    config = apply_shipped_defaults(
        parse_command_line("", ["decode.batch_size=16"], typed=False).config, []
    )
    asked = gather_questions(config, [])
    questions = [asked[n * len(asked) // limit] for n in range(min(limit, len(asked)))]
    decoder = prepare_decoder(config, questions).load()
    list(decoder.decode(questions))
    decoder.reset_cache()  # kernels stay warm, evidence is computed again
    opened, add = list[str](), nvtx_ranges.StageClock.add

    def counted(clock: nvtx_ranges.StageClock, name: str, seconds: float) -> None:
        opened.append(name)
        add(clock, name, seconds)

    nvtx_ranges.StageClock.add = counted  # type: ignore[assignment, method-assign]
    start = time.perf_counter()
    rollouts = list(decoder.decode(questions))
    seconds = time.perf_counter() - start
    steps = sum(rollout.forwards + 1 for rollout in rollouts)
    a_stage = measure_range_seconds(partial(nvtx_ranges.profile_stage, "denoise"))
    turns = count()
    # NVTX registers each new text
    a_step = measure_range_seconds(lambda: nvtx_ranges.profile_step(next(turns), 16))
    spent = a_stage * len(opened) + a_step * steps
    print(f"a stage: {1e6 * a_stage:.2f} us, a step: {1e6 * a_step:.2f} us")
    print(f"{len(opened):,} stages and at most {steps:,} steps in a decode of {len(questions)} questions")
    print(f"together {1e3 * spent:.2f} ms of {seconds:.2f} s, {spent / seconds:.3%}")


def measure_range_seconds(make: Callable[[], AbstractContextManager[None]]) -> float:
    """Median seconds of an empty range."""
    times = []
    for _ in range(REPEATS):
        start = time.perf_counter()
        for _ in range(CALLS):
            with make():
                pass
        times.append((time.perf_counter() - start) / CALLS)
    return median(times)


if __name__ == "__main__":
    run_program(main)
