"""Golden traces and logits of SDAR-MoE: the public sampler of SDAR over transformers' Qwen3-MoE.

    python tests/golden/make_sdar_moe.py --reference DIR [--out tests/golden]

DIR is a checkout of JetAstra/SDAR at SOURCE; it wants transformers 4.57. Modelling code of SDAR-MoE is not
in it. The model that serves it elsewhere (sglang's sdar_moe.py, JetEngine's) is Qwen3-MoE in names and
arithmetic with attention by blocks, so that is what runs here: the sampler's masks are made additive, and a
call that is not to store works on a copy of the cache. `torch.multinomial` gives the likeliest token; the
sampler has no temperature 0, and with `top_k=1` every confidence would be 1.
"""

import copy
import sys
import tempfile
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from calls import Family, Wanted, arguments
from tiny_experts import END, MASK, write_checkpoint
from transformers import Qwen3MoeForCausalLM

SOURCE = "JetAstra/SDAR@c2041a8333333d685f6e15122c84f60f51f85ebd"
DYNAMIC, STATIC = "low_confidence_dynamic", "low_confidence_static"


def load() -> torch.nn.Module:
    """Qwen3-MoE with our tiny weights, called as SDAR's sampler calls a model."""
    with tempfile.TemporaryDirectory() as folder:
        write_checkpoint("sdar_moe", Path(folder))
        model, found = Qwen3MoeForCausalLM.from_pretrained(
            folder, dtype=torch.float32, output_loading_info=True
        )
    assert not any(found.values()), found
    inner = model.forward

    def forward(input_ids: torch.Tensor, store_kv: bool = False, **options: Any) -> Any:
        if "past_key_values" in options:
            options["attention_mask"] = options["attention_mask"][:, None].log()
            if not store_kv:
                options["past_key_values"] = copy.deepcopy(options["past_key_values"])
        options["attention_mask"] = options["attention_mask"].to(model.lm_head.weight.dtype)
        return inner(input_ids, **options)

    model.forward = forward
    return model.eval()


def sound(case: dict[str, Any]) -> bool:
    """Where fewer masks are left than a step writes, the sampler writes over others: not these."""
    return not any("edited" in step for step in case["steps"])


def ends_inside(case: dict[str, Any]) -> bool:
    """A trace whose end token stands inside a block of 8."""
    tokens = case["tokens"]
    return sound(case) and END in tokens and 0 < (len(case["prompt_ids"]) + tokens.index(END)) % 8 < 7


def limits(settings: dict[str, Any]) -> tuple[int, float | None, None]:
    """The block, and the threshold where the rule has one."""
    dynamic = settings["remasking_strategy"] == DYNAMIC
    return settings["block_length"], settings["confidence_threshold"] if dynamic else None, None


def main() -> None:
    given = arguments(__doc__)
    sys.path.insert(0, str(given.reference))
    generate = import_module("generate").block_diffusion_generate
    torch.multinomial = lambda chances, num_samples: chances.argmax(-1, keepdim=True)
    model = load()
    settings = {
        "gen_length": 24, "block_length": 4, "denoising_steps": 4, "temperature": 1.0, "top_k": 0,
        "top_p": 1.0, "remasking_strategy": DYNAMIC, "confidence_threshold": 0.85, "eb_threshold": None,
        "stopping_criteria_idx": None,
    }  # fmt: skip
    family = Family(
        "sdar_moe", "sdar_moe", model, MASK,
        lambda prompt, settings: generate(model, {"input_ids": prompt}, MASK, **settings), settings,
        limits,
    )  # fmt: skip
    family.write(given.out, {"source": SOURCE, "sampler": "generate.py block_diffusion_generate"}, [
        Wanted(12, {}, sound),
        Wanted(13, {}, sound),
        Wanted(3, {"confidence_threshold": 0.9}, sound),
        Wanted(19, {"block_length": 8, "denoising_steps": 8, "confidence_threshold": 0.95}, sound),
        Wanted(16, {"block_length": 8, "denoising_steps": 4}, sound),
        Wanted(10, {"block_length": 8, "denoising_steps": 4, "remasking_strategy": STATIC}, sound),
        Wanted(11, {"block_length": 8, "denoising_steps": 8, "stopping_criteria_idx": [END]}, ends_inside),
    ])  # fmt: skip
    family.write_logits(given.out, SOURCE, 4)


if __name__ == "__main__":
    main()
