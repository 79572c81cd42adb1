"""Corpora, indexes, retrievers, and the queries they answer.

`RETRIEVERS` and `SEARCH_SERVICES` name what `retrieval.method` and the scheme of `retrieval.url` select.
"""

import logging
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, overload

from dlm_rag.config import RetrievalConfig
from dlm_rag.config.fields import look_up
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
    """The retriever that a config describes; its index is built at the first use.

    `config` may be just the path of a corpus; `settings` are fields of `RetrievalConfig`, as in
    `load_retriever("corpus.jsonl", method="hybrid", top_k=5)` and `load_retriever(url="http://...")`.
    `corpus` is the opened corpus if the caller has it. Raises `UserError` for a corpus, index, dense model
    or service that cannot be used; a service is asked once.
    """
    if not isinstance(config, RetrievalConfig):
        config = RetrievalConfig(corpus=None if config is None else str(config))
    config = replace(config, **settings)
    if config.url is not None:
        return SEARCH_SERVICES[config.url.partition("://")[0]](config)
    if corpus is None:
        from dlm_rag.retrieval.corpus import open_corpus

        if config.corpus is None:
            raise ConfigError("no corpus: give --corpus FILE, or retrieval.url=URL")
        corpus = open_corpus(config.corpus, config.index_dir)
    if config.top_k > len(corpus):
        log.warning("top_k=%d, but the corpus has %d passages: all are used", config.top_k, len(corpus))
    return look_up(RETRIEVERS, config.method, "retrieval.method")(config, corpus)


def _load_bm25(config: RetrievalConfig, corpus: "Corpus") -> "CorpusRetriever":
    from dlm_rag.retrieval.bm25 import BM25Retriever
    from dlm_rag.retrieval.hybrid import MultiQueryRetriever

    retriever = BM25Retriever(corpus, config.top_k)
    return MultiQueryRetriever(retriever) if config.bm25_query == "sentences" else retriever


def _load_dense(config: RetrievalConfig, corpus: "Corpus") -> "CorpusRetriever":
    from dlm_rag.retrieval.dense import open_dense_retriever
    from dlm_rag.retrieval.encoder import load_text_encoder

    return open_dense_retriever(corpus, config.top_k, load_text_encoder(config))


def _load_hybrid(config: RetrievalConfig, corpus: "Corpus") -> "CorpusRetriever":
    from dlm_rag.retrieval.hybrid import HybridRetriever

    parts = [RETRIEVERS[method](config, corpus) for method in ("bm25", "dense")]
    return HybridRetriever(parts, config.top_k, config.fusion_depth)


def _load_none(config: RetrievalConfig, corpus: "Corpus") -> "CorpusRetriever":
    from dlm_rag.retrieval.hybrid import NoRetriever

    return NoRetriever(corpus, config.top_k)


def _load_milvus(config: RetrievalConfig) -> "Retriever":
    from dlm_rag.retrieval.milvus_retriever import open_milvus_retriever

    return open_milvus_retriever(config)


def _load_http(config: RetrievalConfig) -> "Retriever":
    from dlm_rag.retrieval.http_retriever import HttpRetriever

    assert config.url is not None
    return HttpRetriever(config.url, config.top_k, config.timeout)


@dataclass(frozen=True)
class RetrieverLoader:
    """Makes a retriever of a corpus; `settings` are the fields of `RetrievalConfig` that it reads.

    `corpus`, `oracle` and `index_dir` hold for every retriever and are not listed.
    """

    load: Callable[[RetrievalConfig, "Corpus"], "CorpusRetriever"]
    settings: tuple[str, ...] = ()

    def __call__(self, config: RetrievalConfig, corpus: "Corpus") -> "CorpusRetriever":
        return self.load(config, corpus)


_DENSE_SETTINGS = ("top_k", "embedding_model", "embedding_batch_size", "query_prompt", "passage_prompt")

# By `retrieval.method`, which may also be `module:function` with the arguments of a `RetrieverLoader`.
RETRIEVERS = {
    "bm25": RetrieverLoader(_load_bm25, ("top_k", "bm25_query")),
    "dense": RetrieverLoader(_load_dense, _DENSE_SETTINGS),
    "hybrid": RetrieverLoader(_load_hybrid, ("bm25_query", *_DENSE_SETTINGS, "fusion_depth")),
    "none": RetrieverLoader(_load_none),
}
# By the scheme of `retrieval.url`.
SEARCH_SERVICES: dict[str, Callable[[RetrievalConfig], "Retriever"]] = {
    "http": _load_http,
    "https": _load_http,
    "milvus": _load_milvus,
}
