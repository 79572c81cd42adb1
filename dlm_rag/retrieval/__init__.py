"""Corpora, indexes, retrievers, and the queries they answer.

`RETRIEVERS` and `SEARCH_SERVICES` name what `retrieval.method` and the scheme of `retrieval.url` select.
"""

import logging
import os
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, overload

from dlm_rag.config import RetrievalConfig
from dlm_rag.config.fields import fill_unset, import_object, replace_settings, resolve_or_import
from dlm_rag.errors import ConfigError

if TYPE_CHECKING:
    from dlm_rag.retrieval.base import CorpusRetriever, Retriever
    from dlm_rag.retrieval.corpus import Corpus

log = logging.getLogger(__name__)
os.environ.setdefault("JAX_PLATFORMS", "cpu")  # bm25s starts JAX, which reserves most of a GPU's memory


@overload
def load_retriever(
    config: "str | Path | Iterable[Any]",
    corpus: "Corpus | None" = None,
    model: str | Path | None = None,
    **settings: Any,
) -> "CorpusRetriever": ...
@overload
def load_retriever(config: RetrievalConfig, corpus: "Corpus", **settings: Any) -> "CorpusRetriever": ...
@overload
def load_retriever(
    config: RetrievalConfig | None = None,
    corpus: "str | Path | Iterable[Any] | None" = None,
    model: str | Path | None = None,
    **settings: Any,
) -> "Retriever": ...
def load_retriever(
    config: "RetrievalConfig | str | Path | Iterable[Any] | None" = None,
    corpus: "Corpus | str | Path | Iterable[Any] | None" = None,
    model: str | Path | None = None,
    **settings: Any,
) -> "Retriever":
    """The retriever that a config describes. Its index is built at the first use.

    `config` can be just a corpus: the path of a file or folder, or passages as texts, dicts with `text`
    (and `id`, `title`), or a table of pandas. `settings` are fields of `RetrievalConfig`, as in
    `load_retriever("corpus.jsonl", method="hybrid", top_k=5)` and `load_retriever(url="http://...")`.
    `corpus` is the opened corpus, if the caller has it. `model` is the checkpoint that answers, whose own
    settings of retrieval (as `top_k`) are the defaults. Raises `UserError` if the corpus, index, model or
    service cannot be used; a service gets one request.
    """
    from dlm_rag.retrieval.corpus import Corpus, open_corpus, store_texts

    if not isinstance(config, RetrievalConfig | str | Path | None):
        config = str(store_texts(config, settings.get("index_dir")))
    if not isinstance(config, RetrievalConfig):
        config = RetrievalConfig(corpus=None if config is None else str(config))
    if not isinstance(corpus, Corpus | None):
        if not isinstance(corpus, str | Path):
            corpus = store_texts(corpus, settings.get("index_dir"))
        config, corpus = replace_settings(config, corpus=str(corpus)), None
    config = replace_settings(config, **settings)
    if model is not None:
        config = fill_unset(config, read_retrieval_settings(model))
    if config.url is not None:
        return import_object(SEARCH_SERVICES[config.url.partition("://")[0]], "retrieval.url")(config)
    if corpus is None:
        if config.corpus is None:
            raise ConfigError("no corpus: give --corpus FILE, or retrieval.url=URL")
        corpus = open_corpus(config.corpus, config.index_dir)
    if config.top_k > len(corpus):
        log.warning("top_k=%d, but the corpus has %d passages: all are used", config.top_k, len(corpus))
    return resolve_or_import(RETRIEVERS, config.method, "retrieval.method")(config, corpus)


def read_retrieval_settings(model: str | Path) -> dict[str, Any]:
    """The settings of retrieval that a checkpoint carries; raises `CheckpointError`."""
    from dlm_rag.config.sections import read_generation_settings
    from dlm_rag.files.hub import resolve_hub_folder

    return read_generation_settings(resolve_hub_folder(model, "model"))[1]


@dataclass(frozen=True)
class RetrieverLoader:
    """Makes a retriever of a config and a corpus; `settings` are the fields of the config that it reads.

    load: `module:function`, imported once it is needed. `corpus`, `oracle` and `index_dir` hold for every
    retriever and are not listed.
    """

    load: str
    settings: tuple[str, ...] = ()

    def __call__(self, config: RetrievalConfig, corpus: "Corpus") -> "CorpusRetriever":
        return import_object(self.load, "retrieval.method")(config, corpus)


_DENSE_SETTINGS = ("top_k", "embedding_model", "query_prompt", "passage_prompt")

# By `retrieval.method`, which may also be `module:function` with the arguments of a `RetrieverLoader`.
RETRIEVERS = {
    "bm25": RetrieverLoader("dlm_rag.retrieval.bm25:open_bm25_retriever", ("top_k", "bm25_query")),
    "dense": RetrieverLoader("dlm_rag.retrieval.dense:open_dense_retriever", _DENSE_SETTINGS),
    "hybrid": RetrieverLoader(
        "dlm_rag.retrieval.composite:open_hybrid_retriever", ("bm25_query", *_DENSE_SETTINGS)
    ),
    "none": RetrieverLoader("dlm_rag.retrieval.composite:open_no_retriever"),
}
# By the scheme of `retrieval.url`: what makes a retriever of a config.
SEARCH_SERVICES = {
    "http": "dlm_rag.retrieval.http:HttpRetriever",
    "https": "dlm_rag.retrieval.http:HttpRetriever",
    "milvus": "dlm_rag.retrieval.milvus:open_milvus_retriever",
}
