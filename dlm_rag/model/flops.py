"""FLOPs and bytes of the denoiser's calls, counted from their shapes.

A call of T packed tokens does 2 FLOPs for each weight of a layer and token, and 4 D for each pair of a
query and a key in each head; it reads the weights once, and keys and values once for each row. In the last
layer, tokens that are not read need only keys and values. A token goes through the experts that it chooses;
as many are read as tokens would meet that choose evenly. Activations are not counted. Counting takes
microseconds; a test compares it with torch's FlopCounterMode, which takes half of a step on a CPU.
"""

from collections.abc import Sequence
from dataclasses import astuple, dataclass

from dlm_rag.model.denoiser_config import DenoiserConfig


@dataclass
class FlopCount:
    """What was computed and moved, summed over calls."""

    flops: float = 0.0
    attention_flops: float = 0.0  # those in the products of queries, keys and values
    bytes_moved: float = 0.0
    calls: int = 0
    tokens: int = 0

    def flops_with_backward(self, frozen: bool) -> float:
        """FLOPs of forward and backward, nothing computed twice.

        Backward is twice forward: by the inputs of each product and by its weights. Frozen weights save
        their half; the products of attention have no weights.
        """
        return 2 * self.flops + self.attention_flops if frozen else 3 * self.flops

    def __add__(self, other: "FlopCount") -> "FlopCount":
        return FlopCount(*(a + b for a, b in zip(astuple(self), astuple(other), strict=True)))

    def __sub__(self, other: "FlopCount") -> "FlopCount":
        return FlopCount(*(a - b for a, b in zip(astuple(self), astuple(other), strict=True)))


def count_encode_flops(
    config: DenoiserConfig, lengths: Sequence[int], keys: Sequence[int], through: Sequence[int], size: int,
    pairs: tuple[int, int] | None = None,
) -> FlopCount:  # fmt: skip
    """One `Denoiser.encode`: tokens of each row, keys that it sees, tokens that pass the last layer.

    size: bytes of a number. pairs: of a token and a key it sees, in a layer and in the last one, where not
    every token of a row sees all keys of the row.
    """
    c, layers = config, config.num_hidden_layers
    kv = 2 * c.num_key_value_heads * c.head_dim
    q = c.num_attention_heads * c.head_dim
    own = c.hidden_size * kv  # weights that every token of a layer needs
    rest = 2 * c.hidden_size * q  # those that only what goes on needs
    total, last = sum(lengths), sum(through)
    seen, last_seen = pairs or (
        sum(n * k for n, k in zip(queries, keys, strict=True)) for queries in (lengths, through)
    )
    looks = (layers - 1) * seen + last_seen
    dense = min(c.dense_layers, layers - 1)
    fed = [(dense, total, False), (layers - 1 - dense, total, True), (1, last, c.dense_layers < layers)]
    taken, read = 0.0, 0.0  # by what follows attention
    for number, tokens, sparse in fed:
        each, all_of_them = _feed_forward(c, tokens, sparse)
        taken, read = taken + number * tokens * each, read + number * all_of_them
    return FlopCount(
        flops=2 * (layers * own * total + rest * ((layers - 1) * total + last) + taken) + 4 * q * looks,
        attention_flops=4 * q * looks,
        bytes_moved=size * (layers * (own + rest) - (0 if last else rest) + read + layers * kv * sum(keys)),
        calls=1,
        tokens=total,
    )


def _feed_forward(config: DenoiserConfig, tokens: int, sparse: bool) -> tuple[float, float]:
    """Weights of the net or the experts of a layer that a token goes through, and that `tokens` read."""
    width, e = config.hidden_size, config.experts
    if not sparse or e is None:
        plain = 3.0 * width * config.intermediate_size
        return plain, plain if tokens else 0.0
    one = 3.0 * width * e.moe_intermediate_size
    all_take = width * (e.num_experts + 3.0 * e.shared_intermediate_size)
    met = 1 - (1 - e.num_experts_per_tok / e.num_experts) ** tokens  # were they chosen evenly
    return all_take + e.num_experts_per_tok * one, (all_take if tokens else 0.0) + met * e.num_experts * one


def count_head_flops(config: DenoiserConfig, rows: float, size: int) -> FlopCount:
    """Logits of `rows` hidden states."""
    return FlopCount(
        flops=2 * rows * config.hidden_size * config.vocab_size,
        bytes_moved=size * config.vocab_size * (config.hidden_size + rows),
    )
