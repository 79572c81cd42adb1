"""Golden traces and logits of LLaDA2.0, LLaDA2.1 and LLaDA-MoE, from the public code of dllm.

    python tests/golden/make_llada2.py --reference DIR [--out tests/golden]

DIR is a checkout of ZHZisZZ/dllm at SOURCE; it wants transformers 4.57. Packages of it are entered without
their `__init__`, which would import trainers and evaluations. Changed for a CPU in float32: the sampler's
mask, in bfloat16, is cast to the model's type, as scaled dot product attention asks. Random weights decode
what they please, so prompts are looked for: see calls.py.
"""

import sys
import tempfile
from importlib import import_module
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import torch
from calls import Family, Wanted, arguments
from tiny_experts import END, MASK, write_checkpoint

SOURCE = "ZHZisZZ/dllm@ca176752fbceec49c6b4777a2c18ae88e4eb10ed"
BARE = "dllm dllm.core dllm.core.samplers dllm.pipelines dllm.pipelines.llada dllm.pipelines.llada.models \
dllm.pipelines.llada2 dllm.pipelines.llada2.models dllm.pipelines.llada21 dllm.pipelines.llada21.models"
TOKENIZER = SimpleNamespace(eos_token_id=END, mask_token_id=MASK, bos_token_id=None)


def enter(reference: Path) -> None:
    """Make the packages of the checkout importable, without what their `__init__` would import."""
    for name in BARE.split():
        package = sys.modules[name] = ModuleType(name)
        package.__path__ = [str(reference / name.replace(".", "/"))]


def load(family: str, module: str, name: str) -> torch.nn.Module:
    """The public class with our tiny weights, float32."""
    with tempfile.TemporaryDirectory() as folder:
        write_checkpoint(family, Path(folder))
        kind = getattr(import_module(f"dllm.pipelines.{module}"), name)
        model, found = kind.from_pretrained(folder, dtype=torch.float32, output_loading_info=True)
    assert not any(found.values()), found
    inner = model.forward

    def forward(input_ids: torch.Tensor, **options: Any) -> Any:
        mask = options.get("attention_mask")
        if mask is not None and mask.is_floating_point():
            options["attention_mask"] = mask.to(model.lm_head.weight.dtype)
        return inner(input_ids, **options)

    model.forward = forward
    return model.eval()


def ends_inside(block: int) -> Any:
    """A trace whose first end token is neither the first nor the last of its block."""

    def holds(case: dict[str, Any]) -> bool:
        if END not in case["tokens"]:
            return False
        return 0 < (len(case["prompt_ids"]) + case["tokens"].index(END)) % block < block - 1

    return holds


def edits(case: dict[str, Any]) -> bool:
    """A trace in which tokens are edited both before and after the last mask is filled."""
    early = any("edited" in step for step in case["steps"] if step["pos"])
    return early and any("edited" in step for step in case["steps"] if not step["pos"])


def sampled(sampler: Any, model: torch.nn.Module) -> Any:
    """A run of one of dllm's samplers: the whole canvas that it returns."""
    made = sampler(model=model, tokenizer=TOKENIZER)
    return lambda prompt, settings: made.sample([prompt[0]], **settings)


def llada2(out: Path) -> None:
    """LLaDA2.0: dllm's sampler, and the model's own `generate`, which stops at the end token."""
    model = load("llada2_moe", "llada2.models.modeling_llada2_moe", "LLaDA2MoeModelLM")
    sampler = import_module("dllm.pipelines.llada2.sampler").LLaDA2Sampler
    settings = {
        "block_size": 8, "steps_per_block": 8, "max_new_tokens": 24, "temperature": 0.0, "top_p": None,
        "top_k": None, "threshold": 0.95, "minimal_topk": 1, "eos_early_stop": False, "return_dict": False,
    }  # fmt: skip
    origin = {"source": SOURCE, "sampler": "dllm/pipelines/llada2/sampler.py LLaDA2Sampler.sample"}
    family = Family(
        "llada2", "llada2_moe", model, MASK, sampled(sampler, model), settings,
        lambda s: (s["block_size"], s["threshold"], None),
    )  # fmt: skip
    family.write(out, origin, [
        Wanted(16, {}),
        Wanted(13, {"threshold": 0.9}),
        Wanted(5, {"threshold": 0.85, "max_new_tokens": 20}),
        Wanted(11, {"steps_per_block": 3, "threshold": 0.9}),
        Wanted(16, {"steps_per_block": 4, "threshold": 0.999}),
        Wanted(21, {"block_size": 32, "steps_per_block": 32, "max_new_tokens": 40, "threshold": 0.9}),
        Wanted(9, {"threshold": 0.9}, ends_inside(8)),
    ])  # fmt: skip
    family.write_logits(out, SOURCE, 8)

    own = {
        "block_length": 8, "steps": 8, "gen_length": 32, "temperature": 0.0, "top_p": None, "top_k": None,
        "threshold": 0.95, "minimal_topk": 1, "eos_early_stop": False,
    }  # fmt: skip
    origin["sampler"] = "dllm/pipelines/llada2/models/modeling_llada2_moe.py LLaDA2MoeModelLM.generate"
    family = Family(
        "llada2-generate", "llada2_moe", model, MASK,
        lambda prompt, settings: model.generate(prompt, eos_id=END, mask_id=MASK, **settings), own,
        lambda s: (s["block_length"], s["threshold"], None), answers=True,
    )  # fmt: skip
    family.write(out, origin, [
        Wanted(16, {"threshold": 0.9}, ends_inside(8)),
        Wanted(11, {"threshold": 0.85}, ends_inside(8)),
        Wanted(13, {"threshold": 0.9, "eos_early_stop": True}, ends_inside(8)),
        Wanted(16, {"threshold": 0.9, "eos_early_stop": True}, ends_inside(8)),
        Wanted(6, {"threshold": 0.9, "gen_length": 20}),
    ])  # fmt: skip


def llada21(out: Path) -> None:
    """LLaDA2.1: fills masks, edits what is written."""
    model = load("llada21_moe", "llada21.models.modeling_llada21_moe", "LLaDA2MoeModelLM")
    sampler = import_module("dllm.pipelines.llada21.sampler").LLaDA21Sampler
    settings = {
        "block_size": 8, "max_new_tokens": 24, "max_length": None, "temperature": 0.0, "top_p": None,
        "top_k": None, "threshold": 0.95, "editing_threshold": 0.9, "max_post_steps": 16,
        "num_to_transfer": 1, "eos_early_stop": False, "return_dict": False,
    }  # fmt: skip
    origin = {"source": SOURCE, "sampler": "dllm/pipelines/llada21/sampler.py LLaDA21Sampler.sample"}
    family = Family(
        "llada21", "llada21_moe", model, MASK, sampled(sampler, model), settings,
        lambda s: (s["block_size"], s["threshold"], s["editing_threshold"]),
    )  # fmt: skip
    family.write(out, origin, [
        Wanted(16, {}, edits),
        Wanted(13, {"threshold": 0.7, "editing_threshold": 0.5}, edits),
        Wanted(5, {"threshold": 0.5, "editing_threshold": 0.0, "max_new_tokens": 12}, edits),
        Wanted(11, {"threshold": 0.9, "max_post_steps": 2}, edits),
        Wanted(12, {"num_to_transfer": 2, "threshold": 0.999, "editing_threshold": 0.95}, edits),
        Wanted(21, {"block_size": 32, "max_new_tokens": 40, "threshold": 0.85}, edits),
        Wanted(9, {"eos_early_stop": True, "threshold": 0.9}, ends_inside(8)),
    ])  # fmt: skip
    family.write_logits(out, SOURCE, 8)


def lladamoe(out: Path) -> None:
    """LLaDA-MoE: whole attention, LLaDA's schedule of so many tokens a step."""
    model = load("lladamoe", "llada.models.modeling_lladamoe", "LLaDAMoEModelLM")
    module = import_module("dllm.core.samplers.mdlm")
    settings = {
        "max_new_tokens": 24, "max_length": None, "block_size": 8, "steps": 12, "temperature": 0.0,
        "remasking": "low_confidence", "stochastic_transfer": False, "cfg_scale": 0.0,
        "cfg_keep_tokens": None, "suppress_tokens": None, "begin_suppress_tokens": None,
        "right_shift_logits": False, "return_dict": False,
    }  # fmt: skip
    origin = {"source": SOURCE, "sampler": "dllm/core/samplers/mdlm.py MDLMSampler.sample"}
    family = Family("lladamoe", "lladamoe", model, MASK, sampled(module.MDLMSampler, model), settings,
                    lambda s: (s["block_size"], None, None))  # fmt: skip
    family.write(out, origin, [
        Wanted(16, {}),
        Wanted(13, {"steps": 24}),
        Wanted(5, {"steps": 9}),
        Wanted(11, {"block_size": 24, "steps": 7}),
        Wanted(9, {"max_new_tokens": 20}, ends_inside(8)),
    ])  # fmt: skip
    family.write_logits(out, SOURCE, None)


def main() -> None:
    given = arguments(__doc__)
    enter(given.reference)
    for make in (llada2, llada21, lladamoe):
        make(given.out)


if __name__ == "__main__":
    main()
