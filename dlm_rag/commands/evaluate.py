"""Score a denoiser on questions with known answers, under one setting or several.

    dlm-rag evaluate --out runs/shipped --compare all      # the shipped model on its invented world
    dlm-rag evaluate --questions questions.jsonl --model DIR_OR_HUB_ID --corpus passages.jsonl \\
        --out runs/first
    dlm-rag evaluate ... --out runs/all --compare all --quick     # 200 of the questions, of every kind
    dlm-rag evaluate ... --out runs/two --compare interleaved,interleaved+decode.commit_threshold=0.8
    dlm-rag evaluate ... --out runs/swept --sweep decode.commit_threshold=0.9,0.8,0.7 retrieval.top_k=7,3
    dlm-rag evaluate --config sardi.yaml --dataset 2wiki --out runs/2wiki      # the paper's table
    dlm-rag evaluate --reproduce runs/shipped --out runs/again     # and what has become different

--compare all: interleaved retrieval (decode.query=proxy), committed tokens only, static retrieval,
a second search with the best passage of the first (two_rounds, feedback), none, and oracle evidence.
--sweep: every combination of the values, under each setting of --compare where there is one.
The folder gets scores.json, scores.md, a picture, config.yaml and the answers and traces of every setting.
A run that was stopped goes on when the same command is given again. In a checkout `python evaluate.py` does
the same.
"""

import os
import shlex
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dlm_rag.commands.job import Job, plan
from dlm_rag.commands.prepare import Once, gather_questions, with_shipped
from dlm_rag.commands.scores import (
    check_chosen,
    picture,
    report,
    report_again,
    score_folder,
    scores_then,
    written,
)
from dlm_rag.commands.words import READER, CommandLine, parse
from dlm_rag.config import dump_config, load_config
from dlm_rag.errors import ConfigError
from dlm_rag.files.whole import write_whole
from dlm_rag.program import check_writable, note
from dlm_rag.progress import progress

if TYPE_CHECKING:
    from dlm_rag.config import Config
    from dlm_rag.evaluation.results import Result
    from dlm_rag.questions import Question

OPTIONS: dict[str, tuple[str | tuple[()], str]] = {
    "sweep": (
        (),
        "KEY=VALUE,VALUE ...: every combination is a setting; the first is held against the others",
    ),
    "dataset": ("", "one of the paper's, from data/: 2wiki, hotpotqa, musique, cofca, synthworlds"),
    "reproduce": ("", "folder of an evaluation that is run again; prints what has become different"),
}


@dataclass(frozen=True)
class Wanted:
    """What is to be run, as it was told: before what ships takes the place of what is not named."""

    config: "Config"
    settings: "dict[str, Config]"
    alone: bool  # one setting, whose answers are in the folder itself
    said: dict[str, Any]  # what scores.json begins with
    then: "Result | None" = None  # that is run again


def main(argv: list[str]) -> None:
    words = parse(__doc__ or "", argv, typed=False, chosen=True, answers=True, options=OPTIONS)
    out = words.config.out
    if out in (None, "-"):
        raise ConfigError("evaluation needs --out FOLDER")
    if words.config.trace is not None:
        raise ConfigError("evaluation keeps its traces in the folder of --out: leave --trace out")
    if words.config.html is not None:
        raise ConfigError(
            "evaluation makes no page: leave --html out, and make it of a trace with dlm-rag page"
        )
    if words.options["reproduce"] and words.file == READER:  # who answers, the result says
        words = replace(words, file=None)
    wanted = of_result(words) if words.options["reproduce"] else of_words(words)
    said = {"command": shlex.join(["dlm-rag", "evaluate", *argv])} | wanted.said
    evaluate(Path(str(out)), wanted, said, words.tell)


def evaluate(
    out: Path, wanted: Wanted, said: dict[str, Any], ready: Callable[[], None] = lambda: None
) -> None:
    """Runs what is wanted into a folder, and reports; said: what scores.json begins with.

    ready: called once all has been checked.
    """
    config = with_shipped(wanted.config, [])
    if config.questions is None:
        raise ConfigError("evaluation of a model or corpus of your own needs --questions FILE")
    questions = gather_questions(config, [])
    from dlm_rag.evaluation.compare import group_questions
    from dlm_rag.evaluation.metrics import choose_f1
    from dlm_rag.evaluation.results import CONFIG, folder_name

    for question in questions:
        if not question.golden_answers:
            raise ConfigError(
                f"{config.questions} has questions without golden_answers, '{question.id}' for one: they "
                "cannot be scored"
            )
    said |= {
        "f1_rule": choose_f1(config.f1, config.questions),
        "chosen": {"limit": config.limit, "quick": config.quick},
    }
    groups = group_questions(questions)
    check_chosen(out, said["chosen"])
    before = wanted.then and scores_then(wanted.then, questions, said["f1_rule"])
    folders = {name: out if wanted.alone else out / folder_name(name) for name in wanted.settings}
    if len({*folders.values()}) < len(folders):
        raise ConfigError("compare: two settings would share a folder: their names differ by / and _ only")
    jobs = plan_all(wanted, folders, questions)
    for name in ("scores.json", "scores.md", picture(said), CONFIG):
        check_writable(str(out / name), "out")
    if dataset := said.get("dataset"):
        questions = hold_to_the_paper(dataset, jobs, questions, said)
    for folder, told in {
        out: wanted.config,
        **{folders[name]: c for name, c in wanted.settings.items()},
    }.items():
        with written(folder / CONFIG) as path:
            write_whole(path, dump_config(replace(told, out=None, compare=None)))
    ready()
    run_all(jobs, config.workers)
    scores = {name: score_folder(folder, questions, said["f1_rule"]) for name, folder in folders.items()}
    report(out, groups, scores, folders, said)
    if wanted.then and before:
        report_again(out, wanted.then, before, groups, scores)


def of_words(words: CommandLine) -> Wanted:
    """The settings that the command line names. Raises `ConfigError`."""
    from dlm_rag.evaluation.compare import cross, read_settings, read_sweep

    said: dict[str, Any] = {}
    if dataset := words.options["dataset"]:
        from dlm_rag.evaluation.published import layout

        words = replace(words, settings=[*layout(dataset, words.settings), *words.settings])
        words = replace(words, config=words.config_with([]))
        said["dataset"] = dataset
    config = words.config
    if words.options["sweep"] == []:
        raise ConfigError("sweep: no key has two values or more: write KEY=VALUE,VALUE")
    swept = read_sweep(words.options["sweep"])
    if both := sorted({*swept} & {word.partition("=")[0] for word in words.settings}):
        raise ConfigError(f"sweep: {both[0]} is swept, and set to one value too: leave one out")
    if config.compare is None and not swept:
        return Wanted(config, {f"{config.decode.query} {config.retrieval.kind}": config}, True, said)
    if swept:
        said["swept"] = swept
    settings = {}
    for name, more in cross(read_settings(config.compare) if config.compare else {"": []}, swept).items():
        try:
            settings[name] = words.config_with(more)
        except ConfigError as error:
            raise ConfigError(f"'{name}': {error}") from None
    return Wanted(config, settings, False, said)


def of_result(words: CommandLine) -> Wanted:
    """The settings of a stored result, with what the command line says on top. Raises `ConfigError`."""
    from dlm_rag.evaluation.results import CONFIG, read_result

    config, options = words.config, words.options
    named = {"--config": words.file, "--compare": config.compare, "--sweep": options["sweep"],
             "--dataset": options["dataset"], "--limit": config.limit, "--quick": config.quick}  # fmt: skip
    if given := [flag for flag, value in named.items() if value]:
        raise ConfigError(f"--reproduce runs the settings of its result: leave {given[0]} out")
    then = read_result(Path(options["reproduce"]))
    folders = {name: then.folder_of(name) for name in then.settings}
    for folder in (then.folder, *folders.values()):
        if not (folder / CONFIG).is_file():
            raise ConfigError(
                f"{folder} has no {CONFIG}: an older program made it, and did not say its settings"
            )
    if os.path.realpath(str(config.out)) == os.path.realpath(then.folder):
        raise ConfigError("--reproduce and --out are the same folder: choose another --out")
    config, *settings = (
        load_config(str(folder / CONFIG), words.settings) for folder in (then.folder, *folders.values())
    )
    said: dict[str, Any] = {key: then.record[key] for key in ("dataset", "swept") if key in then.record}
    alone = list(folders.values()) == [then.folder]
    return Wanted(config, dict(zip(folders, settings, strict=True)), alone, said, then)


def plan_all(wanted: Wanted, folders: dict[str, Path], questions: "list[Question]") -> dict[str, Job]:
    """A job for each setting, all checked before the first one runs. Raises `UserError`."""
    once, jobs = Once(), {}
    for name, folder in folders.items():
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ConfigError(f"out={folder} cannot be a folder: {error.strerror}") from None
        config = with_shipped(wanted.settings[name], [])
        config = replace(config, out=str(folder / "answers.jsonl"), trace=str(folder / "trace.jsonl"))
        jobs[name] = plan(config, questions, once)
    return jobs


def run_all(jobs: dict[str, Job], workers: str | None) -> None:
    """Runs the jobs; those of the same weights one after another, so that these are read once.

    What one setting has kept of evidence is not passed on: the next would look faster than it is.
    """
    from dlm_rag.commands.engines import answering

    models = [job.prepared.config.model for job in jobs.values()]
    total = sum(len(job.questions) for job in jobs.values())
    left = sum(len(job.file.remaining(job.questions)) for job in jobs.values())
    several = progress(f"answering under {len(jobs)} settings", total, done=total - left)
    with (
        answering(workers, [job.prepared for job in jobs.values()]) as engines,
        several if len(jobs) > 1 else nullcontext(None) as advance,
    ):
        for name in sorted(jobs, key=lambda name: models.index(jobs[name].prepared.config.model)):
            job = jobs[name]
            if len(jobs) > 1:
                note(f"{name}:")
            job.run(engines, advance)
            if job.failed:
                note(f"{name}: {job.failed} failed, counted as wrong; the same command asks again")


def hold_to_the_paper(
    dataset: str, jobs: dict[str, Job], questions: "list[Question]", said: dict[str, Any]
) -> "list[Question]":
    """Warns of all in which the settings leave the paper's, and notes it in `said`.

    Returns the questions, with the support that the corpus has. Raises `ConfigError` for an index that is
    not of the corpus.
    """
    from dlm_rag.evaluation.published import (
        DATASETS,
        check_index,
        column_of,
        departures,
        with_known_support,
    )
    from dlm_rag.retrieval.corpus import open_corpus

    said["columns"], said["departures"] = {}, {}
    retrieval = next(iter(jobs.values())).prepared.config.retrieval
    corpus = open_corpus(str(retrieval.corpus), retrieval.index_folder)
    common = check_index(corpus)
    if (published := DATASETS[dataset].questions) != len(questions):
        common.append(f"{len(questions)} questions (paper: {published})")
    for name, job in jobs.items():
        config, dtype = job.prepared.config, str(job.prepared.dtype).removeprefix("torch.")
        said["columns"][name] = column_of(config)
        said["departures"][name] = departures(config, dtype) + common
        for line in said["departures"][name]:
            note(f"warning: {name} is not as published: {line}")
    return with_known_support(questions, corpus)
