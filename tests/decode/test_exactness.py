"""docs/explanation/exactness.md on a CPU in float32: which runs are equal to the bit, which in tokens."""

import pytest
import torch

from dlm_rag.commands.prepare_decoder import SHIPPED_FOLDER, fill_in_shipped_files, prepare_decoder
from dlm_rag.config import EngineConfig, load_config
from dlm_rag.engine.runner import MaskedModelRunner
from dlm_rag.questions import read_questions
from tests.support.cases import first_is_fast
from tests.support.decoding import LAYOUTS, QUESTIONS, make_decoder


@pytest.fixture
def decode(corpus_file):
    """Decodes on so many threads; every committed token of every question."""
    before = torch.get_num_threads()

    def invoke(layout, threads=1, prefix_cache_gib=1.0, batch_size=3):
        torch.set_num_threads(threads)
        decoder = make_decoder(corpus_file, layout, batch_size=batch_size)
        engine = EngineConfig(prefix_cache_gib=prefix_cache_gib)
        decoder.model_runner = MaskedModelRunner(decoder.denoiser, decoder.tokenizer.mask_id, engine)
        rollouts = decoder.decode(QUESTIONS)
        return [[step.committed for step in rollout.steps] for rollout in rollouts]

    yield invoke
    torch.set_num_threads(before)


def flat(decoded):
    return [token for steps in decoded for committed in steps for token in committed]


@pytest.mark.parametrize("threads", first_is_fast([1, 2]))
@pytest.mark.parametrize("layout", first_is_fast(LAYOUTS))
def test_the_same_run_again_is_equal_to_the_bit(decode, layout, threads):
    assert decode(layout, threads) == decode(layout, threads)


@pytest.mark.parametrize("other", [{"batch_size": 1}, {"threads": 2}, {"prefix_cache_gib": 0.0}], ids=str)
@pytest.mark.parametrize("layout", first_is_fast(LAYOUTS))
def test_other_batches_threads_and_pools_give_the_same_tokens_to_rounding(decode, layout, other):
    one, two = flat(decode(layout)), flat(decode(layout, **other))
    assert [(t.position, t.token_id) for t in one] == [(t.position, t.token_id) for t in two]
    assert [t.confidence for t in one] == pytest.approx([t.confidence for t in two], abs=1e-5)
    assert [t.log_prob for t in one] == pytest.approx([t.log_prob for t in two], abs=1e-5)


@pytest.mark.slow
def test_the_shipped_model_answers_with_and_without_a_pool_alike():
    """Prints what docs/explanation/exactness.md says; `-s` shows it."""
    world = SHIPPED_FOLDER / "world"
    asked = [q for q in read_questions(world / "questions.jsonl") if not q.labels][::12]
    decoded = []
    for prefix_cache_gib in (1.0, 0.0):
        settings = [
            f"retrieval.corpus={world / 'corpus.jsonl'}",
            f"engine.prefix_cache_gib={prefix_cache_gib}",
        ]
        config = fill_in_shipped_files(load_config(None, [*settings, "decode.batch_size=16"]), [])
        rollouts = prepare_decoder(config, asked).load().decode(asked)
        decoded.append([flat([[step.committed for step in rollout.steps]]) for rollout in rollouts])
    to_the_bit = sum(one == two for one, two in zip(*decoded, strict=True))
    one, two = ([token for question in found for token in question] for found in decoded)
    assert [(t.position, t.token_id) for t in one] == [(t.position, t.token_id) for t in two]
    apart = max(abs(a.confidence - b.confidence) for a, b in zip(one, two, strict=True))
    print(f"{len(asked)} questions, {to_the_bit} equal to the bit, confidences up to {apart:.1e} apart")
    assert apart < 5e-5, "AVX2 alone comes to 1.7e-5"
