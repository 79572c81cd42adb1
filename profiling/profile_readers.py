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
from collections.abc import Iterable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from dlm_rag.errors import ConfigError
from dlm_rag.nvtx_ranges import NVTX_DOMAIN, STAGES

Times = NDArray[np.int64]
# Kind ("range", with marks; "gpu", "call", "op"), start, end, name, thread or process, correlation of a
# launch.
Event = tuple[str, int, int | None, str, int, int]
RANGE_NAMES = ("step", *STAGES)
PUSH_POP, MARK, DOMAIN_CREATE = 59, 34, 75  # NVTX event types of Nsight
STEP_RANGE_PATTERN = re.compile(r"step (\d+) rows (\d+)")
LAYER_RANGE_PATTERN = re.compile(r"layer (\d+)")
QUESTION_MARK_PREFIX = "question "
OPERATOR_PREFIX = "aten::"
KEPT_NAMES = (QUESTION_MARK_PREFIX, OPERATOR_PREFIX, "layer ")  # beginnings of names beside the stages
# Calls in which the host waits for the device.
HOST_WAIT_CALLS = re.compile(r"Synchronize|(cudaMemcpy|cuMemcpy|cudaFree)(?!.*Async)")
GPU_TABLES = {"KERNEL": "", "MEMCPY": "memcpy", "MEMSET": "memset", "GRAPH_TRACE": "CUDA graph"}
PARSE_ERRORS = (
    ValueError, TypeError, KeyError, AttributeError, OverflowError, RecursionError, EOFError, OSError,
    zlib.error, sqlite3.DatabaseError,
)  # fmt: skip
# Ids name process and thread; the part above the lowest 24 bits is the process.
NVTX_QUERY = f"""
    SELECT 'range', start, end, coalesce(text, value, ''), globalTid, -1
    FROM NVTX_EVENTS LEFT JOIN StringIds ON id = textId
    WHERE eventType IN ({PUSH_POP}, {MARK}) AND start IS NOT NULL AND (globalTid >> 24, domainId) IN (
        SELECT globalTid >> 24, domainId FROM NVTX_EVENTS LEFT JOIN StringIds ON id = textId
        WHERE eventType = {DOMAIN_CREATE} AND coalesce(text, value) = '{NVTX_DOMAIN}')
"""
GPU_QUERY = """
    SELECT 'gpu', start, end, {name}, globalPid, coalesce(correlationId, -1) FROM {table} {join}
    WHERE end > start AND globalPid IS NOT NULL
"""
CALL_QUERY = """
    SELECT 'call', start, end, coalesce(value, ''), globalTid, correlationId
    FROM {table} LEFT JOIN StringIds ON id = nameId
    WHERE end IS NOT NULL AND globalTid IS NOT NULL AND correlationId IS NOT NULL
"""


class Spans(NamedTuple):
    """GPU work, operators, layers or waits of the host; owner: the innermost range around (around the
    launch), or -1. name: a number of `ProfileSession.names`, or of a layer.
    """

    start: Times
    end: Times
    name: Times
    owner: Times

    def clip(self, begin: int, finish: int) -> "Spans":
        """What lies between two times, cut off there."""
        kept = (self.end > begin) & (self.start < finish)
        start, end = (np.clip(times[kept], begin, finish) for times in (self.start, self.end))
        return Spans(start, end, self.name[kept], self.owner[kept])


@dataclass
class ProfileSession:
    """What a report says about this package.

    Ranges are in the order of their threads, then of their starts, a range before those inside it.
    """

    source: str
    start: Times
    end: Times
    stage: Times  # a number of `RANGE_NAMES`
    thread: Times
    rows: Times  # of a step
    parent: Times  # index of the range around, or -1
    around: Times  # bits of the stages that the range lies in, its own among them
    main: int  # the thread of the steps
    names: list[str]  # of GPU work and operators
    gpu: Spans
    waits: Spans
    layers: Spans
    operators: Spans  # of torch, those that lie in no other
    questions: int = 0  # finished ones, those of validations not counted
    others: int = 0  # processes with ranges of ours that were left out: only the one with most is read

    def is_inside(self, owner: Times, stage: int) -> NDArray[np.bool_]:
        """For the owners of events (-1: none) whether a stage is around them, at any depth."""
        return (owner >= 0) & (self.around[owner] >> stage & 1 == 1)


def build_session(source: str, events: Iterable[Event]) -> ProfileSession:
    """The events in order, nested, with GPU work and waits given to their ranges."""
    ranges, questions, work, waiting, layers, operators = [], [], [], [], [], []
    names, launches = dict[str, int](), dict[tuple[int, int], tuple[int, int]]()
    for kind, at, until, name, thread, correlation in events:
        if kind == "gpu":
            work.append((at, until, names.setdefault(name or "", len(names)), thread >> 24, correlation))
        elif kind == "call":
            if correlation >= 0:
                launches.setdefault((thread >> 24, correlation), (at, thread))
            if HOST_WAIT_CALLS.search(name):
                waiting.append((at, until, 0, thread))
        elif kind == "op":
            operators.append((at, until, names.setdefault(name, len(names)), thread))
        elif until is not None and (layer := LAYER_RANGE_PATTERN.fullmatch(name)):
            layers.append((at, until, int(layer[1]), thread))
        elif name.startswith(QUESTION_MARK_PREFIX):
            questions.append((at, thread))
        elif until is not None and is_stage_range(name):  # without an end it was still open
            step = STEP_RANGE_PATTERN.fullmatch(name)
            stage, rows = (0, int(step[2])) if step else (RANGE_NAMES.index(name), 0)
            ranges.append((at, until, stage, thread, rows))
    if not ranges:
        raise ConfigError(
            f"{source} has no ranges of {NVTX_DOMAIN}: profile `sample.py` or `train.py` with NVTX "
            "traced (nvtx 0.2.10 where nsys is older than 2024)"
        )
    columns = make_columns(ranges, 5)
    process = most_common(columns[3] >> 24)
    others = len(np.unique(columns[3] >> 24)) - 1
    columns = columns[:, columns[3] >> 24 == process]
    columns = columns[:, np.lexsort((-columns[1], columns[0], columns[3]))]
    start, end, stages, threads, step_rows = columns
    if start.min() == end.max():
        raise ConfigError(f"{source} is a session without length")
    main = most_common(threads[stages == 0] if (stages == 0).any() else threads)
    parent, around = nest_ranges(start, end, threads, stages)

    def find_owner(times: Times, of: Times) -> Times:
        # Threads that torch starts, as that of backward, have no ranges: they work for the steps.
        known = np.isin(of, np.unique(threads)) | (of == -1)
        return find_innermost_ranges(times, np.where(known, of, main), start, end, threads, parent)

    work = [event for event in work if event[3] == process]
    gpu, waits, marks = make_columns(work, 5), make_columns(waiting, 4), make_columns(questions, 2)
    launched = make_columns([launches.get(event[3:], (event[0], -1)) for event in work], 2)

    def own_spans(found: Times) -> Spans:
        kept = found[:, found[3] >> 24 == process]
        return Spans(kept[0], kept[1], kept[2], find_owner(kept[0], kept[3]))

    session = ProfileSession(
        source, start, end, stages, threads, step_rows, parent, around, main, list(names),
        gpu=Spans(gpu[0], gpu[1], gpu[2], find_owner(launched[0], launched[1])),
        waits=own_spans(waits), layers=own_spans(make_columns(layers, 4)),
        operators=own_spans(drop_nested_spans(make_columns(operators, 4))), others=others,
    )  # fmt: skip
    asked = find_owner(*marks[:, marks[1] >> 24 == process])
    session.questions = int((~session.is_inside(asked, RANGE_NAMES.index("evaluate"))).sum())
    return session


def drop_nested_spans(found: Times) -> Times:
    """Of spans (start, end, name, thread) those that lie in no other of their thread."""
    found = found[:, np.lexsort((-found[1], found[0], found[3]))]
    outer, last, until = [], -1, -1
    for start, end, thread in zip(found[0].tolist(), found[1].tolist(), found[3].tolist(), strict=True):
        outer.append(thread != last or start >= until)
        if outer[-1]:
            last, until = thread, end
    return found[:, np.array(outer, dtype=bool)]


def make_columns(rows: Sequence[tuple[int | None, ...]], width: int) -> Times:
    """The fields of events, (width, events)."""
    return np.array(rows, dtype=np.int64).reshape(-1, width).T


def most_common(values: Times) -> int:
    found, counts = np.unique(values, return_counts=True)
    return int(found[counts.argmax()])


def nest_ranges(start: Times, end: Times, thread: Times, stage: Times) -> tuple[Times, Times]:
    """`parent` and `around` of ranges that come by thread and start, the longer one first."""
    parent, around, stack, last = list[int](), list[int](), list[int](), None
    ends = end.tolist()
    columns = zip(start.tolist(), thread.tolist(), stage.tolist(), strict=True)
    for number, (at, of, kind) in enumerate(columns):
        if of != last:
            stack, last = [], of
        while stack and ends[stack[-1]] <= at:
            stack.pop()
        parent.append(stack[-1] if stack else -1)
        around.append(1 << kind | (around[stack[-1]] if stack else 0))
        stack.append(number)
    return np.array(parent), np.array(around)


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
    """Reads a report; raises `ConfigError` for what is not one, is empty, or breaks off."""
    if not path.is_file():
        raise ConfigError(f"the report '{path}' was not found")
    if not path.stat().st_size:
        raise ConfigError(f"{path} is empty")
    if path.suffix in (".nsys-rep", ".qdstrm"):
        path = export_sqlite(import_qdstrm(path))
    trace = path.name.endswith((".json", ".json.gz"))
    try:
        return build_session(str(path), iterate_chrome_trace(path) if trace else iterate_nsys_sqlite(path))
    except PARSE_ERRORS as error:
        kind = "trace of torch.profiler" if trace else "sqlite export of nsys"
        raise ConfigError(f"{path} is no whole {kind}: {error}") from None


def iterate_nsys_sqlite(path: Path) -> Iterator[Event]:
    """The events of an sqlite export of Nsight Systems."""
    with closing(sqlite3.connect(f"{path.resolve().as_uri()}?mode=ro", uri=True)) as database:
        tables = {name for (name,) in database.execute("SELECT name FROM sqlite_master")}
        if "NVTX_EVENTS" not in tables:
            raise ConfigError(f"{path} has no NVTX events: trace with --trace=nvtx")
        if "StringIds" not in tables:
            database.execute("CREATE TEMP TABLE StringIds (id, value)")
        queries = {"NVTX_EVENTS": NVTX_QUERY}
        for kind, called in GPU_TABLES.items():
            table, name = f"CUPTI_ACTIVITY_KIND_{kind}", f"'{called}'" if called else "value"
            join = "" if called else "LEFT JOIN StringIds ON id = shortName"
            queries[table] = GPU_QUERY.format(table=table, join=join, name=name)
        for kind in ("RUNTIME", "DRIVER"):
            table = f"CUPTI_ACTIVITY_KIND_{kind}"
            queries[table] = CALL_QUERY.format(table=table)
        for table, query in queries.items():
            if table in tables:
                yield from database.execute(query)


def is_stage_range(name: str) -> bool:
    """Whether a range is of a stage or a step, not `capture_window`, a layer or somebody else's."""
    return name in STAGES or STEP_RANGE_PATTERN.fullmatch(name) is not None


def iterate_chrome_trace(path: Path) -> Iterator[Event]:
    """The events of a Chrome trace of torch.profiler, whose ranges are `record_function`s of our names."""
    raw = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
    threads = dict[Any, int]()
    kinds = {"user_annotation": "range", "cpu_op": "range", "kernel": "gpu", "gpu_memcpy": "gpu",
             "gpu_memset": "gpu", "cuda_runtime": "call", "cuda_driver": "call"}  # fmt: skip

    def keep(found: dict[str, Any]) -> dict[str, Any] | None:
        """Drops events that are not read while the file is being parsed: they are most of it."""
        if "ph" not in found:
            return found
        name, kind = found.get("name", ""), kinds.get(found.get("cat", ""))
        ours = kind != "range" or is_stage_range(name) or name.startswith(KEPT_NAMES)
        return found if kind and ours and found["ph"] == "X" else None

    for event in filter(None, json.loads(raw, object_hook=keep)["traceEvents"]):
        kind, start = kinds[event["cat"]], round(1000 * event["ts"])
        kind = "op" if event["name"].startswith(OPERATOR_PREFIX) else kind
        thread = threads.setdefault((event["pid"], event["tid"]), len(threads))
        correlation = event.get("args", {}).get("correlation", -1)
        end = start + round(1000 * event.get("dur", 0))
        yield kind, start, end, event["name"], 0 if kind == "gpu" else thread, correlation


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
