"""A phase of a training run: everything it needs to go on is in `TrainState`, weights and optimizers.

Examples follow from (seed, step), so a run that was killed and resumed is the run that was not: on a
CPU the weights are equal bit for bit.
"""

import gc
import math
import resource
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from dlm_rag.config import Config, TrainConfig
from dlm_rag.errors import ConfigError, RunError
from dlm_rag.machine import choose_dtype
from dlm_rag.model.cost import head_work
from dlm_rag.model.denoiser import Denoiser
from dlm_rag.stages import stage, step_range
from dlm_rag.training.loss import Counts, Objective, Sums, Weights, arithmetic
from dlm_rag.training.machines import this_machine
from dlm_rag.training.processes import Processes, spread, whole, without_sum
from dlm_rag.training.rows.example import Example
from dlm_rag.training.saving import Checkpoints, whole_state
from dlm_rag.training.start import Start

# What may change while a run goes on: how long it is, what is reported, how the work is done.
FREE = {
    "steps", "decay_share", "save_every", "validate_every", "validation_questions", "wandb", "phases",
    "accumulate", "checkpointing", "logit_chunk", "compile", "parallel", "context_parallel",
}  # fmt: skip


class Batches(Protocol):
    """What a phase trains on."""

    def examples(self, step: int, items: Iterable[int], passages: tuple[int, int]) -> list[Example]:
        """The rows of some of a step's `TrainConfig.items`; passages: how many in a prompt, at least and
        at most.
        """
        ...


@dataclass
class TrainState:
    """Where a run stands, beside its weights and optimizers."""

    step: int = 0  # of the run
    phase: str = ""
    phase_step: int = 0
    stage: int = 0  # of the curriculum: 2 passages, 2 to 4, 4 to top_k
    name_accuracy: float = 0.0  # running mean


class Trainer:
    """Trains one phase: from the first weights, or from the newest checkpoint in `folder`."""

    def __init__(
        self, config: Config, start: Start, batches: Batches, folder: Path, processes: Processes,
        device: torch.device, phase: str = "",
    ) -> None:  # fmt: skip
        """The phase's own settings are taken from the config; weights are read.

        Raises `ConfigError` where the processes cannot share it.
        """
        self.config, self.start, self.batches = config, start, batches
        self.train = train = config.train.in_phases()[phase]
        processes.check(train)
        self.processes, share = processes.sharing_sequences(train.context_parallel)
        self.device, self.dtype = device, choose_dtype(train.dtype, device)
        self.checkpoints = Checkpoints(folder / "checkpoints", processes)
        self.state = TrainState(phase=phase)
        again = bool(self.checkpoints.saved()) and not start.lora_rank
        # Shards go to the device one by one: it need not have room for the whole.
        whole_on = torch.device("cpu") if train.parallel == "fsdp" and processes.count > 1 else device
        self.denoiser = start.denoiser(whole_on, self.dtype, empty=again)
        self.denoiser.attention = config.model.attention
        self.denoiser.checkpointing = train.checkpointing
        if train.rope_theta is not None:
            self.denoiser.set_rope(train.rope_theta)
        if train.compile:
            self.denoiser.compile_layers()
        self.flops = 0.0  # of the last step on this process, forward and backward, nothing counted twice
        machine = this_machine(device)
        self._peak = None if machine is None else machine.flops.get(self.dtype)
        tokenizer = start.tokenizer
        layout = self.denoiser.config.evidence_layout if train.objective == "sft" else "joint"
        objective = Objective(self.denoiser, layout, tokenizer.end_ids, train.logit_chunk, share)
        self.root = spread(objective, self.denoiser, train.parallel, processes, device, self.dtype)
        self.optimizers = make_optimizers(self.denoiser, train)
        self._rates = [[group["lr"] for group in o.param_groups] for o in self.optimizers]
        self._scaler = torch.amp.GradScaler(device.type, enabled=self.dtype == torch.float16)
        self._loader = Loader(self._load)
        self._curriculum = train.objective == "sft" and config.data.questions is None

    @property
    def passages(self) -> tuple[int, int]:
        """How many passages the prompts of this stage have: at least, at most."""
        most = self.config.retrieval.top_k
        lowest, highest = ((2, 2), (2, 4), (4, most))[self.state.stage]
        return min(lowest, most), min(highest, most)

    @property
    def finished(self) -> bool:
        """Whether the phase has made its steps."""
        return self.state.phase_step >= self.train.steps

    def step(self) -> dict[str, Any]:
        """One optimizer step; returns its metrics. Raises `RunError` where the loss is not a number."""
        rows = self.train.rows if self.train.objective == "sft" else 1  # a sequence counts as one
        with step_range(self.state.step, self.train.items * rows):
            rate, weights = self._schedule()
            with stage("data"):
                parts = self._loader.take(self.state.phase_step, self.passages)
                self._loader.begin(self.state.phase_step + 1, self.passages)
                ends = self.start.tokenizer.end_ids
                mine = Counts.total([Counts.of(part, ends, weights.end) for part in parts])
                over = mine.over(self.processes)
            before = replace(self.denoiser.work)
            sums = self._gradients(parts, over, weights)
            head = head_work(self.denoiser.config, mine.supervised / self.processes.sharing, 4)
            # Backward is twice forward, but for the weights' own half where they are frozen.
            self.flops = (2 if self.start.lora_rank else 3) * (self.denoiser.work - before + head).flops
            with stage("optimizer"):
                total = Sums.of(sums, self.processes)
                loss = self._finite(total.tokens / over.divisor, "loss")
                norm = self._update()
        name_accuracy = total.names_right / max(1, over.pointed)
        metrics = {
            "step": self.state.step,
            **({"phase": self.state.phase} if self.state.phase else {}),
            "loss": loss,
            "pointer_loss": total.pointers / max(1, over.pointed),
            "pointer_mass": total.passage_mass / max(1, over.pointed),
            "name_accuracy": name_accuracy,
            **({"passages": self.passages[1]} if self._curriculum else {}),
            "learning_rate_share": rate,
            "gradient_norm": norm,
            "rows": round(over.rows),
            "tokens": round(over.tokens),
            "supervised_tokens": round(over.supervised),
        }
        self._advance(name_accuracy if over.pointed else self.state.name_accuracy)
        return metrics

    def _schedule(self) -> tuple[float, Weights]:
        """Sets the learning rates of this step; returns their share of the full ones, and its weights."""
        train, now = self.train, self.state.phase_step
        left = share_left(now, train.steps, train.decay_share)
        rate = min(left, (now + 1) / (train.warmup_steps + 1))
        for optimizer, rates in zip(self.optimizers, self._rates, strict=True):
            for group, full in zip(optimizer.param_groups, rates, strict=True):
                group["lr"] = full * rate
        return rate, self._weights(left)

    def _gradients(self, parts: list[list[Example]], over: Counts, weights: Weights) -> list[Tensor]:
        """Adds up the gradients of all parts and, with the last, of all processes; returns their sums."""
        ahead, sums = self._ahead(self.state.phase_step), []
        for number, part in enumerate(parts, start=1):
            with nullcontext() if number == len(parts) else without_sum(self.root):
                with stage("forward"), self.arithmetic():
                    loss, found = self.root(part, over, weights, ahead)
                with stage("backward"):
                    # DDP and FSDP take means over the processes.
                    self._scaler.scale(loss * self.processes.count).backward()
            sums.append(found)
        return sums

    def _update(self) -> float:
        """Clips the gradients to a norm of 1, steps the optimizers; returns the norm from before.

        Gradients that float16 cannot hold change no weight but the scale of the next losses.
        """
        for optimizer in self.optimizers:
            self._scaler.unscale_(optimizer)
        trained = [p for p in self.denoiser.parameters() if p.requires_grad]
        norm = float(whole(torch.nn.utils.clip_grad_norm_(trained, 1.0)))
        if not self._scaler.is_enabled():
            self._finite(norm, "gradient")
        for optimizer in self.optimizers:
            if math.isfinite(norm):
                self._scaler.step(optimizer)
            optimizer.zero_grad(set_to_none=True)
        self._scaler.update()
        return norm

    def _finite(self, value: float, what: str) -> float:
        if not math.isfinite(value):
            raise RunError(
                f"the {what} of step {self.state.step} is not a number; the last checkpoint is as it was: "
                "begin again in another --out with a lower learning rate"
            )
        return value

    def speed(self, metrics: dict[str, Any], seconds: float) -> dict[str, float]:
        """Tokens a second, all and supervised; peak memory; FLOP/s of this process and, on a known machine,
        MFU.
        """
        found = {"seconds": seconds}
        for name in ("tokens", "supervised_tokens"):
            found[f"{name}_per_second"] = metrics[name] / seconds
        if self.device.type == "cuda":
            found["memory_gib"] = torch.cuda.max_memory_allocated(self.device) / 2**30
        else:
            found["memory_gib"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
        found["tflops_per_second"] = self.flops / seconds / 1e12
        if self._peak is not None:
            found["mfu"] = self.flops / seconds / self._peak
        return found

    @contextmanager
    def evaluating(self) -> Iterator[bool]:
        """While it is open the denoiser can be called by itself; whether it is to be, on this process.

        Shards are gathered layer by layer as all processes make the same calls; of whole copies one is
        enough.
        """
        self._loader.pause()  # searches of two threads at once would not do
        root: Any = self.root
        sharded = hasattr(root, "unshard")
        if sharded:
            root.unshard()
        self.denoiser.eval()
        try:
            with torch.no_grad(), self.arithmetic():
                yield sharded or self.processes.first
        finally:
            self.denoiser.train()
            if sharded:
                root.reshard()

    def arithmetic(self) -> Any:
        """The context in which the denoiser runs: autocast below float32."""
        return arithmetic(self.device.type, self.dtype)

    def _load(self, step: int, passages: tuple[int, int]) -> list[list[Example]]:
        """This process's examples of a step, in as many parts as its gradients are accumulated from."""
        mine, count = self.processes.share(self.train.items), self.train.accumulate
        return [self.batches.examples(step, mine[n::count], passages) for n in range(count)]

    def _weights(self, left: float) -> Weights:
        train = self.train
        if train.objective != "sft":
            return Weights()
        fresh = self.start.checkpoint is None
        pointers, late = (
            (default if fresh else 0.0) if value is None else value
            for value, default in ((train.pointer_weight, 0.3), (train.late_pointer_weight, 0.08))
        )
        return Weights(
            end=train.late_end_weight + left * (train.end_weight - train.late_end_weight),
            pointers=late + left * (pointers - late),
        )

    def _ahead(self, step: int) -> int | None:
        """How far each token sees ahead while attention opens: from 0, doubling at an even pace, to all."""
        train, length = self.train, self.train.sequence_length
        opening = train.opening_share * train.steps
        if train.objective != "adapt" or step >= opening:
            return None
        return round(length ** (step / opening)) - 1

    def _advance(self, name_accuracy: float) -> None:
        state = self.state
        state.step += 1
        state.phase_step += 1
        state.name_accuracy = 0.97 * state.name_accuracy + 0.03 * name_accuracy
        if state.name_accuracy > self.train.next_stage_accuracy and state.stage < 2:
            state.stage, state.name_accuracy = state.stage + 1, 0.3

    def save(self) -> Path:
        """Writes a checkpoint that is whole or not there; every process takes part."""
        with stage("checkpoint"):
            record = {
                "state": asdict(self.state), "run": run_settings(self.config),
                "phase": phase_settings(self.train), "scaler": self._scaler.state_dict(),
            }  # fmt: skip
            return self.checkpoints.save(self.state.step, self.root, self.optimizers, record)

    def restore(self) -> bool:
        """Goes on from the newest checkpoint, of this phase or the one before; False without one.

        Raises `ConfigError` where it was begun with other settings, `CheckpointError` where it is
        broken.
        """
        found = self.checkpoints.newest()
        if found is None:
            return False
        path, record = found
        state = TrainState(**record["state"])
        same = state.phase == self.state.phase
        refuse_others("the run", record["run"], run_settings(self.config))
        if same:
            refuse_others(
                "the phase" if state.phase else "the run", record["phase"], phase_settings(self.train)
            )
        kept = same or record["phase"]["train.optimizer"] == self.train.optimizer
        self.checkpoints.load(path, self.root, self.optimizers if kept else [])
        if self._scaler.is_enabled() and record.get("scaler"):
            self._scaler.load_state_dict(record["scaler"])
        self.state = state if same else replace(state, phase=self.state.phase, phase_step=0)
        return True

    def export(self, folder: Path, dtype: torch.dtype = torch.bfloat16) -> None:
        """A folder that `sample.py --model` reads; every process takes part."""
        tensors = whole_state(self.root)
        if self.processes.first:
            self.start.export(folder, tensors, self.denoiser.config.rope_theta, dtype)
        self.processes.wait()


def free_memory() -> None:
    """Gives back what nobody refers to any more: a trainer and its denoiser refer to each other."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


class Loader:
    """Prepares the examples of the next step on a thread of its own."""

    def __init__(self, load: Callable[[int, tuple[int, int]], list[list[Example]]]) -> None:
        self._load, self._worker = load, ThreadPoolExecutor(1, "examples")
        self._asked: tuple[int, tuple[int, int]] | None = None
        self._found: Future[list[list[Example]]] | None = None

    def begin(self, step: int, passages: tuple[int, int]) -> None:
        """Starts on a step."""
        self._asked, self._found = (step, passages), self._worker.submit(self._load, step, passages)

    def take(self, step: int, passages: tuple[int, int]) -> list[list[Example]]:
        """The parts of a step, prepared now where nobody has begun on them."""
        self.pause()
        if self._found is not None and self._asked == (step, passages):
            return self._found.result()
        return self._load(step, passages)

    def pause(self) -> None:
        if self._found is not None:
            self._found.exception()


def refuse_others(what: str, then: dict[str, Any], now: dict[str, Any]) -> None:
    """Raises `ConfigError` for the first setting that has another value than before."""
    for key, value in now.items():
        if then.get(key) != value:
            raise ConfigError(
                f"{what} was begun with {key}={then.get(key)}, not {value}: give the same, or another --out"
            )


def run_settings(config: Config) -> dict[str, Any]:
    """What the whole run depends on."""
    names = [
        "seed", "hidden_size", "head_dim", "intermediate_size", "num_hidden_layers", "vocabulary",
        "passage_length", "lora_rank",
    ]  # fmt: skip
    return {f"train.{name}": getattr(config.train, name) for name in names} | {
        "model.path": config.model.path,
        "model.evidence_layout": config.model.evidence_layout,
        "retrieval.top_k": config.retrieval.top_k,
        "decode.canvas_length": config.decode.canvas_length,
        **{f"data.{key}": value for key, value in asdict(config.data).items()},
    }


def phase_settings(train: TrainConfig) -> dict[str, Any]:
    """What the steps of a phase depend on; attention opens in a share of them, however many they are."""
    free = FREE - {"steps"} if train.objective == "adapt" else FREE
    return {f"train.{key}": value for key, value in asdict(train).items() if key not in free}


def make_optimizers(denoiser: Denoiser, train: TrainConfig) -> list[torch.optim.Optimizer]:
    """Muon on the matrices of the layers, AdamW on the rest, four times as fast on the QK gains; or
    AdamW on all.
    """
    matrices: list[Tensor] = []
    gains, rest, decayed = list[Tensor](), list[Tensor](), list[Tensor]()
    for name, value in denoiser.named_parameters():
        if not value.requires_grad:
            continue
        if value.dim() == 2 and name.startswith("layers."):
            (matrices if train.optimizer == "muon" else decayed).append(value)
        elif train.optimizer == "muon" and name.endswith(("q_norm.weight", "k_norm.weight")):
            gains.append(value)
        else:
            rest.append(value)
    rate, decay = train.learning_rate, train.weight_decay
    groups = [
        {"params": rest, "lr": rate}, {"params": gains, "lr": 4 * rate},
        {"params": decayed, "lr": rate, "weight_decay": decay},
    ]  # fmt: skip
    adamw = torch.optim.AdamW(
        [g for g in groups if g["params"]], betas=(0.9, 0.95), weight_decay=0.0,
        fused=not denoiser.embed_tokens.weight.is_meta,
    )  # fmt: skip
    if not matrices:
        return [adamw]
    return [torch.optim.Muon(matrices, lr=train.matrix_learning_rate, weight_decay=decay), adamw]


def share_left(step: int, steps: int, decay_share: float) -> float:
    """What is left of the full rate: 1, then a linear fall to 0 over the last `decay_share` of steps."""
    return min(1.0, (steps - step) / max(1.0, decay_share * steps))
