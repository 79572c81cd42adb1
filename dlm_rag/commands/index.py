"""Build the index of a corpus ahead of time, on this machine or in Milvus.

    dlm-rag index --corpus passages.jsonl                           # in ~/.cache/dlm_rag
    dlm-rag index --corpus passages.jsonl --model smollm2           # as it searches
    dlm-rag index --corpus passages.jsonl retrieval.method=hybrid
    dlm-rag index --corpus passages.jsonl --to milvus://HOST:19530/COLLECTION retrieval.method=dense

Search a collection with `retrieval.url=milvus://HOST:19530/COLLECTION retrieval.method=dense`. Run the same
command again to resume; a finished index is left alone.
"""

from dlm_rag.cli import print_note
from dlm_rag.commands.arguments import SEARCH_SETTINGS, parse_command_line
from dlm_rag.config.fields import check_url
from dlm_rag.errors import ConfigError, RunError
from dlm_rag.progress import show_status
from dlm_rag.retrieval import load_retriever
from dlm_rag.retrieval.base import SearchUnavailableError
from dlm_rag.retrieval.corpus import open_corpus

WRITE_TIMEOUT_SECONDS = 60.0  # that one write may take: a server stores more slowly than it searches


def main(argv: list[str]) -> None:
    target = "URL of the collection to build, milvus://HOST:PORT/COLLECTION; none: the index is kept here"
    words = parse_command_line(__doc__ or "", argv, SEARCH_SETTINGS, options={"to": ("", target)})
    config, url = words.fill_retrieval(), words.options["to"]
    if config.corpus is None or config.method == "none":
        raise ConfigError("a corpus is indexed: give --corpus FILE, and another method than none")
    if not url:
        corpus = open_corpus(config.corpus, config.index_dir)
        load_retriever(config, corpus)
        print_note(f"{len(corpus):,} passages are indexed in {corpus.folder}")
        return
    from dlm_rag.retrieval.milvus import MilvusCollection, check_method, ingest_corpus

    check_url("--to", url, ("milvus",), "MILVUS_TOKEN")
    check_method(url, config.method)
    show_status(f"asking {url}")
    collection = MilvusCollection(url, WRITE_TIMEOUT_SECONDS)
    try:
        collection.describe()  # what is not a collection of ours is found before a long read
        show_status("reading the corpus")
        corpus = open_corpus(config.corpus, config.index_dir)
        written = ingest_corpus(collection, corpus, config)
    except SearchUnavailableError as error:
        raise RunError(f"{error}; the same command resumes there") from None
    except KeyboardInterrupt:
        print_note("the same command resumes there")
        raise
    there = f"{len(corpus):,} passages are in {url}"
    print_note(f"{there}, {written:,} of them new" if written else f"{there} already, and it is finished")
