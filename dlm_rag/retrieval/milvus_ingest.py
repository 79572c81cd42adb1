"""Builds a collection from a corpus, as a stream that can be resumed; memory stays flat."""

import json
from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from dlm_rag.config import RetrievalConfig
from dlm_rag.errors import ConfigError, CorpusError
from dlm_rag.progress import report_progress
from dlm_rag.retrieval.build_once import build_once, make_folder_name
from dlm_rag.retrieval.corpus import Corpus, Passage
from dlm_rag.retrieval.milvus_collection import (
    MAX_TEXT_BYTES,
    TEXT_FIELDS,
    VECTOR_FIELDS,
    CollectionInfo,
    MilvusCollection,
)
from dlm_rag.retrieval.milvus_retriever import check_collection_encoder, check_engine_scores
from dlm_rag.retrieval.sparse_vectors import (
    SPARSE_VECTOR_VERSION,
    CorpusStatistics,
    compute_corpus_statistics,
)

# of a write, at most: passages, and bytes of their texts
WRITE_BATCH_PASSAGES, WRITE_BATCH_BYTES = (1000, 8 << 20)
WORD_TOTALS_FILE = "counted.json"


def ingest_corpus(collection: MilvusCollection, corpus: Corpus, config: RetrievalConfig) -> int:
    """Writes the passages of a corpus that a collection does not have yet; returns how many.

    Passages are written in order, and again where it is unsure whether they were: a key stands once. Raises
    `UserError` for a collection that holds other passages or other vectors.
    """
    fresh = collection.describe() is None
    if not fresh:
        _check_same_corpus(collection, corpus, config)
    vectorize: dict[str, Callable[[list[str]], Sequence[Any]]] = {}
    wanted = CollectionInfo(corpus.fingerprint, config.method, len(corpus))
    if "dense" in VECTOR_FIELDS[config.method]:
        from dlm_rag.retrieval.encoder import load_text_encoder

        encoder = load_text_encoder(config)
        width = encoder.encode_passages(["width"]).shape[1]
        wanted = replace(
            wanted, model=config.embedding_model, encoder=encoder.index_folder_name, width=width
        )
        vectorize["dense"] = lambda texts: encoder.encode_passages(texts).tolist()
    if fresh:
        collection.create(wanted)
        collection.describe()
        _check_same_corpus(collection, corpus, config)  # another process may have been faster
    check_collection_encoder(collection, config.embedding_model, wanted.encoder)
    collection.create_indexes()
    if not fresh:  # what is not loaded cannot be counted, and what is takes memory as it grows
        collection.load()
    start = 0 if fresh else count_complete_rows(collection)
    if collection.info.finished and start == len(corpus):
        return 0
    if "sparse" in VECTOR_FIELDS[config.method]:
        encode = load_corpus_statistics(corpus).encode_passage
        vectorize["sparse"] = lambda texts: [encode(text) for text in texts]
    with report_progress("writing passages", len(corpus), done=start) as advance:
        for row, passages in iterate_write_batches(corpus, start):
            texts = [passage.text for passage in passages]
            vectors = {field: compute(texts) for field, compute in vectorize.items()}
            collection.upsert_passages(row, passages, vectors)
            advance(len(passages))
    collection.finish_build()
    check_engine_scores(collection, VECTOR_FIELDS[config.method])
    return len(corpus) - start


def _check_same_corpus(collection: MilvusCollection, corpus: Corpus, config: RetrievalConfig) -> None:
    """Raises `UserError` where the collection is of other passages or of another kind."""
    if collection.info.fingerprint != corpus.fingerprint:
        raise CorpusError(f"{collection.url} holds other passages than {corpus.path}: give another name")
    if (kind := collection.info.kind) != config.method:
        raise ConfigError(
            f"{collection.url} is built with retrieval.method={kind}: give that, or another name"
        )


def count_complete_rows(collection: MilvusCollection) -> int:
    """How many rows are there without a gap, counted from the first."""
    rows = range(1, collection.info.passages + 1)
    return bisect_left(rows, True, key=lambda count: collection.count_rows(count) < count)


def iterate_write_batches(corpus: Corpus, start: int) -> Iterator[tuple[int, list[Passage]]]:
    """Row and passages of each write, from row `start` on; raises `CorpusError` where one is too long."""
    batch: list[Passage] = []
    batch_bytes = 0
    for row in range(start, len(corpus)):
        passage = corpus[row]
        size = _measure_passage_bytes(corpus, row, passage)
        if batch and (len(batch) == WRITE_BATCH_PASSAGES or batch_bytes + size > WRITE_BATCH_BYTES):
            yield row - len(batch), batch
            batch, batch_bytes = [], 0
        batch.append(passage)
        batch_bytes += size
    corpus.check_unchanged()
    if batch:
        yield len(corpus) - len(batch), batch


def _measure_passage_bytes(corpus: Corpus, row: int, passage: Passage) -> int:
    """The bytes of a passage; raises `CorpusError` where a text has more than a field may."""
    sizes = {field: len(getattr(passage, field).encode()) for field in TEXT_FIELDS}
    for field, size in sizes.items():
        if size > MAX_TEXT_BYTES:
            raise CorpusError(
                f"{corpus.path}, row {row}: '{field}' has {size:,} bytes, and Milvus takes "
                f"{MAX_TEXT_BYTES:,}: split the passage"
            )
    return sum(sizes.values())


def load_corpus_statistics(corpus: Corpus) -> CorpusStatistics:
    """The word counts of a corpus; computed once, and kept with its indexes."""

    def texts() -> Iterator[str]:
        with report_progress("counting words", len(corpus)) as advance:
            for row, passage in enumerate(corpus):
                _measure_passage_bytes(corpus, row, passage)  # what cannot be stored is better known now
                yield passage.text
                advance(1)

    def build(scratch: Path) -> None:
        found = compute_corpus_statistics(texts())
        np.save(scratch / "ids.npy", found.ids)
        np.save(scratch / "weights.npy", found.idf)
        (scratch / WORD_TOTALS_FILE).write_text(json.dumps([found.passages, found.words]))

    folder = build_once(corpus.folder / make_folder_name("words", SPARSE_VECTOR_VERSION), build)
    passages, words = json.loads((folder / WORD_TOTALS_FILE).read_text())
    return CorpusStatistics(passages, words, np.load(folder / "ids.npy"), np.load(folder / "weights.npy"))
