"""What a response may take over from its prompt, as the chain of `diffusion/copy_crf.py` takes it.

A trace is made of pieces of question and evidence. A denoiser that looks at the right place may still slip
in a rare name, and tokens committed together may be of two names. With `decode.copy_penalty` a token that
the prompt does not have costs so many nats, and so does every jump from one place of it to another. No
weight knows of it.
"""

from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dlm_rag.tokenizer import Prompt, Tokenizer

Ints = NDArray[np.int64]
SOURCE_UNKNOWN, SOURCE_FIXED = -1, -2  # instead of the number of a position's logits
COPY_CONTEXT_POSITIONS = 16  # to the left and right that say which of the places of a token is meant
SENTENCE_BREAKS = ".!?#"  # behind a token that ends in one of these any piece may begin


class SeparatorTokens:
    """The tokens of a tokenizer that hold pieces together: full stop and marker, end."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._text = tokenizer.token_text
        self.pieces = [list(tokenizer.encode(". ###")), *([end] for end in sorted(tokenizer.end_ids))]
        self.ids = {token for piece in self.pieces for token in piece}

    def may_end_piece(self, token: int) -> bool:
        return self._text(token).strip()[-1:] in ("", *SENTENCE_BREAKS)


@dataclass(frozen=True)
class CopySources:
    """The places of a prompt, and of the joints behind it: (u,) each, as in `CopyCRF`."""

    tokens: Ints
    inverse_count: NDArray[np.float32]
    continues: NDArray[np.bool_]
    may_end: NDArray[np.bool_]
    is_separator: NDArray[np.bool_]

    @classmethod
    def from_prompt(cls, prompt: Prompt, joints: SeparatorTokens) -> "CopySources":
        pieces = [piece for piece in (prompt.head, *prompt.facts, *joints.pieces) if piece]
        tokens = np.concatenate([np.array(piece, np.int64) for piece in pieces])
        kinds, kind, counts = np.unique(tokens, return_inverse=True, return_counts=True)
        ends, joined = (
            np.array([*map(of, kinds.tolist())]) for of in (joints.may_end_piece, joints.ids.__contains__)
        )
        follows = np.ones(len(tokens), np.bool_)
        follows[np.cumsum([0, *map(len, pieces[:-1])])] = False
        return cls(tokens, (1 / counts[kind]).astype(np.float32), follows, ends[kind], joined[kind])

    def build_chain(self, canvas: Ints, positions: Ints, mask_id: int) -> Ints:
        """(2, l): of `positions` and what is around them the number of the logits, or what else is known;
        and the token that stands there.

        canvas: (length,) what stands there, `mask_id` where nothing does. positions: (n,) into it,
        ascending, or the one behind its end.
        """
        first, last = positions[[0, -1]]
        around = np.arange(first - COPY_CONTEXT_POSITIONS, last + 1 + COPY_CONTEXT_POSITIONS)
        inside = (around >= 0) & (around < len(canvas))
        ids = np.append(canvas, mask_id)[np.where(inside, around, len(canvas))]
        source = np.where(ids != mask_id, SOURCE_FIXED, SOURCE_UNKNOWN)
        source[positions - around[0]] = np.arange(len(positions))
        return np.stack([source, ids])


def batch_copy_sources(
    copyings: Sequence[CopySources], chains: Sequence[Ints], first: Sequence[int]
) -> list[NDArray[Any]]:
    """Several rows as the arrays of `CopyCRF`, but for the prices; first: of each the number of its first
    logits."""
    widest, longest = max(len(each.tokens) for each in copyings), max(chain.shape[1] for chain in chains)
    columns = ([getattr(c, item.name) for c in copyings] for item in fields(CopySources))
    tables = [np.stack([np.pad(array, (0, widest - len(array))) for array in one]) for one in columns]
    shape = longest, len(chains)
    source, fixed = np.full(shape, SOURCE_UNKNOWN), np.zeros(shape, np.int64)
    for row, (chain, begin) in enumerate(zip(chains, first, strict=True)):
        length = chain.shape[1]
        source[:length, row] = chain[0] + np.where(chain[0] >= 0, begin, 0)
        fixed[:length, row] = chain[1]
    at = np.nonzero(source >= 0)
    return [*tables, np.stack([*at, source[at]]), source == SOURCE_UNKNOWN, fixed]
