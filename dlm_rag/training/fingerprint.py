"""What a run depends on and must find again on --resume: settings by value, files by their contents.

Every setting of `model`, `retrieval`, `data` and `train`, and those of `decode` that a phase trains
with, is held unless `MAY_CHANGE` names it. What `BY_CONTENT` names is held by a fingerprint of what
lies there: it may be moved, but not changed.
"""

from dataclasses import asdict, fields, replace
from pathlib import Path
from typing import Any

from blake3 import blake3

from dlm_rag.config import Config, TrainConfig
from dlm_rag.errors import ConfigError, QuestionError
from dlm_rag.files.digest import digest_file
from dlm_rag.files.hub import HUB_FILES, locate
from dlm_rag.files.records import expand, row_files
from dlm_rag.retrieval.corpus import open_corpus
from dlm_rag.training.origin import Origin
from dlm_rag.training.rollouts import rollout_settings
from dlm_rag.training.state import Record

MAY_CHANGE = frozenset({
    # How long the run is, what it saves and reports. But adapt holds its steps (attention opens in a
    # share of them), and validation_questions are held where they are kept back from data.questions.
    "train.steps", "train.decay_share", "train.phases", "train.save_every", "train.validate_every",
    "train.validation_questions", "train.wandb", "train.timeout_minutes",
    # How the work is done: nothing but rounding changes.
    "train.accumulate", "train.checkpointing", "train.logit_chunk", "train.compile", "train.parallel",
    "train.context_parallel", "model.device", "model.dtype", "model.attention", "decode.batch_size",
    "retrieval.dense_batch_size", "retrieval.search_memory_gib",
    # Where something is kept, and what training does not read.
    "retrieval.index_folder", "retrieval.corpus", "retrieval.url", "retrieval.url_seconds",
})  # fmt: skip
BY_CONTENT = (
    "model.path", "train.layers", "data.questions", "data.corpus", "data.documents", "retrieval.dense_model"
)  # fmt: skip
SHAPES = ("canvas_length", "block_length", "finished_blocks")  # of `decode`: a denoiser is trained for them
PHASE_BEGINS = "objective"  # the first field of `TrainConfig` that a phase may set


def run_settings(config: Config) -> dict[str, Any]:
    """What the whole run depends on, by dotted keys."""
    own = [item.name for item in fields(TrainConfig)]
    found = {f"train.{name}": getattr(config.train, name) for name in own[: own.index(PHASE_BEGINS)]}
    for section in ("model", "retrieval", "data"):
        found |= {f"{section}.{key}": value for key, value in asdict(getattr(config, section)).items()}
    found |= {f"decode.{name}": getattr(config.decode, name) for name in SHAPES}
    return {key: value for key, value in found.items() if key not in MAY_CHANGE}


def phase_settings(config: Config, train: TrainConfig) -> dict[str, Any]:
    """What the steps of a phase, whose settings are `train`, depend on beside that."""
    own = [item.name for item in fields(TrainConfig)]
    found = {f"train.{name}": getattr(train, name) for name in own[own.index(PHASE_BEGINS) :]}
    if train.objective == "rl":
        found |= {f"decode.{k}": v for k, v in asdict(rollout_settings(config, train)).items()}
    held = {"train.steps"} if train.objective == "adapt" else set()
    if config.data.questions is not None:
        held.add("train.validation_questions")
    return {key: value for key, value in found.items() if key not in MAY_CHANGE - held}


def fingerprint_files(config: Config, origin: Origin) -> dict[str, str]:
    """Digests of what `BY_CONTENT` names, by dotted keys; large files are read once (`digest_file`).

    Raises `UserError` for a file that is not there. What can be read only once, a pipe, has no fingerprint.
    """
    data, found = config.data, dict[str, str]()
    for key, checkpoint in (("model.path", origin.checkpoint), ("train.layers", origin.layers)):
        if checkpoint is not None:
            found[key] = checkpoint.fingerprint
    rows = {"data.questions": data.questions} | {
        f"data.documents.{n}": p for n, p in data.documents.items()
    }
    for key, name in rows.items():
        path = expand(name, QuestionError) if name is not None else Path()
        if name is not None and (path.is_dir() or path.is_file()):
            found[key] = _digest_all(row_files(path, QuestionError) if path.is_dir() else [path])
    if data.corpus is not None:
        found["data.corpus"] = open_corpus(data.corpus, config.retrieval.index_folder).fingerprint
        if config.retrieval.kind in ("dense", "hybrid"):
            folder = locate(config.retrieval.dense_model, "dense_model")
            found["retrieval.dense_model"] = _digest_all(
                sorted(path for pattern in HUB_FILES for path in folder.rglob(pattern) if path.is_file())
            )
    if origin.checkpoint is None:
        vocabulary = origin.tokenizer.inner.backend_tokenizer.to_str()
        found["tokenizer"] = blake3(vocabulary.encode()).hexdigest()
    return found


def refuse_others(record: Record, config: Config, phase: str, held: dict[str, str]) -> None:
    """Raises `ConfigError` for the first thing that is not as it was when a checkpoint was written.

    record: of the checkpoint. phase: that is to go on, or to follow. held: `fingerprint_files` of now. A
    setting that is younger than the checkpoint had its default.
    """
    train, fingerprints = config.train.in_phases()[phase], record.fingerprints
    then = run_settings(Config()) | phase_settings(Config(), replace(TrainConfig(), objective="rl"))
    if not fingerprints:  # older versions noted names in place of contents, and not all settings
        then = {key: value for key, value in then.items() if key.startswith("train.")}
    then |= record.phase | record.run
    now = [("the run", run_settings(config))]
    if record.state.phase == phase:
        now.append(("the phase" if phase else "the run", phase_settings(config, train)))
    for what, settings in now:
        for key, value in settings.items():
            alike = _named if fingerprints and key in BY_CONTENT else lambda value: value
            if key in then and alike(then[key]) != alike(value):
                raise ConfigError(
                    f"{what} was begun with {key}={then[key]}, not {value}: give the same, or another --out"
                )
    for key, digest in held.items():
        if fingerprints and fingerprints.get(key) != digest:
            raise ConfigError(
                f"the run was begun with other contents of {key}={_name(config, key)}: put back what was "
                "there, or begin again in another --out"
            )


def _named(value: Any) -> Any:
    """What of a setting in `BY_CONTENT` is held by itself: whether it names something, or which sources."""
    return sorted(value) if isinstance(value, dict) else value is not None


def _name(config: Config, key: str) -> str:
    """What a setting in `BY_CONTENT` names, or one of its sources."""
    value: Any = asdict(config)
    for part in key.split(".", 2):
        value = value.get(part, "as it was learned")
    return str(value)


def _digest_all(paths: list[Path]) -> str:
    return blake3("".join(digest_file(path) for path in paths).encode()).hexdigest()
