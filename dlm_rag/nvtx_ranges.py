"""Where time goes: `with profile_stage("retrieve"):`, for NVTX and the host clock.

A range costs about a microsecond when no profiler listens. While torch's profiler does, the same names
reach it as well. Seconds are kept only while a `StageClock` is open on the same thread. On a GPU the
host clock counts what the host waits for: `denoise` ends when the proposals have arrived on the host.

With DLM_RAG_CAPTURE=FIRST:LAST in the environment a range `capture` is open from the beginning of
step FIRST to the end of step LAST (or of the program), for `nsys profile --capture-range=nvtx`; see
`CaptureWindow`.
"""

import os
import sys
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from contextvars import ContextVar, Token
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import nvtx

STAGES = (
    "tokenize", "retrieve", "retrieve/embed", "retrieve/search", "encode_evidence", "denoise",
    "commit", "detokenize",
    "rollout", "reward", "data", "forward", "loss", "backward", "optimizer", "checkpoint", "evaluate",
)  # fmt: skip
NVTX_DOMAIN = "dlm_rag"
MAX_CACHED_NVTX_MESSAGES = 1000  # of steps and questions
_passed = 0

_clock: ContextVar["StageClock | None"] = ContextVar("stage_clock", default=None)


class StageClock(AbstractContextManager["StageClock"]):
    """Adds up the seconds of every stage that ends while the clock is open on this thread.

    Nested stages ("retrieve/embed") count in their own name and in the enclosing stage, so the
    names without a slash add up to the whole.
    """

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self._token: Token[StageClock | None] | None = None

    def __enter__(self) -> "StageClock":
        self._token = _clock.set(self)
        return self

    def __exit__(self, *error: object) -> None:
        assert self._token is not None
        _clock.reset(self._token)

    def add(self, name: str, seconds: float) -> None:
        self.seconds[name] = self.seconds.get(name, 0.0) + seconds

    def pop_seconds(self) -> dict[str, float]:
        """The seconds since the last call, by stage; starts again from zero."""
        taken, self.seconds = self.seconds, {}
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
    begin: Callable[[], object]
    end: Callable[[], object]
    steps: int = 0  # begun until now
    open: bool = False
    _here: threading.local = field(default_factory=threading.local)

    def enter(self, is_step: bool = False) -> None:
        """A range is about to open."""
        depth = getattr(self._here, "depth", 0)
        self._here.depth = depth + 1
        if is_step and not depth:
            if self.steps == self.first:
                self.open = True
                self.begin()
            self.steps += 1

    def leave(self, is_step: bool = False) -> None:
        """A range has closed."""
        self._here.depth -= 1
        if is_step and not self._here.depth and self.open and self.steps - 1 == self.last:
            self.open = False
            self.end()


def _open_capture_window(window: str) -> CaptureWindow:
    first, _, last = window.partition(":")
    opened: list[object] = []
    return CaptureWindow(
        int(first),
        int(last) if last else None,
        lambda: opened.append(nvtx.start_range("capture", domain=NVTX_DOMAIN)),
        lambda: nvtx.end_range(opened.pop()),
    )


capture_window = (
    _open_capture_window(os.environ["DLM_RAG_CAPTURE"]) if "DLM_RAG_CAPTURE" in os.environ else None
)


@cache
def _range(message: str) -> nvtx.annotate:
    return nvtx.annotate(message, domain=NVTX_DOMAIN)


def _forget_old_messages(message: str) -> str:
    """A message used once: nvtx keeps all messages it has seen, so now and then its caches are cleared."""
    global _passed
    _passed += 1
    if _passed % MAX_CACHED_NVTX_MESSAGES == 0:
        domain = type(nvtx.get_domain(NVTX_DOMAIN))
        domain.get_event_attributes.cache_clear()
        domain.get_registered_string.cache_clear()
    return message


class ProfileRange(AbstractContextManager[None]):
    """A named range for NVTX and, while it runs, torch's profiler; closes on errors too."""

    __slots__ = ("_is_step", "_name", "_range", "_start", "_torch")

    def __init__(self, name: str, nvtx_range: nvtx.annotate, is_step: bool = False) -> None:
        self._name, self._range, self._is_step = name, nvtx_range, is_step

    def __enter__(self) -> None:
        if capture_window is not None:
            capture_window.enter(self._is_step)
        self._range.__enter__()
        self._torch = _torch_range(self._name)
        self._start = time.perf_counter()

    def __exit__(self, *error: Any) -> None:
        elapsed = time.perf_counter() - self._start
        if self._torch is not None:
            self._torch.__exit__(*error)
        self._range.__exit__(*error)
        if capture_window is not None:
            capture_window.leave(self._is_step)
        clock = _clock.get()
        if clock is not None and not self._is_step:
            clock.add(self._name, elapsed)


def profile_stage(name: str) -> ProfileRange:
    """The range of a stage of `STAGES`, timed by the open `StageClock`; raises `ValueError`."""
    if name not in STAGES:
        raise ValueError(f"'{name}' is not a stage; the stages are {', '.join(STAGES)}")
    return ProfileRange(name, _range(name))


def profile_step(step: int, rows: int) -> ProfileRange:
    """The range of one step of a loop: `step 12 rows 8`, readable in any nsys version."""
    message = f"step {step} rows {rows}"
    annotation = nvtx.annotate(_forget_old_messages(message), domain=NVTX_DOMAIN)
    return ProfileRange(message, annotation, is_step=True)


def mark_event(message: str) -> None:
    """A moment: that a question was finished, say."""
    nvtx.mark(_forget_old_messages(message), domain=NVTX_DOMAIN)
    torch_range = _torch_range(message)
    if torch_range is not None:
        torch_range.__exit__(None, None, None)


def _torch_range(message: str) -> AbstractContextManager[object] | None:
    """A range of torch's profiler, entered, where one is running; this module does not import torch."""
    torch = sys.modules.get("torch")
    if torch is None or not torch.autograd.profiler._is_profiler_enabled:
        return None
    entered: AbstractContextManager[object] = torch.profiler.record_function(message)
    entered.__enter__()
    return entered
