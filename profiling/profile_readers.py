"""Profiler reports read into one form: ranges that nest, GPU work by the range that launched it, waits.

Read are Nsight Systems' sqlite exports (of versions 2022 to 2025: the tables NVTX_EVENTS, StringIds and the
CUPTI_ACTIVITY_KIND_ ones that are there) and Chrome traces of torch.profiler. All times are nanoseconds.
"""

import gzip
import json
import re
import shutil
import sqlite3
import subprocess
import zlib
from collections.abc import Iterable, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dlm_rag.errors import ConfigError
from dlm_rag.nvtx_ranges import NVTX_DOMAIN, STAGES

Times = NDArray[np.int64]
PUSH_POP, MARK, DOMAIN_CREATE = 59, 34, 75  # NVTX event types of Nsight
STEP_RANGE_PATTERN = re.compile(r"step (\d+) rows (\d+)")
QUESTION_MARK_PREFIX = "question "
# Calls in which the host waits for the device.
HOST_WAIT_CALLS = re.compile(r"Synchronize|(cudaMemcpy|cuMemcpy|cudaFree)(?!.*Async)")
GPU_TABLES = {"KERNEL": "", "MEMCPY": "memcpy", "MEMSET": "memset", "GRAPH_TRACE": "CUDA graph"}
PARSE_ERRORS = (
    ValueError, TypeError, KeyError, AttributeError, OverflowError, RecursionError, EOFError, OSError,
    zlib.error, sqlite3.DatabaseError,
)  # fmt: skip
# Ids name process and thread; the part above the lowest 24 bits is the process.
NVTX_QUERY = f"""
    SELECT start, end, eventType, coalesce(text, value, ''), globalTid
    FROM NVTX_EVENTS LEFT JOIN StringIds ON id = textId
    WHERE eventType IN ({PUSH_POP}, {MARK}) AND start IS NOT NULL AND (globalTid >> 24, domainId) IN (
        SELECT globalTid >> 24, domainId FROM NVTX_EVENTS LEFT JOIN StringIds ON id = textId
        WHERE eventType = {DOMAIN_CREATE} AND coalesce(text, value) = '{NVTX_DOMAIN}')
"""
GPU_QUERY = """
    SELECT start, end, {name}, globalPid >> 24, coalesce(correlationId, -1) FROM {table} {join}
    WHERE end > start AND globalPid IS NOT NULL
"""
CALL_QUERY = """
    SELECT start, end, coalesce(value, ''), globalTid, correlationId
    FROM {table} LEFT JOIN StringIds ON id = nameId
    WHERE end IS NOT NULL AND globalTid IS NOT NULL AND correlationId IS NOT NULL
"""


@dataclass
class Spans:
    """Intervals with names, in arrays of one length; `owner` is the innermost range around, or -1."""

    start: Times
    end: Times
    name: Times
    owner: Times


@dataclass
class ProfileSession:
    """What a report says about this package.

    Ranges are in the order of their threads, then of their starts, a range before those inside it.
    """

    source: str
    names: list[str]
    start: Times
    end: Times
    name: Times
    thread: Times
    parent: Times  # index of the range around, or -1
    main: int  # the thread of the steps
    gpu: Spans
    waits: Spans
    questions: int  # finished ones, those of validations not counted
    others: int  # processes with ranges of ours that were left out: only the one with most is read

    @property
    def duration(self) -> Times:
        return self.end - self.start


@dataclass
class EventBuffer:
    """Events as they are read, before they are put in order."""

    names: dict[str, int] = field(default_factory=dict)
    ranges: list[tuple[int, int, int, int]] = field(default_factory=list)  # start, end, name, thread
    gpu: list[tuple[int, int, int, int, int]] = field(default_factory=list)  # ..., process, correlation
    waits: list[tuple[int, int, int, int]] = field(default_factory=list)  # start, end, name, thread
    questions: list[tuple[int, int]] = field(default_factory=list)  # time, thread
    # (process, correlation) of a call -> when and on which thread
    launches: dict[tuple[int, int], tuple[int, int]] = field(default_factory=dict)

    def intern_name(self, text: str) -> int:
        return self.names.setdefault(text, len(self.names))

    def build_session(self, source: str) -> ProfileSession:
        """The events in order, nested, with GPU work and waits given to their ranges."""
        if not self.ranges:
            raise ConfigError(
                f"{source} has no ranges of {NVTX_DOMAIN}: profile `sample.py` or `train.py` with NVTX "
                "traced (nvtx 0.2.10 where nsys is older than 2024)"
            )
        names = list(self.names)
        ranges = make_columns(self.ranges, 4)
        process = most_common(ranges[3] >> 24)
        others = len(np.unique(ranges[3] >> 24)) - 1
        ranges = ranges[:, ranges[3] >> 24 == process]
        start, end, name, thread = ranges[:, np.lexsort((-ranges[1], ranges[0], ranges[3]))]
        if start.min() == end.max():
            raise ConfigError(f"{source} is a session without length")
        parent = find_parent_ranges(start, end, thread)
        steps = np.array([STEP_RANGE_PATTERN.fullmatch(text) is not None for text in names])[name]
        main = most_common(thread[steps] if steps.any() else thread)
        ours = np.unique(thread)

        def owner(times: Times, threads: Times) -> Times:
            # Threads that torch starts, as that of backward, have no ranges: they work for the steps.
            known = np.isin(threads, ours) | (threads == -1)
            return find_innermost_ranges(times, np.where(known, threads, main), start, end, thread, parent)

        work = [event for event in self.gpu if event[3] == process]
        launched = make_columns([self.launches.get(event[3:], (event[0], -1)) for event in work], 2)
        gpu, waits = make_columns(work, 5), make_columns(self.waits, 4)
        waits = waits[:, waits[3] >> 24 == process]
        marks = make_columns(self.questions, 2)
        asked = owner(*marks[:, marks[1] >> 24 == process])
        validations = np.flatnonzero(name == self.names.get("evaluate", -1))
        return ProfileSession(
            source, names, start, end, name, thread, parent, main,
            Spans(gpu[0], gpu[1], gpu[2], owner(*launched)),
            Spans(waits[0], waits[1], waits[2], owner(waits[0], waits[3])),
            int((~is_nested_in(asked, validations, parent)).sum()), others,
        )  # fmt: skip


def make_columns(rows: Sequence[tuple[int, ...]], width: int) -> Times:
    """The fields of events, (width, events)."""
    return np.array(rows, dtype=np.int64).reshape(-1, width).T


def most_common(values: Times) -> int:
    found, counts = np.unique(values, return_counts=True)
    return int(found[counts.argmax()])


def is_nested_in(ranges: Times, around: Times, parent: Times) -> NDArray[np.bool_]:
    """For each of `ranges` (-1: none) whether it is one of `around` or lies in one, at any depth."""
    found = np.zeros(len(ranges), dtype=bool)
    while (ranges >= 0).any():
        found |= (ranges >= 0) & np.isin(ranges, around)
        ranges = np.where(ranges >= 0, parent[ranges], -1)
    return found


def find_parent_ranges(start: Times, end: Times, thread: Times) -> Times:
    """The range around each range, or -1; ranges come by thread and start, the longer one first."""
    parent, stack, last = np.full(len(start), -1, dtype=np.int64), list[int](), None
    starts, ends, threads = start.tolist(), end.tolist(), thread.tolist()
    for number, (at, of) in enumerate(zip(starts, threads, strict=True)):
        if of != last:
            stack, last = [], of
        while stack and ends[stack[-1]] <= at:
            stack.pop()
        if stack:
            parent[number] = stack[-1]
        stack.append(number)
    return parent


def find_innermost_ranges(
    times: Times, threads: Times, start: Times, end: Times, thread: Times, parent: Times
) -> Times:
    """For events at `times` on `threads` the innermost range that is open there, or -1."""
    owner = np.full(len(times), -1, dtype=np.int64)
    for of in np.unique(threads):
        first, last = np.searchsorted(thread, (of, of + 1))
        chosen = np.flatnonzero(threads == of)
        found = first + np.searchsorted(start[first:last], times[chosen], side="right") - 1
        found[found < first] = -1
        while (closed := (found >= 0) & (end[found] <= times[chosen])).any():
            found[closed] = parent[found[closed]]
        owner[chosen] = found
    return owner


def read_profile_session(path: Path) -> ProfileSession:
    """Reads a report; raises `ConfigError` for what is none, is empty, or breaks off."""
    if not path.is_file():
        raise ConfigError(f"the report '{path}' was not found")
    if not path.stat().st_size:
        raise ConfigError(f"{path} is empty")
    if path.suffix in (".nsys-rep", ".qdstrm"):
        path = export_sqlite(import_qdstrm(path))
    trace = path.name.endswith((".json", ".json.gz"))
    try:
        events = read_chrome_trace(path) if trace else read_nsys_sqlite(path)
        return events.build_session(str(path))
    except PARSE_ERRORS as error:
        kind = "trace of torch.profiler" if trace else "sqlite export of nsys"
        raise ConfigError(f"{path} is no whole {kind}: {error}") from None


def read_nsys_sqlite(path: Path) -> EventBuffer:
    """The events of an sqlite export of Nsight Systems."""
    rows = EventBuffer()
    with closing(sqlite3.connect(f"{path.resolve().as_uri()}?mode=ro", uri=True)) as database:
        tables = {name for (name,) in database.execute("SELECT name FROM sqlite_master")}
        if "NVTX_EVENTS" not in tables:
            raise ConfigError(f"{path} has no NVTX events: trace with --trace=nvtx")
        if "StringIds" not in tables:
            database.execute("CREATE TEMP TABLE StringIds (id, value)")
        for start, end, kind, text, thread in database.execute(NVTX_QUERY):
            if kind == MARK and text.startswith(QUESTION_MARK_PREFIX):
                rows.questions.append((start, thread))
            elif end is not None and is_stage_range(text):  # without an end it was still open
                rows.ranges.append((start, end, rows.intern_name(text), thread))
        for kind, called in GPU_TABLES.items():
            if (table := f"CUPTI_ACTIVITY_KIND_{kind}") in tables:
                join = "" if called else "LEFT JOIN StringIds ON id = shortName"
                query = GPU_QUERY.format(table=table, join=join, name=f"'{called}'" if called else "value")
                for start, end, name, *launch in database.execute(query):
                    rows.gpu.append((start, end, rows.intern_name(name or ""), *launch))
        launched = {event[3:] for event in rows.gpu}
        for kind in ("RUNTIME", "DRIVER"):
            if (table := f"CUPTI_ACTIVITY_KIND_{kind}") in tables:
                for start, end, name, thread, correlation in database.execute(
                    CALL_QUERY.format(table=table)
                ):
                    if (thread >> 24, correlation) in launched:
                        rows.launches.setdefault((thread >> 24, correlation), (start, thread))
                    if HOST_WAIT_CALLS.search(name):
                        rows.waits.append((start, end, rows.intern_name(name), thread))
    return rows


def is_stage_range(name: str) -> bool:
    """Whether a range is of a stage or a step, not `capture_window` or somebody else's."""
    return name in STAGES or STEP_RANGE_PATTERN.fullmatch(name) is not None


def read_chrome_trace(path: Path) -> EventBuffer:
    """The events of a Chrome trace of torch.profiler, whose ranges are `record_function`s of our names."""
    raw = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
    rows, threads = EventBuffer(), dict[Any, int]()
    events: Iterable[dict[str, Any]] = json.loads(raw, object_hook=_drop_unused_event)["traceEvents"]
    for event in filter(None, events):
        name, category = event["name"], event.get("cat", "")
        start = round(1000 * event["ts"])
        end = start + round(1000 * event.get("dur", 0))
        thread = threads.setdefault((event["pid"], event["tid"]), len(threads))
        correlation = event.get("args", {}).get("correlation", -1)
        if category in ("user_annotation", "cpu_op"):
            if is_stage_range(name):
                rows.ranges.append((start, end, rows.intern_name(name), thread))
            else:
                rows.questions.append((start, thread))
        elif category in ("kernel", "gpu_memcpy", "gpu_memset"):
            rows.gpu.append((start, end, rows.intern_name(name), 0, correlation))
        elif category in ("cuda_runtime", "cuda_driver"):
            if correlation >= 0:
                rows.launches.setdefault((0, correlation), (start, thread))
            if HOST_WAIT_CALLS.search(name):
                rows.waits.append((start, end, rows.intern_name(name), thread))
    return rows


def _drop_unused_event(found: dict[str, Any]) -> dict[str, Any] | None:
    """Drops events that are not read while the file is still being parsed: they are most of it."""
    if "ph" not in found:
        return found
    name, ours = found.get("name", ""), found.get("cat", "") not in ("user_annotation", "cpu_op")
    ours = ours or is_stage_range(name) or name.startswith(QUESTION_MARK_PREFIX)
    return found if ours and found["ph"] == "X" else None


NSYS_MISSING_HINT = (
    "nsys is not installed: take it from developer.nvidia.com/nsight-systems or Debian's non-free "
    "nsight-systems; `nsys.py --with torch` works without it, and attribute.py reads what "
    "`nsys export --type=sqlite` made elsewhere"
)


def find_nsys() -> str:
    """The nsys on the PATH; raises `ConfigError` with the remedy."""
    found = shutil.which("nsys")
    if found is None:
        raise ConfigError(NSYS_MISSING_HINT)
    return found


def import_qdstrm(raw: Path) -> Path:
    """The .nsys-rep of a .qdstrm, beside it; anything else is returned as it is.

    Debian's nsys 2022 does not find its own importer, which lies beside the host's libraries. Raises
    `ConfigError` where there is none or it fails.
    """
    if raw.suffix != ".qdstrm":
        return raw
    report = raw.with_suffix(".nsys-rep")
    places = [Path(find_nsys()).resolve().parent.parent, Path("/usr/lib/nsight-systems")]
    importers = [found for place in places for found in place.glob("host-linux-*/QdstrmImporter")]
    if not importers:
        raise ConfigError(f"nsys could not import {raw}, and its QdstrmImporter was not found")
    report.unlink(missing_ok=True)
    subprocess.run([str(importers[0]), "-i", str(raw), "-o", str(report)], check=False, capture_output=True)
    if not report.is_file():
        raise ConfigError(f"{raw} is no whole recording of nsys: {importers[0].name} could not import it")
    return report


def export_sqlite(report: Path) -> Path:
    """The report as sqlite, beside it; raises `ConfigError` where nsys cannot read it."""
    target, part = report.with_suffix(".sqlite"), report.with_suffix(".part.sqlite")
    if target.is_file() and target.stat().st_mtime >= report.stat().st_mtime:
        return target
    line = ["export", "--type=sqlite", "--force-overwrite=true", f"--output={part}", str(report)]
    done = subprocess.run([find_nsys(), *line], capture_output=True, text=True, check=False)
    if done.returncode or not part.is_file() or not part.stat().st_size:
        part.unlink(missing_ok=True)
        says = (done.stderr or done.stdout).strip().splitlines()
        raise ConfigError(f"nsys cannot export {report}: {says[-1] if says else 'it says nothing'}")
    part.rename(target)
    return target
