"""Traces of SDAR's own sampler, from a checkout of JetAstra/SDAR, on its own modelling code or Qwen3-MoE.

    python tests/golden/make_sdar.py --reference CHECKOUT           (torch, transformers 4.53, einops)
    python tests/golden/make_sdar.py --reference CHECKOUT --experts (torch, transformers 4.57)

What is changed to run it greedily on a CPU: `flash_attn` is replaced by a module whose attention is
torch's and whose norm is the formula beside it in the public file, the loss of training (Triton) by
nothing, and `torch.multinomial` by the argmax. (The sampler has no temperature 0, and with top_k=1 each
confidence is 1.)

The modelling code of SDAR-MoE is not in the repository. What serves it elsewhere (sdar_moe.py of sglang and
of JetEngine) has the names and the arithmetic of Qwen3-MoE, and attention by blocks, so this is what runs:
the sampler's masks are made additive, and a call that is not to store works on a copy of the cache.
"""

import copy
import sys
from importlib import import_module
from types import ModuleType
from typing import Any

import torch
import torch.nn.functional as F
import transformers
import transformers.modeling_utils  # looks for flash_attn, and is to find none
from tiny_checkpoints import END, MASK, PAD
from torch import Tensor
from trace_recorder import (
    StepRecorder,
    TraceOrigin,
    load_tiny_model,
    make_logit_input_ids,
    parse_arguments,
    record_trace,
    stub_packages,
    write_logits,
)

SOURCE = "JetAstra/SDAR@c2041a8333333d685f6e15122c84f60f51f85ebd"
SAMPLER = "generate.py, block_diffusion_generate"
MODELS = {
    "sdar": "training/model/SDAR-4B-Chat/modeling_sdar.py",
    "sdar_moe": "transformers 4.57, Qwen3MoeForCausalLM",
}
# As generate.py calls it, but for temperature, top_k and top_p, of which there is nothing at temperature 0.
COMMON = {"mask_id": MASK, "stopping_criteria_idx": [END, PAD]}
SHORT = {
    "gen_length": 24, "block_length": 4, "denoising_steps": 4,
    "remasking_strategy": "low_confidence_dynamic", "confidence_threshold": 0.85,
}  # fmt: skip
BLOCK8 = SHORT | {
    "gen_length": 32, "block_length": 8, "denoising_steps": 8, "confidence_threshold": 0.9
}  # fmt: skip
# Two tokens a step. With an odd number of masks the sampler would write over a token of the prompt.
STATIC = {
    "gen_length": 24, "block_length": 8, "denoising_steps": 4, "remasking_strategy": "low_confidence_static"
}  # fmt: skip
SEQUENTIAL = {"gen_length": 16, "block_length": 4, "denoising_steps": 4, "remasking_strategy": "sequential"}
TRACES: dict[str, tuple[dict[str, Any], list[tuple[int, int]]]] = {  # settings; prompts as (length, seed)
    "sdar": (SHORT, [(12, 0), (13, 1), (18, 2), (7, 3), (3, 4), (24, 5), (22, 6)]),
    "sdar-block8": (BLOCK8, [(16, 2), (13, 1), (18, 6), (7, 3), (24, 0)]),
    "sdar-static": (STATIC, [(16, 2), (14, 10), (18, 0), (6, 3), (24, 5)]),
    "sdar-sequential": (SEQUENTIAL, [(12, 4), (13, 1), (18, 0), (7, 3), (3, 4)]),
    "sdar_moe": (SHORT, [(12, 0), (13, 11), (18, 2), (7, 3), (3, 4)]),
    "sdar_moe-block8": (BLOCK8, [(16, 0), (13, 1), (18, 2), (7, 13), (23, 4)]),
    "sdar_moe-static": (STATIC, [(16, 0), (14, 1), (18, 2), (6, 3), (24, 4)]),
}


def stand_in_for_kernels() -> None:
    """Modules with the names that the public code imports."""

    def flash_attn_func(q: Tensor, k: Tensor, v: Tensor, causal: bool, softmax_scale: float) -> Tensor:
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        found = F.scaled_dot_product_attention(q, k, v, scale=softmax_scale, enable_gqa=True)
        return found.transpose(1, 2)

    def rms_norm_fn(x: Tensor, weight: Tensor, bias: None, eps: float) -> Tensor:
        return weight * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps))

    flash = ModuleType("flash_attn")
    flash.flash_attn_func = flash.flash_attn_varlen_func = flash_attn_func
    norm = ModuleType("flash_attn.ops.triton.layer_norm")
    norm.rms_norm_fn = rms_norm_fn
    names = ("flash_attn.ops", "flash_attn.ops.triton")
    loss = ModuleType("sdar.fused_linear_diffusion_cross_entropy")
    loss.FusedLinearDiffusionCrossEntropyLoss = None
    for module in (flash, norm, loss, *map(ModuleType, names)):
        sys.modules[module.__name__] = module


class Watched:
    """The model as the sampler calls it."""

    def __init__(self, model: Any, recorder: StepRecorder, prompt_length: int) -> None:
        self.model, self.recorder, self.prompt_length = model, recorder, prompt_length
        self.device, self.eval = model.device, model.eval

    def __call__(self, ids: Tensor, **options: Any) -> Any:
        out = self.model(ids, **options)
        if options["store_kv"]:
            self.recorder.store()
        else:
            start = int(options["position_ids"][0, 0]) - self.prompt_length
            self.recorder.denoise(ids[0], start, out.logits[0])
        return out


class Caching:
    """Qwen3-MoE, called as SDAR's sampler calls a model."""

    def __init__(self, model: Any) -> None:
        self.model, self.device, self.eval = model, model.device, model.eval

    def __call__(
        self, ids: Tensor, attention_mask: Tensor, store_kv: bool, past_key_values: Any, **options: Any
    ) -> Any:
        cache = past_key_values if store_kv else copy.deepcopy(past_key_values)
        mask = attention_mask[:, None].log()
        return self.model(ids, attention_mask=mask, past_key_values=cache, **options)


def main() -> None:
    given = parse_arguments(__doc__, "--experts")
    family = "sdar_moe" if given.experts else "sdar"
    stub_packages(given.reference, "sdar=training/model/SDAR-4B-Chat", "sdar_repository=.")
    if given.experts:
        model = load_tiny_model(transformers.Qwen3MoeForCausalLM, family)
    else:
        assert not transformers.utils.is_flash_attn_2_available()
        stand_in_for_kernels()
        model = load_tiny_model(import_module("sdar.modeling_sdar").SDARForCausalLM, family)
    sampling = import_module("sdar_repository.generate")
    torch.multinomial = lambda chances, num_samples: chances.argmax(-1, keepdim=True)
    origin = TraceOrigin(SOURCE, f"{SAMPLER}; {MODELS[family]}", family)
    for name, (settings, prompts) in TRACES.items():
        if name.startswith("sdar_moe") != given.experts:
            continue

        def answer(recorder: StepRecorder, ids: list[int], settings=settings) -> list[int]:
            called = Caching(model) if given.experts else model
            found = sampling.block_diffusion_generate(
                Watched(called, recorder, len(ids)),
                {"input_ids": torch.tensor([ids])},
                **COMMON,
                **settings,
            )
            return found[0, len(ids) :].tolist()

        record_trace(
            given.out / f"{name}.json", origin, COMMON | settings | {"temperature": 0}, prompts, answer,
            threshold=settings.get("confidence_threshold"),
            ordered=settings["remasking_strategy"] != "sequential",
        )  # fmt: skip
    ids = make_logit_input_ids()
    places = torch.arange(ids.shape[1])
    sight = places // 4 <= places[:, None] // 4
    if given.experts:
        logits = model(ids, attention_mask=sight.float().log()[None, None]).logits
    else:
        rows = [model(row[None], attention_mask=sight[None], position_ids=places[None]) for row in ids]
        logits = torch.stack([row.logits[0] for row in rows])
    write_logits(given.out / f"{family}.safetensors", origin, "i", input_ids=ids, logits=logits)


if __name__ == "__main__":
    main()
