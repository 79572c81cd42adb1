"""Profiler reports read into one form: ranges that nest, GPU work by the range that launched it, waits.

Read are Nsight Systems' sqlite exports (of versions 2022 to 2025: the tables NVTX_EVENTS, StringIds and the
CUPTI_ACTIVITY_KIND_ ones that are there) and Chrome traces of torch.profiler. All times are nanoseconds.
Events are kept as columns of integers.
"""

import gzip
import json
import re
import sqlite3
import zlib
from array import array
from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from nsys_cli import export_sqlite, import_qdstrm
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
)  # fmt: skip


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


Column = array  # "q": of 64-bit integers: the fields of all events of a kind, event after event


@dataclass
class EventBuffer:
    """Events as they are read, before they are put in order; id: correlation of a launch."""

    names: dict[str, int] = field(default_factory=dict)
    ranges: "Column[int]" = field(default_factory=partial(array, "q"))  # start, end, name, thread
    launches: "Column[int]" = field(default_factory=partial(array, "q"))  # process, id, start, thread
    gpu: "Column[int]" = field(default_factory=partial(array, "q"))  # start, end, name, process, id
    waits: "Column[int]" = field(default_factory=partial(array, "q"))  # start, end, name, thread
    questions: "Column[int]" = field(default_factory=partial(array, "q"))  # time, thread

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
        start, end, name, thread = unpack_columns(self.ranges, 4)
        processes, counts = np.unique(extract_process_id(thread), return_counts=True)
        process = processes[counts.argmax()]
        order = np.lexsort((-end, start, thread))
        order = order[extract_process_id(thread[order]) == process]
        start, end, name, thread = start[order], end[order], name[order], thread[order]
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

        work = unpack_columns(self.gpu, 5)
        begin, finish, kernel, of, correlation = (values[work[3] == process] for values in work)
        launched, by = match_launches(of, correlation, unpack_columns(self.launches, 4), begin)
        asked, asking = unpack_columns(self.questions, 2)
        here = extract_process_id(asking) == process
        asked = owner(asked[here], asking[here])
        waits = unpack_columns(self.waits, 4)
        wait = [values[extract_process_id(waits[3]) == process] for values in waits]
        validations = np.flatnonzero(name == self.names.get("evaluate", -1))
        return ProfileSession(
            source, names, start, end, name, thread, parent, main,
            Spans(begin, finish, kernel, owner(launched, by)),
            Spans(wait[0], wait[1], wait[2], owner(wait[0], wait[3])),
            int((~is_nested_in(asked, validations, parent)).sum()), len(processes) - 1,
        )  # fmt: skip


def unpack_columns(rows: "Column[int]", width: int) -> Times:
    """The fields of events, (width, events)."""
    return np.array(rows, dtype=np.int64).reshape(-1, width).T


def most_common(values: Times) -> int:
    found, counts = np.unique(values, return_counts=True)
    return int(found[counts.argmax()])


def match_launches(
    process: Times, correlation: Times, launches: Times, times: Times
) -> tuple[Times, Times]:
    """When and on which thread each piece of GPU work was launched; its own time and -1 where unknown."""
    if not launches.size:
        return times, np.full(len(times), -1, dtype=np.int64)
    known, place = np.unique(launches[0], return_inverse=True)
    keys = place.astype(np.int64) << 33 | launches[1]  # correlations have 32 bits
    order = np.argsort(keys, kind="stable")  # of calls with one correlation the first read counts
    home = np.minimum(np.searchsorted(known, process), len(known) - 1)
    wanted = home << 33 | correlation
    at = order[np.minimum(np.searchsorted(keys[order], wanted), len(keys) - 1)]
    found = (keys[at] == wanted) & (known[home] == process) & (correlation >= 0)
    return np.where(found, launches[2][at], times), np.where(found, launches[3][at], -1)


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
    if path.name.endswith((".json", ".json.gz")):
        return read_chrome_trace(path)
    return read_nsys_sqlite(path)


def read_nsys_sqlite(path: Path) -> ProfileSession:
    """An sqlite export of Nsight Systems."""
    rows = EventBuffer()
    try:
        with sqlite3.connect(f"{path.resolve().as_uri()}?mode=ro", uri=True) as database:
            tables = {name for (name,) in database.execute("SELECT name FROM sqlite_master")}
            if "NVTX_EVENTS" not in tables:
                raise ConfigError(f"{path} has no NVTX events: trace with --trace=nvtx")
            texts = (
                dict(database.execute("SELECT id, value FROM StringIds")) if "StringIds" in tables else {}
            )
            _read_nvtx(database, texts, rows)
            _read_cuda(database, tables, texts, rows)
    except (sqlite3.DatabaseError, *PARSE_ERRORS) as error:
        if isinstance(error, ConfigError):
            raise
        raise ConfigError(f"{path} is no whole sqlite export of nsys: {error}") from None
    return rows.build_session(str(path))


def _read_nvtx(database: sqlite3.Connection, texts: dict[int, str], rows: EventBuffer) -> None:
    domains = {
        (extract_process_id(tid), domain)
        for domain, text, text_id, tid in database.execute(
            "SELECT domainId, text, textId, globalTid FROM NVTX_EVENTS "
            "WHERE eventType = ? AND globalTid IS NOT NULL",
            (DOMAIN_CREATE,),
        )
        if (text or texts.get(text_id)) == NVTX_DOMAIN
    }
    found = database.execute(
        "SELECT start, end, eventType, text, textId, domainId, globalTid FROM NVTX_EVENTS "
        "WHERE eventType IN (?, ?) AND start IS NOT NULL AND globalTid IS NOT NULL",
        (PUSH_POP, MARK),
    )
    for start, end, kind, text, text_id, domain, tid in found:
        if (extract_process_id(tid), domain) not in domains:
            continue
        text = text or texts.get(text_id, "")
        if kind == MARK:
            if text.startswith(QUESTION_MARK_PREFIX):
                rows.questions.extend((start, tid))
        elif end is not None and is_stage_range(text):  # without an end it was open when the session ended
            rows.ranges.extend((start, end, rows.intern_name(text), tid))


def _read_cuda(
    database: sqlite3.Connection, tables: set[str], texts: dict[int, str], rows: EventBuffer
) -> None:
    launched = set[int]()
    for kind, called in GPU_TABLES.items():
        table = f"CUPTI_ACTIVITY_KIND_{kind}"
        if table not in tables:
            continue
        name_column = "shortName" if kind == "KERNEL" else "NULL"
        for start, end, process, correlation, name_id in database.execute(
            f"SELECT start, end, globalPid, correlationId, {name_column} FROM {table} "
            "WHERE end > start AND globalPid IS NOT NULL"
        ):
            name = rows.intern_name(texts.get(name_id, called))
            correlation = -1 if correlation is None else correlation
            rows.gpu.extend((start, end, name, extract_process_id(process), correlation))
            launched.add(correlation)
    waits = {number for number, text in texts.items() if HOST_WAIT_CALLS.search(text)}
    for table in ("CUPTI_ACTIVITY_KIND_RUNTIME", "CUPTI_ACTIVITY_KIND_DRIVER"):
        if table not in tables:
            continue
        for start, end, tid, correlation, name_id in database.execute(
            f"SELECT start, end, globalTid, correlationId, nameId FROM {table} "
            "WHERE end IS NOT NULL AND globalTid IS NOT NULL AND correlationId IS NOT NULL"
        ):
            if correlation in launched:
                rows.launches.extend((extract_process_id(tid), correlation, start, tid))
            if name_id in waits:
                rows.waits.extend((start, end, rows.intern_name(texts[name_id]), tid))


def is_stage_range(name: str) -> bool:
    """Whether a range is of a stage or a step, not `capture_window` or somebody else's."""
    return name in STAGES or STEP_RANGE_PATTERN.fullmatch(name) is not None


def extract_process_id(global_id: Any) -> Any:
    """The part of serialised thread or process ids (an int or an array) that names the process."""
    return global_id & ~0xFFFFFF


def read_chrome_trace(path: Path) -> ProfileSession:
    """A Chrome trace of torch.profiler, whose ranges are `record_function`s of our names."""
    try:
        raw = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
        return _read_events(json.loads(raw, object_hook=_drop_unused_event)["traceEvents"]).build_session(
            str(path)
        )
    except (zlib.error, *PARSE_ERRORS) as error:
        if isinstance(error, ConfigError):
            raise
        raise ConfigError(f"{path} is no whole trace of torch.profiler: {error}") from None


def _drop_unused_event(found: dict[str, Any]) -> dict[str, Any] | None:
    """Drops an event that `_read_events` would pass over while the file is still being read."""
    if "ph" not in found:
        return found
    category, name = found.get("cat", ""), found.get("name", "")
    if found["ph"] != "X":
        return None
    if category in ("user_annotation", "cpu_op") and not (
        is_stage_range(name) or name.startswith(QUESTION_MARK_PREFIX)
    ):
        return None
    return found


def _read_events(events: Iterable[dict[str, Any] | None]) -> EventBuffer:
    rows, threads = EventBuffer(), dict[Any, int]()
    for event in events:
        if event is None:
            continue
        name, category = event["name"], event.get("cat", "")
        start = round(1000 * event["ts"])
        end = start + round(1000 * event.get("dur", 0))
        thread = threads.setdefault((event["pid"], event["tid"]), len(threads))
        correlation = event.get("args", {}).get("correlation", -1)
        if category in ("user_annotation", "cpu_op"):
            if is_stage_range(name):
                rows.ranges.extend((start, end, rows.intern_name(name), thread))
            else:
                rows.questions.extend((start, thread))
        elif category in ("kernel", "gpu_memcpy", "gpu_memset"):
            rows.gpu.extend((start, end, rows.intern_name(name), 0, correlation))
        elif category in ("cuda_runtime", "cuda_driver"):
            rows.launches.extend((0, correlation, start, thread))
            if HOST_WAIT_CALLS.search(name):
                rows.waits.extend((start, end, rows.intern_name(name), thread))
    return rows
