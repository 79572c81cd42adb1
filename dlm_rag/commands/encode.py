"""Fill an evidence store ahead of time: compute keys and values of every passage of a corpus once.

    dlm-rag encode --corpus passages.jsonl engine.store=FOLDER
    dlm-rag encode --corpus passages.jsonl engine.store=FOLDER --model DIR_OR_HUB_ID \\
        model.evidence_layout=independent
    torchrun --nproc-per-node 4 -m dlm_rag encode ...      # four processes, one per GPU

Programs with the same model, precision and engine.store read them from there. Run the same command again
to resume: passages already stored are skipped.
"""

import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from datetime import timedelta
from functools import cached_property
from typing import TYPE_CHECKING

from dlm_rag.cli import print_note
from dlm_rag.commands.arguments import parse_command_line
from dlm_rag.commands.prepare_decoder import fill_in_shipped_files, prepare_decoder
from dlm_rag.config import Config, RetrievalConfig
from dlm_rag.errors import ConfigError, RunError
from dlm_rag.progress import format_bytes, format_duration, report_progress, show_status
from dlm_rag.retrieval.base import CorpusRetriever

if TYPE_CHECKING:
    from dlm_rag.engine.store import EvidenceStore
    from dlm_rag.model.denoiser import Denoiser
    from dlm_rag.model.packed_batch import Segment

READS = (
    "model", "prompt", "engine", "-engine.memory_gib", "-engine.prefix_cache_gib",
    "retrieval.corpus", "retrieval.index_dir",
    "decode", "-decode", "out", "-out",  # as sample: without a model the shipped reader
)  # fmt: skip
BATCH_TOKENS = 4096  # of passages that are encoded in one call
COUNTED = ("encoded", "present", "evicted", "bytes")  # passages, entries of the store
MAX_WAIT = timedelta(days=14)  # that a process waits for the others
PART_PASSAGES = 128  # that are encoded before they are counted


def main(argv: list[str]) -> None:
    words = parse_command_line(__doc__ or "", argv, READS)
    config = fill_in_shipped_files(words.config, [])
    if config.engine.store is None:
        raise ConfigError("name the folder that is to be filled: engine.store=FOLDER")
    from dlm_rag.training.distributed import DistributedContext

    processes = DistributedContext.init(MAX_WAIT)
    device = str(processes.local_device(config.model.device))
    config = replace(config, model=replace(config.model, device=device))
    encoder = PassageEncoder(config)
    if processes.is_main:
        words.announce_reader()
    passages, start = len(encoder.corpus), time.perf_counter()
    parts = [range(n, min(n + PART_PASSAGES, passages)) for n in range(0, passages, PART_PASSAGES)]
    mine, found = parts[processes.rank :: processes.world_size], Counter(dict.fromkeys(COUNTED, 0))
    try:
        with report_progress("encoding passages", sum(map(len, mine))) as advance:
            for part in mine:
                found.update(encoder.encode_rows(part))
                advance(len(part))
    except KeyboardInterrupt:
        print_note(f"{found['encoded']:,} passages encoded; the same command goes on from here")
        raise
    sums = processes.all_reduce_sum([found[name] for name in COUNTED])
    processes.destroy()
    if processes.is_main:
        encoded, present, evicted, written = map(int, sums)
        took = f"{format_bytes(written)} in {format_duration(time.perf_counter() - start)}"
        left = f"{evicted:,} had to leave (the disk is half full), " if evicted else ""
        print_note(f"{encoded:,} passages encoded, {present:,} there already, {left}{took}")


class PassageEncoder:
    """Encodes passages of a corpus into a store; the model is loaded when the first one is."""

    def __init__(self, config: Config) -> None:
        """Raises `UserError` for whatever is wrong with checkpoint, corpus, store or layout."""
        own = config.retrieval
        unsearched = RetrievalConfig(corpus=own.corpus, index_dir=own.index_dir, method="none", top_k=1)
        self._config = replace(config, retrieval=unsearched)
        self._prepared = prepare_decoder(self._config, [])
        assert isinstance(self._prepared.retriever, CorpusRetriever)
        self.corpus = self._prepared.retriever.corpus
        from dlm_rag.evidence.truncation import ContextBudget
        from dlm_rag.model.evidence_layouts import EVIDENCE_LAYOUTS

        layout = self._prepared.evidence_layout
        if not EVIDENCE_LAYOUTS[layout].separate_passages:
            raise ConfigError(
                f"with evidence_layout={layout} what is kept of a passage depends on the whole prompt: "
                "set model.evidence_layout=independent"
            )
        self._room = ContextBudget.from_config(self._prepared.checkpoint.config, layout)

    def encode_rows(self, rows: Sequence[int]) -> dict[str, int]:
        """Encodes those of some passages that the store lacks; returns when they are written.

        Counts what was encoded, was there, and had to leave, and bytes written. Raises `RunError` where the
        disk takes no more.
        """
        import torch

        from dlm_rag.engine.memory import KVFormat
        from dlm_rag.evidence.encode_segments import encode_segments

        store, denoiser = self._store
        form = KVFormat(denoiser, self._config.engine.cache_dtype)
        passages = [self._find_segment(passage.text) for passage in self.corpus.read_passages(rows)]
        lacking = [segment for segment in dict.fromkeys(passages) if segment not in store]
        before, size = replace(store.stats), max(1, BATCH_TOKENS // self._room.passage_length)
        for start in range(0, len(lacking), size):
            batch = lacking[start : start + size]
            with torch.inference_mode():
                for segment, found in zip(batch, encode_segments(denoiser, batch), strict=True):
                    store.add(segment, form.pack(found, segment.start).cpu())
        store.flush()
        if store.is_full:
            raise RunError(f"{store.folder} takes no more entries; with more room the same command goes on")
        evicted = store.stats.evicted_entries - before.evicted_entries
        written = store.stats.written_bytes - before.written_bytes
        counts = len(lacking), len(passages) - len(lacking), evicted, written
        return dict(zip(COUNTED, counts, strict=True))

    @cached_property
    def _store(self) -> "tuple[EvidenceStore, Denoiser]":
        show_status("reading weights")
        from dlm_rag.engine.store import open_evidence_store
        from dlm_rag.model.denoiser import Denoiser

        made, engine = self._prepared, self._config.engine
        denoiser = Denoiser.from_pretrained(
            made.checkpoint, made.device, made.dtype, made.attention, self._config.model.quantize
        )
        if engine.compile:
            denoiser.compile_layers()
        store = open_evidence_store(engine, denoiser)
        assert store is not None
        return store, denoiser

    def _find_segment(self, text: str) -> "Segment":
        from dlm_rag.evidence.prompt_segments import lay_out_prompt
        from dlm_rag.evidence.truncation import truncate_evidence

        prompt, _ = truncate_evidence(self._prepared.tokenizer.build_prompt("?", [text]), self._room)
        laid = lay_out_prompt(prompt, self._prepared.checkpoint.config, self._room.layout)
        segments = (*laid.context_segments, *laid.later_segments)
        return next(segment for segment in segments if segment.ids == prompt.facts[0])
