"""Build the index of a corpus ahead of time, on this machine or in Milvus.

    dlm-rag index --corpus passages.jsonl                           # in ~/.cache/dlm_rag
    dlm-rag index --corpus passages.jsonl --model smollm2           # as it searches
    dlm-rag index --corpus passages.jsonl retrieval.method=hybrid
    dlm-rag index --corpus passages.jsonl --to milvus://HOST:19530/COLLECTION retrieval.method=dense

Search a collection with `retrieval.url=milvus://HOST:19530/COLLECTION retrieval.method=dense`. Run the same
command again to resume; a finished index is left alone.
"""

import time
from dataclasses import replace
from typing import TYPE_CHECKING

from dlm_rag.cli import print_note
from dlm_rag.commands.arguments import SEARCH_SETTINGS, parse_command_line
from dlm_rag.commands.prepare_decoder import fill_in_shipped_files, prepare_decoder
from dlm_rag.config import RetrievalConfig
from dlm_rag.config.fields import check_url
from dlm_rag.errors import ConfigError, RunError
from dlm_rag.progress import format_bytes, format_duration, report_progress, show_status
from dlm_rag.retrieval import load_retriever
from dlm_rag.retrieval.base import CorpusRetriever, SearchUnavailableError
from dlm_rag.retrieval.corpus import open_corpus

if TYPE_CHECKING:
    from dlm_rag.engine.engine import Decoder
    from dlm_rag.evidence.prompt_segments import ContextBudget
    from dlm_rag.model.denoiser_config import Segment

WRITE_TIMEOUT_SECONDS = 60.0  # that one write may take: a server stores more slowly than it searches
ENCODE_SETTINGS = (
    "model", "prompt", "engine", "-engine.memory_gib", "-engine.prefix_cache_gib",
    "retrieval.corpus", "retrieval.index_dir",
    "decode", "-decode", "out", "-out",  # as sample: without a model the shipped reader
)  # fmt: skip
BATCH_TOKENS = 4096  # of passages that are encoded in one call


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


def encode(argv: list[str]) -> None:
    """Fill an evidence store ahead of time: compute keys and values of every passage of a corpus once.

        dlm-rag encode --corpus passages.jsonl engine.store=FOLDER
        dlm-rag encode --corpus passages.jsonl engine.store=FOLDER --model DIR_OR_HUB_ID \\
            model.evidence_layout=independent

    Programs with the same model, precision and engine.store read them from there. Run the same command
    again to resume: passages already stored are skipped.
    """
    words = parse_command_line(encode.__doc__ or "", argv, ENCODE_SETTINGS)
    config = fill_in_shipped_files(words.config, [])
    if config.engine.store is None:
        raise ConfigError("name the folder that is to be filled: engine.store=FOLDER")
    own = config.retrieval
    unsearched = RetrievalConfig(corpus=own.corpus, index_dir=own.index_dir, method="none", top_k=1)
    prepared = prepare_decoder(replace(config, retrieval=unsearched), [])
    from dlm_rag.evidence.prompt_segments import ContextBudget
    from dlm_rag.model.denoiser_config import EVIDENCE_LAYOUTS

    layout = prepared.evidence_layout
    if not EVIDENCE_LAYOUTS[layout].separate_passages:
        raise ConfigError(
            f"with evidence_layout={layout} what is kept of a passage depends on the whole prompt: "
            "set model.evidence_layout=independent"
        )
    words.announce_reader()
    room = ContextBudget.from_config(prepared.checkpoint.config, layout)
    fill_store(prepared.load(), room)


def fill_store(decoder: "Decoder", room: "ContextBudget") -> None:
    """Encodes the passages that the store lacks. Raises `RunError` where the disk takes no more."""
    cache, start = decoder.model_runner.cache, time.perf_counter()
    assert cache and cache.store, "this layout keeps evidence"
    assert isinstance(decoder.retriever, CorpusRetriever)
    store, corpus = cache.store, decoder.retriever.corpus
    encoded, size = 0, max(1, BATCH_TOKENS // room.passage_length)
    try:
        with report_progress("encoding passages", len(corpus)) as advance:
            for first in range(0, len(corpus), size):
                rows = range(first, min(first + size, len(corpus)))
                found = [find_segment(decoder, room, each.text) for each in corpus.read_passages(rows)]
                lacking = [segment for segment in dict.fromkeys(found) if segment not in store]
                cache.encode(lacking)
                store.flush()
                if store.is_full:
                    raise RunError(f"{store.folder} takes no more entries; with more room run this again")
                encoded += len(lacking)
                advance(len(rows))
    except KeyboardInterrupt:
        print_note(f"{encoded:,} passages encoded; the same command goes on from here")
        raise
    took = f"{format_bytes(store.written_bytes)} in {format_duration(time.perf_counter() - start)}"
    print_note(f"{encoded:,} passages encoded, {len(corpus) - encoded:,} there already, {took}")


def find_segment(decoder: "Decoder", room: "ContextBudget", text: str) -> "Segment":
    """The segment of a prompt that holds a passage."""
    from dlm_rag.evidence.prompt_segments import lay_out_prompt, truncate_evidence

    prompt, _ = truncate_evidence(decoder.tokenizer.build_prompt("?", [text]), room)
    laid = lay_out_prompt(prompt, decoder.denoiser.config, room.layout)
    return next(segment for segment in laid.context_segments if segment.ids == prompt.facts[0])
