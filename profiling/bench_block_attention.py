"""What lookahead and what finished blocks see are worth: exact match, forwards, tokens, FLOPs an answer.

    python profiling/bench_block_attention.py                              # the shipped model and world
    python profiling/bench_block_attention.py --model DIR --compare
    decode.query_window=0,decode.query_window=8

For a checkpoint whose attention has blocks: queries that may guess at so many positions behind the block
under work, then the orders of `evidence/prompt_segments.py`. All questions with nothing held out from
training; one pool for each setting, empty at first. Expectation, reckoned for 9 forwards, 56 tokens and
1.7 M parameters with 9 % of the evidence encoded: 264 tokens and 2.06 GFLOP an answer with `text` and a
lookahead of 16, 365 and 2.51 with `reread`, where a canvas that sees itself whole takes 864 and 5.15.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from bench_decode import require_masked_denoiser
from rich.console import Console
from rich.table import Column, Table

from dlm_rag.cli import run_program
from dlm_rag.commands.cli_args import parse_command_line
from dlm_rag.commands.startup import apply_shipped_defaults, gather_questions, prepare_decoder
from dlm_rag.decode.decoder import Decoder
from dlm_rag.evaluation.compare import parse_compared_settings
from dlm_rag.evaluation.metrics import compute_exact_match
from dlm_rag.model.flops import FlopCount
from dlm_rag.progress import report_progress
from dlm_rag.questions import Question

LOOKAHEADS = (0, 8, 16, 24, 40, 96)
FINISHED_BLOCK_MODES = ("no_evidence", "recompute", "append", "frozen")
OPTIONS: dict[str, tuple[str | int, str]] = {"limit": (300, "questions with nothing held out, the first")}


@dataclass(frozen=True)
class AnswerCost:
    """What a setting took, over n questions."""

    right: list[bool]
    hops: list[int | None]
    forwards: int
    work: FlopCount
    encoded: int  # tokens of evidence and questions

    def format_cells(self) -> list[str]:
        """Percentages, and means of an answer."""
        n = len(self.right)
        longest = [right for right, hops in zip(self.right, self.hops, strict=True) if hops == 4]
        return [
            f"{100 * sum(self.right) / n:.1f}",
            f"{100 * sum(longest) / len(longest):.1f}" if longest else "-",
            f"{self.forwards / n:.2f}",
            f"{(self.work.tokens - self.encoded) / n:.0f}",
            f"{self.encoded / n:.0f}",
            f"{self.work.flops / n / 1e9:.2f}",
            f"{self.work.calls / n:.2f}",
        ]


def main(argv: list[str]) -> None:
    words = parse_command_line(__doc__ or "", argv, typed=False, options=OPTIONS)
    config = apply_shipped_defaults(words.config, [])
    asked = [q for q in gather_questions(config, []) if not q.labels][: int(words.options["limit"])]
    lookaheads = [f"decode.query_window={n}" for n in LOOKAHEADS]
    orders = [f"decode.finished_block_context={order}" for order in FINISHED_BLOCK_MODES]
    settings = parse_compared_settings(config.compare or ",".join((*lookaheads, *orders)))
    table = Table(
        Column("setting", no_wrap=True),
        *("EM %", "4 hops %", "forwards", "canvas", "evidence", "GFLOP", "calls"),
        title=f"{len(asked)} questions with nothing held out; per answer: forwards, tokens, GFLOP, calls",
    )  # fmt: skip
    for name, keys in settings.items():
        decoder = prepare_decoder(apply_shipped_defaults(words.config_with(keys), []), asked).load()
        with report_progress(name, len(asked), "answers") as advance:
            table.add_row(
                name.removeprefix("decode."), *measure_answer_cost(decoder, asked, advance).format_cells()
            )
    Console().print(table)


def measure_answer_cost(
    decoder: Decoder, questions: Sequence[Question], advance: Callable[[int], None]
) -> AnswerCost:
    """Answers all questions; one that fails counts as wrong."""
    found = {}
    for rollout in decoder.stream(iter(questions)):
        found[rollout.id] = rollout
        advance(1)
    return AnswerCost(
        [compute_exact_match(found[q.id].answer, q.golden_answers) == 1 for q in questions],
        [q.hops for q in questions],
        sum(rollout.forwards for rollout in found.values()),
        require_masked_denoiser(decoder).flop_count,
        decoder.model_runner.cache_stats.encoded_tokens,
    )


if __name__ == "__main__":
    run_program(main)
