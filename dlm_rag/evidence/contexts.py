"""The contexts of the rows in a batch, each in its slot: only what changed is written, or computed."""

from collections.abc import Sequence
from itertools import takewhile

from torch import Tensor

from dlm_rag.evidence.encode import encode_segments
from dlm_rag.evidence.layout import Arrangement
from dlm_rag.evidence.pool import EvidencePool, Reuse
from dlm_rag.model.denoiser import Denoiser
from dlm_rag.model.rows import Segment
from dlm_rag.model.store import ContextStore, StoredRows


class Contexts:
    """The contexts of the rows in a batch, ready to be seen by their canvases.

    Without a `pool` everything is encoded anew at every step, as a plain implementation does.
    """

    def __init__(self, denoiser: Denoiser, pool: EvidencePool | None) -> None:
        config = denoiser.config
        self._denoiser, self._pool = denoiser, pool
        self._store = ContextStore(
            config.num_hidden_layers, config.num_key_value_heads, config.head_dim, denoiser.device,
            denoiser.compute_dtype,
        )  # fmt: skip
        self._loaded: dict[int, tuple[Segment, ...]] = {}
        self.reuse = Reuse() if pool is None else pool.reuse

    def prefetch(self, laid: Arrangement) -> None:
        """Starts to bring what a row will need next from host memory."""
        if self._pool is not None:
            self._pool.prefetch(laid.context)

    def release(self, slot: int) -> None:
        """A row has left its slot."""
        self._loaded.pop(slot, None)

    def load(self, slots: Sequence[int], laid: Sequence[Arrangement], room: int) -> StoredRows | None:
        """Writes what changed into the slots of these rows; what they see, None where no row sees anything.

        room: tokens of the longest lead and canvas. Rows that share a segment share its computation.
        """
        if not any(row.context for row in laid):
            return None
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
                kept = self._pool.get(segment)
                if kept is not None:
                    found[segment] = kept
        missing = [segment for segment in segments if segment not in found]
        if missing:
            encoded = encode_segments(self._denoiser, missing)
            self.reuse.encoded += sum(len(segment.ids) for segment in missing)
            for segment, kept in zip(missing, encoded, strict=True):
                found[segment] = kept
                if self._pool is not None:
                    self._pool.add(segment, kept)
        return found
