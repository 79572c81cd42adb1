"""Corpora, indexes, retrievers (`RETRIEVERS`, by `retrieval.method`), and the queries they answer."""

import logging
import os
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dlm_rag.config import RetrievalConfig, fields
from dlm_rag.config.sections import BM25_NAMES
from dlm_rag.errors import ConfigError

if TYPE_CHECKING:
    from dlm_rag.retrieval.base import CorpusRetriever
    from dlm_rag.retrieval.corpus import Corpus

log = logging.getLogger(__name__)
os.environ.setdefault("JAX_PLATFORMS", "cpu")  # bm25s starts JAX, which reserves most of a GPU's memory


def load_retriever(
    config: "RetrievalConfig | str | Path | Iterable[Any] | None" = None,
    corpus: "Corpus | str | Path | Iterable[Any] | None" = None,
    model: str | Path | None = None,
    **settings: Any,
) -> "CorpusRetriever":
    """The retriever that a config describes. Its index is built at the first use.

    `config` can be just a corpus: the path of a file or folder, or passages as texts, dicts with `text`
    (and `id`, `title`), or a table of pandas. `settings` are fields of `RetrievalConfig`, as in
    `load_retriever("corpus.jsonl", method="hybrid", top_k=5)` and `load_retriever(url="http://...")`.
    `corpus` is the opened corpus, if the caller has it. `model` is the checkpoint that answers, whose own
    settings of retrieval (as `top_k`) are the defaults. What searches `url` has no corpus, but `search`.
    Raises `UserError` if the corpus, index, model or service cannot be used; a service gets one request.
    """
    from dlm_rag.retrieval.corpus import Corpus, names_file, open_corpus, store_texts

    given = config if corpus is None and not isinstance(config, RetrievalConfig) else corpus
    config = config if isinstance(config, RetrievalConfig) else RetrievalConfig()
    if isinstance(given, str) and " " in given and not names_file(given):
        raise ConfigError(f"there is no file '{given:.60}': give a text as a list, corpus=[text]")
    if not isinstance(given, Corpus | None):
        path = given if isinstance(given, str | Path) else store_texts(given, settings.get("index_dir"))
        config, given = fields.replace_settings(config, corpus=str(path)), None
    config = fields.replace_settings(config, **settings)
    fields.check_section("retrieval", config, settings)
    if model is not None:
        config = fields.fill_unset(config, read_retrieval_settings(model))
    if config.url is not None:
        place = "milvus:open_milvus_retriever" if config.url.startswith("milvus:") else "http:HttpRetriever"
        return fields.import_object(f"dlm_rag.retrieval.{place}", "retrieval.url")(config)
    if given is None:
        if config.corpus is None:
            raise ConfigError("no corpus: give --corpus FILE, or retrieval.url=URL")
        given = open_corpus(config.corpus, config.index_dir)
    if config.top_k > len(given):
        log.warning("top_k=%d, passages in the corpus: %d; all are used", config.top_k, len(given))
    found = fields.resolve_or_import(RETRIEVERS, config.method, "retrieval.method", 2)(config, given)
    if not hasattr(found, "search"):
        raise ConfigError(f"retrieval.method={config.method} returned {type(found).__name__}, no Retriever")
    return found


def read_retrieval_settings(model: str | Path) -> dict[str, Any]:
    """The settings of retrieval of a checkpoint, or else of an adapter's base; raises `CheckpointError`."""
    from dlm_rag.config.sections import GENERATION_FILE, read_generation_settings
    from dlm_rag.files.hub import ADAPTER_CONFIG, read_checkpoint_json, resolve_hub_folder

    folder = resolve_hub_folder(model, "model")
    if (folder / ADAPTER_CONFIG).exists() and not (folder / GENERATION_FILE).exists():
        base = read_checkpoint_json(folder / ADAPTER_CONFIG).get("base_model_name_or_path")
        if isinstance(base, str) and base:
            folder = resolve_hub_folder(base, f"the base of {folder}:")
    return read_generation_settings(folder)[1]


@dataclass(frozen=True)
class RetrieverLoader:
    """Makes a retriever by `module:function`. settings: of the config, that it alone reads."""

    load: str
    settings: tuple[str, ...] = ()

    def __call__(self, config: RetrievalConfig, corpus: "Corpus") -> "CorpusRetriever":
        return fields.import_object(self.load, "retrieval.method")(config, corpus)


_BM25 = ("top_k", *BM25_NAMES)
_DENSE = ("embedding_model", "query_prompt", "passage_prompt")

# By `retrieval.method`, which may also be `module:function` with the arguments of a `RetrieverLoader`.
RETRIEVERS = {
    "bm25": RetrieverLoader("dlm_rag.retrieval.bm25:open_bm25_retriever", (*_BM25, "min_score_ratio")),
    "dense": RetrieverLoader("dlm_rag.retrieval.dense:open_dense_retriever", ("top_k", *_DENSE)),
    "hybrid": RetrieverLoader("dlm_rag.retrieval.dense:open_hybrid_retriever", (*_BM25, *_DENSE)),
    "none": RetrieverLoader("dlm_rag.retrieval.base:open_no_retriever"),
}
