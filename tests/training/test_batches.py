"""Batches that are made ahead by processes, and travel as bytes."""

import pickle

import numpy as np
import pytest
import torch

from dlm_rag.training.batches import BatchMaker, LossWeights
from dlm_rag.training.losses import MaskedObjective
from dlm_rag.training.trainer import make_in_workers
from tests.training.test_training import examples, micro_denoiser, tokenizer  # noqa: F401


@pytest.mark.parametrize("block", [0, 8])
def test_a_batch_that_has_travelled_has_the_same_loss_and_gradients(examples, block):  # noqa: F811
    denoiser = micro_denoiser(f"model.block_size={block}")
    maker = BatchMaker(denoiser.config, "independent", frozenset({1}))
    batch, found = maker.prepare(examples[:8], LossWeights(end_token=0.15, pointer=0.3)), []
    for part in (batch, pickle.loads(pickle.dumps(batch))):
        denoiser.zero_grad()
        loss, sums = MaskedObjective(denoiser)(part, batch.counts)
        loss.backward()
        slopes = torch.cat([p.grad.flatten() for p in denoiser.parameters()])
        found.append((loss.detach(), torch.stack([*sums.values()]), slopes))
    assert all(torch.equal(one, other) for one, other in zip(*found, strict=True))


def test_workers_give_the_steps_in_order():
    made = [*make_in_workers(lambda step: np.full(3, step), range(4, 11), workers=2)]
    assert [int(array[0]) for array in made] == [*range(4, 11)]
