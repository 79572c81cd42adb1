"""Traces of dllm's samplers for LLaDA2.0, LLaDA2.1 and LLaDA-MoE, on the modelling code beside them.

    python tests/golden/make_llada2.py --reference CHECKOUT        (torch, transformers 4.57)

What is changed to run them on a CPU: the packages' own __init__, which import trainers, are not run, and
the samplers' masks, which are in bfloat16, are given to the attention in float32.
"""

from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from tiny_checkpoints import MASK, PAD
from torch import Tensor
from trace_recorder import (
    StepRecorder,
    TraceOrigin,
    load_tiny_model,
    make_logit_input_ids,
    make_prompt_bytes,
    parse_arguments,
    stub_packages,
    write_logits,
    write_trace,
)

REPOSITORY = "ZHZisZZ/dllm@ca176752fbceec49c6b4777a2c18ae88e4eb10ed"
PACKAGES = (
    "dllm", "dllm.core", "dllm.core.samplers", "dllm.pipelines", "dllm.pipelines.llada",
    "dllm.pipelines.llada.models", "dllm.pipelines.llada2", "dllm.pipelines.llada2.models",
    "dllm.pipelines.llada21", "dllm.pipelines.llada21.models",
)  # fmt: skip
TOKENIZER = SimpleNamespace(eos_token_id=PAD, mask_token_id=MASK, bos_token_id=None)
Cases = list[tuple[int, int, dict[str, Any]]]  # length and seed of a prompt, settings that differ

GREEDY = {"temperature": 0.0, "top_p": None, "top_k": None}
LLADA2 = {
    "block_size": 8, "steps_per_block": 8, "max_new_tokens": 24, "threshold": 0.95, "minimal_topk": 1,
    "eos_early_stop": False, **GREEDY,
}  # fmt: skip
GENERATE = {
    "block_length": 8, "steps": 8, "gen_length": 32, "threshold": 0.9, "minimal_topk": 1,
    "eos_early_stop": False, **GREEDY,
}  # fmt: skip
LLADA21 = {
    "block_size": 8, "max_new_tokens": 24, "max_length": None, "threshold": 0.95, "editing_threshold": 0.9,
    "max_post_steps": 16, "num_to_transfer": 1, "eos_early_stop": False, **GREEDY,
}  # fmt: skip
LLADAMOE = {
    "block_size": 8, "steps": 12, "max_new_tokens": 24, "max_length": None, "temperature": 0.0,
    "remasking": "low_confidence", "stochastic_transfer": False, "cfg_scale": 0.0, "cfg_keep_tokens": None,
    "suppress_tokens": None, "begin_suppress_tokens": None, "right_shift_logits": False,
}  # fmt: skip
# The seeds are of prompts whose decisions are clear; with 9 tokens, and `generate` but for 6, answers end
# inside a block; those of LLaDA2.1 are edited before and after the last mask is filled.
LLADA2_CASES: Cases = [
    (16, 0, {}),
    (13, 1000, {"threshold": 0.9}),
    (5, 2000, {"threshold": 0.85, "max_new_tokens": 20}),
    (11, 3000, {"steps_per_block": 3, "threshold": 0.9}),
    (16, 4001, {"steps_per_block": 4, "threshold": 0.999}),
    (21, 5000, {"block_size": 32, "steps_per_block": 32, "max_new_tokens": 40, "threshold": 0.9}),
    (9, 6034, {"threshold": 0.9}),
]
GENERATE_CASES: Cases = [
    (6, 0, {"gen_length": 20}),
    (16, 1121, {}),
    (11, 2071, {"threshold": 0.85}),
    (13, 3030, {"eos_early_stop": True}),
    (16, 4078, {"eos_early_stop": True}),
]
LLADA21_CASES: Cases = [
    (16, 0, {}),
    (13, 1000, {"threshold": 0.7, "editing_threshold": 0.5}),
    (5, 2000, {"threshold": 0.5, "editing_threshold": 0.0, "max_new_tokens": 12}),
    (11, 3000, {"threshold": 0.9, "max_post_steps": 2}),
    (12, 4001, {"num_to_transfer": 2, "threshold": 0.999, "editing_threshold": 0.95}),
    (21, 5000, {"block_size": 32, "max_new_tokens": 40, "threshold": 0.85}),
    (9, 6033, {"eos_early_stop": True, "threshold": 0.9}),
]
LLADAMOE_CASES: Cases = [
    (16, 0, {}),
    (13, 1001, {"steps": 24}),
    (5, 2000, {"steps": 9}),
    (11, 3000, {"block_size": 24, "steps": 7}),
    (9, 4035, {"max_new_tokens": 20}),
]


def load(family: str, module: str, name: str) -> Any:
    """The public class with our weights."""
    return load_tiny_model(getattr(import_module(f"dllm.pipelines.{module}"), name), family)


class Family:
    """A public class and the samplers that are run on it."""

    def __init__(self, origin: TraceOrigin, model: Any, out: Path) -> None:
        self.origin, self.model, self.out = origin, model, out
        self.plain = model.forward

    def watch(self, recorder: StepRecorder, length: int, block: int) -> list[Tensor]:
        """From now on the model's calls are recorded; the list will hold the sampler's last window."""
        seen: list[Tensor] = []

        def forward(ids: Tensor, attention_mask: Tensor | None = None, **options: Any) -> Any:
            mask = None if attention_mask is None else attention_mask.float()
            out = self.plain(
                ids, attention_mask=mask if mask is None or mask.dim() == 4 else None, **options
            )
            end = ids.shape[1]
            if "position_ids" not in options and (ids == MASK).any():  # the canvas is seen whole
                first = int((ids[0] == MASK).nonzero()[0]) - length
                end = length + (first // block + 1) * block
            recorder.denoise(ids[0], -length, out.logits[0], slice(max(end - block, 0), end))
            seen[:] = [ids]
            return out

        self.model.forward = forward
        return seen

    def trace(self, name: str, run: Callable[..., Tensor], settings: dict[str, Any], cases: Cases) -> None:
        """Record the cases; `run` returns the whole canvas or, as `generate` does, the answer alone."""
        answers = []
        for length, seed, different in cases:
            used = settings | different
            recorder = StepRecorder(used.get("threshold"), editing=used.get("editing_threshold"))
            seen = self.watch(recorder, length, used.get("block_size") or used["block_length"])
            ids = torch.tensor([make_prompt_bytes(length, seed)])
            found = run(ids, **used)
            whole = found if found.shape[1] >= seen[0].shape[1] else seen[0]._base
            case = recorder.case(ids[0].tolist(), whole[0, length:].tolist())
            if whole is not found:
                case["answer"] = found[0].tolist()
            answers.append((recorder, ({"settings": different} if different else {}) | case))
        write_trace(self.out / f"{name}.json", self.origin, settings, answers)

    def logits(self, block: int | None) -> None:
        """Of the class under blocks, counted from the first token."""
        ids = make_logit_input_ids()
        number = torch.arange(ids.shape[1]) // (block or ids.shape[1])
        sight = None if block is None else (number[:, None] >= number).float().log()[None, None]
        found = self.plain(ids, attention_mask=sight).logits
        path = self.out / f"{self.origin.family}.safetensors"
        write_logits(path, self.origin, "i", input_ids=ids, logits=found)


def main() -> None:
    given = parse_arguments(__doc__)
    stub_packages(given.reference, *PACKAGES)

    def sampler(module: str, name: str, model: Any) -> Callable[..., Tensor]:
        made = getattr(import_module(f"dllm.{module}"), name)(model=model, tokenizer=TOKENIZER)
        return lambda ids, **settings: made.sample([ids[0]], **settings)

    def origin(path: str, family: str = "llada2") -> TraceOrigin:
        return TraceOrigin(REPOSITORY, f"dllm/{path}", family)

    model = load("llada2", "llada2.models.modeling_llada2_moe", "LLaDA2MoeModelLM")
    family = Family(origin("pipelines/llada2/sampler.py, LLaDA2Sampler.sample"), model, given.out)
    run = sampler("pipelines.llada2.sampler", "LLaDA2Sampler", model)
    family.trace("llada2", run, LLADA2, LLADA2_CASES)
    family.logits(8)
    family.origin = origin("pipelines/llada2/models/modeling_llada2_moe.py, LLaDA2MoeModelLM.generate")

    def generate(ids: Tensor, **settings: Any) -> Tensor:
        return model.generate(ids, eos_id=PAD, mask_id=MASK, **settings)

    family.trace("llada2-generate", generate, GENERATE, GENERATE_CASES)

    edited = load("llada2", "llada21.models.modeling_llada21_moe", "LLaDA2MoeModelLM")
    family = Family(origin("pipelines/llada21/sampler.py, LLaDA21Sampler.sample"), edited, given.out)
    run = sampler("pipelines.llada21.sampler", "LLaDA21Sampler", edited)
    family.trace("llada21", run, LLADA21, LLADA21_CASES)

    whole = load("lladamoe", "llada.models.modeling_lladamoe", "LLaDAMoEModelLM")
    family = Family(origin("core/samplers/mdlm.py, MDLMSampler.sample", "lladamoe"), whole, given.out)
    run = sampler("core.samplers.mdlm", "MDLMSampler", whole)
    family.trace("lladamoe", run, LLADAMOE, LLADAMOE_CASES)
    family.logits(None)


if __name__ == "__main__":
    main()
