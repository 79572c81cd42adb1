"""Score a denoiser on questions with known answers, under one setting or several.

    dlm-rag evaluate                                     # the shipped model on its invented world: a minute
    dlm-rag evaluate --out runs/shipped --compare all      # all its questions, under seven settings
    dlm-rag evaluate --questions questions.jsonl --model DIR_OR_HUB_ID --corpus passages.jsonl \\
        --out runs/first
    dlm-rag evaluate ... --out runs/all --compare all --quick     # 200 of the questions, of every kind
    dlm-rag evaluate ... --out runs/two --compare interleaved,interleaved+commit_threshold=0.8
    dlm-rag evaluate ... --out runs/swept --sweep decode.commit_threshold=0.9,0.8,0.7 retrieval.top_k=7,3
    dlm-rag evaluate --config sardi.yaml --dataset 2wiki --out runs/2wiki      # SARDI's questions
    dlm-rag evaluate --dataset hotpotqa --corpus wiki18 --model DIR --out runs/hotpotqa
    dlm-rag evaluate --model openai://HOST:PORT/v1/NAME ... --out runs/ar --compare static,ircot

--compare all: interleaved retrieval (decode.query_policy=proxy), committed tokens only, static retrieval,
a second search with the best passage of the first (two_rounds, feedback), none, and oracle evidence.

--sweep: every combination of the values, under each setting of --compare.

A model behind a server has its own policies: no_retrieval, static, oracle, ircot and search_r1.

The folder gets scores.json, scores.md, of a sweep pareto.png, and the answers and traces of every setting.
Run the same command again to resume.
"""

import json
import shlex
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from rich.console import Console

from dlm_rag.baselines import is_model_url, is_read_when_served
from dlm_rag.cli import check_writable, print_note
from dlm_rag.commands.answer_job import AnswerJob, open_engines, parse_answer_command_line, plan_answer_job
from dlm_rag.commands.arguments import ANSWER_SETTINGS, QUICK_LIMIT, CommandLine
from dlm_rag.commands.prepare_decoder import (
    PreparedBaseline,
    ResourceCache,
    fill_in_shipped_files,
    gather_questions,
    prepare_baseline,
    prepare_decoder,
)
from dlm_rag.config import Config, load_config
from dlm_rag.config.fields import check_effects, flatten_settings
from dlm_rag.data.hub_datasets import DATA_FOLDER, SPLIT_RULES, find_dataset, list_dataset_files
from dlm_rag.decode.trace_file import read_trace
from dlm_rag.energy import summarise_energy
from dlm_rag.errors import ConfigError, RunError, summarize_error
from dlm_rag.evaluation import compare, tables
from dlm_rag.evaluation.metrics import Score, choose_f1_rule, score_rollout
from dlm_rag.files.checked_json import read_json_or_empty
from dlm_rag.files.paths import make_folder, write_text_atomic
from dlm_rag.progress import report_progress
from dlm_rag.questions import Question
from dlm_rag.retrieval.base import CorpusRetriever, check_oracle_support, describe_missing_support
from dlm_rag.retrieval.corpus import Corpus, open_corpus
from dlm_rag.text import replace_control_chars

MAX_CHECKED_PASSAGES = 2_000_000  # of a corpus that is read for supporting passages before a run
MAX_SCREEN_TABLES = 2  # all are in scores.md
PICTURE = "pareto.png"  # of a sweep: what exact match costs
EVALUATE_READS = (*ANSWER_SETTINGS, "compare", "remote")
SARDI_CHECKPOINT = "pauljngr/sardi-dream-7b"
SWEEP_HELP = "KEY=VALUE,VALUE ...: every combination is a setting; the first is held against the others"
DATASET_HELP = (
    "NAME: with a corpus one of `dlm-rag data get`; else one of the paper's, with its corpus, from data/: "
    "2wiki, hotpotqa, musique, cofca, synthworlds"
)
EVALUATE_OPTIONS: dict[str, tuple[str | tuple[()], str]] = {
    "sweep": ((), SWEEP_HELP),
    "dataset": ("", DATASET_HELP),
    "split": ("search_r1", f"which questions of them: {', '.join(SPLIT_RULES)}"),
}


class EvaluationPlan(NamedTuple):
    """What is to be run, as it was given: before what ships takes the place of what is not named."""

    config: Config
    settings: dict[str, Config]  # one alone has no name, and its answers are in the folder itself
    report_header: dict[str, Any]  # what scores.json begins with


def main(argv: list[str]) -> None:
    words = parse_answer_command_line(__doc__ or "", argv, EVALUATE_READS, options=EVALUATE_OPTIONS)
    if words.config.out == "-":
        raise ConfigError("evaluation needs a folder: --out FOLDER")
    if words.config.out is None:
        quick = not (words.settings or words.file or any(words.options[n] for n in ("dataset", "sweep")))
        more = [f"limit={QUICK_LIMIT}"] * quick  # with nothing named, the shipped model for a minute
        words = words.with_settings([*words.settings, "out=runs/evaluation", *more])
        print_note(f"the results go to {words.config.out} (--out FOLDER)")
    wanted = plan_from_command_line(words)
    wanted.report_header["command"] = shlex.join(["dlm-rag", "evaluate", *argv])
    run_evaluation(Path(str(words.config.out)), wanted, words.announce_reader)


def run_evaluation(out: Path, wanted: EvaluationPlan, ready: Callable[[], None]) -> None:
    """Runs what is wanted into a folder, and reports; ready: called once all has been checked."""
    config = fill_in_shipped_files(wanted.config, [])
    questions = gather_questions(config, [], scored=True)
    asked, is_single = wanted.settings.values(), "" in wanted.settings
    if any(each.retrieval.oracle and each.decode.query_policy == "question" for each in asked):
        check_oracle_support(questions)
    f1_rule, groups = choose_f1_rule(str(config.questions)), compare.group_questions(questions)
    said = wanted.report_header | {"f1_rule": f1_rule, "chosen": {"limit": config.limit}}
    check_question_selection(out, config.limit)
    folders = {name: out if is_single else out / name.replace("/", "_") for name in wanted.settings}
    if len({*folders.values()}) < len(folders):
        raise ConfigError("compare: two settings would share a folder: their names differ by / and _ only")
    jobs = plan_answer_jobs(wanted, folders, questions)
    for name in ("scores.json", "scores.md", PICTURE)[: 3 if "swept" in said else 2]:
        check_writable(str(out / name), "out")
    first = next(iter(jobs.values())).prepared
    if is_single:  # named by what the checkpoint says as well
        own, served = first.config, is_model_url(first.config.model.path)
        policy = own.remote.policy if served else own.decode.query_policy
        name = f"{policy} {'service' if own.retrieval.url else own.retrieval.method}"
        folders, jobs = {name: out}, {name: next(iter(jobs.values()))}
    if said.get("dataset"):
        retrieval = first.config.retrieval
        corpus = open_corpus(str(retrieval.corpus), retrieval.index_dir)
        questions = drop_incomplete_support(questions, corpus)
    titled = sum(bool(q.supporting_titles) and not q.supporting_ids for q in questions)
    said["recall_by"] = {"id": sum(bool(q.supporting_ids) for q in questions), "title": titled}
    searched = (getattr(job.prepared, "retriever", None) for job in jobs.values())
    corpora = (each.corpus for each in searched if isinstance(each, CorpusRetriever))
    small = (each for each in corpora if isinstance(each, Corpus) and len(each) <= MAX_CHECKED_PASSAGES)
    if (local := next(small, None)) and (lacking := describe_missing_support(questions, local)):
        print_note(lacking)
    ready()
    run_answer_jobs(jobs, config.workers)
    by_id, scores = {question.id: question for question in questions}, dict[str, list[Score]]()
    for name, folder in folders.items():
        rollouts = (rollout for rollout in read_trace(folder / "trace.jsonl") if rollout.id in by_id)
        found = {rollout.id: score_rollout(rollout, by_id[rollout.id], f1_rule) for rollout in rollouts}
        scores[name] = [found[question.id] for question in questions]
    write_evaluation_report(out, groups, scores, folders, said)


def plan_from_command_line(words: CommandLine) -> EvaluationPlan:
    """The settings that the command line names, for its data set if any. Raises `ConfigError`."""
    said: dict[str, Any] = {}
    given = [word.partition("=")[0] for word in words.settings[words.reader_is_default :]]
    if dataset := words.options["dataset"]:
        if words.config.questions:
            raise ConfigError("--dataset names questions: leave --questions out")
        searched = words.config.retrieval.corpus or words.config.retrieval.url
        rule = words.options["split"] if searched else "sardi"
        more = [f"questions={find_dataset(dataset, rule)}"]
        said |= {"questions_of": f"{dataset}, {rule}"} if searched else {"dataset": dataset}
        if not searched:
            more += [f"retrieval.corpus={Path(DATA_FOLDER) / list_dataset_files(dataset, rule)[1].path}"]
            more += [f"model.path={SARDI_CHECKPOINT}"] * (words.config.model.path is None)
        words = words.with_settings([*words.settings, *more])
    if words.options["split"] != EVALUATE_OPTIONS["split"][0] and "questions_of" not in said:
        raise ConfigError("--split has no effect without --dataset and --corpus: leave it out")
    if words.options["sweep"] == []:
        raise ConfigError("sweep: no key has two values or more: write KEY=VALUE,VALUE")
    if swept := compare.parse_sweep(words.options["sweep"]):
        said["swept"] = swept
    named, served = words.config.compare, is_model_url(words.config.model.path)
    compared = compare.parse_compared_settings(named, served) if named else {"": []}
    settings, variants = {}, []
    for name, more in compare.expand_sweep(compared, swept).items():
        try:
            settings[name] = load_config(words.file, [*words.settings, *more])
        except ConfigError as error:
            raise ConfigError(f"'{name}': {error}") from None
        variants.append((settings[name], [*given, *(word.partition("=")[0] for word in more)]))
    own, *others = map(flatten_settings, [load_config(words.file, words.settings), *settings.values()])
    if both := [key for key in given if key in swept or all(each[key] != own[key] for each in others)]:
        raise ConfigError(f"{both[0]} is set to one value, and by every setting too: leave one out")
    check_effects(variants)
    if all(is_model_url(each.model.path) for each in settings.values()):
        policies = dict.fromkeys(each.remote.policy for each in settings.values())
        given = [key for _, keys in variants for key in keys]
        if idle := [key for key in given if not is_read_when_served(key, policies)]:
            where = f"a model behind a server ({', '.join(policies)})"
            raise ConfigError(f"{idle[0]} has no effect on {where}: leave it out")
    return EvaluationPlan(words.config, settings, said)


def plan_answer_jobs(
    wanted: EvaluationPlan, folders: dict[str, Path], questions: list[Question]
) -> dict[str, AnswerJob]:
    """A job for each setting, all checked before the first one runs. Raises `UserError`."""
    once, jobs = ResourceCache(), {}
    for name, folder in folders.items():
        make_folder(folder, "out=")
        config = fill_in_shipped_files(wanted.settings[name], [])
        config = replace(config, out=str(folder / "answers.jsonl"), trace=str(folder / "trace.jsonl"))
        prepare = prepare_baseline if is_model_url(config.model.path) else prepare_decoder
        jobs[name] = job = plan_answer_job(config, questions, once, prepare)
        if isinstance(job.prepared, PreparedBaseline) and job.file.remaining(questions):
            job.prepared.load().check()
    return jobs


def run_answer_jobs(jobs: dict[str, AnswerJob], workers: str | None) -> None:
    """Runs the jobs, those of the same weights together, without the evidence that others have kept."""
    several, prepared = len(jobs) > 1, [job.prepared for job in jobs.values()]
    models = [each.config.model for each in prepared]
    total = sum(len(job.questions) for job in jobs.values())
    left = sum(len(job.file.remaining(job.questions)) for job in jobs.values())
    progress = report_progress(f"answering under {len(jobs)} settings", total, done=total - left)
    with open_engines(workers, prepared) as engines, progress if several else nullcontext() as advance:
        for name in sorted(jobs, key=lambda name: models.index(jobs[name].prepared.config.model)):
            if several:
                print_note(f"{name}:")
            jobs[name].run(engines, advance)
            if failed := jobs[name].failed:
                print_note(f"{name}: {failed} failed, counted as wrong; the same command asks again")


def drop_incomplete_support(questions: list[Question], corpus: Corpus) -> list[Question]:
    """Returns the questions, without supporting ids where the corpus, chunked again, lacks one of them."""
    wanted = {i for question in questions for i in question.supporting_ids}
    there = {passage.id for passage in corpus if passage.id in wanted} if wanted else set()
    return [q if there.issuperset(q.supporting_ids) else replace(q, supporting_ids=()) for q in questions]


def check_question_selection(out: Path, limit: int | None) -> None:
    """Raises `ConfigError` where the folder has scores of other questions of the file, or not of ours."""
    path = out / "scores.json"
    if not path.is_file() or not path.stat().st_size:
        return
    found = read_json_or_empty(path)
    chosen = found.get("chosen", {"limit": limit})  # older programs did not write it down
    if "settings" not in found or not isinstance(chosen, dict):
        raise ConfigError(f"{path} is there and was not written by evaluate: choose another --out")
    if chosen != {"limit": limit}:
        raise ConfigError(
            f"out={out} holds the scores of questions chosen with limit={chosen.get('limit')}, this run "
            f"has limit={limit}: choose another --out"
        )


def write_evaluation_report(
    out: Path, groups: compare.QuestionGroups, scores: dict[str, list[Score]], folders: dict[str, Path],
    said: dict[str, Any],
) -> None:  # fmt: skip
    """Writes JSON first, so that nothing takes it that goes wrong later. Raises `RunError`."""
    stamps = {name: read_json_or_empty(each / "answers.jsonl.run.json") for name, each in folders.items()}
    summaries = {name: compare.summarize_scores(theirs, groups) for name, theirs in scores.items()}
    energy = {name: summarise_energy(stamp.get("energy")) for name, stamp in stamps.items()}
    against = compare.compare_to_first(scores, groups)
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
    report = tables.render_markdown_report(everything, next(iter(stamps.values())))
    write_text_atomic(out / "scores.md", report)
    if "swept" in said:
        try:
            tables.plot_pareto(out / PICTURE, overall, said["swept"])
        except (RuntimeError, ValueError) as error:  # of matplotlib: MPLBACKEND, a font
            raise RunError(f"{out / PICTURE} cannot be drawn: {summarize_error(error)}") from None
    picture = f" {PICTURE} and" * ("swept" in said)
    print(f"all tables are in scores.md, with{picture} all answers: {replace_control_chars(str(out))}")
    for line in tables.summarize_findings(overall, {name: each["all"] for name, each in against.items()}):
        print(replace_control_chars(line))
