"""Decode and retrieval settings that a checkpoint carries in `generation_config.json`.

They are there beside what the field keeps in that file:

    {"eos_token_id": 1, "decode": {"blocks_at_once": 3}, "retrieval": {"top_k": 5}}

They are the defaults of the settings of the same names: a YAML file, the command line or a keyword wins.
"""

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from dlm_rag.config.sections import DecodeConfig, RetrievalConfig
from dlm_rag.errors import CheckpointError, ConfigError, suggest_nearest
from dlm_rag.files.hub import read_checkpoint_json

GENERATION_FILE = "generation_config.json"
OF_A_RUN = {"seed", "batch_size", "overlap"}  # settings that no model asks for
DECODE_NAMES = [name for name in DecodeConfig.__dataclass_fields__ if name not in OF_A_RUN]
RETRIEVAL_NAMES = ["top_k", "bm25_query", "query_prompt", "passage_prompt"]


def read_generation_settings(folder: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """The settings of `decode` and of `retrieval` that a checkpoint's folder carries.

    Raises `CheckpointError` for what is no such setting, or names code.
    """
    path = folder / GENERATION_FILE
    raw = read_checkpoint_json(path) if path.exists() else {}
    known = {"decode": DECODE_NAMES, "retrieval": RETRIEVAL_NAMES}
    found = []
    for section, holder in (("decode", DecodeConfig), ("retrieval", RetrievalConfig)):
        values = raw.get(section) or {}
        if not isinstance(values, dict):
            raise CheckpointError(f"{path}: {section}={values!r:.60} must be an object")
        for name, value in values.items():
            if name not in known[section]:
                nearest = suggest_nearest(name, known[section])
                raise CheckpointError(
                    f"{path}: {section}.{name:.60} is no setting of a checkpoint{nearest}"
                )
            if isinstance(value, str) and ":" in value and section == "decode":
                raise CheckpointError(
                    f"{path}: {section}.{name} names code, which is never taken from there"
                )
        try:
            holder(**values)
        except ConfigError as error:
            raise CheckpointError(f"{path}: {section}.{error}") from None
        found.append(values)
    return found[0], found[1]


def list_given(settings: DecodeConfig | RetrievalConfig, names: Iterable[str]) -> dict[str, Any]:
    """The values of those of `names` that somebody has set and that a checkpoint can carry."""
    values = {name: getattr(settings, name) for name in names if name in settings.given}
    return {
        name: value
        for name, value in values.items()
        if value is not None and not (isinstance(value, str) and ":" in value)
    }
