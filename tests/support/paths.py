"""Where the repository and the reference data are."""

import os
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


SHARED = Path(os.environ.get("DLM_RAG_SHARED", ROOT.parent / "shared"))
