"""Provisional tokens: what is proposed for positions that stay masked, small enough for every step.

Each step has the confidence of every one, but a token only where it has changed, and its text only once.
"""

import re
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from itertools import chain

NO_CONFIDENCE = "  "  # in the place of a confidence
_CONFIDENCES = re.compile(r"(?:[0-9]{2}|  )*")


@dataclass(frozen=True)
class ProvisionalToken:
    """A token that is not committed, and how sure the denoiser was of it."""

    position: int  # on the canvas, from 0
    token_id: int
    token: str
    confidence: float  # its probability at temperature 1, rounded down to hundredths, 0.99 at most


@dataclass(frozen=True)
class ProvisionalDelta:
    """What is guessed after a step, as far as it differs; `replay_provisional` puts it together."""

    # Two characters for each canvas position: the hundredths of `ProvisionalToken.confidence`, or blanks
    # where nothing is guessed; blanks at the end are left out.
    confidence: str = ""
    changed: tuple[int, ...] = ()  # in turn a position and the id of its token, where that is another now
    texts: tuple[tuple[int, str], ...] = ()  # ids and texts of tokens not guessed before


class ProvisionalRecorder:
    """Makes the guesses of one question's steps, which come in order; token_text: of an id."""

    def __init__(self, token_text: Callable[[int], str]) -> None:
        self._token_text = token_text
        self._last: dict[int, int] = {}  # token ids by position
        self._known: set[int] = set()

    def record_step(self, positions: list[int], ids: list[int], sure: list[float]) -> ProvisionalDelta:
        """The record of a step: what is guessed at the positions that are masked after it, how surely."""
        cells = [NO_CONFIDENCE] * (max(positions, default=-1) + 1)
        for position, confidence in zip(positions, sure, strict=True):
            cells[position] = f"{min(99, int(100 * confidence)):02}"
        pairs = zip(positions, ids, strict=True)
        changed = {position: token for position, token in pairs if self._last.get(position) != token}
        new = [token for token in dict.fromkeys(changed.values()) if token not in self._known]
        self._last |= changed
        self._known.update(new)
        texts = tuple((token, self._token_text(token).strip("\ufffd")) for token in new)
        return ProvisionalDelta("".join(cells), tuple(chain.from_iterable(changed.items())), texts)


def replay_provisional(steps: Iterable[ProvisionalDelta | None]) -> Iterator[dict[int, ProvisionalToken]]:
    """The guesses by position after each step; none where a step has no record of them.

    Raises `ValueError` or `KeyError` for records, which others may have written, that are not of a decode.
    """
    tokens, texts = dict[int, int](), dict[int, str]()
    for step in steps:
        step = step or ProvisionalDelta()
        if not _CONFIDENCES.fullmatch(step.confidence):
            raise ValueError(f"{step.confidence!r} are no confidences")
        texts |= dict(step.texts)
        tokens |= dict(zip(step.changed[::2], step.changed[1::2], strict=True))
        cells = [step.confidence[n : n + 2] for n in range(0, len(step.confidence), 2)]
        yield {
            position: ProvisionalToken(position, tokens[position], texts[tokens[position]], int(cell) / 100)
            for position, cell in enumerate(cells)
            if cell != NO_CONFIDENCE
        }


def are_deltas_valid(steps: Iterable[ProvisionalDelta | None], length: int) -> bool:
    """Whether records are those of one decode with a canvas of `length`."""
    deltas = [step for step in steps if step is not None]
    try:
        deque(replay_provisional(deltas), maxlen=0)
    except (KeyError, ValueError):
        return False
    return all(
        len(step.confidence) <= 2 * length and all(0 <= place < length for place in step.changed[::2])
        for step in deltas
    )
