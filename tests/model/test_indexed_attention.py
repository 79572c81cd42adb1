"""Attention through an index, in Triton's interpreter: against float64, alone and in a batch."""

from itertools import accumulate

import pytest
import torch

from tests.support.triton_interpreter import require_kernel

require_kernel()

import dlm_rag
from dlm_rag.model.indexed_attention import attend_by_index

# The last rows have nothing: they fill up a graph.
QUERIES, KEYS = [7, 0, 70, 1, 20, 0], [50, 0, 130, 3, 65, 0]


def ends_of(lengths):
    return torch.tensor([0, *accumulate(lengths)], dtype=torch.int32)


@pytest.mark.parametrize("counted", [False, True])
@pytest.mark.parametrize(("heads", "key_heads", "width"), [(4, 2, 32), (9, 3, 64), (4, 4, 24)])
@pytest.mark.parametrize(("dtype", "error"), [(torch.float32, 2e-5), (torch.float16, 3e-3)])
def test_rows_attend_to_the_places_that_are_theirs(heads, key_heads, width, dtype, error, counted):
    torch.manual_seed(0)
    memory = torch.randn(2, 400, key_heads, width).to(dtype)
    q = torch.randn(sum(QUERIES) + 11, heads, width).to(dtype)  # 11 tokens of no row
    index = torch.randint(0, 400, (sum(KEYS) + 40,), dtype=torch.int32)
    ends, key_ends = ends_of(QUERIES), ends_of(KEYS)
    counts = None
    if counted:
        most = torch.repeat_interleave(torch.tensor(KEYS), torch.tensor(QUERIES))
        counts = torch.cat(((torch.rand(len(most)) * most).long() + 1, torch.zeros(11, dtype=torch.long)))
    found = attend_by_index(q, *memory, index, (ends, key_ends), 80, counts)
    assert not found[sum(QUERIES) :].any()
    for row, (n, m) in enumerate(zip(QUERIES, KEYS, strict=True)):
        own, seen = slice(ends[row], ends[row + 1]), index[key_ends[row] : key_ends[row + 1]].long()
        if not n:
            continue
        k, v = (part[seen].double().repeat_interleave(heads // key_heads, 1) for part in memory)
        scores = torch.einsum("qhd,khd->hqk", q[own].double(), k) / width**0.5
        if counts is not None:
            scores = scores.masked_fill(torch.arange(m) >= counts[own, None], float("-inf"))
        right = torch.einsum("hqk,khd->qhd", scores.softmax(-1), v)
        assert (found[own].double() - right).norm() < error * right.norm()
        one, own_counts = (ends_of([n]), ends_of([m])), None if counts is None else counts[own]
        alone = attend_by_index(q[own], *memory, seen.int(), one, n, own_counts)
        assert torch.equal(alone, found[own]), "a row is the same alone and in a batch"


@pytest.mark.slow
def test_a_model_decodes_the_same_tokens_through_the_index():
    decoder = dlm_rag.load("dlm_rag/shipped/model", top_k=2)
    titles = [passage.title for passage in decoder.retriever.corpus[:2]]
    questions = [f"In which city is {title}?" for title in titles]
    before = decoder.decode(questions, batch_size=2)
    decoder.denoiser.attention = "indexed"
    decoder.model_runner.reset_cache()
    assert decoder.denoiser.backend == "indexed"
    after = decoder.decode(questions, batch_size=2)
    for one, other in zip(before, after, strict=True):
        assert list_commits(one) == list_commits(other)


def list_commits(rollout):
    return [[(token.position, token.token_id) for token in step.committed] for step in rollout.steps]
