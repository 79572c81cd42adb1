"""What stays between steps: keys and values of evidence, each computed once.

`EvidencePool` keeps them by segment, for all rows and questions, under a byte budget. `Contexts` lays
those of each row behind one another in its slot of a `ContextStore`, and writes only what changed.
"""

from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import takewhile

import torch
from torch import Tensor

from dlm_rag.evidence.layout import Arrangement, Segment, encode_segments
from dlm_rag.model.denoiser import Denoiser
from dlm_rag.model.store import ContextStore, StoredRows


@dataclass
class Reuse:
    """Counts of context tokens over a run."""

    wanted: int = 0  # that rows saw, summed over steps
    encoded: int = 0  # that the denoiser had to run for

    @property
    def share(self) -> float:
        """The share of the wanted tokens that needed no run of their own."""
        return 1 - self.encoded / self.wanted if self.wanted else 0.0


class EvidencePool:
    """Keys and values (N, 2, n, Hk, D) of segments, the least recently used leaving first.

    The first tier lies on the denoiser's device; what leaves it goes to a second one in host memory,
    pinned for CUDA. No tier ever holds more than its budget in bytes.
    """

    def __init__(self, device_bytes: int, host_bytes: int = 0) -> None:
        self._tiers = (_Tier(device_bytes), _Tier(host_bytes))
        self.from_host = 0  # tokens that came back from host memory

    @property
    def bytes(self) -> tuple[int, int]:
        """Bytes held now, on the device and in host memory."""
        return self._tiers[0].bytes, self._tiers[1].bytes

    def prefetch(self, segments: Iterable[Segment], device: torch.device) -> None:
        """Starts the copies of what lies in host memory, so that `get` need not wait for them."""
        for segment in segments:
            if segment in self._tiers[1].kept:
                self.get(segment, device)

    def get(self, segment: Segment, device: torch.device) -> Tensor | None:
        """The keys and values of a segment on the device, or None."""
        near, far = self._tiers
        if (found := near.kept.get(segment)) is not None:
            near.kept.move_to_end(segment)
        elif (found := far.drop(segment)) is not None:
            self.from_host += found.shape[2]
            found = found.to(device, non_blocking=True)
            self.add(segment, found)
        return found

    def add(self, segment: Segment, kept: Tensor) -> None:
        """Keeps a segment's keys and values, at the cost of what was used longest ago."""
        near, far = self._tiers
        for old, tensor in near.add(segment, kept):
            if tensor.nbytes <= far.budget:
                aside = torch.empty_like(tensor, device="cpu", pin_memory=tensor.is_cuda)
                far.add(old, aside.copy_(tensor, non_blocking=True))


class _Tier:
    """Tensors under a byte budget, in the order of their last use."""

    def __init__(self, budget: int) -> None:
        self.budget, self.bytes = budget, 0
        self.kept: OrderedDict[Segment, Tensor] = OrderedDict()

    def add(self, segment: Segment, tensor: Tensor) -> list[tuple[Segment, Tensor]]:
        """Takes a tensor in; returns what had to leave, the tensor itself where it is too large."""
        self.drop(segment)
        self.kept[segment] = tensor
        self.bytes += tensor.nbytes
        gone = []
        while self.bytes > self.budget:
            old, lost = self.kept.popitem(last=False)
            self.bytes -= lost.nbytes
            gone.append((old, lost))
        return gone

    def drop(self, segment: Segment) -> Tensor | None:
        """Takes a tensor out, where it is here."""
        found = self.kept.pop(segment, None)
        if found is not None:
            self.bytes -= found.nbytes
        return found


class Contexts:
    """The contexts of the rows in a batch, ready to be seen by their canvases.

    Without a `pool` everything is encoded anew at every step, as a plain implementation does.
    `prompt_reuse` is for the joint layout, whose prompts see the canvas and have no context: for so
    many steps a prompt that has not changed is not run again and keeps the keys and values of a
    canvas that has since moved on. An approximation (Fast-dLLM's prefix cache, arXiv 2505.22618).
    """

    def __init__(
        self, denoiser: Denoiser, pool: EvidencePool | None, *, masked_only: bool, prompt_reuse: int = 0
    ) -> None:
        config, kind, dtype = denoiser.config, denoiser.device.type, denoiser.dtype
        if torch.is_autocast_enabled(kind):
            dtype = torch.get_autocast_dtype(kind)
        self._denoiser, self._pool, self._masked_only = denoiser, pool, masked_only
        self._prompt_reuse = prompt_reuse
        self._store = ContextStore(
            config.num_hidden_layers, config.num_key_value_heads, config.head_dim,
            denoiser.device, dtype,
        )  # fmt: skip
        self._loaded: dict[int, tuple[Segment, ...]] = {}  # by slot
        self._prompts: dict[int, tuple[Segment, int]] = {}  # by slot, with the steps it was reused for
        self.reuse = Reuse()

    def prefetch(self, laid: Arrangement) -> None:
        """Starts to bring what a row will need next from host memory."""
        if self._pool is not None:
            self._pool.prefetch(laid.context, self._denoiser.device)

    def release(self, slot: int) -> None:
        """A row has left its slot: the next one there shall not see a canvas that was not its own."""
        self._prompts.pop(slot, None)

    def load(
        self, slots: Sequence[int], laid: Sequence[Arrangement], room: int
    ) -> tuple[StoredRows | None, list[Segment]]:
        """What the rows in these slots see, and what is left of their prompts to run before the canvas.

        room: positions of the longest canvas. None where no row sees a context.
        """
        longest = room + max(len(row.lead.ids) for row in laid)
        if any(row.context for row in laid):
            return self._load_segments(slots, laid, longest), [row.lead for row in laid]
        if not self._prompt_reuse:
            return None, [row.lead for row in laid]
        self._store.reserve(max(slots) + 1, longest)
        seen, leads = [], []
        for slot, row in zip(slots, laid, strict=True):
            held, age = self._prompts.get(slot, (None, 0))
            again = held == row.lead and age < self._prompt_reuse
            self._prompts[slot] = row.lead, age + 1 if again else 0
            # The call that ran the prompt left its keys and values in the slot.
            kept = len(row.lead.ids) - int(self._denoiser.config.shifted) if again else 0
            seen.append(kept)
            leads.append(Segment(row.lead.ids[kept:], row.lead.start + kept))
            self.reuse.wanted += len(row.lead.ids)
            self.reuse.encoded += len(row.lead.ids) - kept
        return self._store.rows(slots, seen), leads

    def _load_segments(self, slots: Sequence[int], laid: Sequence[Arrangement], room: int) -> StoredRows:
        """Writes what changed into the slots; rows that share a segment share its computation."""
        sizes = [sum(len(segment.ids) for segment in row.context) for row in laid]
        self.reuse.wanted += sum(sizes)
        self._store.reserve(max(slots) + 1, max(sizes) + room)
        same = [self._same(slot, row.context) for slot, row in zip(slots, laid, strict=True)]
        fresh = dict.fromkeys(s for row, skip in zip(laid, same, strict=True) for s in row.context[skip:])
        kept = self._fetch(list(fresh))
        for slot, row, skip in zip(slots, laid, same, strict=True):
            at = sum(len(segment.ids) for segment in row.context[:skip])
            for segment in row.context[skip:]:
                self._store.put(slot, at, kept[segment])
                at += len(segment.ids)
            self._loaded[slot] = row.context
        return self._store.rows(slots, sizes)

    def _same(self, slot: int, context: tuple[Segment, ...]) -> int:
        """How many leading segments of the context the slot holds already."""
        if self._pool is None:
            return 0
        pairs = zip(self._loaded.get(slot, ()), context, strict=False)
        return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))

    def _fetch(self, segments: list[Segment]) -> dict[Segment, Tensor]:
        """Keys and values of segments, from the pool or computed in one packed call."""
        found = dict[Segment, Tensor]()
        if self._pool is not None:
            for segment in segments:
                kept = self._pool.get(segment, self._denoiser.device)
                if kept is not None:
                    found[segment] = kept
        missing = [segment for segment in segments if segment not in found]
        if missing:
            encoded = encode_segments(self._denoiser, missing, masked_only=self._masked_only)
            self.reuse.encoded += sum(len(segment.ids) for segment in missing)
            for segment, kept in zip(missing, encoded, strict=True):
                # A copy of its own: a view would keep the keys and values of the whole call alive.
                found[segment] = kept if self._pool is None else kept.clone()
                if self._pool is not None:
                    self._pool.add(segment, found[segment])
        return found
