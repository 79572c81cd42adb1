"""Check this machine: what works, what could be better, what is broken, and the command that fixes it.

    dlm-rag doctor            # one line per check
    dlm-rag doctor --json     # the same with torch's description of the machine, for a bug report
    dlm-rag doctor model.device=cpu retrieval.index_dir=/scratch/indexes engine.store=/scratch/store
    dlm-rag doctor --range model.path=DIR_OR_HUB_ID    # do its activations fit float16?

Nothing is downloaded or changed. If something necessary fails, the exit status is 1.
"""

import json
import logging
import os
import shlex
import shutil
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from importlib.metadata import PackageNotFoundError, requires, version
from operator import attrgetter
from pathlib import Path
from typing import NamedTuple

from joblib import cpu_count

from dlm_rag import __version__
from dlm_rag.commands.arguments import parse_command_line
from dlm_rag.commands.prepare_decoder import fill_in_shipped_files, gather_questions, prepare_decoder
from dlm_rag.config import Config
from dlm_rag.errors import ConfigError, summarize_error
from dlm_rag.files.paths import get_cache_folder
from dlm_rag.machine import choose_device, choose_dtype, get_code_commit, has_bfloat16, read_host_memory
from dlm_rag.progress import format_bytes, show_status
from dlm_rag.text import replace_control_chars

OK, HINT, PROBLEM = "ok", "hint", "problem"
LOW_MEMORY_BYTES, LOW_DISK_BYTES, FULL_DISK_BYTES = 2 * 10**9, 10**9, 50 * 10**6
RANGE_SETTINGS = ("model.path", "retrieval.corpus", "questions")
CHECKED_SETTINGS = (
    "model.device", "model.dtype", "model.attn_implementation", "retrieval.index_dir", "engine.store",
    "engine.store_gib", *RANGE_SETTINGS,
)  # fmt: skip
INSTALL_TORCH = "pip install --force-reinstall torch --index-url https://download.pytorch.org/whl/"
VOLTA_INDEX, CUDA_INDEX = "cu126", "cu130"  # of torch's builds, the first with code below capability 7.5
NEAR_FLOAT16_MAX = 0.5  # of the most that float16 holds: other questions may lead to twice as much


class Finding(NamedTuple):
    """One line: `state` is ok, hint (works, but ...) or problem (what is needed fails)."""

    name: str
    state: str
    what: str
    remedy: str = ""  # a command


def main(argv: list[str]) -> None:
    switches = {
        "json": "print JSON, for an issue report",
        "range": "the largest numbers of the layers of `model.path`, against what float16 holds",
    }
    words = parse_command_line(__doc__ or "", argv, CHECKED_SETTINGS, switches=switches)
    looks_at_range = "range" in words.switches
    idle = [key for key in RANGE_SETTINGS if attrgetter(key)(words.config) is not None]  # of a file, too
    if idle and not looks_at_range:
        raise ConfigError(f"{idle[0]} has no effect here without --range: add it, or leave this out")
    logging.getLogger("dlm_rag").setLevel(logging.WARNING)
    names = ["range"] if looks_at_range else [name for name in DOCTOR_CHECKS if name != "range"]
    findings = list(run_checks(words.config, names))
    show_status()
    if "json" in words.switches:
        from torch.utils.collect_env import get_pretty_env_info

        report = {"dlm_rag": __version__, "commit": get_code_commit(), "environment": get_pretty_env_info()}
        report |= {"findings": [finding._asdict() for finding in findings]}
        print(json.dumps(report, indent=2, ensure_ascii=False))
    else:
        for name, state, what, remedy in findings:
            command = f"\n{'':21}$ {remedy}" if remedy else ""
            print(f"{state:8} {name:11} {replace_control_chars(what)}{command}")
    if any(finding.state == PROBLEM for finding in findings):
        raise SystemExit(1)


def run_checks(config: Config, names: Iterable[str]) -> Iterator[Finding]:
    """What every check finds; one that fails is a problem of its own."""
    for name in names:
        show_status(f"looking at: {name}")
        try:
            yield from DOCTOR_CHECKS[name](config)
        except Exception as error:
            yield Finding(name, PROBLEM, f"cannot be looked at: {summarize_error(error)}")


def check_packages(_: Config) -> Iterator[Finding]:
    """Whether what is needed is here in a version that was tested, and what optional packages are not."""
    from packaging.requirements import Requirement

    missing, untested, extras = [], [], set()
    for wanted in map(Requirement, requires("dlm_rag") or []):
        extra = str(wanted.marker).partition("extra == ")[2].strip('"')
        try:
            if not wanted.specifier.contains(version(wanted.name), prereleases=True) and not extra:
                untested.append(str(wanted))
        except PackageNotFoundError:
            extras.add(extra)
            missing += [str(wanted)] * (not extra)
    for wrong, state, what in ((missing, PROBLEM, "not here"), (untested, HINT, "in another version")):
        if wrong:
            remedy = f"pip install {shlex.join(wrong)}"
            yield Finding("packages", state, f"{what}: {', '.join(wrong)}", remedy)
    optional = ", ".join(f"dlm_rag[{extra}]" for extra in sorted(extras - {""}))
    yield Finding("packages", OK, f"optional, not installed: {optional or 'none'}")


def check_torch(_: Config) -> Iterator[Finding]:
    import torch

    build = f"{torch.__version__}, for {f'CUDA {torch.version.cuda}' if torch.version.cuda else 'CPUs'}"
    if not torch.cuda.is_available():
        try:
            if shutil.which("nvidia-smi"):
                torch.cuda.init()
            yield Finding("torch", OK, build)
        except (AssertionError, RuntimeError) as error:
            remedy = "nvidia-smi" if torch.version.cuda else INSTALL_TORCH + CUDA_INDEX
            yield Finding("torch", HINT, f"{build}: not on the GPU here ({summarize_error(error)})", remedy)
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


def check_attention_kernel(config: Config) -> Iterator[Finding]:
    """The kernel that is used, and why each of the better ones is not."""
    from dlm_rag.model import attention

    device = choose_device(config.model.device)
    dtype = choose_dtype(config.model.dtype, device)
    chosen = attention.choose_backend(config.model.attn_implementation, device, dtype)
    better = list(attention.ATTENTION_BACKENDS)[: list(attention.ATTENTION_BACKENDS).index(chosen)]
    problems = {name: attention.get_backend_problem(name, device, dtype) for name in better}
    text = f"{chosen} ({attention.describe_kernel_version(chosen)})"
    text += "".join(f"; not {name}: {why.partition(';')[0]}" for name, why in problems.items() if why)
    flash = device.type == "cuda" and problems.get("flash")
    install = "pip install 'dlm_rag[flash]' --no-build-isolation" if flash else ""
    yield Finding("attention", HINT if install else OK, text, install)


def check_quantization(config: Config) -> Iterator[Finding]:
    """Which values of `model.quantize` work here, each tried on a small product, and why others do not."""
    import torch

    from dlm_rag.model.quantize import METHODS, QuantizedLinear, find_problem

    device = choose_device(config.model.device)
    problems = {name: find_problem(name, device) for name in METHODS}
    for name in [name for name, problem in problems.items() if not problem]:
        try:
            dtype = torch.bfloat16 if has_bfloat16(device) else torch.float16
            weight = torch.ones(64, 64, dtype=dtype, device=device)
            QuantizedLinear(weight, None, name)(weight).sum().item()
        except Exception as error:  # of whatever package computes it
            problems[name] = summarize_error(error)
    text = f"{', '.join(name for name, why in problems.items() if not why) or 'nothing'} on {device.type}"
    text += "".join(f"; not {name}: {why.partition(':')[0]}" for name, why in problems.items() if why)
    yield Finding("quantize", OK, text)


def check_cores_and_memory(_: Config) -> Iterator[Finding]:
    import torch

    cores, threads, memory = cpu_count(), torch.get_num_threads(), read_host_memory()
    remedy = f"export OMP_NUM_THREADS={cores}" if threads > cores else ""
    yield Finding("cores", HINT if remedy else OK, f"{cores}, and torch uses {threads} threads", remedy)
    if memory:
        remedy = "ps aux --sort=-rss | head" if memory["available"] < LOW_MEMORY_BYTES else ""
        text = f"{format_bytes(memory['available'])} of {format_bytes(memory['total'])} are free"
        yield Finding("memory", HINT if remedy else OK, text, remedy)


def check_energy(config: Config) -> Iterator[Finding]:
    from dlm_rag.energy.sensors import describe_sensors

    text, remedy = describe_sensors(choose_device(config.model.device))
    yield Finding("energy", HINT if remedy else OK, text, remedy)


def look_at_folder(folder: Path) -> tuple[Path, int, bool]:
    """What there is of a folder's path, the bytes that are free there, and whether it can be written."""
    there = next(path for path in (folder, *folder.parents) if path.exists())
    free = shutil.disk_usage(there).free
    return there, free, there.is_dir() and os.access(there, os.W_OK) and free > FULL_DISK_BYTES


def check_cache(config: Config) -> Iterator[Finding]:
    given = config.retrieval.index_dir
    folder = Path(given).expanduser().absolute() if given else get_cache_folder()
    _, free, writable = look_at_folder(folder)
    state = PROBLEM if not writable else HINT if free < LOW_DISK_BYTES else OK
    can = "can" if writable else "cannot"
    text = f"{folder} {can} be written, {format_bytes(free)} are free on its disk"
    yield Finding("cache", state, text, "" if state == OK else "export DLM_RAG_CACHE=/a/folder/of/yours")


def check_evidence_store(config: Config) -> Iterator[Finding]:
    """The folder of `engine.store`, where one is named, and its disk."""
    from dlm_rag.evidence.evidence_store import GIB, default_budget_bytes, list_entries

    if config.engine.store is None:
        return
    folder, given = Path(config.engine.store).expanduser().absolute(), config.engine.store_gib
    there, free, writable = look_at_folder(folder)
    sizes, budget = [size for _, size, _ in list_entries(folder)], given and given * GIB
    used, most = map(format_bytes, (sum(sizes), budget or default_budget_bytes(there, sum(sizes))))
    text = f"{folder} has {len(sizes):,} entries, {used} of at most {most}, {format_bytes(free)} are free"
    if writable:
        yield Finding("store", OK, text)
    else:
        yield Finding("store", HINT, f"{text}; it cannot be written", f"ls -ld {shlex.quote(str(there))}")


def check_range(config: Config) -> Iterator[Finding]:
    """The largest numbers of every layer while the model answers the questions that `sample` shows."""
    import torch

    from dlm_rag.model.activation_range import FLOAT16_MAX, ActivationRange, describe_range
    from dlm_rag.model.denoiser import Denoiser
    from dlm_rag.questions import select_few_per_hop

    asked, world = fill_in_shipped_files(config, []), fill_in_shipped_files(Config(), [])
    corpus = asked.retrieval.corpus or world.retrieval.corpus
    retrieval = replace(asked.retrieval, corpus=corpus)
    asked = replace(asked, retrieval=retrieval, questions=asked.questions or world.questions)
    questions = select_few_per_hop(gather_questions(asked, []))
    decoder = prepare_decoder(asked, questions).load()
    denoiser = decoder.denoiser
    if not isinstance(denoiser, Denoiser):
        raise ConfigError("--range looks into models of masks, and this is one of uniform noise")
    with ActivationRange(denoiser) as seen:
        decoder.decode(questions)
    largest, low = seen.largest_by_layer(), denoiser.dtype == torch.float16
    text = f"{len(questions)} questions in {denoiser.dtype}: {describe_range(largest)}"
    if all(value < NEAR_FLOAT16_MAX * FLOAT16_MAX for value in largest):
        yield Finding("range", OK, text)
    else:
        overflows = not all(value <= FLOAT16_MAX for value in largest)  # not finite in float16 itself
        remedy = f"dlm-rag sample --model {shlex.quote(str(asked.model.path))} model.dtype=float32"
        state = PROBLEM if overflows and low else HINT
        yield Finding("range", state, f"{text}: no room for float16", remedy if low else "")


def check_answer(config: Config) -> Iterator[Finding]:
    """The shipped model answers a question of its world, from nothing to the end."""
    from dlm_rag.questions import read_questions

    with tempfile.TemporaryDirectory() as folder:
        own = Config(model=replace(config.model, dtype="auto"))
        asked = fill_in_shipped_files(replace(own, retrieval=replace(own.retrieval, index_dir=folder)), [])
        question = read_questions(str(asked.questions))[0]
        decoder = prepare_decoder(asked, [question]).load()
        start = time.perf_counter()
        (rollout,) = decoder.decode([question])
    text = f"'{rollout.answer}' in {time.perf_counter() - start:.1f} s, {decoder.describe()}"
    if rollout.answer in question.golden_answers:
        yield Finding("an answer", OK, text)
    else:
        wrong = rollout.error or f"{text}, expected was '{question.golden_answers[0]}'"
        yield Finding("an answer", PROBLEM, wrong, "python -m pytest tests -k shipped_model")


DOCTOR_CHECKS: dict[str, Callable[[Config], Iterator[Finding]]] = {
    "packages": check_packages,
    "torch": check_torch,
    "attention": check_attention_kernel,
    "quantize": check_quantization,
    "cores": check_cores_and_memory,
    "energy": check_energy,
    "cache": check_cache,
    "store": check_evidence_store,
    "an answer": check_answer,
    "range": check_range,
}
