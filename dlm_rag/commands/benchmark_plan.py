"""What the cells of a benchmark take, before anything loads: hours, memory, energy; and which cannot be."""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from rich.console import Console

from dlm_rag.baselines import is_model_url
from dlm_rag.commands.answer_job import parse_answer_command_line
from dlm_rag.commands.evaluate import (
    EVALUATE_OPTIONS,
    EVALUATE_READS,
    plan_from_command_line,
    read_scored_questions,
)
from dlm_rag.commands.prepare_decoder import fill_in_shipped_files
from dlm_rag.config import Config, load_config
from dlm_rag.decode.resolve_settings import resolve_settings
from dlm_rag.errors import ConfigError, UserError
from dlm_rag.evaluation.benchmark_tables import Cell
from dlm_rag.evaluation.tables import ResultTable, print_tables
from dlm_rag.model.checkpoint import open_checkpoint
from dlm_rag.progress import format_bytes, format_duration
from dlm_rag.training.planning.gpu_specs import GPU_SPECS, GpuSpec, choose_planned_dtype, find_gpu_spec
from dlm_rag.training.planning.known_checkpoints import read_known_config
from dlm_rag.training.planning.plan import plan_decode_step

ESTIMATE = (
    "At most: as many forwards as the settings allow, each of a full batch with passages of full length, "
    "at the peaks of {} (compute at {:.0%}) and full power; searches and indexes are not in it."
)


class CellPlan(NamedTuple):
    """What a cell takes: seconds of all questions, bytes at the peak; or why it cannot be run."""

    questions: int | None = None
    seconds: float | None = None
    memory: float | None = None
    problem: str = ""


def print_benchmark_plan(cells: Sequence[Cell], name: str | None, devices: int) -> None:
    """Prints the plan of every cell, and of all that are left; name: as `plan.machine`, None: this one."""
    if name is not None:
        load_config(None, [f"plan.machine={name}"])  # which refuses others
    own = find_gpu_spec(torch.device("cuda" if torch.cuda.is_available() else "cpu"))
    if (machine := GPU_SPECS[name] if name else own) is None:
        raise ConfigError(f"nothing is known of this machine: add --machine, of {', '.join(GPU_SPECS)}")
    rows, left = [], 0.0
    for cell in cells:
        plan, state = plan_cell(cell, machine), "done" if cell.is_done else "left"
        left += 0.0 if cell.is_done else plan.seconds or 0.0
        count = "-" if plan.questions is None else f"{plan.questions:,}"
        rows.append([cell.name, state, count, *_format(plan.seconds, plan.memory, machine), plan.problem])
    rows.append(["all that are left", "", "", *_format(left, None, machine), ""])
    headings = ["cell", "state", "questions", "time", "peak memory", "kWh", "what is wrong"]
    print_tables(Console(), [ResultTable(f"Plan, on {machine.name}", headings, rows)])
    if devices > 1:
        print(f"{format_duration(left / devices)} on {devices} devices")
    print(ESTIMATE.format(machine.name, Config().plan.mfu))


def plan_cell(cell: Cell, machine: GpuSpec) -> CellPlan:
    """Plans a cell; nothing is known of a model behind a server."""
    seconds, memory = 0.0, 0.0
    try:
        wanted = plan_from_command_line(
            parse_answer_command_line("", [*cell.words[:-2]], EVALUATE_READS, options=EVALUATE_OPTIONS)
        )
        count = len(read_scored_questions(wanted))
        for given in wanted.settings.values():
            config = fill_in_shipped_files(given, [])
            path = str(config.model.path)
            if is_model_url(path):
                return CellPlan(count)
            shape = read_known_config(path) or open_checkpoint(path, config.model.block_size).config
            step = plan_decode_step(
                config, shape, choose_planned_dtype(config.model.dtype, machine), machine
            )
            decode = resolve_settings(config.decode, shape)
            assert decode.max_new_tokens is not None
            seconds += count * decode.max_new_tokens * step.seconds / decode.batch_size
            memory = max(memory, step.memory)
    except UserError as error:
        return CellPlan(problem=str(error))
    full = memory > machine.usable_memory
    return CellPlan(count, seconds, memory, f"{format_bytes(machine.usable_memory)} are there" * full)


def _format(seconds: float | None, memory: float | None, machine: GpuSpec) -> list[str]:
    energy = "-" if seconds is None else f"{seconds * machine.watts / 3.6e6:.3g}"
    time = "-" if seconds is None else format_duration(seconds)
    return [time, "-" if memory is None else format_bytes(memory), energy]
