"""FLOPs and bytes of the denoiser's calls, counted from their shapes.

A call of T packed tokens does 2 FLOPs for each weight of a layer and token, and 4 D for each pair of a
query and a key in each head; it reads the weights once, and keys and values once for each row. Of
the last layer, tokens that are not read need keys and values only. Activations are not counted.
"""

from collections.abc import Sequence
from dataclasses import astuple, dataclass
from typing import Any

from torch import Tensor

from dlm_rag.model.denoiser import Denoiser, seen_by
from dlm_rag.model.shape import DenoiserConfig


@dataclass
class Work:
    """What was computed and moved, summed over calls."""

    flops: float = 0.0
    bytes: float = 0.0
    calls: int = 0
    tokens: int = 0

    def __add__(self, other: "Work") -> "Work":
        return Work(*(a + b for a, b in zip(astuple(self), astuple(other), strict=True)))

    def __sub__(self, other: "Work") -> "Work":
        return Work(*(a - b for a, b in zip(astuple(self), astuple(other), strict=True)))


def encode_work(
    config: DenoiserConfig, lengths: Sequence[int], keys: Sequence[int], through: Sequence[int], size: int
) -> Work:
    """One `Denoiser.encode`: tokens of each row, keys that it sees, tokens that pass the last layer.

    size: bytes of a number.
    """
    c, layers = config, config.num_hidden_layers
    kv = 2 * c.num_key_value_heads * c.head_dim
    q = c.num_attention_heads * c.head_dim
    own = c.hidden_size * kv  # weights that every token of a layer needs
    rest = 2 * c.hidden_size * q + 3 * c.hidden_size * c.intermediate_size
    total, last = sum(lengths), sum(through)
    pairs = (layers - 1) * sum(n * k for n, k in zip(lengths, keys, strict=True))
    pairs += sum(n * k for n, k in zip(through, keys, strict=True))
    return Work(
        flops=2 * layers * own * total + 2 * rest * ((layers - 1) * total + last) + 4 * q * pairs,
        bytes=size * (layers * (own + rest) - (0 if last else rest) + layers * kv * sum(keys)),
        calls=1,
        tokens=total,
    )


def head_work(config: DenoiserConfig, rows: float, size: int) -> Work:
    """Logits of `rows` hidden states."""
    return Work(
        flops=2 * rows * config.hidden_size * config.vocab_size,
        bytes=size * config.vocab_size * (config.hidden_size + rows),
    )


def count_work(denoiser: Denoiser) -> Work:
    """Counts all later calls of the denoiser into what is returned."""
    work, config = Work(), denoiser.config
    size = denoiser.embed_tokens.weight.element_size()
    encode, read_out = denoiser.encode, denoiser.read_out

    def count(more: Work) -> None:
        for name, value in vars(work + more).items():
            setattr(work, name, value)

    def counting_encode(
        ids: Tensor,
        positions: Tensor,
        lengths: Sequence[int],
        context: Any = None,
        *more: Any,
        **named: Any,
    ) -> Any:
        seen = seen_by(context, len(lengths))
        read = named.get("read")
        through = lengths if read is None else [len(tokens) for tokens in read]
        stretches = named.get("stretches")
        own = lengths if stretches is None else stretches.lengths
        keys = [a + b for a, b in zip(seen, own, strict=True)]
        count(encode_work(config, lengths, keys, through, size))
        return encode(ids, positions, lengths, context, *more, **named)

    def counting_read_out(hidden: Tensor) -> Tensor:
        count(head_work(config, hidden.shape[0], size))
        return read_out(hidden)

    denoiser.encode = counting_encode  # type: ignore[method-assign]
    denoiser.read_out = counting_read_out  # type: ignore[method-assign]
    return work
