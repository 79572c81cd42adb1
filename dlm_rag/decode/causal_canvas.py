"""Writing from left to right: autoregressive, or speculative (LinearSpec of Nemotron-Labs-Diffusion).

In speculative decoding two passes of one model take turns. The draft fills in the block that begins with
the last written token. The causal pass reads the draft and predicts each token from those before it: what
the draft has in common with these predictions stays, with one token more. So the text is that of
autoregressive decoding, whatever the drafts are; these are what a query may hold besides it.
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from dlm_rag.config import DecodeConfig
from dlm_rag.decode.canvas import Canvas, CanvasChange, Choose, Span, TokenIds
from dlm_rag.diffusion.commit_rules import Proposals


@dataclass
class CausalCanvas(Canvas):
    """A canvas written from left to right.

    block_size: of a draft, the last written token included; 1: there are no drafts. end_ids: behind one of
    these nothing is written.

    Invariant: the written positions are the first ones, and `draft` is a guess at those behind them.
    """

    block_size: int = 1
    end_ids: Collection[int] = ()
    draft: TokenIds = field(default_factory=lambda: np.zeros(0, np.int64))
    drafts_next: bool = False  # whether the next pass makes a draft; the first one reads the prompt alone

    @property
    def is_causal_pass(self) -> bool:
        return not self.drafts_next

    @property
    def model_ids(self) -> TokenIds:
        ids, written = self.ids.copy(), self.first_masked
        ids[written : written + len(self.draft)] = self.draft
        return ids

    @property
    def seen_end(self) -> int:
        """Up to where the next pass looks."""
        written = self.first_masked
        if self.drafts_next:
            return min(written + self.block_size - 1, self.length - 1)
        return written + len(self.draft)

    @property
    def positions_to_predict(self) -> NDArray[np.int64]:
        """Ascending; of a draft those that are masked, causally each that a token seen predicts."""
        return np.arange(self.first_masked, self.seen_end + self.is_causal_pass)

    def write_step(
        self, proposals: Proposals, settings: DecodeConfig, blocks: Sequence[Span], choose: Choose
    ) -> CanvasChange:
        """Takes proposals as the draft, or commits what the draft has in common with them and the next."""
        if self.drafts_next:
            self.draft, self.drafts_next = proposals.token_ids, False
            return CanvasChange()
        accepted = count_accepted(self.draft, proposals.token_ids, self.end_ids)
        committed = proposals.subset(np.arange(accepted))
        self.commit(committed)
        self.draft = self.draft[:0]
        self.drafts_next = self.block_size > 1 and self.length - self.first_masked > 1
        return CanvasChange(committed)


def count_accepted(draft: TokenIds, predicted: TokenIds, end_ids: Collection[int] = ()) -> int:
    """How many of the predicted tokens (n + 1,) stay, of which each has read the draft (n,) before it.

    Those that the draft has too, up to the first that it has not, and this one; none behind an end token.
    """
    differ = np.flatnonzero(draft != predicted[: len(draft)])
    count = int(differ[0]) + 1 if len(differ) else len(predicted)
    ends = np.flatnonzero(np.isin(predicted[:count], list(end_ids)))
    return int(ends[0]) + 1 if len(ends) else count
