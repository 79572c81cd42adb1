"""The transformer against the public models, and its two ways of running against each other."""

import json
import shutil

import pytest
import torch
from safetensors.torch import load_file

from dlm_rag import Denoiser
from dlm_rag.model.packed_batch import SharedContext
from tests.support.attention import packed
from tests.support.tiny_models import tiny_denoiser

SCALED = {
    "rope_type": "llama3", "rope_theta": 10000.0, "factor": 8.0, "low_freq_factor": 1.0,
    "high_freq_factor": 4.0, "original_max_position_embeddings": 16,
}  # fmt: skip
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16}
REFERENCES = {
    "qwen2": ("Qwen2", {}),
    "qwen3": ("Qwen3", {"head_dim": 12}),
    "llama": ("Llama", {}),
    "llama with scaled rotary positions": ("Llama", {"rope_parameters": SCALED}),
    "qwen3 with positions as its README scales them": ("Qwen3", {"head_dim": 12}),
    "qwen2 with a tied head": ("Qwen2", {"tie_word_embeddings": True}),
}


@pytest.mark.parametrize("name", ["dream", "llada"])
def test_logits_and_hidden_states_equal_the_public_modelling_code(golden, name):
    reference = load_file(golden / f"reference-logits-{name}.safetensors")
    denoiser, seen = Denoiser.from_pretrained(golden / "checkpoints" / f"tiny-{name}"), []
    with torch.no_grad():
        logits, expected = denoiser(reference["input_ids"]), reference["logits"]
        if name == "dream":  # its row i - 1 predicts position i; ours is un-shifted
            logits, expected = logits[:, 1:], expected[:, :-1]
        assert (logits - expected).abs().max() < 1e-4 * expected.std()
        for part in (denoiser.embed_tokens, *denoiser.layers):
            part.register_forward_hook(
                lambda _, __, out: seen.append(out if torch.is_tensor(out) else out[0])
            )
        denoiser(reference["input_ids"][:1])
        seen[-1] = denoiser.norm(seen[-1])
    for hidden, layer in zip(seen, reference["hidden"], strict=True):
        assert (hidden - layer).abs().max() < 1e-4 * layer.std()


@pytest.mark.parametrize("name", REFERENCES)
def test_autoregressive_families_equal_transformers_under_a_causal_mask(tmp_path, name):
    import transformers

    kind, extra = REFERENCES[name]
    torch.manual_seed(0)
    config = getattr(transformers, f"{kind}Config")(
        vocab_size=100, hidden_size=48, intermediate_size=64, num_hidden_layers=3,
        num_attention_heads=6, num_key_value_heads=2, max_position_embeddings=64, **extra,
    )  # fmt: skip
    model = getattr(transformers, f"{kind}ForCausalLM")(config).eval()
    for parameter in model.parameters():  # biases and norms start at 0 and 1, which hides mistakes
        torch.nn.init.normal_(parameter, std=0.3)
    model.save_pretrained(tmp_path, max_shard_size="20KB")
    assert len(list(tmp_path.glob("model-*.safetensors"))) > 1, "this test also covers shards"
    if "README" in name:
        stored = json.loads((tmp_path / "config.json").read_text()) | {"rope_scaling": YARN}
        (tmp_path / "config.json").write_text(json.dumps(stored))
        model = type(model).from_pretrained(tmp_path)
    ids = torch.randint(0, 100, (2, 40))
    with torch.no_grad():
        expected = model(ids).logits
        ours = Denoiser.from_pretrained(tmp_path)(ids, block=1)
    torch.testing.assert_close(ours[:, 1:], expected[:, :-1], rtol=1e-4, atol=1e-4)


def test_only_the_tokens_that_are_read_go_through_the_last_layer():
    denoiser = tiny_denoiser(qk_norm=True)
    lengths = (5, 4, 3)
    ids = torch.arange(12).split(lengths)
    with torch.no_grad():
        _, kept = denoiser.encode(packed(ids), keep=True)
        context = SharedContext(kept, [[range(5, 9)], [range(9, 12)], [range(5)]])
        whole, _ = denoiser.encode(packed(ids, context=context))
        found, _ = denoiser.encode(packed(ids, context=context, read=[(0, 3), (2,), (1,)]))
        torch.testing.assert_close(found, whole[[0, 3, 7, 10]])
        nothing, again = denoiser.encode(packed(ids, read=[()] * 3), keep=True)
    assert nothing.shape == (0, 32)
    torch.testing.assert_close(again, kept)


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("g++") is None, reason="torch.compile needs a C++ compiler on a CPU")
def test_a_few_graphs_serve_all_layers_and_lengths():
    plain, compiled = tiny_denoiser(num_hidden_layers=3), tiny_denoiser(num_hidden_layers=3)
    torch._dynamo.reset()  # graphs of other tests would serve
    compiled.compile_layers()
    compiled.compile_layers()
    assert plain.compilations is None and compiled.compilations == 0
    with torch.inference_mode():
        for lengths in ([7], [3, 9], [5, 2, 6], [30, 31]):
            read = [range(0, length, 2) for length in lengths]
            rows = packed([torch.arange(length) for length in lengths], read=read)
            found, expected = (d.encode(rows)[0] for d in (compiled, plain))
            torch.testing.assert_close(found, expected)
    assert 2 <= compiled.compilations <= 6


def test_a_residual_beyond_float16_keeps_its_tokens_in_float16():
    """Each layer adds 40,000 to one number of the residual, as models of the Qwen2 line do."""
    found, ids = [], torch.arange(40).view(2, 20)
    for dtype in (torch.float32, torch.float16):
        denoiser = tiny_denoiser().to(dtype)
        first = torch.zeros(denoiser.config.hidden_size)
        first[0] = 40_000
        for block in denoiser.layers:
            block.mlp.register_forward_hook(lambda _, given, out, more=first: out + more)
        with torch.inference_mode():
            found.append(denoiser(ids).float())
    assert found[1].isfinite().all() and torch.equal(found[0].argmax(-1), found[1].argmax(-1))
