"""Look at this machine: what works, what could be better, what is broken, and the command that mends it.

    dlm-rag doctor            # a table
    dlm-rag doctor --json     # the same and torch's description of the machine, for an issue report
    dlm-rag doctor model.device=cpu retrieval.index_dir=/scratch/indexes

Nothing is fetched and nothing is changed. Where something that is needed fails, the exit status is 1.
"""

import json
import logging
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from importlib.metadata import PackageNotFoundError, requires, version
from pathlib import Path

from dlm_rag import __version__
from dlm_rag.commands.arguments import parse_command_line
from dlm_rag.commands.prepare_decoder import apply_shipped_defaults, prepare_decoder
from dlm_rag.config import Config
from dlm_rag.errors import ConfigError, summarize_error
from dlm_rag.machine import (
    choose_device,
    choose_dtype,
    count_usable_cores,
    get_code_commit,
    is_built_for_gpu,
    read_host_memory,
)
from dlm_rag.progress import format_bytes, show_status

OK, HINT, PROBLEM = "ok", "hint", "problem"
LOW_MEMORY_BYTES, LOW_DISK_BYTES, FULL_DISK_BYTES = 2 * 10**9, 10**9, 50 * 10**6
CHECKED_SETTINGS = ("model.device", "model.dtype", "model.attn_implementation", "retrieval.index_dir")


@dataclass(frozen=True)
class Finding:
    """One line: `state` is ok, hint (works, but ...) or problem (what is needed fails)."""

    name: str
    state: str
    what: str
    remedy: str = ""  # a command


def main(argv: list[str]) -> None:
    words = parse_command_line(
        __doc__ or "", argv, typed=False, switches={"json": "print JSON, for an issue report"}
    )
    for setting in words.settings:
        if (key := setting.partition("=")[0]) not in CHECKED_SETTINGS:
            raise ConfigError(f"the doctor looks at {', '.join(CHECKED_SETTINGS)} only: leave {key} out")
    log = logging.getLogger("dlm_rag")
    level = log.level
    log.setLevel(logging.WARNING)
    try:
        findings = list(run_checks(words.config))
    finally:
        log.setLevel(level)
    show_status()
    if "json" in words.switches:
        from torch.utils.collect_env import get_pretty_env_info

        report = {"dlm_rag": __version__, "commit": get_code_commit(), "environment": get_pretty_env_info()}
        report |= {"findings": [asdict(finding) for finding in findings]}
        print(json.dumps(report, indent=2, ensure_ascii=False))
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
        text = escape_text(found.what)
        if found.remedy:
            text = text.append("\n").append(escape_text(f"$ {found.remedy}", "bold"))
        table.add_row(escape_text(found.state, colours[found.state]), escape_text(found.name), text)
    console.print(table)


def check_packages(_: Config) -> Iterator[Finding]:
    """Every package that is needed, in a version that was tested, and the optional ones."""
    from packaging.requirements import Requirement

    try:
        listed = [Requirement(text) for text in requires("dlm_rag") or []]
    except PackageNotFoundError:
        yield Finding("packages", HINT, "dlm_rag is not installed, only imported", "pip install -e .")
        return
    optional = {}
    tested = 0
    for wanted in listed:
        extra = str(wanted.marker).partition("extra == ")[2].strip('"')
        try:
            found = version(wanted.name)
        except PackageNotFoundError:
            if extra:
                optional[extra] = f"{wanted.name} (pip install 'dlm_rag[{extra}]')"
            else:
                yield Finding(wanted.name, PROBLEM, "not installed", f"pip install '{wanted}'")
            continue
        if wanted.specifier.contains(found, prereleases=True):
            tested += 1
        elif not extra:
            outside = f"{found} is outside what was tested: {wanted.specifier}"
            yield Finding(wanted.name, HINT, outside, f"pip install '{wanted}'")
    missing = f"; optional, not installed: {', '.join(optional.values())}" if optional else ""
    yield Finding("packages", OK, f"{tested} as they were tested{missing}")


def check_torch(_: Config) -> Iterator[Finding]:
    """The build, and whether it is one for the GPUs that are here."""
    import torch

    build = f"{torch.__version__}, for {f'CUDA {torch.version.cuda}' if torch.version.cuda else 'CPUs'}"
    install = "pip install --force-reinstall torch --index-url https://download.pytorch.org/whl/cu130"
    if not torch.cuda.is_available():
        if not shutil.which("nvidia-smi"):
            yield Finding("torch", OK, build)
        elif torch.version.cuda is None:
            yield Finding("torch", HINT, f"{build}: the GPU here is not used", install)
        else:
            reason = "no device is visible"
            try:
                torch.cuda.init()
            except RuntimeError as error:
                reason = summarize_error(error)
            yield Finding("torch", HINT, f"{build}: it does not see the GPU here ({reason})", "nvidia-smi")
        return
    built_for = torch.cuda.get_arch_list()
    for number in range(torch.cuda.device_count()):
        gpu = torch.cuda.get_device_properties(number)
        text = f"{gpu.name}, {format_bytes(gpu.total_memory)}, compute capability {gpu.major}.{gpu.minor}"
        if is_built_for_gpu((gpu.major, gpu.minor), built_for):
            yield Finding(f"GPU {number}", OK, text)
        else:
            no_code = f"{text}: torch {build} has no code for it ({' '.join(built_for)})"
            yield Finding(f"GPU {number}", PROBLEM, no_code, install)


def check_attention_kernel(config: Config) -> Iterator[Finding]:
    """The kernel that is used, and why each of the better ones is not."""
    from dlm_rag.model.attention import (
        ATTENTION_BACKENDS,
        choose_backend,
        describe_kernel_version,
        get_backend_problem,
    )

    device = choose_device(config.model.device)
    dtype = choose_dtype(config.model.dtype, device)
    chosen = choose_backend(config.model.attn_implementation, device, dtype)
    problems = {name: get_backend_problem(name, device, dtype) for name in ATTENTION_BACKENDS}
    better = list(problems)[: list(problems).index(chosen)]
    names: dict[str, list[str]] = {}
    for name in better:
        if reason := problems[name]:
            names.setdefault(reason.partition(";")[0], []).append(name)
    why = "".join(f"; not {' or '.join(those)}: {reason}" for reason, those in names.items())
    flash = device.type == "cuda" and problems.get("flash") and "flash" in better
    install = "pip install 'dlm_rag[flash]' --no-build-isolation" if flash else ""
    text = f"{chosen} ({describe_kernel_version(chosen)}){why}"
    yield Finding("attention", HINT if install else OK, text, install)


def check_nsys(_: Config) -> Iterator[Finding]:
    if shutil.which("nsys"):
        yield Finding("nsys", OK, f"found, nvtx {version('nvtx')}")
    else:
        instead = "python profiling/nsys.py sample --with torch"
        yield Finding("nsys", HINT, "not found: sessions can be had by torch.profiler", instead)


def check_cores_and_memory(_: Config) -> Iterator[Finding]:
    import torch

    cores, threads, memory = count_usable_cores(), torch.get_num_threads(), read_host_memory()
    text = f"{cores}, and torch uses {threads} threads"
    remedy = f"export OMP_NUM_THREADS={cores}" if threads > cores else ""
    yield Finding("cores", HINT if remedy else OK, text, remedy)
    if memory:
        remedy = "ps aux --sort=-rss | head" if memory["available"] < LOW_MEMORY_BYTES else ""
        text = f"{format_bytes(memory['available'])} of {format_bytes(memory['total'])} are free"
        yield Finding("memory", HINT if remedy else OK, text, remedy)


def check_energy(config: Config) -> Iterator[Finding]:
    from dlm_rag.energy.sensors import describe_sensors

    text, remedy = describe_sensors(choose_device(config.model.device))
    yield Finding("energy", HINT if remedy else OK, text, remedy)


def check_cache(config: Config) -> Iterator[Finding]:
    """The folder of the indexes: whether it can be written, and what is free on its disk."""
    from dlm_rag.files.paths import get_cache_folder

    given = config.retrieval.index_dir
    folder = Path(given).expanduser() if given else get_cache_folder()
    remedy = "export DLM_RAG_CACHE=/a/folder/of/yours"
    there = next(path for path in (folder.absolute(), *folder.absolute().parents) if path.exists())
    try:
        with tempfile.TemporaryFile(dir=there) as file:
            file.write(b"written")
            file.flush()
    except OSError as error:
        yield Finding("cache", PROBLEM, f"{folder} cannot be written: {error.strerror}", remedy)
        return
    free = shutil.disk_usage(there).free
    state = PROBLEM if free < FULL_DISK_BYTES else HINT if free < LOW_DISK_BYTES else OK
    text = f"{folder}, {format_bytes(free)} are free on its disk"
    yield Finding("cache", state, text, remedy if state != OK else "")


def check_answer(config: Config) -> Iterator[Finding]:
    """The shipped model answers a question of its world, from nothing to the end."""
    from dlm_rag.questions import read_questions

    default = Config()
    model = replace(
        default.model, device=config.model.device, attn_implementation=config.model.attn_implementation
    )
    with tempfile.TemporaryDirectory() as folder:
        own = replace(default, model=model, retrieval=replace(default.retrieval, index_dir=folder))
        asked = apply_shipped_defaults(own, [])
        question = read_questions(str(asked.questions))[0]
        decoder = prepare_decoder(asked, [question]).load()
        start = time.perf_counter()
        (rollout,) = decoder.decode([question])
    text = f"'{rollout.answer}' in {time.perf_counter() - start:.1f} s, {decoder.describe()}"
    if rollout.error or rollout.answer not in question.golden_answers:
        wrong = rollout.error or f"{text}, expected was '{question.golden_answers[0]}'"
        yield Finding("an answer", PROBLEM, wrong, "python -m pytest tests -k shipped_model")
    else:
        yield Finding("an answer", OK, text)


DOCTOR_CHECKS: dict[str, Callable[[Config], Iterator[Finding]]] = {
    "packages": check_packages,
    "torch": check_torch,
    "attention": check_attention_kernel,
    "nsys": check_nsys,
    "cores": check_cores_and_memory,
    "energy": check_energy,
    "cache": check_cache,
    "an answer": check_answer,
}
