"""What the files of a checkpoint say of its tensors, held against what its config asks for."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open

from dlm_rag.errors import CheckpointError, suggest_nearest, summarize_error
from dlm_rag.files.hub import read_json
from dlm_rag.files.untrusted import resolve_path_inside
from dlm_rag.model.denoiser_config import DenoiserConfig, list_tensor_shapes
from dlm_rag.model.families.base import Family, TensorSource

WEIGHTS_FILE = "model.safetensors"
FLOAT_DTYPES = ("F64", "F32", "F16", "BF16")


def _shards(folder: Path) -> list[Path]:
    index = folder / f"{WEIGHTS_FILE}.index.json"
    if index.is_file():
        weight_map = read_json(index).get("weight_map")
        if not isinstance(weight_map, dict) or not all(isinstance(v, str) for v in weight_map.values()):
            raise CheckpointError(f"{index} has no weight_map from tensors to files")
        names = sorted({*weight_map.values()})
        paths = [resolve_path_inside(folder, name, str(index), CheckpointError) for name in names]
        here = {path for path in folder.iterdir() if path.is_file()}
        for path in paths:
            if path not in here:
                raise CheckpointError(f"{folder} lacks the shard {path.name:.60} that its index names")
        if (folder / WEIGHTS_FILE).exists() and folder / WEIGHTS_FILE not in paths:
            raise CheckpointError(
                f"{folder} holds both {WEIGHTS_FILE} and {index.name}: take away what is older"
            )
        return paths
    if (folder / WEIGHTS_FILE).is_file():
        return [folder / WEIGHTS_FILE]
    pickled = sorted(p.name for p in folder.iterdir() if p.suffix in (".bin", ".pt", ".pth", ".ckpt"))
    if pickled:
        raise CheckpointError(
            f"{folder} holds pickled weights only ({pickled[0]}), which are never opened: "
            "convert them to safetensors"
        )
    others = sorted(path.name for path in folder.iterdir() if path.suffix in (".safetensors", ".gguf"))
    if any("-of-" in name for name in others):
        raise CheckpointError(f"{folder} holds {others[0]} but no {index.name}: fetch that too")
    hint = f" (there is {others[0]})" if others else ""
    raise CheckpointError(f"{folder} holds no weights: {WEIGHTS_FILE} is missing{hint}")


@dataclass(frozen=True)
class _Header:
    path: Path
    shape: tuple[int, ...]
    dtype: str


def _headers(folder: Path) -> dict[str, _Header]:
    """What the files of a folder say of their tensors, by their names."""
    headers: dict[str, _Header] = {}
    for path in _shards(folder):
        try:
            with safe_open(path, framework="pt") as file:
                for name in file.keys():  # noqa: SIM118 - not a dict
                    if name in headers:
                        raise CheckpointError(
                            f"{folder} holds the tensor {name} twice, also in {path.name}"
                        )
                    part = file.get_slice(name)
                    headers[name] = _Header(path, tuple(part.get_shape()), part.get_dtype())
        except (SafetensorError, OSError, OverflowError, MemoryError) as error:
            raise CheckpointError(
                f"{path} is not a whole safetensors file, fetch or write it again: {summarize_error(error)}"
            ) from None
    return headers


def match_tensors(
    folder: Path, config: DenoiserConfig, family: Family
) -> dict[str, list[tuple[Path, TensorSource]]]:
    """Every tensor of the denoiser with its home, after checking names, shapes and types."""
    found = _headers(folder)
    experts = config.experts.num_experts if config.experts is not None and family.separate_experts else 0
    for number, what in ((config.num_hidden_layers, "layers"), (experts, "experts")):
        if number > len(found):  # before as many names are made
            raise CheckpointError(
                f"{folder} holds {len(found)} tensors, too few for the {number} {what} that its config "
                "asks for"
            )
    wanted = list_tensor_shapes(config)
    if config.tie_word_embeddings:
        # A tied head is the embedding; some folders store it a second time.
        wanted.pop("lm_head.weight")
        found.pop(family.rename_tensor("lm_head.weight"), None)
    made_of = {ours: family.list_sources(ours, config) for ours in wanted}
    asked: dict[str, tuple[int, ...]] = {}
    for ours, parts in made_of.items():
        for part in parts:
            shape = _shape_at(wanted[ours], part.target_index)
            if part.source_rows is not None:  # others have the rows before and behind these
                shape = (max(part.source_rows.stop, *asked.get(part.name, ())[:1], 0), *shape[1:])
            asked[part.name] = shape
    homes = {}
    for theirs, shape in asked.items():
        if theirs not in found:
            raise CheckpointError(f"{folder} lacks the tensor {theirs}{suggest_nearest(theirs, found)}")
        header = found.pop(theirs)
        _check_header(folder, theirs, header, shape)
        homes[theirs] = header.path
    # Old Llama folders store the rotary frequencies, which follow from the config.
    extra = sorted(name for name in found if not name.endswith("rotary_emb.inv_freq"))
    if extra:
        raise CheckpointError(f"{folder} holds the tensor {extra[0]}, which the denoiser has no place for")
    return {ours: [(homes[part.name], part) for part in parts] for ours, parts in made_of.items()}


def match_tensors_by_name(
    folder: Path, wanted: dict[str, tuple[tuple[int, ...], tuple[str, ...]]]
) -> dict[str, list[tuple[Path, TensorSource]]]:
    """Every tensor of a folder with its home, where names are the same in memory; wanted: shapes, and
    other names.

    Raises `CheckpointError` where one that is wanted is missing, or has another shape or no floats.
    """
    found = _headers(folder)
    for name, (shape, others) in wanted.items():
        header = next((found[each] for each in (name, *others) if each in found), None)
        if header is None:
            raise CheckpointError(f"{folder} lacks the tensor {name}{suggest_nearest(name, found)}")
        _check_header(folder, name, header, shape)
    return {name: [(header.path, TensorSource(name))] for name, header in found.items()}


def _check_header(folder: Path, name: str, header: _Header, shape: tuple[int, ...]) -> None:
    if header.shape != shape:
        raise CheckpointError(
            f"{header.path.name} in {folder}: {name} has shape {list(header.shape)}, its config "
            f"asks for {list(shape)}"
        )
    if header.dtype not in FLOAT_DTYPES:
        raise CheckpointError(
            f"{header.path.name} in {folder}: {name} holds {header.dtype}, not {', '.join(FLOAT_DTYPES)}: "
            "quantised weights are not read"
        )


def _shape_at(shape: tuple[int, ...], place: tuple[Any, ...]) -> tuple[int, ...]:
    """Of what stands at a place in a tensor of that shape."""
    cut = [at.stop - at.start for at in place if isinstance(at, slice)]
    return (*cut, *shape[len(place) :])
