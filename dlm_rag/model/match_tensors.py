"""The tensors that a checkpoint's files hold, compared with those that its config asks for."""

import logging
from dataclasses import replace
from math import prod
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import safe_open

from dlm_rag.errors import CheckpointError, suggest_nearest, translate_failures
from dlm_rag.files.hub import read_checkpoint_json
from dlm_rag.files.paths import resolve_path_inside
from dlm_rag.model.denoiser_config import DenoiserConfig
from dlm_rag.model.families.base import Family, NamedShapes, TensorSource
from dlm_rag.model.layers import list_tensor_shapes
from dlm_rag.model.stored_scales import (
    REMEDY,
    STORED_DTYPES,
    SUFFIXES,
    UNUSED_SUFFIXES,
    Block,
    ScaleSource,
    count_scales,
)

log = logging.getLogger(__name__)

WEIGHTS_FILE = "model.safetensors"
INDEX_FILE = f"{WEIGHTS_FILE}.index.json"
FLOAT_DTYPES = ("F64", "F32", "F16", "BF16")
COMPARED_ROWS = 4096  # of embedding and head, that are read at a time
TensorSources = dict[str, list[tuple[Path, TensorSource]]]  # by our name


class _Header(NamedTuple):
    path: Path
    shape: tuple[int, ...]
    dtype: str


def match_tensors(
    folder: Path, config: DenoiserConfig, family: Family, block: Block | None = None
) -> TensorSources:
    """Where every tensor of the denoiser is, after checking names, shapes and types.

    block: what shares a scale where some weights are quantised.
    """
    found = _read_headers(folder)
    experts = config.experts.num_experts if config.experts is not None and family.separate_experts else 0
    for number, what in ((config.num_hidden_layers, "layers"), (experts, "experts")):
        if number > len(found):  # before as many names are made
            raise CheckpointError(
                f"{folder} has {len(found)} tensors, too few for the {number} {what} of its config"
            )
    with translate_failures(CheckpointError, str(folder / "config.json")):  # sizes that overflow
        wanted = list_tensor_shapes(config)
    if config.tie_word_embeddings:  # some folders store the tied head a second time
        found.pop(family.rename_tensor("lm_head.weight"), None)
    sources = {ours: family.list_sources(ours, config) for ours in wanted}
    asked: dict[str, tuple[int, ...]] = {}
    for ours, parts in sources.items():
        for part in parts:
            cut = [at.stop - at.start for at in part.target_index if isinstance(at, slice)]
            shape = (*cut, *wanted[ours][len(part.target_index) :])
            if part.source_index:  # its other rows are those of other tensors
                shape = (max(part.source_index[0].stop, *asked.get(part.name, ())[:1], 0), *shape[1:])
            asked[part.name] = shape
    scales = {name: source for name in asked if (source := _take_scales(folder, found, name, block))}
    paths = {
        name: _take_header(folder, found, (name,), shape, STORED_DTYPES if name in scales else FLOAT_DTYPES)
        for name, shape in asked.items()
    }
    # Old Llama folders store the rotary frequencies, which follow from the config.
    idle = ("rotary_emb.inv_freq", *UNUSED_SUFFIXES * (block is not None))
    if extra := sorted(name for name in found if not name.endswith(idle)):
        raise CheckpointError(f"{folder} has the tensor {extra[0]}, which does not belong to its config")
    return {
        ours: [(paths[part.name], replace(part, scales=scales.get(part.name))) for part in parts]
        for ours, parts in sources.items()
    }


def untie_another_head(folder: Path, config: DenoiserConfig, family: Family) -> DenoiserConfig:
    """The config, without its tie where the files hold a head that is not the embedding.

    So does transformers. Both are read, a part at a time.
    """
    names = [family.rename_tensor(ours) for ours in ("embed_tokens.weight", "lm_head.weight")]
    found = _read_headers(folder) if config.tie_word_embeddings else {}
    if not all(name in found for name in names):
        return config
    embedding, head = (found[name] for name in names)
    if embedding.shape == head.shape and embedding.dtype == head.dtype:
        with safe_open(embedding.path, "pt") as one, safe_open(head.path, "pt") as other:
            parts = one.get_slice(names[0]), other.get_slice(names[1])
            starts = range(0, max(head.shape[0], 1), COMPARED_ROWS)
            if all(torch.equal(*(part[n : n + COMPARED_ROWS] for part in parts)) for n in starts):
                return config
    log.warning("%s ties its embeddings, but holds another %s, which is used", folder, names[1])
    return replace(config, tie_word_embeddings=False)


def match_tensors_by_name(folder: Path, wanted: NamedShapes) -> TensorSources:
    """Where every tensor of a folder is whose names are the same in memory.

    Raises `CheckpointError` where one that is wanted is missing, or has another shape or no floats.
    """
    found = _read_headers(folder)
    left = dict(found)
    for name, (shape, others) in wanted.items():
        _take_header(folder, left, (name, *others), shape)
    return {name: [(header.path, TensorSource(name))] for name, header in found.items()}


def _take_scales(
    folder: Path, found: dict[str, _Header], name: str, block: Block | None
) -> ScaleSource | None:
    """The scales of the tensor `name`, taken out of `found`; None where it has none."""
    own = next((own for suffix in SUFFIXES if (own := name + suffix) in found), None)
    if block is None or name not in found or own is None:
        return None
    path, given, _ = found.pop(own)
    shape = found[name].shape
    if len(shape) != 2 or prod(given) != count_scales(shape, block):
        raise CheckpointError(
            f"{path.name} in {folder}: {own} has shape {list(given)}, which does not fit {list(shape)} of "
            f"{name} and the quantization_config"
        )
    return ScaleSource(path, own, block)


def _take_header(
    folder: Path, found: dict[str, _Header], names: tuple[str, ...], shape: tuple[int, ...],
    dtypes: tuple[str, ...] = FLOAT_DTYPES,
) -> Path:  # fmt: skip
    """The file of the first of these names, taken out of `found`, with the shape and a type that fits."""
    name = next((name for name in names if name in found), None)
    if name is None:
        nearest = suggest_nearest(names[0], found)
        raise CheckpointError(f"{folder}: the tensor {names[0]} is missing{nearest}")
    path, given, dtype = found.pop(name)
    place = f"{path.name} in {folder}: {name}"
    if given != shape:
        raise CheckpointError(f"{place} has shape {list(given)}, its config asks for {list(shape)}")
    if dtype not in dtypes:
        known = ", ".join(dtypes)
        raise CheckpointError(f"{place} has the type {dtype}, only {known} are supported here: {REMEDY}")
    return path


def _read_headers(folder: Path) -> dict[str, _Header]:
    """What the files of a folder say about their tensors, by name."""
    headers: dict[str, _Header] = {}
    for path in _list_shards(folder):
        broken = f"{path} is not a complete safetensors file, fetch or write it again"
        with translate_failures(CheckpointError, broken), safe_open(path, framework="pt") as file:
            for name in file.keys():  # noqa: SIM118 - not a dict
                if name in headers:
                    raise CheckpointError(f"{folder} has the tensor {name} twice, also in {path.name}")
                part: Any = file.get_slice(name)
                headers[name] = _Header(path, tuple(part.get_shape()), part.get_dtype())
    return headers


def _list_shards(folder: Path) -> list[Path]:
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
