"""Stored results of evaluations: read, shown on a page, compared with the same run of today.

python -m dlm_rag.evaluation.stored_results runs/tau_c runs/tau_q > results.md
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from dlm_rag.cli import CommandParser, run_program
from dlm_rag.errors import ConfigError
from dlm_rag.evaluation.compare import GroupSummary, QuestionGroups, compute_paired_differences
from dlm_rag.evaluation.metrics import SCORE_METRICS, Score
from dlm_rag.evaluation.tables import (
    ResultTable,
    build_overview_table,
    format_metrics,
    format_provenance,
    render_markdown_table,
)
from dlm_rag.files.checked_json import parse_json_object, validate_json_value
from dlm_rag.files.paths import resolve_path_inside

SAVED_CONFIG_FILE = "config.yaml"  # beside the answers: the settings as they were given


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

    folder: Path
    record: dict[str, Any]
    scores: StoredScores

    @property
    def folders(self) -> dict[str, Path]:
        """Where the answers of each setting are: in a folder of its own, or where all is."""
        below = {name: self.folder / make_setting_folder_name(name) for name in self.scores.settings}
        return {name: path if path.is_dir() else self.folder for name, path in below.items()}

    def get_stamp(self, name: str) -> dict[str, Any]:
        """The stamp of a setting's answers."""
        stamp: dict[str, Any] = self.record["settings"][name]["stamp"]
        return stamp


def make_setting_folder_name(setting: str) -> str:
    """The name of the folder in which a setting's answers are."""
    return setting.replace("/", "_")


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
    for name in found.settings:
        resolve_path_inside(file.parent, make_setting_folder_name(name), str(file), ConfigError)
    return StoredResult(file.parent, record, found)


def build_result_table(result: StoredResult) -> ResultTable:
    """The table of all questions, a row for each setting."""
    scores, none = result.scores, dict.fromkeys(SCORE_METRICS)
    summaries = {name: none | setting.groups["all"] for name, setting in scores.settings.items()}
    against = {name: groups["all"] for name, groups in scores.first_minus.items()}
    return build_overview_table(scores.questions["all"], summaries, against, scores.swept)


def render_results_page(results: Sequence[StoredResult]) -> str:
    """Markdown: a heading with the day of the last, then each result, its table, where it is from."""
    days = [str(r.get_stamp(name).get("date", ""))[:10] for r in results for name in r.folders]
    parts = [f"# Results, {max(days) or 'undated'}\n"]
    for result in results:
        command = result.record.get("command")
        stamp = result.get_stamp(next(iter(result.scores.settings)))
        parts += [f"## {result.folder.name}\n", *([f"    {command}\n"] if command else [])]
        parts += [render_markdown_table(build_result_table(result)), format_provenance(stamp)]
    return "\n".join(parts)


def list_stamp_changes(then: Mapping[str, Any], now: Mapping[str, Any]) -> Iterator[str]:
    """In what two stamps differ: code, versions, machine, whatever answers depend on."""
    for what in ("commit", "device", "threads", "attention"):
        if then.get(what) != now.get(what):
            yield f"{what}: {then.get(what)} then, {now.get(what)} now"
    for part in ("versions", "answers_depend_on"):
        one, other = (stamp.get(part) or {} for stamp in (then, now))
        for key in sorted({*one, *other}):
            if one.get(key) != other.get(key):
                yield f"{key}: {one.get(key)} then, {other.get(key)} now"


def build_rerun_table(
    then: Mapping[str, Sequence[Score]],
    now: Mapping[str, Sequence[Score]],
    groups: QuestionGroups,
    same: Mapping[str, int],
) -> ResultTable:
    """Each setting then and now, and now minus then by question; same: how many responses are the same."""
    rows = []
    for name, scores in now.items():
        less = compute_paired_differences(scores, then[name], groups)["all"]
        means = [100 * sum(s.exact_match for s in each) / len(each) for each in (then[name], scores)]
        differences = format_metrics(less, ("exact_match", "f1", "forwards"), signed=True)
        same_share = f"{same[name]} of {len(scores)}"
        rows.append([name, *(f"{mean:.1f}" for mean in means), *differences, same_share])
    headings = ["setting", "exact match % then", "now", "difference", "F1", "forwards", "the same response"]
    return ResultTable("Now minus then, paired", headings, rows)


def main(argv: list[str]) -> None:
    """Prints the page of some results."""
    parser = CommandParser(__doc__ or "")
    parser.add_argument("results", nargs="+", metavar="RESULT", help="folder of evaluate's --out")
    print(render_results_page([read_result(Path(name)) for name in parser.parse_args(argv).results]))


if __name__ == "__main__":
    run_program(main)
