"""What a run depends on and must find again on --resume: settings by value, files by their contents.

Every setting of `model`, `retrieval`, `data` and `train`, and those of `decode` that a phase trains
with, is held unless `CHANGEABLE_KEYS` names it. What `FINGERPRINTED_KEYS` names is held by a fingerprint
of what lies there: it may be moved, but not changed.
"""

from dataclasses import Field, asdict, fields
from pathlib import Path
from typing import Any

from blake3 import blake3

from dlm_rag.config import Config, TrainConfig
from dlm_rag.config.fields import get_field_metadata
from dlm_rag.errors import ConfigError, QuestionError
from dlm_rag.files.digest import digest_file
from dlm_rag.files.hub import HUB_FILE_PATTERNS, resolve_hub_folder
from dlm_rag.files.paths import expand_path
from dlm_rag.files.record_readers import list_row_files
from dlm_rag.retrieval.corpus import open_corpus
from dlm_rag.training.checkpoints import CheckpointRecord
from dlm_rag.training.initial_weights import InitialModel
from dlm_rag.training.task import Phase, Task

CHANGEABLE_KEYS = frozenset({
    # How long the run is, what it saves and reports. But adapt holds its steps (attention opens in a
    # share of them), and eval_questions are held where they are kept back from data.questions.
    "train.max_steps", "train.decay_fraction", "train.phases", "train.save_steps", "train.eval_steps",
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
FIRST_PHASE_FIELD = "objective"  # the first field of `TrainConfig` that a phase may set


def collect_run_settings(config: Config) -> dict[str, Any]:
    """What the whole run depends on, by dotted keys."""
    own = [item.name for item in fields(TrainConfig)]
    found = {f"train.{name}": getattr(config.train, name) for name in own[: own.index(FIRST_PHASE_FIELD)]}
    for section in ("model", "retrieval", "data"):
        found |= {f"{section}.{key}": value for key, value in asdict(getattr(config, section)).items()}
    found |= {f"decode.{name}": getattr(config.decode, name) for name in DECODE_SHAPE_FIELDS}
    return {key: value for key, value in found.items() if key not in CHANGEABLE_KEYS}


def collect_phase_settings(config: Config, train: TrainConfig, task: type[Task]) -> dict[str, Any]:
    """What the steps of a phase, whose settings are `train`, also depend on."""
    own = [item.name for item in fields(TrainConfig)]
    read = (item for item in fields(TrainConfig)[own.index(FIRST_PHASE_FIELD) :] if _is_read(item, train))
    found = {f"train.{item.name}": getattr(train, item.name) for item in read}
    if (decode := task.rollout_settings(config, train)) is not None:
        found |= {f"decode.{k}": v for k, v in asdict(decode).items()}
    held = set(task.fixed_settings)
    if config.data.questions is not None:
        held.add("train.eval_questions")
    return {key: value for key, value in found.items() if key not in CHANGEABLE_KEYS - held}


def _is_read(item: "Field[Any]", train: TrainConfig) -> bool:
    """Whether the objective of a phase reads a setting, as far as its field declares; all of one's own."""
    need = get_field_metadata(item, "only_with") or {}
    accepted = need.get("train.objective", (train.objective,))
    return ":" in train.objective or train.objective in accepted


def fingerprint_files(config: Config, origin: InitialModel) -> dict[str, str]:
    """Digests of what `FINGERPRINTED_KEYS` names, by dotted keys; raises `UserError` for a file that is not
    there. What can be read only once, a pipe, has no fingerprint.
    """
    data = config.data
    found = {} if origin.checkpoint is None else {"model.path": origin.checkpoint.fingerprint}
    rows = {"data.questions": data.questions}
    rows |= {f"data.documents.{name}": path for name, path in data.documents.items()}
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
    record: CheckpointRecord, phase: Phase, held: dict[str, str], task: type[Task]
) -> None:
    """Raises `ConfigError` for the first thing that is not as it was when a checkpoint was written.

    record: of the checkpoint. phase: that is to go on, or to follow. held: `fingerprint_files` of now.
    Settings that are younger than the checkpoint may be anything.
    """
    config, train = phase.config, phase.train
    then, now = record.phase | record.run, collect_run_settings(config)
    if record.state.phase == phase.name:
        now |= collect_phase_settings(config, train, task)
    for key, value in now.items():
        before = then.get(key, value)
        if _comparable(key, before) != _comparable(key, value):
            raise ConfigError(
                f"the run was begun with {key}={before}, not {value}: give the same, or another --out"
            )
    for key, digest in held.items():
        if record.fingerprints.get(key) != digest:
            raise ConfigError(
                f"the run was begun with other contents of {key}={_describe_setting(config, key)}: put "
                "it back, or start again in another --out"
            )


def _comparable(key: str, value: Any) -> Any:
    """What of a setting is held: all, or whether it names something, or which sources."""
    if key not in FINGERPRINTED_KEYS:
        return value
    return sorted(value) if isinstance(value, dict) else value is not None


def _describe_setting(config: Config, key: str) -> str:
    """What a setting in `FINGERPRINTED_KEYS` names, or one of its sources."""
    value: Any = asdict(config)
    for part in key.split(".", 2):
        value = value.get(part, "as it was learned")
    return str(value)


def _digest_all(paths: list[Path]) -> str:
    return blake3("".join(digest_file(path) for path in paths).encode()).hexdigest()
