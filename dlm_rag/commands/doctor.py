"""Look at this machine: what works, what could be better, what is broken, and the command that mends it.

    dlm-rag doctor            # a table
    dlm-rag doctor --json     # the same for an issue report
    dlm-rag doctor model.device=cpu retrieval.index_dir=/scratch/indexes

Nothing is fetched and nothing is changed. Where something that is needed fails, the exit status is 1.
"""

import json
import logging
import platform
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from importlib.metadata import PackageNotFoundError, requires, version
from pathlib import Path
from typing import Any

from dlm_rag import __version__
from dlm_rag.commands.cli_args import parse_command_line
from dlm_rag.commands.startup import apply_shipped_defaults, prepare_decoder
from dlm_rag.config import Config
from dlm_rag.errors import ConfigError, summarize_error
from dlm_rag.machine import (
    choose_device,
    choose_dtype,
    count_usable_cores,
    describe_machine,
    get_code_commit,
    is_built_for_gpu,
    read_host_memory,
)
from dlm_rag.progress import format_bytes, show_status

OK, HINT, PROBLEM = "ok", "hint", "problem"
MIN_FREE_MEMORY_BYTES, MIN_FREE_DISK_BYTES = 2 * 10**9, 10**9  # bytes; with less a hint
UNUSABLE_DISK_BYTES = 50 * 10**6  # with less nothing can be written
# settings
CHECKED_SETTINGS = ("model.device", "model.dtype", "model.attn_implementation", "retrieval.index_dir")
MAX_COUNTED_FILES = 100_000  # of the cache; of more the size is a lower bound
# What each optional package is for, and the extra that brings it.
OPTIONAL_PACKAGES = {
    "flash-attn": ("flash", "the fastest attention on a GPU"),
    "pyarrow": ("parquet", "parquet files of questions"),
    "peft": ("lora", "training with LoRA"),
    "ray": ("workers", "answering on several devices"),
    "starlette": ("serve", "answering and searching over HTTP"),
    "nvidia-ml-py": ("energy", "joules of NVIDIA's GPUs"),
}


@dataclass(frozen=True)
class Finding:
    """One line: `state` is ok, hint (works, but ...) or problem (what is needed fails)."""

    name: str
    state: str
    what: str
    remedy: str = ""  # a command


DoctorCheck = Callable[[Config], Iterator[Finding]]


def main(argv: list[str]) -> None:
    words = parse_command_line(
        __doc__ or "", argv, typed=False, switches={"json": "print JSON, for an issue report"}
    )
    for setting in words.settings:
        if (key := setting.partition("=")[0]) not in CHECKED_SETTINGS:
            raise ConfigError(f"the doctor looks at {', '.join(CHECKED_SETTINGS)} only: leave {key} out")
    log = logging.getLogger("dlm_rag")
    level = log.level
    log.setLevel(logging.WARNING)  # what programs say on their way is not asked for
    try:
        findings = list(run_checks(words.config))
    finally:
        log.setLevel(level)
    show_status()
    if "json" in words.switches:
        print(json.dumps(build_doctor_report(words.config, findings), indent=2, ensure_ascii=False))
    else:
        print_findings(findings)
    if any(finding.state == PROBLEM for finding in findings):
        raise SystemExit(1)


def run_checks(config: Config) -> Iterator[Finding]:
    """What every check finds; one that fails is a problem of its own."""
    for name, check in DOCTOR_CHECKS.items():
        show_status(f"looking at: {name}")
        try:
            yield from check(config)
        except Exception as error:
            yield Finding(name, PROBLEM, f"cannot be looked at: {summarize_error(error)}")


def build_doctor_report(config: Config, findings: list[Finding]) -> dict[str, Any]:
    """The findings with what else an issue needs."""
    try:
        device = choose_device(config.model.device)
        machine: Any = describe_machine(device, _kernel(config)[0])
    except Exception as error:
        machine = summarize_error(error)
    return {
        "dlm_rag": __version__,
        "commit": get_code_commit(),
        "machine": machine,
        "findings": [asdict(finding) for finding in findings],
    }


def print_findings(findings: list[Finding]) -> None:
    """A table on standard output."""
    from rich.console import Console
    from rich.table import Table

    from dlm_rag.decode.terminal import escape_text

    console = Console() if sys.stdout.isatty() else Console(width=120)
    table = Table(box=None, show_header=False, padding=(0, 1))
    for _ in range(2):
        table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    colours = {OK: "green", HINT: "yellow", PROBLEM: "bold red"}
    for found in findings:
        said = escape_text(found.what)
        if found.remedy:
            said = said.append("\n").append(escape_text(f"$ {found.remedy}", "bold"))
        table.add_row(escape_text(found.state, colours[found.state]), escape_text(found.name), said)
    console.print(table)


def check_python(_: Config) -> Iterator[Finding]:
    used = f"{platform.python_version()} at {sys.executable}, {platform.system()} {platform.machine()}"
    yield Finding("python", OK, used)


def check_packages(_: Config) -> Iterator[Finding]:
    """Every package that is needed, in a version that was tested."""
    try:
        listed = requires("dlm_rag") or []
    except PackageNotFoundError:
        yield Finding("packages", HINT, "dlm_rag is not installed, only imported", "pip install -e .")
        return
    needed = [text for text in listed if "extra ==" not in text]
    wrong = 0
    for text in needed:
        name, problem = find_version_mismatch(text)
        if problem:
            wrong += 1
            missing = problem == "not installed"
            yield Finding(name, PROBLEM if missing else HINT, problem, f"pip install '{text}'")
    yield Finding("packages", OK, f"{len(needed) - wrong} of {len(needed)} are as they were tested")


def find_version_mismatch(requirement: str) -> tuple[str, str]:
    """The package that a requirement is about, and how what is installed misses it, if it does."""
    from packaging.requirements import Requirement

    wanted = Requirement(requirement)
    try:
        found = version(wanted.name)
    except PackageNotFoundError:
        return wanted.name, "not installed"
    if wanted.specifier.contains(found, prereleases=True):
        return wanted.name, ""
    return wanted.name, f"{found} is outside what was tested: {wanted.specifier}"


def check_torch(_: Config) -> Iterator[Finding]:
    """The build, and whether it is one for the GPUs that are here."""
    import torch

    used = (
        f"{torch.__version__}, a build for {f'CUDA {torch.version.cuda}' if torch.version.cuda else 'CPUs'}"
    )
    hub = "pip install --force-reinstall torch --index-url https://download.pytorch.org/whl/cu130"
    if not torch.cuda.is_available():
        if not shutil.which("nvidia-smi"):
            yield Finding("torch", OK, used)
        elif torch.version.cuda is None:
            yield Finding("torch", HINT, f"{used}: the GPU here is not used", hub)
        else:
            yield Finding(
                "torch", HINT, f"{used}: it does not see the GPU here ({_why_no_cuda()})", "nvidia-smi"
            )
        return
    built_for = torch.cuda.get_arch_list()
    unfit = [
        f"{torch.cuda.get_device_name(n)} (sm_{capability[0]}{capability[1]})"
        for n in range(torch.cuda.device_count())
        if not is_built_for_gpu(capability := torch.cuda.get_device_capability(n), built_for)
    ]
    if unfit:
        yield Finding(
            "torch", PROBLEM, f"{used}, which has no code for {unfit[0]}: {' '.join(built_for)}", hub
        )
    else:
        yield Finding("torch", OK, f"{used}, {' '.join(built_for)}")


def _why_no_cuda() -> str:
    import torch

    try:
        torch.cuda.init()
    except RuntimeError as error:
        return summarize_error(error)
    return "no device is visible"


def check_gpus(_: Config) -> Iterator[Finding]:
    import torch

    if not torch.cuda.is_available():
        yield Finding("GPU", OK, "none that torch sees: all runs on the CPU")
        return
    for number in range(torch.cuda.device_count()):
        of = torch.cuda.get_device_properties(number)
        driver = describe_machine(torch.device("cuda", number), "").get("driver", "unknown")
        yield Finding(
            f"GPU {number}",
            OK,
            f"{of.name}, {format_bytes(of.total_memory)}, compute capability {of.major}.{of.minor}, driver "
            f"{driver}, CUDA {torch.version.cuda}",
        )


def _kernel(config: Config) -> tuple[str, dict[str, str]]:
    """The attention kernel that is used, and why each of the better ones is not."""
    from dlm_rag.model.attention_backends import choose_backend, collect_backend_problems

    device = choose_device(config.model.device)
    dtype = choose_dtype(config.model.dtype, device)
    chosen = choose_backend(config.model.attn_implementation, device, dtype)
    against = collect_backend_problems(device, dtype)
    return chosen, {name: why for name, why in list(against.items())[: list(against).index(chosen)] if why}


def check_attention_kernel(config: Config) -> Iterator[Finding]:
    from dlm_rag.model.attention_backends import describe_kernel_version

    chosen, against = _kernel(config)
    used = f"{chosen} ({describe_kernel_version(chosen)})"
    names: dict[str, list[str]] = {}
    for name, reason in against.items():
        names.setdefault(reason.partition(";")[0], []).append(name)
    why = "; ".join(f"not {' or '.join(those)}: {reason}" for reason, those in names.items())
    on_gpu = choose_device(config.model.device).type == "cuda"
    said = f"{used}; {why}" if why else used
    install = "pip install 'dlm_rag[flash]' --no-build-isolation" if "flash" in against and on_gpu else ""
    yield Finding("attention", HINT if install else OK, said, install)


def check_nsys(_: Config) -> Iterator[Finding]:
    path, nvtx = shutil.which("nsys"), version("nvtx")
    if path is None:
        instead = "python profiling/nsys.py sample --with torch"
        yield Finding("nsys", HINT, "not found: sessions can be had by torch.profiler", instead)
        return
    done = subprocess.run([path, "--version"], capture_output=True, text=True, timeout=5)
    found = re.search(r"\d+(\.\d+)+", done.stdout)
    said = f"{found[0] if found else 'of an unknown version'}, nvtx {nvtx}"
    wanted = next((text for text in requires("dlm_rag") or [] if text.startswith("nvtx")), "nvtx")
    if find_version_mismatch(wanted)[1]:
        yield Finding("nsys", HINT, f"{said}: its ranges may not show", f"pip install '{wanted}'")
    else:
        yield Finding("nsys", OK, f"{said}: its ranges show")


def check_cores(_: Config) -> Iterator[Finding]:
    import torch

    cores, threads = count_usable_cores(), torch.get_num_threads()
    said = f"cores: {cores}, threads of torch: {threads}"
    if threads > cores:
        yield Finding(
            "cores", HINT, f"{said}, which get in each other's way", f"export OMP_NUM_THREADS={cores}"
        )
    else:
        yield Finding("cores", OK, said)


def check_memory(_: Config) -> Iterator[Finding]:
    found = read_host_memory()
    if not found:
        yield Finding("memory", OK, "the system does not tell")
        return
    said = f"{format_bytes(found['available'])} of {format_bytes(found['total'])} are free"
    little = found["available"] < MIN_FREE_MEMORY_BYTES
    yield Finding("memory", HINT if little else OK, said, "ps aux --sort=-rss | head" if little else "")


def check_energy(config: Config) -> Iterator[Finding]:
    from dlm_rag.energy.meter import describe_sensors

    said, remedy = describe_sensors(choose_device(config.model.device))
    yield Finding("energy", HINT if remedy else OK, said, remedy)


def check_cache(config: Config) -> Iterator[Finding]:
    """The folder of the indexes: its size, whether it can be written, and what is free on its disk."""
    from dlm_rag.retrieval.build_once import get_cache_folder

    given = config.retrieval.index_dir
    folder = Path(given).expanduser() if given else get_cache_folder()
    elsewhere = "export DLM_RAG_CACHE=/a/folder/of/yours"
    there = next(path for path in (folder.absolute(), *folder.absolute().parents) if path.exists())
    try:
        with tempfile.TemporaryFile(dir=there) as file:
            file.write(b"written")
            file.flush()
    except OSError as error:
        yield Finding("cache", PROBLEM, f"{folder} cannot be written: {error.strerror}", elsewhere)
        return
    sizes: list[int] = []
    for path in folder.rglob("*"):
        if len(sizes) == MAX_COUNTED_FILES:
            break
        sizes.append(path.lstat().st_size)
    more = "more than " if len(sizes) == MAX_COUNTED_FILES else ""
    free = shutil.disk_usage(there).free
    said = f"{folder} holds {more}{format_bytes(sum(sizes))}, {format_bytes(free)} are free on its disk"
    state = PROBLEM if free < UNUSABLE_DISK_BYTES else HINT if free < MIN_FREE_DISK_BYTES else OK
    yield Finding("cache", state, said, elsewhere if state != OK else "")


def check_hub(_: Config) -> Iterator[Finding]:
    from huggingface_hub import constants

    folder = Path(constants.HF_HUB_CACHE)
    models = len(list(folder.glob("models--*"))) if folder.is_dir() else 0
    said = f"{models} model{'s' * (models != 1)} in {folder}"
    if constants.HF_HUB_OFFLINE:
        yield Finding("hub", HINT, f"offline, {said} and no others", "unset HF_HUB_OFFLINE")
    else:
        yield Finding("hub", OK, said)


def check_extras(_: Config) -> Iterator[Finding]:
    """Optional packages; of flash-attn the line of the kernel has the command, where it is of use."""
    for package, (extra, what_for) in OPTIONAL_PACKAGES.items():
        try:
            yield Finding(package, OK, f"{version(package)}, for {what_for}")
        except PackageNotFoundError:
            install = "" if extra == "flash" else f"pip install 'dlm_rag[{extra}]'"
            yield Finding(package, OK, f"not installed; for {what_for}", install)


def check_answer(config: Config) -> Iterator[Finding]:
    """The shipped model answers a question of its world, from nothing to the end."""
    from dlm_rag.questions import read_questions

    with tempfile.TemporaryDirectory() as folder:
        fresh = Config()
        mine = replace(
            fresh,
            model=replace(
                fresh.model,
                device=config.model.device,
                attn_implementation=config.model.attn_implementation,
            ),
            retrieval=replace(fresh.retrieval, index_dir=folder),
        )
        asked = apply_shipped_defaults(mine, [])
        question = read_questions(str(asked.questions))[0]
        decoder = prepare_decoder(asked, [question]).load()
        start = time.perf_counter()
        (rollout,) = decoder.decode([question])
    said = f"'{rollout.answer}' in {time.perf_counter() - start:.1f} s, {decoder.describe()}"
    if rollout.error or rollout.answer not in question.golden_answers:
        wrong = rollout.error or f"{said}, expected was '{question.golden_answers[0]}'"
        yield Finding("an answer", PROBLEM, wrong, "python -m pytest tests/test_shipped_model.py")
    else:
        yield Finding("an answer", OK, said)


DOCTOR_CHECKS: dict[str, DoctorCheck] = {
    "python": check_python,
    "packages": check_packages,
    "torch": check_torch,
    "GPU": check_gpus,
    "attention": check_attention_kernel,
    "nsys": check_nsys,
    "cores": check_cores,
    "memory": check_memory,
    "energy": check_energy,
    "cache": check_cache,
    "hub": check_hub,
    "extras": check_extras,
    "an answer": check_answer,
}
