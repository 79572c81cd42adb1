"""What a run depends on and must find again on --resume: settings by value, files by their contents.

Every setting of `model`, `retrieval`, `data` and `train`, and those of `decode` that a run trains
with, is held unless `CHANGEABLE_KEYS` names it. What `FINGERPRINTED_KEYS` names is held by a fingerprint
of what lies there: it may be moved, but not changed.
"""

from dataclasses import Field, fields
from pathlib import Path
from typing import Any

from blake3 import blake3

from dlm_rag.config import Config, TrainConfig
from dlm_rag.config.fields import flatten_settings, get_field_metadata
from dlm_rag.errors import ConfigError, QuestionError
from dlm_rag.files.digest import digest_file
from dlm_rag.files.hub import HUB_FILE_PATTERNS, resolve_hub_folder
from dlm_rag.files.paths import expand_path
from dlm_rag.files.record_readers import list_row_files
from dlm_rag.retrieval.corpus import open_corpus
from dlm_rag.training.checkpoints import CheckpointRecord
from dlm_rag.training.initial_weights import InitialModel
from dlm_rag.training.task import Task

CHANGEABLE_KEYS = frozenset({
    # How long the run is, what it saves and reports. But eval_questions are held where they are kept back
    # from data.questions.
    "train.max_steps", "train.decay_fraction", "train.save_steps", "train.eval_steps",
    "train.eval_questions", "train.wandb",
    # How the work is done: nothing but rounding changes.
    "train.gradient_accumulation_steps", "train.activation_checkpointing",
    "train.compile", "train.parallel",
    "model.device", "model.dtype", "model.attn_implementation",
    "decode.batch_size",
    # Where something is kept, and what training does not read.
    "retrieval.index_dir", "retrieval.corpus", "retrieval.url", "retrieval.timeout",
})  # fmt: skip
FINGERPRINTED_KEYS = (
    "model.path", "data.questions", "data.corpus", "data.documents",
    "retrieval.embedding_model"
)  # fmt: skip
# of `decode`: a denoiser is trained for them
DECODE_SHAPE_FIELDS = ("max_new_tokens", "block_length", "finished_block_context")


def collect_settings(config: Config, task: type[Task]) -> dict[str, Any]:
    """What a run of this task depends on, by dotted keys."""
    values = flatten_settings(config)
    found = {
        key: value for key, value in values.items() if key.startswith(("model.", "retrieval.", "data."))
    }
    found |= {f"decode.{name}": values[f"decode.{name}"] for name in DECODE_SHAPE_FIELDS}
    read = (item.name for item in fields(TrainConfig) if _is_read(item, config.train))
    found |= {f"train.{name}": values[f"train.{name}"] for name in read}
    if (decode := task.rollout_settings(config)) is not None:
        found |= flatten_settings(decode, "decode.")
    free = CHANGEABLE_KEYS - ({"train.eval_questions"} if config.data.questions is not None else set())
    return {key: value for key, value in found.items() if key not in free}


def _is_read(item: "Field[Any]", train: TrainConfig) -> bool:
    """Whether the objective of a run reads a setting, as far as its field declares; all of one's own."""
    need = get_field_metadata(item, "only_with") or {}
    accepted = need.get("train.objective", (train.objective,))
    return ":" in train.objective or train.objective in accepted


def fingerprint_files(config: Config, origin: InitialModel) -> dict[str, str]:
    """Digests of what `FINGERPRINTED_KEYS` names, by dotted keys; raises `UserError` for a file that is not
    there. What can be read only once, a pipe, has no fingerprint.
    """
    data = config.data
    found = {} if origin.checkpoint is None else {"model.path": origin.checkpoint.fingerprint}
    rows = {"data.questions": data.questions, "data.documents": data.documents}
    for key, name in rows.items():
        path = expand_path(name, QuestionError) if name is not None else None
        if path is not None and (path.is_dir() or path.is_file()):
            found[key] = _digest_all(list_row_files(path, QuestionError) if path.is_dir() else [path])
    if data.corpus is not None:
        found["data.corpus"] = open_corpus(data.corpus, config.retrieval.index_dir).fingerprint
        if config.retrieval.method in ("dense", "hybrid"):
            folder = resolve_hub_folder(config.retrieval.embedding_model, "embedding_model")
            files = (path for pattern in HUB_FILE_PATTERNS for path in folder.rglob(pattern))
            found["retrieval.embedding_model"] = _digest_all(sorted(filter(Path.is_file, files)))
    if origin.checkpoint is None:
        vocabulary = origin.tokenizer.inner.backend_tokenizer.to_str()
        found["tokenizer"] = blake3(vocabulary.encode()).hexdigest()
    return found


def check_resume_settings(
    record: CheckpointRecord, config: Config, held: dict[str, str], task: type[Task]
) -> None:
    """Raises `ConfigError` for the first thing that is not as it was when a checkpoint was written.

    record: of the checkpoint. held: `fingerprint_files` of now. Settings that are younger than the
    checkpoint may be anything.
    """
    for key, value in collect_settings(config, task).items():
        before = record.settings.get(key, value)
        same = (before is None) == (value is None) if key in FINGERPRINTED_KEYS else before == value
        if not same:
            raise ConfigError(
                f"the run was begun with {key}={before}, not {value}: give the same, or another --out"
            )
    for key, digest in held.items():
        if record.fingerprints.get(key) != digest:
            raise ConfigError(
                f"the run was begun with other contents of {key}="
                f"{flatten_settings(config).get(key, 'as it was learned')}: put it back, or start again in "
                "another --out"
            )


def _digest_all(paths: list[Path]) -> str:
    return blake3("".join(digest_file(path) for path in paths).encode()).hexdigest()
