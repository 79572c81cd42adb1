"""Draws the picture in the README from a trace: no model is needed to replay a rollout.

python sample.py "a question" --model DIR --corpus FILE --out answers.jsonl --trace trace.jsonl
python docs/picture.py trace.jsonl docs/sample.svg
"""

import io
import sys
from dataclasses import replace
from pathlib import Path

from rich.console import Console

from dlm_rag.decode.trace import read_trace
from dlm_rag.decode.view import answer_panel, progress_panel


def main(trace: str, picture: str) -> None:
    rollout = next(read_trace(Path(trace)))
    rollout.evidence_texts = rollout.passages
    console = Console(record=True, width=110, file=io.StringIO(), force_terminal=True)
    for share in (4, 2):
        console.print(progress_panel(replace(rollout, steps=rollout.steps[: len(rollout.steps) // share])))
    console.print(answer_panel(rollout))
    Path(picture).write_text(console.export_svg(title="python sample.py"), encoding="utf-8")


if __name__ == "__main__":
    main(*sys.argv[1:])
