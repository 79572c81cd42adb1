"""Rows to train on: sentences and chains of a corpus, traces and their filters, shards and kills."""

import json
import random
import re
import time
from collections import Counter
from dataclasses import replace
from itertools import product

import pytest

from dlm_rag.commands import synthesize
from dlm_rag.commands.prepare_decoder import SHIPPED_FOLDER
from dlm_rag.config import SynthesisConfig, TrainConfig
from dlm_rag.data.synthetic_world import write_world
from dlm_rag.decode.rollout import Rollout
from dlm_rag.errors import QuestionError
from dlm_rag.evaluation.metrics import compute_exact_match
from dlm_rag.files.record_readers import read_records
from dlm_rag.questions import Question, read_questions
from dlm_rag.retrieval import load_retriever
from dlm_rag.retrieval.corpus import Passage
from dlm_rag.synthesis.cloze_questions import (
    GAP_MARK,
    CorpusRowGenerator,
    NameMatcher,
    TitledPassage,
    extract_definition,
    split_sentences,
)
from dlm_rag.synthesis.rows_folder import RowsFolder
from dlm_rag.synthesis.trace_rows import TraceRowGenerator, check_trace
from dlm_rag.text import normalize_answer
from dlm_rag.training.data.examples import ExampleBuilder
from dlm_rag.training.data.question_examples import QuestionExamples
from tests.support.passages import write_jsonl_file
from tests.support.tiny_models import tiny_denoiser, tiny_tokenizer


@pytest.mark.parametrize(
    "sentences",
    [
        ["It was written by J. K. Rowling.", "It sold well."],
        ["It lies in the U.S. state of Ohio.", "It is small."],
        ["She was born c. 1420 (d. 1461. See below) in Ulm.", "Her son, S. P. L. Sørensen, was not."],
        ['He said "No!"', '"Emma" is a novel.', "Was it 3.5 mi long?", "Yes."],
        ["Élan vital is a term. it is not capitalised here."],
        ["She won vs. Spain 3. at home.", "1914 was another year."],
    ],
)
def test_sentences_of_an_encyclopaedia(sentences):
    assert split_sentences("  ".join(sentences)) == sentences


@pytest.mark.parametrize(
    ("name", "sentence", "what", "verb"),
    [
        ("Kasthuri Raja", "Kasthuri Raja is an Indian film director.", "an Indian film director", "is"),
        ("Emma", "Emma (a title (of 1815)) was a novel by Jane Austen.", "a novel by Jane Austen", "was"),
        ("Jean Betts", "Jean Betts, also Betty, is a writer who left.", "a writer", "is"),
        ("Ann Lee", "Ann (born 1 May) Marie Lee was an old nun, best known as Lee.", "an old nun", "was"),
        ("Pupi Avati", "Giuseppe Avati (1938), known as Pupi, is a director.", "a director", "is"),
        ("Jeff Porcaro", "Jeffrey Porcaro was a drummer.", "", ""),  # does not say it of Jeff
        ("Emma", "In Emma (1815) there is a ball.", "", ""),
        ("Emma", "Emma is a (short) one.", "", ""),  # one word is no answer
    ],
)
def test_what_a_definition_says_under_the_name_that_others_know(name, sentence, what, verb):
    says = f"{name} {verb}{sentence.partition(f' {verb}')[2]}" if what else ""
    assert extract_definition(name, sentence) == (what, says)


def titled(*passages):
    return [TitledPassage.from_passage(Passage(f"p{n}", *each)) for n, each in enumerate(passages)]


def test_names_are_found_longest_first_and_words_are_none():
    passages = titled(
        ("New York", "New York is a city."), ("New York City", "New York City is a city too."),
        ("Dune", "The dune is high."), ("Chennai", "Chennai is a city."), ("Emma (novel)", "Emma is one."),
        ("Hot Rod (film)", "Hot Rod is a film."), ("Paris", "Paris is a city."), ("Paris", "Another city."),
        ("film director", "A film director is a person."), ("S. P. L. Sørensen", "He was a chemist."),
    )  # fmt: skip
    names = NameMatcher(passages)
    assert names.count == 5

    def found(text):
        spans = [(text[start:stop], row) for start, stop, row in names.find_names(text)]
        assert [passages[row].name for _, row in spans] == [name for name, _ in spans]
        return [name for name, _ in spans]

    assert found("From New York City, in New York.") == ["New York City", "New York"]
    said = "Dune, Emma and Paris; the film director S. P. L. Sørensen saw Hot Rod."
    assert found(said) == ["S. P. L. Sørensen", "Hot Rod"]
    assert found("SP L Sørensen; S P L Sørensen") == [], "the very string"
    longer = 'New York Times|Old Chennai|Chennai-based|Chennai\'s Port|of "Return to Chennai" he'
    assert not any(map(found, longer.split("|"))), "parts of longer names"
    assert all(map(found, ("The Chennai of old", 'of "Chennai" he', "Chennai's port")))


BOOKS = [
    ("emma", "Emma Woodhouse", "Emma Woodhouse\nEmma Woodhouse is a novel of 1815 by Jane Austen. It was "
     "set in Surrey, not in Kent Hills."),
    ("austen", "Jane Austen", "Jane Austen (1775 - 1817) was an English novelist from Kent Hills. She "
     "wrote of gentry with irony."),
    ("kent", "Kent Hills", "Kent Hills are a range of low hills in England. Jane Austen walked there."),
    ("dune", "Dune Sea", "Dune Sea is a novel of 1965 by Frank Herbert. Frank Herbert was no Jane Austen."),
    ("other", "Other Sea", "Other Sea is a novel of 1965 by Frank Herbert."),
]  # fmt: skip


@pytest.mark.parametrize(
    "unit",
    [
        "A",
        "A'",
        "A. ",
        "Mr. A ",
        "Emma ",
        "Emma-",
        "(",
        ")",
        "((a",
        '"',
        "!",
        "\u00a0",
        "\n",
        "U.S.",
        ", is a ",
    ],
)
def test_no_text_takes_longer_than_its_length(unit):
    """Of 200,000 letters: after a sentence, within one, and as a title."""
    long = unit * (200_000 // len(unit))
    texts = [f"Emma is a novel of note. {long} b c d.", f"Emma {long} is a novel of note. It is."]
    passages = [Passage("emma", "Emma", "Emma is a novel by Jane Austen of some note.")]
    passages += [Passage(f"text{n}", f"Text {n}", text) for n, text in enumerate(texts)]
    passages += [Passage(f"title{n}", long, "Emma is a novel by Jane Austen. It is.") for n in range(2)]
    start = time.process_time()
    rows = CorpusRowGenerator(passages)
    assert [outcome.source for outcome in rows.outcomes(set())] == [p.id for p in passages]
    assert time.process_time() - start < 10, "seconds; where it was quadratic it took minutes"


def rows_of(passages, **settings):
    made = CorpusRowGenerator([Passage(*each) for each in passages], **settings)
    return [row for number in range(len(made)) for row in made.make_rows(number)[0]]


def test_chains_of_a_corpus_by_hand():
    rows = {row["template"]: row for row in rows_of(BOOKS, held_out=0.0) if row["id"].startswith("emma#")}
    two, three, what = (rows[name] for name in ("chain2", "chain3", "what"))
    novel = "Emma Woodhouse is a novel of 1815 by"
    assert two["question"] == f"What is the thing left out here: '{novel} {GAP_MARK}.'?"
    answer = "an English novelist from Kent Hills"
    assert two["response"] == f"{novel} Jane Austen. Jane Austen was {answer}. ### {answer}"
    assert two["supporting_ids"] == ["emma", "austen"] and two["golden_answers"] == [answer]
    assert three["supporting_ids"] == ["emma", "austen", "kent"] and three["hops"] == 3
    assert three["response"].endswith("### a range of low hills in England")
    assert what["question"] == "What is Emma Woodhouse?"
    assert what["response"] == f"{novel} Jane Austen. ### a novel of 1815 by Jane Austen"


def test_what_would_have_two_answers_is_not_asked():
    """Two novels of 1965 are by Frank Herbert: the one name may not be left out, the other may."""

    def asked(said, *more):
        return any(said in row["question"] for row in rows_of([*BOOKS, *more], held_out=0.0))

    emma = f"Emma Woodhouse is a novel of 1815 by {GAP_MARK}."
    assert not asked(f"{GAP_MARK} is a novel of 1965") and asked(
        f"Dune Sea is a novel of 1965 by {GAP_MARK}."
    )
    twin = ("twin", "Twin Peak", "Emma Woodhouse is a novel of 1815 by Lord Byron.")
    assert asked(emma) and not asked(emma, twin)
    other = ("maine", "Kent Hills", "Kent Hills is a town in Maine.")
    assert asked("What is Kent Hills?") and not asked("What is Kent Hills?", other)


def test_every_row_of_a_corpus_is_what_it_says():
    """The gap is unique, the answer stands where it should, and not in the question."""
    rows = rows_of(BOOKS, held_out=0.5)
    check_rows(rows, BOOKS)
    assert len(rows) > 10 and len({row["id"] for row in rows}) == len(rows)


@pytest.mark.slow
def test_chains_of_real_passages(real):
    """Some of each kind, checked against all sentences of the corpus."""
    path = real / "hotpotqa" / "corpus.jsonl"
    passages = [json.loads(line) for line in path.open(encoding="utf-8")]
    triples = [(p["id"], p["title"], p["contents"]) for p in passages]
    rows = rows_of(triples)
    kinds = Counter(row["template"] for row in rows)
    assert kinds["complete"] > 10_000 and kinds["what"] > 1000 and 500 < kinds["chain2"] < 1000
    assert kinds["chain3"] > 10
    rng = random.Random(0)
    for kind in kinds:
        check_rows(rng.sample([row for row in rows if row["template"] == kind], 8), triples)


def check_rows(rows, passages):
    """What holds of every row, recomputed from the passages without any index."""
    sentences = {name: split_sentences(contents) for name, _, contents in passages}
    told = {
        name: [
            re.sub(r" \([^()]*\)$", "", title) + sentence[verb.start() :]
            for sentence in sentences[name]
            for verb in re.finditer(" (?:is|was|are|were) ", sentence)
        ]
        for name, title, _ in passages
    }
    for row in rows:
        answer, ids = row["golden_answers"][0], row["supporting_ids"]
        reasoning, _, said = row["response"].rpartition(" ### ")
        assert said == answer and row["hops"] == len(ids)
        assert f" {normalize_answer(answer)} " not in f" {normalize_answer(row['question'])} "
        assert any(
            reasoning == " ".join(parts) and answer in parts[-1]
            for parts in product(*(sentences[name] + told[name] for name in ids))
        ), "a sentence of each passage, or one from its verb on, in the order of the chain"
        if GAP_MARK in row["question"]:
            before, after = row["question"].partition(": '")[2][:-2].split(GAP_MARK)
            least = len(before + after)
            fitting = [
                name
                for name, every in sentences.items()
                for one in every
                if one.startswith(before) and one.endswith(after) and len(one) > least
            ]
            assert fitting == ids[:1]


def test_no_passage_is_on_both_sides_of_the_split():
    """Chains hold passages of one side; of a web that is one piece each passage is for itself."""
    rng = random.Random(3)
    words = [f"{c}{v}{d}" for c in "BDFGKLMNPRSTVZ" for v in "aeiou" for d in "lnrst"]
    titles = [f"{rng.choice(words)} {rng.choice(words)}" for _ in range(400)]
    passages = [
        (f"p{n}", title, f"{title} is a river of number {n} in {rng.choice(titles)}. It flows by "
         f"{titles[n - 1]} after {n} bends and falls.")
        for n, title in enumerate(titles)
    ]  # fmt: skip
    rows = rows_of(passages, held_out=0.4)
    sides = [
        {i for row in rows if row["held_out"] is side for i in row["supporting_ids"]}
        for side in (True, False)
    ]
    assert not sides[0] & sides[1]
    assert 0.25 < len(sides[0]) / (len(sides[0]) + len(sides[1])) < 0.55
    assert {row["hops"] for row in rows if row["held_out"]} == {1, 2, 3}
    assert not any(row["held_out"] for row in rows_of(passages, held_out=0.0))


def test_rows_of_a_corpus_are_trained_on_as_they_are(tmp_path):
    """From the command to the rows of a step, held-out rows apart."""
    corpus = write_jsonl_file(
        tmp_path / "c.jsonl", [{"id": i, "title": t, "contents": c} for i, t, c in BOOKS]
    )
    synthesize.main(
        ["synthesis.method=corpus", "--corpus", str(corpus), "--out", str(tmp_path / "rows"),
         "synthesis.held_out=0.9"]
    )  # fmt: skip
    made, held_out = (read_questions(tmp_path / "rows" / side) for side in ("", "held_out"))
    every = rows_of(BOOKS, held_out=0.9)
    assert [q.id for q in made] == [row["id"] for row in every if not row["held_out"]]
    assert [q.id for q in held_out] == [row["id"] for row in every if row["held_out"]]
    shape = tiny_denoiser().config
    shape = replace(shape, canvas_length=max(len(q.response or "") for q in made) + 1)
    train = TrainConfig(passage_sets_per_step=2, rows_per_set=2)
    retriever = load_retriever(corpus, top_k=3)
    builder = ExampleBuilder(tiny_tokenizer(), shape)
    rows = QuestionExamples(made, retriever, builder, train, "")
    rows = rows.examples(0, range(2))
    said = {tiny_tokenizer().inner.decode(row.target) for row in rows}
    assert len(rows) == 4 and all(any(text.startswith(q.response) for q in made) for text in said)


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
    """What failed is not decided; a row's support is what the trace cites, in order, each passage once."""
    asked = [ASKED, replace(ASKED, id="wrong", golden_answers=("Paris",)), replace(ASKED, id="failed")]
    rollouts = [replace(trace(WROTE, BORN), id=question.id) for question in reversed(asked)]
    rollouts[0].error = "the search failed"
    decoded = []

    def decode(questions):
        decoded.append([question.id for question in questions])
        return [rollout for rollout in rollouts if rollout.id in decoded[-1]]

    work = TraceRowGenerator(asked, SynthesisConfig(filter="answer"), decode)
    wrong, right = work.outcomes(set())
    assert work.failed == 1 and [each.source for each in work.outcomes({"q"})] == ["wrong"]
    assert decoded == [["q", "wrong", "failed"], ["wrong", "failed"]]
    assert (wrong.place, wrong.rows, wrong.counts) == (1, [], {"left out: not answer": 1})
    (row,) = right.rows
    assert (right.place, right.source, right.counts) == (0, "q", {})
    assert row["supporting_ids"] == ["emma", "austen"] and row["hops"] == 2
    assert row["response"] == f"{WROTE[0]} {BORN[0]} ### Steventon"
    assert row["filters"] == ["answer", "cited", "supported", "linked", "hops"]
    write_jsonl_file(tmp_path / "rows-0.jsonl", [row])
    assert read_questions(tmp_path) == [
        replace(ASKED, supporting_ids=("emma", "austen"), response=row["response"])
    ]


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
    add = RowsFolder.append_outcome

    def stopped(self, outcome):
        decoded.append(outcome.source)
        if len(decoded) == 8:
            raise KeyboardInterrupt
        add(self, outcome)

    monkeypatch.setattr(RowsFolder, "append_outcome", stopped)
    with pytest.raises(KeyboardInterrupt):
        synthesize.main([*words, "--out", str(tmp_path / "b")])
    synthesize.main([*words, "--out", str(tmp_path / "b")])
    assert len(decoded) == len(asked) + 1 and len(set(decoded)) == len(asked)
    assert (tmp_path / "a/rows.jsonl").read_bytes() == (tmp_path / "b/rows.jsonl").read_bytes()
