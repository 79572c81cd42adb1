"""Checkpoint folders: the names of public models, translated to ours and checked before loading.

A folder holds `config.json`, `model.safetensors` (or an index and its shards) and a tokenizer.
Everything that can be wrong is found from the headers, before any weight is read. Code that comes
with a checkpoint is never run, pickled weights are never opened.
"""

import hashlib
import json
import logging
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, fields, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from dlm_rag.errors import CheckpointError, nearest
from dlm_rag.model.denoiser import Denoiser, DenoiserConfig

log = logging.getLogger(__name__)

WEIGHTS = "model.safetensors"
HUB_FILES = ["*.json", "*.safetensors", "*.txt", "*.jinja"]
SHARD_BYTES = 5 * 10**9
# What no public architecture knows and a checkpoint trained here carries all the same.
OWN_FIELDS = ("evidence_layout", "passage_length", "canvas_length", "block_length")
STATIC_ROPE = ("default", "linear", "llama3", "yarn")


@dataclass(frozen=True)
class Family:
    """A public architecture: how its config and its tensor names read in our words."""

    read: Callable[[dict[str, Any]], DenoiserConfig]
    rename: Callable[[str], str]  # our tensor name -> theirs


def _transformers_config(raw: dict[str, Any], **differences: Any) -> DenoiserConfig:
    """Fields that Dream, Qwen2, Qwen3 and Llama share; autoregressive ancestry shifts the output."""
    _refuse(raw, hidden_act="silu", use_sliding_window=False, mlp_bias=False)
    heads, width = _need(raw, "num_attention_heads"), _need(raw, "hidden_size")
    rope = raw.get("rope_parameters") or raw.get("rope_scaling") or {}
    return DenoiserConfig(
        vocab_size=_need(raw, "vocab_size"),
        hidden_size=width,
        num_hidden_layers=_need(raw, "num_hidden_layers"),
        num_attention_heads=heads,
        num_key_value_heads=raw.get("num_key_value_heads") or heads,
        head_dim=raw.get("head_dim") or width // heads,
        intermediate_size=_need(raw, "intermediate_size"),
        max_position_embeddings=_need(raw, "max_position_embeddings"),
        rms_norm_eps=_need(raw, "rms_norm_eps"),
        rope_theta=rope.get("rope_theta") or raw.get("rope_theta") or 10000.0,
        rope_scaling=_rope_scaling(rope),
        tie_word_embeddings=bool(raw.get("tie_word_embeddings", False)),
        mask_token_id=raw.get("mask_token_id"),
        shifted=True,
        **differences,
    )


def _rope_scaling(rope: dict[str, Any]) -> dict[str, Any] | None:
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind == "default":
        return None
    if kind not in STATIC_ROPE:
        raise CheckpointError(
            f"rope type '{kind}' depends on the length of the text, which the denoiser does not do"
            f" (it reads {', '.join(STATIC_ROPE)})"
        )
    return {**rope, "rope_type": kind}


def _qkv_bias_family(raw: dict[str, Any]) -> DenoiserConfig:
    return _transformers_config(raw, qkv_bias=True)


def _qwen3(raw: dict[str, Any]) -> DenoiserConfig:
    _refuse(raw, attention_bias=False)
    return _transformers_config(raw, qk_norm=True)


def _llama(raw: dict[str, Any]) -> DenoiserConfig:
    _refuse(raw, attention_bias=False)
    return _transformers_config(raw)


def _llada(raw: dict[str, Any]) -> DenoiserConfig:
    _refuse(
        raw, activation_type="silu", alibi=False, attention_layer_norm=False,
        bias_for_layer_norm=False, block_type="llama", include_bias=False, include_qkv_bias=False,
        input_emb_norm=False, layer_norm_type="rms", rope=True, scale_logits=False,
    )  # fmt: skip
    heads, width = _need(raw, "n_heads"), _need(raw, "d_model")
    return DenoiserConfig(
        vocab_size=raw.get("embedding_size") or _need(raw, "vocab_size"),
        hidden_size=width,
        num_hidden_layers=_need(raw, "n_layers"),
        num_attention_heads=heads,
        num_key_value_heads=raw.get("n_kv_heads") or heads,
        head_dim=width // heads,
        intermediate_size=_need(raw, "mlp_hidden_size"),
        max_position_embeddings=_need(raw, "max_sequence_length"),
        rms_norm_eps=_need(raw, "rms_norm_eps"),
        rope_theta=_need(raw, "rope_theta"),
        tie_word_embeddings=bool(raw.get("weight_tying", False)),
        mask_token_id=_need(raw, "mask_token_id"),
    )


def _ours(raw: dict[str, Any]) -> DenoiserConfig:
    known = {item.name for item in fields(DenoiserConfig)}
    return DenoiserConfig(**{key: value for key, value in raw.items() if key in known})


def _transformers_name(ours: str) -> str:
    return ours if ours.startswith("lm_head.") else f"model.{ours}"


_LLADA_NAMES = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "q_proj",
    "self_attn.k_proj": "k_proj",
    "self_attn.v_proj": "v_proj",
    "self_attn.o_proj": "attn_out",
    "post_attention_layernorm": "ff_norm",
    "mlp.gate_proj": "ff_proj",
    "mlp.up_proj": "up_proj",
    "mlp.down_proj": "ff_out",
    "embed_tokens": "wte",
    "norm": "ln_f",
    "lm_head": "ff_out",
}


def _llada_name(ours: str) -> str:
    path, _, kind = ours.rpartition(".")
    if path.startswith("layers."):
        _, index, part = path.split(".", 2)
        return f"model.transformer.blocks.{index}.{_LLADA_NAMES[part]}.{kind}"
    return f"model.transformer.{_LLADA_NAMES[path]}.{kind}"


FAMILIES = {
    "dlm_rag": Family(_ours, lambda name: name),
    "llada": Family(_llada, _llada_name),
    "Dream": Family(_qkv_bias_family, _transformers_name),
    "qwen2": Family(_qkv_bias_family, _transformers_name),
    "qwen3": Family(_qwen3, _transformers_name),
    "llama": Family(_llama, _transformers_name),
}


@dataclass(frozen=True)
class Checkpoint:
    """A folder whose config and tensor headers have been checked; weights are read by `load_into`."""

    folder: Path
    family: Family
    raw: dict[str, Any]  # config.json as it stands
    config: DenoiserConfig
    homes: dict[str, tuple[Path, str]]  # our tensor name -> file, name in that file

    def load_into(self, denoiser: Denoiser, device: torch.device, dtype: torch.dtype) -> None:
        """Reads every tensor straight to its place; one tensor at a time is in flight."""
        by_file: dict[Path, dict[str, str]] = {}
        for ours, (path, theirs) in self.homes.items():
            by_file.setdefault(path, {})[ours] = theirs
        for path, names in by_file.items():
            with safe_open(path, framework="pt", device=str(device)) as file:
                values = {
                    ours: nn.Parameter(file.get_tensor(theirs).to(device, dtype))
                    for ours, theirs in names.items()
                }
            denoiser.load_state_dict(values, strict=False, assign=True)
        denoiser.tie()
        denoiser.to(device)

    @cached_property
    def fingerprint(self) -> str:
        """Digest of config, tokenizer and samples of every shard: other weights, other digest.

        A fine-tuned copy differs nearly everywhere, so 64 blocks of 4 kB a shard tell it apart
        without reading gigabytes.
        """
        digest = hashlib.sha256()
        for name in ("config.json", "tokenizer.json", "vocab.json", "tokenizer_config.json"):
            if (self.folder / name).is_file():
                digest.update((self.folder / name).read_bytes())
        for path in sorted({path for path, _ in self.homes.values()}):
            size = path.stat().st_size
            digest.update(f"{path.name} {size}".encode())
            with path.open("rb") as file:
                for block in range(64):
                    file.seek(size * block // 64)
                    digest.update(file.read(4096))
        return digest.hexdigest()

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


def save(denoiser: Denoiser, folder: Path, extra: dict[str, Any]) -> None:
    """Writes a folder that `open_checkpoint` reads; `extra` keys join the config (prompt, end ids)."""
    save_tensors(denoiser.state_dict(), denoiser.config, folder, extra)


def save_tensors(
    tensors: dict[str, Tensor],
    config: DenoiserConfig,
    folder: Path,
    extra: dict[str, Any],
    origin: Checkpoint | None = None,
) -> None:
    """As `save`, from tensors by our names; in shards of at most `SHARD_BYTES`.

    With `origin` the folder gets that checkpoint's family, tensor names and config, with what `config`
    says otherwise.
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
    with torch.device("meta"):
        wanted = {name: tuple(value.shape) for name, value in Denoiser(config).state_dict().items()}
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


def _need(raw: dict[str, Any], key: str) -> Any:
    if raw.get(key) is None:
        raise CheckpointError(f"the key '{key}' is missing{nearest(key, raw)}")
    return raw[key]


def _refuse(raw: dict[str, Any], **supported: Any) -> None:
    for key, value in supported.items():
        if raw.get(key, value) not in (value, None):
            raise CheckpointError(f"{key}={raw[key]!r} is not supported (only {value!r} is)")
