"""Traces of SDAR's own sampler on its own modelling code, both from a checkout of JetAstra/SDAR.

    python tests/golden/make_sdar.py --reference CHECKOUT        (torch, transformers 4.53, einops)

What is changed to run it greedily on a CPU: `flash_attn` is replaced by a module whose attention is
torch's and whose norm is the formula beside it in the public file, the loss of training (Triton) by
nothing, and `torch.multinomial` by the argmax. (The sampler has no temperature 0, and with top_k=1 each
confidence is 1.)
"""

import sys
import tempfile
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
import torch.nn.functional as F
import transformers.modeling_utils  # looks for flash_attn, and is to find none
from tiny_checkpoints import END, MASK, PAD, write_checkpoint
from torch import Tensor
from trace_recorder import (
    StepRecorder,
    TraceOrigin,
    load_public_module,
    make_logit_input_ids,
    make_prompt_bytes,
    parse_arguments,
    write_logits,
    write_trace,
)

ORIGIN = TraceOrigin(
    "JetAstra/SDAR@c2041a8333333d685f6e15122c84f60f51f85ebd",
    "generate.py, block_diffusion_generate; training/model/SDAR-4B-Chat/modeling_sdar.py",
    "sdar",
)
# As generate.py calls it, but for temperature, top_k and top_p, of which there is nothing at temperature 0.
COMMON = {"mask_id": MASK, "stopping_criteria_idx": [END, PAD]}
TRACES: dict[str, tuple[dict[str, Any], list[tuple[int, int]]]] = {  # settings; prompts as (length, seed)
    "sdar": (
        {
            "gen_length": 24, "block_length": 4, "denoising_steps": 4,
            "remasking_strategy": "low_confidence_dynamic", "confidence_threshold": 0.85,
        },
        [(12, 0), (13, 1), (18, 2), (7, 3), (3, 4), (24, 5), (22, 6)],
    ),
    "sdar-block8": (
        {
            "gen_length": 32, "block_length": 8, "denoising_steps": 8,
            "remasking_strategy": "low_confidence_dynamic", "confidence_threshold": 0.9,
        },
        [(16, 2), (13, 1), (18, 6), (7, 3), (24, 0)],
    ),
    # Two tokens a step. With an odd number of masks the sampler would write over a token of the prompt.
    "sdar-static": (
        {
            "gen_length": 24, "block_length": 8, "denoising_steps": 4,
            "remasking_strategy": "low_confidence_static",
        },
        [(16, 2), (14, 10), (18, 0), (6, 3), (24, 5)],
    ),
    "sdar-sequential": (
        {
            "gen_length": 16, "block_length": 4, "denoising_steps": 4, "remasking_strategy": "sequential",
        },
        [(12, 4), (13, 1), (18, 0), (7, 3), (3, 4)],
    ),
}  # fmt: skip


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


def main() -> None:
    given = parse_arguments(__doc__)
    assert not transformers.utils.is_flash_attn_2_available()
    stand_in_for_kernels()
    modelling = load_public_module("sdar", given.reference / "training/model/SDAR-4B-Chat", "modeling_sdar")
    sampling = load_public_module("sdar_repository", given.reference, "generate")
    with tempfile.TemporaryDirectory() as folder:
        write_checkpoint("sdar", Path(folder))
        model = modelling.SDARForCausalLM.from_pretrained(folder).eval()
    torch.multinomial = lambda chances, num_samples: chances.argmax(-1, keepdim=True)
    for name, (settings, prompts) in TRACES.items():
        answers = []
        for length, seed in prompts:
            ids = make_prompt_bytes(length, seed)
            threshold = settings.get("confidence_threshold")
            recorder = StepRecorder(threshold, settings["remasking_strategy"] != "sequential")
            watched = Watched(model, recorder, length)
            found = sampling.block_diffusion_generate(
                watched, {"input_ids": torch.tensor([ids])}, **COMMON, **settings
            )
            answers.append((recorder, recorder.case(ids, found[0, length:].tolist())))
        write_trace(given.out / f"{name}.json", ORIGIN, COMMON | settings | {"temperature": 0}, answers)
    ids = make_logit_input_ids()
    places = torch.arange(ids.shape[1])
    sight = (places[None, :] // 4 <= places[:, None] // 4)[None]
    logits = [model(row[None], attention_mask=sight, position_ids=places[None]).logits[0] for row in ids]
    write_logits(given.out / "sdar.safetensors", ORIGIN, "i", input_ids=ids, logits=torch.stack(logits))


if __name__ == "__main__":
    main()
