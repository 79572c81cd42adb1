"""What the filters of `dlm-rag synthesize` keep of traces with known answers, and how much of it is right.

    python -m dlm_rag.data.synthetic_world --seed 41 --out world --per-hop 75
    dlm-rag sample --model dlm_rag/shipped/model --questions world/questions.jsonl \\
        --corpus world/corpus.jsonl --out answers.jsonl --trace trace.jsonl
    python profiling/bench_synthesis_filters.py --questions world/questions.jsonl --trace trace.jsonl

A column for the questions in wordings that training shows and one for the others; in each: the share kept,
and of what is kept the share whose answer is right and whose response is the gold one to the letter.
"""

from pathlib import Path

from rich.console import Console
from rich.table import Table

from dlm_rag.cli import run_program
from dlm_rag.commands.cli_args import parse_command_line
from dlm_rag.decode.trace_file import read_trace
from dlm_rag.errors import ConfigError
from dlm_rag.evaluation.metrics import compute_exact_match
from dlm_rag.questions import read_question_records, read_questions
from dlm_rag.synthesis.trace_filters import check_trace

FILTER_COMBINATIONS = {
    "nothing": (),
    "cited": ("cited",),
    "cited, supported": ("cited", "supported"),
    "cited, linked": ("cited", "linked"),
    "keep=evidence": ("cited", "supported", "linked"),
    "keep=evidence, known_hops": ("cited", "supported", "linked", "hops"),
    "keep=answer": ("cited", "answer"),
}


JudgedTrace = tuple[dict[str, bool], bool, bool]  # the checks; whether it is right, and gold


def format_kept_share(traces: list[JudgedTrace], needed: tuple[str, ...]) -> str:
    """`kept: right / gold` of the traces that pass some checks, in percent."""
    kept = [trace for trace in traces if all(trace[0].get(name) for name in needed)]
    rights, golds = sum(right for _, right, _ in kept), sum(same for _, _, same in kept)
    right, same = (100 * count / max(1, len(kept)) for count in (rights, golds))
    return f"{100 * len(kept) / max(1, len(traces)):.0f}: {right:.1f} / {same:.1f}"


def main(argv: list[str]) -> None:
    config = parse_command_line(__doc__ or "", argv, typed=False).config
    if config.questions is None or config.trace is None:
        raise ConfigError("give --questions and --trace")
    asked = {question.id: question for question in read_questions(config.questions)}
    gold = {str(row["id"]): row.get("reasoning") for _, row in read_question_records(config.questions)}
    found: dict[str, list[JudgedTrace]] = {"known": [], "unknown": []}
    for rollout in read_trace(Path(config.trace)):
        question = asked[rollout.id]
        right = compute_exact_match(rollout.answer, question.golden_answers) == 1.0
        wording = "unknown" if "held_out_wording" in question.labels else "known"
        found[wording].append((check_trace(rollout, question), right, rollout.response == gold[rollout.id]))
    heads = [f"{wording} wordings ({len(traces)})" for wording, traces in found.items()]
    table = Table("filter", *heads, title="kept %: right % / gold %")
    for name, needed in FILTER_COMBINATIONS.items():
        table.add_row(name, *(format_kept_share(traces, needed) for traces in found.values()))
    Console().print(table)


if __name__ == "__main__":
    run_program(main)
