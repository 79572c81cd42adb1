"""Draws the picture in the README from a trace: no model is needed to replay a rollout.

python sample.py "a question" --model DIR --corpus FILE --out answers.jsonl --trace trace.jsonl
python docs/picture.py trace.jsonl docs/sample.svg
"""

import io
from dataclasses import replace
from pathlib import Path

from rich.console import Console

from dlm_rag.cli import run_program
from dlm_rag.commands.arguments import CommandParser
from dlm_rag.decode.terminal import render_answer, render_progress
from dlm_rag.decode.trace_file import read_trace


def main(argv: list[str]) -> None:
    parser = CommandParser(__doc__ or "")
    parser.add_argument("trace", type=Path)
    parser.add_argument("picture", type=Path)
    given = parser.parse_args(argv)
    rollout = next(read_trace(given.trace))
    rollout.evidence_texts = rollout.passages
    console = Console(record=True, width=110, file=io.StringIO(), force_terminal=True)
    for share in (4, 2):
        console.print(render_progress(replace(rollout, steps=rollout.steps[: len(rollout.steps) // share])))
    console.print(render_answer(rollout))
    given.picture.write_text(console.export_svg(title="python sample.py"), encoding="utf-8")


if __name__ == "__main__":
    run_program(main)
