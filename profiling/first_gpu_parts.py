"""What each part of first_gpu.py measures, in a process of its own."""

import json
import random
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from dlm_rag.files.paths import write_text_atomic

GIB = 2**30
TINY_MODEL_SHAPE = (64, 2, 4, 2, 128, 2048)  # as in `decode_replay.RANDOM_MODEL_SHAPES`


@dataclass(frozen=True)
class DecodeSpec:
    """What is decoded: the questions of a round by batch size (0: the published algorithm)."""

    shape: str  # of `decode_replay.RANDOM_MODEL_SHAPES`; empty: the shipped model
    questions_by_batch_size: dict[int, int]
    pool_warmup_questions: int  # questions that the pool has seen
    rounds: int = 2
    profiled_questions: int = 16  # questions of the attributed turn


@dataclass(frozen=True)
class TrainSpec:
    """What is trained: settings of a fresh denoiser, its vocabulary, the switches in their order."""

    settings: tuple[str, ...]
    vocabulary: int
    switches: tuple[str, ...] = ("none", "logit_chunk", "selective", "full", "compile")
    steps: int = 6  # timed; of each switch
    logit_chunk: int = 512


@dataclass(frozen=True)
class ExactnessSpec:
    """What is decoded in several ways that should give the same tokens, by the shipped model."""

    questions: int
    batch: int


@dataclass(frozen=True)
class DenoiseSpec:
    """Steps of a DiffusionGemma with random weights: how many rows take one together."""

    shape: str  # of `bench_diffusion_gemma.RANDOM_MODEL_SHAPES`
    rows: tuple[int, ...]
    prompt: int  # tokens before each canvas
    repeats: int = 10


PartSpec = DecodeSpec | TrainSpec | ExactnessSpec | DenoiseSpec | None


class PartRecord:
    """What a part has found: its file is whole after every line."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self.found: dict[str, Any] = {"lines": []}

    def add(self, **found: Any) -> None:
        """Takes a line, or more that is found beside the lines."""
        self.found["lines"] += [found.pop("line")] if "line" in found else []
        self.found |= found
        write_text_atomic(self._path, json.dumps(self.found, indent=2) + "\n")


def inspect_machine(record: PartRecord) -> None:
    """Versions, kernels, memory; products and copies as fast as they get."""
    import torch
    from bench_decode import measure_roofline

    from dlm_rag.commands.prepare_decoder import apply_shipped_defaults, gather_questions, prepare_decoder
    from dlm_rag.config import load_config
    from dlm_rag.evidence.segment_kv_cache import default_pool_bytes, measure_free_bytes
    from dlm_rag.model.attention import (
        ATTENTION_BACKENDS,
        describe_kernel_version,
        get_backend_problem,
        get_paged_attention_support,
    )

    config = apply_shipped_defaults(load_config(None, []), [])
    prepared = prepare_decoder(config, gather_questions(config, []))
    device, dtype = prepared.device, prepared.dtype
    stamp = prepared.stamp()
    kernels = {
        name: get_backend_problem(name, device, dtype) or describe_kernel_version(name)
        for name in ATTENTION_BACKENDS
    }
    record.add(
        device=device.type, dtype=str(dtype).removeprefix("torch."), kernels=kernels,
        **{key: stamp[key] for key in ("commit", "date", "versions", "machines", "attention")},
        free_gib=measure_free_bytes(device) / GIB, prefix_cache_gib=default_pool_bytes(device) / GIB,
    )  # fmt: skip
    if prepared.attention == "varlen":
        record.add(reads_pages=get_paged_attention_support(torch.device(device)).reads_block_table)
    record.add(roofline=asdict(measure_roofline(device, dtype)))


def read_and_reset_peak_gib(device: Any) -> float | None:
    """The most that was allocated on a GPU since the last call."""
    import torch

    if device.type != "cuda":
        return None
    peak = torch.cuda.max_memory_allocated(device)
    torch.cuda.reset_peak_memory_stats(device)
    return peak / GIB


def measure_decoding(what: DecodeSpec, record: PartRecord, folder: Path) -> None:
    """Answers a second: the published algorithm first, then ours in batches, with one warm pool."""
    import decode_replay
    from bench_decode import (
        BenchSetting,
        measure_in_rounds,
        measure_roofline,
        summarise_settings,
    )
    from decode_replay import DecodeReplay, build_decoder, find_caching_runner, select_evenly

    from dlm_rag.commands.prepare_decoder import apply_shipped_defaults, gather_questions, prepare_decoder
    from dlm_rag.config import EngineConfig, load_config

    decode_replay.RANDOM_MODEL_SHAPES["tiny"] = TINY_MODEL_SHAPE
    config = apply_shipped_defaults(
        load_config(None, [f"decode.batch_size={max(what.questions_by_batch_size)}"]), []
    )
    most = what.rounds * sum(what.questions_by_batch_size.values())
    questions = select_evenly(
        gather_questions(config, []), most + what.pool_warmup_questions + what.profiled_questions
    )
    random.Random(0).shuffle(questions)  # they come by hops, and every setting is to meet all kinds
    earlier, last, asked = (
        questions[: what.pool_warmup_questions], questions[-what.profiled_questions :],
        questions[what.pool_warmup_questions : -what.profiled_questions]
    )  # fmt: skip
    prepared = prepare_decoder(config, questions)
    device = prepared.device
    roofline = measure_roofline(device, prepared.dtype)
    record.add(roofline=asdict(roofline), shape=what.shape or "shipped")
    if what.shape:
        follow = DecodeReplay.record_decodes(prepared, questions, what.shape)
        make, settings, denoiser = follow.build_replay_decoder, follow.decode, follow.denoiser
        plain = "joint"  # as published
    else:
        denoiser, plain = prepared.load().denoiser, prepared.evidence_layout
        settings = prepared.config.decode

        def make(layout: str, decode: Any, engine: Any) -> Any:
            return build_decoder(prepared, denoiser, decode, engine)

    record.add(parameters=sum(p.numel() for p in denoiser.parameters()), layout=plain)
    read_and_reset_peak_gib(device)
    reference, kept = 0.0, None  # seconds of a forward of a row; the pool and all around it
    for batch, count in what.questions_by_batch_size.items():
        how = replace(settings, batch_size=max(1, batch))
        decoder = make("independent" if batch else plain, how, EngineConfig() if batch else None)
        if kept is not None:
            decoder.model_runner = kept
        turns = [[asked.pop() for _ in range(count)] for _ in range(what.rounds)]  # new to the pool
        setting = BenchSetting(f"batch of {batch}" if batch else "reference", decoder)
        measure_in_rounds([setting], turns, earlier if kept is None else earlier[:2])
        if batch:
            kept = decoder.model_runner
        line = summarise_settings([setting], turns, roofline)[0]
        reference = reference or line["seconds_per_forward"]
        engine = find_caching_runner(decoder)
        record.add(
            line={
                "setting": setting.name,
                "speed_up": reference / line["seconds_per_forward"],
                "gflop_per_answer": line["flops"] / 1e9 / count,
                "peak_gib": read_and_reset_peak_gib(device),
                "evicted": engine.cache_stats.evicted_segments if engine is not None else 0,
                **{
                    key: line[key]
                    for key in (
                        "answers_per_second", "answers_per_second_range", "seconds_per_forward",
                        "forwards", "roofline_share", "bound", "reuse", "stages",
                    )
                },
            }
        )  # fmt: skip
    batch = next(batch for batch in (16, 4) if batch in what.questions_by_batch_size)
    decoder = make("independent", replace(settings, batch_size=batch), EngineConfig())
    decoder.model_runner = kept
    profile_call(lambda: list(decoder.stream(last)), record, folder)


def measure_training(what: TrainSpec, record: PartRecord, folder: Path) -> None:
    """Steps of one trainer whose switches are turned; memory beside that of the plan."""
    from dlm_rag.config import load_config
    from dlm_rag.training.distributed import DistributedContext
    from dlm_rag.training.initial_model import open_initial_model
    from dlm_rag.training.initial_weights import InitialModel, allocate_denoiser
    from dlm_rag.training.planning.step_memory import StepMemoryEstimator
    from dlm_rag.training.supervised_tasks import PretrainTask
    from dlm_rag.training.task import Phase
    from dlm_rag.training.trainer import Trainer, free_memory

    class Fresh(InitialModel):
        """Weights drawn on the device; those of a real run are drawn on the host, the same anywhere."""

        def fill(self, denoiser: Any, device: Any, trained: bool = True) -> None:
            allocate_denoiser(denoiser, device)
            denoiser.initialise()

    class Sampled:
        """The same documents of random tokens in every step."""

        def examples(self, step: int, items: Sequence[int]) -> list[Any]:
            return sampled

    words = ["train.objective=pretrain", "train.optimizer=adamw", "train.max_steps=1000", *what.settings]
    config = load_config(None, words)
    origin = open_initial_model(config)
    shape = replace(origin.config, vocab_size=what.vocabulary)
    origin = Fresh(shape, origin.tokenizer, None, origin.seed, 0)
    task = PretrainTask(Sampled(), config, config.train, origin)
    sampled = task.sample_examples(shape, task.items)
    with tempfile.TemporaryDirectory() as scratch:
        trainer = Trainer(Phase(config, "", origin, Path(scratch)), task, DistributedContext(0, 1, 0))
    root: Any = trainer.root
    denoiser, device = trainer.denoiser, trainer.device
    record.add(
        parameters=sum(p.numel() for p in denoiser.parameters()), device=device.type,
        sequence_length=config.train.sequence_length, batch_tokens=config.train.batch_tokens,
    )  # fmt: skip
    for switch in what.switches:
        denoiser.activation_checkpointing = switch if switch in ("selective", "full") else "none"
        chunk = what.logit_chunk if switch == "logit_chunk" else config.train.logit_chunk
        root.logit_chunk = chunk
        if switch == "compile":
            denoiser.compile_layers()
        free_memory()
        for _ in range(2):
            trainer.step()
        read_and_reset_peak_gib(device)
        times = []
        for _ in range(what.steps):
            begun = time.perf_counter()
            metrics = trainer.step()
            times.append(time.perf_counter() - begun)
        speed = trainer.speed_metrics(metrics, sorted(times)[len(times) // 2])
        line = {
            "switch": f"{switch} {chunk}" if switch == "logit_chunk" else switch,
            **speed,
            "steps": times,
        }
        line["peak_gib"] = read_and_reset_peak_gib(device)
        changed = replace(
            config.train, activation_checkpointing=denoiser.activation_checkpointing, logit_chunk=chunk
        )
        task = PretrainTask(None, config, changed, origin)
        planned = StepMemoryEstimator(task, shape, changed, trainer.dtype).estimate(task.items)
        whole = planned.weights + planned.gradients + planned.optimizer + planned.activations
        record.add(line=line | {"planned_gib": whole / GIB})
        if switch == what.switches[0]:
            profile_call(lambda: [trainer.step() for _ in range(2)], record, folder)


def measure_exactness(what: ExactnessSpec, record: PartRecord) -> None:
    """How many questions get the very tokens that they get alone, when something else is different."""
    from decode_replay import (
        build_decoder,
        committed_tokens_by_step,
        require_masked_denoiser,
        select_evenly,
    )

    from dlm_rag.commands.prepare_decoder import apply_shipped_defaults, gather_questions, prepare_decoder
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
        config = apply_shipped_defaults(load_config(None, [f"model.dtype={dtype}"]), [])
        asked = select_evenly(gather_questions(config, []), what.questions)
        prepared = prepare_decoder(config, asked)
        denoiser, alone = require_masked_denoiser(prepared.load()), list[Rollout]()
        for name, (batch, prefix_cache_gib, kernel) in ways.items():
            denoiser.attention = kernel
            how = replace(prepared.config.decode, batch_size=batch)
            decoder = build_decoder(
                prepared, denoiser, how, EngineConfig(prefix_cache_gib=prefix_cache_gib)
            )
            rollouts = decoder.decode(asked)
            alone = alone or rollouts
            pairs = list(zip(rollouts, alone, strict=True))
            same = [
                pair
                for pair in pairs
                if committed_tokens_by_step(pair[0]) == committed_tokens_by_step(pair[1])
            ]
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


def measure_denoising(what: DenoiseSpec, record: PartRecord, folder: Path) -> None:
    """Milliseconds of a step of rows whose canvases begin as uniform noise, by the batch."""
    from bench_diffusion_gemma import make_gemma_runner, make_random_inputs, measure_step_ms

    from dlm_rag.machine import choose_device

    device = choose_device("auto")
    proposer = make_gemma_runner(device.type, what.shape)
    model: Any = proposer.denoiser.model
    record.add(
        parameters=sum(p.numel() for p in model.parameters()), device=device.type, shape=what.shape,
        weights_gib=sum(p.nbytes for p in model.parameters()) / GIB, prompt_tokens=what.prompt,
        canvas=proposer.shape.block_size,
    )  # fmt: skip
    views = []
    for rows in what.rows:
        proposer.reset_cache()
        views = make_random_inputs(proposer.shape, rows, what.prompt)
        prompt, logits, step = measure_step_ms(proposer, views, what.repeats)
        line = {"rows": rows, "prompt_ms": prompt, "model_ms": logits, "step_ms": step}
        record.add(line=line | {"peak_gib": read_and_reset_peak_gib(device)})
    profile_call(lambda: [proposer.propose(views) for _ in range(2)], record, folder)


def profile_call(call: Callable[[], Any], record: PartRecord, folder: Path) -> None:
    """Runs a call under torch.profiler; the tables of attribute.py go into the record and the folder."""
    import torch
    from attribute import build_tables, write_attribution_report
    from attribution import attribute_session
    from bench_tools import make_folder
    from profile_readers import read_profile_session

    make_folder(folder)
    trace = folder / "trace.json"
    with torch.profiler.profile() as profiler:
        call()
    profiler.export_chrome_trace(str(trace))
    session = read_profile_session(trace)
    trace.unlink()
    found = attribute_session(session)
    write_attribution_report(folder, session, found, None)
    record.add(
        attribution=[list(grid) for grid in build_tables(found, None)], attribution_folder=folder.name
    )
