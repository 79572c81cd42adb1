"""Corpora, questions, indexes."""

import gzip
import json
import os
from pathlib import Path

from tests.bad_inputs import SAMPLE_COMMAND, SAMPLE_WITH_MODEL, SAMPLE_WITHOUT_QUESTION, BadInputCase, table

GOOD = '{"id": "a", "question": "Who?", "contents": "text"}\n'
ASKED = f"{SAMPLE_WITHOUT_QUESTION} --questions"
SCORED = "evaluate --model model --corpus corpus.jsonl --questions q.jsonl --out run"
DEEP = "[" * 50_000


def write_column_twice(path: Path) -> None:
    """A table of questions and passages, with two columns of one name."""
    import pyarrow
    from pyarrow import parquet

    columns = {"id": ["a"], "question": ["Who?"], "contents": ["x"], "more": ["y"]}
    made = pyarrow.table(columns).rename_columns(["id", "question", "contents", "contents"])
    parquet.write_table(made, path)


BAD_LINES = (  # what both readers say, of the second line
    ("line 2: the line is not JSON", "{oops\n"),
    ("line 2: the line is not UTF-8", b'{"id": "b", "question": "\xff", "contents": "\xff"}\n'),
    ("that is too", '{"a": ' + DEEP + "]" * len(DEEP) + "}\n"),
    ("that is too", '{"id": ' + "1" * 5000 + "}\n"),
    ("a lone surrogate", '{"id": "b", "question": "\\ud800", "contents": "\\ud800"}\n'),
    ("nearest: 'ids'", '{"ids": 1, "question": "x", "contents": "x"}\n'),
    ("line 2: the id 'a' occurs a second time", GOOD),
)
FILES = (  # what both readers say of a file in another form
    ("a.csv is not in a format that is read", "a.csv", b"PK\x03\x04"),
    ("is not a parquet file", "a.parquet", GOOD),
    ("a.parquet: the header has two columns 'contents': rename one", "a.parquet", write_column_twice),
    ("a.json: the file is not JSON", "a.json", "[" + GOOD),
    ("a.json: the file is not UTF-8", "a.json", b"[\xff]"),
    ("item 2: the id 'a' occurs a second time", "a.json", f"[{GOOD},\n{GOOD}]"),
    ("a.csv, line 3: the row has more or fewer cells than the header", "a.csv", "id,text\n1,x\n2,y,z\n"),
    ("line 1: the header has no comma", "a.csv", "id;text\n1;x\n"),
    (
        "line 1: the line is not UTF-8: save the file as UTF-8 (`iconv -f utf-16 ",
        "a.tsv",
        "id".encode("utf-16"),
    ),
    ("is not in a format that is read", "b.jsonl.gz", gzip.compress(gzip.compress(b"x"))),
    ("is a broken gzip file", "a.jsonl.gz", gzip.compress(GOOD.encode())[:-9]),
)
ONE_ID_TWICE = '{"id": 1, "text": "x"}\n{"id": "1", "text": "x"}'

CASES = [
    *(
        case
        for says, line in BAD_LINES
        for content in [GOOD.encode() + (line if isinstance(line, bytes) else line.encode())]
        for case in (
            *table(SAMPLE_COMMAND, (says, {"corpus.jsonl": content})),
            *table(ASKED, (says, "questions.jsonl", {"questions.jsonl": content})),
        )
    ),
    *(
        case
        for says, name, content in FILES
        for command in (ASKED, f"{SAMPLE_WITH_MODEL} --corpus")
        for case in table(command, (says, name, {name: content}))
    ),
    *table(SAMPLE_COMMAND, *(
        (says, {"corpus.jsonl": content}) for says, content in (
            ("the id '1' occurs", ONE_ID_TWICE),
            ("has no 'contents' (nearest: 'content')", '{"id": "b", "content": "x"}'),
            ("holds no passages", '{"id": "b", "contents": " \\n"}'),
            ("'text' must be a text", '{"id": "b", "text": ["x", 1]}'),
            ("corpus.jsonl holds no passages", ""),
        )
    )),
    *table(f"{ASKED} questions.jsonl", *(
        (says, {"questions.jsonl": content}) for says, content in (
            ("the id '1' occurs", ONE_ID_TWICE),
            ("no 'question' (nearest: 'qestion')", '{"id": "b", "qestion": "x"}'),
            ("comes with an 'image', and only texts are answered", '{"id": "1", "image": "cat.png"}\n'),
            ("must be a list of texts", '{"id": "b", "question": "x", "answers": [[1]]}'),
            ("the choices must be a list of texts", '{"id": "b", "question": "x", "choices": [{"text": "y"}]}'),
            ("the choices are not JSON", '{"id": "b", "question": "x", "choices": "[\'y\' \'z\']", "answer": 1}'),
            ("line 1: 'D' names no choice", '{"id": "b", "question": "x", "choices": ["y"], "answerKey": "D"}'),
            ("the 'question' must be a text that is not blank", '{"id": "b", "question": " "}'),
            *(
                ("a whole number from 1 to 99", f'{{"id": "b", "question": "x", "hops": {hops}}}')
                for hops in ("0", "true", "1e400")
            ),
            ("questions.jsonl holds no questions", ""),
        )
    )),
    # What is no file, or a folder.
    *table(ASKED,
        ("questions file 'nope.jsonl' was not found", "nope.jsonl"),
        ("'model' has no file of rows (.jsonl,", "model"),
        ("q/b.jsonl, line 1: there is no 'question'", "q",
         {"q/a.jsonl": '{"id": "1", "question": "Who?"}', "q/b.jsonl": '{"id": "2"}'}),
        ("q/b.jsonl, line 1: the id 'a' occurs a second", "q", {"q/a.jsonl": GOOD, "q/b.jsonl": GOOD}),
        (("q.jsonl, line 2: the supporting passage 'dun' is not in", "corpus.jsonl"),
         "q.jsonl retrieval.oracle=true decode.query_policy=question",
         {"q.jsonl": '{"id": "a", "question": "Who?", "supporting_ids": ["emma"]}\n'
                     '{"id": "b", "question": "Where?", "supporting_ids": ["dune", "dun"]}\n'}),
        ("a typed question has an id of q.jsonl", "q.jsonl Who?", {"q.jsonl": '{"id": "q1", "question": "x"}'}),
    ),
    *table(f"{SAMPLE_WITH_MODEL} --corpus",
        ("is a pipe or a device", "pipe", {"pipe": os.mkfifo}),
        ("model has no .txt or .md files", "model", {"model/README.md": lambda path: path.unlink(missing_ok=True)}),
        ("d holds no passages", "d", {"d/a.md": "\n# A\n"}),
        ("d/b.txt: the text is not UTF-8", "d", {"d/a.md": "\n", "d/b.txt": b"\xff"}),
    ),
    # Standard input.
    *(
        BadInputCase(f"{ASKED} -", f"standard input{says}", stdin=stdin)
        for says, stdin in (
            (" holds no questions", b""),
            (", line 2: the line is not JSON", (GOOD + "{oops").encode()),
            (", line 1: the line is not UTF-8", b"Who?\xff\n"),
            (", line 2: the id 'a' occurs", GOOD.encode() * 2),
        )
    ),
    # To be scored.
    *table(SCORED,
        ("q.jsonl: 1 of 1 questions have no golden_answers", {"q.jsonl": GOOD}),
        *(
            (says, {"q.jsonl": json.dumps({"id": "1", "question": "x", "hops": 1} | more)})
            for says, more in (
                ("the label 'all' is the name of another group", {"answer": "y", "all": True}),
                ("have no golden_answers ('1')", {"answer": '{"text": []}'}),
                ("line 1: 'answer' is not JSON", {"answer": "{'text': ['x']}"}),
            )
        ),
    ),
    # Odd, and good.
    BadInputCase(f"{ASKED} -", ('"id": "q1"', '"id": "q2"', "Where?"), exit=0, stdin=b"Who?\n\n Where? \r\n"),
    BadInputCase(SAMPLE_COMMAND, '"evidence": [', exit=0, files={
        "corpus.jsonl": b'\xef\xbb\xbf{"id": "' + b"x" * 10_000 + b'", "text": "Emma", "n": NaN, "d": 1e999}\r\n\r\n'
        b'{"id": "\\u0000\\u001b[31m", "contents": "Emma\\u0000", "title": null, "deep": ' + b"[" * 90 + b"]" * 90
        + b"}"}),
    BadInputCase(f"{ASKED} questions.jsonl", '"id": "[/b]"', exit=0, files={
        "questions.jsonl": json.dumps({"id": "[/b]", "question": "[/nope] $x$", "[/a]": True, "\x1b[2J": True})}),
]  # fmt: skip
