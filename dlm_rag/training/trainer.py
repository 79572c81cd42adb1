"""A training run: everything it needs to go on is in `TrainState`, the weights and the optimizers.

Examples follow from (seed, step), so a run that was killed and resumed is the run that was not: on a
CPU the weights are equal bit for bit.
"""

import copy
import json
import math
import shutil
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from dlm_rag.cli import choose_device
from dlm_rag.config import Config
from dlm_rag.data.examples import ExampleStream
from dlm_rag.errors import CheckpointError, ConfigError
from dlm_rag.model.denoiser import Denoiser, DenoiserConfig
from dlm_rag.randomness import keyed_generator
from dlm_rag.stages import stage, step_range
from dlm_rag.tokenizer import PromptTemplate, Tokenizer
from dlm_rag.training.objective import batch_loss
from dlm_rag.training.parallel import Processes
from dlm_rag.training.vocabulary import learn_tokenizer

HEAD_WIDTH = 32
QUESTION_LENGTH = 64  # positions that the longest question of a world needs
TEMPLATE = PromptTemplate(head="{question}\n", fact="{passage}")
KEPT_CHECKPOINTS = 2


@dataclass
class TrainState:
    """Where a run stands, beside its weights and optimizers."""

    step: int = 0
    stage: int = 0  # of the curriculum: 2 passages, 2 to 4, 4 to top_k
    name_accuracy: float = 0.0  # running mean


class Trainer:
    """Trains a fresh denoiser, or goes on from the newest checkpoint in `folder`."""

    def __init__(self, config: Config, folder: Path, processes: Processes | None = None) -> None:
        self.config, self.folder = config, folder
        self.processes = processes or Processes(0, 1, 0)
        train = config.train
        self.tokenizer = Tokenizer(learn_tokenizer(train.seed, train.vocabulary), 0, TEMPLATE, (1,))
        device = choose_device(config.model.device)
        if device.type == "cuda" and device.index is None:
            device = torch.device("cuda", self.processes.local_rank)
        self.denoiser = fresh_denoiser(config).to(device)
        self.optimizers = make_optimizers(self.denoiser, train.matrix_learning_rate, train.learning_rate)
        self._rates = [[group["lr"] for group in o.param_groups] for o in self.optimizers]
        self.state = TrainState()
        self.stream = ExampleStream(
            self.tokenizer, train, self.denoiser.config.canvas_length, config.retrieval.top_k
        )

    @property
    def passages(self) -> tuple[int, int]:
        """How many passages the prompts of this stage have: at least, at most."""
        most = self.config.retrieval.top_k
        lowest, highest = ((2, 2), (2, 4), (4, most))[self.state.stage]
        return min(lowest, most), min(highest, most)

    def step(self) -> dict[str, float]:
        """One optimizer step; returns its metrics."""
        with step_range(self.state.step, self.config.train.groups * self.config.train.rows):
            return self._step()

    def _step(self) -> dict[str, float]:
        train, state = self.config.train, self.state
        left = share_left(state.step, train.steps, train.decay_share)
        rate = min(left, (state.step + 1) / (train.warmup_steps + 1))
        end_weight = train.late_end_weight + left * (train.end_weight - train.late_end_weight)
        pointer_weight = train.late_pointer_weight + left * (
            train.pointer_weight - train.late_pointer_weight
        )
        for optimizer, rates in zip(self.optimizers, self._rates, strict=True):
            for group, full in zip(optimizer.param_groups, rates, strict=True):
                group["lr"] = full * rate
        with stage("data"):
            groups = self.processes.share(train.groups)
            examples = self.stream.batch(state.step, self.passages, groups)
        with stage("forward"):
            loss = batch_loss(
                self.denoiser, examples, train.evidence_layout, end_id=1, end_weight=end_weight
            )
        sums = loss.sums.over(self.processes)
        with stage("backward"):
            loss.total(sums, pointer_weight).backward()
            self.processes.sum_gradients(self.denoiser.parameters())
        with stage("optimizer"):
            norm = torch.nn.utils.clip_grad_norm_(self.denoiser.parameters(), 1.0)
            for optimizer in self.optimizers:
                optimizer.step()
                optimizer.zero_grad(set_to_none=True)
        metrics = {
            "step": state.step,
            "loss": sums.tokens / sums.weight,
            "pointer_loss": sums.pointers / max(1, sums.names),
            "pointer_mass": sums.passage_mass / max(1, sums.names),
            "name_accuracy": sums.names_right / max(1, sums.names),
            "passages": self.passages[1],
            "learning_rate_share": rate,
            "gradient_norm": float(norm),
            "rows": train.groups * train.rows,
            "supervised_tokens": round(sums.count),
        }
        if not math.isfinite(metrics["loss"]):
            raise FloatingPointError(f"the loss of step {state.step} is not a number")
        self._advance(metrics["name_accuracy"] if sums.names else state.name_accuracy)
        return metrics

    def _advance(self, name_accuracy: float) -> None:
        state = self.state
        state.step += 1
        state.name_accuracy = 0.97 * state.name_accuracy + 0.03 * name_accuracy
        if state.name_accuracy > self.config.train.next_stage_accuracy and state.stage < 2:
            state.stage, state.name_accuracy = state.stage + 1, 0.3

    def save(self) -> Path:
        """Writes a checkpoint that is whole or not there, and drops the oldest beyond two."""
        with stage("checkpoint"):
            target = self._checkpoints / f"step-{self.state.step:08d}"
            scratch = target.with_suffix(".part")
            shutil.rmtree(scratch, ignore_errors=True)
            self.export(scratch)
            tensors = {
                f"{number}.{parameter}.{name}": value
                for number, optimizer in enumerate(self.optimizers)
                for parameter, values in optimizer.state_dict()["state"].items()
                for name, value in values.items()
            }
            save_file(tensors, scratch / "optimizer.safetensors")
            record = {"state": asdict(self.state), "settings": self._settings()}
            (scratch / "state.json").write_text(json.dumps(record), encoding="utf-8")
            shutil.rmtree(target, ignore_errors=True)
            scratch.rename(target)
            for old in self._saved()[:-KEPT_CHECKPOINTS]:
                shutil.rmtree(old)
        return target

    def _settings(self) -> dict[str, Any]:
        """All that the steps depend on; the length of the run and what is reported may change."""
        free = {"steps", "decay_share", "save_every", "validate_every", "validation_questions", "wandb"}
        train = {f"train.{k}": v for k, v in asdict(self.config.train).items() if k not in free}
        return train | {
            "retrieval.top_k": self.config.retrieval.top_k,
            "decode.canvas_length": self.denoiser.config.canvas_length,
        }

    def restore(self) -> bool:
        """Goes on from the newest checkpoint; False where there is none.

        Raises `ConfigError` where it was begun with other settings, `CheckpointError` where it is
        broken.
        """
        saved = self._saved()
        if not saved:
            return False
        try:
            record = json.loads((saved[-1] / "state.json").read_text(encoding="utf-8"))
            for key, now in self._settings().items():
                if (then := record["settings"].get(key)) != now:
                    raise ConfigError(
                        f"the run in {self.folder} was begun with {key}={then}, not {now}: give the same, "
                        "or another --out"
                    )
            self.denoiser.load_state_dict(load_file(saved[-1] / "model.safetensors"), strict=False)
            found = load_file(saved[-1] / "optimizer.safetensors")
            self.state = TrainState(**record["state"])
            for number, optimizer in enumerate(self.optimizers):
                whole = optimizer.state_dict()
                for key, value in found.items():
                    owner, parameter, name = key.split(".")
                    if int(owner) == number:
                        whole["state"].setdefault(int(parameter), {})[name] = value
                optimizer.load_state_dict(whole)
        except ConfigError:
            raise
        except (OSError, ValueError, TypeError, KeyError, RuntimeError) as error:
            raise CheckpointError(f"{saved[-1]} does not belong to this run: {error}") from None
        return True

    def export(self, folder: Path, dtype: torch.dtype = torch.float32) -> None:
        """A folder that `sample.py --model` reads: weights, config, prompt template, tokenizer."""
        prompt = {"head": TEMPLATE.head, "fact": TEMPLATE.fact}
        copy.deepcopy(self.denoiser).to(dtype).save_pretrained(folder, prompt=prompt, eos_token_id=1)
        self.tokenizer.inner.save_pretrained(folder)

    @property
    def _checkpoints(self) -> Path:
        return self.folder / "checkpoints"

    def _saved(self) -> list[Path]:
        return sorted(p for p in self._checkpoints.glob("step-*") if p.suffix != ".part")


def fresh_denoiser(config: Config) -> Denoiser:
    """A denoiser of the configured shape with fresh weights that depend on the seed alone.

    Matrices are normal with variance 1 / fan-in, those that write into the residual stream smaller by
    the square root of their number; QK gains start at 1.5.
    """
    train = config.train
    heads = train.hidden_size // HEAD_WIDTH
    denoiser = Denoiser(
        DenoiserConfig(
            vocab_size=train.vocabulary,
            hidden_size=train.hidden_size,
            num_hidden_layers=train.num_hidden_layers,
            num_attention_heads=heads,
            num_key_value_heads=heads,
            head_dim=HEAD_WIDTH,
            intermediate_size=train.intermediate_size,
            max_position_embeddings=_context_length(config),
            qk_norm=True,
            tie_word_embeddings=True,
            mask_token_id=0,
            evidence_layout=train.evidence_layout,
            passage_length=train.passage_length,
            canvas_length=canvas_length(config),
            block_length=config.decode.block_length,
        )
    )
    generator = keyed_generator("weights", train.seed)
    with torch.no_grad():
        for name, value in denoiser.named_parameters():
            if value.dim() == 2:
                value.normal_(0.0, value.shape[1] ** -0.5, generator=generator)
            if name.endswith(("o_proj.weight", "down_proj.weight")):
                value.mul_((2 * train.num_hidden_layers) ** -0.5)
            if name.endswith(("q_norm.weight", "k_norm.weight")):
                value.fill_(1.5)
    return denoiser


def _context_length(config: Config) -> int:
    """Positions for the question, the canvas, and all passages where they stand behind one another."""
    passages = 1 if config.train.evidence_layout == "independent" else config.retrieval.top_k
    return passages * config.train.passage_length + QUESTION_LENGTH + canvas_length(config)


def canvas_length(config: Config) -> int:
    """Response positions that the denoiser is trained on."""
    return config.decode.canvas_length or DenoiserConfig.canvas_length


def make_optimizers(
    denoiser: Denoiser, matrix_learning_rate: float, learning_rate: float
) -> list[torch.optim.Optimizer]:
    """Muon on the matrices of the layers, AdamW on the rest, four times as fast on the QK gains."""
    matrices, gains, rest = [], [], []
    for name, value in denoiser.named_parameters():
        if value.dim() == 2 and name.startswith("layers."):
            matrices.append(value)
        elif name.endswith(("q_norm.weight", "k_norm.weight")):
            gains.append(value)
        else:
            rest.append(value)
    groups = [{"params": rest, "lr": learning_rate}, {"params": gains, "lr": 4 * learning_rate}]
    return [
        torch.optim.Muon(matrices, lr=matrix_learning_rate, weight_decay=0.0),
        torch.optim.AdamW(groups, betas=(0.9, 0.95), weight_decay=0.0),
    ]


def share_left(step: int, steps: int, decay_share: float) -> float:
    """What is left of the full rate: 1, then a linear fall to 0 over the last `decay_share` of steps."""
    return min(1.0, (steps - step) / max(1.0, decay_share * steps))
