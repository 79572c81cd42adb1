"""What evaluate leaves in its folder: the scores of every setting, in files and on the screen."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console

from dlm_rag.decode.trace_file import read_trace
from dlm_rag.energy.meter import summarise_energy
from dlm_rag.errors import ConfigError, RunError, summarize_error
from dlm_rag.evaluation import plots, tables
from dlm_rag.evaluation.compare import QuestionGroups, compare_to_first, summarize_scores
from dlm_rag.evaluation.metrics import Score, score_rollout
from dlm_rag.evaluation.stored_results import read_result
from dlm_rag.files.checked_json import read_json_or_empty
from dlm_rag.files.paths import write_text_atomic
from dlm_rag.questions import Question
from dlm_rag.text import replace_control_chars

TRACE_FILE = "trace.jsonl"
PICTURE = "pareto.png"  # of a sweep: what exact match costs
MAX_SCREEN_TABLES = 2  # all are in scores.md
SettingScores = dict[str, list[Score]]  # of each setting, by question


def check_question_selection(out: Path, chosen: dict[str, Any]) -> None:
    """Raises `ConfigError` where the folder has scores of other questions of the file, or not of ours."""
    path = out / "scores.json"
    if not path.is_file() or not path.stat().st_size:
        return
    found = read_json_or_empty(path)
    then = found.get("chosen", chosen)  # older programs did not write it down
    if "settings" not in found or not isinstance(then, dict):
        raise ConfigError(f"{path} is there and was not written by evaluate: choose another --out")
    if then != chosen:
        said = [", ".join(f"{key}={value}" for key, value in each.items()) for each in (then, chosen)]
        raise ConfigError(
            f"out={out} holds the scores of questions chosen with {said[0]}, this run has {said[1]}: "
            "choose another --out"
        )


def write_evaluation_report(
    out: Path, groups: QuestionGroups, scores: SettingScores, folders: dict[str, Path],
    said: dict[str, Any],
) -> None:  # fmt: skip
    """JSON first, so that nothing that goes wrong later takes it; then Markdown, the screen, a picture.

    said: what scores.json begins with; "f1_rule" among it. Raises `RunError` for a picture that fails.
    """
    stamps = {
        name: read_json_or_empty(folder / "answers.jsonl.run.json") for name, folder in folders.items()
    }
    summaries = {name: summarize_scores(theirs, groups) for name, theirs in scores.items()}
    energy = {name: summarise_energy(stamp.get("energy")) for name, stamp in stamps.items()}
    against = compare_to_first(scores, groups)
    record = said | {
        "questions": {group: len(places) for group, places in groups.items()},
        "settings": {
            name: {"groups": found, "energy": energy[name], "stamp": stamps[name]}
            for name, found in summaries.items()
        },
        "first_minus": against,
    }
    write_text_atomic(out / "scores.json", json.dumps(record, indent=2, default=vars) + "\n")
    overall, count = {name: found["all"] for name, found in summaries.items()}, len(groups["all"])
    first, spent, rule = [], tables.build_energy_table(energy), said["f1_rule"]
    if "swept" in said:
        less = {name: found["all"] for name, found in against.items()}
        first.append(tables.build_overview_table(count, overall, less, said["swept"]))
    brief = {name: places for name, places in groups.items() if ", " not in name}
    shown = [] if "swept" in said else tables.build_comparison_tables(brief, summaries, against, rule)
    tables.print_tables(Console(), [*[*first, *shown][: MAX_SCREEN_TABLES - len(spent)], *spent])
    everything = [*first, *tables.build_comparison_tables(groups, summaries, against, rule), *spent]
    stamp = next(iter(stamps.values()))
    write_text_atomic(out / "scores.md", tables.render_markdown_report(everything, stamp))
    if "swept" in said:
        try:
            plots.plot_pareto(out / PICTURE, overall, said["swept"])
        except (RuntimeError, ValueError) as error:  # of matplotlib: MPLBACKEND, a font
            raise RunError(f"{out / PICTURE} cannot be drawn: {summarize_error(error)}") from None
    picture = f", with {PICTURE} and all answers" if "swept" in said else ", with all answers"
    print(f"all tables are in scores.md{picture}: {replace_control_chars(str(out))}")
    for line in tables.summarize_findings(overall, {name: each["all"] for name, each in against.items()}):
        print(replace_control_chars(line))


def report_datasets(out: Path, names: Sequence[str]) -> None:
    """One table of all data sets that were evaluated into folders of `out`, a row for each setting."""
    metrics = ("exact_match", "cover_match", "f1", "recall_last", *tables.COST_METRICS)
    rows = []
    for name in names:
        found = read_result(out / name).scores
        for setting, groups in found.settings.items():
            cells = tables.format_metrics(dict.fromkeys(metrics) | groups.groups["all"], metrics)
            rows.append([name, setting, f"{found.questions['all']:,}", *cells])
    headings = ["data set", "setting", "questions", "exact match %", "cover-EM %", "F1 %",
                "evidence recall %", *tables.COST_METRICS]  # fmt: skip
    grid = tables.ResultTable("Data sets", headings, rows)
    tables.print_tables(Console(), [grid])
    write_text_atomic(out / "datasets.md", tables.render_markdown_table(grid))


def score_folder(folder: Path, questions: Sequence[Question], f1_rule: str) -> list[Score]:
    """The score of each question, from the folder's traces."""
    asked = {question.id: question for question in questions}
    rollouts = (rollout for rollout in read_trace(folder / TRACE_FILE) if rollout.id in asked)
    scores = {rollout.id: score_rollout(rollout, asked[rollout.id], f1_rule) for rollout in rollouts}
    return [scores[question.id] for question in questions]
