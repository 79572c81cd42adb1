"""Traces of the Tiny-A2D models: dllm's MDLM and BD3LM samplers on its own modelling code.

    python tests/golden/make_a2d.py --reference CHECKOUT        (of ZHZisZZ/dllm; torch, transformers 4.57)

Nothing is changed; only the modules that are needed are imported, and the model is listened to.
"""

from importlib import import_module
from types import SimpleNamespace
from typing import Any

import torch
from tiny_checkpoints import END, MASK, PAD, TURN
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

FAMILY = "a2d-qwen3"
SOURCE = "ZHZisZZ/dllm@ca176752fbceec49c6b4777a2c18ae88e4eb10ed"
TOKENIZER = SimpleNamespace(mask_token_id=MASK, bos_token_id=TURN, pad_token_id=PAD, eos_token_id=END)
COMMON = {"temperature": 0.0, "remasking": "low_confidence"}
TRACES: dict[str, tuple[dict[str, Any], list[tuple[int, int]]]] = {  # settings; prompts as (length, seed)
    # Ten steps for a block of 16: one token in some, two in others; the last block has 8 tokens.
    "a2d-bd3lm": (
        {"max_new_tokens": 40, "block_size": 16, "steps": 30},
        [(16, 2), (13, 2), (18, 9), (7, 4), (32, 5), (41, 5)],
    ),
    "a2d-bd3lm-32": (
        {"max_new_tokens": 64, "block_size": 32, "steps": 24},
        [(32, 1), (45, 0), (7, 4), (64, 1), (20, 0)],
    ),
    "a2d-mdlm": (
        {"max_new_tokens": 40, "block_size": 16, "steps": 30},
        [(16, 0), (13, 3), (18, 0), (7, 2), (32, 1)],
    ),
}


class Watched:
    """The model as both samplers call it."""

    def __init__(self, model: Any, recorder: StepRecorder, prompt_length: int, block: int) -> None:
        self.model, self.recorder, self.device = model, recorder, model.device
        self.prompt_length, self.block = prompt_length, block

    def __call__(self, ids: Tensor, **options: Any) -> Any:
        out = self.model(ids, **options)
        stored = options.get("past_key_values")
        if options.get("use_cache"):
            self.recorder.store()
        elif stored is not None:  # the prompt is padded to whole blocks before it
            start = options["attention_mask"].shape[-1] - ids.shape[1]
            start -= -(-self.prompt_length // self.block) * self.block
            self.recorder.denoise(ids[0], start, out.logits[0])
        else:
            first = int((ids[0] == MASK).nonzero()[0]) - self.prompt_length
            first = first // self.block * self.block + self.prompt_length
            among = slice(first, first + self.block)
            self.recorder.denoise(ids[0], -self.prompt_length, out.logits[0], among)
        return out


def main() -> None:
    given = parse_arguments(__doc__)
    models = "dllm_qwen3=dllm/pipelines/a2d/models/qwen3"
    stub_packages(given.reference, "dllm", "dllm.core", models)
    samplers = import_module("dllm.core.samplers")
    preparing = import_module("dllm.core.samplers.bd3lm")
    model = load_tiny_model(import_module("dllm_qwen3.modeling_qwen3").A2DQwen3LMHeadModel, FAMILY)
    for name, (settings, prompts) in TRACES.items():
        kind = "BD3LMSampler" if "bd3lm" in name else "MDLMSampler"
        path = f"dllm/core/samplers/{'bd3lm' if 'bd3lm' in name else 'mdlm'}.py, {kind}.sample"

        def answer(recorder: StepRecorder, ids: list[int], kind=kind, settings=settings) -> list[int]:
            block, length = settings["block_size"], len(ids)
            watched = Watched(model, recorder, length, block)
            found = getattr(samplers, kind)(watched, TOKENIZER).sample([ids], **COMMON, **settings)[0]
            tokens = found[length if kind == "MDLMSampler" else -(-length // block) * block :].tolist()
            assert PAD not in tokens, "what the sampler takes for padding is said: take other prompts"
            return tokens

        origin = TraceOrigin(SOURCE, path, FAMILY)
        record_trace(given.out / f"{name}.json", origin, COMMON | settings, prompts, answer)
    ids = make_logit_input_ids()
    # Blocks of 32 that end with the text: 16 of padding, 16 tokens, 32 tokens.
    padded = torch.cat([torch.full((2, 16), PAD), ids], 1)
    sight, places = preparing._prepare_for_sampling(padded, 32, PAD)
    blocks = model(padded, attention_mask=sight, position_ids=places).logits[:, 16:]
    write_logits(
        given.out / f"{FAMILY}.safetensors", TraceOrigin(SOURCE, "A2DQwen3LMHeadModel", FAMILY), "i",
        input_ids=ids, logits=model(ids).logits, logits_blocks_of_32_from_the_end=blocks,
    )  # fmt: skip


if __name__ == "__main__":
    main()
