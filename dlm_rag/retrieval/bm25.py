"""Sparse retrieval: BM25 by bm25s, its index built once and mapped from disk.

The index is built as a stream, on all cores, and resumed after a kill. First each shard of the corpus is
counted into a folder of its own: its words, and which passage has which how often. Then the words of all
shards are merged, and the postings written word by word. Scores are those of bm25s to the bit, in its
layout: for each word the rows that have it, ascending, and a score for each.

Words are known by 64 bits of a hash. That any two of ten million words have the same one, and count as one
word, has a probability of 3 in a million.
"""

import ctypes
import logging
import os
import re
import signal
import sys
import unicodedata
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from functools import lru_cache, partial
from itertools import pairwise
from multiprocessing import current_process, get_context
from pathlib import Path
from typing import Any

import bm25s
import numba
import numpy as np
from blake3 import blake3
from bm25s.numba import retrieve_utils
from bm25s.scoring import _score_idf_lucene, _score_tfc_lucene
from bm25s.stopwords import STOPWORDS_EN
from snowballstemmer.english_stemmer import EnglishStemmer

from dlm_rag.config import RetrievalConfig
from dlm_rag.errors import ConfigError, CorpusError
from dlm_rag.files.build_once import Shard, build_once, build_shard, make_folder_name, save_array
from dlm_rag.files.record_readers import normalize_title
from dlm_rag.nvtx_ranges import profile_stage
from dlm_rag.progress import report_progress
from dlm_rag.retrieval import base
from dlm_rag.retrieval.corpus import Corpus
from dlm_rag.text import (
    JOINED_RUN,
    MARKS,
    MAX_TITLE_WORDS,
    WORD,
    fold_words,
    get_title_line,
    normalize_text,
    strip_disambiguation,
    strip_signs,
)

log = logging.getLogger(__name__)

BM25_K1, BM25_B = 1.5, 0.75
WORDS, STARTS, ROWS, SCORES = "words.npy", "starts.npy", "rows.npy", "scores.npy"  # of an index
SPELLINGS = "spellings.npy"
SHARD_PASSAGES = 1 << 16  # that are counted at once; their rows are kept as uint16
SHARD_BYTES = 64 << 20  # of the corpus, that are counted at once
BUCKET_POSTINGS = 1 << 24  # that are written at once, 8 bytes each, besides those of one more word
MAX_WORKERS = 8  # more would take more memory
TITLE_DEPTH = 50  # results among which one is looked for by its title

_ASCII_TERM = re.compile(r"\b\w\w+\b", re.ASCII)  # bm25s's rule: runs of two or more word characters
_POINTS = re.compile(
    "[\u0307\u0591-\u05bd\u05bf\u05c1\u05c2\u05c4\u05c5\u05c7\u0610-\u061a\u0640\u064b-\u065f\u0670\u06d6-\u06ed]"
)
# Letters of Greek and Arabic that people write with and without their signs.
_LETTER_FORMS: dict[int, Any] = str.maketrans("ςάέήίϊΐόύϋΰώёأإآٱةىیکہھؤئ", "σαεηιιιουυυωеاااا" + "هييكههوي")
# The digits of Arabic, Persian, Hindi and others.
_DIGITS = ((chr(code), unicodedata.decimal(chr(code), None)) for code in range(0x660, 0x1A9A))
_LETTER_FORMS |= {ord(char): str(digit) for char, digit in _DIGITS if digit is not None}
_LETTER = re.compile(rf".[{MARKS}]*")
_STOP_WORDS = frozenset(STOPWORDS_EN)  # left out, as bm25s does
_function: Callable[[Any], Any]  # of a worker
# A part of the folder's name; another text makes every index be built again.
INDEX_FORM = "hashed words, pairs of letters, letters and digits in one form, half-spaces, bare words"


_numba_config: Any = numba.config  # whose settings are made when it is imported
if _numba_config.DISABLE_JIT:
    raise ConfigError("unset NUMBA_DISABLE_JIT: uncompiled search orders equal scores differently")
try:  # the machine code is kept: the next process starts 5 seconds sooner
    retrieve_utils._retrieve_internal_jitted_serial.enable_caching()
except RuntimeError:
    log.warning("every start takes seconds longer: set NUMBA_CACHE_DIR to a folder that can be written")


class BM25Retriever(base.CorpusRetriever):
    """BM25 in Lucene's form (k1 1.5, b 0.75); all scores are computed when the index is built.

    Ties are broken by bm25s's heap, a fixed function of the scores and the depth, as in the published
    traces: equal scores are not in corpus order, and the best 7 need not begin with the best 3. A passage
    that shares no term with the query has score 0 and is not ranked.
    """

    def __init__(self, corpus: Corpus, top_k: int, stemmer: str = "none", title_weight: int = 1) -> None:
        """stemmer, title_weight: as `retrieval.bm25_stemmer` and `retrieval.bm25_title_weight`."""
        super().__init__(corpus, top_k)
        self._stemmer = stemmer
        form = () if (stemmer, title_weight) == ("none", 1) else (f"{stemmer}, {title_weight}",)
        folder = build_once(
            corpus.folder / make_folder_name("bm25", bm25s.__version__, INDEX_FORM, *form),
            lambda scratch: build_bm25_index(corpus, scratch, stemmer, title_weight),
            resumable=True,
        )
        # Mapped, but as plain arrays: a memmap is slow at single numbers.
        files = (np.load(folder / name, mmap_mode="r") for name in (WORDS, STARTS, ROWS, SCORES, SPELLINGS))
        self._words, starts, rows, scores, self._spellings = map(np.asarray, files)
        self._index = bm25s.BM25(BM25_K1, BM25_B, method="lucene", backend="numba")
        self._index.scores = {"data": scores, "indices": rows, "indptr": starts, "num_docs": len(corpus)}
        self._index.nonoccurrence_array = None
        self._index.unique_token_ids_set = range(len(self._words))
        self._search_ids([[0]], 1)  # loads the compiled search, so that the first question need not wait

    def rank(self, queries: Sequence[base.Query], depth: int) -> list[base.Ranking]:
        return [list(scores) for scores in self.rank_scored(queries, depth)]

    def rank_scored(self, queries: Sequence[base.Query], depth: int) -> list[dict[int, float]]:
        with profile_stage("retrieve/search"):
            asked = [self._find_word_ids(query.text) for query in queries]
            found = iter(self._search_ids([ids for ids in asked if ids], min(depth, len(self.corpus))))
            return [next(found) if ids else {} for ids in asked]

    def _find_word_ids(self, text: str) -> list[int]:
        """The ids of the terms of a text that the corpus has, in order, repeated ones kept; for another
        term those of all that differ from it by the signs on letters alone."""
        terms = extract_terms(text, self._stemmer)
        found = zip(terms, self._look_up(hash_words(terms)), strict=True)
        ids = [[n] if n >= 0 else self._look_up(self._find_spellings(term)) for term, n in found]
        return [n for each in ids for n in each if n >= 0]

    def _look_up(self, hashes: np.ndarray) -> list[int]:
        """The id of each word, -1 for one that the corpus lacks."""
        ids = np.searchsorted(self._words, hashes).clip(max=len(self._words) - 1)
        return np.where(self._words[ids] == hashes, ids, -1).tolist()

    def _find_spellings(self, term: str) -> np.ndarray:
        """The hashes of a term without signs on its letters, and of those of the corpus that have some."""
        bare = hash_words([_strip_term(term, self._stemmer)])
        first, last = (np.searchsorted(self._spellings[0], bare, side)[0] for side in ("left", "right"))
        return np.concatenate((bare, self._spellings[1, first:last]))

    def _search_ids(self, asked: list[list[int]], depth: int) -> list[dict[int, float]]:
        if not asked:
            return []
        options = {"n_threads": 1, "show_progress": False, "backend_selection": "numba"}
        found = self._index.retrieve(asked, k=depth, **options)
        pairs = zip(found.documents.tolist(), found.scores.tolist(), strict=True)
        return [{row: score for row, score in zip(*both, strict=True) if score > 0} for both in pairs]


def open_bm25_retriever(config: RetrievalConfig, corpus: Corpus) -> base.CorpusRetriever:
    """BM25 by whole queries, or by `Query.parts` in turn; all that is found, or a clear choice."""
    whole = BM25Retriever(corpus, config.top_k, config.bm25_stemmer, config.bm25_title_weight)
    in_parts = config.bm25_query != "whole"
    by_parts = base.MultiQueryRetriever(TitledFirstRetriever(whole)) if in_parts else None
    if config.min_score_ratio:
        return ClearChoiceRetriever(whole, by_parts, config.min_score_ratio)
    return by_parts or whole


class ClearChoiceRetriever(base.CorpusRetriever):
    """Fewer than `top_k` passages where some are clearly better: the others distract a reader.

    Of what the question finds (or the whole query, without `by_parts`), those with at least `ratio` of the
    best score, those with a title that the question has and no better passage. Of further parts, the best.
    """

    leaves_out = True

    def __init__(self, whole: BM25Retriever, by_parts: base.CorpusRetriever | None, ratio: float) -> None:
        super().__init__(whole.corpus, whole.top_k)
        self._whole = whole
        self.query_fields = (whole if by_parts is None else by_parts).query_fields
        self._by_parts, self._ratio = by_parts, ratio
        self._scores = base.MemoizedBatchFunction(self._score)

    def _score(self, asked: Sequence[tuple[str, int]]) -> list[dict[int, float]]:
        return self._whole.rank_scored([base.Query(text, (text,)) for text, _ in asked], asked[0][1])

    def rank(self, queries: Sequence[base.Query], depth: int) -> list[base.Ranking]:
        parts = [query.parts if self._by_parts is not None else (query.text,) for query in queries]
        asked = [own[0] if own else "" for own in parts]
        others = [base.Query(part, (part,)) for own in parts for part in own[1:]]
        found = iter(self._by_parts.rank(others, 1) if self._by_parts is not None else ())
        scored = self._scores((text, depth) for text in asked)
        return [
            self._choose(text, scores, [next(found) for _ in own[1:]])[:depth]
            for text, scores, own in zip(asked, scored, parts, strict=True)
        ]

    def _choose(self, question: str, scores: dict[int, float], others: list[base.Ranking]) -> base.Ranking:
        added = [row for best in others for row in best]
        rows = [*dict.fromkeys((*scores, *added))]
        firsts = (get_title_line(passage.text) for passage in self.corpus.read_passages(rows))
        titles = dict(zip(rows, map(_fold_title, firsts), strict=True))
        least, asked = self._ratio * max(scores.values(), default=0.0), fold_words(question)
        chosen = [row for row, score in scores.items() if score >= least]
        for row in rows:
            named = row in added or fold_words(titles[row]) in asked
            if named and titles[row] not in {titles[other] for other in chosen}:
                chosen.append(row)
        return chosen


class TitledFirstRetriever(base.CorpusRetriever):
    """What another retriever finds, first what has the query for a title, whatever follows it in brackets:
    a name that is looked for alone stands more often in the passages of others than in its own."""

    def __init__(self, inner: base.CorpusRetriever) -> None:
        super().__init__(inner.corpus, inner.top_k)
        self._inner = inner

    def rank(self, queries: Sequence[base.Query], depth: int) -> list[base.Ranking]:
        found = self._inner.rank(queries, max(depth, TITLE_DEPTH))
        return [self._put_first(*pair)[:depth] for pair in zip(queries, found, strict=True)]

    def _put_first(self, query: base.Query, rows: base.Ranking) -> base.Ranking:
        title = _fold_title(query.text)
        passages = dict(zip(rows, self.corpus.read_passages(rows), strict=True))
        return sorted(rows, key=lambda row: _fold_title(get_title_line(passages[row].text)) != title)


def _fold_title(title: str) -> str:
    return normalize_title(strip_disambiguation(title)).casefold()


def split_terms(text: str) -> list[str]:
    """The words of a text in lower case, and pairs of letters where a script has no blanks between words.

    Points of Hebrew and vowels of Arabic are left out; a lone letter of a script with blanks as well.
    """
    if text.isascii():
        return _ASCII_TERM.findall(text.lower())
    if "\u200c" in text:  # Persian's half-space, in whose place people write a blank or nothing
        parts = (part for word in text.split() if len(found := word.split("\u200c")) > 1 for part in found)
        text = " ".join((text, *parts))
    terms = list[str]()
    for word in WORD.findall(_POINTS.sub("", normalize_text(text).lower().translate(_LETTER_FORMS))):
        for run in JOINED_RUN.split(word):
            if JOINED_RUN.fullmatch(run):
                letters = _LETTER.findall(run)  # each with its marks
                terms += map("".join, pairwise(letters)) if len(letters) > 1 else letters
            elif len(run) > 1:
                terms.append(run)
    return terms


def extract_terms(text: str, stemmer: str = "none") -> list[str]:
    """The BM25 terms of a text, in order, repeated ones kept."""
    words = (word for word in split_terms(text) if word not in _STOP_WORDS)
    return [*words] if stemmer == "none" else [*map(_stem_english, words)]


@lru_cache(1 << 18)
def _stem_english(word: str) -> str:
    return EnglishStemmer().stemWord(word)  # its own, for one is not safe in several threads


def _strip_term(term: str, stemmer: str) -> str:
    """A term as it would be without the signs on its letters."""
    return strip_signs(term) if stemmer == "none" else _stem_english(strip_signs(term))


def _extract_passage_terms(text: str, stemmer: str, title_weight: int) -> list[str]:
    """The BM25 terms of a passage, those of its title `title_weight` times."""
    title, _, rest = text.strip().partition("\n")
    again = title_weight - 1 if rest and len(title.split()) <= MAX_TITLE_WORDS else 0
    return extract_terms(text, stemmer) + again * extract_terms(title, stemmer)


def hash_words(words: Iterable[str]) -> np.ndarray:
    """uint64, one for each word."""
    digests = (blake3(word.encode(errors="surrogatepass")).digest(8) for word in words)
    return np.frombuffer(b"".join(digests), np.uint64)


def build_bm25_index(corpus: Corpus, scratch: Path, stemmer: str, title_weight: int) -> None:
    """Writes the index of a corpus into a scratch folder; what earlier attempts counted is used.

    `WORDS`: (words,) uint64, ascending. `STARTS`: (words + 1,) int64, where the postings of each begin.
    `ROWS`: (postings,) int32. `SCORES`: (postings,) float32. `SPELLINGS`: (2, n) uint64, what words with
    signs on letters are without, ascending, and these words. Raises `CorpusError` and `OSError`.
    """
    shards = corpus.split_into_shards(scratch, SHARD_PASSAGES, SHARD_BYTES)
    count_words = partial(_count_words, corpus, stemmer, title_weight)
    with report_progress("finding terms", len(corpus)) as advance:
        for count in map_in_processes(partial(build_shard, count_words), shards):
            advance(count)
    words, starts = _merge_words([folder for _, folder in shards])
    save_array(scratch / WORDS, words)
    save_array(scratch / STARTS, starts)
    spellings = np.concatenate([np.load(folder / SPELLINGS) for _, folder in shards], axis=1)
    save_array(scratch / SPELLINGS, np.ascontiguousarray(np.unique(spellings, axis=1)))
    for name, kind in ((ROWS, np.int32), (SCORES, np.float32)):
        np.lib.format.open_memmap(scratch / name, "w+", kind, (int(starts[-1]),))
    length = sum(int(np.load(folder / "lengths.npy").sum()) for _, folder in shards)
    cuts = np.append(np.searchsorted(starts, np.arange(0, starts[-1], BUCKET_POSTINGS)), len(words))
    write = partial(_write_bucket, scratch, shards, np.float64(length) / len(corpus))
    with report_progress("writing the scores of terms", int(starts[-1])) as advance:
        for count in map_in_processes(write, [*pairwise(np.unique(cuts).tolist())]):
            advance(count)


def _count_words(corpus: Corpus, stemmer: str, title_weight: int, rows: range) -> dict[str, np.ndarray]:
    """What the passages of some rows hold.

    words: (words,) ascending hashes. starts: (words + 1,) where the postings of each begin. rows:
    (postings,) uint16 from the first of `rows` on, ascending for each word. counts: (postings,), how often
    the passage has the word. lengths: (passages,), its words, with repeated ones. spellings: `SPELLINGS`.
    """
    ids: defaultdict[str, int] = defaultdict()
    ids.default_factory = ids.__len__
    found, lengths = [], np.empty(len(rows), np.uint32)
    for n, row in enumerate(rows):
        terms = _extract_passage_terms(corpus[row].text, stemmer, title_weight)
        found.append(np.fromiter(map(ids.__getitem__, terms), np.uint32, len(terms)))
        lengths[n] = len(terms)
    corpus.check_unchanged()
    words, rank = np.unique(hash_words(ids), return_inverse=True)
    keys = rank[np.concatenate(found)] << 16 | np.repeat(np.arange(len(rows)), lengths)
    keys.sort()
    first = np.flatnonzero(np.diff(keys, prepend=-1))
    counts, keys = np.diff(first, append=len(keys)), keys[first]
    signed = [word for word in ids if not word.isascii() and strip_signs(word) != word]
    bare = (_strip_term(word, stemmer) for word in signed)
    return {
        "words": words,
        "starts": np.searchsorted(keys, np.arange(len(words) + 1) << 16),
        "rows": keys.astype(np.uint16),  # the lower 16 bits
        "counts": counts.astype(np.min_scalar_type(counts.max(initial=0))),
        "lengths": lengths,
        "spellings": np.stack((hash_words(bare), hash_words(signed))),
    }


def _merge_words(folders: Sequence[Path]) -> tuple[np.ndarray, np.ndarray]:
    """The words of all shards, ascending, and where the postings of each begin in the index."""
    words = np.empty(0, np.uint64)
    pending: list[np.ndarray] = []  # so that no more are held than a few times those of the index
    for n, folder in enumerate(folders):
        pending.append(np.load(folder / "words.npy"))
        if n + 1 == len(folders) or sum(map(len, pending)) > len(words):
            words = np.concatenate([words, *pending])
            words.sort()  # np.unique would hash them, in many times the memory
            words, pending = words[np.diff(words, prepend=words[:1] + 1) != 0], []
    if not len(words):  # a corpus of stop words alone; a search wants a word, which no query has
        words = hash_words([""])
    starts = np.zeros(len(words) + 1, np.int64)
    for folder in folders:
        sizes = np.diff(np.load(folder / "starts.npy"))
        starts[np.searchsorted(words, np.load(folder / "words.npy")) + 1] += sizes
    return words, starts.cumsum(out=starts)


def _write_bucket(
    index: Path, shards: Sequence[Shard], mean_length: np.float64, bucket: tuple[int, int]
) -> int:
    """Writes the postings of the words from the first to before the last one; gives their number."""
    starts = np.load(index / STARTS, mmap_mode="r")[bucket[0] : bucket[1] + 1].copy()
    words = np.load(index / WORDS, mmap_mode="r")[slice(*bucket)].copy()
    frequencies, which = np.unique(np.diff(starts), return_inverse=True)
    passages = shards[-1][0].stop
    idf = np.array([_score_idf_lucene(n, passages) for n in frequencies.tolist()], np.float32)[which]
    begin, size = int(starts[0]), int(starts[-1] - starts[0])
    heads = starts[:-1] - begin  # where the next posting of each word goes
    rows, scores = np.empty(size, np.int32), np.empty(size, np.float32)
    for shard, folder in shards:
        held = np.load(folder / "words.npy", mmap_mode="r")
        near = slice(np.searchsorted(held, words[0]), np.searchsorted(held, words[-1], "right"))
        ends = np.load(folder / "starts.npy", mmap_mode="r")[near.start : near.stop + 1]
        here, sizes = slice(ends[0], ends[-1]), np.diff(ends)
        if here.start == here.stop:
            continue
        at = np.searchsorted(words, held[near])
        slots = np.repeat(heads[at] - ends[:-1], sizes) + np.arange(here.start, here.stop)
        heads[at] += sizes
        counts, passage = (np.load(folder / f"{n}.npy", mmap_mode="r")[here] for n in ("counts", "rows"))
        length = np.load(folder / "lengths.npy", mmap_mode="r")[passage]
        saturated = _score_tfc_lucene(counts.astype(np.float32), length, mean_length, BM25_K1, BM25_B)
        rows[slots] = passage.astype(np.int32) + shard.start
        scores[slots] = np.repeat(idf[at], sizes) * saturated
    for name, array in ((ROWS, rows), (SCORES, scores)):
        head = np.load(index / name, mmap_mode="r").offset
        with (index / name).open("r+b") as file:
            file.seek(head + array.itemsize * begin)
            file.write(array.data)
    return size


def count_workers(items: int) -> int:
    """How many processes share so many items; 1: none but this one."""
    if sys.platform != "linux" or current_process().daemon:  # forks elsewhere are not safe; daemons may not
        return 1
    return min(items, len(os.sched_getaffinity(0)), MAX_WORKERS)


def map_in_processes(function: Callable[[Any], int], items: Sequence[Any]) -> Iterator[int]:
    """Results as they come, in no order; a failure is raised after the items that are under way.

    Workers are forks: only items and results are pickled, and threads that libraries have begun are not
    there. Raises `CorpusError` where one was killed.
    """
    if (workers := count_workers(len(items))) < 2:
        yield from map(function, items)
        return
    pool = ProcessPoolExecutor(workers, get_context("fork"), _begin_worker, (function,))
    try:
        for done in as_completed([pool.submit(_call_function, item) for item in items]):
            yield done.result()
    except BrokenProcessPool:
        raise CorpusError(
            "a process that built the index was killed, as when memory is short: the same command goes on"
        ) from None
    finally:
        pool.shutdown(cancel_futures=True)


def _begin_worker(function: Callable[[Any], Any]) -> None:
    global _function
    _function = function
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches all; the first process stops the others
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG: when the first process dies


def _call_function(item: Any) -> Any:
    return _function(item)
