"""The tensors that a checkpoint's files hold, compared with those that its config asks for.

Weights that are stored quantised are dequantised as they are read, or all are refused. Read are
compressed-tensors in int8 or float8 (a scale for a tensor, a row, a group of columns or a block) and `fp8`
(float8: a scale for a tensor, as AutoFP8 has it, or DeepSeek's blocks). Scales of `X.weight` are
`X.weight_scale` or `X.weight_scale_inv`: numbers are multiplied by both. What a config says of activations,
keys and values does not count: they are not quantised.
"""

import logging
import re
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from math import prod
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import safe_open
from torch import Tensor

from dlm_rag.errors import CheckpointError, suggest_nearest, translate_failures
from dlm_rag.files.hub import read_checkpoint_json
from dlm_rag.files.paths import resolve_path_inside
from dlm_rag.model.denoiser_config import DenoiserConfig
from dlm_rag.model.layers import list_tensor_shapes

log = logging.getLogger(__name__)

WEIGHTS_FILE = "model.safetensors"
INDEX_FILE = f"{WEIGHTS_FILE}.index.json"
FLOAT_DTYPES: tuple[str, ...] = ("F64", "F32", "F16", "BF16")
STORED_DTYPES = ("I8", "F8_E4M3")
SUFFIXES = ("_scale", "_scale_inv")  # of the name of a weight, where its scales are
UNUSED_SUFFIXES = (".input_scale", ".k_scale", ".v_scale")  # scales of what is not quantised here
REMEDY = "take the model's own safetensors, with model.quantize=int8 for less memory"
Block = tuple[int | None, int | None]  # rows and columns that share a scale; None: all
Scales = tuple[Path, str, Block]  # of a weight: file, name, and what shares one
NamedShapes = dict[str, tuple[tuple[int, ...], tuple[str, ...]]]


@dataclass(frozen=True)
class TensorSource:
    """A tensor of a public checkpoint, or a part of it, and where it goes in a tensor of ours."""

    name: str
    shape: tuple[int, ...] = ()  # of the whole tensor
    source_index: tuple[slice, ...] = ()  # of theirs; empty: all
    target_index: tuple[Any, ...] = ()  # in ours: the number of the expert, then its rows; else all of it
    path: Path = Path()
    scales: Scales | None = None  # where it is stored quantised

    @property
    def first_source_row(self) -> int:
        return int(self.source_index[0].start or 0) if self.source_index else 0

    def read(self, file: Any, rows: slice | None = None) -> Any:
        """From its open file of safetensors; rows: of those that it consists of, None: all."""
        index, begin = self.source_index, self.first_source_row
        if rows is not None:
            index = (slice(begin + rows.start, begin + rows.stop), *index[1:])
        if self.scales is None:
            return file.get_slice(self.name)[index] if index else file.get_tensor(self.name)
        (path, name, block), stored = self.scales, file.get_tensor(self.name)
        device = str(stored.device)
        with nullcontext(file) if path == self.path else safe_open(path, "pt", device) as other:
            found = dequantize(stored, other.get_tensor(name).float(), block)
        return found[index].clone() if index else found


def dequantize(stored: Tensor, scales: Tensor, block: Block) -> Tensor:
    """A weight (rows, columns) as it is stored, in float32."""
    rows, columns = (each or size for size, each in zip(stored.shape, block, strict=True))
    scales = scales.reshape(-(-len(stored) // rows), -1).repeat_interleave(rows, 0)[: len(stored)]
    found = stored.float()
    for number, part in enumerate(found.split(columns, dim=1)):
        part *= scales[:, number, None]
    return found


@dataclass(frozen=True)
class Family:
    """A public architecture: how its config and its tensor names read in our words."""

    read_config: Callable[[dict[str, Any]], DenoiserConfig]
    names: Mapping[str, str]  # of modules in our words and in theirs, where they differ
    settings: Mapping[str, Any] = field(default_factory=dict)  # of `decode`, as published
    # The name of its mask token, by which the tokenizer knows the id where the config does not say it;
    # None: autoregressive, or its configs always say it.
    mask_token: str | None = None
    autoregressive: bool = False  # where its config has no mask

    fused_qkv: bool = False  # one tensor holds queries, keys and values, in this order
    separate_experts: bool = True  # each expert has tensors of its own

    def rename_tensor(self, ours: str) -> str:
        """Their name of a tensor."""
        known = "|".join(map(re.escape, self.names))
        return re.sub(rf"\b({known})\b", lambda found: self.names[found[1]], ours) if known else ours

    def list_sources(self, ours: str, shape: tuple[int, ...], config: DenoiserConfig) -> list[TensorSource]:
        """The tensors of theirs that one of ours consists of."""
        path, _, last = ours.rpartition(".")
        if self.separate_experts and config.experts is not None and path.endswith(".experts"):
            inner = config.experts.moe_intermediate_size
            halves = {"gate_proj": (slice(inner),), "up_proj": (slice(inner, 2 * inner),)}
            pieces = halves if last == "gate_up_proj" else {"down_proj": ()}
            shape = shape[1] // len(pieces), shape[2]
            return [
                TensorSource(self.rename_tensor(f"{path}.{n}.{own}.weight"), shape, target_index=(n, *rows))
                for n in range(config.experts.num_experts)
                for own, rows in pieces.items()
            ]
        rows: tuple[slice, ...] = ()
        if self.fused_qkv and path.endswith(("q_proj", "k_proj", "v_proj")):
            queries = config.num_attention_heads * config.head_dim
            keys = config.num_key_value_heads * config.head_dim
            start = {"q": 0, "k": queries, "v": queries + keys}[path[-6]]
            rows, shape = (slice(start, start + shape[0]),), (queries + 2 * keys, *shape[1:])
        return [TensorSource(self.rename_tensor(ours), shape, rows)]


TensorSources = dict[str, list[TensorSource]]  # by our name


class _Header(NamedTuple):
    path: Path
    shape: tuple[int, ...]
    dtype: str


def match_tensors(
    folder: Path, config: DenoiserConfig, family: Family, block: Block | None = None
) -> tuple[DenoiserConfig, TensorSources]:
    """Where every tensor of the denoiser is, after checking names, shapes and types.

    The config loses its tie where the files hold another head, which is read as in transformers; a head
    alone is the embedding. block: what shares a scale where some weights are quantised.
    """
    found, other_names = _read_headers(folder), dict[str, str]()
    embedding, head = (family.rename_tensor(ours) for ours in ("embed_tokens.weight", "lm_head.weight"))
    if config.tie_word_embeddings and head in found:  # some folders store the tied head a second time
        names = [name for name in (head, embedding) if name in found]
        held = [safe_open(found[name].path, "pt").get_tensor(name) for name in names]
        if len(held) == 1:  # as the save_model of safetensors leaves it
            other_names = {"embed_tokens.weight": "lm_head.weight"}
        elif held[0].dtype == held[1].dtype and torch.equal(*held):
            del found[head]
        else:
            log.warning("%s ties its embeddings, but holds another %s, which is used", folder, head)
            config = replace(config, tie_word_embeddings=False)
    experts = config.experts.num_experts if config.experts is not None and family.separate_experts else 0
    for number, what in ((config.num_hidden_layers, "layers"), (experts, "experts")):
        if number > len(found):  # before as many names are made
            raise CheckpointError(f"{folder} has {len(found)} tensors, too few for {number} {what}")
    with translate_failures(CheckpointError, str(folder / "config.json")):  # sizes that overflow
        wanted = list_tensor_shapes(config)
    sources = {n: family.list_sources(other_names.get(n, n), shape, config) for n, shape in wanted.items()}
    asked = {part.name: part.shape for parts in sources.values() for part in parts}
    taken = {name: _take_tensor(folder, found, (name,), shape, block) for name, shape in asked.items()}
    # Old Llama folders store the rotary frequencies, which follow from the config.
    idle = ("rotary_emb.inv_freq", *UNUSED_SUFFIXES * (block is not None))
    if extra := sorted(name for name in found if not name.endswith(idle)):
        raise CheckpointError(f"{folder} has the tensor {extra[0]}, which does not belong to its config")
    return config, {
        ours: [replace(part, path=taken[part.name][0], scales=taken[part.name][1]) for part in parts]
        for ours, parts in sources.items()
    }


def match_tensors_by_name(folder: Path, wanted: NamedShapes) -> TensorSources:
    """Where every tensor of a folder is whose names are the same in memory, after checking those wanted."""
    found = _read_headers(folder)
    left = dict(found)
    for name, (shape, others) in wanted.items():
        _take_tensor(folder, left, (name, *others), shape)
    return {name: [TensorSource(name, path=header.path)] for name, header in found.items()}


def _take_tensor(
    folder: Path, found: dict[str, _Header], names: tuple[str, ...], shape: tuple[int, ...],
    block: Block | None = None,
) -> tuple[Path, Scales | None]:  # fmt: skip
    """The file of the first of these names and its scales, taken out of `found`; shape and type fit."""
    name = next((name for name in names if name in found), None)
    if name is None:
        nearest = suggest_nearest(names[0], found)
        raise CheckpointError(f"{folder}: the tensor {names[0]} is missing{nearest}")
    path, given, dtype = found.pop(name)
    place, scales, known = f"{path.name} in {folder}: {name}", None, FLOAT_DTYPES
    if given != shape:
        raise CheckpointError(f"{place} has shape {list(given)}, its config asks for {list(shape)}")
    own = next((own for suffix in SUFFIXES if (own := name + suffix) in found), None)
    if block is not None and own is not None:
        there, given, _ = found.pop(own)
        scales, known = (there, own, block), STORED_DTYPES
        count = prod(-(-size // (each or size)) for size, each in zip(shape, block, strict=False))
        if len(shape) != 2 or prod(given) != count:
            raise CheckpointError(
                f"{there.name} in {folder}: {own} has shape {list(given)}, which does not fit "
                f"{list(shape)} of {name} and the quantization_config"
            )
    if dtype not in known:
        raise CheckpointError(f"{place} has the type {dtype}, only {', '.join(known)} are read: {REMEDY}")
    return path, scales


def _read_headers(folder: Path) -> dict[str, _Header]:
    """What the files of a folder say about their tensors, by name."""
    headers: dict[str, _Header] = {}
    for path in list_shards(folder):
        broken = f"{path} is not a complete safetensors file, fetch or write it again"
        with translate_failures(CheckpointError, broken), safe_open(path, "pt") as file:
            for name in file.keys():  # noqa: SIM118 - not a dict
                if name in headers:
                    raise CheckpointError(f"{folder} has the tensor {name} twice, also in {path.name}")
                part: Any = file.get_slice(name)
                headers[name] = _Header(path, tuple(part.get_shape()), part.get_dtype())
    return headers


def list_shards(folder: Path) -> list[Path]:
    """The files of a checkpoint's weights. Raises `CheckpointError` where some are missing."""
    weights, index = folder / WEIGHTS_FILE, folder / INDEX_FILE
    if index.is_file():
        weight_map = read_checkpoint_json(index).get("weight_map")
        if not isinstance(weight_map, dict) or not all(isinstance(v, str) for v in weight_map.values()):
            raise CheckpointError(f"{index} has no weight_map from tensors to files")
        names = sorted({*weight_map.values()})
        paths = [resolve_path_inside(folder, name, str(index), CheckpointError) for name in names]
        here = {path for path in folder.iterdir() if path.is_file()}
        if missing := [path for path in paths if path not in here]:
            raise CheckpointError(f"{folder}: the shard {missing[0].name:.60} of its index is missing")
        if weights.exists() and weights not in paths:
            raise CheckpointError(f"{folder} has {WEIGHTS_FILE} and {INDEX_FILE}: remove the older one")
        return paths
    if weights.is_file():
        return [weights]
    hint = ""
    for path in sorted(folder.iterdir()):
        if path.suffix in (".bin", ".pt", ".pth", ".ckpt"):
            hint = f"; pickled ones ({path.name}) are never opened: convert them to safetensors"
        elif path.suffix == ".gguf":
            hint = f"; GGUF is not read: {REMEDY}"
        elif path.suffix == ".safetensors":
            hint = f"; there is {path.name}" + f", fetch {INDEX_FILE} too" * ("-of-" in path.name)
    raise CheckpointError(f"{folder} has no weights: {WEIGHTS_FILE} is missing{hint}")


def read_scale_block(raw: dict[str, Any]) -> Block | None:
    """What shares a scale, by what a config says of quantised weights, which is taken out of it; None: they
    are not quantised. Raises `CheckpointError` for a format that is not read."""
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
