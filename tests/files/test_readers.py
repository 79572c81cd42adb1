"""Files in every form that is read, and what is said of those that are not."""

import csv
import gzip
import io
import json
import os
from dataclasses import replace

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from dlm_rag.errors import CorpusError, QuestionError, UserError
from dlm_rag.files import record_readers
from dlm_rag.files.record_readers import read_records
from dlm_rag.questions import Question, read_questions
from dlm_rag.retrieval.corpus import Passage, open_corpus

ROWS = [
    {"_id": "a", "question": "Who?", "answers": {"text": ["x", "y"]}, "contents": 'Said "no",\n\tleft.'},
    {"_id": "b", "question": "Wo?", "answers": {"text": ["ß"]}, "contents": "Zoë\u2028"},
]
QUESTIONS = [Question("a", "Who?", ("x", "y")), Question("b", "Wo?", ("ß",))]
PASSAGES = [Passage(row["_id"], "", row["contents"]) for row in ROWS]


def table(delimiter: str) -> str:
    """The rows as CSV; lists are JSON in a cell."""
    text = io.StringIO()
    writer = csv.writer(text, delimiter=delimiter)
    writer.writerow(ROWS[0])
    for row in ROWS:
        cells = row | {"answers": json.dumps(row["answers"]["text"])}
        writer.writerow(cells.values())
    return text.getvalue()


def parquet() -> bytes:
    pyarrow = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    sink = pyarrow.BufferOutputStream()
    parquet.write_table(pyarrow.Table.from_pylist(ROWS), sink)
    return sink.getvalue().to_pybytes()


FORMS = {
    "r.jsonl": "\n".join(map(json.dumps, ROWS)),
    "lines.json": "\r\n".join(map(json.dumps, ROWS)) + "\r\n",
    "array.json": json.dumps(ROWS),
    "pretty.json": "\ufeff" + json.dumps(ROWS, indent=2, ensure_ascii=False),
    "object.json": json.dumps({"version": 1, "tags": ["a"], "data": ROWS, "more": {}}, indent=1),
    "array.jsonl": json.dumps(ROWS),
    "r.csv": "\ufeff" + table(","),
    "r.tsv": table("\t"),
    "r.parquet": parquet,
    "no-suffix": "\n".join(map(json.dumps, ROWS)),
}


@pytest.mark.parametrize("zipped", ["", ".gz"])
@pytest.mark.parametrize("name", FORMS)
def test_every_form_holds_the_same(name, zipped, tmp_path):
    made = FORMS[name]() if callable(FORMS[name]) else FORMS[name].encode()
    path = tmp_path / f"{name}{zipped}"
    path.write_bytes(gzip.compress(made) if zipped else made)
    assert read_questions(path) == QUESTIONS
    corpus = open_corpus(path)
    assert list(corpus) == PASSAGES
    assert corpus.folder == open_corpus(path).folder, "converted once"


def test_a_document_has_a_bound(tmp_path, monkeypatch):
    path = tmp_path / "q.json"
    path.write_text(json.dumps([{"id": "a", "question": "Who?"}]))
    monkeypatch.setattr(record_readers, "MAX_JSON_BYTES", path.stat().st_size)
    assert [place for place, _ in read_records(path, QuestionError)] == [f"{path}, item 1"]
    monkeypatch.setattr(record_readers, "MAX_JSON_BYTES", path.stat().st_size - 1)
    with pytest.raises(QuestionError, match="make it JSON lines"):
        list(read_records(path, QuestionError))
    monkeypatch.setattr(record_readers, "MAX_UNPACKED_BYTES", 0)
    for name in ("b.jsonl.gz", "b.json.gz", "b.tsv.gz", "b.parquet.gz"):
        (tmp_path / name).write_bytes(gzip.compress(bytes(10**6)))
        with pytest.raises(CorpusError, match=f"{name} unpacks to more than 0 GiB and 100 times its size"):
            open_corpus(tmp_path / name)


def test_a_folder_of_texts_is_cut_into_passages(tmp_path, capsys):
    folder = tmp_path / "notes"
    (folder / "sub").mkdir(parents=True)
    fenced = "```sh\n# no heading\n```\n"
    headed = f"Above.\n\n# First ##\n\n{fenced}Text.\n\n## Long\n"
    (folder / "b.md").write_text(headed + "Ten words. " * 200)
    (folder / "sub" / "a.TXT").write_text("# no markdown")
    (folder / ".hidden.md").write_text("no")
    (folder / "picture.png").write_bytes(b"\x89PNG")
    corpus = open_corpus(folder)
    titles = {"b.md#1": "b", "b.md#2": "First", "b.md#3": "First: Long"}
    assert {p.id: p.title for p in corpus[:3]} == titles and corpus[1].contents == f"{fenced}Text."
    assert corpus[-1] == Passage("sub/a.TXT#1", "a", "# no markdown")
    long = [p for p in corpus if p.title == "First: Long"]
    assert "".join("".join(p.contents for p in long).split()) == "Tenwords." * 200
    assert all(500 <= len(p.contents) <= 700 for p in long[:-1]) and len(long) == 5
    (folder / "b.md").write_bytes("Anew é.".encode("utf-16"))
    assert [p.contents for p in open_corpus(folder)] == ["Anew é.", "# no markdown"]
    (folder / "b.md").write_bytes(b"\xff")
    (folder / "c.md").write_bytes(b"\n# A\n")
    (folder / "d.md").write_bytes("Emma".encode("utf-16-le"))
    os.mkfifo(folder / "p.md")
    for _ in range(2):  # the second time, what was read is remembered
        assert [p.contents for p in open_corpus(folder)] == ["# no markdown"]
        said = "b.md (the text is not UTF-8: save the file as UTF-8 (`iconv -f cp1252 "
        assert f"read 1 file into 1 passage; skipped 5: {said}" in (err := capsys.readouterr().err)
        assert "), c.md (it holds no text), d.md (it holds NUL characters: save" in err
        assert "p.md, pict" in err


def test_an_error_of_a_converted_corpus_names_the_file_that_was_given(tmp_path):
    path = tmp_path / "c.csv"
    path.write_text('id,text\na,"two\nlines"\nb,x\na,y\n')
    with pytest.raises(CorpusError) as error:
        open_corpus(path)
    assert str(error.value) == f"{path}, line 5: the id 'a' occurs a second time"


def test_rows_without_ids_are_numbered(tmp_path):
    path = tmp_path / "q.csv"
    path.write_text(", question\n0,Who?\n\n7,Where?\n")  # as pandas writes them, and a blank
    assert read_questions(path) == [Question("1", "Who?"), Question("2", "Where?")]
    path.with_suffix(".jsonl").write_text('{"text": "Who?"}\n{"text": "Where?"}')
    assert read_questions(path.with_suffix(".jsonl")) == read_questions(path)
    assert [p.id for p in open_corpus(path.with_suffix(".jsonl"), tmp_path)] == ["1", "2"]


@pytest.mark.parametrize("kind", [dict, list])
def test_what_is_not_text_is_no_id(kind, tmp_path):
    for value in (kind(), False, True, "", "\n", 1.0, float("nan"), None):
        (tmp_path / "x.jsonl").write_text(json.dumps({"id": value, "question": "?", "contents": "c"}))
        for read in (read_questions, open_corpus):
            with pytest.raises(UserError, match="line 1: the .* has no 'id'|line 1: .* must be a text"):
                read(tmp_path / "x.jsonl")


# Anything at all: good records, or a sentence that names the file.

MANY = settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
NAMES = st.sampled_from(["x.jsonl", "x.json", "x.csv", "x.tsv", "x.parquet", "x", "x.txt", "x.bin"])


def is_answered(path) -> None:
    """Both readers give good records, or one sentence with the path in it."""
    for read, key in ((read_questions, "question"), (open_corpus, "contents")):
        try:
            found = list(read(path))
        except UserError as error:
            assert str(path) in str(error), str(error)
        else:
            assert found and len({one.id for one in found}) == len(found)
            assert all(one.id.strip() and getattr(one, key).strip() for one in found)
            "".join(one.id + getattr(one, key) for one in found).encode()


@MANY
@given(data=st.binary(max_size=400), name=NAMES, zipped=st.booleans())
def test_any_bytes(data, name, zipped, tmp_path):
    (tmp_path / name).write_bytes(gzip.compress(data) if zipped else data)
    is_answered(tmp_path / name)


@MANY
@given(
    name=st.sampled_from(sorted(FORMS)),
    at=st.floats(0, 1),
    put=st.binary(max_size=3),
    cut=st.integers(0, 9),
)
def test_good_files_mutated(name, at, put, cut, tmp_path):
    made = FORMS[name]() if callable(FORMS[name]) else FORMS[name].encode()
    place = int(at * len(made))
    (tmp_path / name).write_bytes(made[:place] + put + made[place + cut :])
    is_answered(tmp_path / name)


TEXTS = st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=20).filter(str.strip)
WRITTEN = st.lists(
    st.fixed_dictionaries(
        {"id": TEXTS, "question": TEXTS.map("Who {}?".format)},
        optional={"golden_answers": st.lists(TEXTS, max_size=3), "hops": st.integers(1, 99)},
    ),
    min_size=1,
    max_size=4,
    unique_by=lambda row: row["id"],
)


def add_words_of_truth(answers):
    """Answers each once; before one that says a truth value, as tables do, its word."""
    words = {"true": ["yes"], "false": ["no"]}
    return dict.fromkeys(each for text in answers for each in (*words.get(text.strip().lower(), ()), text))


@MANY
@given(rows=WRITTEN, name=st.sampled_from(["x.jsonl", "x.json", "x.csv", "x.tsv"]))
def test_what_is_written_is_what_is_read(rows, name, tmp_path):
    path = tmp_path / name
    if path.suffix in (".csv", ".tsv"):
        with path.open("w", encoding="utf-8", newline="") as file:
            kind = {".csv": "excel", ".tsv": "excel-tab"}[path.suffix]
            writer = csv.DictWriter(file, ["id", "question", "golden_answers", "hops"], dialect=kind)
            writer.writeheader()
            lists = ({**row, "golden_answers": json.dumps(row.get("golden_answers", []))} for row in rows)
            writer.writerows(lists)
    else:
        path.write_text("\n".join(map(json.dumps, rows)) if name == "x.jsonl" else json.dumps(rows))
    expected = [
        Question(row["id"], row["question"], tuple(row["golden"]), hops=row.get("hops"))
        for row in [{**row, "golden": add_words_of_truth(row.get("golden_answers", ()))} for row in rows]
    ]
    read = read_questions(path)
    for ours, theirs in zip(read, expected, strict=True):
        # Behind the answers stand those as a model reads them.
        given = len(theirs.golden_answers)
        assert replace(ours, golden_answers=ours.golden_answers[:given]) == theirs
