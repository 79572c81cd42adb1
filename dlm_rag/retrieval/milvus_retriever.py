"""Search in a collection of a Milvus by our own scores, and how one is built from a corpus.

Rankings are the same on any shards. A refresh takes two round trips, hybrid three: one for all searches by
a field, one for the passages that were not seen before. Equal scores are taken in corpus order, so more
hits are asked for where they end among equals.
"""

import time
from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np

from dlm_rag.config import RetrievalConfig
from dlm_rag.errors import ConfigError, CorpusError, RunError
from dlm_rag.nvtx_ranges import profile_stage
from dlm_rag.progress import report_progress, track_progress
from dlm_rag.retrieval.base import SCORE_TIE_DECIMALS, CorpusRetriever, Hits, Ranking, select_top_hits
from dlm_rag.retrieval.build_once import build_once, make_folder_name
from dlm_rag.retrieval.composite import HybridRetriever, MultiQueryRetriever
from dlm_rag.retrieval.corpus import Corpus
from dlm_rag.retrieval.milvus_collection import (
    MAX_SEARCH_HITS,
    MAX_TEXT_BYTES,
    VECTOR_FIELDS,
    CollectionInfo,
    MilvusCollection,
)
from dlm_rag.retrieval.query import Query
from dlm_rag.retrieval.retry import SearchUnavailableError
from dlm_rag.retrieval.sparse_vectors import (
    EMPTY_PASSAGE_WORD_ID,
    SPARSE_VECTOR_VERSION,
    CorpusStatistics,
    compute_corpus_statistics,
    count_query_words,
)

WRITE_BATCH_PASSAGES = 128  # of a write: with texts of any size less than the 64 MiB that gRPC takes
EXTRA_HITS = 25  # hits beyond those that are wanted: most often the last equals end there
EXTRA_HITS_GROWTH = 4  # times as many where they do not
COUNT_CHECK_SECONDS = 10.0  # seconds for which a collection that was whole is taken to be so
SCORE_CHECK_QUERIES = 8  # queries that check an engine's scores
SCORE_RELATIVE_TOLERANCE, SCORE_ABSOLUTE_TOLERANCE = 1e-5, 1e-4  # how far these may be from ours


class MilvusRetriever(CorpusRetriever):
    """The best passages of a collection by one of its fields of vectors, equal ones in corpus order.

    A search that fails raises `SearchUnavailableError`, for all of its queries; `CorpusError` says that the
    collection is another than it was. Any number of threads may search.
    """

    def __init__(
        self, collection: MilvusCollection, field: str, top_k: int,
        vectorize: Callable[[list[str]], Sequence[Any]],
    ) -> None:  # fmt: skip
        """vectorize: texts to a vector each, which is empty where there is nothing to be asked."""
        super().__init__(collection, top_k)  # type: ignore[arg-type]  # what is read of a corpus, it has
        self._collection, self._field, self._vectorize = collection, field, vectorize
        self._count_due = 0.0

    def rank(self, queries: Sequence[Query], depth: int) -> list[Ranking]:
        """As in `CorpusRetriever`; asks again where the last wanted hit may have more equals.

        Raises `RunError` where equals have no end.
        """
        texts, digits = list(dict.fromkeys(q.text for q in queries)), SCORE_TIE_DECIMALS[self._field]
        found: dict[str, Ranking] = {}
        limit = min(depth + EXTRA_HITS, MAX_SEARCH_HITS)
        with profile_stage("retrieve/search"):
            vectors = zip(texts, self._vectorize(texts), strict=True)
            asked = {text: vector for text, vector in vectors if vector}
            while asked:
                answers = self._collection.search(self._field, [*asked.values()], limit)
                for text, hits in zip([*asked], answers, strict=True):
                    self._check_hits(hits, limit)
                    if len(hits) < limit or round(hits[-1][0], digits) != round(hits[depth - 1][0], digits):
                        found[text] = [row for _, row in select_top_hits(hits, depth, digits)]
                        del asked[text]
                if asked and limit == MAX_SEARCH_HITS:
                    raise RunError(
                        f"more than {MAX_SEARCH_HITS:,} passages have the same score, and Milvus gives no "
                        "more: their order is unknown"
                    )
                limit = min(limit * EXTRA_HITS_GROWTH, MAX_SEARCH_HITS)
        return [found.get(query.text, []) for query in queries]

    def _check_hits(self, hits: Hits, limit: int) -> None:
        """Raises `SearchUnavailableError` where hits are missing."""
        whole = min(limit, len(self._collection))
        if self._field == "dense" and len(hits) != whole:  # every passage has a similarity
            raise SearchUnavailableError(
                f"{self._collection.url} gives {len(hits)} of {whole} hits: a part of it may be down"
            )
        if not hits and time.monotonic() >= self._count_due:  # nothing found, or nothing there?
            self._collection.check_row_count()
            self._count_due = time.monotonic() + COUNT_CHECK_SECONDS


def open_milvus_retriever(config: RetrievalConfig) -> CorpusRetriever:
    """The collection of `config.url`, after everything about it has been checked; loads it where it has to.

    Raises `UserError` for what is wrong, with the remedy.
    """
    url, fields = config.url or "", VECTOR_FIELDS.get(config.method, ())
    try:
        collection = MilvusCollection(url, config.timeout)
        info = collection.describe()
        build = f"`dlm-rag index --corpus FILE --to {url} retrieval.method="
        if info is None:
            raise ConfigError(f"{url}: there is no such collection: build it with {build}{config.method}`")
        if not info.finished:
            raise ConfigError(f"{url} is half-built: finish it with {build}{info.kind}`")
        if not fields or not {*fields} <= {*VECTOR_FIELDS[info.kind]}:
            raise ConfigError(
                f"{url} was built with retrieval.method={info.kind}, and cannot be searched with "
                f"{config.method}"
            )
        if max(config.top_k, config.fusion_depth) > MAX_SEARCH_HITS - EXTRA_HITS:
            raise ConfigError(
                f"Milvus gives at most {MAX_SEARCH_HITS:,} passages: set top_k and fusion_depth lower"
            )
        collection.check_indexes()
        collection.load()
        collection.check_row_count()
        check_engine_scores(collection, fields)
    except (SearchUnavailableError, RunError) as error:
        reason = str(error).removeprefix(f"{url}: ")
        raise ConfigError(f"{url} cannot be searched: {reason}") from None
    sparse = MilvusRetriever(
        collection, "sparse", config.top_k, lambda texts: [count_query_words(text) for text in texts]
    )
    if config.method == "bm25":
        return sparse
    from dlm_rag.retrieval.encoder import TextEncoder

    encoder = TextEncoder(config)
    check_collection_encoder(collection, config.embedding_model, encoder.index_folder_name)
    dense = MultiQueryRetriever(
        MilvusRetriever(
            collection, "dense", config.top_k, lambda texts: encoder.encode_queries(texts).tolist()
        )
    )
    if config.method == "dense":
        return dense
    return HybridRetriever([sparse, dense], config.top_k, config.fusion_depth)


def check_collection_encoder(collection: MilvusCollection, model: str, encoder: str) -> None:
    """Raises `ConfigError` where the vectors of a collection are of another model or prompt.

    encoder: `TextEncoder.index_folder_name`.
    """
    if encoder != collection.info.encoder:
        raise ConfigError(
            f"{collection.url} holds vectors of embedding_model '{collection.info.model}', not of "
            f"'{model}' as it is here, with this passage_prompt"
        )


def check_engine_scores(collection: MilvusCollection, fields: Sequence[str]) -> None:
    """Searches for some passages by their own words and vectors, and recomputes the scores of the hits.

    Finds an index that is not exact, words of another rule, and an engine that drops small numbers. Raises
    `CorpusError`.
    """
    count = collection.info.passages
    rows = sorted({n * count // SCORE_CHECK_QUERIES for n in range(SCORE_CHECK_QUERIES)})
    sample = collection.fetch_rows(rows, fields)
    for field, (row, entity) in product(fields, zip(rows, sample, strict=True)):
        vector = count_query_words(entity["passage"].text) if field == "sparse" else entity[field]
        right = field == "dense" or entity[field].keys() == (vector.keys() or {EMPTY_PASSAGE_WORD_ID})
        if right and vector:
            (hits,) = collection.search(field, [vector], min(EXTRA_HITS, count))
            scores, found = [score for score, _ in hits], [other for _, other in hits]
            itself, *ours = (
                _multiply_vectors(vector, stored[field])
                for stored in collection.fetch_rows([row, *found], [field])
            )
            right = bool(hits) and (row in found or itself <= scores[-1] + SCORE_ABSOLUTE_TOLERANCE)
            right &= np.allclose(scores, ours, SCORE_RELATIVE_TOLERANCE, SCORE_ABSOLUTE_TOLERANCE)
        if not right:
            raise CorpusError(
                f"{collection.url} does not give the scores of its passages ({field}, row {row}): is its "
                "index exact, and drop_ratio_search 0? If so, build it again"
            )


def _multiply_vectors(one: Any, other: Any) -> float:
    """The inner product of two vectors, both sparse or both dense."""
    first, second = (v if isinstance(v, dict) else dict(enumerate(v)) for v in (one, other))
    return sum(value * second.get(place, 0.0) for place, value in first.items())


def ingest_corpus(collection: MilvusCollection, corpus: Corpus, config: RetrievalConfig) -> int:
    """Writes the passages of a corpus that a collection does not have yet; returns how many.

    A stream in the order of rows: memory stays flat, and a build that was stopped is resumed. Where it is
    unsure whether a passage was written it is written again: a key stands once. Raises `UserError` for a
    collection that holds other passages or other vectors.
    """
    fields = VECTOR_FIELDS[config.method]
    wanted = CollectionInfo(corpus.fingerprint, config.method, len(corpus))  # type: ignore[arg-type]
    vectorize: dict[str, Callable[[list[str]], Sequence[Any]]] = {}
    if there := collection.describe():
        _check_same_corpus(there, collection.url, corpus, config)
    if "dense" in fields:
        from dlm_rag.retrieval.encoder import TextEncoder

        encoder = TextEncoder(config)
        vectorize["dense"] = lambda texts: encoder.encode_passages(texts).tolist()
        width = len(vectorize["dense"](["width"])[0])
        wanted = replace(
            wanted, model=config.embedding_model, encoder=encoder.index_folder_name, width=width
        )
    if there is None:
        _check_text_sizes(corpus)
        collection.create(wanted)
        _check_same_corpus(collection.describe(), collection.url, corpus, config)  # another may be faster
    check_collection_encoder(collection, config.embedding_model, wanted.encoder)
    collection.check_indexes(create=True)
    collection.load()  # what is not loaded cannot be counted
    start = count_complete_rows(collection)
    if collection.info.finished and start == len(corpus):
        return 0
    if "sparse" in fields:
        encode = load_corpus_statistics(corpus).encode_passage
        vectorize["sparse"] = lambda texts: [encode(text) for text in texts]
    with report_progress("writing passages", len(corpus), done=start) as advance:
        for row in range(start, len(corpus), WRITE_BATCH_PASSAGES):
            passages = corpus[row : row + WRITE_BATCH_PASSAGES]
            texts = [passage.text for passage in passages]
            collection.upsert_passages(row, passages, {field: vectorize[field](texts) for field in fields})
            advance(len(passages))
    collection.finish_build()
    check_engine_scores(collection, fields)
    return len(corpus) - start


def _check_same_corpus(
    info: CollectionInfo | None, url: str, corpus: Corpus, config: RetrievalConfig
) -> None:
    """Raises `UserError` where a collection is of other passages or of another kind."""
    if info is None or info.fingerprint != corpus.fingerprint:
        raise CorpusError(f"{url} holds other passages than {corpus.path}: give another name")
    if info.kind != config.method:
        raise ConfigError(f"{url} is built with retrieval.method={info.kind}: give that, or another name")


def count_complete_rows(collection: MilvusCollection) -> int:
    """How many rows are there without a gap, counted from the first."""
    rows = range(1, collection.info.passages + 1)
    return bisect_left(rows, True, key=lambda count: collection.count_rows(count) < count)


def _check_text_sizes(corpus: Corpus) -> None:
    """Raises `CorpusError` where a text has more bytes than a field may, before anything is written."""
    if corpus.longest_line_bytes <= MAX_TEXT_BYTES:
        return
    for row, passage in enumerate(corpus):
        if (size := max(len(text.encode()) for text in vars(passage).values())) > MAX_TEXT_BYTES:
            raise CorpusError(
                f"{corpus.path}, row {row}: a text has {size:,} bytes, and Milvus takes "
                f"{MAX_TEXT_BYTES:,}: split the passage"
            )


def load_corpus_statistics(corpus: Corpus) -> CorpusStatistics:
    """The word counts of a corpus; computed once, and kept with its indexes."""

    def build(scratch: Path) -> None:
        found = compute_corpus_statistics(p.text for p in track_progress(corpus, "counting words"))
        np.savez(scratch / "words.npz", **vars(found))

    folder = build_once(corpus.folder / make_folder_name("words", SPARSE_VECTOR_VERSION, "npz"), build)
    with np.load(folder / "words.npz") as kept:
        return CorpusStatistics(int(kept["passages"]), int(kept["words"]), kept["ids"], kept["idf"])
