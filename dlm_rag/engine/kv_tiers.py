"""Where keys and values of segments are kept: tensors, or one block of memory that rows read in place."""

from bisect import bisect
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from functools import cached_property

import torch
from torch import Tensor

from dlm_rag.engine.kv_format import KVFormat
from dlm_rag.model.packed_batch import Segment

ARENA_UNIT_TOKENS = 8  # in which segments lie: freed room is likelier to fit the next one


class Tier:
    """Tensors under a byte budget, in the order of their last use."""

    def __init__(self, budget: int, pinned: bool = False) -> None:
        self.budget, self.bytes, self._pinned = budget, 0, pinned
        self.kept: OrderedDict[Segment, Tensor] = OrderedDict()

    def cost(self, tensor: Tensor) -> int:
        """Bytes that a tensor takes here: torch rounds pinned blocks up to a power of two."""
        return 1 << (tensor.nbytes - 1).bit_length() if self._pinned else tensor.nbytes

    def can_hold(self, segment: Segment, cost: int) -> bool:
        """Whether a segment of so many bytes fits, when all that may leave has left."""
        return cost <= self.budget

    def make_room(self, cost: int) -> list[tuple[Segment, Tensor]]:
        """Gives up what was used longest ago until `cost` bytes, at most the budget, fit; returns it."""
        gone = []
        while self.bytes + cost > self.budget:
            gone.append(self.kept.popitem(last=False))
            self.bytes -= self.cost(gone[-1][1])
        return gone

    def put(self, segment: Segment, tensor: Tensor) -> Tensor:
        """Takes a tensor in, for which there is room; returns where it lies."""
        self.kept[segment] = tensor
        self.bytes += self.cost(tensor)
        return tensor

    def drop(self, segment: Segment) -> Tensor | None:
        """Takes a tensor out, where it is here."""
        if (found := self.kept.pop(segment, None)) is not None:
            self.bytes -= self.cost(found)
        return found


class KVArena(Tier):
    """A tier in one block of memory, in which each segment has consecutive tokens; rows read it in place.

    It is taken at its first use. `protect`ed segments stay.
    """

    def __init__(self, budget: int, format: KVFormat) -> None:
        super().__init__(budget)
        self.format, self.is_compressed = format, format.is_compressed
        self.tokens = budget // format.token_bytes // ARENA_UNIT_TOKENS * ARENA_UNIT_TOKENS
        self._ranges: dict[Segment, range] = {}
        self._holes = [range(self.tokens)]  # ascending, none touches the next
        self._protected, self._protected_bytes = set[Segment](), 0
        self._written: list[Segment] = []  # by the call under way

    @cached_property
    def _memory(self) -> Tensor:
        return self.format.empty(self.tokens)

    @cached_property
    def _positions(self) -> Tensor:
        """Of each token, where keys are kept without their bias."""
        return torch.empty(self.tokens, dtype=torch.int32, device=self._memory.device)

    def bytes_of(self, tokens: int) -> int:
        """The bytes that so many tokens take here."""
        return round_up_to_unit(tokens) * self.format.token_bytes

    def cost(self, tensor: Tensor) -> int:
        return self.bytes_of(tensor.shape[2])

    def range_of(self, segment: Segment) -> range:
        return self._ranges[segment][: len(segment.ids)]

    def protect(self, segments: Sequence[Segment]) -> None:
        """These stay until the next time. What a failed call has not written is given up."""
        for segment in self._written:
            self._give_back(segment)
        self._written, self._protected = [], set(segments)
        self._protected_bytes = count_arena_tokens(self._protected) * self.format.token_bytes

    def can_hold(self, segment: Segment, cost: int) -> bool:
        return segment in self._protected or self._protected_bytes + cost <= self.budget

    def make_room(self, cost: int) -> list[tuple[Segment, Tensor]]:
        """As `Tier.make_room`, until there is a hole, or only protected segments are left."""
        gone = []
        while not self.has_hole(cost):
            segment = next((each for each in self.kept if each not in self._protected), None)
            if segment is None:
                break
            gone.append((segment, self.kept[segment]))
            self.drop(segment)
        return gone

    def has_hole(self, cost: int) -> bool:
        """Whether so many bytes fit into one place as things lie; else `take` moves them together."""
        tokens = cost // self.format.token_bytes
        return any(len(hole) >= tokens for hole in self._holes)

    def take(self, segment: Segment) -> Tensor:
        """Room for a segment, that a call is going to write."""
        tokens = round_up_to_unit(len(segment.ids))
        if not self.has_hole(tokens * self.format.token_bytes):
            self._move_together()
        number = next(n for n, hole in enumerate(self._holes) if len(hole) >= tokens)
        hole = self._holes[number]
        self._ranges[segment], rest = hole[:tokens], hole[tokens:]
        self._holes[number : number + 1] = [rest] if rest else []
        self.bytes += tokens * self.format.token_bytes
        self._written.append(segment)
        return self._place(segment)

    def put(self, segment: Segment, tensor: Tensor) -> Tensor:
        """Room for a tensor, which the caller copies there."""
        self.kept[segment] = self.take(segment)
        self._written.pop()
        return self.kept[segment]

    def write(self, segment: Segment, kept: Tensor) -> None:
        """Writes a segment for which there is room."""
        self._view(segment).copy_(kept)

    def commit(self) -> list[tuple[Segment, Tensor]]:
        """What calls have written since `protect` is kept from now on."""
        found = [(segment, self._view(segment)) for segment in self._written]
        self.kept.update(found)
        self._written = []
        return found

    def drop(self, segment: Segment) -> Tensor | None:
        if (found := self.kept.pop(segment, None)) is not None:
            self._give_back(segment)
        return found

    def write_layer(self, layer: int, places: Tensor, k: Tensor, v: Tensor) -> None:
        assert not self.is_compressed
        for side, own in zip(self._memory[layer], (k, v), strict=True):
            side.index_copy_(0, places, own)

    def read_layer(self, layer: int, places: Tensor) -> Tensor:
        held = self._memory[layer]
        if not self.is_compressed:
            return held.index_select(1, places)
        return self.format.unpack_layer(held.index_select(1, places), layer, self._positions[places])

    def _view(self, segment: Segment) -> Tensor:
        place = self.range_of(segment)
        return self._memory[:, :, place.start : place.stop]

    def _place(self, segment: Segment) -> Tensor:
        """Where a segment lies from now on."""
        place = self.range_of(segment)
        torch.arange(segment.start, segment.end, out=self._positions[place.start : place.stop])
        return self._view(segment)

    def _give_back(self, segment: Segment) -> None:
        freed = self._ranges.pop(segment)
        self.bytes -= len(freed) * self.format.token_bytes
        at = bisect(self._holes, freed.start, key=lambda hole: hole.start)
        around = [*self._holes[max(0, at - 1) : at], freed, *self._holes[at : at + 1]]
        merged = [around[0]]
        for hole in around[1:]:
            if merged[-1].stop == hole.start:
                merged[-1] = range(merged[-1].start, hole.stop)
            else:
                merged.append(hole)
        self._holes[max(0, at - 1) : at + 1] = merged

    def _move_together(self) -> None:
        end = 0
        for segment, place in sorted(self._ranges.items(), key=lambda item: item[1].start):
            kept = self._view(segment).clone()
            self._ranges[segment] = range(end, end + len(place))
            self._place(segment).copy_(kept)
            end += len(place)
        self.kept.update((segment, self._view(segment)) for segment in self.kept)
        self._holes = [range(end, self.tokens)] if end < self.tokens else []


def round_up_to_unit(tokens: int) -> int:
    """The tokens that so many take in an arena."""
    return -(-tokens // ARENA_UNIT_TOKENS) * ARENA_UNIT_TOKENS


def count_arena_tokens(segments: Iterable[Segment]) -> int:
    return sum(round_up_to_unit(len(segment.ids)) for segment in segments)
