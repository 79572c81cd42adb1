"""What the cells of a benchmark take, before anything loads: hours, memory, joules; and which cannot be.

A question takes what it took in cells of the same model, precision and policy that are done; where there
are none, or the plan is for another machine, what `ESTIMATE` says.
"""

import math
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from statistics import fmean
from typing import NamedTuple

import torch
from rich.console import Console

from dlm_rag.baselines import is_model_url
from dlm_rag.cli import CommandParser
from dlm_rag.commands.answer_job import parse_answer_command_line
from dlm_rag.commands.evaluate import (
    EVALUATE_OPTIONS,
    EVALUATE_READS,
    plan_from_command_line,
    read_scored_questions,
)
from dlm_rag.commands.prepare_decoder import fill_in_shipped_files
from dlm_rag.config import Config, load_config
from dlm_rag.data.hub_datasets import CORPORA, FIRST_QUESTIONS, find_dataset, list_dataset_files
from dlm_rag.decode.resolve_settings import resolve_settings
from dlm_rag.errors import ConfigError, UserError
from dlm_rag.evaluation.benchmark_tables import Cell, summarise_cells
from dlm_rag.evaluation.stored_results import read_result
from dlm_rag.evaluation.tables import ResultTable, print_tables
from dlm_rag.evidence.segment_kv_cache import measure_free_bytes
from dlm_rag.files.paths import expand_path
from dlm_rag.model.checkpoint import open_checkpoint
from dlm_rag.model.denoiser_config import DenoiserConfig
from dlm_rag.model.memory_tracker import RESERVED_MEMORY_FRACTION
from dlm_rag.progress import format_bytes, format_duration
from dlm_rag.questions import QUICK_QUESTION_LIMIT
from dlm_rag.training.planning.gpu_specs import GPU_SPECS, GpuSpec, choose_planned_dtype, find_gpu_spec
from dlm_rag.training.planning.known_checkpoints import read_known_config
from dlm_rag.training.planning.parallel_choice import Choice, compare_decoding

ESTIMATE = (
    "estimated: as many forwards as questions took that were measured with the model and policy, else as "
    "the settings allow at most; each of a full batch with top_k passages of {} tokens, at the peaks of {} "
    "(compute at {:.0%}), at full power; searches, indexes and reading weights are not in it. "
    "Memory is for passages of full length"
)
PASSAGE_TOKENS = 160  # of the field's passages, which have 100 words; assumed
PLANNED_CORPUS = "planned.jsonl"  # stands for a corpus that need not be here yet


class Cost(NamedTuple):
    """What a question takes: seconds, forwards, joules; None where that is not known."""

    seconds: float | None
    forwards: float | None
    joules: float | None


class CellPlan(NamedTuple):
    """What a cell takes: seconds and joules of all questions, bytes at the peak; why it cannot be run."""

    questions: int | None = None
    seconds: float | None = None
    memory: float | None = None
    joules: float | None = None
    source: str = "-"
    problem: str = ""


Measured = dict[tuple[str, str, str], Cost]  # by model, precision and policy


def print_benchmark_plan(cells: Sequence[Cell], name: str | None, devices: int) -> None:
    """The plan of every cell and of all that are left; name: as `plan.machine`, None: this machine."""
    if name is not None:
        load_config(None, [f"plan.machine={name}"])  # which refuses others
    own = find_gpu_spec(torch.device("cuda" if torch.cuda.is_available() else "cpu"))
    machine = GPU_SPECS[name] if name else own
    measured = measure_done([cell for cell in cells if cell.is_done])
    plans = {cell: plan_cell(cell, machine, measured, machine == own) for cell in cells}
    left = [plan for cell, plan in plans.items() if not cell.is_done]
    rows = [
        [cell.name, "done" if cell.is_done else "left", *_format_plan(plan)] for cell, plan in plans.items()
    ]
    total = CellPlan(
        sum(plan.questions or 0 for plan in left), _add([plan.seconds for plan in left]),
        max((plan.memory or 0.0 for plan in left), default=0.0) or None,
        _add([plan.joules for plan in left]),
    )  # fmt: skip
    rows.append(["all that are left", f"{len(left)} of {len(cells)}", *_format_plan(total)])
    headings = ["cell", "state", "questions", "time", "peak memory", "energy", "from"]
    tables = [ResultTable(f"Plan, on {machine.name if machine else 'this machine'}", headings, rows)]
    failing = defaultdict[str, list[str]](list)
    for cell, plan in plans.items():
        failing[plan.problem].append(cell.name)
    causes = [[why, f"{len(names):,}", names[0]] for why, names in failing.items() if why]
    if causes:
        tables.append(ResultTable("What cannot run as things are", ["why", "cells", "the first"], causes))
    print_tables(Console(), tables)
    if devices > 1 and total.seconds is not None:
        print(f"{format_duration(total.seconds / devices)} on {devices} devices")
    if machine is None:
        print(f"of this machine no figures are known; --machine plans for {', '.join(GPU_SPECS)}")
    else:
        print(ESTIMATE.format(PASSAGE_TOKENS, machine.name, Config().plan.mfu))


def measure_done(cells: Sequence[Cell]) -> Measured:
    """What a question took in cells that are done, the mean over them."""
    found = defaultdict[tuple[str, str, str], list[Cost]](list)
    results = {cell: read_result(cell.folder) for cell in cells}
    for (cell, policy), metrics in summarise_cells(results).items():
        each = map(metrics.get, Cost._fields)
        means = Cost(*(None if value is None else value.mean for value in each))
        found[cell.model, cell.precision, policy].append(means)
    return {key: Cost(*map(_average, zip(*costs, strict=True))) for key, costs in found.items()}


def plan_cell(cell: Cell, machine: GpuSpec | None, measured: Measured, is_here: bool) -> CellPlan:
    """The plan of a cell; is_here: whether what was measured is of the machine that is planned for."""
    try:
        words = tuple(word for word in cell.words[:-2] if not word.startswith("decode.seed="))
        settings, count, problem = open_planned_words(words)
        costs, memory, sources = list[Cost](), 0.0, set[str]()
        for policy, config in settings.items():
            known = measured.get((cell.model, cell.precision, policy), Cost(None, None, None))
            if is_model_url(config.model.path):  # who knows where that is
                costs.append(known)
                sources.add("-" if known.seconds is None else "measured")
                continue
            shape = read_planned_shape(str(config.model.path), config.model.block_size)
            step = plan_step(config, shape, machine)
            problem, memory = problem or step.problem, max(memory, step.memory)
            tokens = 1 if config.retrieval.method == "none" else PASSAGE_TOKENS
            step = plan_step(config, replace(shape, passage_length=tokens), machine)
            if is_here and known.seconds is not None:
                costs.append(known)
                sources.add("measured")
            else:
                costs.append(estimate_cost(config, shape, step, machine, known.forwards))
                sources.add("estimated" if machine else "-")
    except UserError as error:
        return CellPlan(problem=str(error))
    seconds, joules = (_add([cost[n] for cost in costs]) for n in (0, 2))
    return CellPlan(
        count, seconds and count * seconds, memory or None, joules and count * joules,
        " and ".join(sorted(sources)), problem,
    )  # fmt: skip


@cache
def open_planned_words(words: tuple[str, ...]) -> tuple[dict[str, Config], int, str]:
    """The settings that words for evaluate ask for, their questions, and what is not here yet.

    Questions that are not here count as they were published. Raises `UserError` for what cannot be.
    """
    parser = CommandParser("", add_help=False)
    for flag in ("--dataset", "--split", "--corpus"):
        parser.add_argument(flag)
    options, given = parser.parse_known_args(words)
    dataset, corpus, missing = options.dataset, options.corpus, ""
    searched = corpus or any(word.startswith(("retrieval.corpus=", "retrieval.url=")) for word in given)
    split = options.split or ("search_r1" if searched else "sardi")
    if corpus:
        given += ["--corpus", PLANNED_CORPUS if corpus in CORPORA else corpus]
    try:
        if corpus in CORPORA:
            find_dataset(corpus, split)
        given += [f"questions={find_dataset(dataset, split)}"] if dataset else []
    except ConfigError as error:
        missing = str(error)
    line = parse_answer_command_line("", given, EVALUATE_READS, options=EVALUATE_OPTIONS)
    wanted = plan_from_command_line(line)
    settings = {name: fill_in_shipped_files(config, []) for name, config in wanted.settings.items()}
    config = wanted.config
    if dataset and config.questions is None:
        published = list_dataset_files(dataset, split)[0].rows or 0
        most = [published, *([FIRST_QUESTIONS] if split == "flashrag_1000" else [])]
        most += [QUICK_QUESTION_LIMIT if config.quick else config.limit or published]
        return settings, min(most), missing
    return settings, len(read_scored_questions(wanted)), missing


@cache
def read_planned_shape(path: str, block_size: int | None) -> DenoiserConfig:
    """The architecture of a folder or a well-known checkpoint; nothing is fetched. Raises `UserError`."""
    if (known := read_known_config(path)) is not None:
        return known
    if not expand_path(path, ConfigError).exists():
        raise ConfigError(f"nothing is known of the model '{path}' here: `hf download {path}` brings it")
    return open_checkpoint(path, block_size).config


_STEPS: dict[str, Choice] = {}  # by what they depend on: a simulation each


def plan_step(config: Config, shape: DenoiserConfig, machine: GpuSpec | None) -> Choice:
    """A step of a full batch on one device; of a machine that is not known, memory alone.

    Raises `ConfigError` for settings that the model cannot be decoded with.
    """
    if shape.adapter is not None:
        raise ConfigError("no plan is made of a model that runs on the class of another library")
    if machine is None:
        free = measure_free_bytes(torch.device("cpu")) / (1 - RESERVED_MEMORY_FRACTION)
        machine = GpuSpec(
            "this machine", {torch.float32: math.inf}, free, math.inf, math.inf, 0.0, None, ""
        )
    dtype = choose_planned_dtype(config.model.dtype, machine)
    if dtype not in machine.flops:
        raise ConfigError(f"{machine.name} does not compute in {dtype}")
    decode = replace(config.decode, query_policy="question")  # the others run the same steps
    key = repr((config.model, shape, decode, config.retrieval.top_k, config.engine, machine.name))
    if key not in _STEPS:
        _STEPS[key] = compare_decoding(replace(config, plan=Config().plan), shape, dtype, machine)[0]
    resolve_settings(config.decode, shape)
    return _STEPS[key]


def estimate_cost(
    config: Config, shape: DenoiserConfig, step: Choice, machine: GpuSpec | None, forwards: float | None
) -> Cost:
    """What a question takes at the peaks of a machine; forwards: as measured, None: the most."""
    if machine is None or step.seconds is None:
        return Cost(None, forwards, None)
    decode = resolve_settings(config.decode, shape)
    assert decode.max_new_tokens is not None
    if forwards is None:
        forwards = decode.max_new_tokens
    seconds = forwards * step.step_seconds / decode.batch_size
    return Cost(seconds, forwards, seconds * machine.watts)


def _add(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return math.fsum(known) if len(known) == len(values) else None


def _average(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return fmean(known) if known else None


def _format_plan(plan: CellPlan) -> list[str]:
    count = "-" if plan.questions is None else f"{plan.questions:,}"
    time = "-" if plan.seconds is None else format_duration(plan.seconds)
    memory = "-" if plan.memory is None else format_bytes(plan.memory)
    energy = "-" if plan.joules is None else f"{plan.joules / 3.6e6:.3g} kWh"
    return [count, time, memory, energy, plan.source]
