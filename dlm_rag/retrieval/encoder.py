"""The encoder of dense retrieval: a sentence-transformers folder or hub id, none of whose code is run."""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from dlm_rag.config import RetrievalConfig
from dlm_rag.errors import CheckpointError, RunError, translate_failures
from dlm_rag.files.build_once import make_folder_name
from dlm_rag.files.hub import HUB_FILE_PATTERNS, check_checkpoint_files, read_any_json, resolve_hub_folder
from dlm_rag.files.paths import expand_path, resolve_path_inside
from dlm_rag.machine import has_bfloat16

if TYPE_CHECKING:
    from sentence_transformers import SentenceTransformer

BATCH_SIZE = 64  # texts embedded at once
PROBE_TEXTS = ["Where was the first of them made, in 1900 or before?"]
_ELSEWHERE = ("tokenizer_name_or_path", "processor_name")  # settings that name another folder
_PICKLED = (".bin", ".pt", ".pth", ".ckpt", ".pkl", ".pickle")


class TextEncoder:
    """The sentence-transformers model that a config names (a folder or hub id), and its prompts.

    Raises `CheckpointError` when the model cannot be loaded, `RunError` when its vectors are not finite.
    """

    def __init__(self, config: RetrievalConfig) -> None:
        self.model = config.embedding_model
        self._encoder = load_sentence_transformer(self.model)
        self._query_prompt, self._passage_prompt = config.query_prompt, config.passage_prompt
        self.device = self._encoder.device
        self.index_folder_name = make_folder_name(
            "dense", Path(self.model).name, _fingerprint_encoder(self._encoder), self._passage_prompt
        )

    def encode_queries(self, texts: list[str]) -> Tensor:
        """(n, width) float32 unit vectors."""
        return self._embed(texts, self._query_prompt)

    def encode_passages(self, texts: list[str]) -> Tensor:
        """(n, width) float32 unit vectors."""
        return self._embed(texts, self._passage_prompt)

    def _embed(self, texts: list[str], prompt: str) -> Tensor:
        found = self._encoder.encode(
            texts, prompt=prompt or None, batch_size=BATCH_SIZE, convert_to_tensor=True,
            normalize_embeddings=True, show_progress_bar=False,
        ).float()  # fmt: skip
        if not torch.isfinite(found).all():
            raise RunError(
                f"embedding_model '{self.model}' gives vectors that are not finite: its weights are damaged"
            )
        return found


def load_sentence_transformer(name: str, device: str | None = None) -> SentenceTransformer:
    """The sentence-transformers model in a folder or of a hub id, tried on one text.

    Without `trust_remote_code` the library (from 6.0 on) and transformers import nothing that a folder
    names; pickles and adapters, whose base models lie elsewhere, are refused here. Raises
    `CheckpointError`.
    """
    if "/" not in name and not expand_path(name, CheckpointError).exists():
        name = f"sentence-transformers/{name}"  # as the library reads short names
    folder = resolve_hub_folder(name, "embedding_model")
    _check_encoder_files(folder)
    with translate_failures(CheckpointError, f"embedding_model '{name}' could not be loaded"):
        from sentence_transformers import SentenceTransformer  # takes seconds to import
        from transformers.utils.logging import disable_progress_bar

        disable_progress_bar()
        with _require_all_weights():
            encoder = SentenceTransformer(
                str(folder), device=device, trust_remote_code=False, local_files_only=True,
                model_kwargs={"use_safetensors": True},
            )  # fmt: skip
        if not has_bfloat16(encoder.device) and any(
            p.dtype == torch.bfloat16 for p in encoder.parameters()
        ):
            encoder.float()  # which would only be emulated; float16 may be too narrow
        tried = encoder.encode(PROBE_TEXTS, show_progress_bar=False)
        if not (abs(tried) < float("inf")).all() or not tried.any():
            raise RunError("its vector of a text is zero or not finite: its weights are damaged")
    return encoder


def _check_encoder_files(folder: Path) -> None:
    """Raises `CheckpointError` for pickles, adapters, and names of other folders."""
    if not (folder / "modules.json").is_file() and not (folder / "config.json").is_file():
        raise CheckpointError(f"{folder} is not a sentence-transformers model: it has no modules.json")
    check_checkpoint_files(folder, [f"**/{pattern}" for pattern in HUB_FILE_PATTERNS])
    for path in sorted(folder.rglob("*")):
        if path.is_dir() and path.is_symlink():
            raise CheckpointError(f"{path} leads to another folder: copy it")
        if path.name == "adapter_config.json":
            raise CheckpointError(f"{path.parent} holds an adapter: merge it into the weights")
        # Under this name only: next to an index of shards, say, the library opens the pickle.
        if path.suffix in _PICKLED and not path.with_name("model.safetensors").is_file():
            raise CheckpointError(
                f"{path.parent} holds pickled weights ({path.name}) and no model.safetensors: they are "
                "never opened, convert or remove them"
            )
        if path.name.endswith(("config.json", "modules.json")):
            settings = read_any_json(path)  # whatever is wrong is named by file
            if isinstance(settings, dict) and (named := [key for key in _ELSEWHERE if settings.get(key)]):
                raise CheckpointError(
                    f"{path} has {named[0]}={settings[named[0]]!r:.60}: copy its files here"
                )
            for module in settings if isinstance(settings, list) else ():
                if isinstance(module, dict) and module.get("path"):
                    resolve_path_inside(folder, module["path"], str(path), CheckpointError)


@contextmanager
def _require_all_weights() -> Iterator[None]:
    """Raises `RunError` where transformers reports tensors that it initialised, which it only logs.

    A missing pooler is unused; it is initialised with a fixed seed so that fingerprints are stable.
    """
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
    missing = [name for name in _list_missing_weights("\n".join(reports)) if "pooler" not in name]
    if missing:
        raise RunError(f"{missing[0]} is missing from its weights: the download may be incomplete")


def _list_missing_weights(report: str) -> list[str]:
    """Returns the names in the rows of transformers' table, "name | MISSING", that say so."""
    rows = (line.partition("|") for line in report.splitlines())
    return [name.strip(" \t-+*") for name, _, status in rows if "MISSING" in status and name.strip()]


def _fingerprint_encoder(encoder: SentenceTransformer) -> str:
    """Digest of weights, modules and tokenizer: vectors of another encoder of that name are not used."""
    digest = hashlib.sha256(str(encoder).encode())  # lists the modules with their settings
    backend = getattr(encoder.tokenizer, "backend_tokenizer", None)
    digest.update((backend.to_str() if backend else repr(encoder.tokenizer)).encode())
    for name, value in encoder.state_dict().items():
        digest.update(name.encode())
        digest.update(value.detach().cpu().contiguous().flatten().view(torch.uint8).numpy())
    return digest.hexdigest()
