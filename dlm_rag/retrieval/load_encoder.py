"""The encoder of dense retrieval: a sentence-transformers folder, checked before the library reads it.

The library imports what the files of a folder name: classes of modules, of tokenizers, of adapters,
kernels from the hub. Only names of its own are let through.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dlm_rag.errors import CheckpointError, is_failure, summarize_error
from dlm_rag.files.hub import HUB_FILE_PATTERNS, check_checkpoint_files, read_any_json, resolve_hub_folder
from dlm_rag.files.paths import expand_path

if TYPE_CHECKING:
    from sentence_transformers import SentenceTransformer

PROBE_TEXTS = ["Where was the first of them made, in 1900 or before?"]
_MISSING_WEIGHTS = re.compile(r"^\W*([\w.{}, -]*[\w}])\W*\|.*MISSING", re.MULTILINE)
_OWN_CLASS = re.compile(r"sentence_transformers(\.[A-Za-z]\w*)+")
# read from another folder, which is not checked
_EXTERNAL_FOLDER_KEYS = ("tokenizer_name_or_path", "processor_name")
_CODE_KEYS = ("custom_generate", "trust_remote_code", "code_revision", "use_kernels", "kernel_config")
_PICKLED = (".bin", ".pt", ".pth", ".ckpt", ".pkl", ".pickle")
_UNCHECKED_JSON_FILES = (
    "tokenizer.json",
    "vocab.json",
    "added_tokens.json",
    "model.safetensors.index.json",
)


def load_sentence_transformer(name: str, device: str | None) -> SentenceTransformer:
    """The sentence-transformers model in a folder or of a hub id, without running code of its own.

    Raises `CheckpointError`.
    """
    if "/" not in name and not expand_path(name, CheckpointError).exists():
        name = f"sentence-transformers/{name}"  # as the library reads short names
    folder = resolve_hub_folder(name, "embedding_model")
    try:
        check_encoder_files(folder)
    except CheckpointError as error:
        raise CheckpointError(f"embedding_model '{name}' is not loaded: {error}") from None
    from sentence_transformers import SentenceTransformer  # takes seconds to import
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()
    try:
        with _require_all_weights():
            encoder = SentenceTransformer(
                str(folder), device=device, trust_remote_code=False, local_files_only=True,
                model_kwargs={"use_safetensors": True},
            )  # fmt: skip
        tried = encoder.encode(PROBE_TEXTS, show_progress_bar=False)
        if not (abs(tried) < float("inf")).all() or not tried.any():
            raise CheckpointError(
                "what it makes of a text is zeros, or no numbers: its weights are damaged"
            )
        return encoder
    except BaseException as error:  # the libraries below raise many unrelated types
        if not is_failure(error):
            raise
        raise CheckpointError(
            f"embedding_model '{name}' could not be loaded: {summarize_error(error)}"
        ) from None


@contextmanager
def _require_all_weights() -> Iterator[None]:
    """Raises `CheckpointError` where transformers reports tensors that it had to make up.

    It only logs that, in colours. A missing pooler is unused; it
    is initialised with a fixed seed so that fingerprints are stable.
    """
    import torch

    reports: list[str] = []

    def keep(record: logging.LogRecord) -> bool:
        reports.append(record.getMessage())
        return "LOAD REPORT" not in reports[-1]

    logger = logging.getLogger("transformers.modeling_utils")
    level = logger.level
    logger.addFilter(keep)
    logger.setLevel(logging.WARNING)
    try:
        with torch.random.fork_rng(devices=()):
            torch.manual_seed(0)
            yield
    finally:
        logger.removeFilter(keep)
        logger.setLevel(level)
    missing = [name for name in _MISSING_WEIGHTS.findall("\n".join(reports)) if "pooler" not in name]
    if missing:
        raise CheckpointError(f"{missing[0]} is missing from its weights: the download may be incomplete")


def check_encoder_files(folder: Path) -> None:
    """Raises `CheckpointError` for a folder that brings code, or names code that is not the library's."""
    if not any(
        (folder / name).is_file() for name in ("modules.json", "config.json", "adapter_config.json")
    ):
        raise CheckpointError(f"{folder} is not a sentence-transformers model: it has no modules.json")
    for adapter in folder.rglob("adapter_config.json"):
        raise CheckpointError(f"{adapter.parent} holds an adapter: merge it into the weights")
    check_checkpoint_files(folder, [f"**/{pattern}" for pattern in HUB_FILE_PATTERNS])
    for place in (folder, *(path for path in folder.rglob("*") if path.is_dir())):
        if place != folder and place.is_symlink():
            raise CheckpointError(f"{place} leads to another folder: copy it")
        pickled = sorted(path.name for path in place.glob("*") if path.suffix in _PICKLED)
        # Under this name only: next to an index of shards, say, the library opens the pickle.
        if pickled and not (place / "model.safetensors").is_file():
            raise CheckpointError(
                f"{place} holds pickled weights ({pickled[0]}) and no model.safetensors: they are never "
                "opened, convert them or take them away"
            )
    for path in sorted(folder.rglob("*.json")):
        if path.name not in _UNCHECKED_JSON_FILES:
            for entries in _iterate_json_objects(read_any_json(path)):
                for key, value in entries.items():
                    _check_setting(path, key, value)
    for path in sorted(folder.rglob("config.json")):
        _check_architecture(path)


def _iterate_json_objects(value: Any) -> Iterator[dict[str, Any]]:
    """Every object in nested JSON."""
    if isinstance(value, dict):
        yield value
    for inner in value.values() if isinstance(value, dict) else value if isinstance(value, list) else ():
        yield from _iterate_json_objects(inner)


def _check_setting(path: Path, key: str, value: Any) -> None:
    """Raises `CheckpointError` for a setting by which code is found."""
    values = list(value.values()) if isinstance(value, dict) else [value]
    names = []
    # Classes of modules, of modules in modules, and of the tokenizers of word vectors: a plain word is
    # looked up among the libraries' own.
    if key == "types" or (key == "type" and path.name == "modules.json"):
        names = values
    elif key == "tokenizer_class":
        names = [name for name in values if not isinstance(name, str) or "." in name]
    for name in names:
        if not isinstance(name, str) or not _OWN_CLASS.fullmatch(name):
            raise CheckpointError(
                f"{path} names the class {name!r:.60}, which is not sentence-transformers' own: code that "
                "comes with a model is never run"
            )
    if key in _EXTERNAL_FOLDER_KEYS and value is not None:
        raise CheckpointError(f"{path} has {key}={value!r:.60}: copy those files into the folder")
    # Anything but a plain word names a kernel in a repository of the hub.
    kernel = key.endswith("attn_implementation") and not all(
        name is None or (isinstance(name, str) and re.fullmatch(r"\w+", name)) for name in values
    )
    if kernel or (key in _CODE_KEYS and value):
        raise CheckpointError(
            f"{path} has {key}={value!r:.60}, which asks for code of its own: it is never run"
        )


def _check_architecture(path: Path) -> None:
    """Raises `CheckpointError` for a model that only its own code can run."""
    from transformers import CONFIG_MAPPING

    settings = read_any_json(path)
    if isinstance(settings, dict) and "auto_map" in settings:
        kind = settings.get("model_type")
        if not isinstance(kind, str) or kind not in CONFIG_MAPPING:
            raise CheckpointError(
                f"{path} is of a '{kind!s:.60}' model, which only code of its own runs: that is refused"
            )
