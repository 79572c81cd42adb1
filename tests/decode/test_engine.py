"""The engine: questions come and go between steps, each with settings of its own."""

import random
import time
from contextlib import suppress

import pytest
import torch

from dlm_rag.config import DecodeConfig, EngineConfig
from dlm_rag.engine.runner import MaskedModelRunner
from dlm_rag.questions import Question
from tests.support.decoding import QUESTIONS, make_decoder, rollout_record, rollout_records

ASKED = [Question(f"id{n}", text) for n, text in enumerate(QUESTIONS)]


def run(engine):
    """Steps until nothing is in flight; finished rollouts by ticket."""
    found = {}
    while engine.busy:
        found |= {event.ticket: event.rollout for event in engine.step() if event.finished}
    return found


@pytest.mark.parametrize("overlap", ["none", "pipeline"])
def test_a_row_cancelled_in_mid_flight_leaves_no_trace_in_any_other(corpus_file, overlap):
    settings = {"batch_size": 3, "overlap": overlap, "commit_threshold": 1.0, "early_stopping": False}
    decoder = make_decoder(corpus_file, "independent", **settings)
    expected = {r.id: rollout_record(r) for r in decoder.stream(ASKED)}
    with decoder.new_engine() as engine:
        tickets = [engine.submit(question) for question in ASKED]
        engine.step()
        engine.step()
        engine.cancel(tickets[1])
        assert engine.capacity == 1
        engine.submit(Question("late", QUESTIONS[0]))
        found = {r.id: r for r in run(engine).values()}
        assert engine.capacity == 3
        with pytest.raises(KeyError, match="not in flight"):
            engine.cancel(tickets[1])
    assert {name: rollout_record(found[name]) for name in ("id0", "id2")} == {
        name: expected[name] for name in ("id0", "id2")
    }
    assert rollout_record(found["late"]) == expected["id0"] and "id1" not in found
    assert not decoder.model_runner.cache._chains


@pytest.mark.parametrize("overlap", ["none", "pipeline"])
def test_a_stream_that_is_left_early_leaves_nothing_behind(corpus_file, overlap):
    settings = {"commit_threshold": 1.0, "batch_size": 2, "overlap": overlap}
    expected = rollout_records(make_decoder(corpus_file, "prefix", **settings).decode(QUESTIONS))
    decoder = make_decoder(corpus_file, "prefix", **settings)
    stream = decoder.stream(ASKED)
    next(stream)
    stream.close()
    assert not decoder.model_runner.cache._chains
    assert rollout_records(decoder.decode(QUESTIONS)) == expected


def test_questions_are_taken_as_places_get_free_and_never_before(corpus_file):
    decoder, taken = make_decoder(corpus_file, batch_size=2), []

    def source():
        for n in range(9):
            taken.append(n)
            yield Question(f"{n}", QUESTIONS[0])

    for finished, _ in enumerate(decoder.stream(source()), start=1):
        assert len(taken) <= finished + 2
    assert finished == len(taken) == 9


def raising(function, at):
    """The function, but that call number `at` (from 1) raises; or what it returned does, once called."""
    calls = []

    def check():
        calls.append(1)
        if len(calls) == at:
            raise RuntimeError("no memory")

    def flaky(*given):
        check()
        wait = function(*given)
        return lambda: (check(), wait())[1]

    return flaky


def steps_on(engine, most=500):
    """Steps on whatever is raised; the records of what was finished, by id."""
    found = {}
    for _ in range(most):
        if not engine.busy:
            break
        with suppress(RuntimeError, ConnectionError):
            found |= {e.rollout.id: rollout_record(e.rollout) for e in engine.step() if e.finished}
    return found


@pytest.mark.parametrize("temperature", [0.0, 0.8])
@pytest.mark.parametrize("overlap", ["none", "pipeline"])
def test_a_step_that_raises_gives_nobody_a_wrong_answer(corpus_file, overlap, temperature):
    way = {"batch_size": 4, "overlap": overlap, "commit_threshold": 0.5, "temperature": temperature}
    decoder = make_decoder(corpus_file, "independent", **way)
    expected = {r.id: rollout_record(r) for r in decoder.stream(ASKED)}
    function, wrong = decoder.model_runner.propose, []
    for at in range(1, 24):
        decoder.model_runner.propose = raising(function, at)
        with decoder.new_engine() as engine:
            for question in ASKED:
                engine.submit(question)
            found = steps_on(engine)
            if engine.busy:
                wrong.append(f"call {at}: still busy after 500 steps")
            wrong += [f"call {at}: {name}" for name in found if found[name] != expected[name]]
    assert not wrong


def test_one_half_of_a_batch_is_launched_before_the_other_is_waited_for(corpus_file):
    decoder = make_decoder(corpus_file, batch_size=2, overlap="pipeline", early_stopping=False)
    propose, order = decoder.model_runner.propose, []

    def note(inputs):
        wait, row = propose(inputs), inputs[0].row
        order.append(("launch", row))
        return lambda: (order.append(("wait", row)), wait())[1]

    decoder.model_runner.propose = note
    decoder.decode(["Who wrote Emma?"] * 2)
    launches, waits = order[1:-1:2], order[2:-1:2]
    assert {kind for kind, _ in launches} == {"launch"} and {kind for kind, _ in waits} == {"wait"}
    assert all(launched != waited for (_, launched), (_, waited) in zip(launches, waits, strict=True))


@pytest.mark.parametrize("overlap", ["none", "pipeline"])
def test_a_row_that_the_memory_does_not_hold_ends_alone(corpus_file, overlap):
    decoder = make_decoder(corpus_file, "joint", batch_size=4, overlap=overlap)
    expected = {r.id: rollout_record(r) for r in decoder.stream(ASKED)}
    function, large = decoder.model_runner.propose, max(ASKED, key=lambda question: len(question.question))

    def propose(inputs):
        if any(large.question in decoder.tokenizer.inner.decode(shown.chain.ids) for shown in inputs):
            raise torch.OutOfMemoryError("CUDA out of memory")
        return function(inputs)

    decoder.model_runner.propose = propose
    found = {r.id: r for r in decoder.stream(ASKED)}
    assert "out of memory" in found.pop(large.id).error
    assert {name: rollout_record(r) for name, r in found.items()} == {
        name: record for name, record in expected.items() if name != large.id
    }


WAYS = [
    {"max_new_tokens": 12, "commit_threshold": 0.4},
    {"max_new_tokens": 7, "commit_rule": "entropy", "tokens_per_step": 2, "query_policy": "question"},
    {"max_new_tokens": 16, "temperature": 0.8, "seed": 3, "early_stopping": False},
    {"max_new_tokens": 12, "block_length": 4, "retrieval_interval": 2},
    {"max_new_tokens": 30, "query_policy": "feedback"},
    {"max_new_tokens": 11, "query_policy": "two_rounds", "commit_threshold": 0.5},
    {"max_new_tokens": 8, "commit_rule": "margin", "tokens_per_step": 2},
    {"max_new_tokens": 9, "temperature": 1.3, "query_policy": "committed"},
]


def test_every_row_of_a_batch_has_settings_of_its_own(corpus_file):
    """Temperatures, thresholds, rules, canvases, queries: each as in an engine of its own."""
    settings = [{"commit_threshold": 0.9} | way for way in WAYS]
    decoder = make_decoder(corpus_file, "independent", batch_size=len(WAYS))
    with decoder.new_engine() as engine:
        tickets = [engine.submit(ASKED[0], DecodeConfig(**own)) for own in settings]
        together = run(engine)
    for ticket, own in zip(tickets, settings, strict=True):
        (alone,) = make_decoder(corpus_file, "independent", **own).stream(ASKED[:1])
        assert rollout_record(together[ticket]) == rollout_record(alone), own


@pytest.mark.slow
@pytest.mark.parametrize(
    ("layout", "overlap"), [("joint", "pipeline"), ("prefix", "none"), ("independent", "pipeline")]
)
def test_random_traffic_gives_every_question_what_it_gets_alone(corpus_file, layout, overlap):
    """Same ids at the same time, settings of their own, cancellations, a slow search, a pool too small."""
    rng, alone, asked, done = random.Random(1), {}, {}, 0
    settings = [{"commit_threshold": 0.9} | way for way in WAYS]
    for number, way in enumerate(settings):
        one = make_decoder(corpus_file, layout, batch_size=1, overlap=overlap, **way)
        alone |= {(number, r.id): rollout_record(r) for r in one.stream(ASKED)}
    decoder = make_decoder(corpus_file, layout, batch_size=5, overlap=overlap)
    decoder.model_runner = MaskedModelRunner(decoder.denoiser, 256, EngineConfig(prefix_cache_gib=2e-5))
    search = decoder.retriever.search
    decoder.retriever.search = lambda queries: time.sleep(rng.random() * 0.004) or search(queries)
    with decoder.new_engine() as engine:
        for _ in range(200):
            while engine.capacity and rng.random() < 0.6:
                number, question = rng.randrange(len(settings)), rng.choice(ASKED)
                ticket = engine.submit(question, DecodeConfig(**settings[number]))
                asked[ticket] = number, question.id
            flying = [row.ticket for group in engine._groups for row in group]
            if flying and rng.random() < 0.1:
                engine.cancel(rng.choice(flying))
            for event in engine.step():
                if event.finished:
                    done += 1
                    assert rollout_record(event.rollout) == alone[asked[event.ticket]]
    assert done > 10 and engine.capacity == 5
    assert not decoder.model_runner.cache._chains
