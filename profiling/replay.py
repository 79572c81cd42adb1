"""Recorded decodes run again with another denoiser: its cost on a real pattern of commits and evidence.

The tokens that a denoiser of random weights proposes mean nothing; what a step costs depends only on
which positions are masked and which passages are new. Both are taken from recorded rollouts.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from dlm_rag.decode.rows import Row

from dlm_rag.decode.decoder import Decoder
from dlm_rag.decode.rollout import Committed, Rollout
from dlm_rag.diffusion.commit import Proposals
from dlm_rag.model.denoiser import Denoiser
from dlm_rag.model.shape import DenoiserConfig
from dlm_rag.retrieval.base import Ranking, Retriever
from dlm_rag.retrieval.query import Query
from dlm_rag.tokenizer import Prompt

SHAPES = {  # hidden, layers, heads, key-value heads, feed-forward, vocabulary
    "100m": (768, 12, 12, 12, 2048, 16_384),
    "1b": (2048, 22, 32, 8, 5632, 32_000),
    "7b": (3584, 28, 28, 4, 18_944, 152_064),  # Dream's
}
PASSAGE_LENGTH, QUESTION_LENGTH, CANVAS_LENGTH = 100, 20, 64


def random_denoiser(shape: str, device: torch.device, dtype: torch.dtype) -> Denoiser:
    """A denoiser of a shape in `SHAPES` with random weights."""
    hidden, layers, heads, kv_heads, inner, vocabulary = SHAPES[shape]
    config = DenoiserConfig(
        vocab_size=vocabulary,
        hidden_size=hidden,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        head_dim=hidden // heads,
        intermediate_size=inner,
        mask_token_id=0,
        passage_length=PASSAGE_LENGTH,
        canvas_length=CANVAS_LENGTH,
    )
    with torch.device(device):
        denoiser = Denoiser(config).eval()
    for parameter in denoiser.parameters():
        parameter.data = parameter.data.to(dtype)  # the rotary frequencies stay in float32
    return denoiser


class ReplayTokenizer:
    """Random ids for every text, as many for each passage and for each question."""

    mask_id, end_ids, special_ids = 0, frozenset({1}), frozenset({0, 1})

    def __init__(self, vocabulary: int) -> None:
        self._vocabulary = vocabulary
        self._kept: dict[str, tuple[int, ...]] = {}
        self.encode = self  # the decoder may clear what is kept

    def cache_clear(self) -> None:
        self._kept.clear()

    def prompt(self, question: str, passages: list[str]) -> Prompt:
        facts = tuple(self._ids(passage, PASSAGE_LENGTH) for passage in passages)
        return Prompt(self._ids(question, QUESTION_LENGTH), facts, ())

    def _ids(self, text: str, length: int) -> tuple[int, ...]:
        if text not in self._kept:
            rng = np.random.default_rng(list(text.encode()))
            self._kept[text] = tuple(rng.integers(2, self._vocabulary, length).tolist())
        return self._kept[text]

    def query_text(self, ids: list[int]) -> str:
        return ""

    def spans(self, ids: list[int]) -> tuple[str, list[tuple[int, int]]]:
        return "", [(0, 0)] * len(ids)


class ReplayRetriever(Retriever):
    """Finds for each question what its recorded decode had found, search by search."""

    def __init__(self, recorded_with: Retriever, recorded: Mapping[str, Rollout]) -> None:
        super().__init__(recorded_with.corpus, recorded_with.top_k)
        rows = {passage.id: row for row, passage in enumerate(recorded_with.corpus)}
        self._plan = {
            name: [[rows[found] for found in step.passage_ids] for step in rollout.steps]
            for name, rollout in recorded.items()
        }
        self._searches: Counter[str] = Counter()

    def key(self, query: Query) -> Any:
        return object()  # every search is made

    def forget(self, asker: str) -> None:
        del self._searches[asker]

    def rank(self, queries: Sequence[Query], depth: int) -> list[Ranking]:
        found = []
        for query in queries:
            found.append(self._plan[query.asker][self._searches[query.asker]])
            self._searches[query.asker] += 1
        return found


class Replay(Decoder):
    """Commits at each step what the recorded decode had committed, whatever is proposed."""

    recorded: Mapping[str, Rollout]

    def _commit(self, rows: list[Row]) -> None:
        for row in rows:
            committed = self.recorded[row.question.id].steps[row.step].committed
            positions = np.array([c.position for c in committed], dtype=np.int64)
            tokens = np.array([c.token_id for c in committed], dtype=np.int64)
            nothing = np.ones(len(committed))
            row.canvas.commit(Proposals(positions, tokens, nothing, nothing, nothing, nothing))
            row.committed = tuple(Committed(c.position, c.token_id, "", 1.0) for c in committed)
