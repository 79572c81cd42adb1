"""Dense retrieval: any sentence-transformers model, exact search in torch."""

import io
import logging
import math
import os
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from dlm_rag.config import RetrievalConfig
from dlm_rag.nvtx_ranges import profile_stage
from dlm_rag.progress import report_progress
from dlm_rag.retrieval.base import SCORE_TIE_DECIMALS, CorpusRetriever, Hits, Ranking, select_top_hits
from dlm_rag.retrieval.build_once import build_once
from dlm_rag.retrieval.composite import MultiQueryRetriever
from dlm_rag.retrieval.corpus import Corpus
from dlm_rag.retrieval.encoder import TextEncoder
from dlm_rag.retrieval.passage_vectors import (
    PassageVectors,
    describe_rows,
    open_faiss_flat_index,
    pack_rows,
)
from dlm_rag.retrieval.query import Query

log = logging.getLogger(__name__)

EmbedFunction = Callable[[list[str]], Tensor]  # n texts -> (n, width) float32 unit vectors on one device

VECTORS_FILE = "vectors.npy"
SEARCH_BLOCK_BYTES = 256 << 20  # of passage vectors that one product reads


class DenseRetriever(CorpusRetriever):
    """Cosine similarity of each query, one short text, with every passage."""

    def __init__(
        self, corpus: Corpus, top_k: int, embed: EmbedFunction, vectors: np.ndarray, device: torch.device
    ) -> None:
        """embed: of queries. vectors: of the passages, unit vectors as `passage_vectors` packs them."""
        super().__init__(corpus, top_k)
        self._embed, self._device = embed, device
        self._vectors = PassageVectors(vectors, device)

    def rank(self, queries: Sequence[Query], depth: int) -> list[Ranking]:
        if not queries:
            return []
        with profile_stage("retrieve/embed"):
            vectors = self._embed([query.text for query in queries])
        with profile_stage("retrieve/search"):
            return self._find_nearest(vectors, depth)

    @torch.inference_mode()
    def _find_nearest(self, vectors: Tensor, depth: int) -> list[Ranking]:
        """Rows of the `depth` most similar passages per vector (n, width), equal ones in corpus order.

        In a matrix product the last bits of equal passages differ with their place in it. It chooses those
        that may be among the best, block by block; their order is that of similarities in float64.
        """
        depth, width, digits = min(depth, len(self.corpus)), vectors.shape[1], SCORE_TIE_DECIMALS["dense"]
        block = max(depth, SEARCH_BLOCK_BYTES // (4 * width))
        # Each of two float32 sums of unit vectors may be off by width * 2^-24 (Higham 2002, section 3.1).
        slack = 2 * width * 2.0**-24 + 10.0**-digits
        asked, exact = vectors.to(self._device), vectors.cpu().double()
        worst = asked.new_full((len(asked), 1), -torch.inf)  # of the `depth` best so far
        hits: list[Hits] = [[] for _ in vectors]
        for start in range(0, len(self.corpus), block):
            part = self._vectors.read(start, start + block)
            scores = asked @ part.T
            if len(part) >= depth:
                worst = worst.maximum(scores.topk(depth).values[:, -1:])
            for n, near in enumerate(scores >= worst - slack):
                rows = near.nonzero().flatten()
                found = (part[rows].cpu().double() * exact[n]).sum(1).tolist()
                hits[n] += zip(found, (rows + start).tolist(), strict=True)
                hits[n] = select_top_hits(hits[n], depth, digits)
        return [[row for _, row in found] for found in hits]


def open_dense_retriever(config: RetrievalConfig, corpus: Corpus) -> MultiQueryRetriever:
    """Dense retrieval; the passage vectors are computed once for these passages and weights, and kept.

    Question and sentences are separate short queries (`Query.parts`), since one vector of all of
    them points at none of them. The best passage of each part comes first, then the second of each:
    on HotpotQA and 2WikiMultiHopQA that finds more than reciprocal rank fusion, which favours what
    is middling for every part (`profiling/bench_retrieval.py`, docs/log.md).
    """
    encoder = TextEncoder(config)
    if config.faiss_index is not None:
        width = encoder.encode_passages(["width"]).shape[1]
        vectors = open_faiss_flat_index(config.faiss_index, width, len(corpus))
        return _search_parts(corpus, config.top_k, encoder, vectors)

    def build(scratch: Path) -> None:
        log.info("embedding %s passages with %s", f"{len(corpus):,}", config.embedding_model)
        # Many batches at a time, for the encoder sorts texts by length to waste less padding.
        block = 64 * config.embedding_batch_size
        _embed_corpus(
            corpus, scratch / VECTORS_FILE, encoder.encode_passages, block, config.embedding_dtype
        )

    own = "" if config.embedding_dtype == "float32" else f"-{config.embedding_dtype}"
    folder = build_once(corpus.folder / f"{encoder.index_folder_name}{own}", build, resumable=True)
    # "c" maps the file privately, as torch asks for writable memory; nothing writes to it.
    vectors = np.load(folder / VECTORS_FILE, mmap_mode="c")
    return _search_parts(corpus, config.top_k, encoder, vectors)


def _search_parts(
    corpus: Corpus, top_k: int, encoder: TextEncoder, vectors: np.ndarray
) -> MultiQueryRetriever:
    return MultiQueryRetriever(
        DenseRetriever(corpus, top_k, encoder.encode_queries, vectors, encoder.device)
    )


def _embed_corpus(
    corpus: Corpus, path: Path, embed: EmbedFunction, block: int, dtype: str = "float32"
) -> None:
    """Writes the vectors of all passages, `block` at a time; resumes a build that was stopped.

    The name of the folder tells encoders and corpora apart, so what lies there is of these; its size says
    how many vectors there are. The last block is computed again: after a power cut a file may have its size
    and not its bytes.
    """
    kind, row = describe_rows(dtype, embed(["width"]).shape[1])
    header, partial, row_bytes = io.BytesIO(), path.with_suffix(".part"), kind.itemsize * math.prod(row)
    layout = {
        "descr": np.lib.format.dtype_to_descr(kind),
        "fortran_order": False,
        "shape": (len(corpus), *row),
    }
    np.lib.format.write_array_header_1_0(header, layout)
    head = header.getvalue()
    with partial.open("ab+") as file:
        begun = (file.tell() - len(head)) // row_bytes
        file.seek(0)
        if file.read(len(head)) != head or begun > len(corpus):
            begun = 0
            file.truncate(0)
            file.write(head)
        begun = max(0, begun - block)
        file.truncate(len(head) + begun * row_bytes)
        if begun:
            log.info("%s of them are there from before", f"{begun:,}")
        with report_progress("embedding passages", len(corpus), done=begun) as advance:
            for start in range(begun, len(corpus), block):
                texts = [passage.text for passage in corpus[start : start + block]]
                file.write(pack_rows(embed(texts), dtype).tobytes())
                file.flush()
                os.fsync(file.fileno())  # so that the last block alone may lack its bytes
                advance(len(texts))
    partial.rename(path)
