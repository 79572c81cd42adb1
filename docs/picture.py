"""Draws the picture in the README from a trace: no model is needed to replay a rollout.

python sample.py "a question" --model DIR --corpus FILE --out answers.jsonl --trace trace.jsonl
python docs/picture.py trace.jsonl CORPUS docs/sample.svg
"""

import io
import json
import sys
from dataclasses import replace
from pathlib import Path

from rich.console import Console

from dlm_rag.decode.rollout import Rollout
from dlm_rag.decode.view import answer_panel, progress_panel
from dlm_rag.retrieval.corpus import open_corpus


def main(trace: str, corpus: str, picture: str) -> None:
    with Path(trace).open(encoding="utf-8") as file:
        rollout = Rollout.from_trace(json.loads(file.readline()))
    with Path(trace).with_name("answers.jsonl").open(encoding="utf-8") as file:
        rollout.citations = json.loads(file.readline())["citations"]
    texts = {passage.id: passage.text for passage in open_corpus(corpus)}
    rollout.evidence_texts = texts
    console = Console(record=True, width=110, file=io.StringIO(), force_terminal=True)
    for share in (4, 2):
        console.print(progress_panel(replace(rollout, steps=rollout.steps[: len(rollout.steps) // share])))
    console.print(answer_panel(rollout))
    Path(picture).write_text(console.export_svg(title="python sample.py"), encoding="utf-8")


if __name__ == "__main__":
    main(*sys.argv[1:])
