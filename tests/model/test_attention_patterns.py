"""Families with attention patterns of their own: toys with a sliding window, and with prefix and causal."""

from dataclasses import replace

import pytest
import torch

from dlm_rag import Denoiser
from dlm_rag.config import DecodeConfig
from dlm_rag.decode.decoder import Decoder
from dlm_rag.errors import CheckpointError, ConfigError
from dlm_rag.model import attention
from dlm_rag.model.checkpoint import open_checkpoint, save_tensors
from dlm_rag.model.families import FAMILIES
from dlm_rag.model.families.base import (
    Family,
    prefix_causal,
    read_transformers_config,
    sliding_window,
    to_transformers_name,
)
from dlm_rag.model.packed_batch import Segment, pack_rows
from dlm_rag.questions import Question
from dlm_rag.retrieval import load_retriever
from tests.support.attention import by_the_book, random_rows
from tests.support.family_checkpoints import change
from tests.support.tiny_models import tiny_tokenizer

CPU, WINDOW, LAYERS = torch.device("cpu"), 6, 3


# What the file of a family consists of. In families/, one line of `FAMILIES` names it.
def toy_family(*patterns):
    def read_config(raw):
        return read_transformers_config(raw, shifted=False, attention_patterns=patterns)

    return Family(read_config, to_transformers_name)


TOYS = {
    "toy_sliding": toy_family(sliding_window(WINDOW), None, sliding_window(WINDOW)),
    "toy_prefix_causal": toy_family(*[prefix_causal] * LAYERS),
}


def allowed_pairs(name, length, prompt):
    """Who sees whom, layer by layer, by the definitions; (length, length) bool each."""
    window = [[abs(i - j) < WINDOW for j in range(length)] for i in range(length)]
    causal = [[j < prompt or j <= i for j in range(length)] for i in range(length)]
    everybody = [[True] * length] * length
    layers = [window, everybody, window] if name == "toy_sliding" else [causal] * LAYERS
    return torch.tensor(layers)


@pytest.fixture(params=TOYS)
def toy(request, tmp_path, monkeypatch):
    """The name, a folder, and the model of transformers whose weights are in it, in float64."""
    import transformers

    monkeypatch.setitem(FAMILIES, request.param, TOYS[request.param])
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=258, hidden_size=32, intermediate_size=48, num_hidden_layers=LAYERS,
        num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=512, mask_token_id=256,
        attn_implementation="eager",
    )  # fmt: skip
    model = transformers.LlamaForCausalLM(config).double().eval()
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    model.save_pretrained(tmp_path / "toy")
    change(tmp_path / "toy", model_type=request.param)
    return request.param, tmp_path / "toy", model


def reference_logits(model, name, ids, prompt):
    """The logits of transformers' model, each layer under its own dense mask."""
    allowed = allowed_pairs(name, len(ids), prompt)
    masks = torch.zeros(allowed.shape, dtype=torch.float64).masked_fill(~allowed, -torch.inf)[:, None, None]
    hooks = [
        layer.self_attn.register_forward_pre_hook(
            lambda _, args, kwargs, mask=mask: (args, kwargs | {"attention_mask": mask}), with_kwargs=True
        )
        for layer, mask in zip(model.model.layers, masks, strict=True)
    ]
    logits = model(torch.tensor([ids]), attention_mask=masks[0]).logits[0]
    for hook in hooks:
        hook.remove()
    return logits


@pytest.mark.parametrize("read", [False, True], ids=["all", "some"])
def test_logits_and_gradients_equal_a_dense_reference(toy, read):
    name, folder, model = toy
    denoiser = Denoiser.from_pretrained(folder, dtype=torch.float64)
    lengths, prompts = (14, 14, 9), (5, 0, 8)
    segments = [
        Segment(tuple(range(10 * n, 10 * n + length)), 0, prompt_length=prompt)
        for n, (length, prompt) in enumerate(zip(lengths, prompts, strict=True))
    ]
    kept = [range(2, n, 3) if read else range(n) for n in lengths]
    hidden, _ = denoiser.encode(pack_rows(segments, CPU, kept if read else None))
    theirs = torch.cat([
        reference_logits(model, name, segment.ids, segment.prompt_length)[list(places)]
        for segment, places in zip(segments, kept, strict=True)
    ])  # fmt: skip
    ours = denoiser.compute_token_logits(hidden)
    torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=1e-6)
    ours.square().sum().backward()
    theirs.square().sum().backward()
    expected = model.model.layers[0].self_attn.k_proj.weight.grad
    torch.testing.assert_close(
        denoiser.layers[0].self_attn.k_proj.weight.grad, expected, rtol=1e-5, atol=1e-5
    )


def test_a_rectangle_is_a_canvas_without_a_prompt(toy):
    name, folder, model = toy
    denoiser, ids = Denoiser.from_pretrained(folder, dtype=torch.float64), list(range(40, 60))
    expected = reference_logits(model, name, ids, 0)
    torch.testing.assert_close(denoiser(torch.tensor([ids]))[0], expected, rtol=1e-6, atol=1e-6)


def test_decoding_sees_what_the_pattern_shows(toy, corpus_file):
    """The first proposals are the reference's; in a batch and alone the same tokens."""
    name, folder, model = toy
    denoiser = Denoiser.from_pretrained(folder)
    retriever, questions = (
        load_retriever(corpus_file, top_k=2),
        [Question("1", "who"), Question("2", "what?")],
    )
    found = []
    for batch_size in (1, 2):
        settings = DecodeConfig(max_new_tokens=12, batch_size=batch_size, commit_threshold=0.5)
        decoder, seen = Decoder(denoiser, retriever, tiny_tokenizer(), settings), []
        propose = decoder.model_runner.propose

        def note(views, seen=seen, propose=propose):
            seen.append(([replace(view, canvas=view.canvas.copy()) for view in views], propose(views)))
            return seen[-1][1]

        decoder.model_runner.propose = note
        rollouts = decoder.decode(questions)
        found.append([[s.committed for s in rollout.steps] for rollout in rollouts])
        (view, *_), (proposals, *_) = seen[0]
        prompt = view.laid_out_prompt.canvas_prefix.ids
        with torch.no_grad():
            logits = reference_logits(model, name, [*prompt, *view.canvas.tolist()], len(prompt))
        best = logits[len(prompt) :].softmax(-1).max(-1)
        assert proposals.token_ids.tolist() == best.indices[view.positions].tolist()
        assert proposals.confidence == pytest.approx(best.values[view.positions].numpy(), abs=1e-5)
    tokens = [[[(c.position, c.token_id) for s in r for c in s] for r in rollouts] for rollouts in found]
    assert tokens[0] == tokens[1]


def test_the_pattern_survives_saving_and_needs_the_prompt_in_one_piece(toy, tmp_path, corpus_file):
    folder = toy[1]
    checkpoint = open_checkpoint(folder)
    tensors = dict(checkpoint.iterate_tensors(CPU, torch.float32))
    save_tensors(tensors, checkpoint.config, tmp_path / "again", {}, checkpoint)
    assert (
        open_checkpoint(tmp_path / "again").config.attention_patterns
        == checkpoint.config.attention_patterns
    )
    with pytest.raises(CheckpointError, match="attention_patterns"):
        open_checkpoint(folder, block_size=4)
    retriever = load_retriever(corpus_file, top_k=2)
    denoiser = Denoiser.from_pretrained(checkpoint)
    with pytest.raises(ConfigError, match="evidence_layout=joint"):
        decoder = Decoder(denoiser, retriever, tiny_tokenizer(), DecodeConfig(max_new_tokens=8), "prefix")
        decoder.decode([Question("1", "who")])


@pytest.mark.filterwarnings("ignore:.*without torch.compile")
@pytest.mark.parametrize(
    "pattern", [None, sliding_window(3), prefix_causal], ids=["blocks", "window", "prefix"]
)
def test_the_mask_of_flex_attention_is_the_dense_one(monkeypatch, pattern):
    """What a GPU takes, here as torch's uncompiled reference; against the formula, in float64."""
    lengths, prompt = (150, 150, 7, 1), 4
    rows = [Segment((1,) * n, 0, block=None if pattern else 3, prompt_length=prompt) for n in lengths]
    packed = pack_rows(rows, CPU, [range(0, n, 2) for n in lengths])
    q, k, v = random_rows(lengths, lengths, width=16)
    q = q[packed.output_indices]
    sight, taken = packed.last_layer_metadata, []
    dense = attention.compute_attention(q, k, v, sight, "sdpa", pattern)

    def attend_as_on_a_gpu(q, k, v, rule, masks, name):
        taken.append(attention.build_flex_mask(rule, q, k))
        return attention.attend_flex(q, k, v, taken[-1])

    monkeypatch.setattr(attention, "attend_masked", attend_as_on_a_gpu)
    with torch.no_grad():
        flex = attention.compute_attention(q, k, v, replace(sight), "sdpa", pattern)
    torch.testing.assert_close(flex, dense)
    assert len(taken) == (3 if pattern else 2), "rows of equal lengths are one call"

    def sees(i, j):
        return (
            j // 3 <= i // 3 if pattern is None else pattern(*map(torch.tensor, (i, j, int(j >= prompt))))
        )

    expected, queries = [], q.split([len(range(0, n, 2)) for n in lengths])
    for n, row_q, row_k, row_v in zip(lengths, queries, k.split(lengths), v.split(lengths), strict=True):
        allowed = torch.tensor([[bool(sees(i, j)) for j in range(n)] for i in range(0, n, 2)])
        expected.append(by_the_book(row_q.double(), row_k.double(), row_v.double(), allowed=allowed))
    torch.testing.assert_close(dense.double(), torch.cat(expected), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("width", [8, 32])
def test_a_gpu_never_computes_grouped_heads_under_a_mask_with_sdpa(monkeypatch, width):
    """Where FlexAttention has heads of that width it is taken; else each head gets keys of its own."""
    calls = []

    class OnGpu(torch.Tensor):
        is_cuda = True

    monkeypatch.setattr(attention, "build_flex_mask", lambda *_: "mask")
    monkeypatch.setattr(attention, "attend_flex", lambda q, k, v, mask: calls.append(mask) or q)
    monkeypatch.setattr(
        attention.F, "scaled_dot_product_attention",
        lambda q, k, v, mask, enable_gqa: calls.append((k.shape[1], enable_gqa)) or q,
    )  # fmt: skip
    q, k, v = torch.zeros(1, 4, 5, width).as_subclass(OnGpu), *torch.zeros(2, 1, 2, 5, width)
    attention.attend_masked(q, k, v, lambda row, head, i, j: j <= i, {}, "rule")
    assert calls == (["mask"] if width == 32 else [(4, False)])
