"""Stored results of evaluations: read again, and their table."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from dlm_rag.errors import ConfigError
from dlm_rag.evaluation.compare import GroupSummary
from dlm_rag.evaluation.metrics import SCORE_METRICS
from dlm_rag.evaluation.tables import ResultTable, build_overview_table
from dlm_rag.files.checked_json import parse_json_object, validate_json_value


@dataclass(frozen=True)
class _Stamp:
    versions: dict[str, Any] = field(default_factory=dict)
    answers_depend_on: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class _Setting:
    groups: GroupSummary
    stamp: _Stamp


@dataclass(frozen=True)
class StoredScores:
    """What is read again of a scores.json: the means of each setting by group, and how many questions."""

    questions: dict[str, int]
    settings: dict[str, _Setting]
    first_minus: dict[str, GroupSummary]
    swept: dict[str, list[str]] = field(default_factory=dict)
    dataset: str | None = None


@dataclass(frozen=True)
class StoredResult:
    """What `evaluate` left in a folder; record: its scores.json; scores: what of it is shown again."""

    record: dict[str, Any]
    scores: StoredScores

    def get_stamp(self, name: str) -> dict[str, Any]:
        """The stamp of a setting's answers."""
        stamp: dict[str, Any] = self.record["settings"][name]["stamp"]
        return stamp


def read_result(path: Path) -> StoredResult:
    """The result in a folder, or of its scores.json. Raises `ConfigError` for anything else."""
    file = path / "scores.json" if path.is_dir() else path
    none = f"{path} is not a result: name a folder of evaluate's --out that has a scores.json"
    if not file.is_file():
        raise ConfigError(none)
    record = parse_json_object(file.read_bytes(), str(file), ConfigError)
    found = validate_json_value(StoredScores, record, none, ConfigError)
    grouped: list[Mapping[str, Any]] = [found.questions, *found.first_minus.values()]
    grouped += [setting.groups for setting in found.settings.values()]
    whole = bool(found.settings) and all("all" in groups for groups in grouped)
    if not whole:
        raise ConfigError(none)
    return StoredResult(record, found)


def build_result_table(result: StoredResult) -> ResultTable:
    """The table of all questions, a row for each setting."""
    scores, none = result.scores, dict.fromkeys(SCORE_METRICS)
    summaries = {name: none | setting.groups["all"] for name, setting in scores.settings.items()}
    against = {name: groups["all"] for name, groups in scores.first_minus.items()}
    return build_overview_table(scores.questions["all"], summaries, against, scores.swept)
