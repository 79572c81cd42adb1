"""A batch that a worker has prepared gives the loss of the same examples, and travels."""

import pickle

import numpy as np
import pytest
import torch

from dlm_rag.training.losses import LossWeights, count_examples
from dlm_rag.training.prepared_batch import make_in_workers, prepare_batch
from tests.training.test_training import examples, micro_denoiser, objective_of, tokenizer  # noqa: F401


@pytest.mark.parametrize("block", [0, 8])
def test_a_prepared_batch_has_the_loss_and_the_gradients_of_its_examples(examples, block):  # noqa: F811
    denoiser, terms = micro_denoiser(f"model.block_size={block}"), LossWeights(end_token=0.15, pointer=0.3)
    rows, objective = examples[:8], objective_of(denoiser)
    counts = count_examples(rows, frozenset({1}), 0.15)
    found = []
    batch = prepare_batch(rows, denoiser.config, "independent", frozenset({1}), 0.15)
    assert batch.counts == counts
    for part in (rows, pickle.loads(pickle.dumps(batch))):
        denoiser.zero_grad()
        loss, sums = objective(part, counts, terms)
        loss.backward()
        slopes = torch.cat([p.grad.flatten() for p in denoiser.parameters()])
        found.append((loss.detach(), torch.stack([*sums.values()]), slopes))
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6)


def test_workers_give_the_steps_in_order():
    made = [*make_in_workers(lambda step: np.full(3, step), range(4, 11), workers=2)]
    assert [int(array[0]) for array in made] == [*range(4, 11)]
