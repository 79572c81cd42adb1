"""Rows to train on: traces and their filters, in the order of their questions whatever was stopped."""

from dataclasses import replace

import pytest

from dlm_rag.commands import synthesize
from dlm_rag.commands.prepare_decoder import SHIPPED_FOLDER
from dlm_rag.config import SynthesisConfig
from dlm_rag.data.synthetic_world import write_world
from dlm_rag.decode.answers_file import AnswersFile
from dlm_rag.decode.rollout import Rollout
from dlm_rag.errors import QuestionError
from dlm_rag.evaluation.metrics import compute_exact_match
from dlm_rag.files.record_readers import read_records
from dlm_rag.questions import Question, read_questions
from dlm_rag.synthesis import check_trace, collect_evaluation_ngrams, make_trace_rows
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
DUNE = ("Jane Austen was born in Dune.", ["austen", "dune"])
ASKED = Question("q", "Where was the author of Emma born?", ("Steventon",), hops=2)


@pytest.mark.parametrize(
    ("rollout", "fails"),
    [
        (trace(WROTE, BORN), set()),
        (trace((*WROTE, "written"), (*BORN, "born")), set()),  # words of the trace's own
        (trace(WROTE, (BORN[0], [])), {"cited", "supported", "linked"}),
        (trace((*WROTE, "jane"), BORN), {"supported"}),  # was not in context at the time
        (trace(WROTE, TACOMA, answer="Tacoma"), {"answer", "supported"}),
        (trace(WROTE, DUNE, answer="Dune"), {"answer", "supported"}),
        (trace(WROTE, BORN, answer="paper"), {"answer", "linked"}),  # the passage has it, the sentence not
        (trace(("Dune was written by Frank Herbert.", ["dune"]), BORN), {"linked"}),  # not asked for
        (trace(BORN), {"linked", "hops"}),
        (trace(WROTE, ("Dune is a novel.", ["dune"]), answer="novel"), {"answer", "linked"}),
        (trace(("Emma is of Jane Austen.", ["bare"]), BORN), set()),  # a shared word stands for a title
        (trace(answer="Steventon"), {"cited", "supported", "linked", "hops"}),
    ],
)  # fmt: skip
def test_what_is_checked_of_a_trace(rollout, fails):
    assert {name for name, holds in check_trace(rollout, ASKED).items() if not holds} == fails
    unknown = check_trace(rollout, Question("q", ASKED.question))
    assert {name for name, holds in unknown.items() if not holds} == fails - {"answer", "hops"}


def test_a_kept_trace_is_a_row_that_training_takes(tmp_path):
    asked = [ASKED, *(replace(ASKED, id=name) for name in ("wrong", "failed"))]
    asked[1] = replace(asked[1], golden_answers=("Tacoma",))
    rollouts = [replace(trace(WROTE, BORN), id=question.id) for question in reversed(asked)]
    rollouts[0].error = "the search failed"
    (row,), counts = make_trace_rows(rollouts, asked, SynthesisConfig(filter="answer"), set())
    assert counts == {"rows": 1, "failed": 1, "left out: not answer": 1}
    assert row["supporting_ids"] == ["emma", "austen"] and row["hops"] == 2
    assert row["response"] == f"{WROTE[0]} {BORN[0]} ### Steventon"
    assert row["filters"] == ["answer", "cited", "supported", "linked", "hops"]
    write_jsonl_file(tmp_path / "rows-0.jsonl", [row])
    assert read_questions(tmp_path) == [
        replace(ASKED, supporting_ids=("emma", "austen"), response=row["response"])
    ]


def keep(texts, against=None):
    """The places of the questions whose rows are kept, their traces in the opposite order."""
    asked = [replace(ASKED, id=str(n), question=text) for n, text in enumerate(texts)]
    rollouts = [replace(trace(WROTE, BORN), id=q.id, question=q.question) for q in reversed(asked)]
    evaluated = collect_evaluation_ngrams(against)
    return [int(row["id"]) for row in make_trace_rows(rollouts, asked, SynthesisConfig(), evaluated)[0]]


def test_rows_are_in_the_order_of_their_questions_and_equal_ones_are_left_out():
    assert keep(["Who wrote Emma?", "who wrote emma", "Where is it?"]) == [0, 2]


def test_what_shares_twelve_words_with_an_evaluation_set_is_left_out(tmp_path):
    words = [f"w{n}" for n in range(20)]
    asked = [" ".join(words), "Who wrote Emma?"]
    sets = [
        str(write_jsonl_file(tmp_path / f"{n}.jsonl", [{"id": "q", "question": text}]))
        for n, text in enumerate(asked)
    ]
    shared = [f"so {' '.join(words[5 : 5 + count])}" for count in (12, 11)]
    rows = [*shared, "Tell me: who wrote Emma, please?", "Who wrote Persuasion?"]
    assert keep(rows, ",".join(sets)) == [1, 3]
    assert keep(rows, sets[1]) == [0, 1, 3]


@pytest.mark.slow
def test_traces_without_labels_of_a_world_that_nobody_saw(tmp_path, monkeypatch):
    """The shipped model on known wordings of a fresh world: what is kept is right, and it is enough.

    Twice, the second time after a kill of sorts, the rows are the same; nothing of the answers is used.
    """
    write_world(tmp_path / "world", 44, "test", 1000, 6)
    every = read_records(tmp_path / "world" / "questions.jsonl", QuestionError)
    asked = [row for _, row in every if not row["held_out_wording"]]
    bare = [{"id": row["id"], "question": row["question"]} for row in asked]
    questions = write_jsonl_file(tmp_path / "questions.jsonl", bare)
    words = ["--questions", str(questions), "--corpus", str(tmp_path / "world" / "corpus.jsonl"),
             "--model", str(SHIPPED_FOLDER / "model"), "synthesis.filter=evidence",
             "decode.batch_size=16"]  # fmt: skip
    synthesize.main([*words, "--out", str(tmp_path / "a")])
    rows = {question.id: question for question in read_questions(tmp_path / "a")}
    gold = {row["id"]: row for row in asked}
    right = [
        compute_exact_match(row.golden_answers[0], gold[name]["golden_answers"])
        for name, row in rows.items()
    ]
    assert len(asked) >= 15 and len(rows) >= 0.4 * len(asked)
    assert sum(right) >= 0.95 * len(rows)
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
