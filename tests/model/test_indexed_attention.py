"""Attention through an index, in Triton's interpreter: against float64, alone and in a batch."""

import os
import subprocess
import sys
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


COMPILE = """
import re, subprocess
from pathlib import Path
import triton.backends.nvidia as nvidia
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, compile
from dlm_rag.model.indexed_attention import BLOCK_KEYS, BLOCK_QUERIES, _attend

def describe(dtype, width):
    constants = {"GROUP": 7, "WIDTH": width, "PADDED_WIDTH": width, "HAS_COUNTS": True,
                 "BLOCK_QUERIES": BLOCK_QUERIES, "BLOCK_KEYS": BLOCK_KEYS}
    types = dict.fromkeys(("queries", "keys", "values", "out"), dtype)
    types |= {"index": "*i64", "query_ends": "*i32", "key_ends": "*i32", "visible_counts": "*i64"}
    types["scale"] = "fp32"
    names = _attend.arg_names
    signature = {name: "constexpr" if name in constants else types.get(name, "i32") for name in names}
    places = [place for place, name in enumerate(names) if name not in constants and name != "scale"]
    given = {(names.index(name),): value for name, value in constants.items()}
    return ASTSource(_attend, signature, given, {(place,): [["tt.divisibility", 16]] for place in places})

built, tool = Path("kernel.cubin"), Path(nvidia.__path__[0]) / "bin" / "cuobjdump"
for capability in (90, 103):
    made = compile(describe("*bf16", 128), target=GPUTarget("cuda", capability, 32))
    built.write_bytes(made.asm["cubin"])
    said = subprocess.run([tool, "-res-usage", built], capture_output=True, text=True, check=True).stdout
    assert re.search(r"STACK:0 ", said), (capability, said)
one = {"num_stages": 1}
for dtype, width, how in (("*bf16", 128, {}), ("*fp32", 128, one), ("*bf16", 256, one)):
    made = compile(describe(dtype, width), target=GPUTarget("cuda", 121, 32), options=how)
    assert made.metadata.shared <= 101_376, (dtype, width, made.metadata.shared)
"""


@pytest.mark.slow
def test_it_compiles_for_hopper_and_blackwell_without_spilled_registers(tmp_path):
    """Compiled, a variable keeps its type; the interpreter does not mind."""
    (tmp_path / "compile_kernel.py").write_text(COMPILE)
    plain = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    plain |= {"PYTHONPATH": os.pathsep.join(sys.path), "TRITON_CACHE_DIR": str(tmp_path / "cache")}
    done = subprocess.run(
        [sys.executable, "compile_kernel.py"],
        cwd=tmp_path, env=plain, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-2000:]


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
