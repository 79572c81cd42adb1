"""Steps in the sizes of graphs: on a GPU as graphs, on a CPU as they are, the kernel interpreted."""

import os
from functools import partial

import numpy as np
import pytest
import torch

from tests.support.triton_interpreter import require_kernel

require_kernel()

import dlm_rag
from dlm_rag.config import EngineConfig
from dlm_rag.engine.cache import KVMemory
from dlm_rag.engine.runner import MaskedModelRunner, StepGraphs, round_up_size
from dlm_rag.evidence.prompt_segments import lay_out_prompt
from dlm_rag.model.packed_batch import MemoryRows, RowInput, Segment, pack_rows
from dlm_rag.tokenizer import Prompt
from tests.support.tiny_models import tiny_denoiser

INTERPRETED = bool(os.environ.get("TRITON_INTERPRET"))
DEVICE = torch.device("cpu" if INTERPRETED else "cuda")
WHERE_THE_KERNEL_RUNS = pytest.mark.slow if INTERPRETED else pytest.mark.gpu


def test_sizes_are_few_and_near():
    sizes = [round_up_size(count) for count in range(1, 4097)]
    assert all(size >= count for count, size in enumerate(sizes, 1)) and sizes == sorted(sizes)
    assert len({*sizes}) <= 4 * 10 and all(size <= 1.25 * count for count, size in enumerate(sizes[7:], 8))
    assert {round_up_size(count, 1) for count in range(1, 100)} == {8, 16, 32, 64, 128}


SAMPLED = {"temperature": 1.0, "seed": 1}


@WHERE_THE_KERNEL_RUNS
@pytest.mark.parametrize(
    ("settings", "overlap"),
    [({}, "none"), ({}, "pipeline"), (SAMPLED, "none")],
    ids=["greedy", "pipeline", "sampled"],
)
@pytest.mark.parametrize("compiled", [False, True])
def test_padded_steps_decode_the_same_tokens_whatever_padding_reads(settings, overlap, compiled):
    load = partial(dlm_rag.load, "dlm_rag/shipped/model", top_k=2, device=DEVICE.type, dtype="float32")
    # On a GPU ours computes products in TF32, which sdpa does not.
    plain = load(attn_implementation="sdpa" if INTERPRETED else "indexed")
    questions = [f"In which city is {passage.title}?" for passage in plain.retriever.corpus[:2]]
    before = plain.decode(questions, batch_size=2, **settings)
    graphed = load(attn_implementation="indexed", cuda_graphs=True, compile=compiled)
    memory = graphed.model_runner.cache.memory
    for layer in range(graphed.denoiser.config.num_hidden_layers):
        memory.layer(layer).fill_(float("nan"))
    work = [decoder.denoiser.flop_count for decoder in (plain, graphed)]
    after = graphed.decode(questions, batch_size=2, overlap=overlap, **settings)
    for one, other in zip(before, after, strict=True):
        assert list_commits(one) == list_commits(other)
    graphs, steps = len(graphed.model_runner._graphs._graphs), sum(len(one.steps) for one in after)
    assert 0 < graphs < steps, "sizes come again"
    if overlap == "none":
        assert graphed.denoiser.flop_count - work[1] == pytest.approx(plain.denoiser.flop_count)


def list_commits(rollout):
    return [[(token.position, token.token_id) for token in step.committed] for step in rollout.steps]


@WHERE_THE_KERNEL_RUNS
def test_graphs_follow_what_changes_or_are_dropped():
    few, many = ((10, 11), (20, 21, 22)), tuple((n, *range(1, 60)) for n in range(4))
    denoiser = tiny_denoiser(head_dim=16, evidence_layout="independent").to(DEVICE)
    denoiser.attention, head = "indexed", denoiser.lm_head
    engines = [EngineConfig(prefix_cache_gib=0.0, cuda_graphs=graphs) for graphs in (False, True)]
    plain, graphed = (MaskedModelRunner(denoiser, 256, engine) for engine in engines)

    def decode(facts, error=1e-4 if INTERPRETED else 1e-2):  # a GPU rounds products to TF32
        for _ in range(2):  # captured, then replayed
            (tokens, sure), (found, found_sure) = (propose_rows(one, facts) for one in (plain, graphed))
            np.testing.assert_array_equal(found, tokens)
            np.testing.assert_allclose(found_sure, sure, rtol=error)
        (graph,) = graphed._graphs._graphs.values()
        return found.tolist(), graph

    tokens, graph = decode(few)
    head.weight.data.neg_()
    others, same = decode(few)
    assert same is graph and others != tokens, "weights that change in place are seen"
    head.weight = torch.nn.Parameter(-head.weight.detach())
    graphed.reset_cache()
    again, graph = decode(few)
    assert graph is not same and again == tokens, "other weights, other graphs"
    assert decode(many)[1] is not graph, "the memory has grown"
    with torch.autocast(DEVICE.type, torch.float16):
        decode(few, 2e-2)
    assert decode(few)[0] == tokens


def propose_rows(runner, facts):
    """Tokens and confidences of rows of other lengths that see these facts."""
    laid = lay_out_prompt(Prompt((1, 2, 3), facts, (4,)), runner.shape, "independent")
    rows = [RowInput(n, laid, np.full(8 + n, 256), np.arange(8 + n)) for n in range(3)]
    found = runner.propose(rows)()
    return [np.concatenate([getattr(own, name) for own in found]) for name in ("token_ids", "confidence")]


SIZES = {"lengths": (40, 40), "seen": (20, 20), "reads": (8, 8), "block": None}
OTHER_SIZES = [  # tokens, the longest row, keys, reads, the longest of these; rows; limits; no memory
    {"lengths": (40, 60)}, {"lengths": (70, 10)}, {"seen": (60, 20)}, {"reads": (8, 16)},
    {"reads": (12, 4)}, {"lengths": (40, *[5] * 8), "seen": (40, *[0] * 8), "reads": (8, *[1] * 8)},
    {"block": 4}, {"seen": None},
]  # fmt: skip


def test_the_key_of_a_graph_holds_what_the_host_knows_of_a_step():
    memory = KVMemory(tiny_denoiser(), budget_bytes=2**20)
    graphs = StepGraphs(memory.denoiser, memory)

    def key_of(lengths, seen, reads, block):
        segments, context = [Segment((7,) * n, 0, block=block) for n in lengths], None
        if seen is not None:
            context = MemoryRows(memory, *(list(map(memory.take, n)) for n in (seen, lengths)), True)
        pack_rows(segments, torch.device("cpu"), [*map(range, reads)], context, send=graphs.send)
        return graphs._sent[0]

    key, *others = (key_of(**SIZES | other) for other in ({}, *OTHER_SIZES))
    assert key == key_of(**SIZES | {"lengths": (41, 39)})
    assert len({key, *others}) == 1 + len(OTHER_SIZES)
