"""A profiling session taken apart by stage: what attribute.py shows.

`nsys stats` has no self time by stage, no steps, no questions and nothing of torch's traces (docs/log.md).
"""

from collections import Counter
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from profile_readers import STEP_RANGE_PATTERN, ProfileSession, Spans, Times

NANOSECONDS_PER_SECOND = 1e9
OUTSIDE_STAGES = "outside of all stages"


@dataclass(frozen=True)
class StageTime:
    """One stage; times in seconds, on the thread of the steps unless said otherwise."""

    stage: str
    calls: int
    wall: float
    self_time: float
    share: float  # of the session, by self time
    beside: float  # wall time on other threads
    gpu_busy: float  # while work that the stage launched was running, on any stream
    gpu_idle: float  # while the stage was open and nothing ran
    host_waits: float
    kernels: dict[str, float]  # the heaviest that it launched, by seconds


@dataclass(frozen=True)
class StepTimes:
    """The steps: how many, and seconds of the first, the median, the 95th percentile, the last."""

    count: int
    rows: float  # a step, on average
    first: float
    median: float
    p95: float
    last: float


@dataclass(frozen=True)
class Attribution:
    """A session, attributed; seconds."""

    source: str
    wall: float
    stages: list[StageTime]  # the longest self time first; `OUTSIDE_STAGES` is the last
    steps: StepTimes | None
    questions: int
    overlap: float  # of retrieval with denoising
    gpu_busy: float
    others: int  # processes of the session that are left out
    watts: float | None = None  # mean of the run; no sensor sees a stage, so joules go by time share

    @property
    def counts_by_unit(self) -> dict[str, int]:
        """What time can be given for: how many questions, steps, sessions."""
        counts = {"question": self.questions, "step": self.steps.count if self.steps else 0, "session": 1}
        return {unit: count for unit, count in counts.items() if count}


Intervals = tuple[Times, Times]  # starts and ends, in order, apart from one another


def stage_name_of_range(name: str) -> str:
    """`step 12 rows 8` counts as `step`."""
    return "step" if STEP_RANGE_PATTERN.fullmatch(name) else name


def merge_intervals(start: Times, end: Times) -> Intervals:
    """Intervals merged where they touch, in order."""
    if not len(start):
        return start, end
    order = np.argsort(start, kind="stable")
    start, end = start[order], np.maximum.accumulate(end[order])
    first = np.concatenate(([True], start[1:] > end[:-1]))
    last = np.concatenate((first[1:], [True]))
    return start[first], end[last]


def total_duration(intervals: Intervals) -> int:
    return int((intervals[1] - intervals[0]).sum())


def overlap_duration(a: Intervals, b: Intervals) -> int:
    """Nanoseconds that two sets of merged intervals share."""

    def covered(at: Times) -> Times:
        """How much of `b` lies before each time."""
        lengths = np.concatenate(([0], np.cumsum(b[1] - b[0])))
        number = np.searchsorted(b[0], at, side="right")
        inside = np.where(number > 0, np.minimum(at, b[1][number - 1]) - b[0][number - 1], 0)
        return np.where(number > 0, lengths[number - 1] + inside, 0)

    return int((covered(a[1]) - covered(a[0])).sum()) if len(a[0]) and len(b[0]) else 0


def attribute_session(session: ProfileSession, heaviest: int = 3) -> Attribution:
    """Gives the time of a session to its stages."""
    stages = [stage_name_of_range(name) for name in session.names]
    stage = np.array(stages)[session.name]
    steps = find_outer_steps(session, stage)
    main = session.thread == session.main
    begin, finish = int(session.start[main].min()), int(session.end[main].max())
    whole = np.array([begin]), np.array([finish])
    inner = session.duration.copy()
    nested = session.parent >= 0
    np.subtract.at(inner, session.parent[nested], session.duration[nested])
    gpu = clip_spans(session.gpu, begin, finish)
    waits = clip_spans(session.waits, begin, finish)
    running = merge_intervals(gpu.start, gpu.end)
    launchers, waiters = (group_events_by_stage(session, spans.owner, stage) for spans in (gpu, waits))

    def time_of(name: str, calls: int, opened: Intervals, self_time: int, beside: int) -> StageTime:
        launched, waited = (found.get(name, np.zeros(0, dtype=np.int64)) for found in (launchers, waiters))
        kernels = Counter[str]()
        lengths = (gpu.end - gpu.start)[launched].tolist()
        for kernel, took in zip(gpu.name[launched].tolist(), lengths, strict=True):
            kernels[session.names[kernel]] += took
        return StageTime(
            stage=name,
            calls=calls,
            wall=total_duration(opened) / NANOSECONDS_PER_SECOND,
            self_time=self_time / NANOSECONDS_PER_SECOND,
            share=self_time / (finish - begin),
            beside=beside / NANOSECONDS_PER_SECOND,
            gpu_busy=total_duration(merge_intervals(gpu.start[launched], gpu.end[launched]))
            / NANOSECONDS_PER_SECOND,
            gpu_idle=(total_duration(opened) - overlap_duration(opened, running)) / NANOSECONDS_PER_SECOND
            if len(running[0])
            else 0.0,
            host_waits=int((waits.end - waits.start)[waited].sum()) / NANOSECONDS_PER_SECOND,
            kernels={k: v / NANOSECONDS_PER_SECOND for k, v in kernels.most_common(heaviest)},
        )

    found = []
    for name in dict.fromkeys(stages):
        ours = stage == name
        if ours.any():
            opened, beside = (
                merge_intervals(session.start[ours & t], session.end[ours & t]) for t in (main, ~main)
            )
            self_time = int(inner[ours & main].sum())
            found.append(time_of(name, int(ours.sum()), opened, self_time, total_duration(beside)))
    found.sort(key=lambda part: -part.self_time)
    covered = merge_intervals(session.start[main], session.end[main])
    gaps = subtract_intervals(whole, covered)
    found.append(time_of(OUTSIDE_STAGES, 0, gaps, total_duration(gaps), 0))
    lengths = session.duration[steps] / NANOSECONDS_PER_SECOND
    rows = [int(STEP_RANGE_PATTERN.fullmatch(session.names[n])[2]) for n in session.name[steps]]

    def of(*names: str) -> Intervals:
        chosen = np.isin(stage, names)
        return merge_intervals(session.start[chosen], session.end[chosen])

    return Attribution(
        source=session.source,
        wall=(finish - begin) / NANOSECONDS_PER_SECOND,
        stages=found,
        steps=StepTimes(
            len(lengths), float(np.mean(rows)), lengths[0], float(np.median(lengths)),
            float(np.percentile(lengths, 95)), lengths[-1],
        ) if len(lengths) else None,
        questions=session.questions,
        overlap=overlap_duration(of("retrieve"), of("encode_evidence", "denoise")) / NANOSECONDS_PER_SECOND,
        gpu_busy=total_duration(running) / NANOSECONDS_PER_SECOND,
        others=session.others,
    )  # fmt: skip


def find_outer_steps(session: ProfileSession, stage: NDArray[np.str_]) -> NDArray[np.bool_]:
    """Which ranges are steps of the program's own loop, not of a validation inside it."""
    return (stage == "step") & (session.parent < 0) & (session.thread == session.main)


def clip_spans(spans: Spans, begin: int, finish: int) -> Spans:
    """What lies between two times, cut off there."""
    kept = (spans.end > begin) & (spans.start < finish)
    start, end = (np.clip(times[kept], begin, finish) for times in (spans.start, spans.end))
    return Spans(start, end, spans.name[kept], spans.owner[kept])


def subtract_intervals(whole: Intervals, covered: Intervals) -> Intervals:
    """One interval less the merged ones inside it."""
    start = np.concatenate((whole[0], covered[1]))
    end = np.concatenate((covered[0], whole[1]))
    return start[end > start], end[end > start]


def group_events_by_stage(
    session: ProfileSession, owner: Times, stage: NDArray[np.str_]
) -> dict[str, Times]:
    """For every stage the numbers of the events whose range lies in it, at any depth."""
    found: dict[str, list[Times]] = {OUTSIDE_STAGES: [np.flatnonzero(owner < 0)]}
    events = np.flatnonzero(owner >= 0)
    owner = owner[events]
    while len(events):
        for name in np.unique(stage[owner]).tolist():
            found.setdefault(name, []).append(events[stage[owner] == name])
        owner = session.parent[owner]
        events, owner = events[owner >= 0], owner[owner >= 0]
    return {name: np.unique(np.concatenate(parts)) for name, parts in found.items()}


def compare_attributions(
    now: Attribution, before: Attribution
) -> tuple[str, list[tuple[str, float, float]]]:
    """A unit that both sessions have; stage, seconds of it before and now, what got slower first."""
    unit = next(unit for unit in now.counts_by_unit if unit in before.counts_by_unit)
    then, today = (
        {part.stage: part.self_time / a.counts_by_unit[unit] for part in a.stages} for a in (before, now)
    )
    found = [(name, then.get(name, 0.0), today.get(name, 0.0)) for name in dict.fromkeys((*today, *then))]
    return unit, sorted(found, key=lambda line: line[1] - line[2])
