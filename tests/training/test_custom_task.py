"""A task of one's own: nothing of the trainer's has to be known or changed for it."""

from typing import NamedTuple

import pytest
import torch
from torch import nn

from dlm_rag.config import load_config
from dlm_rag.errors import CheckpointError, ConfigError
from dlm_rag.training.checkpoints import RECORD_FILE, find_latest_checkpoint
from dlm_rag.training.initial_model import open_initial_model
from dlm_rag.training.plan import plan_training
from dlm_rag.training.task import Run, Task, check_task_settings
from dlm_rag.training.trainer import Trainer, open_trainer
from tests.support.training import MICRO_SETTINGS, SINGLE_PROCESS


class Regression(Task):
    """Brings a gain of the denoiser to a number, which is the task's state and falls with every step.

    As in a policy gradient, parts are made with the weights of the step.
    """

    name, needs_denoiser = "regression", True

    @staticmethod
    def count_items(train):
        return 4, 1

    def objective(self, denoiser):
        self.denoiser = denoiser
        return Distance(denoiser)

    def make_batch(self, step, items, state):
        assert not self.denoiser.training and not torch.is_grad_enabled(), "as for a decoder"
        gain = float(self.denoiser.norm.weight[0])
        target = state.get("target", 2.0)
        return Targets(1.0 + step, [(target + item, gain) for item in items])

    def finish_step(self, sums, counts, state):
        found = {"loss": sums["squares"] / counts["rows"], "weight": counts["seen"] / counts["rows"]}
        return found, {"target": state.get("target", 2.0) - 0.25, "steps": state.get("steps", 0) + 1}


class Targets(NamedTuple):
    weight: float
    pairs: list

    @property
    def counts(self):
        seen = sum(weight for _, weight in self.pairs)
        return {"rows": float(len(self.pairs)), "tokens": 0.0, "supervised": 0.0, "seen": seen}


class Distance(nn.Module):
    def __init__(self, denoiser):
        super().__init__()
        self.denoiser = denoiser

    def forward(self, batch, counts):
        squares = sum((self.denoiser.norm.weight[0] - target) ** 2 for target, _ in batch.pairs)
        everything = sum(value.sum() for value in self.denoiser.parameters())
        return batch.weight * squares / counts["rows"] + 0 * everything, {"squares": squares.detach()}


def make_trainer(folder):
    words = ["train.learning_rate=0.1", "train.gradient_accumulation_steps=2", "train.warmup_steps=0"]
    config = load_config(None, [*MICRO_SETTINGS, "train.optimizer=adamw", *words])
    origin = open_initial_model(config)
    return Trainer(Regression(Run(config, origin, folder)), SINGLE_PROCESS)


def test_a_task_of_ones_own_is_stepped_saved_and_resumed(tmp_path):
    trainer = make_trainer(tmp_path)
    found = [trainer.step() for _ in range(2)]
    # Items 0 to 3 in two parts: the mean of (1 - target - item)^2, whose gradient turns no other weight.
    assert found[0]["loss"] == pytest.approx((1 + 4 + 9 + 16) / 4) and found[0]["gradient_norm"] == 5.0
    assert found[0]["weight"] == 1.0 and found[0]["rows"] == 4
    assert found[1]["weight"] == pytest.approx(1.1), "parts are made with the weights of their step"
    assert found[1]["gradient_norm"] == pytest.approx(2 * 2 * (1.75 + 1.5 - 1.1)), "and terms change"
    trainer.save()
    rest = [trainer.step() for _ in range(2)]
    again = make_trainer(tmp_path)
    assert again.restore() and again.state.task == {"target": 1.5, "steps": 2}
    assert [again.step() for _ in range(2)] == rest
    assert again.state == trainer.state
    assert again.restore() and again.state.step == 2 and again.state.task == {"target": 1.5, "steps": 2}
    assert trainer.restore() and trainer.state == again.state, "and so does one that began from nothing"
    rest = [again.step() for _ in range(2)]
    assert [trainer.step() for _ in range(2)] == rest
    assert torch.equal(again.denoiser.norm.weight, trainer.denoiser.norm.weight)


def test_a_checkpoint_of_another_format_is_refused_in_a_sentence(tmp_path):
    path = make_trainer(tmp_path).save()
    (path / RECORD_FILE).write_text('{"format": 99}')
    for look in (lambda: find_latest_checkpoint(tmp_path), lambda: make_trainer(tmp_path)):
        with pytest.raises(CheckpointError, match="goes on with format 3 only: end the run"):
            look()


EARLY_TOKENS = """
from dlm_rag.training.batches import LossWeights
from dlm_rag.training.supervised_tasks import SftTask


class EndTokens(SftTask):
    name = "end_tokens"

    def loss_weights(self, step):
        return LossWeights(end_token=2.0)
"""


def test_an_objective_of_ones_own_is_named_on_the_command_line(tmp_path, monkeypatch):
    """One file, its nine lines: trained, planned and checked."""
    (tmp_path / "early.py").write_text(EARLY_TOKENS)
    monkeypatch.chdir(tmp_path)
    config = load_config(None, [*MICRO_SETTINGS, "train.objective=early:EndTokens"])
    check_task_settings(config)
    trainer, _ = open_trainer(config, tmp_path / "run")
    assert trainer.task.name == "end_tokens" and trainer.task.loss_weights(0).end_token == 2.0
    assert trainer.step()["loss"] > 0 and trainer.save().exists()
    plan = plan_training(config, trainer.origin.config, torch.float32)
    assert plan.microbatch_items == trainer.task.items and plan.memory.activations > 0


@pytest.mark.parametrize(
    "words, named",
    [
        (["train.objective=sftt"], "sft"),
        (["train.objective=math:floor"], "Task"),
        (["train.objective=no_such_module:Task"], "no_such_module"),
        (["train.objective=rl"], "model.path"),
        (["train.objective=rl", "model.path=x", "train.reward=math:no_such"], "train.reward"),
        (["train.objective=rl", "model.path=x", "train.min_hops=4", "train.max_hops=2"], "min_hops"),
    ],
)
def test_settings_that_no_objective_reads_are_refused(words, named):
    with pytest.raises(ConfigError, match=named):
        check_task_settings(load_config(None, words))
