"""dlm_rag: masked-diffusion language models that retrieve while they denoise.

The four names of the public interface are imported when first used, so that `import dlm_rag`
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

__version__ = "0.3.0"

if TYPE_CHECKING:
    from dlm_rag.decode.decoder import Decoder
    from dlm_rag.model.denoiser import Denoiser
    from dlm_rag.retrieval import load_retriever
    from dlm_rag.tokenizer import Tokenizer

_HOMES = {
    "Decoder": "dlm_rag.decode.decoder",
    "Denoiser": "dlm_rag.model.denoiser",
    "Tokenizer": "dlm_rag.tokenizer",
    "load_retriever": "dlm_rag.retrieval",
}
__all__ = ["Decoder", "Denoiser", "Tokenizer", "__version__", "load_retriever"]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'dlm_rag' has no attribute '{name}'")
    return getattr(importlib.import_module(_HOMES[name]), name)
