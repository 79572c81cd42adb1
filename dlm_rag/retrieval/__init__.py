"""Corpora, indexes, retrievers, and what they are asked."""

import logging
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, overload

from dlm_rag.config import RetrievalConfig
from dlm_rag.errors import ConfigError

if TYPE_CHECKING:
    from dlm_rag.retrieval.base import CorpusRetriever, Retriever
    from dlm_rag.retrieval.corpus import Corpus

log = logging.getLogger(__name__)


@overload
def load_retriever(
    config: str | Path, corpus: "Corpus | None" = None, **settings: Any
) -> "CorpusRetriever": ...
@overload
def load_retriever(config: RetrievalConfig, corpus: "Corpus", **settings: Any) -> "CorpusRetriever": ...
@overload
def load_retriever(
    config: RetrievalConfig | None = None, corpus: None = None, **settings: Any
) -> "Retriever": ...
def load_retriever(
    config: "RetrievalConfig | str | Path | None" = None, corpus: "Corpus | None" = None, **settings: Any
) -> "Retriever":
    """The retriever that a config describes, building its index where there is none yet.

    `config` may be just the path of a corpus; `settings` are fields of `RetrievalConfig`, as in
    `load_retriever("corpus.jsonl", method="hybrid", top_k=5)` and `load_retriever(url="http://...")`.
    `corpus` is the opened corpus where the caller has it. Raises `UserError` for what is wrong with
    corpus, index, dense model or service; a service is asked once.
    """
    if not isinstance(config, RetrievalConfig):
        config = RetrievalConfig(corpus=None if config is None else str(config))
    config = replace(config, **settings)
    if config.url is not None:
        return _load_remote(config)
    if corpus is None:
        from dlm_rag.retrieval.corpus import open_corpus

        if config.corpus is None:
            raise ConfigError("no corpus: give --corpus FILE, or retrieval.url=URL")
        corpus = open_corpus(config.corpus, config.index_dir)
    if config.top_k > len(corpus):
        log.warning("top_k=%d, but the corpus has %d passages: all are used", config.top_k, len(corpus))
    if config.method == "bm25":
        return _load_bm25(config, corpus)
    if config.method == "dense":
        return _load_dense(config, corpus)
    if config.method == "none":
        from dlm_rag.retrieval.oracle import NoRetriever

        return NoRetriever(corpus, config.top_k)
    from dlm_rag.retrieval.hybrid import HybridRetriever

    parts = [_load_bm25(config, corpus), _load_dense(config, corpus)]
    return HybridRetriever(parts, config.top_k, config.fusion_depth)


def _load_remote(config: RetrievalConfig) -> "Retriever":
    assert config.url is not None
    if config.url.startswith("milvus://"):
        from dlm_rag.retrieval.milvus_retriever import open_milvus_retriever

        return open_milvus_retriever(config)
    from dlm_rag.retrieval.http_retriever import open_http_retriever

    return open_http_retriever(config.url, config.top_k, config.timeout)


def _load_bm25(config: RetrievalConfig, corpus: "Corpus") -> "CorpusRetriever":
    from dlm_rag.retrieval.bm25 import BM25Retriever
    from dlm_rag.retrieval.multi_query import MultiQueryRetriever

    if config.bm25_query == "sentences":
        return MultiQueryRetriever(BM25Retriever(corpus, config.top_k))
    return BM25Retriever(corpus, config.top_k, int(config.bm25_cache_gib * 2**30))


def _load_dense(config: RetrievalConfig, corpus: "Corpus") -> "CorpusRetriever":
    from dlm_rag.retrieval.dense import load_text_encoder, open_dense_retriever

    return open_dense_retriever(corpus, config.top_k, load_text_encoder(config))
