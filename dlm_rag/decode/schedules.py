"""Three orders of the same step: denoise and commit, ask, receive evidence, close the step.

Each takes a step with one group of rows and returns those whose step is over.
"""

from collections.abc import Callable
from typing import TYPE_CHECKING

from dlm_rag.decode.row import Group, Row

if TYPE_CHECKING:
    from dlm_rag.decode.engine import Engine

Schedule = Callable[["Engine", Group], list[Row]]


def lockstep(engine: "Engine", group: Group) -> list[Row]:
    """All rows, one thing after another."""
    engine.denoise(group.ready)
    engine.receive(engine.ask(group.live))
    return engine.end_step(group.rows)


def pipeline(engine: "Engine", group: Group) -> list[Row]:
    """The search is under way while the other group denoises: the same tokens."""
    engine.receive(group.search)
    closed = engine.end_step(group.begun)
    engine.denoise(group.ready)
    group.search = engine.ask(group.live, aside=True)
    return closed


def stale(engine: "Engine", group: Group) -> list[Row]:
    """The search is under way while the same rows denoise: their evidence is one step late."""
    ready, begun = group.ready, group.begun
    engine.denoise(ready)
    engine.receive(group.search)
    asking = [row for row in group.live if row not in begun or (row in ready and not row.over)]
    group.search = engine.ask(asking, aside=True)
    return engine.end_step(begun)


SCHEDULES: dict[str, Schedule] = {"none": lockstep, "pipeline": pipeline, "stale": stale}
