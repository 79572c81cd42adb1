"""Traces of SGLang's sampler for LLaDA2.2, `JointThresholdInDel`, on dllm's modelling code.

    TRITON_INTERPRET=1 python tests/golden/make_llada22.py --reference CHECKOUT --sglang FOLDER
                                        (torch, transformers 4.57, triton; FOLDER: of the package sglang)

What is changed to run them on a CPU: of SGLang's packages only the algorithm and its base class are
imported, whose loop is run; of its model the kernels that choose experts block by block are run in triton's
interpreter, in place of dllm's choice. The model is shown all text up to the end of the block.
"""

import argparse
import ast
import sys
from importlib import import_module
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import torch
from tiny_checkpoints import CONFIGS, MASK
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

FAMILY = "llada22"
CONFIG = CONFIGS[FAMILY]
BLOCK, EDITS = CONFIG["block_size"], (CONFIG["delete_token_id"], CONFIG["split_token_id"])
DLLM = "ZHZisZZ/dllm@ca176752fbceec49c6b4777a2c18ae88e4eb10ed"
SGLANG = "sglang 0.5.23"
ALGORITHM = "sglang.srt.dllm.algorithm"
STUBS = {  # what the algorithm's files import and do not use here
    "sglang.srt.dllm.config": ("DllmConfig",),
    "sglang.srt.layers.logits_processor": ("LogitsProcessorOutput",),
    "sglang.srt.model_executor.forward_batch_info": ("ForwardBatch",),
    "sglang.srt.model_executor.model_runner": ("ModelRunner",),
    "sglang.srt.server_args": ("ServerArgs",),
}
KERNELS = ("_block_aggregation_kernel", "_token_topk_kernel", "block_topk_triton")
SETTINGS = {"max_new_tokens": 24, "threshold": 0.5, "edit_threshold": 0.0, "max_post_edit_steps": 16}
# The seeds are of prompts whose decisions are clear; blocks end by their last step or without a change, and
# are now and then what they were before.
CASES: list[tuple[int, int, dict[str, Any]]] = [
    (16, 0, {}),
    (13, 1006, {"threshold": 0.3, "edit_threshold": 0.2}),
    (5, 2000, {"threshold": 0.9, "edit_threshold": 0.6}),
    (11, 3002, {"max_post_edit_steps": 3}),
    (21, 4007, {"edit_threshold": 0.9, "max_new_tokens": 32}),
    (10, 5003, {"max_post_edit_steps": 6, "edit_threshold": 0.1}),
]


class GPUTensor(torch.Tensor):
    """A tensor of which the kernels' caller believes that it is where they run."""

    is_cuda = True  # type: ignore[assignment]


def load_router(package: Path) -> Any:
    """`block_topk_triton` of SGLang's model, and what it calls."""
    import triton
    import triton.language as tl

    source = (package / "srt/models/llada2.py").read_text()
    found = [node for node in ast.parse(source).body if getattr(node, "name", "") in KERNELS]
    assert len(found) == len(KERNELS)
    # Triton reads the source of its kernels from a file.
    module = ModuleType("llada2_kernels")
    module.__file__ = str(package / "srt/models/llada2.py")
    names = {
        "triton": triton,
        "tl": tl,
        "torch": torch,
        "libdevice": type("", (), {"exp": property(lambda self: tl.exp)})(),
    }
    vars(module).update(names)
    sys.modules[module.__name__] = module
    tree = ast.Module(found, type_ignores=[])
    exec(compile(tree, module.__file__, "exec"), vars(module))
    return module.block_topk_triton


def load_algorithm(package: Path) -> Any:
    """The class `JointThresholdInDel`."""
    stub_packages(package.parent, *(ALGORITHM.rsplit(".", n)[0] for n in range(3, 0, -1)), ALGORITHM)
    sys.modules[ALGORITHM].get_algorithm = None  # type: ignore[attr-defined]
    for name, members in STUBS.items():
        module = sys.modules.setdefault(name, ModuleType(name))
        vars(module).update(dict.fromkeys(members, object))
    stub = sys.modules["sglang.srt.utils"] = ModuleType("sglang.srt.utils")
    stub.is_npu = lambda: False  # type: ignore[attr-defined]
    return import_module(f"{ALGORITHM}.joint_threshold_indel").Algorithm


def route_blocks(model: Any, choose: Any) -> None:
    """Gives each gate of the model SGLang's choice of experts, made once for a block of the same logits."""
    made: dict[tuple[bytes, bytes], list[Tensor]] = {}

    def route(logits: Tensor, bias: Tensor) -> list[Tensor]:
        key = logits.numpy().tobytes(), bias.numpy().tobytes()
        if key not in made:
            on_gpu = (x.as_subclass(GPUTensor) for x in (logits, bias))
            sizes = BLOCK, CONFIG["expert_capacity"], CONFIG["num_experts_per_tok"]
            made[key] = [x.as_subclass(Tensor) for x in choose(*on_gpu, *sizes)]
        return made[key]

    def forward(gate: Any, hidden: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        logits = torch.nn.functional.linear(hidden.flatten(0, -2).float(), gate.weight.float())
        found = [route(part, gate.expert_bias) for part in logits.split(BLOCK)]
        weights, chosen = (torch.cat(parts) for parts in zip(*found, strict=True))
        return chosen.long(), weights * CONFIG["routed_scaling_factor"], logits

    for module in model.modules():
        if type(module).__name__ == "LLaDA2MoeGate":
            type(module).forward = forward


class EditRecorder(StepRecorder):
    """The steps of one answer: what is proposed and written, edits included, and the block after them."""

    def watch(self, algorithm: Any, begin: int) -> None:
        """From now on the algorithm's steps are recorded; its block begins at the place `begin`."""
        plain, apply = algorithm.step.__func__, algorithm._apply_edit_operations.__func__
        written: list[list[int]] = []

        def record_edits(tokens: list[int], *others: Any) -> Any:
            written.append(tokens)
            return apply(algorithm, tokens, *others)

        def step(batch: Any, logits: Tensor, states: list[Any]) -> list[bool]:
            before, (state,) = batch.input_ids.tolist(), states
            if state["finished"]:
                return plain(algorithm, batch, logits, states)
            written.clear()
            done = plain(algorithm, batch, logits, states)
            after = batch.input_ids.tolist()
            self._record(before, logits.softmax(-1), written[0] if written else after, after, begin, state)
            return done

        algorithm.step, algorithm._apply_edit_operations = step, record_edits

    def _record(
        self,
        before: list[int],
        chances: Tensor,
        written: list[int],
        after: list[int],
        begin: int,
        state: Any,
    ) -> None:
        self.forwards["denoise"] += 1
        own = range(state["prompt_len"], len(before))
        best = chances.topk(2).values
        for n in own:
            assert chances[n].argmax() != MASK, "a mask is proposed: take other prompts"
            bound = self.threshold if before[n] == MASK else self.editing
            self._note("threshold", (best[n, 0] - bound).abs())
            self._note("token", best[n, 0] - best[n, 1])
        sure = best[:, 0]
        masks = [n for n in own if before[n] == MASK]
        filled = [n for n in masks if written[n] != MASK]
        if left := [n for n in masks if n not in filled]:
            self._note("choice", sure[filled].min() - sure[left].max())
        for places in (filled, [n for n in own if before[n] not in (MASK, written[n])]):
            tokens = [written[n] for n in places]
            self._add([begin + n for n in places], tokens, chances[places, tokens].tolist())
        edited = self.steps.pop()
        if edited["pos"]:
            self.steps[-1]["edited"] = edited
        self.steps[-1]["block"] = [begin + own[0], after[own[0] :]]


class Runner:
    """What SGLang's loop asks for logits: the text before the block, then the block."""

    def __init__(self, model: Any, text: list[int]) -> None:
        self.model, self.text, self.calls = model, text, 0

    def forward(self, batch: Any, **options: Any) -> Any:
        self.calls += 1
        logits = compute_logits(self.model, torch.tensor([*self.text, *batch.input_ids.tolist()]))
        out = SimpleNamespace(full_logits=logits[len(self.text) :])
        return SimpleNamespace(logits_output=out, can_run_graph=False)


def compute_logits(model: Any, ids: Tensor) -> Tensor:
    """Logits (n, V) of ids (n,) in blocks."""
    number = torch.arange(len(ids)) // BLOCK
    sight = (number[:, None] >= number).float().log()[None, None]
    return model(ids[None], attention_mask=sight).logits[0]


def answer(model: Any, algorithm: Any, prompt: list[int], settings: dict[str, Any]) -> tuple[Any, Any]:
    """The recorder and the case of a prompt, block after block as SGLang's engine does it."""
    recorder = EditRecorder(settings["threshold"], editing=settings["edit_threshold"])
    text, end = list(prompt), -(-(len(prompt) + settings["max_new_tokens"]) // BLOCK) * BLOCK
    config = SimpleNamespace(
        block_size=BLOCK, mask_id=MASK, first_done_first_out_mode=False, algorithm_config=settings,
        delete_token_id=EDITS[0], split_token_id=EDITS[1],
    )  # fmt: skip
    for begin in range(len(prompt) // BLOCK * BLOCK, end, BLOCK):
        own, steps = text[begin:], recorder.forwards["denoise"]
        block = torch.tensor(own + [MASK] * (BLOCK - len(own)))
        given = (torch.arange(BLOCK) < len(own))[None]
        batch = SimpleNamespace(batch_size=1, input_ids=block, dllm_prompt_mask=given)
        sampler, runner = algorithm(config), Runner(model, text[:begin])
        recorder.watch(sampler, begin - len(prompt))
        _, (found,), *_ = sampler.run(runner, batch)
        recorder.forwards["store"] += runner.calls - (recorder.forwards["denoise"] - steps)
        text += found.tolist()
    tokens = text[len(prompt) :]
    case = {"prompt_ids": prompt, "tokens": tokens, "forwards": recorder.forwards, "steps": recorder.steps}
    return recorder, case


def main() -> None:
    parser = argparse.ArgumentParser(add_help=False)
    parser.add_argument("--sglang", type=Path, required=True)
    sglang, rest = parser.parse_known_args()
    sys.argv[1:] = rest
    given = parse_arguments(__doc__)
    folders = ("dllm", "dllm.pipelines", "dllm.pipelines.llada2", "dllm.pipelines.llada2.models")
    stub_packages(given.reference, *folders)
    module = import_module("dllm.pipelines.llada2.models.modeling_llada2_moe")
    model = load_tiny_model(module.LLaDA2MoeModelLM, FAMILY)
    route_blocks(model, load_router(sglang.sglang))
    algorithm = load_algorithm(sglang.sglang)
    origin = TraceOrigin(
        f"{SGLANG}, {DLLM}",
        "sglang/srt/dllm/algorithm/joint_threshold_indel.py, JointThresholdInDel.run",
        FAMILY,
    )
    answers = []
    for length, seed, different in CASES:
        recorder, case = answer(model, algorithm, make_prompt_bytes(length, seed), SETTINGS | different)
        answers.append((recorder, ({"settings": different} if different else {}) | case))
    write_trace(given.out / f"{FAMILY}.json", origin, SETTINGS | {"block_size": BLOCK}, answers)
    ids = make_logit_input_ids()
    path = given.out / f"{FAMILY}.safetensors"
    logits = torch.stack([compute_logits(model, row) for row in ids])
    write_logits(path, origin, "i", input_ids=ids, logits=logits)


if __name__ == "__main__":
    main()
