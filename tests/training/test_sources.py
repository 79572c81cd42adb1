"""Training on questions of one's own: which evidence they get."""

import random
from dataclasses import replace

import pytest

from dlm_rag.config import TrainConfig
from dlm_rag.errors import QuestionError
from dlm_rag.questions import Question, read_questions
from dlm_rag.retrieval import load_retriever
from dlm_rag.retrieval.corpus import Passage
from dlm_rag.training.batches import ExampleBuilder, sample_passages
from dlm_rag.training.sources import QuestionExamples, check_questions, name_answers, target_response
from tests.support.tiny_models import tiny_denoiser, tiny_tokenizer
from tests.support.training_data import write_own_data


def test_what_is_needed_stays_in_the_evidence():
    found = [Passage(str(n), "", "text") for n in range(7)]
    for seed in range(30):
        kept = sample_passages(random.Random(seed), found, {"5", "6", "missing"}, 3)
        assert len(kept) == len({p.id for p in kept}) == 3 and {"5", "6"} <= {p.id for p in kept}
        assert {p.id for p in sample_passages(random.Random(seed), found, {"1", "2", "3"}, 2)} == {"2", "3"}
    assert len(sample_passages(random.Random(0), found, (), 9)) == 7


def test_own_questions_become_what_decoding_sees(tmp_path):
    folder = write_own_data(tmp_path)
    questions = read_questions(folder / "questions.jsonl")
    retriever = load_retriever(folder / "corpus.jsonl", top_k=2)
    shape = tiny_denoiser(canvas_length=80, evidence_layout="independent").config
    train = TrainConfig(passage_sets_per_step=10, rows_per_set=3)

    batches = QuestionExamples(questions, retriever, ExampleBuilder(tiny_tokenizer(), shape), train)
    rows = [row for step in range(4) for row in batches.examples(step, range(10))]
    assert len(rows) == 120 and all(len(row.prompt.facts) == 2 and any(row.masked) for row in rows)
    seen = {bytes(t for t in row.target if t < 256).decode() for row in rows}
    assert seen == {target_response(q)[:80] for q in questions}, "every question once an epoch"
    assert batches.examples(2, [3]) == batches.examples(2, range(10))[9:12]
    long = (
        " ".join(f"Town {n} lies on a hill." for n in range(40)) + " The composer of Zored is Kelvin Brown."
    )
    prompt = ExampleBuilder(tiny_tokenizer(), shape).build_prompt("Who is the composer of Zored?", [long])
    assert b"Kelvin Brown" in bytes(prompt.facts[0]), "as decoding shows it"


def test_questions_that_cannot_be_trained_on_are_counted(tmp_path):
    questions = read_questions(write_own_data(tmp_path) / "questions.jsonl")
    builder = ExampleBuilder(tiny_tokenizer(), tiny_denoiser(canvas_length=80).config)
    check_questions(questions, builder)
    with pytest.raises(QuestionError, match=r"'x'.* neither 'response' nor 'golden_answers'"):
        check_questions([Question("x", "Why?")], builder)
    with pytest.raises(QuestionError, match=r"'x'.* no 'golden_answers' to reward"):
        check_questions([Question("x", "Why?", response="For it is so. ### so")], builder, rewards=True)
    with pytest.raises(QuestionError, match=r"'x' and 1 others of 2"):
        check_questions([Question(name, "y" * 5000, ("z",)) for name in "xy"], builder, rewards=True)
    lengths = [len(tiny_tokenizer().encode(target_response(question))) + 1 for question in questions]
    long = [question.id for question, length in zip(questions, lengths, strict=True) if length > 20]
    said = rf"'{long[0]}' and {len(long) - 1} others of {len(questions)}: .* \(longest {max(lengths)}\)"
    with pytest.raises(QuestionError, match=f"{said}: set decode.max_new_tokens={max(lengths)}, or drop"):
        check_questions(questions, replace(builder, shape=replace(builder.shape, canvas_length=20)))


def test_a_response_names_its_answer_where_none_is_given():
    assert name_answers(Question("x", "Why?", response="It is so. ### so"), "marked") == ("so",)
    assert name_answers(Question("x", "Why?", ("thus",), response="It is so. ### so"), "marked") == (
        "thus",
    )
    assert name_answers(Question("x", "Why?", response="It is so"), "marked") == ()
