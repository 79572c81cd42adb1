"""Checkpoint folders: the names of public models, translated to ours and checked before loading.

A folder holds `config.json`, `model.safetensors` (or an index and its shards) and a tokenizer.
Everything that can be wrong is found from the headers, before any weight is read. Code that comes
with a checkpoint is never run, pickled weights are never opened.

A LoRA adapter in PEFT's format is merged once into a folder of the cache. A `config.json` beside it says
what the merged model is; without one it keeps its base's.
"""

import hashlib
import json
import math
import shutil
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from pydantic import ValidationError
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from dlm_rag.config.fields import explain_validation_error
from dlm_rag.config.sections import GENERATION_FILE, read_generation_settings
from dlm_rag.errors import CheckpointError, translate_failures
from dlm_rag.files import hub
from dlm_rag.files.build_once import DIGESTS_FILE, build_once, make_folder_name
from dlm_rag.files.paths import digest_file, get_cache_folder
from dlm_rag.model import stored_tensors
from dlm_rag.model.denoiser_config import DenoiserConfig, compute_rope_frequencies
from dlm_rag.model.families import BLOCK_SIZE_KEY, find_family, find_mask_token_id
from dlm_rag.model.layers import list_tensor_shapes
from dlm_rag.model.quantize import count_weight_bytes
from dlm_rag.model.stored_tensors import INDEX_FILE, WEIGHTS_FILE, Family, TensorSource, TensorSources
from dlm_rag.progress import report_progress

FINGERPRINT_EXCLUDED_GLOBS = ["training.json", "scores.json", "*.run.json"]  # which our programs write
SHARD_BYTES = 5 * 10**9
MAX_MAPPED_BYTES = 2**26  # read of a file before it is opened again, for what was read leaves memory then
SAMPLED_VALUES_PER_TENSOR = 256  # that are checked: the rest stays on disk until it is needed
# By their key in config.json, fields that no public architecture has and a checkpoint trained here carries.
DLM_RAG_FIELDS = {
    name: name
    for name in (
        "evidence_layout", "passage_length", "canvas_length", "block_length", "block_grid",
        "finished_block_context", "causal_context", "abstain",
    )
} | {BLOCK_SIZE_KEY: "block_size"}  # fmt: skip

ADAPTER_WEIGHTS = "adapter_model.safetensors"
PEFT_PREFIX = "base_model.model."
MERGE_VERSION = 2
# Keys of `adapter_config.json` whose other values change the product in a way that is not merged here.
PLAIN_VALUES: dict[str, tuple[Any, ...]] = {
    "use_dora": (False, None), "fan_in_fan_out": (False, None), "bias": ("none", None),
    "modules_to_save": (None, []), "rank_pattern": ({}, None), "alpha_pattern": ({}, None),
    "alora_invocation_tokens": (None, []), "layer_replication": (None, []),
    # Others (pissa, olora, loftq ...) change the base before they are trained.
    "init_lora_weights": (True, False, "gaussian", "eva", "orthogonal", None),
}  # fmt: skip
TEXT_FILES = ("*.json", "*.txt", "*.jinja")


@dataclass(frozen=True)
class Checkpoint:
    """A folder whose config and tensor headers have been checked; weights are read by `iterate_tensors`."""

    folder: Path
    family: Family
    raw_config: dict[str, Any]  # config.json as it stands
    config: DenoiserConfig
    tensor_sources: TensorSources

    def iterate_tensors(
        self, device: torch.device, dtype: torch.dtype, copied: Collection[str] = (),
        homes: Mapping[str, torch.device] | None = None,
    ) -> Iterator[tuple[str, Tensor]]:  # fmt: skip
        """Every tensor by our name, on the device; one at a time is in flight. Raises `CheckpointError`.

        copied: names of those that keep no file in memory. homes: other devices of some of them.
        """
        size = sum(path.stat().st_size for path in self._weight_files)
        with report_progress("reading weights", size, "bytes") as advance, ExitStack() as opened:
            at, mapped_bytes = None, 0
            for ours, parts in self.tensor_sources.items():
                whole, home = None, (homes or {}).get(ours, device)
                for part in parts:
                    if part.path != at or mapped_bytes > MAX_MAPPED_BYTES:
                        opened.close()  # no more of a file than is read stays in memory
                        file = opened.enter_context(safe_open(part.path, "pt", str(device)))
                        at, mapped_bytes = part.path, 0
                    value = part.read(file)
                    advance(value.nbytes if part.scales is None else value.numel())
                    mapped_bytes += value.nbytes
                    value = value.to(home, dtype, copy=ours in copied)  # no second copy is held
                    _check_values(part, value, ours)
                    if not part.target_index:
                        whole = value.contiguous()  # columns are not
                        continue
                    if whole is None:
                        whole = torch.empty(self._shapes[ours], device=home, dtype=dtype)
                    whole[part.target_index] = value
                assert whole is not None
                yield ours, whole

    def read_tensor_rows(self, name: str, rows: slice) -> Tensor:
        """Some rows of the tensor with our `name`, as the file has them; nothing else is read."""
        first, *_ = parts = self.tensor_sources[name]
        if not first.target_index:
            with safe_open(first.path, "pt") as file:
                return first.read(file, rows)
        found = torch.empty(rows.stop - rows.start, *self._shapes[name][1:])
        for part in parts:
            number, *place = part.target_index
            if rows.start <= number < rows.stop:
                with safe_open(part.path, "pt") as file:
                    found[(number - rows.start, *place)] = part.read(file)
        return found

    def count_weight_bytes(self, size: int, quantize: str = "none") -> int:
        """Bytes of the weights that are used, a tied head once; size: of a number that is not quantised."""
        if (adapter := self.config.adapter) is not None:
            named = adapter.list_named_shapes(self.raw_config, self.folder / "config.json")
            return size * sum(math.prod(shape) for shape, _ in named.values())
        return count_weight_bytes(self.config, size, quantize)

    @cached_property
    def _shapes(self) -> dict[str, tuple[int, ...]]:
        return list_tensor_shapes(self.config)

    @property
    def read_files(self) -> set[Path]:
        """Every file that is or may be read: shards, and texts that our own programs do not write."""
        excluded = [".*", "*.safetensors", *FINGERPRINT_EXCLUDED_GLOBS]
        paths = self._weight_files
        for pattern in (*hub.HUB_FILE_PATTERNS, "*/*.jinja"):
            paths |= {path for path in self.folder.glob(pattern) if not any(map(path.match, excluded))}
        return {path for path in paths if path.is_file()}

    @cached_property
    def fingerprint(self) -> str:
        """Digest of `read_files` and their names."""
        return self._digest(self.read_files)

    @cached_property
    def weights_fingerprint(self) -> str:
        """Digest of the shards with the tensors and of how they are read; texts do not count."""
        return self._digest(self._weight_files) + f" {self.raw_config['model_type']}"

    @property
    def _weight_files(self) -> set[Path]:
        return {part.path for parts in self.tensor_sources.values() for part in parts}

    def _digest(self, paths: set[Path]) -> str:
        lines = [f"{path.relative_to(self.folder)} {digest_file(path)}" for path in sorted(paths)]
        return hashlib.sha256("\n".join(lines).encode()).hexdigest()

    @cached_property
    def end_token_ids(self) -> tuple[int, ...]:
        """Ids that end a response, of `generation_config.json` or the config; raises `CheckpointError`."""
        path, last = self.folder / "generation_config.json", self.config.vocab_size - 1
        found = hub.read_checkpoint_json(path).get("eos_token_id") if path.exists() else None
        if found is None:
            path, found = self.folder / "config.json", self.raw_config.get("eos_token_id")
        ids = [] if found is None else found if isinstance(found, list) else [found]
        if not all(type(token) is int and 0 <= token <= last for token in ids):
            raise CheckpointError(f"{path}: eos_token_id={found!r:.60} must be ids from 0 to {last}")
        return tuple(ids)


def open_checkpoint(path_or_hub_id: str | Path, block_size: int | None = None) -> Checkpoint:
    """Finds a folder or hub id and checks its config and tensor headers; reads no weights.

    block_size: replaces that of the config; 0: no blocks.
    Raises `CheckpointError` in one sentence: no such folder, an architecture that only its own code can
    run, only pickled weights, a missing shard, a missing, extra or misshapen tensor.
    """
    folder = hub.resolve_hub_folder(path_or_hub_id, "model")
    hub.check_checkpoint_files(folder, [*hub.HUB_FILE_PATTERNS, "additional_chat_templates/*.jinja"])
    if (folder / hub.ADAPTER_CONFIG).exists():
        folder = merge_adapter(folder)
    place = folder / "config.json"
    if not place.exists():
        inner = sorted(path.parent for at in ("*", "*/*") for path in folder.glob(f"{at}/config.json"))
        hint = f": did you mean {inner[0]}?" if inner else ""
        if next(folder.glob("*.gguf"), None) is not None:
            hint = f"; GGUF is not read: {stored_tensors.REMEDY}"
        raise CheckpointError(f"{folder} has no config.json{hint}")
    raw = hub.read_checkpoint_json(place)
    if block_size is not None:
        raw[BLOCK_SIZE_KEY] = block_size
    try:
        family, block = find_family(raw), stored_tensors.read_scale_block(raw)
        config = _read_config(folder, raw, family)
    except ValidationError as error:
        raise CheckpointError(f"{place}: {explain_validation_error(error)[1]}") from None
    except (ValueError, TypeError, AttributeError, ArithmeticError) as error:
        raise CheckpointError(f"{place}: {error}") from None
    if (adapter := config.adapter) is None:
        config, homes = stored_tensors.match_tensors(folder, config, family, block)
    elif block_size is not None:
        raise CheckpointError(f"block_size={block_size} has no effect on {folder}: leave it out")
    else:
        config = adapter.add_generation_config(folder, config)
        homes = stored_tensors.match_tensors_by_name(folder, adapter.list_named_shapes(raw, place))
    problem = f"{place}: rope_scaling={config.rope_scaling!r:.200} gives no rotary positions"
    with translate_failures(CheckpointError, problem):
        frequencies, gain = compute_rope_frequencies(config)
    if not math.isfinite(frequencies.sum() + gain) or frequencies.shape != (config.rotary_dim // 2,):
        raise CheckpointError(problem)
    return Checkpoint(folder, family, raw, config, homes)


def _read_config(folder: Path, raw: dict[str, Any], family: Family) -> DenoiserConfig:
    own = {name: raw[key] for key, name in DLM_RAG_FIELDS.items() if raw.get(key) is not None}
    if own.get("block_size") == 0:
        own["block_size"] = None
    config = replace(family.read_config(raw).add_settings(family.settings), **own)
    if family.autoregressive and config.mask_token_id is None:
        config = replace(config, shifted=False, causal_context=True, block_size=1)
    block, length = config.block_size, config.block_length
    shorter = length is not None and ("block_length" in own or not block or block % (length or 1) == 0)
    if not shorter:  # tokens that see each other are written together
        config = replace(config, block_length=block)
    if config.mask_token_id is None and family.mask_token is not None:
        config = replace(config, mask_token_id=find_mask_token_id(folder, family.mask_token))
    if config.adapter is not None:  # all is in the file of another library
        return config
    decode, retrieval = read_generation_settings(folder)
    return config.add_settings(decode, **retrieval)


def save_tensors(
    tensors: dict[str, Tensor], config: DenoiserConfig, folder: Path, extra: dict[str, Any],
    origin: Checkpoint | None = None,
) -> None:  # fmt: skip
    """Writes a folder that `open_checkpoint` reads, from tensors by our names, in shards of `SHARD_BYTES`.

    `extra` keys join the config (prompt, end ids). With `origin` the folder gets that checkpoint's
    family, tensor names and config, with what `config` says otherwise.
    """
    from huggingface_hub import split_torch_state_dict_into_shards

    folder.mkdir(parents=True, exist_ok=True)
    named = {name: value.detach().contiguous() for name, value in tensors.items()}
    if config.tie_word_embeddings:
        named.pop("lm_head.weight", None)
    raw: dict[str, Any] = {"model_type": "dlm_rag", "architectures": ["Denoiser"], **asdict(config)}
    raw[BLOCK_SIZE_KEY] = raw.pop("block_size")
    del raw["decode_settings"], raw["retrieval_settings"]  # which are in another file
    dtype = str(next(iter(named.values())).dtype).removeprefix("torch.")
    if origin is not None and origin.raw_config["model_type"] != "dlm_rag":
        named = _to_family_tensors(named, config, origin.family)
        raw = _update_raw_config(origin.raw_config, config)
    place = folder / "config.json"
    raw |= {**extra, "dtype": dtype, "torch_dtype": dtype}  # transformers from 5 on reads the first
    place.write_text(json.dumps(raw, indent=2) + "\n", encoding="utf-8")
    for stale in (WEIGHTS_FILE, INDEX_FILE):  # of a model that was here before
        (folder / stale).unlink(missing_ok=True)
    split = split_torch_state_dict_into_shards(named, max_shard_size=SHARD_BYTES)
    for name, held in split.filename_to_tensors.items():
        save_file({ours: named[ours] for ours in held}, folder / name, metadata={"format": "pt"})
        (folder / name).chmod(place.stat().st_mode)  # else it is for its owner alone
    if split.is_sharded:
        index = {"metadata": split.metadata, "weight_map": split.tensor_to_filename}
        (folder / INDEX_FILE).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")


def write_generation_config(folder: Path, config: DenoiserConfig, **extra: Any) -> None:
    """Writes the settings of `config` and `extra` keys into the folder's file, beside what is in it."""
    path = folder / GENERATION_FILE
    found = (hub.read_checkpoint_json(path) if path.exists() else {}) | extra
    found |= {"decode": config.decode_settings, "retrieval": config.retrieval_settings}
    kept = {key: value for key, value in found.items() if value not in ({}, None)}
    path.write_text(json.dumps(kept, indent=2) + "\n", encoding="utf-8")


def _to_family_tensors(
    tensors: dict[str, Tensor], config: DenoiserConfig, family: Family
) -> dict[str, Tensor]:
    """Tensors by our names as those of a family: what is one tensor there, or many, is so again."""
    pieces: dict[str, dict[int, Tensor]] = {}
    for ours, value in tensors.items():
        for part in family.list_sources(ours, tuple(value.shape), config):
            pieces.setdefault(part.name, {})[part.first_source_row] = value[part.target_index]
    return {
        name: torch.cat([found[start] for start in sorted(found)]) if len(found) > 1 else found[0]
        for name, found in pieces.items()
    }


def _update_raw_config(raw: dict[str, Any], config: DenoiserConfig) -> dict[str, Any]:
    """A public checkpoint's config with what training has changed."""
    found = {**raw, **{key: getattr(config, name) for key, name in DLM_RAG_FIELDS.items()}}
    found[BLOCK_SIZE_KEY] = config.block_size or 0  # whatever the family says
    found["mask_token_id"] = config.mask_token_id
    now: dict[str, Any] = dict.fromkeys(("tie_word_embeddings", "weight_tying"), config.tie_word_embeddings)
    now |= dict.fromkeys(("max_position_embeddings", "max_sequence_length"), config.max_position_embeddings)
    now |= {key: max(raw.get(key, 0), config.vocab_size) for key in ("vocab_size", "embedding_size")}
    found |= {key: value for key, value in now.items() if key in raw}
    if isinstance(raw.get("rope_parameters"), dict):
        found["rope_parameters"] = {**raw["rope_parameters"], "rope_theta": config.rope_theta}
    else:
        found["rope_theta"] = config.rope_theta
    return found


def _check_values(part: TensorSource, value: Tensor, ours: str) -> None:
    """Refuses values that are not finite, by a sample, and gains or embeddings that are all zero."""
    sample = value.flatten()
    sample = sample[:: max(1, len(sample) // SAMPLED_VALUES_PER_TENSOR)]
    if not bool(sample.isfinite().all()):
        kind = str(value.dtype).removeprefix("torch.")
        raise CheckpointError(f"{part.path}: {part.name} has values that are not finite in {kind}")
    if ours.endswith(("norm.weight", "embed_tokens.weight")) and not (sample.any() or value.any()):
        raise CheckpointError(f"{part.path}: {part.name} has only zeros")


def merge_adapter(folder: Path) -> Path:
    """Returns the folder of an adapter merged into its base, made at the first use.

    W becomes W + alpha / r B A (LoRA, arXiv 2106.09685), in the base's dtype. Embeddings that the base
    lacks get the mean of its own. Raises `CheckpointError` for an adapter of another kind or another base.
    """
    config = hub.read_checkpoint_json(folder / hub.ADAPTER_CONFIG)
    base_name = config.get("base_model_name_or_path")
    if not isinstance(base_name, str) or not base_name:
        raise CheckpointError(f"{folder / hub.ADAPTER_CONFIG} does not name its base_model_name_or_path")
    base = hub.resolve_hub_folder(base_name, f"the base of {folder}:")
    if (base / hub.ADAPTER_CONFIG).exists():
        raise CheckpointError(f"{base}, the base of {folder}, is an adapter itself: merge that one first")
    is_own, revision = Path(base_name).expanduser().is_dir(), config.get("revision")
    if not is_own and revision not in (None, "main", base.name):  # the name of a snapshot on the hub
        raise CheckpointError(f"{folder}: its base is of revision {revision!r:.60}: merge it with peft")
    hub.check_checkpoint_files(base, hub.HUB_FILE_PATTERNS)
    scale, own = _read_scale(folder, config), folder / "config.json"
    shape = hub.read_checkpoint_json(own if own.exists() else base / "config.json")
    if shape.get("quantization_config"):
        raise CheckpointError(f"{base}, the base of {folder}, is quantized: name one that is not")
    problem = f"{folder} cannot be merged into its base {base}, fetch or write them again"
    inputs = [path for home in (folder, base) for path in sorted(home.iterdir()) if path.is_file()]
    digests = [f"{path.name} {digest_file(path)}" for path in inputs if path.name[0] != "."]
    name = make_folder_name(folder.name, "merged", MERGE_VERSION, *digests)

    def build(scratch: Path) -> None:
        texts = [path for home in (base, folder) for kind in TEXT_FILES for path in home.glob(kind)]
        for path in texts:
            if path.name not in (hub.ADAPTER_CONFIG, DIGESTS_FILE):
                shutil.copyfile(path, scratch / path.name)
        with translate_failures(CheckpointError, problem):
            _merge_weights(folder, base, scratch, scale, shape.get("vocab_size"))
            _add_mask_token(scratch, shape.get("mask_token_id"))

    return build_once(get_cache_folder() / "models" / name, build)


def _read_scale(folder: Path, config: dict[str, Any]) -> tuple[float, float]:
    """Returns r, and alpha / r, or alpha / sqrt(r) for rank-stabilised LoRA."""
    place = folder / hub.ADAPTER_CONFIG
    if (kind := config.get("peft_type")) != "LORA":
        raise CheckpointError(f"{place}: peft_type={kind!r:.40} is not supported, LORA is")
    for key, accepted in PLAIN_VALUES.items():
        if (value := config.get(key)) not in accepted:
            raise CheckpointError(f"{place}: {key}={value!r:.60} is not supported: merge it with peft")
    rank, alpha = numbers = config.get("r", 0), config.get("lora_alpha", 0)
    if not all(type(value) in (int, float) and 0 < value < 2**20 for value in numbers):
        raise CheckpointError(f"{place}: r and lora_alpha must be numbers above 0")
    return rank, float(alpha / (rank**0.5 if config.get("use_rslora") else rank))


def _merge_weights(folder: Path, base: Path, target: Path, scale: Sequence[float], vocabulary: Any) -> None:
    shards = stored_tensors.list_shards(base)
    with safe_open(folder / ADAPTER_WEIGHTS, framework="pt") as adapter:
        pairs = _list_pairs(folder / ADAPTER_WEIGHTS, list(adapter.keys()))
        with report_progress(f"merging {folder.name}", len(shards)) as advance:
            for shard in shards:
                merged: dict[str, Tensor] = {}
                with safe_open(shard, framework="pt") as file:
                    for name in file.keys():  # noqa: SIM118 - not a dict
                        value = file.get_tensor(name)
                        if name in pairs:
                            a, b = (adapter.get_tensor(key) for key in pairs.pop(name))
                            value = _add_product(folder, name, value, a, b, scale=scale)
                        is_embedding = name.endswith(("embed_tokens.weight", "lm_head.weight"))
                        if is_embedding and isinstance(vocabulary, int):
                            mean = value.float().mean(0, keepdim=True).to(value.dtype)
                            value = torch.cat((value, mean.expand(max(0, vocabulary - len(value)), -1)))
                        merged[name] = value
                save_file(merged, target / shard.name, metadata={"format": "pt"})
                advance(1)
    if pairs:
        raise CheckpointError(f"{folder}: {next(iter(pairs))} is not a tensor of its base {base}")


def _list_pairs(path: Path, names: list[str]) -> dict[str, tuple[str, str]]:
    """Returns by the name of each weight the names of its A and B."""
    pairs = {}
    for name in names:
        a, b = name.replace(".lora_B.", ".lora_A."), name.replace(".lora_A.", ".lora_B.")
        if a == b or a not in names or b not in names:
            raise CheckpointError(f"{path}: {name:.80} is not a part of a LoRA pair")
        pairs[a.removeprefix(PEFT_PREFIX).replace(".lora_A.weight", ".weight")] = a, b
    return pairs


def _add_product(folder: Path, name: str, value: Tensor, *pair: Tensor, scale: Sequence[float]) -> Tensor:
    (a, b), (rank, factor) = pair, scale
    if a.dim() != 2 or (len(a), a.shape[1]) != (rank, *value.shape[1:]) or b.shape != (len(value), rank):
        raise CheckpointError(
            f"{folder}: the adapter of {name} has the shapes {(*b.shape,)} and {(*a.shape,)}, its weight "
            f"{(*value.shape,)}, and r={rank}: this is an adapter of another model"
        )
    return (value.float() + factor * (b.float() @ a.float())).to(value.dtype)


def _add_mask_token(folder: Path, mask_id: Any) -> None:
    """Adds the mask token to the tokenizer where it has none of that id."""
    from transformers import PreTrainedTokenizerFast

    if not isinstance(mask_id, int) or not (folder / "tokenizer.json").is_file():
        return
    tokenizer = PreTrainedTokenizerFast.from_pretrained(folder)
    if mask_id == len(tokenizer) and tokenizer.mask_token is None:
        tokenizer.add_special_tokens({"mask_token": "<|mask|>"})
        tokenizer.save_pretrained(folder)
