"""Check this machine: what works, what could be better, what is broken, and the command that fixes it.

    dlm-rag doctor            # one line per check, to paste into a bug report
    dlm-rag doctor model.device=cpu retrieval.index_dir=/scratch/indexes

Nothing is downloaded or changed. If something necessary fails, the exit status is 1.
"""

import logging
import os
import shutil
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from joblib import cpu_count

from dlm_rag import __version__
from dlm_rag.commands.arguments import parse_command_line
from dlm_rag.commands.prepare_decoder import fill_in_shipped_files, prepare_decoder
from dlm_rag.config import Config
from dlm_rag.errors import summarize_error
from dlm_rag.files.paths import get_cache_folder
from dlm_rag.machine import get_code_commit, read_host_memory
from dlm_rag.progress import format_bytes, show_status
from dlm_rag.text import replace_control_chars

OK, HINT, PROBLEM = "ok", "hint", "problem"  # hint: it works, but could be better
FULL_DISK_BYTES = 50 * 10**6
CHECKED_SETTINGS = ("model.device", "model.dtype", "model.attn_implementation", "retrieval.index_dir")
INSTALL_TORCH = "pip install --force-reinstall torch --index-url https://download.pytorch.org/whl/"
VOLTA_INDEX, CUDA_INDEX = "cu126", "cu130"  # torch's builds; the first has code below capability 7.5


class Finding(NamedTuple):
    """A line of the report, with a command that helps."""

    name: str
    state: str
    what: str
    remedy: str = ""


def main(argv: list[str]) -> None:
    config = parse_command_line(__doc__ or "", argv, CHECKED_SETTINGS).config
    logging.getLogger("dlm_rag").setLevel(logging.WARNING)
    findings: list[Finding] = []
    for name, check in DOCTOR_CHECKS.items():
        show_status(f"looking at: {name}")
        try:
            findings += check(config)
        except Exception as error:
            findings.append(Finding(name, PROBLEM, f"cannot be looked at: {summarize_error(error)}"))
    show_status()
    for name, state, what, remedy in findings:
        command = f"\n{'':18}$ {remedy}" if remedy else ""
        print(f"{state:8} {name:8} {replace_control_chars(what)}{command}")
    if any(finding.state == PROBLEM for finding in findings):
        raise SystemExit(1)


def check_torch(_: Config) -> Iterator[Finding]:
    """Computes with torch on every GPU, or says why there is none."""
    import torch

    build = f"{torch.__version__}, for {f'CUDA {torch.version.cuda}' if torch.version.cuda else 'CPUs'}"
    unseen = not torch.cuda.is_available() and shutil.which("nvidia-smi")
    remedy = "nvidia-smi" if torch.version.cuda else INSTALL_TORCH + CUDA_INDEX
    text = f"{build}: it does not see the GPU here"
    yield Finding("torch", HINT, text, remedy) if unseen else Finding("torch", OK, build)
    for number in range(torch.cuda.device_count()):
        gpu = torch.cuda.get_device_properties(number)
        text = f"{gpu.name}, {format_bytes(gpu.total_memory)}, compute capability {gpu.major}.{gpu.minor}"
        try:
            torch.ones(1, device=f"cuda:{number}").add(1).item()
            yield Finding(f"GPU {number}", OK, text)
        except RuntimeError as error:  # the build has no code for it, say
            reason = f"{text}: torch {build} does not compute on it ({summarize_error(error)})"
            index = VOLTA_INDEX if (gpu.major, gpu.minor) < (7, 5) else CUDA_INDEX
            yield Finding(f"GPU {number}", PROBLEM, reason, INSTALL_TORCH + index)


def check_machine(config: Config) -> Iterator[Finding]:
    """Looks at the versions, cores, free memory, and the folder of indexes with its disk."""
    text = f"{__version__}, commit {get_code_commit()}, Python {sys.version.split()[0]} on {sys.platform}"
    yield Finding("dlm_rag", OK, text)
    import torch

    yield Finding("cores", OK, f"{cpu_count()}, and torch uses {torch.get_num_threads()} threads")
    if memory := read_host_memory():
        text = f"{format_bytes(memory['available'])} of {format_bytes(memory['total'])} are free"
        yield Finding("memory", OK, text)
    given = config.retrieval.index_dir
    folder = Path(given).expanduser().absolute() if given else get_cache_folder()
    there = next(path for path in (folder, *folder.parents) if path.exists())
    free = shutil.disk_usage(there).free
    writable = there.is_dir() and os.access(there, os.W_OK) and free > FULL_DISK_BYTES
    text = f"{folder} {'can' if writable else 'cannot'} be written, {format_bytes(free)} are free"
    remedy = "" if writable else "export DLM_RAG_CACHE=/a/folder/of/yours"
    yield Finding("cache", OK if writable else PROBLEM, text, remedy)


def check_answer(config: Config) -> Iterator[Finding]:
    """Lets the shipped model answer a question of its world; the line ends in device, dtype and kernel."""
    from dlm_rag.questions import read_questions

    asked = fill_in_shipped_files(Config(model=config.model, retrieval=config.retrieval), [])
    question = read_questions(str(asked.questions))[0]
    decoder = prepare_decoder(asked, [question]).load()
    start = time.perf_counter()
    (rollout,) = decoder.decode([question])
    text = f"'{rollout.answer}' in {time.perf_counter() - start:.1f} s, {decoder.describe()}"
    right = rollout.answer in question.golden_answers
    wrong = rollout.error or f"{text}, expected was '{question.golden_answers[0]}'"
    yield Finding("answer", OK, text) if right else Finding("answer", PROBLEM, wrong)


DOCTOR_CHECKS = {"machine": check_machine, "torch": check_torch, "answer": check_answer}
