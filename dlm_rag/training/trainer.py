"""A training run: the loop of its steps, a step, and the model with its card that it leaves.

Everything that it needs to go on is in `TrainState`, weights and optimizers. A step's parts follow from its
number, so a run that was killed and resumed is the run that was not: on a CPU bit for bit.
"""

import datetime
import json
import math
import os
import shlex
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import asdict
from pathlib import Path
from threading import Event
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.overrides import TorchFunctionMode

from dlm_rag import machine
from dlm_rag.cli import print_note
from dlm_rag.config import Config, TrainConfig
from dlm_rag.energy import merge_readings, open_meter
from dlm_rag.errors import ConfigError, RunError
from dlm_rag.files.paths import open_atomic_folder, write_text_atomic
from dlm_rag.model.denoiser import Denoiser, count_head_flops
from dlm_rag.model.packed_batch import to_host
from dlm_rag.nvtx_ranges import StageClock, profile_stage, profile_step
from dlm_rag.training import distributed
from dlm_rag.training.checkpoints import Checkpoints, TrainState, gather_full_state_dict
from dlm_rag.training.distributed import DistributedContext
from dlm_rag.training.initial_model import InitialModel, open_initial_model
from dlm_rag.training.metrics_logger import MetricsLogger, read_metrics, select_validation_metrics
from dlm_rag.training.specs import find_gpu_spec
from dlm_rag.training.task import Run, Task, Validation, find_task


class Trainer:
    """Trains from a run's first weights, or from the newest checkpoint in its folder."""

    def __init__(self, task: Task, processes: DistributedContext) -> None:
        """Reads the weights. Raises `ConfigError` as `check_parallelism` and `Checkpoints` do."""
        self.task, self.train, train = task, task.train, task.train
        self.config, self.origin = task.run.config, task.run.origin
        distributed.check_parallelism(train, task.items, processes.world_size)
        self._checkpoints = Checkpoints(task, processes)
        self.device = processes.local_device(self.config.model.device)
        self.processes = processes
        self.dtype = machine.choose_dtype(train.dtype, self.device)
        self.state = TrainState(0, {})
        self._build_denoiser()
        self.stage_seconds: dict[str, float] = {}  # of the last step
        self.flops = 0.0  # of the last step on this process, forward and backward, nothing counted twice
        spec = find_gpu_spec(self.device)
        self._peak = None if spec is None else spec.flops.get(self.dtype)
        self.optimizers = make_optimizers(self.denoiser, train)
        self._scaler = torch.amp.GradScaler(self.device.type, enabled=self.dtype == torch.float16)

    def _build_denoiser(self) -> None:
        """The denoiser in its loss, in copies or shards, with the first weights of what is trained anew."""
        train, device, origin, processes = self.train, self.device, self.origin, self.processes
        self.denoiser = origin.build_on_meta(self.dtype)
        self.root = self.task.objective(self.denoiser)
        sharded = train.parallel == "fsdp" and dist.is_initialized()
        if sharded:
            distributed.apply_fsdp(self.root, self.denoiser, processes, device, self.dtype)
        origin.materialize(self.denoiser, device, trained=not self._checkpoints.has_begun)
        if processes.world_size > 1 and not sharded:
            self.root = distributed.wrap_in_ddp(self.root)
        self.denoiser.attention = self.config.model.attn_implementation
        self.denoiser.activation_checkpointing = train.activation_checkpointing
        self.denoiser.activation_checkpointing_interval = train.activation_checkpointing_interval
        if train.compile:
            self.denoiser.compile_layers()

    @property
    def finished(self) -> bool:
        """Whether the run has made its steps."""
        return self.state.step >= self.train.max_steps

    def step(self) -> dict[str, Any]:
        """One update of the weights; returns metrics. Raises `RunError` for a loss that is no number."""
        state, task = self.state, self.task
        with profile_step(state.step, task.rows), StageClock() as clock:
            with profile_stage("data"):
                parts = self._take_parts()
                mine = {name: sum(part.counts[name] for part in parts) for name in parts[0].counts}
                counts = self._all_reduce(mine)
            before = self.denoiser.flop_count
            share = self._set_learning_rates()
            found = self._run_backward(parts, counts)
            with profile_stage("optimizer"):
                norm, own = self._clip_gradients(found)
                own_metrics, after = task.finish_step(self._all_reduce(own), counts, state.task)
                self._check_finite(own_metrics["loss"], "loss")
                self._update(norm)
            spent = self.denoiser.flop_count - before
            spent += count_head_flops(self.denoiser.config, mine["supervised"], 4)
            self.flops = spent.flops_with_backward(bool(self.train.lora_rank))
        metrics = {
            "step": state.step,
            **own_metrics,
            "learning_rate_share": share,
            "gradient_norm": norm,
            "rows": round(counts["rows"]),
            "tokens": round(counts["tokens"]),
            "supervised_tokens": round(counts["supervised"]),
        }
        self.stage_seconds = clock.pop_seconds()
        state.step, state.task = state.step + 1, after
        return metrics

    def _take_parts(self) -> list[Any]:
        """This process's items of the step, in as many batches as its gradients are accumulated from."""
        task, count = self.task, self.train.gradient_accumulation_steps
        mine = self.processes.local_items(task.items)
        with self.evaluation_mode() if task.needs_denoiser else nullcontext():
            return [task.make_batch(self.state.step, mine[n::count], self.state.task) for n in range(count)]

    def _all_reduce(self, own: dict[str, float]) -> dict[str, float]:
        """Each value summed over all processes."""
        return dict(zip(own, self.processes.all_reduce_sum(list(own.values())), strict=True))

    def _run_backward(self, parts: list[Any], counts: dict[str, float]) -> list[dict[str, Tensor]]:
        """Adds up the gradients of all parts and, with the last, of all processes; returns their sums."""
        sums = []
        scale = self.processes.world_size  # DDP and FSDP take means over the processes
        for number, part in enumerate(parts, start=1):
            with nullcontext() if number == len(parts) else distributed.skip_gradient_sync(self.root):
                with profile_stage("forward"), make_autocast(self.device.type, self.dtype):
                    loss, found = self.root(part, counts)
                with profile_stage("backward"):
                    self._scaler.scale(loss * scale).backward()
            sums.append(found)
        return sums

    def _clip_gradients(self, found: list[dict[str, Tensor]]) -> tuple[float, dict[str, float]]:
        """Clips the gradients to a norm of 1; returns the norm before and the sums of this process's parts.
        The one wait for the device in a step."""
        trained = [p for p in self.denoiser.parameters() if p.requires_grad]
        gradients = [p.grad for p in trained if p.grad is not None]
        norm: Any = torch.nn.utils.get_total_norm(gradients)
        norm = norm.full_tensor() if hasattr(norm, "full_tensor") else norm
        # Not a number on one process is so on all, whose scales stay the same.
        norm = norm.where(norm.isfinite(), math.nan) / self._scaler.scale(torch.ones_like(norm))
        torch.nn.utils.clip_grads_with_norm_(trained, 1.0, norm)
        for optimizer in self.optimizers:
            self._scaler.unscale_(optimizer)
        sums = torch.stack([torch.stack(list(part.values())).double() for part in found]).sum(0)
        first, *rest = to_host(torch.cat((norm.double()[None], sums))).tolist()
        return first, dict(zip(found[0], rest, strict=True))

    def _update(self, norm: float) -> None:
        """Steps the optimizers; gradients that float16 cannot hold change the scale of losses alone."""
        if not self._scaler.is_enabled():
            self._check_finite(norm, "gradient")
        for optimizer in self.optimizers:
            if math.isfinite(norm):
                optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        self._scaler.update()

    def _set_learning_rates(self) -> float:
        """Sets the rates (warm-up, constant, linear fall); returns their share of the full ones."""
        train, step = self.train, self.state.step
        share = compute_decay_factor(step, train.max_steps, train.decay_fraction)
        share = min(share, (step + 1) / (train.warmup_steps + 1))
        for group in (group for optimizer in self.optimizers for group in optimizer.param_groups):
            group["lr"] = group["initial_lr"] * share
        return share

    def _check_finite(self, value: float, what: str) -> None:
        if not math.isfinite(value):
            raise RunError(
                f"the {what} of step {self.state.step} is not a number; the last checkpoint is intact: "
                "start again in another --out with a lower learning rate"
            )

    def speed_metrics(self, metrics: dict[str, Any], seconds: float) -> dict[str, Any]:
        """What a step of so many seconds says of speed and memory; on a known machine also MFU."""
        cuda = self.device.type == "cuda"
        peak = torch.cuda.max_memory_allocated(self.device) if cuda else machine.get_peak_memory_bytes()
        work = {"tflops_per_second": self.flops / seconds / 1e12}
        work |= {"mfu": self.flops / seconds / self._peak} if self._peak else {}
        return {
            "seconds": seconds,
            "stage_seconds": self.stage_seconds,
            "tokens_per_second": metrics["tokens"] / seconds,
            "supervised_tokens_per_second": metrics["supervised_tokens"] / seconds,
            "memory_gib": peak / 2**30,
            **({} if self.task.needs_denoiser else work),  # of rollouts no FLOPs are counted
        }

    @contextmanager
    def evaluation_mode(self) -> Iterator[None]:
        """While it is open every process may call the denoiser by itself, as often as it needs."""
        self.denoiser.eval()
        alone = distributed.allow_independent_forwards(self.root, self.denoiser, self.processes)
        try:
            with torch.no_grad(), make_autocast(self.device.type, self.dtype), alone:
                yield
        finally:
            self.denoiser.train()

    def save(self) -> Path:
        """Writes a checkpoint that is whole or not there; every process takes part."""
        with profile_stage("checkpoint"):
            return self._checkpoints.save(self.state, self._scaler.state_dict(), self.root, self.optimizers)

    def restore(self) -> bool:
        """Goes on from the newest checkpoint; False without. Raises `CheckpointError` for a broken one."""
        if (record := self._checkpoints.load(self.root, self.optimizers)) is None:
            return False
        if self._scaler.is_enabled() and record.scaler:
            self._scaler.load_state_dict(record.scaler)
        self.state = record.state
        return True

    def export(self, folder: Path, dtype: torch.dtype | None = None) -> None:
        """A folder that `sample.py --model` reads (`InitialModel.export`); every process takes part."""
        tensors = gather_full_state_dict(self.denoiser)
        if self.processes.is_main:
            self.origin.export(folder, tensors, dtype)
        self.processes.barrier()


def open_trainer(
    config: Config, folder: Path, processes: DistributedContext | None = None,
    origin: InitialModel | None = None,
) -> tuple[Trainer, Validation]:  # fmt: skip
    """The trainer of a run and its validation; weights are read. Raises `UserError`."""
    task = find_task(config.train)(Run(config, origin or open_initial_model(config), folder))
    validation = task.open_data()
    return Trainer(task, processes or DistributedContext(0, 1, 0)), validation


def run_training(
    config: Config, origin: InitialModel, folder: Path, processes: DistributedContext, stop: Any
) -> None:
    """Trains from the newest checkpoint in `folder` on, and writes the model; stop: a `StopSignal`."""
    commit = machine.get_code_commit()  # of the code that runs: at the end the checkout may be another
    say = print_note if processes.is_main else lambda text: None
    trainer, validation = open_trainer(config, folder, processes, origin)
    layout, base = origin.config.evidence_layout, origin.checkpoint
    if config.train.objective == "rl" and base and layout != (known := base.config.evidence_layout):
        say(f"evidence_layout={layout}: the model was trained with {known}, and may answer worse")
    trainer.restore()
    if begun := trainer.state.step:
        say(f"going on from step {begun}{': no step is left' * trainer.finished}")
    with MetricsLogger(folder, config, begun, quiet=not processes.is_main) as report:
        count = sum(parameter.numel() for parameter in trainer.denoiser.parameters()) / 1e6
        say(
            f"training a model of {count:,.1f} M parameters, {config.model.path or 'from scratch'}, on "
            f"{config.data.questions or config.data.documents or 'invented worlds'}: "
            f"{config.train.max_steps:,} steps of {config.train.objective}, into {folder} (--plan "
            "estimates the time)"
        )
        with stop.catch_interrupt():
            meter = open_meter(config.energy, [trainer.device], host=processes.local_rank == 0)
            stopped = run_steps(trainer, validation, report, stop)
        energy = merge_readings(processes.all_gather_object(meter.stop()))
        if said := energy.describe(step=trainer.state.step - begun):
            say(said)
        if stopped:
            say(f"stopped after step {trainer.state.step}, which is saved: --resume goes on")
            return
        model = folder / "model"
        with open_atomic_folder(model) if processes.is_main else nullcontext(model) as scratch:
            trainer.export(scratch)
            if processes.is_main:
                metrics = read_metrics(folder / "metrics.jsonl")
                write_model_card(scratch, trainer.denoiser, config, metrics, commit)
        say(f"the model is in {model}: sample --model reads it")


def run_steps(trainer: Trainer, validation: Validation, report: MetricsLogger, stop: Event) -> bool:
    """The loop, in plain steps; ends early, with a checkpoint, once any process was asked to stop.

    Returns whether it was, alike on all processes. Validation follows saving; resuming makes up for it.
    """
    train, state, processes = trainer.train, trainer.state, trainer.processes
    while True:
        due = trainer.finished or state.step % train.eval_steps == 0
        if state.step and due and not processes.any_rank(report.has_validation):
            report.log_validation(validation.compute_scores(trainer))
        if trainer.finished:
            return False
        begun = time.perf_counter()
        metrics = trainer.step()
        report.log_step(metrics | trainer.speed_metrics(metrics, time.perf_counter() - begun))
        stopping = processes.any_rank(stop.is_set())
        often = train.save_steps, train.eval_steps
        if stopping or trainer.finished or any(state.step % steps == 0 for steps in often):
            trainer.save()
        if stopping:
            return True


def write_model_card(
    folder: Path, denoiser: Denoiser, config: Config, metrics: list[dict[str, Any]], commit: str | None
) -> None:
    """Writes `training.json` and `README.md` into a model's folder; commit: of the code that ran."""
    validated = [line for line in metrics if select_validation_metrics(line)]
    record = {
        "command": make_train_command(),
        "commit": commit,
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "machine": machine.get_machine_name(denoiser.device),
        "machines": [machine.describe_machine(denoiser.device, denoiser.backend)],  # as in stamps
        "seed": config.train.seed,
        "hours": round(sum(line["seconds"] for line in metrics) / 3600, 2),
        "steps": len(metrics),
        "rows": sum(line["rows"] for line in metrics),
        "supervised_tokens": sum(line["supervised_tokens"] for line in metrics),
        "parameters": sum(p.numel() for p in denoiser.parameters()),
        "validation": select_validation_metrics(validated[-1]) if validated else {},
        "config": asdict(config),
    }
    write_text_atomic(folder / "training.json", json.dumps(record, indent=2) + "\n")
    write_text_atomic(folder / "README.md", _render_readme(record))


def make_train_command() -> str:
    """The command that trains this again, from scratch."""
    count = int(os.environ.get("WORLD_SIZE", "1"))
    start = f"torchrun --nproc-per-node {count}" if count > 1 else "python"
    words = [word for word in sys.argv[1:] if word != "--resume"]
    return f"{start} {shlex.join([Path(sys.argv[0]).name, *words])}"


def _render_readme(record: dict[str, Any]) -> str:
    """Renders the facts of `training.json`, which has all settings, in Markdown."""
    config = record["config"]
    data = config["data"]
    rows = {
        "begun from": config["model"]["path"] or "random weights",
        "data": data["questions"] or data["documents"] or "invented worlds",
        **{name: record[name] for name in ("commit", "date", "machine", "hours", "seed", "steps", "rows")},
        "supervised tokens": record["supervised_tokens"],
        "parameters": record["parameters"],
        **{f"validation: {name}": f"{value:.3g}" for name, value in record["validation"].items()},
    }
    table = "\n".join(f"| {name} | {value} |" for name, value in rows.items())
    return f"# A denoiser\n\n    {record['command']}\n\n| | |\n|---|---|\n{table}\n"


def make_autocast(device: str, dtype: torch.dtype) -> torch.autocast:
    """The context in which the denoiser is trained: autocast below float32."""
    # No copies of weights are kept: activation checkpointing would find them when it computes again.
    return torch.autocast(device, dtype, enabled=dtype != torch.float32, cache_enabled=False)


def make_optimizers(denoiser: Denoiser, train: TrainConfig) -> list[torch.optim.Optimizer]:
    """Muon on the matrices of layers and AdamW on the rest, four times as fast on QK gains; or AdamW alone.

    Raises `ConfigError` for Muon on a matrix with fewer rows than shards, which torch cannot compute.
    """
    matrices, gains, rest = list[Tensor](), list[Tensor](), list[Tensor]()
    for name, value in denoiser.named_parameters():
        kind = rest
        if train.optimizer == "muon" and value.dim() == 2 and "layers." in name:
            kind = matrices
        elif train.optimizer == "muon" and name.endswith(("q_norm.weight", "k_norm.weight")):
            kind = gains
        if value.requires_grad:
            kind.append(value)
    mesh = getattr(matrices[0], "device_mesh", None) if matrices else None
    if mesh is not None and (rows := min(map(len, matrices))) < mesh.size():
        raise ConfigError(
            f"optimizer=muon cannot share a matrix of {rows} rows among {mesh.size()} processes: set "
            "train.optimizer=adamw, or take fewer processes"
        )
    rate = train.learning_rate
    groups = [{"params": rest, "lr": rate}, {"params": gains, "lr": 4 * rate}]
    found: list[torch.optim.Optimizer] = []
    if matrices:
        device = matrices[0].device
        muon = torch.optim.Muon if device.type != "cpu" and machine.has_bfloat16(device) else MuonInFloat32
        found.append(muon(matrices, lr=train.muon_learning_rate, weight_decay=0.0))
    if groups := [group for group in groups if group["params"]]:  # adapters are matrices of the layers only
        fused = not any(value.is_meta for value in (*rest, *gains))
        found.append(torch.optim.AdamW(groups, betas=(0.9, 0.95), weight_decay=0.0, fused=fused))
    for group in (group for optimizer in found for group in optimizer.param_groups):
        group["initial_lr"] = group["lr"]
    return found


class MuonInFloat32(torch.optim.Muon):
    """torch's Muon in float32: for GPUs that emulate bfloat16, and CPUs, where it is ten times as slow."""

    def step(self, closure: Any = None) -> Any:
        with _WithoutBFloat16():
            return super().step(closure)


class _WithoutBFloat16(TorchFunctionMode):
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is Tensor.bfloat16:
            return args[0].clone()
        return func(*args, **(kwargs or {}))


def compute_decay_factor(step: int, steps: int, decay_fraction: float) -> float:
    """What is left of the full rate: 1, then a linear fall to 0 over the last `decay_fraction` of steps."""
    return min(1.0, (steps - step) / max(1.0, decay_fraction * steps))
