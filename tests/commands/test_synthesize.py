"""Rows to train on: traces and their filters, in the order of their questions whatever was stopped."""

from dataclasses import replace

import pytest

from dlm_rag.commands import synthesize
from dlm_rag.commands.prepare_decoder import SHIPPED_FOLDER
from dlm_rag.commands.synthesize import make_rows
from dlm_rag.data.synthetic_world import write_world
from dlm_rag.decode.rollout import Rollout
from dlm_rag.decode.trace_file import AnswersFile
from dlm_rag.errors import ConfigError, QuestionError
from dlm_rag.files.record_readers import read_records
from dlm_rag.questions import Question, read_questions
from tests.support.passages import write_jsonl_file

WORLD = {
    "emma": "Emma\nIt is a novel. Jane Austen wrote it.",
    "austen": "Jane Austen\nShe came from Steventon. Her work was paper.",
    "dune": "Dune\nIt is a novel. Frank Herbert wrote it.",
    "bare": "a text without a title of its own, which goes on for a while: of Emma and of Jane Austen",
}


def trace(*units, question="Where was the author of Emma born?", answer="Steventon"):
    """A rollout with these sentences, each with the passages it cites and the words that none holds."""
    said = " ".join(text for text, *_ in units)
    citations = [
        {"text": text, "unsupported": list(bare), "passages": [{"id": name} for name in cited]}
        for text, cited, *bare in (*units, (answer, ["austen"]))
    ]
    for unit, kind in zip(citations, ["reasoning"] * len(units) + ["answer"], strict=True):
        unit["kind"] = kind
    return Rollout(
        "q", question, "joint", 9, response=f"{said} ### {answer}", passages=WORLD, citations=citations
    )


WROTE = ("Emma was written by Jane Austen.", ["emma"])
BORN = ("Jane Austen was born in Steventon.", ["austen"])
TACOMA = ("Jane Austen was born in Tacoma.", ["austen"])
ASKED = Question("q", "Where was the author of Emma born?", ("Steventon",), hops=2)


@pytest.mark.parametrize(
    ("rollout", "reason"),
    [
        (trace((*WROTE, "written"), (*BORN, "born")), ""),  # words of the trace's own
        (trace(WROTE, (BORN[0], [])), "not cited"),
        (trace(WROTE, TACOMA, answer="Tacoma"), "not the answer"),
        (trace(answer="Steventon"), "not cited"),  # no sentence
    ],
)  # fmt: skip
def test_what_is_checked_of_a_trace(rollout, reason):
    rows, counts = make_rows([rollout], [ASKED])
    assert counts == ({f"left out: {reason}": 1, "rows": 0} if reason else {"rows": 1})
    assert len(rows) == counts["rows"]


def test_a_kept_trace_is_a_row_that_training_takes(tmp_path):
    asked = [ASKED, *(replace(ASKED, id=name) for name in ("wrong", "failed"))]
    asked[1] = replace(asked[1], golden_answers=("Tacoma",))
    rollouts = [replace(trace(WROTE, BORN), id=question.id) for question in reversed(asked)]
    rollouts[0].error = "the search failed"
    (row,), counts = make_rows(rollouts, asked)
    assert counts == {"rows": 1, "failed": 1, "left out: not the answer": 1}
    assert row["supporting_ids"] == ["emma", "austen"] and row["hops"] == 2
    assert row["response"] == f"{WROTE[0]} {BORN[0]} ### Steventon"
    write_jsonl_file(tmp_path / "rows-0.jsonl", [row])
    assert read_questions(tmp_path) == [
        replace(ASKED, supporting_ids=("emma", "austen"), response=row["response"])
    ]


def keep(texts):
    """The places of the questions whose rows are kept, their traces in the opposite order."""
    asked = [replace(ASKED, id=str(n), question=text) for n, text in enumerate(texts)]
    rollouts = [replace(trace(WROTE, BORN), id=q.id, question=q.question) for q in reversed(asked)]
    return [int(row["id"]) for row in make_rows(rollouts, asked)[0]]


def test_rows_are_in_the_order_of_their_questions_and_equal_ones_are_left_out():
    assert keep(["Who wrote Emma?", "who wrote emma", "Where is it?"]) == [0, 2]


@pytest.mark.parametrize("name", ["rows.jsonl", "rows.json", "traces"])
def test_nothing_is_written_through_a_link(tmp_path, name):
    """As a folder that was handed on may have one."""
    (tmp_path / "rows").mkdir()
    (tmp_path / "rows" / name).symlink_to(tmp_path / "mine")
    with pytest.raises(ConfigError, match=f"{name} is a symbolic link"):
        synthesize.main(["--out", str(tmp_path / "rows")])
    assert not (tmp_path / "mine").exists()


@pytest.mark.slow
def test_rows_of_a_world_that_nobody_saw_are_right_and_enough(tmp_path, monkeypatch):
    """The shipped model on known wordings of a fresh world; the same after a kill of sorts."""
    write_world(tmp_path / "world", 44, "test", 1000, 6)
    every = read_records(tmp_path / "world" / "questions.jsonl", QuestionError)
    asked = [row for _, row in every if not row["held_out_wording"]]
    questions = write_jsonl_file(tmp_path / "questions.jsonl", asked)
    words = ["--questions", str(questions), "--corpus", str(tmp_path / "world" / "corpus.jsonl"),
             "--model", str(SHIPPED_FOLDER / "model"), "decode.batch_size=16"]  # fmt: skip
    synthesize.main([*words, "--out", str(tmp_path / "a")])
    rows = {question.id: question for question in read_questions(tmp_path / "a")}
    gold = {row["id"]: row for row in asked}
    assert len(asked) >= 15 and len(rows) >= 0.4 * len(asked)
    assert sum(row.response == gold[name]["reasoning"] for name, row in rows.items()) >= 0.9 * len(rows)

    decoded = []
    add = AnswersFile.append

    def stopped(self, rollout):
        decoded.append(rollout.id)
        if len(decoded) == 8:
            raise KeyboardInterrupt
        add(self, rollout)

    monkeypatch.setattr(AnswersFile, "append", stopped)
    with pytest.raises(KeyboardInterrupt):
        synthesize.main([*words, "--out", str(tmp_path / "b")])
    synthesize.main([*words, "--out", str(tmp_path / "b")])
    assert len(decoded) == len(asked) + 1 and len(set(decoded)) == len(asked)
    assert (tmp_path / "a/rows.jsonl").read_bytes() == (tmp_path / "b/rows.jsonl").read_bytes()
