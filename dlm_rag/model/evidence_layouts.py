"""Segments of tokens, and evidence layouts: where a prompt stands, what stays valid when evidence changes.

    joint         the prompt runs with the canvas: every token sees every other
    prefix        the prompt sees itself alone: valid until any passage of it changes
    independent   so does each passage, from position 0, and the question, from `passage_length`: a passage
                  is valid wherever it ranks and whatever the others are, and is cut to `passage_length`

In all of them the canvas sees the whole prompt.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True)
class Segment:
    """Token ids at consecutive positions from `start`.

    With a `block`, a token sees its own block and everything before it: the `first` tokens are one block,
    then every `block` of them. Without, each token sees all. The first `causal` tokens are a block each.
    """

    ids: tuple[int, ...]
    start: int
    first: int = 0
    block: int | None = None
    causal: int = 0

    @cached_property
    def _hash(self) -> int:
        return hash((self.ids, self.start, self.first, self.block or 0))

    def __hash__(self) -> int:
        return self._hash  # a step looks at each segment of each row dozens of times

    @property
    def end(self) -> int:
        return self.start + len(self.ids)

    @property
    def block_ends(self) -> list[int]:
        length, ends = len(self.ids), range(0)
        if self.block is not None and self.first < length:
            ends = range(self.first or self.block, length, self.block)
        return [*range(1, min(self.causal, length - 1) + 1), *(e for e in ends if e > self.causal), length]

    @property
    def visible_counts(self) -> NDArray[np.int32]:
        """(n,) how many tokens of the segment each of them sees."""
        ends = np.array(self.block_ends, dtype=np.int32)
        return np.repeat(ends, np.diff(ends, prepend=0))

    @property
    def has_partial_view(self) -> bool:
        """Whether some token does not see all."""
        length = len(self.ids)
        blocks = self.block is not None and length > (self.first or self.block)
        return blocks or min(self.causal, length - 1) > 0

    def block_start(self, token: int) -> int:
        """The last place up to `token` at which a block begins."""
        if token < self.causal:
            return token
        if self.block is None or token < self.first:
            return self.causal
        return self.first + (token - self.first) // self.block * self.block

    def slice_tokens(self, start: int, stop: int) -> "Segment":
        """Its tokens from `start` on and before `stop`, in the same blocks."""
        first = self.first
        if self.block is not None:
            first = first - start if start < first else self.block - (start - first) % self.block
        causal = max(0, min(self.causal, stop) - start)
        return Segment(self.ids[start:stop], self.start + start, first, self.block, causal=causal)

    def split_into_blocks(self) -> "list[Segment]":
        """Its blocks, each a segment whose tokens see all of it; what is causal stays one."""
        head, ends = [self.slice_tokens(0, self.causal)] * (self.causal > 0), self.block_ends
        ends = [self.causal, *(end for end in ends if end > self.causal)]
        return [*head, *(Segment(self.ids[a:b], self.start + a) for a, b in pairwise(ends))]


PlacedTokens = tuple[Sequence[int], int]  # ids, and the position of the first


class EvidenceLayout(NamedTuple):
    """A layout of evidence.

    place: a `tokenizer.Prompt` and `passage_length` to the segments that see themselves alone, in the order
    in which the canvas sees them; empty ones are left out, the last one holds the question.
    runs_with_canvas: whether the last one runs at every step, with the canvas, and sees it.
    separate_passages: whether the segment of a passage depends on that alone: it stays valid when others
    change, is cut to `passage_length`, and its fact has no number.
    """

    place: Callable[[Any, int], Sequence[PlacedTokens]]
    runs_with_canvas: bool = False
    separate_passages: bool = False


def place_whole_prompt(prompt: Any, passage_length: int) -> list[PlacedTokens]:
    return [(prompt.ids, 0)]


def place_passages_apart(prompt: Any, passage_length: int) -> list[PlacedTokens]:
    """Each passage from position 0, then the question after the longest of them."""
    return [*((fact, 0) for fact in prompt.facts), (prompt.head + prompt.tail, passage_length)]


EVIDENCE_LAYOUTS = {
    "joint": EvidenceLayout(place_whole_prompt, runs_with_canvas=True),
    "prefix": EvidenceLayout(place_whole_prompt),
    "independent": EvidenceLayout(place_passages_apart, separate_passages=True),
    "parallel": EvidenceLayout(place_passages_apart, runs_with_canvas=True, separate_passages=True),
}
