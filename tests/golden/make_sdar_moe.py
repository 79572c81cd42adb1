"""Traces of SDAR's own sampler on transformers' Qwen3-MoE.

    python tests/golden/make_sdar_moe.py --reference CHECKOUT        (torch, transformers 4.57)

The modelling code of SDAR-MoE is not in JetAstra/SDAR. What serves it elsewhere (sdar_moe.py of sglang and
of JetEngine) has the names and the arithmetic of Qwen3-MoE, and attention by blocks, so this is what runs:
the sampler's masks are made additive, a call that is not to store works on a copy of the cache, and
`torch.multinomial` is the argmax, as in make_sdar.py.
"""

import copy
import tempfile
from pathlib import Path
from typing import Any

import torch
from make_sdar import COMMON, Watched
from tiny_checkpoints import write_checkpoint
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
from transformers import Qwen3MoeForCausalLM

ORIGIN = TraceOrigin(
    "JetAstra/SDAR@c2041a8333333d685f6e15122c84f60f51f85ebd",
    "generate.py, block_diffusion_generate; transformers 4.57, Qwen3MoeForCausalLM",
    "sdar_moe",
)
DYNAMIC = {"remasking_strategy": "low_confidence_dynamic"}
TRACES: dict[str, tuple[dict[str, Any], list[tuple[int, int]]]] = {  # settings; prompts: length, seed
    "sdar_moe": (
        DYNAMIC
        | {"gen_length": 24, "block_length": 4, "denoising_steps": 4, "confidence_threshold": 0.85},
        [(12, 0), (13, 11), (18, 2), (7, 3), (3, 4)],
    ),
    "sdar_moe-block8": (
        DYNAMIC
        | {"gen_length": 32, "block_length": 8, "denoising_steps": 8, "confidence_threshold": 0.9},
        [(16, 0), (13, 1), (18, 2), (7, 13), (23, 4)],
    ),
    "sdar_moe-static": (
        {
            "gen_length": 24, "block_length": 8, "denoising_steps": 4,
            "remasking_strategy": "low_confidence_static",
        },
        [(16, 0), (14, 1), (18, 2), (6, 3), (24, 4)],
    ),
}  # fmt: skip


class Caching:
    """Qwen3-MoE, called as SDAR's sampler calls a model."""

    def __init__(self, model: Any) -> None:
        self.model, self.device, self.eval = model, model.device, model.eval

    def __call__(
        self, ids: Tensor, attention_mask: Tensor, store_kv: bool, past_key_values: Any, **options: Any
    ) -> Any:
        cache = past_key_values if store_kv else copy.deepcopy(past_key_values)
        return self.model(
            ids, attention_mask=attention_mask[:, None].log(), past_key_values=cache, **options
        )


def main() -> None:
    given = parse_arguments(__doc__)
    sampling = load_public_module("sdar_repository", given.reference, "generate")
    with tempfile.TemporaryDirectory() as folder:
        write_checkpoint("sdar_moe", Path(folder))
        model, found = Qwen3MoeForCausalLM.from_pretrained(folder, output_loading_info=True)
    assert not any(found.values()), found
    torch.multinomial = lambda chances, num_samples: chances.argmax(-1, keepdim=True)
    for name, (settings, prompts) in TRACES.items():
        answers = []
        for length, seed in prompts:
            ids = make_prompt_bytes(length, seed)
            recorder = StepRecorder(settings.get("confidence_threshold"))
            watched = Watched(Caching(model.eval()), recorder, length)
            found = sampling.block_diffusion_generate(
                watched, {"input_ids": torch.tensor([ids])}, **COMMON, **settings
            )
            answers.append((recorder, recorder.case(ids, found[0, length:].tolist())))
        write_trace(given.out / f"{name}.json", ORIGIN, COMMON | settings | {"temperature": 0}, answers)
    ids = make_logit_input_ids()
    number = torch.arange(ids.shape[1]) // 4
    sight = (number[:, None] >= number).float().log()[None, None]
    write_logits(
        given.out / "sdar_moe.safetensors", ORIGIN, "i", input_ids=ids,
        logits=model(ids, attention_mask=sight).logits,
    )  # fmt: skip


if __name__ == "__main__":
    main()
