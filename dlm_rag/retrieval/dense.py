"""Dense retrieval: any sentence-transformers model, exact search in torch."""

import logging
import os
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from time import perf_counter

import numpy as np
import torch
from torch import Tensor

from dlm_rag.files.paths import write_text_atomic
from dlm_rag.nvtx_ranges import profile_stage
from dlm_rag.progress import ANNOUNCE_FROM_SECONDS, format_bytes, format_duration, report_progress
from dlm_rag.retrieval.base import (
    SCORE_TIE_DECIMALS,
    CorpusRetriever,
    Hits,
    MemoizedBatchFunction,
    Ranking,
    interleave_rankings,
    select_top_hits,
)
from dlm_rag.retrieval.build_once import build_once
from dlm_rag.retrieval.corpus import Corpus
from dlm_rag.retrieval.encoder import TextEncoder
from dlm_rag.retrieval.query import Query

log = logging.getLogger(__name__)

EmbedFunction = Callable[[list[str]], Tensor]  # n texts -> (n, width) float32 unit vectors on one device

VECTORS_FILE = "vectors.npy"
EMBEDDED_COUNT_FILE = "finished"  # in a half-built folder: how many passages have their vector
FLUSH_INTERVAL_SECONDS = 10.0  # seconds of embedding that a kill costs at most, and a block
SEARCH_BLOCK_BYTES = 256 << 20  # of passage vectors that one product reads
_RESCORE_BATCH_PASSAGES = 1 << 14  # passages whose exact similarity is computed at once


class DenseRetriever(CorpusRetriever):
    """Cosine similarity of each query part with every passage; the parts take turns.

    Question and sentences are separate short queries (`Query.parts`), since one vector of all of
    them points at none of them. The best passage of each part comes first, then the second of each:
    on HotpotQA and 2WikiMultiHopQA that finds more than reciprocal rank fusion, which favours what
    is middling for every part (`profiling/bench_retrieval.py`, docs/log.md).
    """

    query_fields = ("parts",)

    def __init__(
        self, corpus: Corpus, top_k: int, embed: EmbedFunction, vectors: np.ndarray, device: torch.device
    ) -> None:
        """embed: of query parts. vectors: (passages, width) float32, of unit length."""
        super().__init__(corpus, top_k)
        self._embed = MemoizedBatchFunction(embed)
        # On the CPU this is a view of the mapped file: the system reads and drops its pages.
        mapped = torch.from_numpy(vectors)
        self._vectors = mapped.to(device) if _fits_device_memory(vectors.nbytes, device) else mapped
        self._device = device

    def rank(self, queries: Sequence[Query], depth: int) -> list[Ranking]:
        parts = list(dict.fromkeys(part for query in queries for part in query.parts))
        if not parts:
            return [[] for _ in queries]
        with profile_stage("retrieve/embed"):
            vectors = torch.stack(self._embed(parts))
        with profile_stage("retrieve/search"):
            rankings = dict(zip(parts, self._nearest(vectors, depth), strict=True))
            return [
                interleave_rankings([rankings[part] for part in query.parts], depth) for query in queries
            ]

    @torch.inference_mode()
    def _nearest(self, vectors: Tensor, depth: int) -> list[Ranking]:
        """Rows of the `depth` most similar passages per vector (n, width), equal ones in corpus order.

        In a matrix product the last bits of equal passages differ with their place in it. It chooses those
        that may be among the best, block by block; their order is that of similarities in float64.
        """
        depth, width = min(depth, len(self.corpus)), vectors.shape[1]
        block = max(depth, SEARCH_BLOCK_BYTES // (4 * width))
        # Each of two float32 sums of unit vectors may be off by width * 2^-24 (Higham 2002, section 3.1).
        slack = 2 * width * 2.0**-24 + 10.0 ** -SCORE_TIE_DECIMALS["dense"]
        asked, exact = vectors.to(self._device), vectors.cpu().double()
        worst = asked.new_full((len(asked), 1), -torch.inf)  # of the `depth` best so far
        hits: list[Hits] = [[] for _ in vectors]
        for start in range(0, len(self.corpus), block):
            part = self._vectors[start : start + block].to(self._device)
            scores = asked @ part.T
            if len(part) >= depth:
                worst = worst.maximum(scores.topk(depth).values[:, -1:])
            places, rows = (scores >= worst - slack).nonzero(as_tuple=True)
            for some, near in zip(
                places.cpu().split(_RESCORE_BATCH_PASSAGES),
                rows.split(_RESCORE_BATCH_PASSAGES),
                strict=True,
            ):
                found = (exact[some] * part[near].cpu().double()).sum(1)
                for n, row, score in zip(some.tolist(), near.tolist(), found.tolist(), strict=True):
                    hits[n].append((score, start + row))
            hits = [select_top_hits(found, depth, SCORE_TIE_DECIMALS["dense"]) for found in hits]
        return [[row for _, row in found] for found in hits]


def open_dense_retriever(corpus: Corpus, top_k: int, encoder: TextEncoder) -> DenseRetriever:
    """Dense retrieval; the passage vectors are computed once for these passages and weights, and kept."""

    def build(scratch: Path) -> None:
        log.info("embedding %s passages with %s", f"{len(corpus):,}", encoder.model)
        # Many batches at a time, for the encoder sorts texts by length to waste less padding.
        _embed_corpus(corpus, scratch, encoder.encode_passages, 64 * encoder.batch_size)

    folder = build_once(corpus.folder / encoder.index_folder_name, build, resumable=True)
    # "c" maps the file privately, as torch asks for writable memory; nothing writes to it.
    vectors = np.load(folder / VECTORS_FILE, mmap_mode="c")
    return DenseRetriever(corpus, top_k, encoder.encode_queries, vectors, encoder.device)


def _embed_corpus(corpus: Corpus, scratch: Path, embed: EmbedFunction, block: int) -> None:
    """The vectors of all passages, `block` at a time; resumes a build that was stopped.

    The name of the folder tells encoders and corpora apart, so what lies there is of these. Vectors are
    on the disk before the count says so.
    """
    vectors, finished = _open_vectors(scratch, (len(corpus), embed(["width"]).shape[1]))
    if begun := finished:
        log.info("%s of them are there from before", f"{begun:,}")
    start = kept = perf_counter()
    try:
        with report_progress("embedding passages", len(corpus), done=begun) as advance:
            while finished < len(corpus):
                texts = [passage.text for passage in corpus[finished : finished + block]]
                vectors[finished : finished + len(texts)] = embed(texts).cpu().numpy()
                finished += len(texts)
                advance(len(texts))
                now = perf_counter()
                left = (now - start) / (finished - begun) * (len(corpus) - finished)
                if finished - begun == len(texts) and left > ANNOUNCE_FROM_SECONDS:
                    log.info(
                        "embedding takes about %s, and %s on disk; a search reads all of it, from memory "
                        "where it fits. If stopped, it resumes", format_duration(left),
                        format_bytes(vectors.nbytes)
                    )  # fmt: skip
                if now - kept > FLUSH_INTERVAL_SECONDS:
                    _flush_vectors(vectors, scratch, finished)
                    kept = now
    except KeyboardInterrupt:
        log.info("%s passages are embedded: the same command resumes there", f"{finished:,}")
        raise
    finally:
        _flush_vectors(vectors, scratch, finished)


def _open_vectors(scratch: Path, shape: tuple[int, int]) -> tuple[np.memmap, int]:
    """The file of the vectors, mapped, and how many passages have theirs."""
    path, count = scratch / VECTORS_FILE, scratch / EMBEDDED_COUNT_FILE
    with suppress(OSError, ValueError):  # nothing usable was left: begin again
        found, finished = np.lib.format.open_memmap(path, mode="r+"), int(count.read_text())
        if (found.shape, found.dtype) == (shape, np.float32) and 0 <= finished <= shape[0]:
            return found, finished
    vectors = np.lib.format.open_memmap(path, mode="w+", dtype=np.float32, shape=shape)
    if hasattr(os, "posix_fallocate"):  # a disk that is full is found now, not by a signal in the middle
        try:
            with path.open("rb+") as file:
                os.posix_fallocate(file.fileno(), 0, path.stat().st_size)
        except OSError:
            path.unlink()
            raise
    return vectors, 0


def _flush_vectors(vectors: np.memmap, scratch: Path, finished: int) -> None:
    vectors.flush()
    write_text_atomic(scratch / EMBEDDED_COUNT_FILE, str(finished))


def _fits_device_memory(size: int, device: torch.device) -> bool:
    if device.type != "cuda":
        return False
    free, _ = torch.cuda.mem_get_info(device)
    return size < free // 2
