"""Checkpoints whose weights are stored quantised: each is dequantised as it is read, or all are refused.

Read are compressed-tensors in int8 or float8 (a scale for a tensor, a row, a group of columns or a block)
and `fp8` (float8: a scale for a tensor, as AutoFP8 has it, or DeepSeek's blocks). Scales of `X.weight` are
`X.weight_scale` or `X.weight_scale_inv`: numbers are multiplied by both. What a config says of activations,
keys and values does not count: they are not quantised.
"""

from contextlib import nullcontext
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

from safetensors import safe_open
from torch import Tensor

from dlm_rag.errors import CheckpointError

STORED_DTYPES = ("I8", "F8_E4M3")
SUFFIXES = ("_scale", "_scale_inv")  # of the name of a weight, where its scales are
UNUSED_SUFFIXES = (".input_scale", ".k_scale", ".v_scale")  # scales of what is not quantised here
REMEDY = "take the model's own safetensors, with model.quantize=int8 for less memory"
Block = tuple[int | None, int | None]  # rows and columns that share a scale; None: all


def count_scales(shape: tuple[int, ...], block: Block) -> int:
    return prod(-(-size // (each or size)) for size, each in zip(shape, block, strict=True))


@dataclass(frozen=True)
class ScaleSource:
    """The scales of one weight."""

    path: Path
    name: str
    block: Block

    def dequantize(self, weight: Tensor, file: Any, path: Path) -> Tensor:
        """A weight (rows, columns) as it is stored, in float32; file: an open one, at `path`."""
        device, found = str(weight.device), weight.float()
        with nullcontext(file) if path == self.path else safe_open(self.path, "pt", device) as own:
            scales = own.get_tensor(self.name).float()
        rows, columns = (each or size for size, each in zip(weight.shape, self.block, strict=True))
        scales = scales.reshape(-(-len(weight) // rows), -1).repeat_interleave(rows, 0)[: len(weight)]
        for number, part in enumerate(found.split(columns, dim=1)):
            part *= scales[:, number, None]
        return found


def read_scale_block(raw: dict[str, Any]) -> Block | None:
    """What shares a scale, by what a config says of quantised weights, which is taken out of it.

    None: they are not quantised.

    Raises `CheckpointError` for a format that is not read.
    """
    if (said := raw.pop("quantization_config", None)) is None:
        return None
    found: Any = None
    try:
        if said["quant_method"] == "fp8":
            found = said.get("weight_block_size") or (None, None)
        elif said["quant_method"] == "compressed-tensors" and said.get("format") != "pack-quantized":
            kind, *others = [group["weights"] for group in said["config_groups"].values()]
            alike = all(kind == each for each in others)
            if alike and kind["num_bits"] == 8 and kind.get("symmetric", True):
                blocks = {
                    "tensor": (None, None), "channel": (1, None), "group": (1, kind.get("group_size")),
                    "block": kind.get("block_structure"),
                }  # fmt: skip
                found = blocks[kind["strategy"]]
        rows, columns = found
        if all(each is None or (type(each) is int and each > 0) for each in (rows, columns)):
            return rows, columns
    except (AttributeError, LookupError, TypeError, ValueError):  # it is not what these formats say
        pass
    raise CheckpointError(
        f"quantization_config={said!r:.60} is not read, only int8 and float8 of compressed-tensors and fp8 "
        f"are: {REMEDY}"
    )
