"""Dense retrieval: any sentence-transformers model, exact search in torch over vectors in a file."""

import logging
from collections.abc import Callable, Sequence
from pathlib import Path
from time import perf_counter

import numpy as np
import torch
from torch import Tensor

from dlm_rag.config import RetrievalConfig
from dlm_rag.files.build_once import announce_build, build_once, build_shard
from dlm_rag.nvtx_ranges import profile_stage
from dlm_rag.progress import report_progress
from dlm_rag.retrieval.base import TIE_DECIMALS, CorpusRetriever, Hits, Ranking, select_top_hits
from dlm_rag.retrieval.composite import MultiQueryRetriever
from dlm_rag.retrieval.corpus import Corpus
from dlm_rag.retrieval.encoder import BATCH_SIZE, TextEncoder
from dlm_rag.retrieval.query import Query

log = logging.getLogger(__name__)

EmbedFunction = Callable[[list[str]], Tensor]  # n texts -> (n, width) float32 unit vectors on one device

VECTORS_FILE = "vectors.npy"
SAMPLE_BATCHES = 4  # that are encoded to tell the costs of a build
SHARD_BYTES = 1 << 30  # of the corpus, that are encoded at once
SEARCH_BLOCK_BYTES = 256 << 20  # of passage vectors that one product reads


class DenseRetriever(CorpusRetriever):
    """Cosine similarity of each query, one short text, with every passage."""

    def __init__(
        self, corpus: Corpus, top_k: int, embed: EmbedFunction, vectors: np.ndarray, device: torch.device
    ) -> None:
        """embed: of queries. vectors: of the passages, unit vectors (n, width) in float32."""
        super().__init__(corpus, top_k)
        self._embed, self._device = embed, device
        self._vectors = torch.from_numpy(vectors)
        if device.type == "cuda" and vectors.nbytes < torch.cuda.mem_get_info(device)[0] // 2:
            self._vectors = self._vectors.to(device)

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
        depth, width = min(depth, len(self.corpus)), vectors.shape[1]
        block = max(depth, SEARCH_BLOCK_BYTES // (4 * width))
        # Each of two float32 sums of unit vectors may be off by width * 2^-24 (Higham 2002, section 3.1).
        slack = 2 * width * 2.0**-24 + 10.0**-TIE_DECIMALS
        asked, exact = vectors.to(self._device), vectors.cpu().double()
        worst = asked.new_full((len(asked), 1), -torch.inf)  # of the `depth` best so far
        hits: list[Hits] = [[] for _ in vectors]
        for start in range(0, len(self.corpus), block):
            part = self._vectors[start : start + block].to(self._device)
            scores = asked @ part.T
            if len(part) >= depth:
                worst = worst.maximum(scores.topk(depth).values[:, -1:])
            for n, near in enumerate(scores >= worst - slack):
                rows = near.nonzero().flatten()
                found = (part[rows].cpu().double() * exact[n]).sum(1).tolist()
                hits[n] += zip(found, (rows + start).tolist(), strict=True)
                hits[n] = select_top_hits(hits[n], depth)
        return [[row for _, row in found] for found in hits]


def open_dense_retriever(config: RetrievalConfig, corpus: Corpus) -> MultiQueryRetriever:
    """Dense retrieval; the passage vectors are computed once for these passages and weights, and kept.

    Question and sentences are separate short queries (`Query.parts`), since one vector of all of
    them points at none of them. The best passage of each part comes first, then the second of each:
    on HotpotQA and 2WikiMultiHopQA that finds more than reciprocal rank fusion, which favours what
    is middling for every part (`profiling/bench_retrieval.py`, docs/log.md).
    """
    encoder = TextEncoder(config)
    folder = build_once(
        corpus.folder / encoder.index_folder_name,
        lambda scratch: _embed_corpus(corpus, scratch, config, encoder),
        resumable=True,
    )
    # "c" maps the file privately, as torch asks for writable memory; nothing writes to it.
    vectors = np.load(folder / VECTORS_FILE, mmap_mode="c")
    dense = DenseRetriever(corpus, config.top_k, encoder.encode_queries, vectors, encoder.device)
    return MultiQueryRetriever(dense)


def _embed_corpus(corpus: Corpus, scratch: Path, config: RetrievalConfig, encoder: TextEncoder) -> None:
    """Writes the vectors of all passages; what earlier attempts encoded is used.

    Each shard is encoded into a folder of its own. Raises `CorpusError`, `RunError` and `OSError`.
    """

    def encode(rows: range) -> dict[str, np.ndarray]:
        texts = [passage.text for passage in corpus.read_passages(rows)]
        return {"vectors": encoder.encode_passages(texts).cpu().numpy()}

    log.info("embedding %s passages with %s", f"{len(corpus):,}", config.embedding_model)
    # Many batches at a time, for the encoder sorts texts by length to waste less padding.
    shards = corpus.split_into_shards(scratch, 64 * BATCH_SIZE, SHARD_BYTES)
    _announce_costs(corpus, encode)
    with report_progress("embedding passages", len(corpus)) as advance:
        for shard in shards:
            advance(build_shard(encode, shard))
    rows = np.load(shards[0][1] / VECTORS_FILE, mmap_mode="r")
    layout = {"descr": np.lib.format.dtype_to_descr(rows.dtype), "fortran_order": False,
              "shape": (len(corpus), *rows.shape[1:])}  # fmt: skip
    with (scratch / VECTORS_FILE).open("wb") as file:
        np.lib.format.write_array_header_1_0(file, layout)
        for _, folder in shards:
            file.write(np.load(folder / VECTORS_FILE).tobytes())


def _announce_costs(corpus: Corpus, encode: Callable[[range], dict[str, np.ndarray]]) -> None:
    """Says what a long build takes, from what a sample of the passages does."""
    if (passages := SAMPLE_BATCHES * BATCH_SIZE) > len(corpus) / 80:
        return
    sample, start = range(0, len(corpus), len(corpus) // passages), perf_counter()
    found, share = encode(sample)["vectors"], len(corpus) / len(sample)
    seconds, size = share * (perf_counter() - start), 2 * share * found.nbytes
    announce_build(f"vectors of {len(corpus):,} passages", seconds, size, corpus.folder)
