"""Training on questions made from a corpus: what they are, which evidence they get, what is copied."""

import json
import random
import re
import subprocess
import sys
from dataclasses import replace

import pytest

from dlm_rag import Denoiser
from dlm_rag.config import TrainConfig, load_config
from dlm_rag.errors import CheckpointError, ConfigError, CorpusError, QuestionError
from dlm_rag.model.denoiser_config import DenoiserConfig
from dlm_rag.questions import Question, read_questions
from dlm_rag.retrieval import load_retriever
from dlm_rag.retrieval.corpus import Passage, open_corpus
from dlm_rag.training.data.examples import (
    MIN_COPY_TOKENS,
    CopyIndex,
    ExampleBuilder,
    Pointer,
    sample_passages,
)
from dlm_rag.training.data.question_examples import (
    MAX_UNSUPPORTED_TOKENS,
    QuestionExamples,
    TrainingQuestions,
    generate_corpus_questions,
    target_response,
)
from dlm_rag.training.initial_model import open_initial_model
from tests.support.painters import PAINTERS, TOWNS, painter_sentence
from tests.support.passages import write_jsonl_file
from tests.support.paths import ROOT
from tests.support.tiny_models import tiny_denoiser, tiny_tokenizer
from tests.support.training import build_denoiser, run_train_program
from tests.support.training_data import write_own_data

FAR = "Much was said of it in the papers of that time, for and against, and more was sung of it. "
SHAPE = DenoiserConfig(
    vocab_size=258, mask_token_id=256, evidence_layout="independent", passage_length=160, canvas_length=200,
    max_position_embeddings=600,
)  # fmt: skip


@pytest.fixture
def web(tmp_path):
    """Eight painters, two of each town; every town in a land of its own."""
    named = enumerate(PAINTERS)
    people = [{"id": f"p{n}", "title": name, "contents": painter_sentence(n)} for n, name in named]
    people[0]["contents"] += f" {FAR}Later Ada Brown moved to Penrose in a year of war with a horse."
    towns = [
        {"id": f"t{n}", "title": name, "contents": f"{name} is a town in the land of king {n}."}
        for n, name in enumerate(TOWNS)
    ]
    return write_jsonl_file(tmp_path / "corpus.jsonl", people + towns)


def ask(corpus, shape=SHAPE, hops=3, held_out=0.0):
    return generate_corpus_questions(
        open_corpus(corpus), ExampleBuilder(tiny_tokenizer(), shape), hops, held_out
    )


def test_questions_are_made_from_titles_and_split_by_passages(web):
    made = ask(web, SHAPE, hops=3, held_out=0.5)
    for question in (*made.chains, *made.held_out):
        person, town = question.supporting_ids
        number = int(person[1:])
        said, answer = question.response.split(" ### ")
        lives = f"{PAINTERS[number]} is painter number {number} and lives in {TOWNS[number % 4]}. "
        assert said.startswith(lives)
        assert town == f"t{number % 4}" and (answer,) == question.golden_answers
        assert TOWNS[number % 4] not in question.question and "____" in question.question
    trained = {name for q in (*made.chains, *made.single_passage) for name in q.supporting_ids}
    held = {name for q in made.held_out for name in q.supporting_ids}
    assert made.chains and made.single_passage and held and not trained & held
    assert all(len(q.supporting_ids) == 1 for q in made.single_passage)
    every = ask(web)
    assert len(every.chains) == len(PAINTERS) and not every.held_out
    assert len(made.chains) + len(made.held_out) == len(PAINTERS)


def test_what_stands_where_a_passage_is_cut_is_not_asked(web):
    cut = ask(web)
    longer = replace(SHAPE, passage_length=300, max_position_embeddings=800)
    whole = ask(web, longer)
    assert not [q for q in (*cut.chains, *cut.single_passage) if "horse" in q.response]
    assert [q.supporting_ids for q in whole.chains if "horse" in q.response] == [("p0", "t3")]
    with pytest.raises(CorpusError, match=r"none of its 9 chains .* passage_length=16 "):
        ask(web, replace(SHAPE, passage_length=16))


def test_a_corpus_without_names_says_so(tmp_path):
    towns = [{"id": name, "title": name, "contents": f"{name} is a town of old."} for name in TOWNS]
    corpus = write_jsonl_file(tmp_path / "towns.jsonl", towns)
    with pytest.raises(CorpusError, match="no sentence of a passage names the title of another"):
        ask(corpus)


def test_a_copy_is_the_longest_run_and_short_ones_are_chance():
    facts = [(7, 1, 2, 3, 9), (5, 1, 2, 3, 4, 5, 6)]
    assert CopyIndex(facts).find([1, 2, 3, 4, 5, 8, 1, 2, 9, 1, 2, 3]) == (
        *(Pointer(n, 1, n + 1) for n in range(5)),  # not the first fact, where three agree
        *(Pointer(9 + n, 0, 1 + n) for n in range(3)),
    )
    for ids, where in (([1, 2], facts), ([], facts), ([1, 2, 3], [])):
        assert CopyIndex(where).find(ids) == ()


def test_a_pointer_names_the_token_that_it_points_at():
    rng = random.Random(0)
    for _ in range(200):
        facts = [[rng.randrange(5) for _ in range(rng.randrange(20))] for _ in range(3)]
        ids = [rng.randrange(5) for _ in range(30)]
        found = CopyIndex(facts).find(ids)
        assert all(ids[p.position] == facts[p.fact][p.token] for p in found)
        places = [p.position for p in found]
        assert places == sorted(set(places))
        # What has none is in no run of the facts that is long enough to begin there.
        size = MIN_COPY_TOKENS
        grams = {tuple(f[n : n + size]) for f in facts for n in range(len(f) - size + 1)}
        assert all(tuple(ids[n : n + size]) not in grams for n in set(range(30)) - set(places))


def test_what_is_needed_stays_in_the_evidence():
    found = [Passage(str(n), "", "text") for n in range(7)]
    for seed in range(30):
        kept = sample_passages(random.Random(seed), found, {"5", "6", "missing"}, 3)
        assert len(kept) == len({p.id for p in kept}) == 3 and {"5", "6"} <= {p.id for p in kept}
        assert {p.id for p in sample_passages(random.Random(seed), found, {"1", "2", "3"}, 2)} == {"2", "3"}
    assert len(sample_passages(random.Random(0), found, (), 9)) == 7


def test_half_of_the_rows_are_of_what_the_same_passages_answer(web):
    made = ask(web)
    train = TrainConfig(passage_sets_per_step=6, rows_per_set=4)
    retriever, tokenizer = load_retriever(web, top_k=4), tiny_tokenizer()

    def make_rows():
        return QuestionExamples(made, retriever, ExampleBuilder(tokenizer, SHAPE), train, "")

    rows = make_rows()
    examples = [e for step in range(5) for e in rows.examples(step, range(6), (2, 3))]
    assert len(examples) == 5 * 6 * 4
    main, side = set(), set()
    for n, example in enumerate(examples):
        assert 2 <= len(example.prompt.facts) <= 3
        asked = tokenizer.decode_with_offsets(example.prompt.ids)[0]
        (side if n % 4 >= 2 else main).add(asked)
        texts = [tokenizer.decode_with_offsets(fact)[0] for fact in example.prompt.facts]
        if n % 4 >= 2:  # its one passage is there
            (question,) = {q.id: q for q in made.single_passage if q.question in asked}.values()
            own = next(p for p in open_corpus(web) if p.id == question.supporting_ids[0])
            assert any(own.text[:60] in text for text in texts)
        for pointer in example.pointers:
            assert example.target[pointer.position] == example.prompt.facts[pointer.fact][pointer.token]
    assert not main & side and len(side) > 5
    assert make_rows().examples(3, range(6), (2, 3)) == rows.examples(3, range(6), (2, 3))


@pytest.mark.parametrize("held_out", [0.0, 0.5])
def test_chains_that_the_corpus_does_not_tell(web, held_out):
    """Right by what their two passages say alone, of training passages alone, and the same for a seed."""
    passages = {passage.id: passage for passage in open_corpus(web)}
    made = ask(web, SHAPE, hops=2, held_out=held_out)
    trained = {i for question in (*made.chains, *made.single_passage) for i in question.supporting_ids}
    crossed = 0
    for seed in range(40):
        question, second = made.draw_counterfactual(random.Random(seed))
        assert (question, second) == made.draw_counterfactual(random.Random(seed))
        first = passages[question.supporting_ids[0]]
        own, name = second.id.split("/")
        said, definition = question.response.rpartition(" ### ")[0].split(". ", 1)
        assert f"{said}." in first.contents and f"{said}.".replace(name, "____") in question.question
        assert second.title == name and second.contents.startswith(definition)
        assert definition == f"{name} is {question.golden_answers[0]}."
        assert {first.id, own} <= trained and name in {passage.title for passage in passages.values()}
        crossed += passages[own].title not in second.contents
    assert crossed > 10 or held_out, "of what is to train on, one says what it is"


def test_a_crossed_set_of_passages_has_one_passage_of_that_name(web):
    """Where it is missing, the name is there to be learned, and of what follows the first tokens alone."""
    tokenizer = tiny_tokenizer()
    made = ask(web, hops=2)
    retriever = load_retriever(web, top_k=8)
    train = TrainConfig(passage_sets_per_step=4, rows_per_set=2, counterfactual_share=1.0)
    rows = QuestionExamples(made, retriever, ExampleBuilder(tokenizer, SHAPE), train, "")
    whole, missing = 0, 0
    for example in [e for step in range(4) for e in rows.examples(step, range(8), (8, 8))[::2]]:
        facts = [tokenizer.decode_with_offsets(fact)[0] for fact in example.prompt.facts]
        titles = [fact.partition("\n")[0][4:] for fact in facts]
        assert len(titles) == len({*titles})
        said = tokenizer.decode_with_offsets(example.target)[0]
        first, name = re.match(r"(.*?\. )(.+?) is a town in the land of king", said).groups()
        if name in titles:
            assert example.supervised is None
            whole += 1
            continue
        missing += 1
        told = len(tokenizer.encode(f"{first}{name}"))
        assert all(example.masked[told:]), "no canvas has what nobody has read"
        assert max(example.supervised_positions) < told + MAX_UNSUPPORTED_TOKENS
        assert all(example.masked[place] for place in example.supervised_positions)
        assert {told, told + MAX_UNSUPPORTED_TOKENS - 1} <= {*example.supervised_positions}
    assert whole > missing > 3


def test_a_fresh_denoiser_begins_with_the_layers_of_another(tmp_path, web):
    old = tiny_denoiser()
    old.save_pretrained(tmp_path / "old", eos_token_id=257)
    words = [f"train.init_layers_from={tmp_path / 'old'}", f"data.corpus={web}", "train.vocab_size=300"]
    origin = open_initial_model(load_config(None, words))
    made = build_denoiser(origin).state_dict()
    assert made["embed_tokens.weight"].shape == (300, 32)
    same = [name for name, value in old.state_dict().items() if made[name].equal(value)]
    assert {name.partition(".")[0] for name in same} >= {"layers", "norm"}
    assert {*old.state_dict()} - {*same} == {"embed_tokens.weight", "lm_head.weight"}
    ids = origin.tokenizer.encode("Ada of Żory")
    assert origin.tokenizer.decode_with_offsets(ids)[0].strip() == "Ada of Żory"
    for idle in ("lora_rank", "hidden_size"):
        with pytest.raises(ConfigError, match=f"{idle}=64 has no effect"):
            load_config(None, [*words, f"train.{idle}=64"], effects=True)
    with pytest.raises(CheckpointError, match="nowhere"):
        open_initial_model(load_config(None, ["train.init_layers_from=nowhere"]))


@pytest.mark.slow
def test_the_way_from_a_corpus_to_answers(tmp_path, web):
    words = [
        f"data.corpus={web}", "retrieval.top_k=4", "decode.max_new_tokens=128", "decode.block_length=8",
        "train.counterfactual_share=0.7", "train.passage_length=128", "train.eval_questions=100",
        "data.held_out=0.4", "train.max_steps=4", "train.eval_steps=4", "train.save_steps=4",
        "train.passage_sets_per_step=2", "train.rows_per_set=2", "train.vocab_size=300", "energy=none",
        "train.hidden_size=64", "train.num_hidden_layers=2",
    ]  # fmt: skip
    done = run_train_program(tmp_path / "run", *words)
    assert done.returncode == 0, done.stderr
    *_, last = map(json.loads, (tmp_path / "run" / "metrics.jsonl").read_text().splitlines())
    assert {"exact_match", "exact_match_2_hops", "name_accuracy", "nelbo_per_token"} <= {*last}
    model = tmp_path / "run" / "model"
    assert Denoiser.from_pretrained(model).config.vocab_size == 300
    ask = [sys.executable, "sample.py", "What is Marwick?", "--model", str(model), "--corpus", str(web)]
    done = subprocess.run(ask, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0 and json.loads(done.stdout)["question"] == "What is Marwick?", done.stderr


def test_own_questions_become_what_decoding_sees(tmp_path):
    folder = write_own_data(tmp_path)
    questions = read_questions(folder / "questions.jsonl")
    retriever = load_retriever(folder / "corpus.jsonl", top_k=2)
    shape = tiny_denoiser(canvas_length=80, evidence_layout="independent").config
    train = TrainConfig(passage_sets_per_step=10, rows_per_set=3)

    def make_batches(asked, shape=shape):
        builder = ExampleBuilder(tiny_tokenizer(), shape)
        return QuestionExamples(TrainingQuestions(asked), retriever, builder, train, "")

    batches = make_batches(questions)
    rows = [row for step in range(4) for row in batches.examples(step, range(10), (1, 2))]
    assert len(rows) == 120 and all(len(row.prompt.facts) == 2 and any(row.masked) for row in rows)
    seen = {bytes(t for t in row.target if t < 256).decode() for row in rows}
    assert seen == {target_response(q)[:80] for q in questions}, "every question once an epoch"
    assert batches.examples(2, [3], (1, 2)) == batches.examples(2, range(10), (1, 2))[9:12]
    with pytest.raises(QuestionError, match=r"'x'.* neither 'response' nor 'golden_answers'"):
        make_batches([Question("x", "Why?")])
    with pytest.raises(QuestionError, match="35 tokens, more than the canvas of 20: set decode.max_new"):
        make_batches(questions[11:], replace(shape, canvas_length=20))
