"""Log-likelihoods: against transformers, all orders in which a text can be written, and chance."""

import itertools
import math

import numpy as np
import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM, Qwen2Config, Qwen2ForCausalLM

from dlm_rag import Denoiser
from dlm_rag.config.sections import LikelihoodConfig
from dlm_rag.errors import ConfigError, QuestionError
from dlm_rag.evaluation.likelihood import choose_masks, estimate_log_likelihoods
from tests.support.block_attention import BLOCK, MASK, block_denoiser
from tests.support.tiny_models import tiny_denoiser, write_autoregressive_checkpoint

CONTEXT = [*b"who was "]  # two blocks of 4


def score(denoiser, *pairs, keys=None, **settings):
    found = estimate_log_likelihoods(denoiser, pairs, LikelihoodConfig(**settings), keys)
    return found if len(found) > 1 else found[0]


def mean_over_orders(denoiser, context, target, block=None):
    """The bound by its other definition, and by the plain forward pass: the mean over all orders in which
    each block can be written token by token, of the sum of the tokens' log-probabilities.
    """
    total, shape = 0.0, denoiser.config
    bounds = [(0, len(target))] if block is None else cut_into_blocks(len(context), len(target), block)
    for begin, end in bounds:
        whole = 0  # where a block may end with the text, as Tiny-A2D's may, it does
        if block and (shape.block_grid == "prompt" or shape.causal_context):
            whole = begin + block - (len(context) + begin) % block
        places, known = [*range(begin, end)], []
        if block and shape.predicts_next_block and (len(context) + begin) % block == 0:
            known = places[:1]
        orders = [[*known, *rest] for rest in itertools.permutations(places[len(known) :])]
        for order in orders:
            canvas = [*target[:begin], *[MASK] * (max(end, whole) - begin)]
            for place in order:
                with torch.no_grad():
                    logits = denoiser(torch.tensor([[*context, *canvas]]))
                found = logits[0, len(context) + place].log_softmax(-1)[target[place]]
                total += float(found) / len(orders)
                canvas[place] = target[place]
    return total


def cut_into_blocks(before, length, block):
    """The parts of a continuation in the blocks that are counted from the first token of the context."""
    cuts = [n for n in range(1, length) if (before + n) % block == 0]
    return list(itertools.pairwise([0, *cuts, length]))


MODELS = {
    "LLaDA's kind": ({}, None),
    "Dream's kind": ({"shifted": True}, None),
    "SDAR's kind": ({"block_size": BLOCK, "block_grid": "prompt"}, BLOCK),
    "Fast-dLLM's kind": ({"block_size": BLOCK, "block_grid": "prompt", "shifted": True}, BLOCK),
    "Tiny-A2D's kind": ({"block_size": BLOCK}, BLOCK),
    "causal in place": ({"block_size": 1, "block_grid": "prompt"}, 1),
    "Nemotron's kind": ({"block_size": BLOCK, "causal_context": True}, BLOCK),
}


CASES = [  # of whole attention the plain forward pass has no prompt that sees itself alone
    (kind, length, layout)
    for kind, (_, block) in MODELS.items()
    for length in ((1, 3, 4, 6) if block else (1, 2, 3, 4))
    for layout in (("joint", "prefix") if block else ("joint",))
]


@pytest.mark.parametrize(("kind", "length", "layout"), CASES)
def test_all_masks_are_the_mean_over_all_orders(kind, length, layout):
    shape, block = MODELS[kind]
    denoiser, target = tiny_denoiser(**shape, evidence_layout=layout), [*b"Austen"[:length]]
    contexts = [CONTEXT] if shape.get("block_grid") is None and block else [CONTEXT, CONTEXT[:-1]]
    for context in contexts:
        found = score(denoiser, (context, target), samples=2**7)
        expected = mean_over_orders(denoiser, context, target, block)
        assert found.nats == pytest.approx(expected, rel=1e-4, abs=1e-4)
        assert found.exact or (length > 1 and block != 1)


@pytest.mark.parametrize(
    ("config", "kind"), [(Qwen2Config, Qwen2ForCausalLM), (LlamaConfig, LlamaForCausalLM)]
)
def test_an_autoregressive_checkpoint_has_the_log_likelihood_of_transformers(tmp_path, config, kind):
    folder, model = write_autoregressive_checkpoint(tmp_path / "model", config, kind)
    pairs = [(CONTEXT, [*b"Jane Austen"]), ([*b"Q"], [*b"A"]), (CONTEXT, [*b"nobody at all"])]
    for (context, target), found in zip(
        pairs, score(Denoiser.from_pretrained(folder), *pairs), strict=True
    ):
        with torch.no_grad():
            logits = model(torch.tensor([[*context, *target]])).logits[0, len(context) - 1 : -1]
        expected = logits.log_softmax(-1)[range(len(target)), target].sum()
        assert found.nats == pytest.approx(float(expected), abs=1e-4)
        assert found.exact
        assert found.greedy == (logits.argmax(-1).tolist() == target)


def test_a_model_of_both_kinds_is_exact_from_left_to_right():
    denoiser, target = block_denoiser(causal_context=True), [*b"Jane Austen"]
    with torch.no_grad():
        logits = denoiser(torch.tensor([[*CONTEXT, *target, 0]]), block=1)[0, len(CONTEXT) : -1]
    expected = logits.log_softmax(-1)[range(len(target)), target].sum()
    found = score(denoiser, (CONTEXT, target), mode="autoregressive")
    assert found.nats == pytest.approx(float(expected), abs=1e-4) and found.exact
    assert not score(denoiser, (CONTEXT, target)).exact


@pytest.mark.parametrize("length", [5, 9, 40])
def test_masks_by_lot_weigh_what_all_masks_weigh(length):
    """Whatever is summed over masked positions: here an own value for each, and a price for each pair."""
    values = np.random.default_rng(0).normal(size=(length, length))

    def total(drawn):
        return sum(weight * (mask @ values @ mask) for mask, weight in drawn)

    # E[L / l * sum] over l uniform and masks: singles count 1, pairs (l - 1) / (L - 1), 1 / 2 in the mean.
    expected = np.trace(values) + (values.sum() - np.trace(values)) / 2
    every = [*choose_masks(min(length, 9), 2**9, ())]
    assert all(mask.any() for mask, _ in every) and len({mask.tobytes() for mask, _ in every}) == len(every)
    if length <= 9:
        assert total(every) == pytest.approx(expected)
    found = [total(choose_masks(length, 16, (seed,))) for seed in range(2000)]
    assert np.mean(found) == pytest.approx(expected, abs=4 * np.std(found) / math.sqrt(len(found)))


def test_what_is_drawn_depends_on_seed_and_key_alone():
    denoiser, pair, other = tiny_denoiser(), (CONTEXT, [*b"Jane Austen"]), (CONTEXT[1:], [*b"Emma"])
    alone = score(denoiser, pair, samples=16)
    for batch_size in (1, 5, 64):
        _, found, again = score(denoiser, other, pair, pair, samples=16, batch_size=batch_size)
        assert found.nats == pytest.approx(again.nats, rel=1e-6)
        assert found.nats == pytest.approx(alone.nats, rel=1e-5)
    assert score(denoiser, pair, samples=16, seed=1).nats != pytest.approx(alone.nats, rel=1e-3)
    assert score(denoiser, pair, samples=16, keys=["other"]).nats != pytest.approx(alone.nats, rel=1e-3)


@pytest.mark.parametrize(
    ("shape", "pair", "settings", "kind"),
    [
        ({}, (CONTEXT, []), {}, QuestionError),
        ({}, (CONTEXT, [65]), {"mode": "autoregressive"}, ConfigError),
        ({}, (CONTEXT, [65]), {"samples": 1}, ConfigError),
    ],
)
def test_what_has_no_log_likelihood_is_refused(shape, pair, settings, kind):
    with pytest.raises(kind):
        score(tiny_denoiser(**shape), pair, **settings)
