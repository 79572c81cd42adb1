"""Attention in blocks: what is kept equals its definition as a mask; lookahead commits no other token."""

import numpy as np
import pytest
import torch

from dlm_rag.config import EngineConfig
from dlm_rag.engine.cache import MAX_JOINT_TOKENS
from dlm_rag.engine.runner import MaskedModelRunner
from dlm_rag.errors import ConfigError
from dlm_rag.evidence.encode_segments import encode_canvases
from dlm_rag.evidence.prompt_segments import lay_out_prompt
from dlm_rag.model.packed_batch import RowInput
from dlm_rag.questions import Question
from dlm_rag.tokenizer import Prompt
from tests.support.block_attention import (
    BLOCK,
    FACTS,
    LENGTH,
    MASK,
    block_denoiser,
    dense_reference_states,
    make_decoder,
    top_confidences,
    walk_decode_views,
)
from tests.support.traces import RotatingRetriever

SHAPES = {
    "independent": {"evidence_layout": "independent"},
    "independent, shifted": {"evidence_layout": "independent", "shifted": True},
    "independent, shifted, from the prompt": {
        "evidence_layout": "independent", "shifted": True, "block_grid": "prompt"
    },
    "joint, from the prompt": {"block_grid": "prompt"},
    "joint, from the canvas": {},
    "joint, from the prompt, shifted": {"block_grid": "prompt", "shifted": True},
    "causal": {"block_size": 1},
    "independent, causal context": {"evidence_layout": "independent", "causal_context": True},
    "joint, causal context": {
        "causal_context": True,
        "rope_scaling": {
            "rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 8,
            "llama_4_scaling_beta": 0.3,
        },
    },
    "prefix, causal context": {"evidence_layout": "prefix", "causal_context": True},
}  # fmt: skip
ORDERS = ["recompute", "no_evidence"]
ASKED = [
    Question(str(n), text) for n, text in enumerate(("who", "what is this", "where was it", "why not?"))
]


def check_proposals(denoiser, proposer, view):
    """Against the definition of what a view sees."""
    (found,) = proposer.propose([view])()
    confidence, token = top_confidences(denoiser, dense_reference_states(denoiser, view))
    assert found.token_ids.tolist() == token.tolist()
    assert found.confidence == pytest.approx(confidence.numpy(), abs=2e-6)


@pytest.mark.parametrize(
    ("order", "shape"),
    [(order, shape) for order in ORDERS for shape in SHAPES if order == "recompute" or "indep" in shape],
)
@pytest.mark.parametrize("prefix_cache_gib", [0, 4e-6, 1], ids=["no pool", "a small pool", "pool"])
def test_what_is_kept_equals_the_definition(order, shape, prefix_cache_gib):
    denoiser = block_denoiser(**SHAPES[shape])
    proposer = MaskedModelRunner(denoiser, MASK, EngineConfig(prefix_cache_gib=prefix_cache_gib))
    for seed in range(4):
        for view in walk_decode_views(denoiser.config, order, seed):
            check_proposals(denoiser, proposer, view)
        proposer.release(1)


@pytest.mark.parametrize("order", ORDERS)
def test_training_sees_what_decoding_sees(order):
    denoiser = block_denoiser(evidence_layout="independent", finished_block_context=order)
    for view in walk_decode_views(denoiser.config, order, 7):
        states = [view.laid_out_prompt.build_row(view.canvas.tolist(), view.finished_length, shifted=False)]
        with torch.no_grad():
            hidden, _ = encode_canvases(denoiser, states, [view.positions])
        torch.testing.assert_close(hidden, dense_reference_states(denoiser, view), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("order", ORDERS)
def test_lookahead_changes_no_proposal_of_the_block_under_work(order):
    denoiser = block_denoiser(evidence_layout="independent")
    laid = lay_out_prompt(Prompt((1, 2), FACTS, (3,)), denoiser.config, finished_block_context=order)
    canvas, found = np.full(LENGTH, MASK), []
    canvas[:6] = range(60, 66)
    for slot, looks in enumerate((8, 12, 16)):
        proposer = MaskedModelRunner(denoiser, MASK, EngineConfig())
        view = RowInput(slot, laid, canvas[:looks].copy(), np.arange(6, looks), finished_length=4)
        found.append(proposer.propose([view])()[0])
    for more in found[1:]:
        assert more.token_ids[:2].tolist() == found[0].token_ids.tolist()
        assert more.confidence[:2] == pytest.approx(found[0].confidence, abs=1e-6)


def what_happened(rollouts):
    return [
        [(s.query, s.passage_ids, [(c.position, c.token_id) for c in s.committed]) for s in rollout.steps]
        for rollout in rollouts
    ]


def decode(corpus_file, layout="independent", pool=1.0, shape=None, **settings):
    return what_happened(make_decoder(corpus_file, layout, pool, shape, **settings).decode(ASKED))


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("lookahead", [0, 4, 100])
def test_the_same_tokens_alone_and_in_a_batch_with_and_without_a_pool(corpus_file, order, lookahead):
    settings = {"finished_block_context": order, "query_window": lookahead}
    found = [
        decode(corpus_file, pool=pool, batch_size=size, **settings)
        for size, pool in ((1, 1.0), (4, 1.0), (4, 0.0), (3, 1e-5))
    ]
    assert all(other == found[0] for other in found[1:])
    assert len({len(rollout) for rollout in found[0]}) > 1, "questions that take different numbers of steps"


@pytest.mark.parametrize(
    "shape",
    [{"block_grid": "prompt"}, {"shifted": True, "block_grid": "prompt"}, {}, {"causal_context": True}],
)
@pytest.mark.parametrize("query", ["proxy", "question"])
def test_prompts_in_blocks_give_the_same_tokens_alone_and_in_a_batch(corpus_file, shape, query):
    first, *others = (
        decode(corpus_file, "joint", pool, shape, batch_size=size, query_policy=query)
        for size, pool in ((1, 1.0), (4, 1.0), (4, 0.0))
    )
    assert others == [first, first]


def test_tokens_do_not_depend_on_lookahead_where_the_evidence_does_not(corpus_file):
    first, *others = (decode(corpus_file, query_window=n, query_policy="question") for n in (0, 4, 100))
    assert others == [first, first]


@pytest.mark.parametrize("shape", [{}, {"block_size": None}], ids=["blocks", "whole"])
@pytest.mark.parametrize("prefix_cache_gib", [0, 1])
def test_a_step_is_one_call_of_the_model(corpus_file, monkeypatch, shape, prefix_cache_gib):
    """New passages run in it, too, unless they are too many; which changes no token."""
    found = []
    for scratch in (MAX_JOINT_TOKENS, 0):
        monkeypatch.setattr("dlm_rag.engine.cache.MAX_JOINT_TOKENS", scratch)
        decoder = make_decoder(corpus_file, shape=shape, batch_size=4, prefix_cache_gib=prefix_cache_gib)
        rollouts = decoder.decode(ASKED)
        steps = max(rollout.forwards for rollout in rollouts)
        assert (decoder.denoiser.flop_count.calls == steps) == bool(scratch)
        found.append((what_happened(rollouts), decoder.model_runner.cache_stats))
    assert found[0] == found[1]


@pytest.mark.parametrize("blocks_at_once", [1, 3])
def test_finished_blocks_run_once_where_they_see_text_alone(corpus_file, corpus, blocks_at_once):
    """Every token of the chain runs at most once as finished, whatever becomes of the evidence."""
    ran = {}
    for order in ORDERS:
        settings = {"finished_block_context": order, "blocks_at_once": blocks_at_once}
        decoder = make_decoder(corpus_file, max_new_tokens=40, **settings)
        decoder.retriever = RotatingRetriever(corpus, 2)
        contexts, counted = decoder.model_runner.cache, []
        load = contexts.prepare_rows

        def spy(shown, load=load, counted=counted):
            runs, stored = load(shown)
            finished = shown[0].finished_tokens
            ends = [(r.begin, r.begin + len(r.segment.ids)) for r in runs if r.row is not None]
            counted.append(sum(max(0, min(finished, end) - begin) for begin, end in ends))
            return runs, stored

        contexts.prepare_rows = spy
        rollout = decoder.decode(ASKED[:1])[0]
        assert len({step.passage_ids for step in rollout.steps}) > 2, "the evidence changes on the way"
        ran[order] = sum(counted)
    assert ran["no_evidence"] <= 40 - BLOCK < ran["recompute"]


@pytest.mark.parametrize("layout", ["joint", "prefix"])
def test_an_order_that_a_layout_cannot_have_is_refused(corpus_file, layout):
    with pytest.raises(ConfigError, match="finished_block_context=no_evidence .*evidence_layout=indep"):
        decode(corpus_file, layout, finished_block_context="no_evidence")


@pytest.mark.parametrize("order", ORDERS)
def test_engines_of_one_decoder_do_not_meet_in_a_slot(corpus_file, order):
    decoder = make_decoder(corpus_file, finished_block_context=order, batch_size=1)
    expected = what_happened(decoder.decode(ASKED[:2]))
    engines, found = [decoder.new_engine() for _ in range(2)], {}
    for engine, question in zip(engines, ASKED, strict=False):
        engine.submit(question)
    while any(engine.busy for engine in engines):
        for engine in engines:
            found |= {event.rollout.id: event.rollout for event in engine.step()}
    assert what_happened([found["0"], found["1"]]) == expected


def test_a_call_that_fails_leaves_nothing_behind(corpus_file, monkeypatch):
    """The same views again, after a call that wrote and did not run: as if it had never been made."""
    denoiser = block_denoiser(evidence_layout="independent")
    proposer = MaskedModelRunner(denoiser, MASK, EngineConfig(prefix_cache_gib=1))
    for view in walk_decode_views(denoiser.config, "recompute", 5):
        with monkeypatch.context() as broken, pytest.raises(MemoryError):
            broken.setattr(denoiser, "encode", lambda *_: (_ for _ in ()).throw(MemoryError))
            proposer.propose([view])()
        check_proposals(denoiser, proposer, view)


def test_settings_of_the_checkpoint_count_where_no_others_are_named(corpus_file):
    decoder = make_decoder(corpus_file, shape={"finished_block_context": "no_evidence"})
    assert decoder.config.finished_block_context == "no_evidence"
