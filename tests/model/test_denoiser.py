"""The transformer against the public models, and its two ways of running against each other."""

import shutil

import pytest
import torch
from safetensors.torch import load_file

from dlm_rag import Denoiser
from dlm_rag.model.kv_store import SharedContext
from dlm_rag.model.packed_batch import Segment, pack_rows
from tests.support.attention import CPU, packed, run_with_mask
from tests.support.tiny_models import tiny_denoiser

REFERENCES = {
    "qwen2": ("Qwen2Config", "Qwen2ForCausalLM", {}),
    "qwen3": ("Qwen3Config", "Qwen3ForCausalLM", {"head_dim": 12}),
    "llama": ("LlamaConfig", "LlamaForCausalLM", {}),
    "llama with scaled rotary positions": (
        "LlamaConfig",
        "LlamaForCausalLM",
        {
            "rope_parameters": {
                "rope_type": "llama3",
                "rope_theta": 10000.0,
                "factor": 8.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 16,
            }
        },
    ),
    "qwen2 with a tied head": ("Qwen2Config", "Qwen2ForCausalLM", {"tie_word_embeddings": True}),
}


@pytest.mark.parametrize("name", ["dream", "llada"])
def test_logits_equal_the_public_modelling_code(golden, name):
    reference = load_file(golden / f"reference-logits-{name}.safetensors")
    denoiser = Denoiser.from_pretrained(golden / "checkpoints" / f"tiny-{name}")
    with torch.no_grad():
        logits = denoiser(reference["input_ids"])
    expected = reference["logits"]
    if name == "dream":  # its row i - 1 predicts position i; ours is un-shifted
        logits, expected = logits[:, 1:], expected[:, :-1]
    assert (logits - expected).abs().max() < 1e-4 * expected.std()


@pytest.mark.parametrize("name", ["dream", "llada"])
def test_hidden_states_equal_layer_by_layer(golden, name):
    reference = load_file(golden / f"reference-logits-{name}.safetensors")
    denoiser = Denoiser.from_pretrained(golden / "checkpoints" / f"tiny-{name}")
    seen = []
    for part in (denoiser.embed_tokens, *denoiser.layers):
        part.register_forward_hook(lambda _, __, out: seen.append(out if torch.is_tensor(out) else out[0]))
    ids = reference["input_ids"][:1]
    with torch.no_grad():
        denoiser(ids)
        seen[-1] = denoiser.norm(seen[-1])
    for hidden, expected in zip(seen, reference["hidden"], strict=True):
        assert (hidden - expected).abs().max() < 1e-4 * expected.std()


@pytest.mark.parametrize("name", REFERENCES)
def test_autoregressive_families_equal_transformers_under_a_causal_mask(tmp_path, name):
    import transformers

    config_class, model_class, extra = REFERENCES[name]
    torch.manual_seed(0)
    config = getattr(transformers, config_class)(
        vocab_size=100, hidden_size=48, intermediate_size=64, num_hidden_layers=3,
        num_attention_heads=6, num_key_value_heads=2, max_position_embeddings=64, **extra,
    )  # fmt: skip
    model = getattr(transformers, model_class)(config).eval()
    for parameter in model.parameters():  # biases and norms start at 0 and 1, which hides mistakes
        torch.nn.init.normal_(parameter, std=0.3)
    model.save_pretrained(tmp_path, max_shard_size="20KB")
    assert len(list(tmp_path.glob("model-*.safetensors"))) > 1, "this test also covers shards"
    ids = torch.randint(0, 100, (2, 40))
    with torch.no_grad():
        expected = model(ids).logits
        ours = Denoiser.from_pretrained(tmp_path)(ids, block=1)
    torch.testing.assert_close(ours[:, 1:], expected[:, :-1], rtol=1e-4, atol=1e-4)


def test_a_context_encoded_apart_counts_as_if_it_stood_before_the_row():
    """Causal rows see only what is before them, so a split in two calls must change nothing."""
    denoiser = tiny_denoiser()
    ids = torch.arange(20)
    with torch.no_grad():
        whole, _ = denoiser.encode(packed([ids]))
        _, kept = denoiser.encode(packed([ids[:12]]), keep=True)
        context = SharedContext(kept, [[range(12)]])
        after, _ = denoiser.encode(pack_rows([Segment(tuple(range(12, 20)), 12)], CPU, context=context))
    assert not torch.allclose(whole[12:], after), "the first part must not see the second"
    by_mask = masked_reference(denoiser, ids, split=12)
    torch.testing.assert_close(after, by_mask[12:])


def masked_reference(denoiser, ids, split):
    """One call with a dense mask: the first `split` tokens see themselves, the others everything."""
    allowed = torch.ones(len(ids), len(ids), dtype=torch.bool)
    allowed[:split, split:] = False
    return run_with_mask(denoiser, ids, torch.arange(len(ids)), allowed)


def test_rows_of_a_batch_do_not_see_each_other():
    denoiser = tiny_denoiser(qk_norm=True, qkv_bias=True, tie_word_embeddings=True)
    rows = torch.randint(0, 258, (3, 16), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        together = denoiser(rows)
        alone = torch.cat([denoiser(row[None]) for row in rows])
    torch.testing.assert_close(together, alone)


def test_a_shifted_denoiser_reads_the_row_before():
    plain, shifted = tiny_denoiser(), tiny_denoiser(shifted=True)
    ids = torch.arange(12)[None]
    with torch.no_grad():
        torch.testing.assert_close(shifted(ids)[:, 1:], plain(ids)[:, :-1])


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


def test_positions_keep_their_precision_whatever_the_weights_become():
    before = tiny_denoiser().inverse_frequencies
    after = tiny_denoiser().to(torch.bfloat16)
    assert after.lm_head.weight.dtype == torch.bfloat16
    torch.testing.assert_close(after.inverse_frequencies, before, rtol=0, atol=0)
