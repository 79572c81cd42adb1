"""Words of question and passages, as tokens: those of the response are the same (`copy_words`).

A name that is written token by token breaks where one of them is read elsewhere ("Desardardsins").
"""

import re
import unicodedata
from collections.abc import Collection, Sequence
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from dlm_rag.text import JOINED_RUN, MAX_TITLE_WORDS
from dlm_rag.tokenizer import Tokenizer

WORD_END = -1
NO_CHARACTER = "\ufffd"  # stands in texts for bytes that are no whole character
ANSWER_MARK = "###"
COPIED_CONFIDENCE = 0.5  # from which a token that a text has there is committed
MARK_CONFIDENCE = 0.3  # from which the sign after a title is
NEVER = 2.0  # a confidence that no guess has
OWN_WORDS = "yes no unknown unclear"  # of answers, that no text need have
MAX_KEPT_TEXTS = 2048  # whose words are kept, some 60 kB each of 200 words
MAX_KEPT_WORDS = 65536  # as tokens, some 10 MB
MAX_WORD_TOKENS = 32  # every beginning of a longer one would be kept, and a longer title fill a canvas
_BLANKS = ("Ġ", "▁", "Ċ", "ĉ")  # white space before a token, as byte pairs and Llama's tokenizer write it
_JOINED_PART = re.compile(rf"{JOINED_RUN.pattern}[^\w\s]*")
_OPENING = re.compile(r"^[\"'(\[{“‘«„]+|^\W+(?=[^\W\d])")  # before a number only what does not change it


class WordTable:
    """How the words of texts go on, in tokens of one tokenizer; of scripts with blanks between words."""

    def __init__(self, tokenizer: Tokenizer, vocabulary: int, rows: int = 1) -> None:
        """vocabulary: V, how many ids the denoiser has; the tokenizer may have more or fewer. rows: that
        are decoded together, and read up to 16 texts each."""
        self._tokenizer, inner, ids = tokenizer, tokenizer.inner.backend_tokenizer, range(vocabulary)
        self._decode = inner.decode
        self._begins = np.array([(inner.id_to_token(n) or "").startswith(_BLANKS) for n in ids])
        texts = inner.decode_batch([[n] for n in ids], skip_special_tokens=False)
        kinds = [unicodedata.category(text[:1] or " ")[0] for text in texts]
        self._digits, self._points = [text.strip().isdecimal() for text in texts], np.isin(texts, [*".,:"])
        self._continues = ~self._begins & np.isin(kinds, [*"LMN"])
        # Of a character that is no token: a letter where a text goes on with it, else perhaps a sign.
        self._may_continue = self._continues | [text.startswith(NO_CHARACTER) for text in texts]
        # Of blanks alone a word, for these stand before a number; of scripts without blanks none.
        opens = [(text.lstrip() or text.lstrip(" ") or "1")[0] for text in texts]
        opens = ["-" if JOINED_RUN.match(sign) else unicodedata.category(sign)[0] for sign in opens]
        self._begins_word = self._begins & np.isin(opens, [*"LMN"])
        self._marks = np.array(["#" in text for text in texts])
        self._ends_name = self._marks | [";" in text for text in texts]
        self._ends = [n for n in tokenizer.end_ids if n < vocabulary]
        self._names_titles = tokenizer.template.answer == "titled"
        self._encode = lru_cache(MAX_KEPT_WORDS)(self._encode_word)
        self._encode_title = lru_cache(MAX_KEPT_TEXTS)(self._encode_after_a_blank)
        self._read = lru_cache(max(MAX_KEPT_TEXTS, 16 * rows))(self._read_words)
        self._read_firsts = lru_cache(max(MAX_KEPT_TEXTS, 16 * rows))(self._list_firsts)

    def _read_words(self, text: str) -> dict[tuple[int, ...], tuple[int, ...]]:
        """Returns the tokens that come after each beginning of a word; `WORD_END` where it is whole."""
        found: dict[tuple[int, ...], tuple[int, ...]] = {}
        # Of a word with scripts without blanks the rest: a name, a year.
        parts = ((word, part) for word in text.split() for part in _JOINED_PART.sub(" ", word).split())
        words = {part for word, part in parts if part == word or any(map(str.isalnum, part))}
        for word in words.union(_OPENING.sub("", word) for word in words) - {""}:
            ids = self._encode(word)
            for n in range(1, len(ids) + 1 if len(ids) <= MAX_WORD_TOKENS else 0):
                after = {*ids[n : n + 1]} or {WORD_END}
                if n < len(ids) and not self._may_continue[ids[n]] and not self._is_in_number(ids, n):
                    after.add(WORD_END)  # a sign follows
                found[ids[:n]] = tuple(after.union(found.get(ids[:n], ())))
        return found

    def _is_in_number(self, ids: Sequence[int], n: int) -> bool:
        """Whether a token is the point of a number: in "9:15" the word does not end after the 9."""
        around = 0 < n < len(ids) - 1 and self._digits[ids[n - 1]] and self._digits[ids[n + 1]]
        return bool(around and self._points[ids[n]])

    def _encode_after_a_blank(self, text: str) -> tuple[int, ...]:
        return self._tokenizer.encode_uncached(f"x {text}")[len(self._tokenizer.encode_uncached("x")) :]

    def _encode_word(self, word: str) -> tuple[int, ...]:
        """Returns its tokens from the last one on that a blank begins."""
        ids = self._tokenizer.encode_uncached(f"a {word}")  # some put a blank before each text
        return ids[max((n for n, token in enumerate(ids) if self._begins[token]), default=len(ids)) :]

    def _list_firsts(self, text: str) -> list[int]:
        return [word[0] for word in self._read(text) if len(word) == 1]

    def _find_word(self, written: Sequence[int]) -> tuple[int, ...]:
        """Returns the tokens of the word that was begun last; none where no token begins one."""
        start = next((n for n in range(len(written) - 1, -1, -1) if self._begins[written[n]]), len(written))
        return tuple(written[start:])

    def _ends_in_sign(self, word: tuple[int, ...]) -> bool:
        text = self._decode([*word]).strip().strip(NO_CHARACTER)
        sign = bool(text) and unicodedata.category(text[-1])[0] in "PS"
        return sign and not (self._marks[word[-1]] or JOINED_RUN.search(text))

    def _follow(self, word: tuple[int, ...], texts: Collection[str]) -> set[int]:
        return set[int]().union(*(self._read(text).get(word, ()) for text in (*texts, OWN_WORDS)))

    def find_barred(self, written: Sequence[int], texts: Sequence[str]) -> NDArray[np.bool_]:
        """Returns (V,) which tokens may not follow the written ones.

        A word begins as one of the texts or of `OWN_WORDS`. Where the word so far begins words of these,
        it goes on as one of them; it ends, by a blank or a sign, where one of them does, and no letter
        follows a sign that none of them has there. The first word is left alone where no blank begins the
        response. One precedes each title and answer. In the first title of a response follows what does in
        a title or the question; none ends before "###" and an answer.
        """
        word = self._find_word(written)
        follow = self._follow(word, texts)
        going_on = [*follow - {WORD_END}]
        certain = self.find_certain(written, texts)
        if certain is not None:
            going_on = [certain]
        if certain is not None or (follow and WORD_END not in follow):
            barred = np.ones_like(self._continues)
        else:
            barred = self._begins_word.copy()
            for text in (*texts, OWN_WORDS):
                barred[self._read_firsts(text)] = False
            if follow or self._ends_in_sign(word):
                barred |= self._continues
        barred[going_on] = False
        others = list[NDArray[np.bool_]]()
        if self._names_titles and written and self._ends_name[written[-1]]:
            others.append(~(self._begins | self._marks | np.isin(np.arange(len(barred)), self._ends)))
        _, mark, answer = self._decode([*written]).partition(ANSWER_MARK)
        if self._names_titles and not answer.strip():
            barred[self._ends] = True
        first = self._names_titles and not mark and bool(written) and not self._ends_name[[*written]].any()
        if first and certain is None:
            others.append(self._bar_all_but_names(written, texts))
        for other in others:
            if not (barred | other).all():  # as within "A;B", or in a title too long to be kept
                barred |= other
        return barred

    def _bar_all_but_names(self, written: Sequence[int], texts: Sequence[str]) -> NDArray[np.bool_]:
        """Returns (V,) what may not follow in the first title: it is one of a passage, or words of the
        question in a row; texts: the question and the passages."""
        begun, n, barred = (*written,), len(written), ~self._ends_name
        for title in self._encode_titles(texts):
            if title[:n] == begun != title:
                barred[title[n]] = False
        asked = self._encode_title(texts[0])
        barred[[asked[k + n] for k in range(len(asked) - n) if asked[k : k + n] == begun]] = False
        return barred

    def _encode_titles(self, texts: Sequence[str]) -> list[tuple[int, ...]]:
        return [self._encode_title(text.partition("\n")[0]) for text in texts[1:]]

    def begin_title(self, token: int, texts: Sequence[str]) -> int:
        """Returns the token that a response begins with: of one that begins neither a title nor a word of
        the question, the first of the title of the first passage that has it."""
        titles = self._encode_titles(texts) if self._names_titles and not self._marks[token] else []
        word = self._decode([token]).strip()  # none of a blank, which every text has
        if not word or (token,) in {title[:1] for title in titles} or token in self._encode_title(texts[0]):
            return token
        found = re.compile(rf"(?<!\w){re.escape(word)}")
        named = (t[0] for t, text in zip(titles, texts[1:], strict=False) if t and found.search(text))
        return next(named, token)

    def find_certain(self, written: Sequence[int], texts: Collection[str]) -> int | None:
        """Returns the token that alone may follow the written ones; None where others may."""
        title = self._find_title_token(written, texts)
        if title is not None:
            return title
        follow = self._follow(self._find_word(written), texts)
        token = next(iter(follow)) if len(follow) == 1 else WORD_END
        return token if token != WORD_END else None

    def _split_begun(self, written: Sequence[int]) -> tuple[list[int], str]:
        """Returns the tokens of the title or answer that was begun, and its text; of other forms none."""
        begun = max((n + 1 for n, token in enumerate(written) if self._ends_name[token]), default=0)
        ids = [*written[begun:]] if self._names_titles else []
        return ids, self._decode(ids).lstrip()

    def _count(self, name: str, texts: Collection[str]) -> int:
        """Returns how often the texts have it where a word begins."""
        pattern = re.compile(rf"(?<!\w)(?={re.escape(name)})")  # also where two overlap
        return sum(len(pattern.findall(text)) for text in texts)

    def _find_title_token(self, written: Sequence[int], texts: Collection[str]) -> int | None:
        """Returns how the title that was begun goes on, if nothing else in the texts begins so."""
        begun, name = self._split_begun(written)
        firsts = {text.partition("\n")[0] for text in texts if text.startswith(name) and "\n" in text}
        titles = {first for first in firsts if len(first.split()) <= MAX_TITLE_WORDS}
        if not name or not titles or ANSWER_MARK in self._decode([*written]):
            return None
        ids, n = [self._encode_title(title) for title in titles], len(begun)
        goes_on = (n < len(one) <= MAX_WORD_TOKENS and [*one[:n]] == begun for one in ids)
        after = {one[n] if on else WORD_END for one, on in zip(ids, goes_on, strict=True)}
        token = after.pop()
        if after or token == WORD_END:
            return None
        longer = self._decode([*begun, token]).lstrip()
        return token if self._count(name, texts) == self._count(longer, texts) else None

    def find_least_confidence(self, written: Sequence[int], token: int, texts: Collection[str]) -> float:
        """Returns from which probability on a guess is right often enough to follow the written tokens;
        above 1 where the texts say nothing of it.

        How the title or answer that was begun goes on somewhere in the texts: `COPIED_CONFIDENCE`; 0 where
        it goes on so wherever it stands in them, or does in a title that the response has. After a whole
        title 0 for the end of an answer, `MARK_CONFIDENCE` for the sign between titles or before one.
        """
        begun, name = self._split_begun(written)
        titles, mark, _ = self._decode([*written]).partition(ANSWER_MARK)
        if token in self._ends or self._ends_name[token]:
            whole = any(name == text.partition("\n")[0] for text in texts)
            least = 0.0 if token in self._ends else MARK_CONFIDENCE
            return least if whole and (token in self._ends) == bool(mark) else NEVER
        longer = self._decode([*begun, token]).lstrip()
        count = 0
        if name and len(longer) > len(name) and "\n" not in longer:
            count = self._count(longer, texts)
        if not count:
            return NEVER
        named = bool(mark) and self._count(longer, [titles])
        return 0.0 if named or count == self._count(name, texts) else COPIED_CONFIDENCE
