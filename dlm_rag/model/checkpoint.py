"""Checkpoint folders: the names of public models, translated to ours and checked before loading.

A folder holds `config.json`, `model.safetensors` (or an index and its shards) and a tokenizer.
Everything that can be wrong is found from the headers, before any weight is read. Code that comes
with a checkpoint is never run, pickled weights are never opened.
"""

import hashlib
import json
import logging
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from dlm_rag.digest import digest_file
from dlm_rag.errors import CheckpointError, nearest
from dlm_rag.model.families import FAMILIES, Family
from dlm_rag.model.shape import DenoiserConfig, tensor_shapes

log = logging.getLogger(__name__)

WEIGHTS = "model.safetensors"
HUB_FILES = ["*.json", "*.safetensors", "*.txt", "*.jinja"]
NOT_READ = ["training.json", "scores.json", "*.run.json"]
SHARD_BYTES = 5 * 10**9
# What no public architecture knows and a checkpoint trained here carries all the same.
OWN_FIELDS = ("evidence_layout", "passage_length", "canvas_length", "block_length")


@dataclass(frozen=True)
class Checkpoint:
    """A folder whose config and tensor headers have been checked; weights are read by `tensors`."""

    folder: Path
    family: Family
    raw: dict[str, Any]  # config.json as it stands
    config: DenoiserConfig
    homes: dict[str, tuple[Path, str]]  # our tensor name -> file, name in that file

    def tensors(self, device: torch.device, dtype: torch.dtype) -> Iterator[tuple[str, Tensor]]:
        """Every tensor by our name, on the device; one at a time is in flight."""
        by_file: dict[Path, list[tuple[str, str]]] = {}
        for ours, (path, theirs) in self.homes.items():
            by_file.setdefault(path, []).append((ours, theirs))
        for path, names in by_file.items():
            with safe_open(path, framework="pt", device=str(device)) as file:
                for ours, theirs in names:
                    yield ours, file.get_tensor(theirs).to(device, dtype)

    def rows(self, name: str, rows: slice) -> Tensor:
        """Some rows of the tensor with our `name`, as the file has them; nothing else is read."""
        path, theirs = self.homes[name]
        with safe_open(path, framework="pt") as file:
            found: Tensor = file.get_slice(theirs)[rows]
        return found

    @cached_property
    def fingerprint(self) -> str:
        """Digest of all that is or may be read of the folder: any other byte, another digest.

        That is the shards that hold the tensors and, of the rest, whatever a checkpoint consists of
        (`HUB_FILES`), but for what our own programs write beside a model.
        """
        parts = [path for pattern in (*HUB_FILES, "*/*.jinja") for path in self.folder.glob(pattern)]
        texts = {path for path in parts if path.is_file() and path.suffix != ".safetensors"}
        texts -= {path for path in texts if path.name.startswith(".") or any(map(path.match, NOT_READ))}
        shards = {path for path, _ in self.homes.values()}
        lines = [f"{path.relative_to(self.folder)} {digest_file(path)}" for path in sorted(shards | texts)]
        return hashlib.sha256("\n".join(lines).encode()).hexdigest()

    @cached_property
    def end_token_ids(self) -> tuple[int, ...]:
        """Ids that end a response, from `generation_config.json`, else from `config.json`."""
        path = self.folder / "generation_config.json"
        found = (_read_json(path) if path.is_file() else {}).get("eos_token_id")
        found = self.raw.get("eos_token_id") if found is None else found
        return () if found is None else (found,) if isinstance(found, int) else tuple(found)


def open_checkpoint(path_or_hub_id: str | Path) -> Checkpoint:
    """Finds a folder or hub id and checks its config and tensor headers; reads no weights.

    Raises `CheckpointError` in one sentence: no such folder, an architecture that only its own code
    can run, pickled weights only, a missing shard, a missing, extra or misshapen tensor.
    """
    folder = _locate(path_or_hub_id)
    raw = _read_json(folder / "config.json")
    kind = raw.get("model_type")
    if kind not in FAMILIES:
        own_code = " and runs only through code of its own, which is never executed"
        raise CheckpointError(
            f"{folder} is a '{kind}' model{own_code if 'auto_map' in raw else ''}; this denoiser "
            f"holds {', '.join(FAMILIES)}{nearest(str(kind), FAMILIES)}"
        )
    family = FAMILIES[kind]
    try:
        config = replace(family.read(raw), **{name: raw[name] for name in OWN_FIELDS if name in raw})
    except (ValueError, TypeError, AttributeError, ArithmeticError) as error:
        raise CheckpointError(f"{folder / 'config.json'}: {error}") from None
    return Checkpoint(folder, family, raw, config, _match(folder, config, family))


def save_tensors(
    tensors: dict[str, Tensor],
    config: DenoiserConfig,
    folder: Path,
    extra: dict[str, Any],
    origin: Checkpoint | None = None,
) -> None:
    """Writes a folder that `open_checkpoint` reads, from tensors by our names, in shards of `SHARD_BYTES`.

    `extra` keys join the config (prompt, end ids). With `origin` the folder gets that checkpoint's
    family, tensor names and config, with what `config` says otherwise.
    """
    folder.mkdir(parents=True, exist_ok=True)
    named = {name: value.detach().contiguous() for name, value in tensors.items()}
    if config.tie_word_embeddings:
        named.pop("lm_head.weight", None)
    raw: dict[str, Any] = {"model_type": "dlm_rag", "architectures": ["Denoiser"], **asdict(config)}
    if origin is not None and origin.raw["model_type"] != "dlm_rag":
        named = {origin.family.rename(name): value for name, value in named.items()}
        raw = _rewritten(origin.raw, config)
    raw |= {**extra, "torch_dtype": str(next(iter(named.values())).dtype).removeprefix("torch.")}
    (folder / "config.json").write_text(json.dumps(raw, indent=2) + "\n", encoding="utf-8")
    shards: list[dict[str, Tensor]] = [{}]
    for name, value in named.items():
        if shards[-1] and sum(x.nbytes for x in shards[-1].values()) + value.nbytes > SHARD_BYTES:
            shards.append({})
        shards[-1][name] = value
    if len(shards) == 1:
        save_file(named, folder / WEIGHTS, metadata={"format": "pt"})
        return
    homes: dict[str, str] = {}
    for number, shard in enumerate(shards, start=1):
        name = f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        save_file(shard, folder / name, metadata={"format": "pt"})
        homes |= dict.fromkeys(shard, name)
    total = sum(value.nbytes for value in named.values())
    index = {"metadata": {"total_size": total}, "weight_map": homes}
    (folder / f"{WEIGHTS}.index.json").write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")


def _rewritten(raw: dict[str, Any], config: DenoiserConfig) -> dict[str, Any]:
    """A public checkpoint's config with what training has changed."""
    found = {**raw, **{name: getattr(config, name) for name in OWN_FIELDS}}
    found["mask_token_id"] = config.mask_token_id
    for key in ("vocab_size", "embedding_size"):
        if key in raw:
            found[key] = max(raw[key], config.vocab_size)
    for key in ("max_position_embeddings", "max_sequence_length"):
        if key in raw:
            found[key] = config.max_position_embeddings
    if isinstance(raw.get("rope_parameters"), dict):
        found["rope_parameters"] = {**raw["rope_parameters"], "rope_theta": config.rope_theta}
    else:
        found["rope_theta"] = config.rope_theta
    return found


def _locate(path_or_hub_id: str | Path) -> Path:
    folder = Path(path_or_hub_id).expanduser()
    if folder.is_dir():
        return folder
    name = str(path_or_hub_id)
    if folder.exists() or name.count("/") != 1 or name.startswith((".", "~", "/")):
        raise CheckpointError(f"model '{name}' is neither a folder nor a hub id (OWNER/NAME)")
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(name, allow_patterns=HUB_FILES))
    except Exception as error:  # the hub client raises a dozen unrelated types
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise CheckpointError(
            f"model '{name}' is no folder here and could not be fetched from the hub: {reason}"
        ) from None


def _read_json(path: Path) -> dict[str, Any]:
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise CheckpointError(f"{path.parent} is no checkpoint: it has no {path.name}") from None
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise CheckpointError(f"{path} is not valid JSON: {error}") from None
    if not isinstance(value, dict):
        raise CheckpointError(f"{path} must hold a JSON object")
    return value


def _shards(folder: Path) -> list[Path]:
    index = folder / f"{WEIGHTS}.index.json"
    if index.is_file():
        weight_map = _read_json(index).get("weight_map")
        if not isinstance(weight_map, dict) or not all(isinstance(v, str) for v in weight_map.values()):
            raise CheckpointError(f"{index} has no weight_map from tensors to files")
        paths = [folder / name for name in sorted(set(weight_map.values()))]
        for path in paths:
            if not path.is_file():
                raise CheckpointError(f"{folder} lacks the shard {path.name} that its index names")
        return paths
    if (folder / WEIGHTS).is_file():
        return [folder / WEIGHTS]
    pickled = sorted(p.name for p in folder.iterdir() if p.suffix in (".bin", ".pt", ".pth", ".ckpt"))
    if pickled:
        raise CheckpointError(
            f"{folder} holds pickled weights only ({pickled[0]}), which are never opened: "
            "convert them to safetensors"
        )
    raise CheckpointError(f"{folder} holds no weights: {WEIGHTS} is missing")


def _headers(folder: Path) -> Iterator[tuple[str, Path, tuple[int, ...]]]:
    for path in _shards(folder):
        try:
            with safe_open(path, framework="pt") as file:
                for name in file.keys():  # noqa: SIM118 - not a dict
                    yield name, path, tuple(file.get_slice(name).get_shape())
        except SafetensorError as error:
            raise CheckpointError(f"{path} is not a whole safetensors file: {error}") from None


def _match(folder: Path, config: DenoiserConfig, family: Family) -> dict[str, tuple[Path, str]]:
    """Every tensor of the denoiser with its home, after checking names and shapes."""
    wanted = tensor_shapes(config)
    found = {name: (path, shape) for name, path, shape in _headers(folder)}
    if config.tie_word_embeddings:
        # A tied head is the embedding; some folders store it a second time.
        wanted.pop("lm_head.weight")
        found.pop(family.rename("lm_head.weight"), None)
    homes = {}
    for ours, shape in wanted.items():
        theirs = family.rename(ours)
        if theirs not in found:
            raise CheckpointError(f"{folder} lacks the tensor {theirs}{nearest(theirs, found)}")
        path, actual = found.pop(theirs)
        if actual != shape:
            raise CheckpointError(
                f"{path.name} in {folder}: {theirs} has shape {list(actual)}, its config asks for "
                f"{list(shape)}"
            )
        homes[ours] = (path, theirs)
    # Old Llama folders store the rotary frequencies, which follow from the config.
    extra = sorted(name for name in found if not name.endswith("rotary_emb.inv_freq"))
    if extra:
        raise CheckpointError(f"{folder} holds the tensor {extra[0]}, which the denoiser has no place for")
    return homes
