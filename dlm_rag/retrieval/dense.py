"""Dense retrieval: any sentence-transformers model (a folder or a hub id, none of whose code is run), exact
search in torch over vectors in a file."""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from dlm_rag.config import RetrievalConfig
from dlm_rag.config.fields import replace_settings
from dlm_rag.errors import CheckpointError, RunError, translate_failures
from dlm_rag.files.build_once import build_once, build_shard, make_folder_name
from dlm_rag.files.hub import HUB_FILE_PATTERNS, check_checkpoint_files, read_any_json, resolve_hub_folder
from dlm_rag.files.paths import expand_path, resolve_path_inside
from dlm_rag.machine import has_bfloat16
from dlm_rag.nvtx_ranges import profile_stage
from dlm_rag.progress import report_progress
from dlm_rag.retrieval import base
from dlm_rag.retrieval.corpus import Corpus

if TYPE_CHECKING:
    from sentence_transformers import SentenceTransformer

EmbedFunction = Callable[[list[str]], Tensor]  # n texts -> (n, width) float32 unit vectors on one device

BATCH_SIZE = 64  # texts embedded at once
VECTORS_FILE = "vectors.npy"
SHARD_BYTES = 1 << 30  # of the corpus, that are encoded at once
SEARCH_BLOCK_BYTES = 256 << 20  # of passage vectors that one product reads
_ELSEWHERE = ("tokenizer_name_or_path", "processor_name")  # settings that name another folder
log = logging.getLogger(__name__)
_PICKLED = (".bin", ".pt", ".pth", ".ckpt", ".pkl", ".pickle")


class DenseRetriever(base.CorpusRetriever):
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

    def rank(self, queries: Sequence[base.Query], depth: int) -> list[base.Ranking]:
        with profile_stage("retrieve/embed"):
            vectors = self._embed([query.text for query in queries])
        with profile_stage("retrieve/search"):
            return self._find_nearest(vectors, depth)

    @torch.inference_mode()
    def _find_nearest(self, vectors: Tensor, depth: int) -> list[base.Ranking]:
        """Rows of the `depth` most similar passages per vector (n, width), equal ones in corpus order."""
        # A matrix product, whose last bits differ with the place, chooses; similarities in float64 order.
        depth, width = min(depth, len(self.corpus)), vectors.shape[1]
        block = max(depth, SEARCH_BLOCK_BYTES // (4 * width))
        # Each of two float32 sums of unit vectors may be off by width * 2^-24 (Higham 2002, section 3.1).
        slack = 2 * width * 2.0**-24 + 10.0**-base.TIE_DECIMALS
        asked, exact = vectors.to(self._device), vectors.cpu().double()
        worst = asked.new_full((len(asked), 1), -torch.inf)  # of the `depth` best so far
        hits: list[base.Hits] = [[] for _ in vectors]
        for start in range(0, len(self.corpus), block):
            part = self._vectors[start : start + block].to(self._device)
            scores = asked @ part.T
            if len(part) >= depth:
                worst = worst.maximum(scores.topk(depth).values[:, -1:])
            for n, near in enumerate(scores >= worst - slack):
                rows = near.nonzero().flatten()
                found = (part[rows].cpu().double() * exact[n]).sum(1).tolist()
                hits[n] += zip(found, (rows + start).tolist(), strict=True)
                hits[n] = base.select_top_hits(hits[n], depth)
        return [[row for _, row in found] for found in hits]


def open_dense_retriever(config: RetrievalConfig, corpus: Corpus) -> base.MultiQueryRetriever:
    """Dense retrieval; the passage vectors are computed once for these passages and weights, and kept.

    The parts of a query take turns: on HotpotQA and 2WikiMultiHopQA that finds more than reciprocal rank
    fusion, which favours what is middling for every part (`profiling/bench_retrieval.py`, docs/log.md).
    """
    encoder = TextEncoder(config)
    folder = build_once(
        corpus.folder / encoder.index_folder_name,
        lambda scratch: _embed_corpus(corpus, scratch, encoder),
        resumable=True,
    )
    # "c" maps the file privately, as torch asks for writable memory; nothing writes to it.
    vectors = np.load(folder / VECTORS_FILE, mmap_mode="c")
    dense = DenseRetriever(corpus, config.top_k, encoder.encode_queries, vectors, encoder.device)
    found = base.MultiQueryRetriever(dense)
    found.weights = f"-{encoder.index_folder_name}"
    return found


def open_hybrid_retriever(config: RetrievalConfig, corpus: Corpus) -> base.HybridRetriever:
    """BM25 and dense search, fused."""
    from dlm_rag.retrieval.bm25 import open_bm25_retriever

    ranked = replace_settings(config, min_score_ratio=0.0)  # all of it, whatever a checkpoint wants
    parts = [open_bm25_retriever(ranked, corpus), open_dense_retriever(config, corpus)]
    found = base.HybridRetriever(parts, config.top_k)
    found.weights = parts[1].weights
    return found


def _embed_corpus(corpus: Corpus, scratch: Path, encoder: TextEncoder) -> None:
    """Writes the vectors of all passages, shard by shard; what earlier attempts encoded is used."""
    cut, limit = 0, encoder.max_tokens

    def encode(rows: range) -> dict[str, np.ndarray]:
        nonlocal cut
        texts = [passage.text for passage in corpus.read_passages(rows)]
        cut += sum(len(text) > 5 * limit for text in texts)  # perhaps shorter ones, too
        return {"vectors": encoder.encode_passages(texts).cpu().numpy()}

    # Many batches at a time, for the encoder sorts texts by length to waste less padding.
    shards = corpus.split_into_shards(scratch, 64 * BATCH_SIZE, SHARD_BYTES)
    with report_progress(f"embedding passages with {encoder.model}", len(corpus)) as advance:
        for shard in shards:
            advance(build_shard(encode, shard))
    if cut:
        log.warning("at least %d passages may exceed the %d tokens of %s", cut, limit, encoder.model)
    parts = [np.load(folder / VECTORS_FILE, mmap_mode="r") for _, folder in shards]
    layout = np.lib.format.header_data_from_array_1_0(parts[0])
    with (scratch / VECTORS_FILE).open("wb") as file:
        shape = (len(corpus), *parts[0].shape[1:])
        np.lib.format.write_array_header_1_0(file, layout | {"shape": shape})
        for part in parts:
            file.write(part.tobytes())


class TextEncoder:
    """The sentence-transformers model that a config names (a folder or hub id), and its prompts. Raises
    `CheckpointError` when the model cannot be loaded, `RunError` when its vectors are not finite."""

    def __init__(self, config: RetrievalConfig) -> None:
        self.model = config.embedding_model
        self._encoder = load_sentence_transformer(self.model)
        self.device, self.max_tokens = self._encoder.device, self._encoder.max_seq_length or 2**31
        self.encode_queries: EmbedFunction = partial(self._embed, config.query_prompt)
        self.encode_passages: EmbedFunction = partial(self._embed, config.passage_prompt)
        self.index_folder_name = make_folder_name(
            "dense", Path(self.model).name, _fingerprint_encoder(self._encoder), config.passage_prompt
        )

    def _embed(self, prompt: str, texts: list[str]) -> Tensor:
        found = self._encoder.encode(
            texts, prompt=prompt, batch_size=BATCH_SIZE, convert_to_tensor=True,
            normalize_embeddings=True, show_progress_bar=False,
        ).float()  # fmt: skip
        if not torch.isfinite(found).all():
            raise RunError(f"embedding_model '{self.model}' gives vectors that are not finite")
        return found


def load_sentence_transformer(name: str, device: str | None = None) -> SentenceTransformer:
    """The sentence-transformers model in a folder or of a hub id, tried on one text.

    Without `trust_remote_code` the library (from 6.0 on) and transformers import nothing that a folder
    names; pickles and adapters are refused here. Raises `CheckpointError`.
    """
    if "/" not in name and not expand_path(name, CheckpointError).exists():
        name = f"sentence-transformers/{name}"  # as the library reads short names
    folder = resolve_hub_folder(name, "embedding_model")
    _check_encoder_files(folder)
    with translate_failures(CheckpointError, f"embedding_model '{name}' could not be loaded"):
        from sentence_transformers import SentenceTransformer  # takes seconds to import
        from transformers.utils.logging import disable_progress_bar

        disable_progress_bar()
        with _require_all_weights():
            encoder = SentenceTransformer(
                str(folder), device=device, trust_remote_code=False, local_files_only=True,
                model_kwargs={"use_safetensors": True},
            )  # fmt: skip
        if not has_bfloat16(encoder.device) and torch.bfloat16 in {p.dtype for p in encoder.parameters()}:
            encoder.float()  # which would only be emulated; float16 may be too narrow
        tried = encoder.encode(["Where was the first of them made?"], show_progress_bar=False)
        if not (abs(tried) < float("inf")).all() or not tried.any():
            raise RunError("its vector of a text is zero or not finite: its weights are damaged")
    return encoder


def _check_encoder_files(folder: Path) -> None:
    """Raises `CheckpointError` for pickles, adapters, and names of other folders."""
    if not (folder / "modules.json").is_file() and not (folder / "config.json").is_file():
        raise CheckpointError(f"{folder} is not a sentence-transformers model: it has no modules.json")
    check_checkpoint_files(folder, [f"**/{pattern}" for pattern in HUB_FILE_PATTERNS])
    for path in sorted(folder.rglob("*")):
        if path.is_dir() and path.is_symlink():
            raise CheckpointError(f"{path} leads to another folder: copy it")
        if path.name == "adapter_config.json":
            raise CheckpointError(f"{path.parent} holds an adapter: merge it into the weights")
        # Under this name only: next to an index of shards, say, the library opens the pickle.
        if path.suffix in _PICKLED and not path.with_name("model.safetensors").is_file():
            pickled = f"{path.parent} holds pickled weights ({path.name}) and no model.safetensors"
            raise CheckpointError(f"{pickled}: they are never opened, convert or remove them")
        if path.name.endswith(("config.json", "modules.json")):
            settings = read_any_json(path)  # whatever is wrong is named by file
            for key in _ELSEWHERE if isinstance(settings, dict) else ():
                if settings.get(key):
                    raise CheckpointError(f"{path} has {key}={settings[key]!r:.60}: copy its files here")
            for module in settings if isinstance(settings, list) else ():
                if isinstance(module, dict) and module.get("path"):
                    resolve_path_inside(folder, module["path"], str(path), CheckpointError)


@contextmanager
def _require_all_weights() -> Iterator[None]:
    """Raises `RunError` for tensors that transformers only says it initialised; a pooler is unused."""
    missing: list[str] = []

    def keep(record: logging.LogRecord) -> bool:  # the report has a table of rows "name | MISSING"
        rows = (line.partition("|") for line in record.getMessage().splitlines())
        names = (name.strip(" \t-+*") for name, _, status in rows if "MISSING" in status)
        missing.extend(name for name in names if name and "pooler" not in name)
        return "LOAD REPORT" not in record.getMessage()

    logger = logging.getLogger("transformers.modeling_utils")
    level = logger.level
    logger.addFilter(keep)
    logger.setLevel(logging.WARNING)
    try:
        with torch.random.fork_rng(devices=()):
            torch.manual_seed(0)
            yield
    finally:
        logger.removeFilter(keep)
        logger.setLevel(level)
    if missing:
        raise RunError(f"{missing[0]} is missing from its weights: the download may be incomplete")


def _fingerprint_encoder(encoder: SentenceTransformer) -> str:
    """Digest of weights, modules and tokenizer: vectors of another encoder of that name are not used."""
    digest = hashlib.sha256(f"{getattr(encoder, 'default_prompt_name', None) or ''}{encoder}".encode())
    backend = getattr(encoder.tokenizer, "backend_tokenizer", None)
    digest.update((backend.to_str() if backend else repr(encoder.tokenizer)).encode())
    for name, value in encoder.state_dict().items():
        digest.update(name.encode())
        digest.update(value.detach().cpu().contiguous().flatten().view(torch.uint8).numpy())
    return digest.hexdigest()
