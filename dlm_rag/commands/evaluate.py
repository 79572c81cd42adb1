"""Score a denoiser on questions with known answers, under one setting or several.

    dlm-rag evaluate --out runs/shipped --compare all      # the shipped model on its invented world
    dlm-rag evaluate --questions questions.jsonl --model DIR_OR_HUB_ID --corpus passages.jsonl \\
        --out runs/first
    dlm-rag evaluate ... --out runs/all --compare all --quick     # 200 of the questions, of every kind
    dlm-rag evaluate ... --out runs/two --compare interleaved,interleaved+decode.commit_threshold=0.8

--compare all: interleaved retrieval (decode.query=proxy), committed tokens only, static retrieval,
a second search with the best passage of the first (two_rounds, feedback), none, and oracle evidence.
The folder gets scores.json, scores.md, scores.png and the answers and traces of every setting. A run that
was stopped goes on when the same command is given again. In a checkout `python evaluate.py` does the same.
"""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dlm_rag.commands.job import gather_questions, plan, with_shipped
from dlm_rag.commands.words import CommandLine, parse
from dlm_rag.errors import ConfigError, RunError, fold_message
from dlm_rag.files.jsonl import parse_object, read_note
from dlm_rag.files.whole import write_whole
from dlm_rag.program import check_writable, note
from dlm_rag.text import visible

if TYPE_CHECKING:
    from dlm_rag.config import Config
    from dlm_rag.evaluation.compare import Groups
    from dlm_rag.evaluation.metrics import Score
    from dlm_rag.questions import Question


def main(argv: list[str]) -> None:
    words = parse(__doc__ or "", argv, typed=False, chosen=True)
    config = with_shipped(words.config, [])
    if config.out in (None, "-"):
        raise ConfigError("evaluation needs --out FOLDER")
    if config.questions is None:
        raise ConfigError("evaluation of a model or corpus of your own needs --questions FILE")
    if config.trace is not None:
        raise ConfigError("evaluation keeps its traces in the folder of --out: leave --trace out")
    questions = gather_questions(config, [])
    from dlm_rag.evaluation.compare import group_questions

    for question in questions:
        if not question.golden_answers:
            raise ConfigError(
                f"{config.questions} has questions without golden_answers, '{question.id}' for one: they "
                "cannot be scored"
            )
    out = Path(config.out)
    groups, chosen = group_questions(questions), {"limit": config.limit, "quick": config.quick}
    check_chosen(out, chosen)
    settings = {name: with_shipped(setting, []) for name, setting in settings_of(words).items()}
    folders = {name: out / name.replace("/", "_") if config.compare else out for name in settings}
    if len({*folders.values()}) < len(folders):
        raise ConfigError("compare: two settings would share a folder: their names differ by / and _ only")
    jobs = {}  # all are checked before the first one runs
    for name, folder in folders.items():
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ConfigError(f"out={folder} cannot be a folder: {error.strerror}") from None
        jobs[name] = plan(
            replace(settings[name], out=str(folder / "answers.jsonl"), trace=str(folder / "trace.jsonl")),
            questions,
        )
    for name in ("scores.json", "scores.md", "scores.png"):
        check_writable(str(out / name), "out")
    from dlm_rag.evaluation.metrics import choose_f1

    denoiser, model = None, None
    for name, job in jobs.items():
        if len(jobs) > 1:
            note(f"{name}:")
        denoiser = job.run(denoiser if settings[name].model == model else None)
        model = settings[name].model
        if job.failed:
            note(f"{name}: {job.failed} failed, counted as wrong; the same command asks again")
    f1_rule = choose_f1(config.f1, config.questions)
    scores = {name: score_folder(folder, questions, f1_rule) for name, folder in folders.items()}
    report(out, groups, scores, folders, {"f1_rule": f1_rule, "chosen": chosen})


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


def settings_of(words: CommandLine) -> "dict[str, Config]":
    """The config of every setting by its name."""
    from dlm_rag.evaluation.compare import read_settings

    config = words.config
    if config.compare is None:
        return {f"{config.decode.query} {config.retrieval.kind}": config}
    return {name: words.config_with(more) for name, more in read_settings(config.compare).items()}


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

    from dlm_rag.evaluation.compare import as_record, compare_to_first, summarise
    from dlm_rag.evaluation.report import grids, markdown, plot, show

    stamps = {name: read_note(folder / "answers.jsonl.run.json") for name, folder in folders.items()}
    summaries = {name: summarise(theirs, groups) for name, theirs in scores.items()}
    against = compare_to_first(scores, groups)
    record = said | {
        "questions": {group: len(places) for group, places in groups.items()},
        "settings": {
            name: {"groups": as_record(summary), "stamp": stamps[name]}
            for name, summary in summaries.items()
        },
        "first_minus": {name: as_record(summary) for name, summary in against.items()},
    }
    brief = {name: places for name, places in groups.items() if ", " not in name}
    stamp, rule = next(iter(stamps.values())), said["f1_rule"]
    with written(out / "scores.json") as path:
        write_whole(path, json.dumps(record, indent=2) + "\n")
    show(Console(), grids(brief, summaries, against, rule))
    with written(out / "scores.md") as path:
        write_whole(path, markdown(grids(groups, summaries, against, rule), stamp))
    with written(out / "scores.png") as path:
        plot(path, groups, summaries)
    print(f"scores.md, scores.json, scores.png and all answers are in {visible(str(out))}")


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


def score_folder(folder: Path, questions: "list[Question]", f1_rule: str) -> "list[Score]":
    """The score of each question, from the folder's traces."""
    from dlm_rag.decode.trace import read_trace
    from dlm_rag.evaluation.metrics import score

    asked = {question.id: question for question in questions}
    rollouts = (rollout for rollout in read_trace(folder / "trace.jsonl") if rollout.id in asked)
    scores = {rollout.id: score(rollout, asked[rollout.id], f1_rule) for rollout in rollouts}
    return [scores[question.id] for question in questions]
