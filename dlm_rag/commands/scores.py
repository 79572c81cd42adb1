"""What evaluate leaves in its folder: the scores of every setting, in files and on the screen."""

import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dlm_rag.errors import ConfigError, RunError, fold_message
from dlm_rag.files.jsonl import parse_object, read_note
from dlm_rag.files.whole import write_whole
from dlm_rag.text import visible

if TYPE_CHECKING:
    from dlm_rag.decode.rollout import Rollout
    from dlm_rag.evaluation.compare import Groups
    from dlm_rag.evaluation.metrics import Score
    from dlm_rag.evaluation.results import Result
    from dlm_rag.questions import Question


def check_chosen(out: Path, chosen: dict[str, Any]) -> None:
    """Raises `ConfigError` where the folder has scores of other questions of the file, or not of ours."""
    path = out / "scores.json"
    if not path.is_file() or not path.stat().st_size:
        return
    try:
        found = parse_object(path.read_bytes(), "scores", ConfigError)
    except ConfigError:
        found = {}
    then = found.get("chosen", chosen)  # older programs did not write it down
    if "settings" not in found or not isinstance(then, dict):
        raise ConfigError(f"{path} is there and was not written by evaluate: choose another --out")
    if then != chosen:
        said = [", ".join(f"{key}={value}" for key, value in each.items()) for each in (then, chosen)]
        raise ConfigError(
            f"out={out} holds the scores of questions chosen with {said[0]}, this run has {said[1]}: "
            "choose another --out"
        )


def report(
    out: Path,
    groups: "Groups",
    scores: "dict[str, list[Score]]",
    folders: dict[str, Path],
    said: dict[str, Any],
) -> None:
    """JSON first, so that nothing that goes wrong later takes it; then Markdown, the screen, a picture.

    said: what scores.json begins with; "f1_rule" among it. Raises `RunError` for what cannot be written.
    """
    from rich.console import Console

    from dlm_rag.energy.reading import summary
    from dlm_rag.evaluation import pareto
    from dlm_rag.evaluation.compare import as_record, compare_to_first, summarise
    from dlm_rag.evaluation.published import beside
    from dlm_rag.evaluation.report import energy_grid, grids, markdown, plot, show

    stamps = {name: read_note(folder / "answers.jsonl.run.json") for name, folder in folders.items()}
    summaries = {name: summarise(theirs, groups) for name, theirs in scores.items()}
    energy = {name: summary(stamp.get("energy")) for name, stamp in stamps.items()}
    against = compare_to_first(scores, groups)
    record = said | {
        "questions": {group: len(places) for group, places in groups.items()},
        "settings": {
            name: {"groups": as_record(found), "energy": energy[name], "stamp": stamps[name]}
            for name, found in summaries.items()
        },
        "first_minus": {name: as_record(found) for name, found in against.items()},
    }
    brief = {name: places for name, places in groups.items() if ", " not in name}
    stamp, rule = next(iter(stamps.values())), said["f1_rule"]
    overall, spent = {name: found["all"] for name, found in summaries.items()}, energy_grid(energy)
    first = []
    if "swept" in said:
        less = {name: found["all"] for name, found in against.items()}
        first.append(pareto.overview(len(groups["all"]), overall, less, said["swept"]))
    if "dataset" in said:
        matches = {name: metrics["exact_match"] for name, metrics in overall.items()}
        first.append(beside(said["dataset"], matches, said["columns"], len(groups["all"])))
    notes = [f"{name}: {line}" for name, lines in said.get("departures", {}).items() for line in lines]
    with written(out / "scores.json") as path:
        write_whole(path, json.dumps(record, indent=2) + "\n")
    shown = [] if "swept" in said else grids(brief, summaries, against, rule)
    show(Console(), [*first, *shown, *spent])
    with written(out / "scores.md") as path:
        write_whole(
            path, markdown([*first, *grids(groups, summaries, against, rule), *spent], stamp, notes)
        )
    with written(out / picture(said)) as path:
        if "swept" in said:
            pareto.plot(path, overall, said["swept"])
        else:
            plot(path, groups, summaries)
    print(f"scores.md, scores.json, {picture(said)} and all answers are in {visible(str(out))}")


def picture(said: dict[str, Any]) -> str:
    """The name of the picture: of a sweep, what exact match costs; else exact match by hops."""
    return "pareto.png" if "swept" in said else "scores.png"


def scores_then(then: "Result", questions: "Sequence[Question]", f1_rule: str) -> "dict[str, list[Score]]":
    """The scores of a stored result. Raises `ConfigError` where it has answered other questions."""
    found = {}
    for name in then.settings:
        folder = then.folder_of(name)
        asked = {r.id: r.question for r in _rollouts(folder)}
        if asked != {question.id: question.question for question in questions}:
            raise ConfigError(
                f"{folder} has not answered the {len(questions)} questions of the same run today"
            )
        found[name] = score_folder(folder, questions, f1_rule)
    return found


def report_again(
    out: Path,
    then: "Result",
    before: "dict[str, list[Score]]",
    groups: "Groups",
    scores: "dict[str, list[Score]]",
) -> None:
    """What has become different, on the screen and in reproduced.md. Raises `RunError`."""
    from rich.console import Console

    from dlm_rag.evaluation.report import markdown, show
    from dlm_rag.evaluation.results import again, changes, read_result

    now = read_result(out)
    same = {}
    for name in scores:
        old, new = ({r.id: r.response for r in _rollouts(each.folder_of(name))} for each in (then, now))
        same[name] = sum(new[i] == response for i, response in old.items())
    stamps = {name: (then.settings[name]["stamp"], now.settings[name]["stamp"]) for name in scores}
    lines = dict.fromkeys(line for pair in stamps.values() for line in changes(*pair))
    grid = again(before, scores, groups, same)
    show(Console(), [grid])
    for line in lines:
        print(visible(line))
    if not lines:
        print("code, versions, machine, files and settings are the same")
    with written(out / "reproduced.md") as path:
        write_whole(path, markdown([grid], next(iter(stamps.values()))[1], [*lines]))


@contextmanager
def written(path: Path) -> Iterator[Path]:
    """Raises `RunError` for a file of the report that cannot be written; the answers are there."""
    try:
        yield path
    except (OSError, RuntimeError, ValueError) as error:
        raise RunError(
            f"{path} cannot be written ({fold_message(error)}): the answers are there, and the same "
            "command scores them again"
        ) from None


def score_folder(folder: Path, questions: "Sequence[Question]", f1_rule: str) -> "list[Score]":
    """The score of each question, from the folder's traces."""
    from dlm_rag.evaluation.metrics import score

    asked = {question.id: question for question in questions}
    rollouts = (rollout for rollout in _rollouts(folder) if rollout.id in asked)
    scores = {rollout.id: score(rollout, asked[rollout.id], f1_rule) for rollout in rollouts}
    return [scores[question.id] for question in questions]


def _rollouts(folder: Path) -> "Iterator[Rollout]":
    from dlm_rag.decode.trace import read_trace

    return read_trace(folder / "trace.jsonl")
