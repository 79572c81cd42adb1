"""Bytes and FLOPs of the denoiser's calls, counted, and what the device could do at best, measured.

A call of T packed tokens does 2 FLOPs for each weight of a layer and token, and 4 D for each pair of a
query and a key in each head; it reads the weights once, and keys and values once for each row. Of
the last layer, tokens that are not read need keys and values only. Activations are not counted.
"""

import time
from collections.abc import Sequence
from dataclasses import astuple, dataclass
from typing import Any

import torch
from torch import Tensor

from dlm_rag.model.context import StoredRows
from dlm_rag.model.denoiser import Denoiser


@dataclass
class Work:
    """What was computed and moved, summed over calls."""

    flops: float = 0.0
    bytes: float = 0.0
    calls: int = 0
    tokens: int = 0

    def __sub__(self, other: "Work") -> "Work":
        return Work(*(a - b for a, b in zip(astuple(self), astuple(other), strict=True)))


@dataclass(frozen=True)
class Roofline:
    """FLOP/s of a large matrix product and bytes/s of a large copy, both ways counted."""

    flops: float
    bytes: float

    def seconds(self, work: Work) -> float:
        """The least time for the work, if nothing were lost."""
        return max(work.flops / self.flops, work.bytes / self.bytes)

    def bound(self, work: Work) -> str:
        """Which of the two it is."""
        return "compute" if work.flops / self.flops > work.bytes / self.bytes else "memory"


def count_work(denoiser: Denoiser) -> Work:
    """Counts all later calls of the denoiser into what is returned."""
    work, c = Work(), denoiser.config
    size = denoiser.embed_tokens.weight.element_size()
    encode, read_out = denoiser.encode, denoiser.read_out
    kv = 2 * c.num_key_value_heads * c.head_dim
    q = c.num_attention_heads * c.head_dim
    own = c.hidden_size * kv  # weights that every token of a layer needs
    rest = 2 * c.hidden_size * q + 3 * c.hidden_size * c.intermediate_size
    layers = c.num_hidden_layers

    def counting_encode(
        ids: Tensor, positions: Tensor, lengths: Sequence[int], context: Any = None, **named: Any
    ) -> Any:
        seen = [0] * len(lengths)
        if context is not None:
            seen = list(context.seen) if isinstance(context, StoredRows) else [k.shape[2] for k in context]
        read = named.get("read")
        through = list(lengths) if read is None else [len(tokens) for tokens in read]
        keys = [a + b for a, b in zip(seen, lengths, strict=True)]
        total, last = sum(lengths), sum(through)
        pairs = (layers - 1) * sum(n * k for n, k in zip(lengths, keys, strict=True))
        pairs += sum(n * k for n, k in zip(through, keys, strict=True))
        work.flops += 2 * layers * own * total + 2 * rest * ((layers - 1) * total + last) + 4 * q * pairs
        work.bytes += size * (layers * (own + rest) - (0 if last else rest) + layers * kv * sum(keys))
        work.calls += 1
        work.tokens += total
        return encode(ids, positions, lengths, context, **named)

    def counting_read_out(hidden: Tensor) -> Tensor:
        work.flops += 2 * hidden.shape[0] * c.hidden_size * c.vocab_size
        work.bytes += size * c.vocab_size * (c.hidden_size + hidden.shape[0])
        return read_out(hidden)

    denoiser.encode = counting_encode  # type: ignore[method-assign, assignment]
    denoiser.read_out = counting_read_out  # type: ignore[method-assign]
    return work


def measure_roofline(device: torch.device, dtype: torch.dtype) -> Roofline:
    """The best of ten matrix products and ten copies on this device."""
    side, length = (8192, 2**30) if device.type == "cuda" else (2048, 2**27)
    a, b = (torch.randn(side, side, device=device).to(dtype) for _ in range(2))
    source = torch.ones(length // dtype.itemsize, dtype=dtype, device=device)
    target = torch.empty_like(source)

    def best(run: Any) -> float:
        times = []
        for _ in range(10):
            start = time.perf_counter()
            run()
            if device.type == "cuda":
                torch.cuda.synchronize(device)
            times.append(time.perf_counter() - start)
        return min(times)

    return Roofline(2 * side**3 / best(lambda: a @ b), 2 * length / best(lambda: target.copy_(source)))
