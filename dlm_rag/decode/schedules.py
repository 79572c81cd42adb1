"""Three orders of the same step: denoise and commit, ask, receive evidence, close the step.

Each takes a step with one group of rows and returns those whose step is over.
"""

from collections.abc import Callable

from dlm_rag.decode.row import Group, Row
from dlm_rag.decode.steps import Steps

Schedule = Callable[[Steps, Group], list[Row]]


def lockstep(steps: Steps, group: Group) -> list[Row]:
    """All rows, one thing after another."""
    steps.denoise(group.ready)
    steps.receive(steps.ask(group.live))
    return steps.end_step(group.rows)


def pipeline(steps: Steps, group: Group) -> list[Row]:
    """The search is under way while the other group denoises: the same tokens."""
    steps.receive(group.search)
    closed = steps.end_step(group.begun)
    steps.denoise(group.ready)
    group.search = steps.ask(group.live, aside=True)
    return closed


def stale(steps: Steps, group: Group) -> list[Row]:
    """The search is under way while the same rows denoise: their evidence is one step late."""
    ready, begun = group.ready, group.begun
    steps.denoise(ready)
    steps.receive(group.search)
    asking = [row for row in group.live if row not in begun or (row in ready and not row.ended)]
    group.search = steps.ask(asking, aside=True)
    return steps.end_step(begun)


SCHEDULES: dict[str, Schedule] = {"none": lockstep, "pipeline": pipeline, "stale": stale}
