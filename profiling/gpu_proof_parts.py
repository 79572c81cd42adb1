"""What each part of gpu_proof.py measures, in a process of its own."""

import gc
import json
import random
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cached_property, partial
from importlib.util import find_spec
from pathlib import Path
from statistics import median
from typing import Any

import decode_replay
import numpy as np
import torch
from attribute import write_attribution_report
from attribution import attribute_session
from bench_decode import BenchSetting, measure_in_rounds, summarise_setting
from bench_tools import TableRow, read_and_reset_peak_gib, time_calls
from decode_replay import (
    committed_tokens_by_step,
    find_caching_runner,
    make_random_denoiser,
    open_checkpoint_source,
    open_replay_source,
    select_evenly,
)
from profile_readers import read_profile_session
from steady_state import Roofline, measure_roofline, measure_steady

from dlm_rag.commands.prepare_decoder import fill_in_shipped_files, gather_questions, prepare_decoder
from dlm_rag.config import Config, EngineConfig, load_config
from dlm_rag.decode.rollout import Rollout
from dlm_rag.engine.runner import MaskedModelRunner
from dlm_rag.evidence.prompt_segments import RowInput, lay_out_prompt
from dlm_rag.files.paths import make_folder, write_text_atomic
from dlm_rag.machine import choose_device, default_pool_bytes, has_bfloat16, measure_free_bytes
from dlm_rag.model.attention import ATTENTION_BACKENDS, describe_kernel_version, get_backend_problem
from dlm_rag.model.denoiser_config import Segment
from dlm_rag.model.packed_batch import pack_rows
from dlm_rag.model.quantize import METHODS, count_weight_bytes, list_quantized_weights, quantize_weight
from dlm_rag.tokenizer import Prompt
from dlm_rag.training.distributed import DistributedContext
from dlm_rag.training.initial_model import InitialModel, allocate_denoiser, open_initial_model
from dlm_rag.training.step_memory import estimate_step_memory
from dlm_rag.training.supervised_tasks import PretrainTask
from dlm_rag.training.task import Run
from dlm_rag.training.trainer import Trainer

GIB = 2**30
COMPILED = ("none", "int8")  # precisions whose layers are timed compiled, too
decode_replay.RANDOM_MODEL_SHAPES["tiny"] = (64, 2, 4, 2, 128, 2048)


def free_memory() -> None:
    """Gives back what nobody refers to any more: a trainer and its denoiser refer to each other."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


class PartRecord:
    """What a part has found: a title, a text, rows of a table; its file is whole after every row."""

    def __init__(self, path: Path, attribution: Path) -> None:
        """attribution: the folder for where the time goes."""
        self._path, self._attribution = path, attribution
        self.found: dict[str, Any] = {"rows": []}

    def add(self, *rows: TableRow, **more: str) -> None:
        self.found["rows"] += rows
        self.found |= more
        write_text_atomic(self._path, json.dumps(self.found, indent=2) + "\n")

    def profile_call(self, call: Callable[[], Any]) -> None:
        """Runs a call under torch.profiler; the report of attribute.py goes into the folder."""
        folder = make_folder(self._attribution)
        with torch.profiler.profile() as profiler:
            call()
        profiler.export_chrome_trace(str(folder / "trace.json"))
        session = read_profile_session(folder / "trace.json")
        (folder / "trace.json").unlink()
        write_attribution_report(folder, attribute_session(session), None)
        self.add(attribution=self._attribution.name)


def load_shipped_config(*words: str) -> Config:
    return fill_in_shipped_files(load_config(None, list(words)), [])


def choose_low_dtype(device: torch.device) -> str:
    """bfloat16 or, where a GPU only emulates it, float16."""
    return "bfloat16" if has_bfloat16(device) else "float16"


def measure_precision(
    record: PartRecord, shape: str, rows: Sequence[int], tokens: int = 64, repeats: int = 5
) -> None:
    """Milliseconds of the layers for `rows` of `tokens` tokens, in every precision that works here."""
    device = choose_device("auto")
    low = choose_low_dtype(device)
    works = METHODS if find_spec("torchao") else ()
    for name in ("none", *works):
        free_memory()
        denoiser = make_random_denoiser(shape, device, getattr(torch, low))
        if name != "none":
            for weight, value in list_quantized_weights(denoiser).items():
                quantize_weight(denoiser, weight, value.detach(), name)
        free_memory()
        record.add(
            title="Low precision",
            text=f"{shape}: {count_millions(denoiser)}, the rest in {low}. Milliseconds of all layers "
            f"for rows of {tokens} tokens, without a context; medians of {repeats}.",
        )
        row: TableRow = {"precision": name}
        row["weights GiB"] = count_weight_bytes(denoiser.config, 2, name) / GIB
        for way in ("", ", compiled") if name in COMPILED else ("",):
            if way:
                denoiser.compile_layers()
            for count in rows:
                packed = pack_rows([Segment((1,) * tokens, 0)] * count, device)
                with torch.inference_mode():
                    seconds = time_calls(partial(denoiser.encode, packed), device, repeats)
                row[f"rows: {count}{way}"] = 1e3 * median(seconds)
        record.add(row | {"peak GiB": read_and_reset_peak_gib(device)})
        del denoiser


def count_millions(model: torch.nn.Module) -> str:
    return f"{sum(p.numel() for p in model.parameters()) / 1e6:,.0f} M parameters"


def inspect_machine(record: PartRecord) -> None:
    """Versions, kernels, memory; products and copies as fast as they get."""
    config = load_shipped_config()
    prepared = prepare_decoder(config, gather_questions(config, []))
    device, stamp = prepared.device, prepared.stamp()
    facts = stamp["machines"][0] | {f"{name} (version)": n for name, n in stamp["versions"].items()}
    facts["arithmetic"] = str(prepared.dtype).removeprefix("torch.")
    for name in ATTENTION_BACKENDS:
        problem = get_backend_problem(name, device, prepared.dtype)
        facts[f"kernel {name}"] = problem or describe_kernel_version(name)
    facts["memory free, GiB"] = measure_free_bytes(device) / GIB
    facts["default pool, GiB"] = default_pool_bytes(device) / GIB
    text = f"Commit {stamp['commit']}, {stamp['date']}."
    if device.type == "cpu":
        text += " **On a CPU**: this shows that the page is made and which parts run, and nothing of a GPU."
    rows = [{"machine": name, "value": value} for name, value in facts.items()]
    record.add(*rows, title=f"The machine: {facts['name']}", text=text)
    best = measure_roofline(device, prepared.dtype)
    record.add({"machine": "matrix products, TFLOP/s", "value": best.flops / 1e12})
    record.add({"machine": "copies, GB/s", "value": best.bytes / 1e9})


def measure_long_prompts(record: PartRecord, shape: str, tokens: Sequence[int], repeats: int = 3) -> None:
    """Milliseconds from a prompt to its first proposals, by its length: evidence new, and kept before."""
    device = choose_device("auto")
    denoiser = make_random_denoiser(shape, device, getattr(torch, choose_low_dtype(device)))
    config, numbers = denoiser.config, iter(range(1, 1000))
    assert config.mask_token_id is not None
    runner, canvas = MaskedModelRunner(denoiser, config.mask_token_id, EngineConfig()), config.canvas_length
    text = f"{shape}: {count_millions(denoiser)}, one question, passages of {config.passage_length} tokens."
    record.add(title="Long prompts", text=f"{text} Medians of {repeats}.")

    def propose(length: int, first: int) -> None:
        rest = (1,) * (config.passage_length - 2)
        facts = tuple((first, n + 1, *rest) for n in range(length // config.passage_length))
        laid = lay_out_prompt(Prompt((1,) * 20, facts, ()), config, "independent")
        runner.propose([RowInput(0, laid, np.zeros(canvas, np.int64), np.arange(canvas))])()

    for length in tokens:
        new = time_calls(lambda n=length: propose(n, next(numbers)), device, repeats)
        kept = time_calls(partial(propose, length, 0), device, repeats)
        record.add({"tokens": length, "new, ms": 1e3 * median(new), "kept, ms": 1e3 * median(kept)})


def measure_decoding(
    record: PartRecord,
    shape: str,
    questions_by_batch: dict[int, int],
    warmup: int = 64,
    rounds: int = 2,
    profiled: int = 16,
) -> None:
    """Answers a second: the published algorithm (batch 0) first, then ours in batches, with one warm pool.

    shape: of `RANDOM_MODEL_SHAPES`; empty: the shipped model. questions_by_batch: of a round. warmup,
    profiled: questions that the pool has seen before, and of the turn whose time is attributed.
    """
    config = load_shipped_config(f"decode.batch_size={max(questions_by_batch)}")
    most = warmup + profiled + rounds * sum(questions_by_batch.values())
    questions = select_evenly(gather_questions(config, []), most)
    random.Random(0).shuffle(questions)  # they come by hops, and every setting is to meet all kinds
    earlier, last, asked = questions[:warmup], questions[-profiled:], questions[warmup:-profiled]
    prepared = prepare_decoder(config, questions)
    layout = "joint" if shape else prepared.evidence_layout  # joint: as published
    source = open_replay_source(prepared, questions, shape) if shape else open_checkpoint_source(prepared)
    roofline = measure_roofline(prepared.device, prepared.dtype)
    record.add(
        title=f"Decoding: {shape or 'shipped'}",
        text=f"{count_millions(source.denoiser)}. The reference is the published algorithm, plainly: one "
        f"question at a time, the `{layout}` layout, nothing kept, logits everywhere. The others: the "
        "`independent` layout, one warm pool, questions that it has not seen. Speed-ups are of a forward "
        "of a row: no two settings have answered the same questions.",
    )
    read_and_reset_peak_gib(prepared.device)
    kept: Any = None  # the runner with the pool
    for batch, count in questions_by_batch.items():
        decode, engine = replace(source.decode, batch_size=max(1, batch)), EngineConfig() if batch else None
        decoder = source.make("independent" if batch else layout, decode, engine)
        decoder.model_runner = kept or decoder.model_runner
        turns = [[asked.pop() for _ in range(count)] for _ in range(rounds)]  # new to the pool
        setting = BenchSetting(f"batch of {batch}" if batch else "reference", decoder)
        measure_in_rounds([setting], turns, earlier if kept is None else earlier[:2])
        kept = decoder.model_runner if batch else None
        record.add(summarise_throughput(setting, turns[-1], roofline, record.found["rows"]))
    batch = next(batch for batch in (16, 4) if batch in questions_by_batch)
    decoder = source.make("independent", replace(source.decode, batch_size=batch), EngineConfig())
    decoder.model_runner = kept
    record.profile_call(lambda: list(decoder.stream(last)))


def measure_full_batches(
    record: PartRecord, shape: str, expected: dict[int, float | None], steps: int
) -> None:
    """Decoding in steady state, with all rows filled, beside what was expected before it was run.

    expected: the share of the roofline, in percent, by rows of the batch.
    """
    config = load_shipped_config(f"decode.batch_size={max(expected)}")
    questions = select_evenly(gather_questions(config, []), min(330, max(24, 2 * max(expected))))
    prepared = prepare_decoder(config, questions)
    source = open_replay_source(prepared, questions, shape)
    roofline = measure_roofline(prepared.device, prepared.dtype)
    record.add(
        title=f"Full batches: {shape}",
        text=f"{count_millions(source.denoiser)}, canvas of 64, evidence in the pool. Rows are refilled as "
        f"they end, and neither end of the run is counted; {steps} steps.",
    )
    indexed = not get_backend_problem("indexed", prepared.device, prepared.dtype)
    ways = [("auto", "", "none"), ("auto", "", "pipeline")]
    ways += [("indexed", "", "none"), ("indexed", "yes", "none"), ("indexed", "yes", "pipeline")] * indexed
    settings = [(rows, *way) for rows in expected for way in ways if rows > 1 or way[2] == "none"]
    # Last, for layers stay compiled: inductor's kernels in the graphs.
    settings += [(rows, "indexed", "compiled", "pipeline") for rows in expected if rows > 1 and indexed]
    for rows, kernel, graphs, overlap in settings:
        source.denoiser.attention = kernel
        decode = replace(source.decode, batch_size=rows, overlap=overlap)
        engine = EngineConfig(cuda_graphs=bool(graphs), compile=graphs == "compiled")
        row = measure_steady(source.make("independent", decode, engine), questions, roofline, steps)
        row |= {"kernel": source.denoiser.backend, "graphs": graphs, "overlap": overlap}
        row |= {"expected %": expected[rows], "peak GiB": read_and_reset_peak_gib(prepared.device)}
        record.add(row)


def summarise_throughput(
    setting: BenchSetting, asked: list[Any], roofline: Roofline, before: list[TableRow]
) -> TableRow:
    """The row of a setting, beside that of the reference, the first one before it."""
    row, runner = summarise_setting(setting, setting, asked, roofline), find_caching_runner(setting.decoder)
    row["speed-up"] = (before or [row])[0]["ms/forward"] / row["ms/forward"]
    for key in ("same tokens", "EM %", "exact", "energy", "stages", "tokens run"):
        del row[key]
    row["evicted"] = runner.cache_stats.evicted_segments if runner is not None else 0
    return row | {"peak GiB": read_and_reset_peak_gib(setting.decoder.denoiser.device)}


class RandomInitialModel(InitialModel):
    """Weights drawn on the device; those of a real run are drawn on the host, the same anywhere."""

    def materialize(self, denoiser: Any, device: Any, trained: bool = True) -> None:
        allocate_denoiser(denoiser, device)
        denoiser.initialise()


class RepeatedBatch(PretrainTask):
    """The same documents of random tokens in every step."""

    @cached_property
    def sampled(self) -> Any:
        return self.sample_batch(self.items)

    def make_batch(self, step: int, items: Sequence[int], state: Any) -> Any:
        return self.sampled


def measure_training(
    record: PartRecord,
    settings: Sequence[str],
    vocabulary: int,
    expected: dict[str, float | None],
    steps: int,
) -> None:
    """Steps of one trainer whose switches are turned; memory beside that of the plan.

    expected: MFU in percent by switch, as it was expected before this was run.
    """
    words = ["train.objective=pretrain", "train.optimizer=adamw", "train.max_steps=1000", *settings]
    config = load_config(None, words)
    origin = open_initial_model(config)
    shape = replace(origin.config, vocab_size=vocabulary)
    origin = RandomInitialModel(shape, origin.tokenizer, None, origin.seed, 0)
    with tempfile.TemporaryDirectory() as scratch:
        task = RepeatedBatch(Run(config, origin, Path(scratch)))
        trainer = Trainer(task, DistributedContext(0, 1, 0))
    denoiser, device = trainer.denoiser, trainer.device
    record.add(
        title="Training",
        text=f"{count_millions(denoiser)}, sequences of {config.train.sequence_length:,} tokens, "
        f"{config.train.batch_tokens:,} tokens a step, AdamW. The plan does not know of compilation.",
    )
    metrics: dict[str, Any] = {}
    for switch, share in expected.items():
        denoiser.activation_checkpointing = switch if switch in ("selective", "full") else "none"
        if switch == "compile":
            denoiser.compile_layers()
        free_memory()
        trainer.step()
        read_and_reset_peak_gib(device)
        seconds = time_calls(lambda: metrics.update(trainer.step()), device, steps)
        speed = trainer.speed_metrics(metrics, median(seconds))
        changed = replace(
            config.train,
            activation_checkpointing=denoiser.activation_checkpointing,
        )
        switched = PretrainTask(Run(replace(config, train=changed), origin, Path()))
        planned = estimate_step_memory(switched, trainer.dtype, task.items)
        whole = planned.weights + planned.gradients + planned.optimizer + planned.activations
        record.add({
            "switch": switch,
            "tokens/s": speed["tokens_per_second"], "TFLOP/s": speed["tflops_per_second"],
            "MFU %": 100 * speed["mfu"] if "mfu" in speed else "unknown machine", "expected %": share,
            "ms/step": [1e3 * each for each in seconds], "peak GiB": read_and_reset_peak_gib(device),
            "planned GiB": whole / GIB,
        })  # fmt: skip
        if switch == next(iter(expected)):
            record.profile_call(lambda: [trainer.step() for _ in range(2)])


def measure_exactness(record: PartRecord, questions: int, batch: int) -> None:
    """How many questions get the very tokens that they get alone, when something else is different."""
    ways = {  # batch, pool, kernel
        "alone": (1, None, "auto"),
        "alone, again": (1, None, "auto"),
        f"batches of {batch}": (batch, None, "auto"),
        f"batches of {batch}, no pool": (batch, 0.0, "auto"),
        "alone, attention=sdpa": (1, None, "sdpa"),
    }
    if not get_backend_problem("indexed", choose_device("auto"), torch.bfloat16):
        ways |= {
            "alone, indexed": (1, None, "indexed"),
            f"batches of {batch}, indexed": (batch, None, "indexed"),
            f"batches of {batch}, graphs": (batch, None, "indexed"),
        }
    text = "The shipped model. Confidences are compared where all tokens are the same."
    record.add(title="The same tokens?", text=text)
    for dtype in ("float32", choose_low_dtype(choose_device("auto"))):
        config, alone = load_shipped_config(f"model.dtype={dtype}"), list[Rollout]()
        asked = select_evenly(gather_questions(config, []), questions)
        prepared = prepare_decoder(config, asked)
        source = open_checkpoint_source(prepared)
        for name, (size, gib, kernel) in ways.items():
            source.denoiser.attention = kernel
            decode = replace(source.decode, batch_size=size)
            engine = EngineConfig(prefix_cache_gib=gib, cuda_graphs="graphs" in name)
            rollouts = source.make(prepared.evidence_layout, decode, engine).decode(asked)
            alone = alone or rollouts
            pairs = zip(rollouts, alone, strict=True)
            same = [p for p in pairs if committed_tokens_by_step(p[0]) == committed_tokens_by_step(p[1])]
            farthest = max((compute_confidence_gap(*pair) for pair in same), default=0.0)
            record.add({
                "precision": dtype, "way": name, "kernel": source.denoiser.backend,
                "same tokens as alone": f"{len(same)} of {len(asked)}",
                "confidences differ by, at most": farthest,
            })  # fmt: skip


def compute_confidence_gap(one: Rollout, other: Rollout) -> float:
    """The largest difference of a confidence between rollouts with the same tokens."""
    confidences = [
        [token.confidence for step in rollout.steps for token in step.committed] for rollout in (one, other)
    ]
    return max((abs(a - b) for a, b in zip(*confidences, strict=True)), default=0.0)
