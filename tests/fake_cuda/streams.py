"""Streams and events that compute nothing, and know which work must come before which (vector clocks).

A stream counts what it was asked to do, and remembers how far the others were when it last waited for them.
Work on memory that another stream has written, or that writes what another stream reads, must come after
that. Memory that another stream has used may be given back only if the allocator was told
(`Tensor.record_stream`).
"""

import weakref
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

Clock = dict["Stream", int]


class Event:
    def __init__(self, *_: Any, **__: Any) -> None:
        self.clock: Clock = {}

    def record(self, stream: "Stream | None" = None) -> None:
        stream = stream or Streams.now.current
        self.clock = {**stream.clock, stream: stream.asked}

    def wait(self, stream: "Stream | None" = None) -> None:
        (stream or Streams.now.current).wait_event(self)

    def synchronize(self) -> None:
        Streams.now.wait()


class Stream:
    """One of the device; as a context the one that work goes to."""

    def __init__(self, *_: Any, **__: Any) -> None:
        self.asked, self.clock = 0, Clock()

    def record_event(self, event: Event | None = None) -> Event:
        event = event or Event()
        event.record(self)
        return event

    def wait_event(self, event: Event) -> None:
        for stream, asked in event.clock.items():
            self.clock[stream] = max(asked, self.clock.get(stream, 0))

    def wait_stream(self, stream: "Stream") -> None:
        self.wait_event(stream.record_event())

    def synchronize(self) -> None:
        Streams.now.wait()

    def is_capturing(self) -> bool:
        return False

    def after(self, stream: "Stream", asked: int) -> bool:
        """Whether what is asked of it now comes after number `asked` of another."""
        return stream is self or self.clock.get(stream, 0) >= asked


class Streams:
    """The streams of a device and what they use. wait: called where the host waits for one of them."""

    now: "Streams"

    def __init__(self, wait: Any) -> None:
        self.default = self.current = Stream()
        self.wait = wait
        # Of each storage, by stream: which work used it last, and whether any wrote it.
        self._uses: dict[int, dict[Stream, tuple[int, bool]]] = {}
        self._recorded: dict[int, set[Stream]] = defaultdict(set)
        # Of memory that a stream may use again: what was asked last of those that have used it.
        self._given_back: dict[Stream, list[tuple[Stream, int]]] = defaultdict(list)

    @contextmanager
    def on(self, stream: Stream | None) -> Iterator[None]:
        before, self.current = self.current, stream or self.current
        try:
            yield
        finally:
            self.current = before

    def use(self, what: str, read: Sequence[torch.Tensor], written: Sequence[torch.Tensor]) -> None:
        """Asks the current stream for some work. Raises `RuntimeError` where it may come too early."""
        here = self.current
        here.asked += 1
        if not all(here.after(*use) for use in self._given_back.pop(here, ())):
            raise RuntimeError(f"{what} may get memory that another stream still uses")
        for tensor in (*read, *written):
            writes = any(tensor is one for one in written)
            uses = self._uses_of(tensor.untyped_storage(), here)
            for stream, (asked, wrote) in uses.items():
                if (writes or wrote) and not here.after(stream, asked):
                    raise RuntimeError(f"{what} does not wait for what another stream does with its memory")
            uses[here] = here.asked, writes or uses.get(here, (0, False))[1]

    def record(self, tensor: torch.Tensor, stream: Stream) -> None:
        """`Tensor.record_stream`."""
        self._recorded[tensor.untyped_storage()._cdata].add(stream)

    def _uses_of(self, storage: torch.UntypedStorage, owner: Stream) -> dict[Stream, tuple[int, bool]]:
        key = storage._cdata
        if key not in self._uses:
            self._uses[key] = {}
            weakref.finalize(storage, self._freed, key, owner)
        return self._uses[key]

    def _freed(self, key: int, owner: Stream) -> None:
        """The allocator gives memory to what is asked next of the stream that it was made on."""
        recorded = self._recorded.pop(key, set())
        uses = self._uses.pop(key).items()
        self._given_back[owner] += [(s, asked) for s, (asked, _) in uses if s not in recorded]
