"""Fill an evidence store ahead: keys and values of every passage of a corpus, computed once.

    dlm-rag encode --corpus passages.jsonl engine.store=FOLDER
    dlm-rag encode --corpus passages.jsonl engine.store=FOLDER --model DIR_OR_HUB_ID \\
        model.evidence_layout=independent workers=auto

What decodes with the same model, precision and engine.store reads them there. Passages that are there are
skipped, so a run that was stopped goes on when the same command is given again. workers= are processes of
this machine, each with a model of its own: on GPUs one on each.
"""

import multiprocessing
import os
import signal
import threading
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from dataclasses import replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

from dlm_rag.cli import print_note
from dlm_rag.commands.arguments import parse_command_line
from dlm_rag.commands.prepare_decoder import fill_in_shipped_files, prepare_decoder
from dlm_rag.config import Config, RetrievalConfig
from dlm_rag.errors import ConfigError, RunError
from dlm_rag.progress import format_bytes, format_duration, report_progress, show_status
from dlm_rag.retrieval.base import CorpusRetriever

if TYPE_CHECKING:
    from dlm_rag.evidence.evidence_store import EvidenceStore
    from dlm_rag.model.denoiser import Denoiser
    from dlm_rag.model.packed_batch import Segment

READS = (
    "model", "engine", "-engine.memory_gib", "-engine.prefix_cache_gib", "-engine.cpu_offload_gib",
    "-engine.tensor_parallel",
    "retrieval.corpus", "retrieval.index_dir", "workers",
    "decode", "-decode", "out", "-out",  # as sample: without a model the shipped reader
)  # fmt: skip
BATCH_TOKENS = 4096  # of passages that are encoded in one call
PART_PASSAGES = 128  # that a process takes at a time


def main(argv: list[str]) -> None:
    words = parse_command_line(__doc__ or "", argv, READS)
    config = fill_in_shipped_files(words.config, [])
    if config.engine.store is None:
        raise ConfigError("name the folder that is to be filled: engine.store=FOLDER")
    if config.workers is not None and config.workers.startswith("ray://"):
        raise ConfigError("workers= of encode are processes of this machine: give a number, or auto")
    encoder = PassageEncoder(config)
    words.announce_reader()
    passages, start, found = len(encoder.corpus), time.perf_counter(), Counter[str]()
    parts = [range(n, min(n + PART_PASSAGES, passages)) for n in range(0, passages, PART_PASSAGES)]
    try:
        results = map(encoder.encode_rows, parts) if config.workers is None else _share(encoder, parts)
        with report_progress("encoding passages", passages) as advance:
            for counts in results:
                found.update(counts)
                advance(counts["encoded"] + counts["present"])
    except KeyboardInterrupt:
        print_note(f"{found['encoded']:,} passages encoded; the same command goes on from here")
        raise
    left = f", {found['evicted']:,} had to leave (engine.store_gib)" if found["evicted"] else ""
    print_note(
        f"{found['encoded']:,} passages encoded, {found['present']:,} there already{left}, "
        f"{format_bytes(found['bytes'])} in {format_duration(time.perf_counter() - start)}"
    )


class PassageEncoder:
    """Encodes passages of a corpus into a store; the model is loaded when the first one is."""

    def __init__(self, config: Config) -> None:
        """Raises `UserError` for whatever is wrong with checkpoint, corpus, store or layout."""
        own = config.retrieval
        unsearched = RetrievalConfig(corpus=own.corpus, index_dir=own.index_dir, method="none", top_k=1)
        self.config = replace(config, retrieval=unsearched)
        self.prepared = prepare_decoder(self.config, [])
        assert isinstance(self.prepared.retriever, CorpusRetriever)
        self.corpus = self.prepared.retriever.corpus
        from dlm_rag.evidence.truncation import ContextBudget
        from dlm_rag.model.evidence_layouts import EVIDENCE_LAYOUTS

        layout = self.prepared.evidence_layout
        if not EVIDENCE_LAYOUTS[layout].separate_passages:
            raise ConfigError(
                f"with evidence_layout={layout} what is kept of a passage depends on the whole prompt: "
                "set model.evidence_layout=independent"
            )
        self._room = ContextBudget.from_config(self.prepared.checkpoint.config, layout)

    def encode_rows(self, rows: Sequence[int]) -> dict[str, int]:
        """Encodes those of some passages that the store lacks; returns when they are written.

        Counts what was encoded, was there, and had to leave, and bytes written. Raises `RunError` where the
        disk takes no more.
        """
        from dlm_rag.evidence.store_speed import encode_for_store

        store, denoiser = self._store
        passages = [self._find_segment(passage.text) for passage in self.corpus.read_passages(rows)]
        lacking = [segment for segment in dict.fromkeys(passages) if segment not in store]
        before, size = replace(store.stats), max(1, BATCH_TOKENS // self._room.passage_length)
        for start in range(0, len(lacking), size):
            batch = lacking[start : start + size]
            kept = encode_for_store(denoiser, batch, self.config.engine.cache_dtype)
            for segment, tensor in zip(batch, kept, strict=True):
                store.add(segment, tensor)
        store.flush()
        if store.is_full:
            raise RunError(f"{store.folder} takes no more entries; with more room the same command goes on")
        return {
            "encoded": len(lacking),
            "present": len(passages) - len(lacking),
            "evicted": store.stats.evicted_entries - before.evicted_entries,
            "bytes": store.stats.written_bytes - before.written_bytes,
        }

    @cached_property
    def _store(self) -> "tuple[EvidenceStore, Denoiser]":
        show_status("reading weights")
        from dlm_rag.evidence.evidence_store import open_evidence_store
        from dlm_rag.model.denoiser import Denoiser

        made, engine = self.prepared, self.config.engine
        denoiser = Denoiser.from_pretrained(
            made.checkpoint, made.device, made.dtype, made.attention, self.config.model.quantize
        )
        if engine.compile:
            denoiser.compile_layers()
        store = open_evidence_store(engine, denoiser)
        assert store is not None
        if not store.writes:
            print_note(f"{store.describe()}; it is filled for other machines")
            store.writes = True
        return store, denoiser

    def _find_segment(self, text: str) -> "Segment":
        """What decoding asks for, of a passage."""
        from dlm_rag.evidence.prompt_segments import lay_out_prompt
        from dlm_rag.evidence.truncation import truncate_evidence

        prompt, _ = truncate_evidence(self.prepared.tokenizer.build_prompt("?", [text]), self._room)
        laid = lay_out_prompt(prompt, self.prepared.checkpoint.config, self._room.layout)
        segments = (*laid.context_segments, *laid.later_segments)
        return next(segment for segment in segments if segment.ids == prompt.facts[0])


def _share(encoder: PassageEncoder, parts: Sequence[range]) -> Iterator[dict[str, int]]:
    """Encodes in processes, which take the next part when they have done one. Raises `RunError`."""
    from dlm_rag.workers.placement import describe_local_node, plan_workers

    made, config, spawn = encoder.prepared, encoder.config, multiprocessing.get_context("spawn")
    place = plan_workers(
        str(config.workers), [describe_local_node(made.device)], made.device, made.weight_bytes
    )
    os.environ["OMP_NUM_THREADS"] = str(place.threads_per_worker)  # read when torch loads
    # Else each would measure the speed of the store, and the others with it.
    config = replace(config, engine=replace(config.engine, store_read="never"))
    start = (config, spawn.Value("i", 0), place.gpus_per_worker)
    with ProcessPoolExecutor(place.num_workers, spawn, _start_worker, start) as pool:
        try:
            for done in as_completed([pool.submit(_encode_part, part) for part in parts]):
                yield done.result()
        except BrokenProcessPool:
            raise RunError("a worker died: the same command goes on with what is left") from None
        finally:
            pool.shutdown(cancel_futures=True)  # what is under way is finished


def _start_worker(config: Config, started: Any, gpus: int) -> None:
    global _encoder
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the first process takes it
    threading.Thread(target=_end_with_first_process, daemon=True).start()
    os.environ["RANK"] = "1"  # which draws nothing
    with started.get_lock():
        number, started.value = started.value, started.value + 1
    if gpus:
        config = replace(config, model=replace(config.model, device=f"cuda:{number}"))
    _encoder = PassageEncoder(config)


def _end_with_first_process() -> None:
    first = multiprocessing.parent_process()
    assert first is not None
    first.join()
    os._exit(1)  # it was killed: nobody hands out parts any more


def _encode_part(rows: range) -> dict[str, int]:
    return _encoder.encode_rows(rows)


_encoder: PassageEncoder  # of a worker process
