"""A decoder whose settings and files have all been checked, and how to load its weights."""

from __future__ import annotations

import datetime
import platform
from dataclasses import asdict, dataclass, replace
from importlib.metadata import version
from typing import TYPE_CHECKING, Any

from dlm_rag import __version__
from dlm_rag.config import Config
from dlm_rag.machine import describe_machine, get_code_commit, get_machine_name
from dlm_rag.progress import show_status

if TYPE_CHECKING:
    import torch

    from dlm_rag.decode.decoder import AnyDenoiser, Decoder
    from dlm_rag.decode.memory_budget import DecodeBudget
    from dlm_rag.decode.trace_file import TraceHeader
    from dlm_rag.model.checkpoint import Checkpoint
    from dlm_rag.retrieval.base import Retriever
    from dlm_rag.tokenizer import Tokenizer


@dataclass(frozen=True)
class PreparedDecoder:
    """Everything that was checked, and how to load the rest."""

    checkpoint: Checkpoint
    tokenizer: Tokenizer
    retriever: Retriever
    device: torch.device
    dtype: torch.dtype
    attention: str
    evidence_layout: str
    config: Config
    budget: DecodeBudget | None = None  # what `engine.memory_gib` comes to

    @property
    def weight_bytes(self) -> int:
        """Bytes of the weights once they are loaded."""
        return self.checkpoint.count_weight_bytes(self.dtype.itemsize)

    def load(self, denoiser: AnyDenoiser | None = None) -> Decoder:
        """Reads the weights, where they are not given."""
        show_status("reading weights")
        from dlm_rag.decode.decoder import Decoder
        from dlm_rag.decode.memory_budget import limit_cuda_allocator
        from dlm_rag.model.denoiser import load_denoiser

        limit_cuda_allocator(self.config.engine, self.device)
        if denoiser is None:
            denoiser = load_denoiser(self.checkpoint, self.device, self.dtype, self.attention)
        config, engine = self.config, replace(self.config.engine, memory_gib=None)
        decoder = Decoder(
            denoiser, self.retriever, self.tokenizer, config.decode, self.evidence_layout, engine
        )
        decoder.record_provisional = config.record_provisional or config.html is not None
        if self.budget is not None:
            decoder.set_memory_budget(self.budget)
        return decoder

    def answers_depend_on(self) -> dict[str, Any]:
        """All that can change an answer; batch size, device and names of files and hosts cannot.

        What answers at a URL, and what it searches, is in its fingerprint.
        """
        free = {"batch_size", "corpus", "index_dir", "embedding_batch_size"}
        free |= {"url", "timeout"}
        settings = {
            f"{section}.{key}": value
            for section in ("retrieval", "decode")
            for key, value in asdict(getattr(self.config, section)).items()
            if key not in free
        }
        if settings["decode.overlap"] == "pipeline":  # the same tokens
            settings["decode.overlap"] = "none"
        return settings | {
            "model": self.checkpoint.fingerprint,
            "corpus": self.retriever.fingerprint,
            "dtype": str(self.dtype).removeprefix("torch."),
            "evidence_layout": self.evidence_layout,
            "block_size": self.checkpoint.config.block_size,
            "engine.compile": self.config.engine.compile,
        }

    def trace_header(self) -> TraceHeader:
        """What the questions of a trace of this job have in common."""
        from dlm_rag.decode.trace_file import build_trace_header

        return build_trace_header(
            self.checkpoint.config,
            self.tokenizer,
            self.evidence_layout,
            self.config.decode,
            top_k=self.config.retrieval.top_k,
            model=self.checkpoint.fingerprint,
            corpus=self.retriever.fingerprint,
        )

    def stamp(self) -> dict[str, Any]:
        """What a result must carry to be understood later: code, settings, versions, machine."""
        import torch

        packages = ("torch", "transformers", "sentence-transformers", "bm25s", "numpy")
        return {
            "commit": get_code_commit(),
            "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
            "versions": {"python": platform.python_version(), "dlm_rag": __version__}
            | {package: version(package) for package in packages},
            "device": f"{self.device.type}: {get_machine_name(self.device)}",
            "threads": torch.get_num_threads(),
            "attention": self.attention,
            "machines": [describe_machine(self.device, self.attention)],  # that have answered, in order
            "seed": self.config.decode.seed,
            "energy": None,  # of each part of the run, once it has ended
            "answers_depend_on": self.answers_depend_on(),
            "config": asdict(self.config),
        }
