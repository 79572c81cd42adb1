"""What docs/exactness.md promises on a CPU in float32: which runs are equal to the bit, which in tokens."""

import pytest
import torch
from test_decoder import LAYOUTS, QUESTIONS, make_decoder

from dlm_rag.config import EngineConfig
from dlm_rag.decode.proposer import DenoiserProposer


@pytest.fixture
def decode(corpus_file):
    """Decodes on so many threads; every committed token of every question."""
    before = torch.get_num_threads()

    def invoke(layout, threads=1, pool_gib=1.0, batch_size=3):
        torch.set_num_threads(threads)
        decoder = make_decoder(corpus_file, layout, batch_size=batch_size)
        engine = EngineConfig(pool_gib=pool_gib)
        decoder.proposer = DenoiserProposer(decoder.denoiser, decoder.tokenizer.mask_id, engine)
        rollouts = decoder.decode(QUESTIONS)
        return [[step.committed for step in rollout.steps] for rollout in rollouts]

    yield invoke
    torch.set_num_threads(before)


def flat(decoded):
    return [token for steps in decoded for committed in steps for token in committed]


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_same_run_again_is_equal_to_the_bit(decode, layout, threads):
    assert decode(layout, threads) == decode(layout, threads)


@pytest.mark.parametrize("other", [{"batch_size": 1}, {"threads": 2}, {"pool_gib": 0.0}], ids=str)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_other_batches_threads_and_pools_give_the_same_tokens_to_rounding(decode, layout, other):
    one, two = flat(decode(layout)), flat(decode(layout, **other))
    assert [(t.position, t.token_id) for t in one] == [(t.position, t.token_id) for t in two]
    assert [t.confidence for t in one] == pytest.approx([t.confidence for t in two], abs=1e-5)
    assert [t.log_prob for t in one] == pytest.approx([t.log_prob for t in two], abs=1e-5)
