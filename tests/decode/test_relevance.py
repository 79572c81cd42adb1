"""How much likelier the passages make the question, against dense attention under one mask."""

import math
from dataclasses import replace
from unittest.mock import Mock

import numpy as np
import pytest
import torch

from dlm_rag.engine.step import find_differing
from tests.support.attention import run_with_mask
from tests.support.block_attention import LENGTH, make_decoder

QUESTIONS = ["Is Emma or Dune a novel?", "Was Dune by Jane?", "x"]
SHAPE = {"causal_context": True, "shifted": True, "block_grid": "canvas", "canvas_length": LENGTH}
UNSURE = {"commit_rule": "left_to_right", "abstain": "answer", "answer_threshold": 0.5}


def make_reader(corpus_file, **settings):
    decoder = make_decoder(corpus_file, "parallel", shape=SHAPE, **(UNSURE | settings))
    decoder.tokenizer.template = replace(decoder.tokenizer.template, answer="titled")
    return decoder


def mean_log_prob(decoder, passages, question):
    """Of the question's letters but the first: each sees those before it and all of the passages."""
    parts = [decoder.tokenizer.build_prompt(question, [text]).facts[0] for text in passages]
    parts, start = [*parts, (*f"{question}\n".encode(),)], decoder.denoiser.config.passage_length
    ids, owner = np.concatenate(parts), np.repeat(np.arange(len(parts)), [*map(len, parts)])
    at = [n + start * (part is parts[-1]) for part in parts for n in range(len(part))]
    seen = (owner[:, None] == owner) & np.tri(len(ids), dtype=bool)
    seen |= (owner[:, None] == len(passages)) & (owner < len(passages))
    states = run_with_mask(decoder.denoiser, *map(torch.tensor, (ids, at, seen)))
    with torch.no_grad():
        found = decoder.denoiser.compute_token_logits(states).log_softmax(-1)
    return np.mean([float(found[n - 1, ids[n]]) for n in range(len(ids) - len(question), len(ids) - 1)])


@pytest.mark.parametrize("top_k", [1, 2])
def test_it_is_that_of_dense_attention_alone_and_in_a_batch(corpus_file, top_k):
    decoder = make_reader(corpus_file)
    decoder.retriever.top_k = top_k
    for found in (decoder.decode(QUESTIONS, batch_size=size) for size in (1, 3)):
        assert len(found[0].evidence) == top_k
        for rollout in found[:2]:
            read = [rollout.evidence_texts[name] for name in rollout.evidence]
            more, less = (mean_log_prob(decoder, texts, rollout.question) for texts in (read, []))
            assert rollout.relevance == pytest.approx(more - less, abs=1e-4)
        assert found[2].relevance is None  # nothing of its prompt is its own
        assert not decoder.model_runner.cache._chains


@pytest.mark.parametrize("nats", [None, lambda inputs: [math.nan] * len(inputs)])
def test_without_memory_answers_go_without_and_no_number_is_an_error(
    corpus_file, nats, monkeypatch, caplog
):
    decoder = make_reader(corpus_file)
    monkeypatch.setattr(decoder.model_runner, "score", Mock(side_effect=nats or torch.OutOfMemoryError))
    for rollout in decoder.decode(QUESTIONS[:2], batch_size=2):
        assert rollout.finished and rollout.relevance is None and bool(rollout.error) == bool(nats)
    assert ("no memory" in caplog.text) == (nats is None)


@pytest.mark.parametrize("settings", [{"abstain": "never"}, {"answer_threshold": 0.0}])
def test_it_is_not_measured_where_no_answer_is_withheld_for_it(corpus_file, settings):
    assert make_reader(corpus_file, **settings).ask(QUESTIONS[0]).relevance is None


def test_where_a_question_stands_between_what_its_prompts_share():
    assert find_differing([9, 1, 2, 3, 4, 5], [9, 1, 7, 5]).tolist() == [-4, -3, -2]
    assert [find_differing(ids, [9, 1, 7, 5]).tolist() for ids in ([9, 1, 7, 5], [5], [])] == [[]] * 3
