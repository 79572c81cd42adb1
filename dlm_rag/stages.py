"""Where time goes: one word, `with stage("retrieve"):`, for NVTX and the host clock.

A range costs about a microsecond when no profiler listens. Seconds are kept only while a
`StageClock` is open on the same thread. On a GPU the host clock counts what the host waits for:
`denoise` ends when the proposals have arrived on the host.
"""

import time
from contextlib import AbstractContextManager
from contextvars import ContextVar, Token
from functools import cache

import nvtx

STAGES = (
    "tokenize", "retrieve", "retrieve/embed", "retrieve/search", "encode_evidence", "denoise",
    "commit", "detokenize",
    "data", "forward", "loss", "backward", "optimizer", "checkpoint", "evaluate",
)  # fmt: skip
DOMAIN = "dlm_rag"

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

    def take(self) -> dict[str, float]:
        """The seconds since the last call, by stage; starts again from zero."""
        taken, self.seconds = self.seconds, {}
        return taken


@cache
def _range(message: str) -> nvtx.annotate:
    return nvtx.annotate(message, domain=DOMAIN)


class stage(AbstractContextManager[None]):  # noqa: N801 - reads as a statement
    """A named range around a stage of the pipeline; closes on errors too.

    Raises `ValueError` for a name that is not in `STAGES`.
    """

    __slots__ = ("_name", "_range", "_start")

    def __init__(self, name: str) -> None:
        if name not in STAGES:
            raise ValueError(f"'{name}' is not a stage; the stages are {', '.join(STAGES)}")
        self._name = name

    def __enter__(self) -> None:
        self._range = _range(self._name)
        self._range.__enter__()
        self._start = time.perf_counter()

    def __exit__(self, *error: object) -> None:
        elapsed = time.perf_counter() - self._start
        self._range.__exit__(*error)
        clock = _clock.get()
        if clock is not None:
            clock.add(self._name, elapsed)


def step_range(step: int, rows: int) -> AbstractContextManager[object]:
    """The range that encloses one step of a loop: `step 12 rows 8`, readable in any nsys version."""
    return nvtx.annotate(f"step {step} rows {rows}", domain=DOMAIN)
