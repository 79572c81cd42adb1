"""Logits of LLaDA2.2 by dllm's modelling code, with SGLang's choice of experts.

    TRITON_INTERPRET=1 python tests/golden/make_llada22.py --reference CHECKOUT --sglang FOLDER
                                        (torch, transformers 4.57, triton; FOLDER: of the package sglang)

The kernels of SGLang's model that choose experts block by block are run in triton's interpreter, on a CPU,
in place of dllm's choice.
"""

import argparse
import ast
import sys
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from tiny_checkpoints import CONFIGS
from torch import Tensor
from trace_recorder import (
    TraceOrigin,
    load_tiny_model,
    make_logit_input_ids,
    parse_arguments,
    stub_packages,
    write_logits,
)

FAMILY = "llada22"
CONFIG = CONFIGS[FAMILY]
BLOCK = CONFIG["block_size"]
DLLM = "ZHZisZZ/dllm@ca176752fbceec49c6b4777a2c18ae88e4eb10ed"
SGLANG = "sglang 0.5.23"
KERNELS = ("_block_aggregation_kernel", "_token_topk_kernel", "block_topk_triton")


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


def compute_logits(model: Any, ids: Tensor) -> Tensor:
    """Logits (n, V) of ids (n,) in blocks."""
    number = torch.arange(len(ids)) // BLOCK
    sight = (number[:, None] >= number).float().log()[None, None]
    return model(ids[None], attention_mask=sight).logits[0]


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
    origin = TraceOrigin(f"{SGLANG}, {DLLM}", "sglang/srt/models/llada2.py, block_topk_triton", FAMILY)
    ids = make_logit_input_ids()
    path = given.out / f"{FAMILY}.safetensors"
    logits = torch.stack([compute_logits(model, row) for row in ids])
    write_logits(path, origin, "i", input_ids=ids, logits=logits)


if __name__ == "__main__":
    main()
