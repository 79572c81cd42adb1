"""Words of question and passages, as tokens: a word of the response goes on as there (`copy_words`).

A name that is written token by token breaks where one of them is read elsewhere ("Desardardsins"). A word
that no text begins with is left alone: an answer need not be copied.
"""

from collections.abc import Collection, Iterable, Sequence
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from dlm_rag.tokenizer import Tokenizer

WORD_END = -1
MAX_KEPT_TEXTS = 512  # whose words are kept, some 0.1 MB each
_BLANKS = ("Ġ", "▁", "Ċ", "ĉ")  # white space before a token, as byte pairs and Llama's tokenizer write it
_OPENING = "\"'([{“‘«„"


class WordTable:
    """How the words of texts go on, in tokens of one tokenizer."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        pieces = tokenizer.inner.convert_ids_to_tokens(list(range(len(tokenizer.inner))))
        self._begins = np.array([piece.startswith(_BLANKS) for piece in pieces])
        self._continues = ~self._begins & [piece[:1].isalnum() for piece in pieces]
        self._read = lru_cache(MAX_KEPT_TEXTS)(self._read_words)

    def _read_words(self, text: str) -> dict[tuple[int, ...], set[int]]:
        """Returns the tokens that come after each beginning of a word; `WORD_END` where it is whole."""
        found: dict[tuple[int, ...], set[int]] = {}
        words = set(text.split())
        for word in words.union(word.lstrip(_OPENING) for word in words) - {""}:
            ids = self._tokenizer.encode_uncached(f" {word}")
            for n in range(1, len(ids) + 1):
                found.setdefault(ids[:n], set()).add(ids[n] if n < len(ids) else WORD_END)
        return found

    def find_barred(self, written: Sequence[int], texts: Collection[str]) -> NDArray[np.bool_] | None:
        """Returns (V,) which tokens may not follow the written ones; None where all may.

        Where the word so far begins words of the texts, it goes on as one of these; it ends, by a blank or
        a sign, where one of these does.
        """
        start = next((n for n in range(len(written) - 1, -1, -1) if self._begins[written[n]]), None)
        if start is None:
            return None
        word = tuple(written[start:])
        follow = set[int]().union(*(self._read(text).get(word, ()) for text in texts))
        going_on = [token for token in follow if token != WORD_END and self._continues[token]]
        if not follow:
            return None
        barred = np.ones_like(self._continues) if len(going_on) == len(follow) else self._continues.copy()
        barred[going_on] = False
        return barred

    def count_allowed(self, written: Sequence[int], chosen: Iterable[int], texts: Collection[str]) -> int:
        """Returns how many of the tokens chosen to follow go on with words as texts do; the first does."""
        ids, count = [*written], 0
        for token in chosen:
            barred = self.find_barred(ids, texts) if count else None
            if barred is not None and barred[token]:
                break
            ids.append(token)
            count += 1
        return count
