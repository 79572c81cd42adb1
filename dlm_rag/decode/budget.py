"""The memory that decoding takes on a device, reckoned before weights are read, and a budget for it.

Weights; slots of keys and values for the rows of the batch; what a step computes on the way. What is left
of a budget is the pool's. Bytes of a token on the way are found by running the real code on tensors
without contents (`model/live.py`); the rest is counted from shapes. Bounds, not means: every row has its
longest prompt, every passage its full length.
"""

from dataclasses import dataclass, replace

import numpy as np
import torch

from dlm_rag.config import DecodeConfig, EngineConfig
from dlm_rag.decode.proposals import Wanted, read_proposals
from dlm_rag.diffusion.chain import chain_bytes
from dlm_rag.errors import ConfigError
from dlm_rag.evidence.contexts import SCRATCH
from dlm_rag.evidence.fitting import Room
from dlm_rag.evidence.pool import free_bytes, shares_memory
from dlm_rag.model.denoiser import Denoiser
from dlm_rag.model.live import RESERVE, LiveBytes, without_contents
from dlm_rag.model.rows import Segment, pack
from dlm_rag.model.shape import DenoiserConfig, tensor_shapes
from dlm_rag.model.store import whole_pages

ROWS_READ = 1024  # logits that exist at a time: the vocabulary is the memory
GIB = 2**30


@dataclass(frozen=True)
class RowSize:
    """The longest row: tokens of each segment that sees itself alone, and of what runs at every step."""

    segments: tuple[int, ...]
    chain: int
    canvas: int
    stored: bool  # whether it has a slot: all but a canvas that runs with its whole prompt

    @classmethod
    def of(
        cls, room: Room, shape: DenoiserConfig, question: int | None, passages: tuple[int, int]
    ) -> "RowSize":
        """In that room; question: tokens of the longest prompt without evidence, None: not known.

        passages: how many, and tokens of the longest.
        """
        count, longest = passages
        block = shape.attention_block or 0
        canvas = room.canvas_length + block  # blocks may have to be whole
        own = room.context_length - room.canvas_length
        if room.layout == "independent":
            most = own - room.passage_length
            asked = most if question is None else min(question, most)
            return cls((min(room.passage_length, longest),) * count + (asked,), canvas + 1, canvas, True)
        prompt = own if question is None else min(own, question + count * longest)
        if room.layout == "prefix" and not block:
            return cls((prompt,), canvas + 1, canvas, True)
        return cls((), prompt + canvas, canvas, bool(block))

    @property
    def tokens(self) -> int:
        """That it sees, its own included."""
        return sum(self.segments) + self.chain


@dataclass(frozen=True)
class DecodeMemory:
    """Bytes on one device, as functions of the rows in the batch."""

    row: RowSize
    weights: int
    kept: int  # keys and values of a token, in all layers
    token: float  # what a token of a call takes on its way through a layer
    position: float  # what a position takes whose logits are read
    linked: float = 0.0  # and what every position of a canvas does beside it, where neighbours are to agree

    @classmethod
    def of(
        cls, shape: DenoiserConfig, dtype: torch.dtype, decode: DecodeConfig, row: RowSize
    ) -> "DecodeMemory":
        """For a denoiser with weights and arithmetic in `dtype`; nothing is allocated."""
        shapes = tensor_shapes(shape)
        if shape.tie_word_embeddings:
            del shapes["lm_head.weight"]
        numbers = sum(int(np.prod(sizes)) for sizes in shapes.values())
        kept = 2 * shape.num_hidden_layers * shape.num_key_value_heads * shape.head_dim * dtype.itemsize
        token, position = _on_the_way(shape, dtype, decode)
        asked, linked = (0, 0) if decode.copy_price is None else chain_bytes(shape.vocab_size, row.tokens)
        return cls(row, dtype.itemsize * numbers, kept, token, position + asked, linked)

    def scratch(self, rows: int) -> int:
        """Tokens of room for segments that run in the same call as the rows."""
        return min(whole_pages(SCRATCH), rows * sum(map(whole_pages, self.row.segments)))

    def slots(self, rows: int) -> float:
        """Keys and values of the rows, and of what is being computed for them."""
        if not self.row.stored:
            return 0.0
        return self.kept * (rows * whole_pages(self.row.tokens) + self.scratch(rows))

    def step(self, rows: int) -> float:
        """What is alive at most while a step is taken, beside weights, slots and pool."""
        new = rows * sum(self.row.segments)
        call = self.token * (rows * self.row.chain + min(SCRATCH, new))
        asked = rows * self.row.canvas
        read = self.position * min(ROWS_READ, asked) + self.linked * asked
        # Too many new segments run by themselves: their keys and values exist twice for a moment.
        apart = min(new, max(SCRATCH, *self.row.segments)) if new > SCRATCH else 0
        prefill = apart * (self.kept + max(self.token, self.kept))
        # A slot whose segments change places; what enters the pool before something leaves it.
        moved = self.kept * (self.row.tokens if self.row.stored else 0)
        return max(call, read, prefill, moved) + self.kept * max((*self.row.segments, 0))

    def without_pool(self, rows: int) -> float:
        """All but the pool."""
        return self.weights + self.slots(rows) + self.step(rows)

    def most_rows(self, room: float) -> int:
        """The largest batch that fits into so many bytes; 0 where not one row does."""
        low, high = 0, 2**16
        while low < high:
            middle = (low + high + 1) // 2
            low, high = (middle, high) if self.without_pool(middle) <= room else (low, middle - 1)
        return low


@dataclass(frozen=True)
class Budget:
    """What a decoder may take: bytes of the pool, and the slots that are there from the start."""

    pool: int
    rows: int
    tokens: int
    scratch: int


def _on_the_way(shape: DenoiserConfig, dtype: torch.dtype, decode: DecodeConfig) -> tuple[float, float]:
    """Bytes that one more token in a call takes, and one more position whose logits are read."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    # What is alive at a time is of one layer; the last is spared what nobody reads.
    dense = 0 if shape.experts is None else shape.dense_layers
    small = replace(shape, num_hidden_layers=min(shape.num_hidden_layers, dense + 2))
    with torch.device("meta"):
        denoiser = Denoiser(small).to(dtype)
    with FakeTensorMode(allow_non_fake_inputs=True), torch.no_grad():
        denoiser = without_contents(denoiser)
        peaks = [_peak_of_call(denoiser, length) for length in (128, 256)]
        logits = [_peak_of_logits(denoiser, decode, count) for count in (64, 128)]
    (less, more), (few, many) = peaks, logits
    return (more[1] - less[1]) / (more[0] - less[0]), (many - few) / 64


def _peak_of_call(denoiser: Denoiser, length: int) -> tuple[int, int]:
    """Tokens and bytes of a call of rows that are not alike."""
    lengths = [length, length + 1, length + 2]
    with LiveBytes() as alive:
        rows = pack([Segment((0,) * n, 0) for n in lengths], denoiser.device, [range(n) for n in lengths])
        denoiser.encode(rows)
    return sum(lengths), alive.peak


def _peak_of_logits(denoiser: Denoiser, decode: DecodeConfig, count: int) -> int:
    """Bytes of reading so many positions, in the ways that the settings ask for."""
    hidden = torch.empty(count, denoiser.config.hidden_size, dtype=denoiser.dtype)
    places, none = torch.empty(count, dtype=torch.int64), torch.empty(0, dtype=torch.int64)
    drawn = places if decode.temperature else none
    numbers = torch.empty(len(drawn))
    by_lot = decode.by_lot
    wanted = Wanted(
        torch.zeros(1, dtype=torch.int64), places, drawn, numbers, numbers, places,
        places if by_lot else None, torch.empty(5, count) if by_lot else None,
    )  # fmt: skip
    with LiveBytes() as alive:
        alive.add(hidden)
        read_proposals(denoiser.read_out(hidden).float(), wanted)
    return alive.peak


def check_bounded(decode: DecodeConfig) -> None:
    """Raises `ConfigError` where the memory of a row has no bound that could be kept."""
    if decode.finished_blocks == "append":
        raise ConfigError(
            "engine.memory_gib cannot be kept with decode.finished_blocks=append, whose rows grow with "
            "every search: leave one out"
        )


def within(memory: DecodeMemory, engine: EngineConfig, device: torch.device, rows: int) -> Budget:
    """The room of a decoder of so many rows under `engine.memory_gib`, before its weights are read.

    On CUDA a share is left for what torch's allocator does not see. Raises `ConfigError` where the budget
    is more than what is free, or does not hold the batch.
    """
    assert engine.memory_gib is not None
    given, free = engine.memory_gib * GIB, free_bytes(device)
    told = f"engine.memory_gib={engine.memory_gib:g}"
    if given > free:
        raise ConfigError(
            f"{told} is more than the {free / GIB:.1f} GiB that are free on this {device.type}: lower it, "
            "or wait until others have ended"
        )
    room = given * (1 - RESERVE if device.type == "cuda" else 1)
    need, host = memory.without_pool(rows), engine.host_pool_gib * GIB if shares_memory(device) else 0.0
    left = room - need - host
    asked = 0 if engine.pool_gib is None else int(engine.pool_gib * GIB)
    if left < asked:
        most = memory.most_rows(room - host - asked)
        kept = f", pools {_gib(asked + host)}" if asked + host else ""
        remedy = f"decode.batch_size={most} fits" if most else "not one question fits"
        raise ConfigError(
            f"{told} is too little for decode.batch_size={rows}: weights take {_gib(memory.weights)}, keys "
            f"and values of the batch {_gib(memory.slots(rows))}, a step {_gib(memory.step(rows))}{kept}; "
            f"{remedy}"
        )
    return Budget(
        int(left) if engine.pool_gib is None else asked, rows, memory.row.tokens * memory.row.stored,
        memory.scratch(rows) * memory.row.stored,
    )  # fmt: skip


def _gib(number: float) -> str:
    return f"{number / GIB:.2g} GiB" if number > GIB / 100 else f"{number / 2**20:.2g} MiB"


def hold(engine: EngineConfig, device: torch.device) -> None:
    """Makes torch's own allocator refuse more than the budget, where it can: on CUDA."""
    if engine.memory_gib is not None and device.type == "cuda":
        whole = torch.cuda.get_device_properties(device).total_memory
        torch.cuda.set_per_process_memory_fraction(min(1.0, engine.memory_gib * GIB / whole), device)
