"""Two orders of the same step: denoise and commit, ask, receive evidence, close the step.

Each takes a step with one group of rows and returns those whose step is over.
"""

from collections.abc import Callable

from dlm_rag.decode.row import Row, RowGroup
from dlm_rag.decode.steps import StepExecutor

OverlapSchedule = Callable[[StepExecutor, RowGroup], list[Row]]


def run_lockstep(steps: StepExecutor, group: RowGroup) -> list[Row]:
    """All rows, one thing after another."""
    steps.denoise(group.ready_rows)
    steps.apply_search(steps.start_search(group.active_rows))
    return steps.end_step(group.rows)


def run_pipelined(steps: StepExecutor, group: RowGroup) -> list[Row]:
    """The search is under way while the other group denoises: the same tokens."""
    steps.apply_search(group.search)
    closed = steps.end_step(group.started_rows)
    steps.denoise(group.ready_rows)
    group.search = steps.start_search(group.active_rows, aside=True)
    return closed


OVERLAP_SCHEDULES: dict[str, OverlapSchedule] = {
    "none": run_lockstep,
    "pipeline": run_pipelined,
}
