"""BM25 for queries that follow one another: only the words that changed are added and taken away.

A fresh search adds the columns of all words of a query into one score per passage. While a canvas
fills in, successive queries differ in a few words, so `IncrementalSearch` keeps those scores between
the searches of one question. Kept sums are integers, which neither drift nor depend on the order; they
only choose candidates. The candidates' scores are then summed in float32 word by word, and ranked by
the heap of bm25s, as a fresh search does: the result is the same, ties included.
"""

import threading
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np
from bm25s.numba.selection import _numba_sorted_top_k
from numba import njit
from numpy.typing import NDArray

from dlm_rag.retrieval.base import Ranking
from dlm_rag.retrieval.numba_cache import enable_numba_cache

SCORE_UNIT = 2.0**-20  # of the kept sums
SUM_BLOCK_PASSAGES = 512  # passages whose best sum is looked at before any of them is

enable_numba_cache(_numba_sorted_top_k)


@dataclass
class IncrementalState:
    """The state of one question: a sum for each passage, the words in it, the last result."""

    sums: NDArray[np.int32]
    words: Counter[int] = field(default_factory=Counter)
    ranking: Ranking = field(default_factory=list)


class IncrementalSearch:
    """Searches over the columns of a bm25s index, one state for each asker, in up to `memory` bytes.

    data, indices, indptr: the scores (float32, above 0, at most `largest`) and the passages (int32,
    ascending) of each word's column. Safe to be called from several threads.
    """

    def __init__(
        self,
        data: NDArray[np.float32],
        indices: NDArray[np.int32],
        indptr: NDArray[np.int32],
        passages: int,
        largest: float,
        memory: int,
    ) -> None:
        self._columns = (data, indices, indptr)
        self._passages, self._largest = passages, largest
        self._padded = -(-passages // SUM_BLOCK_PASSAGES) * SUM_BLOCK_PASSAGES
        self._most = memory // (4 * self._padded)
        self._kept: dict[str, IncrementalState] = {}
        self._lock = threading.Lock()

    def forget(self, asker: str) -> None:
        """Drops the state of a question that is finished."""
        with self._lock:
            self._kept.pop(asker, None)

    def rank(self, asker: str, query: Sequence[int], depth: int) -> Ranking | None:
        """The best passages for the words `query` (ids, in order, repeated ones kept).

        None where there is no memory for another asker, or the sums could overflow.
        """
        if len(query) * (self._largest / SCORE_UNIT + 1) >= 2**31 - 1:
            return None
        with self._lock:
            if asker not in self._kept:
                if len(self._kept) >= self._most:
                    return None
                self._kept[asker] = IncrementalState(np.zeros(self._padded, dtype=np.int32))
            return self._rank(self._kept[asker], query, depth)

    def _rank(self, state: IncrementalState, query: Sequence[int], depth: int) -> Ranking:
        words = Counter(query)
        change = {word: words[word] - state.words[word] for word in words.keys() | state.words.keys()}
        change = {word: count for word, count in change.items() if count}
        if self._postings(change) > self._postings(words):
            state.sums.fill(0)
            change = words
        if change:
            ids, counts = (np.fromiter(part, np.int64) for part in (change.keys(), change.values()))
            _add_columns(state.sums, *self._columns, ids, counts)
        state.words = words
        state.ranking = self._top(state, np.array(query, dtype=np.int64), depth)
        return state.ranking

    def _postings(self, words: Iterable[int]) -> int:
        indptr = self._columns[2]
        return sum(int(indptr[word + 1] - indptr[word]) for word in words)

    def _top(self, state: IncrementalState, query: NDArray[np.int64], depth: int) -> Ranking:
        # The passages found last time are still that good: none below the worst of them can be best.
        floor = int(state.sums[state.ranking].min()) if len(state.ranking) >= depth else 0
        # by numpy: numba does not use vectors here
        tops = state.sums.reshape(-1, SUM_BLOCK_PASSAGES).max(axis=1)
        rows = _find_candidates(state.sums, tops, self._passages, depth, len(query), floor)
        scores = _compute_exact_scores(rows, query, *self._columns)
        best = np.sort(scores)[::-1][: depth + 1]
        if floor and (best[1:] == best[:-1]).any():
            # Which of equals is kept follows from all that the heap of a fresh search had seen before.
            rows = _find_candidates(state.sums, tops, self._passages, depth, len(query), 0)
            scores = _compute_exact_scores(rows, query, *self._columns)
        values, places = _numba_sorted_top_k(scores, depth)
        return [int(rows[place]) for value, place in zip(values, places, strict=True) if value > 0]


@enable_numba_cache
@njit(nogil=True)
def _add_columns(sums, data, indices, indptr, ids, counts):  # type: ignore[no-untyped-def]
    """Adds `counts` times the columns `ids`, in whole units; a score is never less than one."""
    for i in range(len(ids)):
        for j in range(indptr[ids[i]], indptr[ids[i] + 1]):
            sums[indices[j]] += np.int32(counts[i] * max(1.0, np.rint(data[j] / SCORE_UNIT)))


@enable_numba_cache
@njit(nogil=True)
def _find_candidates(sums, tops, passages, depth, words, floor):  # type: ignore[no-untyped-def]
    """Rows, ascending, that may be among the `depth` best by exact scores.

    With `floor` 0 they are all that enter the heap of a fresh search at any time. A sum and the exact
    score differ by less than a unit for each word, and by the rounding of float32 in each addition.
    """
    rows = np.empty(1024, dtype=np.int64)
    count = 0
    best = np.zeros(depth, dtype=np.int64)  # ascending
    lowest = np.int64(floor)
    slack = 2 * words + 1 + np.int64(2.1 * words * lowest * 2.0**-24)
    for block in range(len(tops)):
        start = block * SUM_BLOCK_PASSAGES
        if (start >= depth or floor > 0) and tops[block] <= max(0, lowest - slack):
            continue
        for i in range(start, min(start + SUM_BLOCK_PASSAGES, passages)):
            value = np.int64(sums[i])
            first = floor == 0 and i < depth  # these fill the heap, whatever they are
            if not first and value <= max(0, lowest - slack):
                continue
            if count == len(rows):
                larger = np.empty(2 * count, dtype=np.int64)
                larger[:count] = rows
                rows = larger
            rows[count] = i
            count += 1
            if value > best[0]:
                place = 0
                while place + 1 < depth and best[place + 1] < value:
                    best[place] = best[place + 1]
                    place += 1
                best[place] = value
                if best[0] > lowest:
                    lowest = best[0]
                    slack = 2 * words + 1 + np.int64(2.1 * words * lowest * 2.0**-24)
    return rows[:count]


@enable_numba_cache
@njit(nogil=True)
def _compute_exact_scores(rows, query, data, indices, indptr):  # type: ignore[no-untyped-def]
    """Scores (float32) of rows, added up word by word in the order of the query."""
    scores = np.zeros(len(rows), dtype=np.float32)
    for word in query:
        first, last = indptr[word], indptr[word + 1]
        for i in range(len(rows)):
            low, high = first, last
            while low < high:
                middle = (low + high) // 2
                if indices[middle] < rows[i]:
                    low = middle + 1
                else:
                    high = middle
            if low < last and indices[low] == rows[i]:
                scores[i] += data[low]
            first = low  # rows ascend
    return scores
