"""Corpora, indexes, retrievers, and what they are asked."""

import logging
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dlm_rag.config import RetrievalConfig
from dlm_rag.errors import ConfigError

if TYPE_CHECKING:
    from dlm_rag.retrieval.base import CorpusRetriever
    from dlm_rag.retrieval.corpus import Corpus

log = logging.getLogger(__name__)


def load_retriever(
    config: "RetrievalConfig | str | Path", corpus: "Corpus | None" = None, **settings: Any
) -> "CorpusRetriever":
    """The retriever that a config describes, building its index where there is none yet.

    `config` may be just the path of a corpus; `settings` are fields of `RetrievalConfig`, as in
    `load_retriever("corpus.jsonl", kind="hybrid", top_k=5)`. `corpus` is the opened corpus where
    the caller has it. Raises `UserError` for what is wrong with corpus, index or dense model.
    """
    if not isinstance(config, RetrievalConfig):
        config = RetrievalConfig(corpus=str(config))
    config = replace(config, **settings)
    if corpus is None:
        from dlm_rag.retrieval.corpus import open_corpus

        if config.corpus is None:
            raise ConfigError("no corpus: give --corpus FILE")
        corpus = open_corpus(config.corpus, config.index_folder)
    if config.top_k > len(corpus):
        log.warning("top_k=%d, but the corpus has %d passages: all are used", config.top_k, len(corpus))
    if config.kind == "bm25":
        return _bm25(config, corpus)
    if config.kind == "dense":
        return _dense(config, corpus)
    if config.kind == "none":
        from dlm_rag.retrieval.fixed import NoRetriever

        return NoRetriever(corpus, config.top_k)
    from dlm_rag.retrieval.hybrid import HybridRetriever

    parts = [_bm25(config, corpus), _dense(config, corpus)]
    return HybridRetriever(parts, config.top_k, config.fusion_depth)


def _bm25(config: RetrievalConfig, corpus: "Corpus") -> "CorpusRetriever":
    from dlm_rag.retrieval.bm25 import BM25Retriever

    return BM25Retriever(corpus, config.top_k, int(config.search_memory_gib * 2**30))


def _dense(config: RetrievalConfig, corpus: "Corpus") -> "CorpusRetriever":
    from dlm_rag.retrieval.dense import open_dense

    return open_dense(
        corpus,
        config.top_k,
        config.dense_model,
        batch_size=config.dense_batch_size,
        query_prompt=config.query_prompt,
        passage_prompt=config.passage_prompt,
    )
