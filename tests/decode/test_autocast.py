"""bfloat16 under autocast, with real numbers, in every way of decoding and of training.

Fake tensors (fake_cuda/) miss some mixtures of dtypes; a CPU refuses them as a GPU does.
"""

from contextlib import nullcontext
from unittest import mock

import numpy as np
import pytest
import torch

from tests.support.cases import first_is_fast
from tests.support.decoding import QUESTIONS
from tests.support.gemma_decoding import QueryHashRetriever, make_gemma_decoder
from tests.support.setup_matrix import (
    force_mixed_rewards,
    make_setup_decoder,
    make_setup_trainer,
    write_setup_checkpoints,
)
from tests.support.tiny_diffusion_gemma import write_tiny_gemma

# Those that mix dtypes in ways of their own.
DECODING = ["shifted", "joint", "parallel windows", "experts", "experts of a block", "blocks, text"]
TRAINING = ["sft", "adapters", "experts", "pretrain", "rl"]
AUTOCAST = torch.autocast("cpu", torch.bfloat16)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_setup_checkpoints(tmp_path_factory.mktemp("checkpoints"))


@pytest.mark.parametrize("way", first_is_fast(DECODING))
def test_the_first_proposals_are_those_of_float32_but_for_rounding(corpus_file, way):
    found = []
    for context in (nullcontext(), AUTOCAST):
        decoder, seen = make_setup_decoder(corpus_file, way), []
        propose = decoder.model_runner.propose

        def note(views, propose=propose, seen=seen):
            seen.append(propose(views)())
            return lambda: seen[-1]

        decoder.model_runner.propose = note
        with context:
            assert not any(rollout.error for rollout in decoder.decode(QUESTIONS))
        found.append(np.concatenate([proposals.confidence for proposals in seen[0]]))
    float32, bfloat16 = found
    assert np.abs(bfloat16 - float32).mean() < 0.02
    assert (float32 != bfloat16).any(), "nothing was computed in bfloat16"


@pytest.mark.slow
def test_a_model_of_uniform_noise_answers(tmp_path, corpus):
    folder = write_tiny_gemma(tmp_path / "gemma")
    decoder = make_gemma_decoder(folder, QueryHashRetriever(corpus, 2), max_new_tokens=24, batch_size=2)
    with AUTOCAST:
        assert not any(rollout.error for rollout in decoder.decode(QUESTIONS))


@pytest.mark.slow
@pytest.mark.parametrize("way", TRAINING)
def test_a_step_is_that_of_float32_but_for_rounding(tmp_path, monkeypatch, folder, way):
    """Loss and gradient of the same rows; in bfloat16 then validation, which decodes, and another step."""
    force_mixed_rewards(monkeypatch)
    found, parts = [], None
    for dtype in ("float32", "bfloat16"):
        trainer, validation = make_setup_trainer(tmp_path / dtype, folder, way, f"train.dtype={dtype}")
        parts = trainer._take_parts() if parts is None else parts
        with mock.patch.object(trainer, "_take_parts", lambda parts=parts: parts):
            metrics = trainer.step()
        found.append((metrics["loss"], metrics["gradient_norm"]))
    assert np.isfinite(list(validation.compute_scores(trainer).values())).all()
    assert np.isfinite(trainer.step()["loss"])
    assert found[1] == pytest.approx(found[0], rel=0.1)
