"""Output files, stamps, scores, pages of traces."""

import json
import os
from dataclasses import asdict
from pathlib import Path

from tests.bad_inputs import EVALUATE, SAMPLE_COMMAND, SAMPLE_WITH_MODEL, table
from tests.support.traces import HEADER

ANSWER = '{"id": "q1", "question": "Who wrote Emma?", "response": "x"}\n'
STAMPS = (
    "[]", b"\xff", "[" * 100_000, '{"machines": []}', '{"answers_depend_on": {}, "machines": ["cpu"]}',
)  # fmt: skip
DECODED = json.dumps({"trace": 2, **asdict(HEADER)}) + (
    '\n{"passage": "a", "text": "x"}\n{"id": "q1", "question": "Who?", "prompt_layout": "joint", "canvas_length": 2, "response": "x", "steps": '
    '[{"step": 0, "query": "Who?", "passage_ids": ["a"], "retrieved": true, "committed": '
    '[{"position": 0, "token_id": 1, "token": "x", "confidence": 0.5}], "seconds": {}}]}\n'
)
CITATION = '{"text": "", "kind": "answer", "unsupported": [], "passages": [{"id": "a", "step": 0}]}'
PAGE = "page t.jsonl --html page.html"


def link_to_itself(path: Path) -> None:
    path.symlink_to(path.name)


CASES = [
    *table(SAMPLE_COMMAND,
        ("cannot be written: Is a directory", "--out model"),
        ("out=questions.jsonl/a cannot be written", "--out questions.jsonl/a"),
        ("Too many levels", "--out a", {"a": link_to_itself}),
        ("no such home folder", "--out '~nobody-here/a'"),
        ("is not a page of this program", "--html model/config.json"),
        ("add --trace FILE", "--out a --html page.html"),
        ("are the same file", "--out corpus.jsonl"),
        ("are the same file", "--out a --trace b", {"a": "", "b": lambda path: os.link(path.with_name("a"), path)}),
        ("trace and the run.json of out", "--out a --trace a.run.json"),
        ("a.run.json cannot be written", "--out a", {"a.run.json/x": ""}),
        ("cannot be locked by a.lock (it is no regular file)", "--out a", {"a.lock": os.mkfifo}),
        ("a.run.json cannot be written", "--out a", {"a": ANSWER, "a.run.json": os.mkfifo}),
        *(
            ("without a readable a.run.json beside it", "--out a", {"a": ANSWER, "a.run.json": stamp})
            for stamp in STAMPS
        ),
        ("trace=t.jsonl holds something already", "--trace t.jsonl", {"t.jsonl": DECODED}),
        # Control characters in names.
        ("questions file ' [2J .jsonl' was not found", "--questions '\x1b[2J\x07.jsonl'"),
    ),
    *table(SAMPLE_WITH_MODEL,
        ("the id ' [2J ' occurs a second time", "--corpus odd.jsonl",
         {"odd.jsonl": '{"id": "\\u001b[2J\\u202e", "text": "x"}\n' * 2}),
    ),
    *table(EVALUATE,
        ("scores.json cannot be written: it is no regular", "--out .", {"scores.json": os.mkfifo}),
        *(
            ("not written by evaluate", "--out .", {"scores.json": content})
            for content in ('{"mine": 1}', "[1]", "[" * 100_000)
        ),
    ),
    *table(PAGE,
        ("trace 't.jsonl' was not found",),
        ("t.jsonl holds no question that is finished", {"t.jsonl": ""}),
        *(
            (("t.jsonl, line 3: this is no line of a trace", key), {"t.jsonl": DECODED.replace(old, new)})
            for key, old, new in (
                ("steps.0.committed.0.token:", '"x", "conf', '1, "conf'),
                ("Infinity", '"confidence": 0.5', '"confidence": 1e999'),
                ("threshold='x' is no number", '"steps"', '"settings": {"answer_threshold": "x"}, "steps"'),
                ("citations.0.passages.0.words:", '"steps"', f'"citations": [{CITATION}], "steps"'),
            )
        ),
        ("the line of question 'q1' is not from a decode",
         {"t.jsonl": DECODED.replace('"canvas_length": 2', '"canvas_length": 1000000000')}),
    ),
    *table("page",
        (("the following arguments are required: TRACE", "--help"), "--html page.html"),
        ("questions.jsonl, line 1: this is no line", "questions.jsonl --html page.html"),
        ("one trace or two, not 3", "t.jsonl u.jsonl v.jsonl --html page.html"),
        ("trace 1, t.jsonl, and trace 2, t.jsonl, are the same file", "t.jsonl t.jsonl --html page.html", {"t.jsonl": DECODED}),
        ("html and trace 1, t.jsonl, are the same file", "t.jsonl --html t.jsonl", {"t.jsonl": DECODED}),
    ),
]  # fmt: skip
