"""LoRA adapters in PEFT's format, merged once into a checkpoint folder of the cache.

An adapter folder holds `adapter_config.json` and `adapter_model.safetensors`. A `config.json` beside them
says what the merged model is (as `train.py` exports it); without one the model keeps its base's config.
After merging the folder is a checkpoint like any other.
"""

import shutil
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from dlm_rag.errors import CheckpointError
from dlm_rag.files.build_once import DIGESTS_FILE, build_once, make_folder_name
from dlm_rag.files.hub import check_checkpoint_files, read_checkpoint_json, resolve_hub_folder
from dlm_rag.files.paths import digest_file, get_cache_folder
from dlm_rag.progress import report_progress

ADAPTER_CONFIG, ADAPTER_WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
PEFT_PREFIX = "base_model.model."
MERGE_VERSION = 1
# Keys of `adapter_config.json` whose other values change the product in a way that is not merged here.
PLAIN_VALUES: dict[str, tuple[Any, ...]] = {
    "use_dora": (False, None), "fan_in_fan_out": (False, None), "bias": ("none", None),
    "modules_to_save": (None, []), "rank_pattern": ({}, None), "alpha_pattern": ({}, None),
}  # fmt: skip
TEXT_FILES = ("*.json", "*.txt", "*.jinja")


def merge_adapter(folder: Path) -> Path:
    """Returns the folder of an adapter merged into its base, made at the first use.

    W becomes W + alpha / r B A (LoRA, arXiv 2106.09685), in the base's dtype. Embeddings that the base
    lacks get the mean of its own. Raises `CheckpointError` for an adapter of another kind or another base.
    """
    check_checkpoint_files(folder, ["*.json", "*.safetensors"])
    config = read_checkpoint_json(folder / ADAPTER_CONFIG)
    base_name, scale = config.get("base_model_name_or_path"), _read_scale(folder, config)
    if not isinstance(base_name, str) or not base_name:
        raise CheckpointError(f"{folder / ADAPTER_CONFIG} does not name its base_model_name_or_path")
    base = resolve_hub_folder(base_name, f"the base of {folder}:")
    if (base / ADAPTER_CONFIG).exists():
        raise CheckpointError(f"{base}, the base of {folder}, is an adapter itself: merge that one first")
    inputs = [path for home in (folder, base) for path in sorted(home.iterdir()) if path.is_file()]
    digests = [f"{path.name} {digest_file(path)}" for path in inputs if path.name[0] != "."]
    name = make_folder_name(folder.name, "merged", MERGE_VERSION, *digests)

    def build(scratch: Path) -> None:
        texts = [*(path for pattern in TEXT_FILES for path in base.glob(pattern)), *folder.glob("*.json")]
        for path in [*texts, *folder.glob("*.jinja")]:
            if path.name not in (ADAPTER_CONFIG, DIGESTS_FILE):
                shutil.copyfile(path, scratch / path.name)
        shape = read_checkpoint_json(scratch / "config.json")
        _merge_weights(folder, base, scratch, scale, shape.get("vocab_size"))
        _add_mask_token(scratch, shape.get("mask_token_id"))

    return build_once(get_cache_folder() / "models" / name, build)


def _read_scale(folder: Path, config: dict[str, Any]) -> float:
    """Returns alpha / r, or alpha / sqrt(r) for rank-stabilised LoRA."""
    place = folder / ADAPTER_CONFIG
    if (kind := config.get("peft_type")) != "LORA":
        raise CheckpointError(f"{place}: peft_type={kind!r:.40} is not supported, LORA is")
    for key, accepted in PLAIN_VALUES.items():
        if (value := config.get(key)) not in accepted:
            raise CheckpointError(f"{place}: {key}={value!r:.60} is not supported: merge it with peft")
    rank, alpha = config.get("r"), config.get("lora_alpha")
    for value in (rank, alpha):
        if not isinstance(value, int | float) or isinstance(value, bool) or not 0 < value < 2**20:
            raise CheckpointError(f"{place}: r and lora_alpha must be numbers above 0")
    assert rank is not None and alpha is not None
    return float(alpha / (rank**0.5 if config.get("use_rslora") else rank))


def _merge_weights(folder: Path, base: Path, target: Path, scale: float, vocabulary: int | None) -> None:
    shards = sorted(base.glob("*.safetensors"))
    if not shards:
        raise CheckpointError(f"{base} has no safetensors, and {folder} is an adapter of it")
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
                            value = _add_product(folder, name, value, a, b, scale)
                        if name.endswith(("embed_tokens.weight", "lm_head.weight")) and vocabulary:
                            value = _add_mean_rows(value, vocabulary)
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


def _add_product(folder: Path, name: str, value: Tensor, a: Tensor, b: Tensor, scale: float) -> Tensor:
    if a.dim() != 2 or b.dim() != 2 or a.shape[0] != b.shape[1] or (len(b), a.shape[1]) != value.shape:
        raise CheckpointError(
            f"{folder}: the adapter of {name} has the shapes {(*b.shape,)} and {(*a.shape,)}, its weight "
            f"{(*value.shape,)}: this is an adapter of another model"
        )
    return (value.float() + scale * (b.float() @ a.float())).to(value.dtype)


def _add_mean_rows(value: Tensor, count: int) -> Tensor:
    """Adds rows up to `count`, each the mean of those that are there."""
    mean = value.float().mean(0, keepdim=True).to(value.dtype)
    return torch.cat((value, mean.expand(max(0, count - len(value)), -1)))


def _add_mask_token(folder: Path, mask_id: Any) -> None:
    """Adds the mask token to the tokenizer where it has none of that id."""
    from transformers import PreTrainedTokenizerFast

    if not isinstance(mask_id, int) or not (folder / "tokenizer.json").is_file():
        return
    tokenizer = PreTrainedTokenizerFast.from_pretrained(folder)
    if mask_id == len(tokenizer) and tokenizer.mask_token is None:
        tokenizer.add_special_tokens({"mask_token": "<|mask|>"})
        tokenizer.save_pretrained(folder)
