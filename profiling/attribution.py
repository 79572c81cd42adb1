"""A profiling session taken apart by stage: what attribute.py shows.

`nsys stats` has no self time by stage, no steps, no questions and nothing of torch's traces (docs/log.md).
"""

from collections import Counter
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray
from profile_readers import RANGE_NAMES, ProfileSession, Spans, Times

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
    kernels: dict[str, float]  # the heaviest that it launched, by seconds; on a CPU torch's operators
    layers: dict[int, float] = field(default_factory=dict)  # seconds of its layers, on the host


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


def attribute_session(session: ProfileSession, heaviest: int = 8) -> Attribution:
    """Gives the time of a session to its stages; the kernels of a stage are the heaviest ones."""
    main = session.thread == session.main
    begin, finish = int(session.start[main].min()), int(session.end[main].max())
    gpu, waits = session.gpu.clip(begin, finish), session.waits.clip(begin, finish)
    running = merge_intervals(gpu.start, gpu.end)
    self_times = session.end - session.start
    nested = session.parent >= 0
    np.subtract.at(self_times, session.parent[nested], (session.end - session.start)[nested])

    def find_inside(spans: Spans, stage: int | None) -> NDArray[np.bool_]:
        return spans.owner < 0 if stage is None else session.is_inside(spans.owner, stage)

    def opened(chosen: NDArray[np.bool_]) -> Intervals:
        return merge_intervals(session.start[chosen], session.end[chosen])

    def measure(name: str, stage: int | None, time: Intervals, self_time: int) -> StageTime:
        ours = session.stage == stage
        launched, waited = (find_inside(spans, stage) for spans in (gpu, waits))
        work = gpu if len(gpu.start) else session.operators
        kernels = sum_by_name(work, launched if work is gpu else find_inside(work, stage))
        layers = sum_by_name(session.layers, find_inside(session.layers, stage))
        wall = total_duration(time)
        return StageTime(
            stage=name,
            calls=int(ours.sum()),
            wall=wall / 1e9,
            self_time=self_time / 1e9,
            share=self_time / (finish - begin),
            beside=total_duration(opened(ours & ~main)) / 1e9,
            gpu_busy=total_duration(merge_intervals(gpu.start[launched], gpu.end[launched])) / 1e9,
            gpu_idle=(wall - overlap_duration(time, running)) / 1e9 if len(gpu.start) else 0.0,
            host_waits=int((waits.end - waits.start)[waited].sum()) / 1e9,
            kernels={session.names[name]: seconds for name, seconds in kernels.most_common(heaviest)},
            layers=dict(sorted(layers.items())),
        )

    found = []
    for stage in np.unique(session.stage).tolist():
        ours = (session.stage == stage) & main
        found.append(measure(RANGE_NAMES[stage], stage, opened(ours), int(self_times[ours].sum())))
    found.sort(key=lambda part: -part.self_time)
    starts, ends = opened(main)
    gaps = np.append(begin, ends), np.append(starts, finish)
    found.append(measure(OUTSIDE_STAGES, None, gaps, total_duration(gaps)))
    denoising = np.isin(session.stage, [RANGE_NAMES.index(name) for name in ("encode_evidence", "denoise")])
    retrieval = session.stage == RANGE_NAMES.index("retrieve")
    return Attribution(
        source=session.source,
        wall=(finish - begin) / 1e9,
        stages=found,
        steps=summarise_steps(session),
        questions=session.questions,
        overlap=overlap_duration(opened(retrieval), opened(denoising)) / 1e9,
        gpu_busy=total_duration(running) / 1e9,
        others=session.others,
    )


def sum_by_name(spans: Spans, chosen: NDArray[np.bool_]) -> Counter[int]:
    """Seconds of spans by their names."""
    found = Counter[int]()
    for name, length in zip(
        spans.name[chosen].tolist(), (spans.end - spans.start)[chosen].tolist(), strict=True
    ):
        found[name] += length / 1e9
    return found


def summarise_steps(session: ProfileSession) -> StepTimes | None:
    steps = find_outer_steps(session)
    seconds = (session.end - session.start)[steps] / 1e9
    if not len(seconds):
        return None
    middle, most = float(np.median(seconds)), float(np.percentile(seconds, 95))
    return StepTimes(len(seconds), float(session.rows[steps].mean()), seconds[0], middle, most, seconds[-1])


def find_outer_steps(session: ProfileSession) -> NDArray[np.bool_]:
    """Which ranges are steps of the program's own loop, not of a validation inside it."""
    return (session.stage == 0) & (session.parent < 0) & (session.thread == session.main)


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
