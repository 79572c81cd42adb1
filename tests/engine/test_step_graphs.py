"""Steps in the sizes of graphs, the kernel in Triton's interpreter: padding changes nothing."""

import pytest

from tests.support.triton_interpreter import require_kernel

require_kernel()

import dlm_rag
from dlm_rag.engine.runner import round_up_size


def test_sizes_are_few_and_near():
    sizes = [round_up_size(count) for count in range(1, 4097)]
    assert all(size >= count for count, size in enumerate(sizes, 1)) and sizes == sorted(sizes)
    assert len({*sizes}) <= 4 * 10 and all(size <= 1.25 * count for count, size in enumerate(sizes[7:], 8))
    assert {round_up_size(count, 1) for count in range(1, 100)} == {8, 16, 32, 64, 128}


@pytest.mark.slow
@pytest.mark.parametrize("settings", [{}, {"temperature": 1.0, "seed": 1}], ids=["greedy", "sampled"])
@pytest.mark.parametrize("compiled", [False, True])
def test_padded_steps_decode_the_same_tokens_whatever_padding_reads(settings, compiled):
    plain = dlm_rag.load("dlm_rag/shipped/model", top_k=2)
    questions = [f"In which city is {passage.title}?" for passage in plain.retriever.corpus[:2]]
    before = plain.decode(questions, batch_size=2, **settings)
    engine = {"attn_implementation": "indexed", "cuda_graphs": True, "compile": compiled}
    graphed = dlm_rag.load("dlm_rag/shipped/model", top_k=2, **engine)
    memory = graphed.model_runner.cache.memory
    for layer in range(graphed.denoiser.config.num_hidden_layers):
        memory.layer(layer).fill_(float("nan"))
    work = [decoder.denoiser.flop_count for decoder in (plain, graphed)]
    after = graphed.decode(questions, batch_size=2, **settings)
    for one, other in zip(before, after, strict=True):
        assert list_commits(one) == list_commits(other)
    graphs, steps = len(graphed.model_runner._graphs._graphs), sum(len(one.steps) for one in after)
    assert 0 < graphs < steps, "sizes come again"
    assert graphed.denoiser.flop_count - work[1] == pytest.approx(plain.denoiser.flop_count)


def list_commits(rollout):
    return [[(token.position, token.token_id) for token in step.committed] for step in rollout.steps]
