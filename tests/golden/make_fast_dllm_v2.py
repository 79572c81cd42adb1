"""Traces of Fast-dLLM v2: the `generate` of its model's card and the `batch_sample` of NVlabs/Fast-dLLM.

    python tests/golden/make_fast_dllm_v2.py --reference FOLDER        (torch, transformers 4.53, einops)

FOLDER holds `modeling.py` and `configuration.py` of the card of Efficient-Large-Model/Fast_dLLM_v2_7B (read
in two public copies that agree but for arguments added by their owners, and left alone here) and
`v2/generation_functions.py` of NVlabs/Fast-dLLM. Without `use_block_cache`: the cache of sub-blocks is
approximate. Nothing is changed; the model's forward is listened to.
"""

from importlib import import_module
from types import MethodType, SimpleNamespace
from typing import Any

import torch
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

COPY = "Satgoy152/DualDiffusion@189fa7a74a83119647dad36b24363cc4e89370ab"
CARD = f"Efficient-Large-Model/Fast_dLLM_v2_7B, as in {COPY}"
REPOSITORY = "NVlabs/Fast-dLLM@6cf27228858eb57c445e1fad764003543e72a0db"
FAMILY = "fast-dllm-v2"
COMMON = {"mask_id": MASK, "stop_token": END, "temperature": 0.0, "use_block_cache": False}
PUBLIC = {"max_new_tokens": 96, "block_size": 32, "small_block_size": 8, "threshold": 0.9}
SMALL = {"max_new_tokens": 32, "block_size": 8, "small_block_size": 4, "threshold": 0.85}
LONG = [(20, 3), (33, 1), (45, 1), (64, 0), (64, 1), (70, 2), (31, 0)]  # prompts as (length, seed)
SHORT = [(5, 10), (13, 1), (16, 1), (16, 5), (24, 7), (18, 0), (23, 3)]
TRACES: dict[str, tuple[dict[str, Any], list[tuple[int, int]]]] = {
    "fast-dllm-v2": (PUBLIC, LONG),
    "fast-dllm-v2-small": (SMALL, SHORT),
    "fast-dllm-v2-batch": (PUBLIC, LONG),
    "fast-dllm-v2-batch-small": (SMALL, SHORT),
}


def listen(model: Any, recorder: StepRecorder, prompt_length: int, settings: dict[str, Any]) -> None:
    """Has the recorder told of every call of the model's forward."""
    small = settings["small_block_size"]

    def forward(self: Any, **options: Any) -> Any:
        cache = options.get("past_key_values")
        start = (cache.get_seq_length() if cache is not None else 0) - prompt_length
        ids = options["input_ids"][0]
        out = type(model).forward(self, **options)
        if options["update_past_key_values"]:
            recorder.store(start + len(ids), out.logits[0, -1])
        else:
            first = int((ids == MASK).nonzero()[0]) // small * small
            shifted = torch.cat([out.logits[0, :1], out.logits[0, :-1]])
            recorder.denoise(ids, start, shifted, slice(first, first + small))
        return out

    model.forward = MethodType(forward, model)


def answer(model: Any, name: str, ids: list[int], settings: dict[str, Any]) -> list[int]:
    """What the sampler of a trace writes behind the prompt, one question at a time."""
    asked = torch.tensor([ids])
    if "batch" not in name:
        return model.generate(asked, **COMMON, **settings)[0, len(ids) :].tolist()
    tokenizer = SimpleNamespace(pad_token_id=PAD)
    lengths = {"min_len": len(ids), "seq_len": torch.tensor([len(ids)])}
    return model.batch_sample(asked, tokenizer, **lengths, **COMMON, **settings)[0][len(ids) :].tolist()


def main() -> None:
    given = parse_arguments(__doc__)
    stub_packages(given.reference, "fast_dllm_card=.", "fast_dllm_v2=v2")
    model = load_tiny_model(import_module("fast_dllm_card.modeling").Fast_dLLM_QwenForCausalLM, FAMILY)
    sampling = import_module("fast_dllm_v2.generation_functions").Fast_dLLM_QwenForCausalLM
    model.batch_sample = MethodType(sampling.batch_sample, model)
    card = TraceOrigin(CARD, "modeling.py, Fast_dLLM_QwenForCausalLM.generate", FAMILY)
    batch = TraceOrigin(REPOSITORY, "v2/generation_functions.py, batch_sample", FAMILY)
    for name, (settings, prompts) in TRACES.items():

        def run(recorder: StepRecorder, ids: list[int], name=name, settings=settings) -> list[int]:
            listen(model, recorder, len(ids), settings)
            return answer(model, name, ids, settings)

        record_trace(
            given.out / f"{name}.json", batch if "batch" in name else card, COMMON | settings, prompts, run,
            threshold=settings["threshold"],
        )  # fmt: skip
    del model.forward
    ids = make_logit_input_ids()
    logits: Tensor = model(input_ids=ids, block_size=32).logits
    write_logits(given.out / f"{FAMILY}.safetensors", card, "i + 1", input_ids=ids, logits=logits)


if __name__ == "__main__":
    main()
