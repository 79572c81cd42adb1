"""dlm_rag: masked-diffusion language models that retrieve while they denoise.

    dlm_rag.load(corpus="notes").ask("Who wrote Emma?").answer

The names of the public interface are imported when first used, so that `import dlm_rag`
and `sample.py --help` do not wait for torch.
"""

import importlib
import os
from typing import TYPE_CHECKING, Any

# torch and numba each bring an OpenMP-like thread pool. When both spin while they wait, a forward
# pass on a busy machine takes 1.6 times as long, and 4.6 times at worst (docs/measurements/engine.md).
# The runtimes read these once, when they load, hence here; a value that the user has set wins.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
os.environ.setdefault("NUMBA_THREADING_LAYER", "workqueue")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
# Where colorama is installed, numba's coloured errors wrap our streams and write to dumb terminals.
os.environ.setdefault("NUMBA_DISABLE_ERROR_MESSAGE_HIGHLIGHTING", "1")

__version__ = "0.5.0.dev0"

if TYPE_CHECKING:
    from dlm_rag.config import DecodeConfig as DecodeConfig
    from dlm_rag.decode.trace_file import read_trace as read_trace
    from dlm_rag.engine.engine import Decoder as Decoder
    from dlm_rag.engine.engine import load as load
    from dlm_rag.model.denoiser import Denoiser as Denoiser
    from dlm_rag.questions import Question as Question
    from dlm_rag.retrieval import load_retriever as load_retriever
    from dlm_rag.tokenizer import Tokenizer as Tokenizer

_HOMES = {
    "DecodeConfig": "dlm_rag.config",
    "Decoder": "dlm_rag.engine.engine",
    "Denoiser": "dlm_rag.model.denoiser",
    "Question": "dlm_rag.questions",
    "Tokenizer": "dlm_rag.tokenizer",
    "load": "dlm_rag.engine.engine",
    "load_retriever": "dlm_rag.retrieval",
    "read_trace": "dlm_rag.decode.trace_file",
}
_INSTEAD = dict.fromkeys(
    (
        "pipeline", "from_pretrained", "AutoModel", "AutoModelForCausalLM", "Reader", "RAG", "Pipeline",
        "ask", "Model", "load_model", "load_corpus", "DiffusionLM",
    ),
    "load",
) | dict.fromkeys(("Retriever", "BM25Retriever", "BM25", "Corpus", "open_corpus"), "load_retriever") | {
    "AutoTokenizer": "Tokenizer", "load_tokenizer": "Tokenizer", "GenerationConfig": "DecodeConfig",
    "UserError": "errors.UserError", "Config": "config.Config", "Rollout": "decode.rollout.Rollout",
    "Passage": "retrieval.corpus.Passage", "Document": "retrieval.corpus.Passage",
    "read_questions": "questions.read_questions", "load_dataset": "questions.read_questions",
}  # fmt: skip
_COMMANDS = {"train": "train", "Trainer": "train", "evaluate": "evaluate", "serve": "serve"}
__all__ = [*_HOMES, "__version__"]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        right = f": use dlm_rag.{_INSTEAD[name]}" if name in _INSTEAD else ""
        if name in _COMMANDS:
            right = f": use the command `dlm-rag {_COMMANDS[name]}`"
        raise AttributeError(f"module 'dlm_rag' has no attribute '{name}'{right}")
    return getattr(importlib.import_module(_HOMES[name]), name)
