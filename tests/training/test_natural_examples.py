"""Rows of natural questions: what of a response is learned, and from which evidence."""

import random

import pytest

from dlm_rag.decode.abstention import UNCLEAR, UNKNOWN
from dlm_rag.model.denoiser_config import DenoiserConfig
from dlm_rag.retrieval import load_retriever
from dlm_rag.synthesis.natural_questions import NaturalQuestions
from dlm_rag.training.data.examples import ExampleBuilder
from dlm_rag.training.data.natural_examples import NaturalExamples
from tests.support.passages import write_jsonl_file
from tests.support.tiny_models import tiny_tokenizer

PEOPLE = ("Edwin Marlowe", "Nora Haddon", "Ilse Brandt", "Vera Stanton", "Tom Ashby", "Ada Pennington")
LONG_TITLE = " ".join(f"Harbourlights{n}" for n in range(30))


@pytest.fixture(scope="module", params=["", " (3 May 1901 – 1 June 1961)"])
def rows(request, tmp_path_factory):
    """Rows of films and painters, one of whose titles is longer than a prompt holds.

    Without their dates nobody is known to be a person, so that no name can stand in for another.
    """
    passages = []
    for number, person in enumerate(PEOPLE):
        title = LONG_TITLE if number == 0 else f"Low Water {number}"
        of_film = f"{title} is a drama film directed by {person}. It was released in 193{number}."
        of_person = f"{person}{request.param} was a British painter born in Marwick, Orkney."
        passages += [(title, of_film), (person, of_person)]
    folder = tmp_path_factory.mktemp("natural")
    records = [{"id": f"p{n}", "title": t, "contents": c} for n, (t, c) in enumerate(passages)]
    retriever = load_retriever(write_jsonl_file(folder / "corpus.jsonl", records), top_k=3)
    shape = DenoiserConfig(
        vocab_size=258, mask_token_id=256, evidence_layout="independent", passage_length=120,
        canvas_length=250, max_position_embeddings=600,
    )  # fmt: skip
    builder = ExampleBuilder(tiny_tokenizer(), shape)
    examples = NaturalExamples(
        NaturalQuestions([*retriever.corpus], lambda row: True), retriever, builder, rows=6, steps=100
    )
    moments = [(random.Random(n), n) for n in range(100)]
    return [row for made in examples.examples(moments, (2, 3)) for row in made]


def text_of(ids):
    return bytes(token for token in ids if token < 256).decode()


def test_a_question_that_does_not_fit_makes_no_row(rows):
    assert len(LONG_TITLE) > 600 - 120 - 250
    assert len(rows) > 400 and not any(LONG_TITLE in text_of(row.prompt.ids) for row in rows)


def test_an_answer_is_learned_only_where_a_passage_tells_it(rows):
    known = 0
    for row in rows:
        response = text_of(row.response)
        answer = response.rpartition("### ")[2]
        told = any(answer in text_of(fact) for fact in row.prompt.facts)
        known += told
        if not told and answer not in (UNKNOWN, UNCLEAR):
            assert max(row.supervised_positions) < response.index("### ")
        assert all(row.response[p.position] == row.prompt.facts[p.fact][p.token] for p in row.pointers)
    assert known > len(rows) / 2
