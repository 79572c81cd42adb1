"""Checkpoints of a run: safetensors in shards, whole or not there, read by any number of processes.

torch.distributed.checkpoint writes and reads them, so nothing is pickled. A folder takes its name by one
rename after every process has written its part. `state.json` holds digests of each file and of itself.

What a run depends on must be found again on --resume: settings by value unless `CHANGEABLE_KEYS` names
them, and by contents what `FINGERPRINTED_KEYS` names: it may be moved, but not changed.
"""

import json
import re
import shutil
import warnings
from collections import ChainMap
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from blake3 import blake3
from torch import Tensor, nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader, HuggingFaceStorageWriter
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)

from dlm_rag.config import Config, TrainConfig
from dlm_rag.config.fields import flatten_settings, get_field_metadata
from dlm_rag.config.sections import DECODE_NAMES
from dlm_rag.errors import CheckpointError, ConfigError, QuestionError, RunError, summarize_error
from dlm_rag.files.checked_json import parse_json_object, validate_json_value
from dlm_rag.files.hub import HUB_FILE_PATTERNS, resolve_hub_folder
from dlm_rag.files.paths import compute_file_digest, digest_file, expand_path, write_text_atomic
from dlm_rag.files.record_readers import list_row_files
from dlm_rag.retrieval.corpus import open_corpus
from dlm_rag.training.distributed import DistributedContext, check_peers
from dlm_rag.training.initial_model import InitialModel
from dlm_rag.training.task import Task, TaskState

KEPT_CHECKPOINTS = 2
_FLAT = StateDictOptions(flatten_optimizer_state_dict=True)
warnings.filterwarnings("ignore", message="torch.distributed is disabled")  # of one process
RECORD_FILE = "state.json"
DAMAGE_FILE = "damage.txt"  # in a checkpoint: that its files are not what was written, and which
CHECKPOINT_FORMAT = 3  # of the record; 2 had phases


@dataclass
class TrainState:
    """The state of a run except weights and optimizers: with them, every later step follows from it."""

    step: int
    task: TaskState


@dataclass(frozen=True)
class CheckpointRecord:
    """What `state.json` holds."""

    state: TrainState
    settings: dict[str, Any]  # by their dotted keys, as `collect_settings` gives them
    fingerprints: dict[str, str]
    scaler: dict[str, Any]
    files: dict[str, int]  # bytes of each
    digests: dict[str, str]


def scan_checkpoints(folder: Path) -> tuple[dict[Path, CheckpointRecord], list[str]]:
    """Whole checkpoints, oldest first, and why others are skipped; `CheckpointError` for other formats."""
    complete, skipped = {}, []
    for path in sorted((folder / "checkpoints").glob("step-*")):
        if path.suffix == ".part":  # a kill has left it, or it is being written
            continue
        try:
            complete[path] = _read_record(path)
        except OSError as error:
            name = Path(error.filename or RECORD_FILE).name
            skipped.append(f"{path} is passed over: {name} cannot be read ({error.strerror})")
        except _SkippedCheckpointError as error:
            skipped.append(f"{path} is passed over: {error}")
    return complete, skipped


class _SkippedCheckpointError(CheckpointError):
    """What a folder has in place of a checkpoint, in words."""


def _read_record(path: Path) -> CheckpointRecord:
    """The record of a checkpoint whose files are there; raises `OSError` and `CheckpointError`."""
    if not re.fullmatch(r"step-\d{8}", path.name):
        raise _SkippedCheckpointError("its name is not that of a checkpoint")
    if (path / DAMAGE_FILE).exists():
        said = (path / DAMAGE_FILE).read_text(encoding="utf-8", errors="replace")
        raise _SkippedCheckpointError(f"{said}, as {DAMAGE_FILE} there says")
    raw = parse_json_object((path / RECORD_FILE).read_bytes(), RECORD_FILE, _SkippedCheckpointError)
    if (written := raw.get("format", 1)) != CHECKPOINT_FORMAT:
        raise CheckpointError(
            f"{path} has format {written}, and this version goes on with format {CHECKPOINT_FORMAT} only: "
            "end the run with the version that began it, or start again in another --out"
        )
    if raw.get("digest") != _digest_record(raw):
        raise _SkippedCheckpointError(f"{RECORD_FILE} has changed since it was written")
    record = validate_json_value(CheckpointRecord, raw, RECORD_FILE, _SkippedCheckpointError)
    there = {file.name: file.stat().st_size for file in path.glob("*.safetensors")}
    if odd := record.files.items() ^ there.items():
        raise _SkippedCheckpointError(f"{min(odd)[0]} is cut short, another file, or not there")
    return record


def _digest_record(record: dict[str, Any]) -> str:
    """BLAKE3 of a record but for this digest, as 64 hex digits."""
    rest = {key: value for key, value in record.items() if key != "digest"}
    return blake3(json.dumps(rest, sort_keys=True).encode()).hexdigest()


def skip_damaged_checkpoints(folder: Path, processes: DistributedContext) -> list[str]:
    """Marks the newest checkpoints whose files are not what was written, so that they are skipped.

    Processes share the reading, and all must call. Returns what a person should know. Raises
    `CheckpointError` where there are checkpoints and none is whole.
    """
    complete, skipped = scan_checkpoints(folder)
    while complete:
        path, record = complete.popitem()
        if not (damages := find_damaged_files(path, record, processes)):
            return skipped
        if processes.is_main:
            write_text_atomic(path / DAMAGE_FILE, damages[0])
        processes.barrier()
        complete, skipped = scan_checkpoints(folder)
    if skipped:
        raise CheckpointError(
            f"none of the checkpoints in {folder} is whole: {skipped[-1]}; start again in another --out"
        )
    return []


def find_damaged_files(path: Path, record: CheckpointRecord, processes: DistributedContext) -> list[str]:
    """What is wrong with the files of a checkpoint, in words; processes share the reading, so all call."""
    wrong = []
    for file in _share_files(path, processes):
        try:
            if _compute_digest(file) != record.digests.get(file.name):
                wrong.append(f"{file.name} has changed since it was written")
        except OSError as error:
            wrong.append(f"{file.name} cannot be read ({summarize_error(error)})")
    return [line for lines in processes.all_gather_object(wrong) for line in lines]


def _share_files(path: Path, processes: DistributedContext) -> list[Path]:
    """The files of a checkpoint that this process reads, of those that any process sees; all must call."""
    listed = processes.all_gather_object([file.name for file in path.glob("*.safetensors")])
    names = sorted(set().union(*listed))
    return [path / name for name in names[processes.rank :: processes.world_size]]


def _compute_digest(path: Path, draws: bool = True) -> str:
    with path.open("rb", buffering=0) as file:
        return compute_file_digest(file, path, draws)


def _check_digests(path: Path, digests: dict[str, str]) -> None:
    """Raises `RunError` where the files of a checkpoint are not those that have digests."""
    if odd := {file.name for file in path.glob("*.safetensors")} ^ digests.keys():
        raise RunError(
            f"{path} could not be written: its processes do not see the same files ({min(odd)}); the "
            "checkpoint before is intact: --resume"
        )


def find_latest_checkpoint(folder: Path) -> tuple[Path, CheckpointRecord] | None:
    """The newest of `scan_checkpoints` and its record, or None without one."""
    return next(reversed(scan_checkpoints(folder)[0].items()), None)


class Checkpoints:
    """The checkpoints of a run, named by step."""

    def __init__(self, task: Task, processes: DistributedContext) -> None:
        """Raises `ConfigError` if the run here began with other settings or other contents of files."""
        config, self.folder, self.processes = task.run.config, task.run.folder, processes
        own_rule = task.run.origin.config.decode_settings.get("commit_rule")
        self._settings = collect_settings(config, type(task), own_rule)
        self._settings[LAYOUT_KEY] = task.run.origin.config.evidence_layout
        if config.data.corpus is None and config.train.objective in ("sft", "rl"):
            self._settings["retrieval.top_k"] = task.run.top_k
        self._fingerprints = fingerprint_files(config, task.run.origin) if processes.is_main else {}
        begun = find_latest_checkpoint(self.folder)
        self.has_begun = begun is not None
        if begun is not None:
            processes.check_on_main(lambda: self._check_settings(begun[1]))

    def _check_settings(self, record: CheckpointRecord) -> None:
        """Refuses what is not as it was; settings that are younger than the checkpoint may be anything."""
        for key, value in self._settings.items():
            before = record.settings.get(key, value)
            if key == LAYOUT_KEY and before is None:  # of a run that began when it was not resolved
                continue
            same = (before is None) == (value is None) if key in FINGERPRINTED_KEYS else before == value
            if not same:
                raise ConfigError(
                    f"the run was begun with {key}={before}, not {value}: give the same, or another --out"
                )
        for key, digest in self._fingerprints.items():
            if record.fingerprints.get(key, digest) != digest:
                raise ConfigError(
                    f"the run was begun with other contents of {key}="
                    f"{self._settings.get(key, 'as it was learned')}: put it back, or start again in "
                    "another --out"
                )

    def save(
        self, state: TrainState, scaler: dict[str, Any], root: nn.Module,
        optimizers: Sequence[torch.optim.Optimizer],
    ) -> Path:  # fmt: skip
        """Writes a checkpoint and removes the oldest beyond two; every process takes part."""
        target = self.folder / "checkpoints" / f"step-{state.step:08d}"
        scratch = target.with_suffix(".part")
        if self.processes.is_main:
            shutil.rmtree(scratch, ignore_errors=True)
            scratch.mkdir(parents=True)
        self.processes.barrier()
        writer = HuggingFaceStorageWriter(str(scratch), save_distributed=True)
        try:
            dcp.save(_collect_tensors(root, optimizers), storage_writer=writer)
        except (Exception, CheckpointException) as error:  # torch wraps failures in a BaseException
            check_peers(error)
            raise RunError(
                f"the checkpoint of step {state.step} could not be written to {target.parent} "
                f"({_last_line(error)}); the one before is intact: make room and --resume"
            ) from error
        # Without a progress bar: the caller has its own.
        own = {file.name: _compute_digest(file, False) for file in _share_files(scratch, self.processes)}
        digests = dict(ChainMap(*self.processes.all_gather_object(own)))
        self.processes.check_on_main(lambda: _check_digests(scratch, digests))
        if self.processes.is_main:
            files = {file.name: file.stat().st_size for file in scratch.iterdir()}
            held = self._settings, self._fingerprints
            record = CheckpointRecord(state, *held, scaler, files, digests)
            raw = {"format": CHECKPOINT_FORMAT, **asdict(record)}
            write_text_atomic(scratch / RECORD_FILE, json.dumps(raw | {"digest": _digest_record(raw)}))
            if target.is_dir():  # a broken one, which was skipped
                shutil.rmtree(target)
            target.unlink(missing_ok=True)
            scratch.rename(target)
            for old in [*scan_checkpoints(self.folder)[0]][:-KEPT_CHECKPOINTS]:
                shutil.rmtree(old)
        self.processes.barrier()
        return target

    def load(self, root: nn.Module, optimizers: Sequence[torch.optim.Optimizer]) -> CheckpointRecord | None:
        """Reads weights and optimizers of the newest, whose record is returned; None without one."""
        if (found := find_latest_checkpoint(self.folder)) is None:
            return None
        path, record = found
        tensors, reader = _collect_tensors(root, optimizers), HuggingFaceStorageReader(str(path))
        try:
            dcp.load(tensors, storage_reader=reader)
        except (Exception, CheckpointException) as error:
            raise CheckpointError(f"{path} does not belong to this run: {_last_line(error)}") from error
        for number, optimizer in enumerate(optimizers):
            prefix = f"optimizer{number}."
            whole: dict[str, Any] = dict(get_optimizer_state_dict(root, optimizer, options=_FLAT))
            whole |= {k.removeprefix(prefix): v for k, v in tensors.items() if k.startswith(prefix)}
            set_optimizer_state_dict(root, optimizer, whole, options=_FLAT)
        return record


def _collect_tensors(root: nn.Module, optimizers: Sequence[torch.optim.Optimizer]) -> dict[str, Tensor]:
    """Weights and optimizer states by name, as they lie in memory (in shards, where there are any)."""
    # Neither a tied head, which would come twice, nor frozen weights, which have a checkpoint of their own.
    once = {name.removeprefix("module.") for name, value in root.named_parameters() if value.requires_grad}
    tensors: dict[str, Any] = {f"model.{k}": v for k, v in get_model_state_dict(root).items() if k in once}
    for number, optimizer in enumerate(optimizers):
        found = get_optimizer_state_dict(root, optimizer, options=_FLAT)
        tensors |= {f"optimizer{number}.{k}": v for k, v in found.items() if k.startswith("state.")}
    return tensors


def gather_full_state_dict(denoiser: nn.Module) -> dict[str, Any]:
    """All weights of the denoiser by their names, gathered in host memory of the first process."""
    options = StateDictOptions(full_state_dict=True, cpu_offload=True)
    return get_model_state_dict(denoiser, options=options)


def _last_line(error: BaseException) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[-1]


CHANGEABLE_KEYS = frozenset({
    # How long the run is, what it saves and reports. But eval_questions are held where they are kept back
    # from data.questions.
    "train.max_steps", "train.decay_fraction", "train.save_steps", "train.eval_steps",
    "train.eval_questions", "train.wandb",
    # How the work is done: nothing but rounding changes.
    "train.gradient_accumulation_steps", "train.activation_checkpointing",
    "train.activation_checkpointing_interval",
    "train.compile", "train.parallel",
    "model.device", "model.dtype", "model.attn_implementation",
    "decode.batch_size",
    # Where something is kept, and what training does not read.
    "retrieval.index_dir", "retrieval.corpus", "retrieval.url", "retrieval.timeout",
})  # fmt: skip
FINGERPRINTED_KEYS = (
    "model.path", "data.questions", "data.corpus", "data.documents", "retrieval.embedding_model", "prompt",
)  # fmt: skip
LAYOUT_KEY = "model.evidence_layout"


def collect_settings(config: Config, task: type[Task], own_rule: str | None = None) -> dict[str, Any]:
    """What a run of this task depends on, by dotted keys; own_rule: the checkpoint's for commits."""
    values, objective = flatten_settings(config), config.train.objective
    held = {*(f"decode.{name}" for name in DECODE_NAMES), "prompt"}  # the trained model's own, too
    held |= {key for key in values if key.startswith(("model.", "retrieval.", "data."))}
    for item in fields(TrainConfig):  # that the objective reads, as they declare; one's own reads all
        need = get_field_metadata(item, "only_with") or {}
        if ":" in objective or objective in need.get("train.objective", (objective,)):
            held.add(f"train.{item.name}")
    if (decode := task.rollout_settings(config, own_rule)) is not None:
        values |= (rollouts := flatten_settings(decode, "decode."))
        held |= rollouts.keys()
    free = CHANGEABLE_KEYS - ({"train.eval_questions"} if config.data.questions is not None else set())
    keys = sorted(values, key=lambda key: key.startswith("decode."))
    return {key: values[key] for key in keys if key in held - free}


def fingerprint_files(config: Config, origin: InitialModel) -> dict[str, str]:
    """Digests of what `FINGERPRINTED_KEYS` names (none of a pipe, which can be read only once), and of a
    new tokenizer. Raises `UserError` for a file that is not there."""
    data, prompt = config.data, repr(origin.tokenizer.template)
    found = {"prompt": blake3(prompt.encode()).hexdigest()}
    for key, name in (("data.questions", data.questions), ("data.documents", data.documents)):
        path = expand_path(name, QuestionError) if name is not None else None
        if path is not None and (path.is_dir() or path.is_file()):
            found[key] = _digest_all(list_row_files(path, QuestionError) if path.is_dir() else [path])
    if data.corpus is not None:
        found["data.corpus"] = open_corpus(data.corpus, config.retrieval.index_dir).fingerprint
        if config.retrieval.method in ("dense", "hybrid"):
            folder = resolve_hub_folder(config.retrieval.embedding_model, "embedding_model")
            files = (path for pattern in HUB_FILE_PATTERNS for path in folder.rglob(pattern))
            found["retrieval.embedding_model"] = _digest_all(sorted(filter(Path.is_file, files)))
    if origin.checkpoint is not None:
        found["model.path"] = origin.checkpoint.fingerprint
    else:
        vocabulary = origin.tokenizer.inner.backend_tokenizer.to_str()
        found["tokenizer"] = blake3(vocabulary.encode()).hexdigest()
    return found


def _digest_all(paths: list[Path]) -> str:
    return blake3("".join(digest_file(path) for path in paths).encode()).hexdigest()
