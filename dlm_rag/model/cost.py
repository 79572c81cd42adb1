"""FLOPs and bytes of the denoiser's calls, counted from their shapes.

A call of T packed tokens does 2 FLOPs for each weight of a layer and token, and 4 D for each pair of a
query and a key in each head; it reads the weights once, and keys and values once for each row. Of
the last layer, tokens that are not read need keys and values only. Activations are not counted. Counting
takes microseconds; torch's FlopCounterMode, half of a step on a CPU, is what a test holds it against.
"""

from collections.abc import Sequence
from dataclasses import astuple, dataclass

from dlm_rag.model.shape import DenoiserConfig


@dataclass
class Work:
    """What was computed and moved, summed over calls."""

    flops: float = 0.0
    attention: float = 0.0  # so many of them in the products of queries, keys and values
    bytes: float = 0.0
    calls: int = 0
    tokens: int = 0

    def with_backward(self, frozen: bool) -> float:
        """FLOPs of forward and backward, nothing computed twice.

        Backward is twice forward: by the inputs of each product and by its weights. Frozen weights spare
        their own half; the products of attention have none.
        """
        return 2 * self.flops + self.attention if frozen else 3 * self.flops

    def __iadd__(self, other: "Work") -> "Work":
        self.flops += other.flops
        self.attention += other.attention
        self.bytes += other.bytes
        self.calls += other.calls
        self.tokens += other.tokens
        return self

    def __add__(self, other: "Work") -> "Work":
        return Work(*(a + b for a, b in zip(astuple(self), astuple(other), strict=True)))

    def __sub__(self, other: "Work") -> "Work":
        return Work(*(a - b for a, b in zip(astuple(self), astuple(other), strict=True)))


def encode_work(
    config: DenoiserConfig, lengths: Sequence[int], keys: Sequence[int], through: Sequence[int], size: int,
    pairs: tuple[int, int] | None = None,
) -> Work:  # fmt: skip
    """One `Denoiser.encode`: tokens of each row, keys that it sees, tokens that pass the last layer.

    size: bytes of a number. pairs: of a token and a key it sees, in a layer and in the last one, where not
    every token of a row sees all keys of the row.
    """
    c, layers = config, config.num_hidden_layers
    kv = 2 * c.num_key_value_heads * c.head_dim
    q = c.num_attention_heads * c.head_dim
    own = c.hidden_size * kv  # weights that every token of a layer needs
    rest = 2 * c.hidden_size * q + 3 * c.hidden_size * c.intermediate_size
    total, last = sum(lengths), sum(through)
    seen, last_seen = pairs or (
        sum(n * k for n, k in zip(queries, keys, strict=True)) for queries in (lengths, through)
    )
    looks = (layers - 1) * seen + last_seen
    return Work(
        flops=2 * layers * own * total + 2 * rest * ((layers - 1) * total + last) + 4 * q * looks,
        attention=4 * q * looks,
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
