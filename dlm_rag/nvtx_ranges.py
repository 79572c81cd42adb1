"""Where time goes: `with profile_stage("retrieve"):`, for NVTX and the host clock.

A range costs a few microseconds when no profiler listens. While torch's profiler does, the same names
reach it as well. Seconds are kept only while a `StageClock` is open on the same thread. On a GPU the
host clock counts what the host waits for: `denoise` ends when the proposals have arrived on the host.

With DLM_RAG_CAPTURE=FIRST:LAST in the environment a range `capture` is open from the beginning of
step FIRST to the end of step LAST, or of the program, for `nsys profile --capture-range=nvtx`.
"""

import os
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import ContextVar
from dataclasses import dataclass
from functools import cache, partial
from itertools import count
from typing import Any

import nvtx

STAGES = (
    "tokenize", "retrieve", "retrieve/embed", "retrieve/search", "encode_evidence", "denoise",
    "commit", "detokenize",
    "rollout", "reward", "data", "forward", "loss", "backward", "optimizer", "checkpoint", "evaluate",
)  # fmt: skip
NVTX_DOMAIN = "dlm_rag"
MAX_CACHED_NVTX_MESSAGES = 1000  # of steps and questions
_messages = count(1)
_NOTHING = nullcontext()

_clock: ContextVar["StageClock | None"] = ContextVar("stage_clock", default=None)
_depth: ContextVar[int] = ContextVar("ranges_open", default=0)


class StageClock:
    """Adds up the seconds of every stage that ends while the clock is open on this thread.

    Nested stages ("retrieve/embed") count in the enclosing one too: names without a slash add up to all.
    """

    def __init__(self) -> None:
        self.seconds: dict[str, float] = defaultdict(float)

    def __enter__(self) -> "StageClock":
        self._token = _clock.set(self)
        return self

    def __exit__(self, *error: object) -> None:
        _clock.reset(self._token)

    def pop_seconds(self) -> dict[str, float]:
        """The seconds since the last call, by stage; starts again from zero."""
        taken, self.seconds = self.seconds, defaultdict(float)
        return taken


def drop_nested_stages(seconds: Mapping[str, float]) -> dict[str, float]:
    """The stages that lie in no other ("retrieve", not "retrieve/search"): they add up to the whole."""
    return {name: value for name, value in seconds.items() if "/" not in name}


@dataclass
class CaptureWindow:
    """The steps that a profiler is to record, counted from 0 in this process.

    Counted are steps that lie in no other range of this thread: not those of validations.
    """

    first: int
    last: int | None
    begin: Callable[[], Any]
    end: Callable[[Any], object]  # takes what `begin` has returned
    steps: int = 0  # begun until now
    open: bool = False

    @contextmanager
    def count_step(self) -> Iterator[None]:
        if self.steps == self.first:
            self._begun, self.open = self.begin(), True
        self.steps += 1
        try:
            yield
        finally:
            if self.open and self.steps - 1 == self.last:
                self.open = False
                self.end(self._begun)


capture_window: CaptureWindow | None = None
if _steps := os.environ.get("DLM_RAG_CAPTURE"):
    _first, _, _last = _steps.partition(":")
    capture_window = CaptureWindow(
        int(_first), int(_last) if _last else None,
        partial(nvtx.start_range, "capture", domain=NVTX_DOMAIN), nvtx.end_range,
    )  # fmt: skip


@cache
def _range(message: str) -> nvtx.annotate:
    return nvtx.annotate(message, domain=NVTX_DOMAIN)


def _forget_old_messages() -> None:
    """nvtx keeps all messages it has seen: with many that are used once, its caches are cleared."""
    if next(_messages) % MAX_CACHED_NVTX_MESSAGES == 0:
        domain = type(nvtx.get_domain(NVTX_DOMAIN))
        domain.get_event_attributes.cache_clear()
        domain.get_registered_string.cache_clear()


class _Range(AbstractContextManager[None]):
    """A range for NVTX and, while it runs, torch's profiler; in half the time that a generator takes."""

    def __init__(self, name: str, annotation: nvtx.annotate, timed: bool = False) -> None:
        self._name, self._annotation, self._timed = name, annotation, timed

    def __enter__(self) -> None:
        self._entered = _depth.set(_depth.get() + 1)
        self._annotation.__enter__()
        self._torch = _torch_range(self._name)
        self._torch.__enter__()
        self._start = time.perf_counter()

    def __exit__(self, *error: Any) -> None:
        if self._timed and (clock := _clock.get()):
            clock.seconds[self._name] += time.perf_counter() - self._start
        self._torch.__exit__(*error)
        self._annotation.__exit__(*error)
        _depth.reset(self._entered)


def profile_stage(name: str) -> AbstractContextManager[None]:
    """The range of a stage of `STAGES`, timed by the open `StageClock`; raises `ValueError`."""
    if name not in STAGES:
        raise ValueError(f"'{name}' is not a stage; the stages are {', '.join(STAGES)}")
    return _Range(name, _range(name), timed=True)


@contextmanager
def profile_step(step: int, rows: int) -> Iterator[None]:
    """The range of one step of a loop: `step 12 rows 8`, readable in any nsys version."""
    message, window = f"step {step} rows {rows}", None if _depth.get() else capture_window
    _forget_old_messages()
    annotation = nvtx.annotate(message, domain=NVTX_DOMAIN)
    with window.count_step() if window else nullcontext(), _Range(message, annotation):
        yield


def profile_layer(number: int) -> AbstractContextManager[None]:
    """The range of one layer of the model, as `layer 3`: below the stages, and no part of their clock."""
    return _Range(message := f"layer {number}", _range(message))


def mark_event(message: str) -> None:
    """A moment: that a question was finished, say."""
    _forget_old_messages()
    nvtx.mark(message, domain=NVTX_DOMAIN)
    with _torch_range(message):
        pass


def _torch_range(message: str) -> AbstractContextManager[Any]:
    """A range of torch's profiler where one is running; this module does not import torch."""
    torch = sys.modules.get("torch")
    if torch is None or not torch.autograd.profiler._is_profiler_enabled:
        return _NOTHING
    return torch.profiler.record_function(message)
