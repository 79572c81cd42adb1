"""What a family consists of, and how a public config is read: by name, nothing guessed."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from dlm_rag.errors import CheckpointError, suggest_nearest
from dlm_rag.files.hub import read_checkpoint_json
from dlm_rag.model.denoiser_config import DenoiserConfig
from dlm_rag.model.stored_scales import ScaleSource

NamedShapes = dict[str, tuple[tuple[int, ...], tuple[str, ...]]]
BLOCK_SIZE_KEY = "attention_block"  # our key: a public `block_size` may be something else


@dataclass(frozen=True)
class TensorSource:
    """A tensor of a public checkpoint, or a part of it, and where it goes in a tensor of ours."""

    name: str
    source_index: tuple[slice, ...] = ()  # of theirs; empty: all
    target_index: tuple[Any, ...] = ()  # in ours: the number of the expert, then its rows; else all of it
    scales: ScaleSource | None = None  # where it is stored quantised

    @property
    def first_source_row(self) -> int:
        return int(self.source_index[0].start or 0) if self.source_index else 0

    def read(self, file: Any, path: Path, rows: slice | None = None) -> Tensor:
        """From an open file of safetensors, at `path`; rows: of those that it consists of, None: all."""
        index = self.source_index
        if rows is not None:
            begin = self.first_source_row
            index = (slice(begin + rows.start, begin + rows.stop), *index[1:])
        found: Tensor
        if self.scales is not None:
            found = self.scales.dequantize(file.get_tensor(self.name), file, path)
            return found[index].clone() if index else found
        found = file.get_slice(self.name)[index] if index else file.get_tensor(self.name)
        return found


@dataclass(frozen=True)
class Family:
    """A public architecture: how its config and its tensor names read in our words."""

    read_config: Callable[[dict[str, Any]], DenoiserConfig]
    rename_tensor: Callable[[str], str]  # our tensor name -> theirs
    # The name of its mask token, by which the tokenizer knows the id where the config does not say it;
    # None: autoregressive, or its configs always say it.
    mask_token: str | None = None
    autoregressive: bool = False  # where its config has no mask

    fused_qkv: bool = False  # one tensor holds queries, keys and values, in this order
    separate_experts: bool = True  # each expert has tensors of its own
    # A family that runs on the class of another library: how its model is loaded, what other files of a
    # folder add to its config, and from config.json the tensors that it needs, each with its shape and the
    # names of those tied to it.
    load: Callable[[Any, torch.device, torch.dtype], Any] | None = None
    complete_config: Callable[[Path, DenoiserConfig], DenoiserConfig] | None = None
    list_named_shapes: Callable[[dict[str, Any], Path], NamedShapes] | None = None

    def list_sources(self, ours: str, config: DenoiserConfig) -> list[TensorSource]:
        """The tensors of theirs that one of ours consists of."""
        path, _, last = ours.rpartition(".")
        if self.separate_experts and config.experts is not None and path.endswith(".experts"):
            inner = config.experts.moe_intermediate_size
            pieces: dict[str, tuple[slice, ...]] = {"down_proj": ()}
            if last == "gate_up_proj":
                pieces = {"gate_proj": (slice(0, inner),), "up_proj": (slice(inner, 2 * inner),)}
            return [
                TensorSource(self.rename_tensor(f"{path}.{n}.{name}.weight"), target_index=(n, *rows))
                for n in range(config.experts.num_experts)
                for name, rows in pieces.items()
            ]
        rows: tuple[slice, ...] = ()
        if self.fused_qkv and path.endswith(("q_proj", "k_proj", "v_proj")):
            queries = config.num_attention_heads * config.head_dim
            keys = config.num_key_value_heads * config.head_dim
            start = {"q": 0, "k": queries, "v": queries + keys}[path[-6]]
            rows = (slice(start, start + (keys if start else queries)),)
        return [TensorSource(self.rename_tensor(ours), rows)]


def read_transformers_config(raw: dict[str, Any], **differences: Any) -> DenoiserConfig:
    """Fields that most families share; autoregressive ancestry shifts the output."""
    require_supported_values(raw, hidden_act="silu", use_sliding_window=False, mlp_bias=False)
    heads, width = (require_positive_int(raw, key) for key in ("num_attention_heads", "hidden_size"))
    key = "rope_parameters" if raw.get("rope_parameters") else "rope_scaling"
    rope = raw.get(key) or {}
    if not isinstance(rope, dict):
        raise CheckpointError(f"{key}={rope!r:.60} must be an object or null")
    if "partial_rotary_factor" not in differences:
        for said in (raw, rope):
            require_supported_values(said, partial_rotary_factor=1.0)
    if any(kind != "full_attention" for kind in raw.get("layer_types") or ()):
        raise CheckpointError("layer_types may be full_attention only")
    kind = rope.get("rope_type", rope.get("type", "default"))
    same = (
        "vocab_size", "num_hidden_layers", "intermediate_size", "max_position_embeddings", "rms_norm_eps",
    )  # fmt: skip
    shared = {name: require_key(raw, name) for name in same} | {
        "hidden_size": width,
        "num_attention_heads": heads,
        "num_key_value_heads": raw.get("num_key_value_heads") or heads,
        "head_dim": raw.get("head_dim") or width // heads,
        "rope_theta": rope.get("rope_theta") or raw.get("rope_theta") or 10000.0,
        "rope_scaling": None if kind == "default" else {**rope, "rope_type": kind},
        "tie_word_embeddings": read_tie_flag(raw, "tie_word_embeddings"),
        "mask_token_id": raw.get("mask_token_id"),
        "shifted": True,
    }
    return DenoiserConfig(**(shared | differences))


def to_transformers_name(ours: str) -> str:
    return ours if ours.startswith("lm_head.") else f"model.{ours}"


def require_key(raw: dict[str, Any], key: str, remedy: str = "") -> Any:
    """The value of a key; raises `CheckpointError` where it is missing."""
    if raw.get(key) is None:
        raise CheckpointError(f"the key '{key}' is missing{remedy or suggest_nearest(key, raw)}")
    return raw[key]


def require_positive_int(raw: dict[str, Any], key: str) -> int:
    """The value of a key, a whole number of at least 1; raises `CheckpointError`."""
    value = require_key(raw, key)
    if not isinstance(value, int) or value < 1:
        raise CheckpointError(f"{key}={value!r:.60} must be a whole number of at least 1")
    return value


def read_tie_flag(raw: dict[str, Any], key: str) -> Any:
    """The value of a key, false where it is missing or null; `DenoiserConfig` checks all others."""
    return False if (value := raw.get(key)) is None else value


def require_supported_values(raw: dict[str, Any], **supported: Any) -> None:
    """Raises `CheckpointError` for a key with a value that the denoiser does not support."""
    for key, value in supported.items():
        if raw.get(key, value) not in (value, None):
            raise CheckpointError(f"{key}={raw[key]!r:.60} is not supported (only {value!r} is)")


def find_mask_token_id(folder: Path, usual: str) -> int:
    """The id of the token that the folder declares as its mask, else of the family's `usual` one.

    Raises `CheckpointError` where the files know neither.
    """
    declared, ids = None, dict[str, Any]()
    for name in ("tokenizer_config.json", "special_tokens_map.json", "added_tokens.json", "tokenizer.json"):
        if name == "tokenizer.json" and (declared or usual) in ids:
            break  # it is long, and needed only where the others do not say it
        raw = read_checkpoint_json(folder / name) if (folder / name).exists() else {}
        if name == "added_tokens.json":
            ids |= raw  # ids by text, and nothing else
            continue
        declared = declared or _get_content(raw.get("mask_token"))
        ids |= _read_added_tokens(raw)
    found = ids.get(declared or usual)
    if type(found) is not int:
        raise CheckpointError(
            "the key 'mask_token_id' is missing, and the tokenizer has not added "
            f"{declared or usual!r:.60}{', which it declares' if declared else ''}: add the key"
        )
    return found


def _read_added_tokens(raw: dict[str, Any]) -> dict[str, Any]:
    """Ids by text of the tokens that a file adds to the vocabulary; all else is passed over."""
    listed, by_id = raw.get("added_tokens"), raw.get("added_tokens_decoder")
    tokens = [token for token in listed if isinstance(token, dict)] if isinstance(listed, list) else []
    added = [(token, token.get("id")) for token in tokens]
    if isinstance(by_id, dict):
        added += [(token, int(number)) for number, token in by_id.items() if number.isdecimal()]
    return {text: number for token, number in added if (text := _get_content(token)) is not None}


def _get_content(token: Any) -> str | None:
    """The text of a token, which these files give as it is or with its settings, if it is one."""
    content = token.get("content") if isinstance(token, dict) else token
    return content if isinstance(content, str) else None
