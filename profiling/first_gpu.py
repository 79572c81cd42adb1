"""The first look at a machine with a GPU: one page of what it does, in at most ten minutes.

    python profiling/first_gpu.py --out runs/first            # page.md, page.json, page.png
    python profiling/first_gpu.py --out runs/first --quick    # tiny shapes, in about a minute, on a CPU too
    python profiling/first_gpu.py --out runs/first --only training

The machine and the kernels that work on it. Answers a second with the shipped model, and with random
weights of 1 and 7 billion parameters that follow its decodes (bench_decode.py, replay.py), against the
published algorithm done plainly, with GFLOPs counted and the share of what the device could do at best
(roofline.py). How many questions get the same tokens alone and in a batch. Tokens a second, MFU and peak
memory of training steps at about 1 billion parameters and sequences of 4,096 tokens, with each switch,
beside the memory that was planned. Milliseconds of a step of a DiffusionGemma in the shape of 26B-A4B, with
random weights in bfloat16 (bench_gemma.py). Where the time of all goes (attribute.py).

Every part is a process of its own with a time limit, --minutes for all of them: one that fails or takes too
long leaves its error on the page, with what it had found until then, and the next begins. The page is
written anew after every part. Pools are warm: they have seen other questions before.
"""

import argparse
import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from dlm_rag.commands.words import Parser
from dlm_rag.errors import ConfigError
from dlm_rag.files.whole import write_whole
from dlm_rag.program import note, run

Line = dict[str, Any]
GIB = 2**30


@dataclass(frozen=True)
class Decodes:
    """What is decoded: the questions of a round by batch size (0: the published algorithm)."""

    shape: str  # of `replay.SHAPES`; empty: the shipped model
    asked: dict[int, int]
    before: int  # questions that the pool has seen
    rounds: int = 2
    profiled: int = 16  # questions of the attributed turn


@dataclass(frozen=True)
class Trains:
    """What is trained: settings of a fresh denoiser, its vocabulary, the switches in their order."""

    settings: tuple[str, ...]
    vocabulary: int
    switches: tuple[str, ...] = ("none", "logit_chunk", "selective", "full", "compile")
    steps: int = 6  # timed; of each switch
    logit_chunk: int = 512


@dataclass(frozen=True)
class Compares:
    """What is decoded in several ways that should give the same tokens, by the shipped model."""

    questions: int
    batch: int


@dataclass(frozen=True)
class Denoises:
    """Steps of a DiffusionGemma with random weights: how many rows take one together."""

    shape: str  # of `bench_gemma.SHAPES`
    rows: tuple[int, ...]
    prompt: int  # tokens before each canvas
    repeats: int = 10


What = Decodes | Trains | Compares | Denoises | None


@dataclass(frozen=True)
class Part:
    """A part of the look, in a process of its own."""

    seconds: float  # how long it may take
    what: What = None  # None: the machine


FULL = {
    "machine": Part(30),
    "shipped": Part(75, Decodes("", {0: 8, 64: 96, 16: 40, 1: 6}, before=64)),
    "exactness": Part(40, Compares(40, 16)),
    "training": Part(
        130,
        Trains(
            (
                "train.hidden_size=2048", "train.head_dim=64", "train.intermediate_size=5632",
                "train.num_hidden_layers=20", "train.sequence_length=4096", "train.batch_tokens=16384",
            ),
            vocabulary=32_000,
        ),
    ),
    "1b": Part(105, Decodes("1b", {0: 6, 64: 96, 16: 40, 1: 6}, before=64)),
    "7b": Part(130, Decodes("7b", {0: 4, 64: 96, 16: 40, 1: 6}, before=64)),
    "gemma": Part(60, Denoises("26b-a4b", (1, 4, 16), 2000)),
}  # fmt: skip
TINY = (64, 2, 4, 2, 128, 2048)  # as in `replay.SHAPES`
QUICK = {
    "machine": Part(60),
    "shipped": Part(60, Decodes("", {0: 2, 4: 4, 1: 2}, before=4, rounds=1, profiled=2)),
    "exactness": Part(60, Compares(3, 2)),
    "training": Part(
        90,
        Trains(
            (
                "train.hidden_size=64", "train.head_dim=32", "train.intermediate_size=128",
                "train.num_hidden_layers=2", "train.sequence_length=64", "train.batch_tokens=128",
            ),
            vocabulary=512, switches=("none", "logit_chunk", "selective", "full"), steps=2, logit_chunk=16,
        ),
    ),
    "tiny": Part(60, Decodes("tiny", {0: 1, 4: 4, 1: 2}, before=2, rounds=1, profiled=2)),
    "gemma": Part(20, Denoises("tiny", (1, 3), 40, repeats=2)),
}  # fmt: skip


def main(argv: list[str]) -> None:
    parser = Parser(__doc__ or "", prog="first_gpu.py")
    parser.add_argument("--out", type=Path, required=True, help="folder of the page")
    parser.add_argument("--quick", action="store_true", help="tiny shapes, in about a minute")
    parser.add_argument("--minutes", type=float, default=9.5, help="for everything (9.5)")
    parser.add_argument("--only", metavar="PART", help=f"one part: {', '.join(FULL)}")
    parser.add_argument("--part", help=argparse.SUPPRESS)  # the process of a part
    given = parser.parse_args(argv)
    parts = QUICK if given.quick else FULL
    name = given.only or given.part
    if name is not None and name not in parts:
        raise ConfigError(f"'{name}' is not a part of it: {', '.join(parts)}")
    try:
        (given.out / "parts").mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"{given.out} cannot be a folder: {error.strerror}") from None
    if given.part is not None:
        take(given.part, parts[given.part].what, given.out)
        return
    chosen = {name: parts[name]} if name else parts
    words = ["--out", str(given.out), *(["--quick"] if given.quick else [])]
    watch(chosen, given.out, words, 60 * given.minutes)


def watch(parts: dict[str, Part], out: Path, words: list[str], seconds: float) -> None:
    """Takes the parts one after another; a part may use what those before it have left over."""
    from first_page import write

    end = time.monotonic() + seconds
    found: dict[str, Line] = {}
    for name, part in parts.items():
        (out / "parts" / f"{name}.json").unlink(missing_ok=True)
        names = list(parts)
        later = sum(parts[other].seconds for other in names[names.index(name) + 1 :])
        limit = max(min(part.seconds, end - time.monotonic()), end - time.monotonic() - later)
        begun = time.monotonic()
        note(f"{name}: at most {limit:.0f} s")
        error = taken([sys.executable, __file__, *words, "--part", name], out / "parts" / name, limit)
        record = out / "parts" / f"{name}.json"
        found[name] = {
            "seconds": time.monotonic() - begun,
            "error": error,
            **(json.loads(record.read_text()) if record.is_file() else {"lines": []}),
        }
        note(f"{name}: {found[name]['seconds']:.0f} s" + (f"; {error}" if error else ""))
        write(out, found)


def taken(command: list[str], log: Path, limit: float) -> str:
    """Runs a part; returns what went wrong, or nothing. Its words go to `log`."""
    if limit <= 0:
        return "no time was left for it"
    with log.with_suffix(".log").open("w", encoding="utf-8") as words:
        process = subprocess.Popen(command, stdout=words, stderr=words, start_new_session=True)
        try:
            code = process.wait(limit)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)  # compilers that it has started, too
            process.wait()
            return f"it took more than its {limit:.0f} s"
    said = log.with_suffix(".log").read_text(encoding="utf-8").strip().splitlines()
    return "" if code == 0 else f"exit status {code}: {said[-1] if said else 'it said nothing'}"


class Record:
    """What a part has found: its file is whole after every line."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self.found: dict[str, Any] = {"lines": []}

    def add(self, **found: Any) -> None:
        """Takes a line, or more that is found beside the lines."""
        self.found["lines"] += [found.pop("line")] if "line" in found else []
        self.found |= found
        write_whole(self._path, json.dumps(self.found, indent=2) + "\n")


def take(name: str, what: What, out: Path) -> None:
    """A part, in the process that is its own."""
    record = Record(out / "parts" / f"{name}.json")
    if what is None:
        look_at_machine(record)
    elif isinstance(what, Decodes):
        decode(what, record, out / f"attribution-{name}")
    elif isinstance(what, Compares):
        compare(what, record)
    elif isinstance(what, Denoises):
        denoise(what, record, out / f"attribution-{name}")
    else:
        train(what, record, out / f"attribution-{name}")


def look_at_machine(record: Record) -> None:
    """Versions, kernels, memory; products and copies as fast as they get."""
    import torch
    from roofline import measure_roofline

    from dlm_rag.commands.prepare import gather_questions, prepare, with_shipped
    from dlm_rag.config import load_config
    from dlm_rag.evidence.pool import default_budget, free_bytes
    from dlm_rag.model.kernels import BACKENDS, kernel_version, missing, paging

    config = with_shipped(load_config(None, []), [])
    prepared = prepare(config, gather_questions(config, []))
    device, dtype = prepared.device, prepared.dtype
    stamp = prepared.stamp()
    kernels = {name: missing(name, device, dtype) or kernel_version(name) for name in BACKENDS}
    record.add(
        device=device.type, dtype=str(dtype).removeprefix("torch."), kernels=kernels,
        **{key: stamp[key] for key in ("commit", "date", "versions", "machines", "attention")},
        free_gib=free_bytes(device) / GIB, pool_gib=default_budget(device) / GIB,
    )  # fmt: skip
    if prepared.attention == "varlen":
        record.add(reads_pages=paging(torch.device(device)).reads_pages)
    record.add(roofline=asdict(measure_roofline(device, dtype)))


def peak_gib(device: Any) -> float | None:
    """The most that was allocated on a GPU since the last call."""
    import torch

    if device.type != "cuda":
        return None
    peak = torch.cuda.max_memory_allocated(device)
    torch.cuda.reset_peak_memory_stats(device)
    return peak / GIB


def decode(what: Decodes, record: Record, folder: Path) -> None:
    """Answers a second: the published algorithm first, then ours in batches, with one warm pool."""
    import replay
    from bench_decode import Replay, Setting, decoder_of, kept_by, measure, spread, summarise
    from roofline import measure_roofline

    from dlm_rag.commands.prepare import gather_questions, prepare, with_shipped
    from dlm_rag.config import EngineConfig, load_config

    replay.SHAPES["tiny"] = TINY
    config = with_shipped(load_config(None, [f"decode.batch_size={max(what.asked)}"]), [])
    most = what.rounds * sum(what.asked.values())
    questions = spread(gather_questions(config, []), most + what.before + what.profiled)
    random.Random(0).shuffle(questions)  # they come by hops, and every setting is to meet all kinds
    earlier, last, asked = (
        questions[: what.before], questions[-what.profiled :], questions[what.before : -what.profiled]
    )  # fmt: skip
    prepared = prepare(config, questions)
    device = prepared.device
    roofline = measure_roofline(device, prepared.dtype)
    record.add(roofline=asdict(roofline), shape=what.shape or "shipped")
    if what.shape:
        follow = Replay.of(prepared, questions, what.shape)
        make, settings, denoiser = follow.decoder, follow.decode, follow.denoiser
        plain = "joint"  # as published
    else:
        denoiser, plain = prepared.load().denoiser, prepared.evidence_layout
        settings = prepared.config.decode

        def make(layout: str, decode: Any, engine: Any) -> Any:
            return decoder_of(prepared, denoiser, decode, engine)

    record.add(parameters=sum(p.numel() for p in denoiser.parameters()), layout=plain)
    peak_gib(device)
    reference, kept = 0.0, None  # seconds of a forward of a row; the pool and all around it
    for batch, count in what.asked.items():
        how = replace(settings, batch_size=max(1, batch))
        decoder = make("independent" if batch else plain, how, EngineConfig() if batch else None)
        if kept is not None:
            decoder.proposer = kept
        turns = [[asked.pop() for _ in range(count)] for _ in range(what.rounds)]  # new to the pool
        setting = Setting(f"batch of {batch}" if batch else "reference", decoder)
        measure([setting], turns, earlier if kept is None else earlier[:2])
        if batch:
            kept = decoder.proposer
        line = summarise([setting], turns, roofline)[0]
        reference = reference or line["seconds_per_forward"]
        engine = kept_by(decoder)
        record.add(
            line={
                "setting": setting.name,
                "speed_up": reference / line["seconds_per_forward"],
                "gflop_per_answer": line["flops"] / 1e9 / count,
                "peak_gib": peak_gib(device),
                "evicted": engine.reuse.evicted if engine is not None else 0,
                **{
                    key: line[key]
                    for key in (
                        "answers_per_second", "answers_per_second_range", "seconds_per_forward",
                        "forwards", "roofline_share", "bound", "reuse", "stages",
                    )
                },
            }
        )  # fmt: skip
    batch = next(batch for batch in (16, 4) if batch in what.asked)
    decoder = make("independent", replace(settings, batch_size=batch), EngineConfig())
    decoder.proposer = kept
    attributed(lambda: list(decoder.stream(last)), record, folder)


def compare(what: Compares, record: Record) -> None:
    """How many questions get the very tokens that they get alone, when something else is different."""
    from bench_decode import decoder_of, masked, spread, tokens_of

    from dlm_rag.commands.prepare import gather_questions, prepare, with_shipped
    from dlm_rag.config import EngineConfig, load_config
    from dlm_rag.decode.rollout import Rollout

    ways = {  # batch, pool, kernel
        "alone": (1, None, "auto"),
        "alone, again": (1, None, "auto"),
        f"batches of {what.batch}": (what.batch, None, "auto"),
        f"batches of {what.batch}, no pool": (what.batch, 0.0, "auto"),
        "alone, attention=sdpa": (1, None, "sdpa"),
    }
    for dtype in ("float32", "bfloat16"):
        config = with_shipped(load_config(None, [f"model.dtype={dtype}"]), [])
        asked = spread(gather_questions(config, []), what.questions)
        prepared = prepare(config, asked)
        denoiser, alone = masked(prepared.load()), list[Rollout]()
        for name, (batch, pool_gib, kernel) in ways.items():
            denoiser.attention = kernel
            how = replace(prepared.config.decode, batch_size=batch)
            decoder = decoder_of(prepared, denoiser, how, EngineConfig(pool_gib=pool_gib))
            rollouts = decoder.decode(asked)
            alone = alone or rollouts
            pairs = list(zip(rollouts, alone, strict=True))
            same = [pair for pair in pairs if tokens_of(pair[0]) == tokens_of(pair[1])]
            off = [
                abs(ours.confidence - theirs.confidence)
                for pair in same
                for steps in zip(*(rollout.steps for rollout in pair), strict=True)
                for ours, theirs in zip(*(step.committed for step in steps), strict=True)
            ]
            found = {
                "same_tokens": len(same),
                "of": len(asked),
                "farthest_confidence": max(off, default=0.0),
            }
            record.add(line={"dtype": dtype, "kernel": denoiser.backend, "way": name, **found})


def denoise(what: Denoises, record: Record, folder: Path) -> None:
    """Milliseconds of a step of rows whose canvases begin as uniform noise, by the batch."""
    from bench_gemma import milliseconds, proposer_of, views_of

    from dlm_rag.machine import choose_device

    device = choose_device("auto")
    proposer = proposer_of(device.type, what.shape)
    model: Any = proposer.denoiser.model
    record.add(
        parameters=sum(p.numel() for p in model.parameters()), device=device.type, shape=what.shape,
        weights_gib=sum(p.nbytes for p in model.parameters()) / GIB, prompt_tokens=what.prompt,
        canvas=proposer.shape.attention_block,
    )  # fmt: skip
    views = []
    for rows in what.rows:
        proposer.forget()
        views = views_of(proposer.shape, rows, what.prompt)
        prompt, logits, step = milliseconds(proposer, views, what.repeats)
        line = {"rows": rows, "prompt_ms": prompt, "model_ms": logits, "step_ms": step}
        record.add(line=line | {"peak_gib": peak_gib(device)})
    attributed(lambda: [proposer.propose(views) for _ in range(2)], record, folder)


def train(what: Trains, record: Record, folder: Path) -> None:
    """Steps of one trainer whose switches are turned; memory beside that of the plan."""
    import tempfile
    from functools import partial

    from dlm_rag.config import load_config
    from dlm_rag.training.memory import PlannedStep
    from dlm_rag.training.origin import Origin, begin
    from dlm_rag.training.plan import sample_items
    from dlm_rag.training.processes import Processes
    from dlm_rag.training.tasks import Pretrain
    from dlm_rag.training.trainer import Trainer, free_memory
    from dlm_rag.training.weights import place

    class Fresh(Origin):
        """Weights drawn on the device; those of a real run are drawn on the host, the same anywhere."""

        def fill(self, denoiser: Any, device: Any, trained: bool = True) -> None:
            place(denoiser, device)
            denoiser.initialise()

    class Sampled:
        """The same documents of random tokens in every step."""

        def examples(self, step: int, items: Sequence[int]) -> list[Any]:
            return sampled

    words = ["train.objective=pretrain", "train.optimizer=adamw", "train.steps=1000", *what.settings]
    config = load_config(None, words)
    origin = begin(config)
    shape = replace(origin.config, vocab_size=what.vocabulary)
    origin = Fresh(shape, origin.tokenizer, None, origin.seed, 0)
    sampled = sample_items(config, config.train, shape, config.train.items)
    documents: Any = Sampled()
    task = Pretrain(documents, config.train, origin.tokenizer.end_ids)
    with tempfile.TemporaryDirectory() as scratch:
        trainer = Trainer(config, origin, task, Path(scratch), Processes(0, 1, 0))
    root: Any = trainer.root
    denoiser, device = trainer.denoiser, trainer.device
    record.add(
        parameters=sum(p.numel() for p in denoiser.parameters()), device=device.type,
        sequence_length=config.train.sequence_length, batch_tokens=config.train.batch_tokens,
    )  # fmt: skip
    for switch in what.switches:
        denoiser.checkpointing = switch if switch in ("selective", "full") else "none"
        chunk = what.logit_chunk if switch == "logit_chunk" else config.train.logit_chunk
        root.logit_chunk = chunk
        if switch == "compile":
            denoiser.compile_layers()
        free_memory()
        for _ in range(2):
            trainer.step()
        peak_gib(device)
        times = []
        for _ in range(what.steps):
            begun = time.perf_counter()
            metrics = trainer.step()
            times.append(time.perf_counter() - begun)
        speed = trainer.speed(metrics, sorted(times)[len(times) // 2])
        line = {
            "switch": f"{switch} {chunk}" if switch == "logit_chunk" else switch,
            **speed,
            "steps": times,
        }
        line["peak_gib"] = peak_gib(device)
        changed = replace(config.train, checkpointing=denoiser.checkpointing, logit_chunk=chunk)
        sample = partial(sample_items, config, changed, shape)
        task = Pretrain(documents, changed, origin.tokenizer.end_ids)
        planned = PlannedStep(task, sample, shape, changed, trainer.dtype).memory(changed.items)
        whole = planned.weights + planned.gradients + planned.optimizer + planned.activations
        record.add(line=line | {"planned_gib": whole / GIB})
        if switch == what.switches[0]:
            attributed(lambda: [trainer.step() for _ in range(2)], record, folder)


def attributed(call: Callable[[], Any], record: Record, folder: Path) -> None:
    """Runs a call under torch.profiler; the tables of attribute.py go into the record and the folder."""
    import torch
    from attribute import make_folder
    from attribution import attribute
    from pages import grids, write
    from reports import open_session

    make_folder(folder)
    trace = folder / "trace.json"
    with torch.profiler.profile() as profiler:
        call()
    profiler.export_chrome_trace(str(trace))
    session = open_session(trace)
    trace.unlink()
    found = attribute(session)
    write(folder, session, found, None)
    record.add(attribution=[list(grid) for grid in grids(found, None)], attribution_folder=folder.name)


if __name__ == "__main__":
    run(main)
