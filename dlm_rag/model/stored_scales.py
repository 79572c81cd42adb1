"""Checkpoints whose weights are stored quantised: each is dequantised as it is read, or all are refused.

Read are compressed-tensors in int8 or float8 (`X.weight` with `X.weight_scale`: a scale for a tensor, a
row, a group of columns or a block) and DeepSeek's float8 blocks (`X.weight_scale_inv`; numbers are
multiplied by it, too). What a config says of activations does not count: they are not quantised.
"""

from contextlib import nullcontext
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any, NamedTuple

from safetensors import safe_open
from torch import Tensor

from dlm_rag.errors import CheckpointError

STORED_DTYPES = ("I8", "F8_E4M3")
REMEDY = "take the model's own safetensors, with model.quantize=int8 for less memory"
Block = tuple[int | None, int | None]  # rows and columns that share a scale; None: all


class StoredScales(NamedTuple):
    """How the scales of quantised weights are called, and what shares one."""

    suffix: str
    block: Block

    def count(self, shape: tuple[int, ...]) -> int:
        """The scales of a weight."""
        return prod(-(-size // (each or size)) for size, each in zip(shape, self.block, strict=True))


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


def read_stored_scales(raw: dict[str, Any]) -> StoredScales | None:
    """What a config says of quantised weights, which is taken out of it; None: they are not.

    Raises `CheckpointError` for a format that is not read.
    """
    if (said := raw.pop("quantization_config", None)) is None:
        return None
    found: Any = None
    try:
        if said["quant_method"] == "fp8":
            found = "_scale_inv", said.get("weight_block_size") or (None, None)
        elif said["quant_method"] == "compressed-tensors" and said.get("format") != "pack-quantized":
            kind, *others = [group["weights"] for group in said["config_groups"].values()]
            if (
                kind["num_bits"] == 8
                and kind.get("symmetric", True)
                and all(kind == each for each in others)
            ):
                blocks = {
                    "tensor": (None, None),
                    "channel": (1, None),
                    "group": (1, kind.get("group_size")),
                }
                blocks["block"] = kind.get("block_structure")
                found = "_scale", blocks[kind["strategy"]]
        suffix, (rows, columns) = found
        if all(each is None or (type(each) is int and each > 0) for each in (rows, columns)):
            return StoredScales(suffix, (rows, columns))
    except (AttributeError, LookupError, TypeError, ValueError):  # it is not what these formats say
        pass
    raise CheckpointError(
        f"quantization_config={said!r:.60} is not read, only int8 and float8 of compressed-tensors and fp8 "
        f"are: {REMEDY}"
    )
