"""Who sees whom inside a row, for families in which not every token sees every other.

A pattern is a function of tensors that broadcast: (query position, key position, key segment) -> whether
the query sees the key. Positions count from the first token of the prompt; the segment is 0 in the prompt
and 1 in the canvas. A family gives one pattern a layer (`DenoiserConfig.attention_patterns`). Blocks of
tokens have a faster form of their own: `Segment.block`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # configs name patterns, and `--help` does not wait for torch
    from torch import Tensor

AttentionPattern = Callable[[Any, Any, Any], Any]  # tensors


def sliding_window(size: int) -> AttentionPattern:
    """Each token sees itself and the `size - 1` tokens before and after it."""
    return lambda query, key, segment: (query - key).abs() < size


def prefix_causal(query: Tensor, key: Tensor, segment: Tensor) -> Tensor:
    """The prompt sees itself; a token of the canvas sees the prompt and the canvas up to itself."""
    return (segment == 0) | (key <= query)
