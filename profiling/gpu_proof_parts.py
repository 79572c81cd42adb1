"""What each part of gpu_proof.py measures, in a process of its own."""

import faulthandler
import gc
import json
import signal
import tempfile
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache, cached_property, lru_cache, partial
from pathlib import Path
from statistics import median
from typing import Any

import decode_replay as replay
import numpy as np
import torch
from attribute import write_attribution_report
from attribution import attribute_session
from bench_tools import TableRow, read_and_reset_peak_gib, synchronize_device, time_calls
from profile_readers import read_profile_session
from steady_state import measure_roofline, measure_steady

from dlm_rag.commands.prepare_decoder import fill_in_shipped_files, gather_questions, prepare_decoder
from dlm_rag.config import Config, EngineConfig, load_config
from dlm_rag.config.fields import replace_settings
from dlm_rag.decode.rollout import Rollout
from dlm_rag.engine.engine import Decoder
from dlm_rag.engine.runner import MaskedModelRunner
from dlm_rag.evidence.prompt_segments import lay_out_prompt
from dlm_rag.files.paths import make_folder, write_text_atomic
from dlm_rag.machine import choose_device, default_pool_bytes, has_bfloat16, measure_free_bytes
from dlm_rag.model import layers
from dlm_rag.model.packed_batch import RowInput, Segment, pack_rows
from dlm_rag.tokenizer import Prompt
from dlm_rag.training.distributed import DistributedContext
from dlm_rag.training.initial_model import InitialModel, allocate_denoiser, open_initial_model
from dlm_rag.training.rl import RlTask
from dlm_rag.training.step_memory import estimate_step_memory
from dlm_rag.training.supervised_tasks import PretrainTask
from dlm_rag.training.task import Run, Task
from dlm_rag.training.trainer import Trainer

GIB = 2**30
Expected = dict[Any, float | None]
replay.RANDOM_MODEL_SHAPES["tiny"] = (64, 2, 4, 2, 128, 2048)


def free_memory() -> None:
    """Gives back what nobody refers to any more: a trainer and its denoiser refer to each other."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


class RowTimeout(BaseException):
    """A row took too long; not an `Exception`, for which the engine has uses of its own."""


class PartRecord:
    """What a part has found: a title, a text, rows of a table, errors; its file is whole after every row.

    A process that is started again reads it, and leaves out the rows that an earlier one has tried.
    """

    def __init__(self, path: Path, attribution: Path) -> None:
        """attribution: the folder for where the time goes."""
        self._path, self._attribution = path, attribution
        self.found: dict[str, Any] = {"rows": [], "tried": [], "errors": {}}
        if path.is_file():
            self.found = json.loads(path.read_text())

    def add(self, *rows: TableRow, **more: str) -> None:
        self.found["rows"] += rows
        self.found |= more
        write_text_atomic(self._path, json.dumps(self.found, indent=2) + "\n")

    def attempt(self, name: str, seconds: int, measure: Callable[[], TableRow | None]) -> None:
        """Adds the row that a call returns, or what went wrong with it; then the next one may go on.

        The alarm breaks off what takes longer. Where Python is not reached, as in a kernel that hangs, the
        process ends 5 seconds later; so it does once the device has failed, for no row could follow.
        """
        if name in self.found["tried"]:
            return
        errors = self.found["errors"]
        self.found["tried"].append(name)
        errors[name] = f"the process ended with it, after {seconds + 5} s at most"
        self.add()
        faulthandler.dump_traceback_later(seconds + 5, exit=True, file=2)
        signal.signal(signal.SIGALRM, _raise_timeout)
        signal.alarm(seconds)
        try:
            row = measure()
            signal.alarm(0)
            del errors[name]
        except (Exception, RowTimeout) as error:
            signal.alarm(0)
            traceback.print_exc()
            row, errors[name] = None, f"{type(error).__name__}: {error}"[:500]
        self.add(*[row] if row else [])
        if name in errors:
            free_memory()
            synchronize_device(choose_device("auto"))  # raises once the device has failed
        faulthandler.cancel_dump_traceback_later()

    def profile_call(self, call: Callable[[], Any]) -> None:
        """Runs a call under torch.profiler; the report of attribute.py goes into the folder."""
        folder = make_folder(self._attribution)
        with torch.profiler.profile() as profiler:
            call()
        try:
            profiler.export_chrome_trace(str(folder / "trace.json"))
            session = read_profile_session(folder / "trace.json")
        finally:  # it is large, and an alarm may come
            (folder / "trace.json").unlink(missing_ok=True)
        write_attribution_report(folder, attribute_session(session), None)
        self.add(attribution=self._attribution.name)


def _raise_timeout(*_: Any) -> None:
    raise RowTimeout("it took too long")


def load_shipped_config(*words: str) -> Config:
    return fill_in_shipped_files(load_config(None, list(words)), [])


def choose_low_dtype(device: torch.device) -> str:
    """bfloat16 or, where a GPU only emulates it, float16."""
    return "bfloat16" if has_bfloat16(device) else "float16"


def count_millions(model: torch.nn.Module) -> str:
    return f"{sum(p.numel() for p in model.parameters()) / 1e6:,.0f} M parameters"


def inspect_machine(record: PartRecord) -> None:
    """Versions, kernels, memory; products and copies as fast as they get."""
    config = load_shipped_config()
    prepared = prepare_decoder(config, gather_questions(config, []))
    device, stamp = prepared.device, prepared.stamp()
    facts = stamp["machines"][0] | {f"{name} (version)": n for name, n in stamp["versions"].items()}
    facts["arithmetic"] = str(prepared.dtype).removeprefix("torch.")
    for name in (*layers.ATTENTION_BACKENDS, "indexed"):
        problem = layers.get_backend_problem(name, device, prepared.dtype)
        facts[f"kernel {name}"] = problem or layers.describe_kernel_version(name)
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
    denoiser = replay.make_random_denoiser(shape, device, getattr(torch, choose_low_dtype(device)))
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

    def measure(length: int) -> TableRow:
        new = time_calls(lambda: propose(length, next(numbers)), device, repeats)
        kept = time_calls(partial(propose, length, 0), device, repeats)
        return {"tokens": length, "new, ms": 1e3 * median(new), "kept, ms": 1e3 * median(kept)}

    for length in tokens:
        record.attempt(f"{length} tokens", 15, partial(measure, length))


FULL_WAYS: list[tuple[str, str, str, tuple[str, ...]]] = [
    # Kernel, graphs, order of finished blocks, overlaps of batches: first what has run on a GPU before.
    ("auto", "", "", ("none", "pipeline")),
    ("published", "", "", ()),  # the algorithm plainly: one question, nothing kept, logits everywhere
    ("auto", "", "no_evidence", ("none", "pipeline")),
    ("indexed", "", "", ("none",)),
    ("indexed", "graphs", "", ("none", "pipeline")),
    ("indexed", "graphs", "no_evidence", ("none", "pipeline")),
    ("indexed", "compiled", "", ("pipeline",)),  # last, for layers stay compiled: its kernels in graphs
]


def measure_full_batches(record: PartRecord, shape: str, expected: Expected, steps: int) -> None:
    """Decoding in steady state, with all rows filled, beside what was expected before it was run.

    shape: of `RANDOM_MODEL_SHAPES`; empty: the shipped model. expected: the share of the roofline, in
    percent, by rows of the batch.
    """
    most = max(expected)
    config = load_shipped_config(f"decode.batch_size={most}")
    questions = replay.select_evenly(gather_questions(config, []), max(2, most))
    prepared = prepare_decoder(config, questions)
    source = replay.open_checkpoint_source(prepared)
    if shape:
        source = replay.open_replay_source(prepared, questions, shape)
    roofline = measure_roofline(prepared.device, prepared.dtype)
    record.add(
        title=f"Full batches: {shape or 'shipped'}",
        text=f"{count_millions(source.denoiser)}; {len(questions)} questions that come again and again, "
        "their evidence in the pool. Rows are refilled as they end, and neither end of the run is counted; "
        f"{steps} steps. Expected: of whole canvases in graphs.",
    )

    @lru_cache(1)
    def open_decoder(kernel: str, graphs: str, order: str) -> Decoder:
        layout, decode, engine = prepared.evidence_layout, source.decode, None
        if kernel == "published":
            return source.make("joint" if shape else layout, replace_settings(decode, batch_size=1), engine)
        source.denoiser.attention = kernel
        engine = EngineConfig(cuda_graphs=bool(graphs), compile=graphs == "compiled")
        decoder = source.make(layout, decode, engine, *([order] if order else ()))
        decoder.decode(questions)
        return decoder

    def measure(setting: str, way: Sequence[str], rows: int, overlap: str) -> TableRow:
        decoder = open_decoder(*way)
        read_and_reset_peak_gib(prepared.device)
        decoder.config = decoder.resolve_settings(decoder.config, batch_size=rows, overlap=overlap)
        row = measure_steady(decoder, questions, roofline, steps) | {"setting": setting}
        held: Any = getattr(replay.find_caching_runner(decoder), "_graphs", None)
        row |= {"kernel": decoder.denoiser.backend, "graphs": held and len(held._graphs)}
        row["expected %"] = expected[rows] if way[1] and not way[2] else None
        return row | {"peak GiB": read_and_reset_peak_gib(prepared.device)}

    def profile() -> None:
        decoder = open_decoder("auto", "", "")
        record.profile_call(lambda: decoder.decode(questions[:16], batch_size=16, overlap="none"))

    works = not layers.get_backend_problem("indexed", prepared.device, prepared.dtype)
    for *way, overlaps in FULL_WAYS:
        kernel, graphs, order = way
        if (kernel == "indexed" and not works) or (order and not shape):  # which has blocks of its own
            continue
        open_decoder.cache_clear()  # the memory of the last one
        free_memory()
        for rows in [1] if not overlaps else [most] if order else expected:
            for overlap in overlaps if rows > 1 else ["none"]:
                words = [f"{rows} rows", kernel, graphs, order and "blocks", overlap.replace("none", "")]
                setting, limit = ", ".join(filter(None, words)), 90 if graphs == "compiled" else 45
                record.attempt(setting, limit, partial(measure, setting, way, rows, overlap))
        if way == ["auto", "", ""]:
            record.attempt("profile", 30, profile)


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


def open_random_trainer(config: Config, kind: type[Task], **sizes: Any) -> Trainer:
    """The trainer of a run whose model has these sizes in place of its own, and random weights."""
    origin = open_initial_model(config)
    shape, lora_rank = replace(origin.config, **sizes), config.train.lora_rank
    origin = RandomInitialModel(shape, origin.tokenizer, None, origin.seed, lora_rank)
    with tempfile.TemporaryDirectory() as scratch:
        task = kind(Run(config, origin, Path(scratch)))
        if kind is RlTask:
            task.open_data()
        return Trainer(task, DistributedContext(0, 1, 0))


def measure_training(
    record: PartRecord, settings: Sequence[str], vocabulary: int, expected: Expected, steps: int
) -> None:
    """Steps of one trainer whose switches are turned; memory beside that of the plan.

    expected: MFU in percent by switch, as it was expected before this was run. A switch names checkpointing
    (half: full, of every other layer); from the first with `compile` on all are compiled.
    """
    words = ["train.objective=pretrain", "train.optimizer=adamw", "train.max_steps=1000", *settings]
    config = load_config(None, words)
    trainer = open_random_trainer(config, RepeatedBatch, vocab_size=vocabulary)
    denoiser, device = trainer.denoiser, trainer.device
    record.add(
        title="Training",
        text=f"{count_millions(denoiser)}, sequences of {config.train.sequence_length:,} tokens, "
        f"{config.train.batch_tokens:,} tokens a step, AdamW. The plan does not know of compilation.",
    )

    def measure(switch: str, share: float | None) -> TableRow:
        free_memory()
        kind = "full" if "half" in switch else switch.removeprefix("compile").strip(", ") or "none"
        every = 2 if "half" in switch else 1
        denoiser.activation_checkpointing, denoiser.activation_checkpointing_interval = kind, every
        if "compile" in switch:
            denoiser.compile_layers()
        for optimizer in trainer.optimizers:  # gradients of a step that did not end
            optimizer.zero_grad()
        trainer.step()
        read_and_reset_peak_gib(device)
        metrics: dict[str, Any] = {}
        seconds = time_calls(lambda: metrics.update(trainer.step()), device, steps)
        speed = trainer.speed_metrics(metrics, median(seconds))
        changed: Any = {"activation_checkpointing": kind, "activation_checkpointing_interval": every}
        switched = replace(config, train=replace(config.train, **changed))
        task = PretrainTask(Run(switched, trainer.origin, Path()))
        planned = estimate_step_memory(task, trainer.dtype, task.items)
        whole = planned.weights + planned.gradients + planned.optimizer + planned.activations
        return {
            "switch": switch,
            "tokens/s": speed["tokens_per_second"], "TFLOP/s": speed["tflops_per_second"],
            "MFU %": 100 * speed["mfu"] if "mfu" in speed else "unknown machine", "expected %": share,
            "ms/step": [1e3 * each for each in seconds], "peak GiB": read_and_reset_peak_gib(device),
            "planned GiB": whole / GIB,
        }  # fmt: skip

    for switch, share in expected.items():
        record.attempt(switch, 70 if "compile" in switch else 30, partial(measure, switch, share))
        if switch == next(iter(expected)):
            profile = partial(record.profile_call, lambda: [trainer.step() for _ in range(2)])
            record.attempt("profile", 30, profile)


def measure_rl(record: PartRecord, shape: str, steps: int, settings: Sequence[str] = ()) -> None:
    """Steps of learning by reward with adapters: 8 questions, 8 rollouts of each, in a model of a shape.

    Random weights are sure of nothing: by this threshold a step commits about a quarter of the masks.
    """
    words = [
        "train.lora_rank=16", "train.reward=forwards", "train.activation_checkpointing=full",
        "decode.commit_threshold=0.001", "decode.gate_temperature=4", *settings,
    ]  # fmt: skip
    sizes: dict[str, Any] = dict(zip(replay.SHAPE_FIELDS, replay.RANDOM_MODEL_SHAPES[shape], strict=True))
    sizes["head_dim"] = sizes["hidden_size"] // sizes["num_attention_heads"]
    trainer = open_random_trainer(load_config("search_rl.yaml", words), RlTask, **sizes)
    text = f"{count_millions(trainer.denoiser)}, LoRA of rank 16, {trainer.task.rows} rollouts a step."
    record.add(title=f"Learning by reward: {shape}", text=text)

    def measure(number: int) -> TableRow:
        begun = time.perf_counter()
        metrics = trainer.step()  # which waits for the device
        row = {"step": number, "seconds": time.perf_counter() - begun}
        row |= {name: trainer.stage_seconds[name] for name in ("rollout", "forward", "backward")}
        row |= {name: metrics[name] for name in ("rollout_forwards", "groups_mixed", "ratio_error")}
        return row | {"peak GiB": read_and_reset_peak_gib(trainer.device)}

    for number in range(steps):
        record.attempt(f"step {number}", 40, partial(measure, number))


def measure_attention(device: torch.device, dtype: torch.dtype) -> TableRow:
    """Attention of a 7 B model through an index, with masks, in a memory that else is NaN: how far it is
    from that in float64, and whether a row alone is the same to the bit."""
    runs = [Segment((1,) * n, 0, block=8) for n in (1, 37, 300, 128)]
    count = sum(len(run.ids) for run in runs)
    q, k, v = (torch.randn(count, heads, 128).to(dtype) for heads in (28, 4, 4))
    seen = pack_rows(runs, torch.device("cpu")).attention_metadata
    right = layers.compute_attention(q.double(), k.double(), v.double(), seen, "sdpa")
    places = torch.randperm(2 * count)[:count]
    memory = torch.full((2, 2 * count, *k.shape[1:]), torch.nan, dtype=dtype)
    memory[:, places] = torch.stack((k, v))
    held, there, queries = memory.to(device), places.to(device), q.to(device)

    def attend(rows: list[Segment], part: slice) -> torch.Tensor:
        sight = replace(pack_rows(rows, device).attention_metadata, key_places=there[part])
        return layers.compute_attention(queries[part], held[0], held[1], sight, "indexed")

    found, third = attend(runs, slice(None)), slice(38, 338)
    alone = torch.equal(attend(runs[2:3], third), found[third])
    error = float((found.cpu().double() - right).norm() / right.norm())
    if not (alone and error < 1e-2):
        raise AssertionError(f"off by {error:.1%}; a row alone is the same: {alone}")
    row = {"precision": str(dtype).removeprefix("torch."), "way": "attention, indexed", "like": "float64"}
    return row | {"differ by, at most": error}


def measure_exactness(record: PartRecord, questions: int, batch: int) -> None:
    """How many questions get the very tokens that they get otherwise, when one thing is different."""
    many, pool = f"batches of {batch}", 0.25  # GiB
    ways = {  # batch, pool, kernel, graphs; what it is to be like
        "alone": (1, pool, "auto", "", "alone"),
        many: (batch, pool, "auto", "", "alone"),
        f"{many}, no pool": (batch, 0.0, "auto", "", "alone"),
        "alone, again": (1, pool, "auto", "", "alone"),
        "alone, attention=sdpa": (1, pool, "sdpa", "", "alone"),
        "alone, indexed": (1, pool, "indexed", "", "alone"),
        f"{many}, indexed": (batch, pool, "indexed", "", "alone, indexed"),
        f"{many}, padded": (batch, pool, "indexed", "padded", "alone, indexed"),
        f"{many}, graphs": (batch, pool, "indexed", "graphs", f"{many}, padded"),
    }
    record.add(
        title="The same tokens?",
        text="The shipped model. Confidences are compared where all tokens are the same. `padded`: steps "
        "in the sizes of graphs, without these. Memories begin as NaN.",
    )
    compare_ways(record, choose_low_dtype(choose_device("auto")), ways, questions)
    compare_ways(record, "float32", dict([*ways.items()][:4]), questions)


def compare_ways(record: PartRecord, dtype: str, ways: dict[str, Any], questions: int) -> None:
    """Adds the rows of `measure_exactness` in a precision."""
    config = load_shipped_config(f"model.dtype={dtype}")
    asked = replay.select_evenly(gather_questions(config, []), questions)
    prepared = prepare_decoder(config, asked)
    source = replay.open_checkpoint_source(prepared)
    indexed = not layers.get_backend_problem("indexed", prepared.device, prepared.dtype)

    @cache
    def decode(way: str) -> list[Rollout]:
        size, gib, source.denoiser.attention, graphs, _ = ways[way]
        engine = EngineConfig(prefix_cache_gib=gib, cuda_graphs=bool(graphs))
        decoder = source.make(
            prepared.evidence_layout, replace_settings(source.decode, batch_size=size), engine
        )
        runner: Any = decoder.model_runner
        for layer in range(source.denoiser.config.num_hidden_layers):
            runner.cache.memory.layer(layer).fill_(torch.nan)
        if graphs == "padded":
            runner._graphs.run = partial(run_padded, source.denoiser)
        return decoder.decode(asked)

    def measure(way: str) -> TableRow:
        like, tokens = ways[way][-1], replay.committed_tokens_by_step
        same = [p for p in zip(decode(way), decode(like), strict=True) if tokens(p[0]) == tokens(p[1])]
        farthest = max((compute_confidence_gap(*pair) for pair in same), default=0.0)
        count = f"{len(same)} of {len(asked)}"
        row = {"precision": dtype, "way": way, "like": like, "same tokens": count}
        return row | {"differ by, at most": farthest}

    check = partial(measure_attention, prepared.device, prepared.dtype)
    for way, (_, _, kernel, _, _) in ways.items():
        if kernel == "indexed" and indexed:  # once
            record.attempt(f"{dtype}, attention", 40, check)
        if kernel != "indexed" or indexed:
            record.attempt(f"{dtype}, {way}", 40, partial(measure, way))


def run_padded(denoiser: Any, rows: Any, head: Any) -> Any:
    """What `StepGraphs.run` does, without a graph."""
    states = denoiser.encode(rows)[0]
    return states[: sum(rows.last_layer_metadata.query_lengths)] if head is None else head(states)


def compute_confidence_gap(one: Rollout, other: Rollout) -> float:
    """The largest difference of a confidence between rollouts with the same tokens."""
    confidences = [
        [token.confidence for step in rollout.steps for token in step.committed] for rollout in (one, other)
    ]
    return max((abs(a - b) for a, b in zip(*confidences, strict=True)), default=0.0)
