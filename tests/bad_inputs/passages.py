"""Corpora, questions, indexes."""

import gzip
import json
import os
from pathlib import Path
from typing import Any

from tests.bad_inputs import SAMPLE_COMMAND, SAMPLE_WITH_MODEL, SAMPLE_WITHOUT_QUESTION, BadInputCase

GOOD = '{"id": "a", "question": "Who?", "contents": "text"}\n'
ASKED = f"{SAMPLE_WITHOUT_QUESTION} --questions"
DEEP = "[" * 50_000


def corpus(what: str, text: str | bytes, says: str | tuple[str, ...]) -> BadInputCase:
    """A corpus of JSON lines."""
    return BadInputCase(f"a passage: {what}", SAMPLE_COMMAND, says, {"corpus.jsonl": text})


def asked(what: str, text: str | bytes, says: str | tuple[str, ...]) -> BadInputCase:
    """Questions in JSON lines."""
    return BadInputCase(f"a question: {what}", f"{ASKED} questions.jsonl", says, {"questions.jsonl": text})


def form(name: str, text: Any, says: str | tuple[str, ...], what: str = "") -> list[BadInputCase]:
    """A file in another form, as questions and as a corpus."""
    return [
        BadInputCase(f"questions in {name} {what}", f"{ASKED} {name}", says, {name: text}),
        BadInputCase(
            f"a corpus in {name} {what}", f"{SAMPLE_WITH_MODEL} --corpus {name}", says, {name: text}
        ),
    ]


def folder(path: Path) -> None:
    path.mkdir()


def broken_manifest(text: str) -> dict[str, str]:
    return {"index/corpus.json": text}


def two_columns(path: Path) -> None:
    """A table of questions and passages, with two columns of one name."""
    import pyarrow
    from pyarrow import parquet

    columns = {"id": ["a"], "question": ["Who?"], "contents": ["x"], "more": ["y"]}
    table = pyarrow.table(columns).rename_columns(["id", "question", "contents", "contents"])
    parquet.write_table(table, path)


BAD_LINES = {  # what both readers say, of the second line
    "not JSON": ("{oops\n", "line 2: the line is not JSON"),
    "cut short": ('{"id": "b", "question": "x', "line 2: the line is not JSON"),
    "an array": ("[1]\n", "line 2: the line is not a JSON object"),
    "a text": ('"x"\n', "line 2: the line is not a JSON object"),
    "null": ("null\n", "line 2: the line is not a JSON object"),
    "two objects": (GOOD.strip() + GOOD, "line 2: the line is not JSON (Extra data)"),
    "a raw NUL": ('{"id": "b\0"}\n', "line 2: the line is not JSON"),
    "a NUL alone": ("\0\n", "line 2: the line is not JSON"),
    "not UTF-8": (
        b'{"id": "b", "question": "\xff", "contents": "\xff"}\n',
        "line 2: the line is not UTF-8",
    ),
    "UTF-16": (GOOD.encode("utf-16"), "line 2: the line is not UTF-8"),
    "nested deeply": (DEEP + "\n", "that is too"),
    "a nesting that ends": ('{"a": ' + DEEP + "]" * len(DEEP) + "}\n", "that is too"),
    "a number of 5000 digits": ('{"id": ' + "1" * 5000 + "}\n", "that is too"),
    "a key twice": ('{"id": "b", "id": "c"}\n', "the key 'id' occurs a second time"),
    "half a character": ('{"id": "b", "question": "\\ud800", "contents": "\\ud800"}\n', "a lone surrogate"),
    "half a character as id": ('{"id": "\\uDFFF", "question": "x", "contents": "x"}\n', "a lone surrogate"),
    "no id": ('{"question": "x", "contents": "x"}\n', "has no 'id'"),
    "an id that is almost named so": ('{"ids": 1, "question": "x", "contents": "x"}\n', "nearest: 'ids'"),
    "an id that is there": (GOOD, "line 2: the id 'a' occurs a second time"),
    "an id that was there with another name": (GOOD.replace('"id"', '"_id"'), "occurs a second time"),
} | {
    f"the id {value}": (f'{{"id": {value}, "question": "x", "contents": "x"}}\n', "line 2: the ")
    for value in ("{}", "[]", "false", "true", '""', '" "', '"\\n"', "1.0", "1e3", "NaN", "null", "[1]")
}

CASES = [
    *(
        reader(what, text.encode() + line if isinstance(line, bytes) else text + line, says)
        for reader in (corpus, asked)
        for what, (line, says) in BAD_LINES.items()
        for text in [GOOD]
    ),
    BadInputCase("a passage that is not JSON", SAMPLE_COMMAND, "corpus.jsonl, line 1", {"corpus.jsonl": "{oops\n"}),
    corpus("1 and '1' are one id", '{"id": 1, "text": "x"}\n{"id": "1", "text": "x"}', "the id '1' occurs"),
    asked("1 and '1' are one id", '{"id": 1, "text": "x"}\n{"id": "1", "text": "x"}', "the id '1' occurs"),
    corpus("no contents", '{"id": "b", "content": "x"}', "has no 'contents' (nearest: 'content')"),
    corpus("blank contents", '{"id": "b", "contents": " \\n"}', "must be a text that is not empty"),
    corpus("a number as contents", '{"id": "b", "contents": 3}', "must be a text that is not empty"),
    corpus("a list as contents", '{"id": "b", "text": ["x"]}', "'text' must be a text"),
    corpus("false as title", '{"id": "b", "contents": "x", "title": false}', "'title' must be a text"),
    corpus("a list as title", '{"id": "b", "contents": "x", "title": []}', "'title' must be a text"),
    corpus("an id with escape codes twice", '{"id": "\\u001b[2J", "text": "x"}\n' * 2, "occurs a second time"),
    corpus("an empty file", "", "corpus.jsonl holds no passages"),
    corpus("blank lines only", "\n \r\n\t\n", "corpus.jsonl holds no passages"),
    corpus("a byte order mark only", b"\xef\xbb\xbf", "corpus.jsonl"),
    asked("no text", '{"id": "b", "qestion": "x"}', "no 'question' (nearest: 'qestion')"),
    asked("a blank text", '{"id": "b", "question": " "}', "must be a text that is not blank"),
    asked("a number as text", '{"id": "b", "question": 3}', "'question' must be a text"),
    asked("a list as text", '{"id": "b", "question": ["x"]}', "'question' must be a text"),
    asked("a blank response", '{"id": "b", "question": "x", "response": ""}', "the 'response' is no text"),
    asked("lists in answers", '{"id": "b", "question": "x", "answers": [[1]]}', "must be a list of texts"),
    asked("a number as answer", '{"id": "b", "question": "x", "answer": 3.5}', "must be a list of texts"),
    asked("true in answers", '{"id": "b", "question": "x", "answers": [true]}', "must be a list of texts"),
    asked("a list of Python", '{"id": "b", "question": "x", "answer": "[\'a\']"}', "line 1: 'answer'"),
    *(
        asked(f"hops {hops}", f'{{"id": "b", "question": "x", "hops": {hops}}}', "a whole number from 1 to 99")
        for hops in ("0", "-1", "100", "1.5", "true", '"two"', "[2]", "{}", "NaN", "1e400", '""')
    ),
    asked("an empty file", "", "questions.jsonl holds no questions"),
    # What is no file, or in no form that is read.
    BadInputCase("questions that are not there", f"{ASKED} nope.jsonl", "questions file 'nope.jsonl' was not found"),
    BadInputCase("questions that are a folder", f"{ASKED} model", "the folder 'model' has no file of rows (.jsonl,"),
    BadInputCase("a folder of questions with a bad line", f"{ASKED} q", "q/b.jsonl, line 1: there is no 'question'", {
        "q/a.jsonl": '{"id": "1", "question": "Who?"}', "q/b.jsonl": '{"id": "2"}'
    }),
    BadInputCase("a folder that has an id twice", f"{ASKED} q", "q/b.jsonl, line 1: the id '1' occurs a second", {
        "q/a.jsonl": '{"id": "1", "question": "Who?"}', "q/b.jsonl": '{"id": "1", "question": "Who?"}'
    }),
    BadInputCase("a corpus that is a pipe", f"{SAMPLE_WITH_MODEL} --corpus pipe", "is a pipe or a device", {"pipe": os.mkfifo}),
    BadInputCase("a corpus that is a device", f"{SAMPLE_WITH_MODEL} --corpus /dev/null", "is a pipe or a device"),
    BadInputCase("questions that are a device", f"{ASKED} /dev/null", "/dev/null holds no questions"),
    BadInputCase("a folder without texts", f"{SAMPLE_WITH_MODEL} --corpus model", "model is not an index folder", {
        "model/README.md": lambda path: path.unlink(missing_ok=True)}),
    BadInputCase("a folder with blank texts", f"{SAMPLE_WITH_MODEL} --corpus d", "d holds no passages", {"d/a.md": "\n# A\n"}),
    BadInputCase("a folder with a text that is not UTF-8", f"{SAMPLE_WITH_MODEL} --corpus d", "d/b.txt: the text is not UTF-8",
         {"d/a.md": "x", "d/b.txt": b"\xff"}),
    *(
        BadInputCase(f"a manifest: {what}", f"{SAMPLE_WITH_MODEL} --corpus index", "is not an index folder", broken_manifest(text))
        for what, text in {"empty": "", "a list": "[]", "a number": "{\"corpus\": 3}", "null": "null"}.items()
    ),
    *(
        BadInputCase(f"a manifest: {what}", f"{SAMPLE_WITH_MODEL} --corpus index", "is not an index folder", {"index/corpus.json": made})
        for what, made in {
            "a pipe": os.mkfifo, "nested beyond measure": DEEP,
            "without a fingerprint": '{"corpus": "corpus.jsonl", "fingerprint": null}',
        }.items()
    ),
    BadInputCase("a manifest of no corpus", f"{SAMPLE_WITH_MODEL} --corpus index", "the name of a file is empty",
         broken_manifest('{"corpus": "", "fingerprint": ""}')),
    BadInputCase("a manifest of a corpus that went away", f"{SAMPLE_WITH_MODEL} --corpus index", "'gone.jsonl' was not found",
         broken_manifest('{"corpus": "gone.jsonl", "fingerprint": ""}')),
    BadInputCase("a manifest of another corpus", f"{SAMPLE_WITH_MODEL} --corpus index", "has changed since that index",
         broken_manifest('{"corpus": "corpus.jsonl", "fingerprint": ""}')),
    *form("a.xlsx", b"PK\x03\x04", "is not in a format that is read"),
    *form("a.zst", b"\x28\xb5\x2f\xfd", "is not in a format that is read"),
    *form("a.pickle", b"\x80\x04\x95", "is not in a format that is read"),
    *form("a.parquet", b"PAR1", "is not a parquet file", "cut short"),
    *form("a.parquet", b"", "is not a parquet file", "empty"),
    *form("a.parquet", GOOD, "is not a parquet file", "that is JSON"),
    *form("a.parquet", two_columns, "a.parquet: the header has two columns 'contents': rename one", "with a column twice"),
    *form("a.json", "[" + GOOD, "a.json: the file is not JSON", "cut short"),
    *form("a.json", "[" + GOOD + "]]", "a.json: the file is not JSON (Extra data", "with more behind"),
    *form("a.json", "[3]", "item 1 is not a JSON object", "of numbers"),
    *form("a.json", f"[{GOOD},\n{GOOD}]", "item 2: the id 'a' occurs a second time", "with an id twice"),
    *form("a.json", "3", "a.json", "of a number"),
    *form("a.json", "{}", "a.json: the", "of nothing"),
    *form("a.json", "[]", "a.json holds no ", "of an empty list"),
    *form("a.json", f'{{"a": [{GOOD}], "b": [{{}}]}}', "holds 2 lists of objects", "with two lists"),
    *form("a.json", DEEP, "that is too", "nested deeply"),
    *form("a.json", b"[\xff]", "a.json: the file is not UTF-8", "not UTF-8"),
    *form("a.json", '[{"id": 1, "id": 2}]', "the key 'id' occurs a second time", "with a key twice"),
    *form("a.csv", "id,id\n1,2\n", "a.csv, line 1: the header has two columns 'id'", "with a column twice"),
    *form("a.csv", "id,text\n1,x\n2,y,z\n", "a.csv, line 3: the row has more or fewer cells than the header", "too wide"),
    *form("a.csv", 'id,text\n1,"x\n2,y\n', "a.csv, line 2: the row cannot be read", "with an open quote"),
    *form("a.csv", "id;text\n1;x\n", "a.csv, line 2: ", "with semicolons"),
    *form("a.csv", b"id,text\n1,\xff\n", "a.csv, line 2: the line is not UTF-8", "not UTF-8"),
    *form("a.csv", "id,text\n", "a.csv holds no ", "without rows"),
    *form("a.csv", "id,text\n1,x\n1,y\n", "a.csv, line 3: the id '1' occurs a second time", "with an id twice"),
    *form("a.tsv", "id\ttext\n1\t\n", "a.tsv, line 2: ", "with an empty cell"),
    *form("a.jsonl.gz", gzip.compress(GOOD.encode())[:-9], "is a broken gzip file", "cut short"),
    *form("a.jsonl.gz", gzip.compress(GOOD.encode() * 2), "line 2: the id 'a' occurs", "with an id twice"),
    *form("a.jsonl.gz", gzip.compress(GOOD.encode())[:10] + b"\xff" * 40, "is a broken gzip file", "garbled"),
    *form("a.gz", gzip.compress(b"\x1f\x8b"), "a.gz", "zipped twice, and cut"),
    *form("a.csv", b"PK\x03\x04", "a.csv is not in a format that is read", "that is a spreadsheet"),
    *form("a.jsonl", b"BZh91AY", "a.jsonl is not in a format that is read", "in bzip2"),
    *form("a.csv", "id,text\r1,x\r2,y\r", "a.csv, line 1: the row cannot be read", "of an old Mac"),
    *form("a.csv", "id,text\n1,x\n".encode("utf-16"), "is not UTF-8: save the file as UTF-8", "of UTF-16"),
    # Standard input, and what is typed beside a file.
    BadInputCase("nothing on standard input", f"{ASKED} -", "standard input holds no questions"),
    BadInputCase("JSON on standard input that is none", f"{ASKED} -", "standard input, line 2: the line is not JSON",
         stdin=(GOOD + "{oops").encode()),
    BadInputCase("text on standard input that is not UTF-8", f"{ASKED} -", "standard input, line 1: the line is not UTF-8",
         stdin=b"Who?\xff\n"),
    BadInputCase("questions twice on standard input", f"{ASKED} -", "standard input, line 2: the id 'a' occurs",
         stdin=GOOD.encode() * 2),
    BadInputCase("plain questions on standard input", f"{ASKED} -", ('"id": "q1"', '"id": "q2"', "Where?"), exit=0,
         stdin=b"Who?\n\n Where? \r\n"),
    BadInputCase("questions in a pipe", f"{ASKED} /dev/stdin", '"id": "a"', exit=0, stdin=GOOD.encode(),
         env={"CASE": "alone"}, slow=True),
    BadInputCase("a typed question with a taken id", f"{SAMPLE_COMMAND} --questions q.jsonl", "the id 'q1' of a typed question",
         {"q.jsonl": '{"id": "q1", "question": "x"}'}),
    *(
        BadInputCase(f"a label {label!r}", "evaluate --model model --corpus corpus.jsonl --questions q.jsonl --out run",
             f"the label '{label}' is the name of another group", {"q.jsonl": json.dumps(
                 {"id": "1", "question": "x", "answer": "y", "hops": 1, label: True})})
        for label in ("all", "1 hop", "3 hops", "a, b")
    ),
    *(
        BadInputCase(f"the answer {answer!r}, to be scored", "evaluate --model model --corpus corpus.jsonl --questions"
             " q.jsonl --out run", says, {"q.jsonl": json.dumps({"id": "1", "question": "x", "answer": answer})})
        for answer, says in {
            "": "without golden_answers, '1' for one", " ": "'1' for one", "[\" \"]": "'1' for one",
            "{'text': ['x']}": "line 1: 'answer' is not JSON", "{\"text\": []}": "'1' for one",
        }.items()
    ),
    asked("an answer in an object of another form", '{"id": "b", "question": "x", "answer": {"value": "y"}}',
          "must be a list of texts"),
    BadInputCase("questions without answers, to be scored", "evaluate --model model --corpus corpus.jsonl --questions"
         " q.jsonl --out run", "q.jsonl has questions without golden_answers", {"q.jsonl": GOOD}),
    # Odd, and good.
    corpus("an id of 10,000 characters twice", f'{{"id": "{"x" * 10_000}", "text": "y"}}\n' * 2, "occurs a second"),
    BadInputCase("a corpus of odd but good lines", SAMPLE_COMMAND, '"evidence": [', exit=0, files={
        "corpus.jsonl": b'\xef\xbb\xbf{"id": "' + b"x" * 10_000 + b'", "text": "Emma", "n": NaN, "d": 1e999}\r\n\r\n'
        b'{"id": "\\u0000\\u001b[31m", "contents": "Emma\\u0000", "title": null, "deep": ' + b"[" * 90 + b"]" * 90
        + b"}"}),
    BadInputCase("questions with odd labels", f"{ASKED} questions.jsonl", '"id": "[/b]"', exit=0, files={
        "questions.jsonl": json.dumps({"id": "[/b]", "question": "[/nope] $x$", "[/a]": True, "\x1b[2J": True})}),
]  # fmt: skip
