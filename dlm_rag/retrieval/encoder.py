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

from dlm_rag.errors import CheckpointError, fold_message, is_failure
from dlm_rag.files.hub import HUB_FILES, check_files, locate, read_any_json
from dlm_rag.files.records import expand

if TYPE_CHECKING:
    from sentence_transformers import SentenceTransformer

PROBE = ["Where was the first of them made, in 1900 or before?"]
_LACKING = re.compile(r"^\W*([\w.{}, -]*[\w}])\W*\|.*MISSING", re.MULTILINE)
_OWN_CLASS = re.compile(r"sentence_transformers(\.[A-Za-z]\w*)+")
_ELSEWHERE = ("tokenizer_name_or_path", "processor_name")  # read from another folder, which is not checked
_CODE_KEYS = ("custom_generate", "trust_remote_code", "code_revision", "use_kernels", "kernel_config")
_PICKLED = (".bin", ".pt", ".pth", ".ckpt", ".pkl", ".pickle")
_NO_SETTINGS = ("tokenizer.json", "vocab.json", "added_tokens.json", "model.safetensors.index.json")


def load_encoder(name: str, device: str | None) -> SentenceTransformer:
    """The sentence-transformers model in a folder or of a hub id, without running code of its own.

    Raises `CheckpointError`.
    """
    if "/" not in name and not expand(name, CheckpointError).exists():
        name = f"sentence-transformers/{name}"  # as the library reads short names
    folder = locate(name, "dense_model")
    try:
        check_encoder(folder)
    except CheckpointError as error:
        raise CheckpointError(f"dense_model '{name}' is not loaded: {error}") from None
    from sentence_transformers import SentenceTransformer  # takes seconds to import
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()
    try:
        with _whole():
            encoder = SentenceTransformer(
                str(folder), device=device, trust_remote_code=False, local_files_only=True,
                model_kwargs={"use_safetensors": True},
            )  # fmt: skip
        tried = encoder.encode(PROBE, show_progress_bar=False)
        if not (abs(tried) < float("inf")).all() or not tried.any():
            raise CheckpointError(
                "what it makes of a text is zeros, or no numbers: its weights are damaged"
            )
        return encoder
    except BaseException as error:  # the libraries below raise many unrelated types
        if not is_failure(error):
            raise
        raise CheckpointError(f"dense_model '{name}' could not be loaded: {fold_message(error)}") from None


@contextmanager
def _whole() -> Iterator[None]:
    """Raises `CheckpointError` where transformers reports tensors that it had to make up.

    It only logs that, in colours. A pooler that lacks is not read by sentence-transformers' own pooling; it
    is made up the same at every start, for the vectors on disk go by all weights.
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
    lacking = [name for name in _LACKING.findall("\n".join(reports)) if "pooler" not in name]
    if lacking:
        raise CheckpointError(f"its weights lack {lacking[0]}: the download may be incomplete")


def check_encoder(folder: Path) -> None:
    """Raises `CheckpointError` for a folder that brings code, or names code that is not the library's."""
    if not any(
        (folder / name).is_file() for name in ("modules.json", "config.json", "adapter_config.json")
    ):
        raise CheckpointError(f"{folder} is no sentence-transformers model: it has no modules.json")
    for adapter in folder.rglob("adapter_config.json"):
        raise CheckpointError(f"{adapter.parent} holds an adapter: merge it into the weights")
    check_files(folder, [f"**/{pattern}" for pattern in HUB_FILES])
    for place in (folder, *(path for path in folder.rglob("*") if path.is_dir())):
        if place != folder and place.is_symlink():
            raise CheckpointError(f"{place} leads to another folder: copy it")
        pickled = sorted(path.name for path in place.glob("*") if path.suffix in _PICKLED)
        # By this name: beside another, an index say, the library opens the pickle.
        if pickled and not (place / "model.safetensors").is_file():
            raise CheckpointError(
                f"{place} holds pickled weights ({pickled[0]}) and no model.safetensors: they are never "
                "opened, convert them or take them away"
            )
    for path in sorted(folder.rglob("*.json")):
        if path.name not in _NO_SETTINGS:
            for entries in _objects(read_any_json(path)):
                for key, value in entries.items():
                    _check_setting(path, key, value)
    for path in sorted(folder.rglob("config.json")):
        _check_architecture(path)


def _objects(value: Any) -> Iterator[dict[str, Any]]:
    """Every object in nested JSON."""
    if isinstance(value, dict):
        yield value
    for inner in value.values() if isinstance(value, dict) else value if isinstance(value, list) else ():
        yield from _objects(inner)


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
    if key in _ELSEWHERE and value is not None:
        raise CheckpointError(f"{path} has {key}={value!r:.60}: copy those files into the folder")
    # What is no plain word here is a kernel in a repository of the hub.
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
