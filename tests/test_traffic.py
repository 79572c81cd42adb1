"""What goes to the device and what comes back, seen with a device that is not there (accelerator.py)."""

import random
from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
import torch
from accelerator import META, traffic
from conftest import tiny_denoiser
from torch.utils._python_dispatch import TorchDispatchMode

from dlm_rag.config import EngineConfig, load_config
from dlm_rag.decode.proposer import DenoiserProposer, View
from dlm_rag.evidence.layout import arrange
from dlm_rag.model.shape import DenoiserConfig
from dlm_rag.tokenizer import Prompt
from dlm_rag.training.objective import Objective, Terms, counts_of
from dlm_rag.training.phase import open_trainer
from dlm_rag.training.rows.example import Example

LAYOUTS = ["joint", "prefix", "independent"]
IN, OUT = ("in", "to_device"), ("out", "to_host")
FACTS = [((10, 11), (20, 21, 22)), ((20, 21, 22),), ((30,), (10, 11), (40, 41))]


def shape_of(shifted):
    return DenoiserConfig(300, shifted=shifted, passage_length=6)


def views_of(layout, shifted, temperature=0.0, spread=False):
    """Three rows of other lengths, each at another point of its canvas; the last has one position left."""
    found = []
    for slot, facts in enumerate(FACTS):
        laid = arrange(Prompt((1, 2, 3), facts, (4,)), shape_of(shifted), layout)
        canvas = np.full(8 + slot, 256)
        positions = np.arange(len(canvas)) if slot < 2 else np.array([5])
        draws = np.random.default_rng(slot).random(len(positions)) if temperature else None
        found.append(View(slot, laid, canvas, positions, temperature, draws, spread))
    return found


@pytest.mark.parametrize("shifted", [False, True])
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(
    "asked", [{}, {"temperature": 0.7}, {"spread": True}], ids=["likeliest", "drawn", "spread"]
)
@pytest.mark.parametrize("pool_gib", [0.0, 1.0], ids=["no pool", "pool"])
def test_a_decode_step_is_one_call_one_copy_in_and_one_out(layout, shifted, asked, pool_gib):
    denoiser = tiny_denoiser(shifted=shifted).to(META)
    proposer = DenoiserProposer(denoiser, 256, EngineConfig(pool_gib=pool_gib))
    views = views_of(layout, shifted, **asked)
    for again in range(3):
        if again == 2:  # another passage in the middle of one row
            laid = arrange(Prompt((1, 2, 3), ((50, 51), (20, 21, 22)), (4,)), shape_of(shifted), layout)
            views[1] = replace(views[1], arrangement=laid)
        calls = denoiser.work.calls
        with traffic() as seen:
            proposals = proposer.propose(views)
        calls = denoiser.work.calls - calls
        assert calls == 1 and seen == [IN, OUT], "new passages run in the same call"
        assert [len(found.token_ids) for found in proposals] == [8, 9, 1]


@pytest.mark.parametrize("order", ["reread", "text"])
def test_blocks_that_are_finished_cost_no_call_and_no_copy_of_their_own(order):
    """A step is one call, whatever was finished, found or moved before it."""
    denoiser = tiny_denoiser(attention_block=4, evidence_layout="independent", finished_blocks=order).to(
        META
    )
    proposer = DenoiserProposer(denoiser, 256, EngineConfig(pool_gib=1.0))
    for step, finished in enumerate((0, 4, 4, 8)):
        views = []
        for slot, facts in enumerate(FACTS):
            laid = arrange(Prompt((1, 2, 3), facts[step % 2 :], (4,)), denoiser.config)
            asked = np.arange(finished, finished + 8)
            views.append(View(slot, laid, np.full(finished + 8, 256), asked, finished=finished))
        calls = denoiser.work.calls
        with traffic() as seen:
            proposer.propose(views)
        assert denoiser.work.calls == calls + 1 and seen == [IN, OUT]


def test_logits_that_are_read_out_in_parts_come_out_in_one_copy():
    denoiser = tiny_denoiser().to(META)
    proposer = DenoiserProposer(denoiser, 256, EngineConfig(pool_gib=0.0))
    laid = arrange(Prompt((1,), (), ()), shape_of(False), "joint")
    views = [View(0, laid, np.full(2000, 256), np.arange(2000)), View(1, laid, np.full(3, 7), np.arange(0))]
    with traffic() as seen:
        proposer.propose(views)
    assert seen == [IN, OUT]


MICRO = [
    "train.hidden_size=64", "train.num_hidden_layers=2", "train.vocabulary=400",
    "train.groups=2", "train.rows=3", "train.world_passages=100", "train.steps=9", "train.worlds=1",
    "train.validation_questions=1", "decode.canvas_length=48", "retrieval.top_k=3",
]  # fmt: skip
PRETRAIN = ["train.objective=pretrain", "train.sequence_length=96", "train.batch_tokens=192"]
WAYS = {  # copies in: one for each call of the layers, one for the loss
    "sft": (3, []),
    "sft, joint": (2, ["model.evidence_layout=joint"]),
    "sft in two parts, adamw": (6, ["train.accumulate=2", "train.optimizer=adamw"]),
    "pretrain, 16 logits at a time": (2, [*PRETRAIN, "train.logit_chunk=16"]),
    "adapt, checkpointing": (2, [*PRETRAIN, "train.objective=adapt", "train.checkpointing=full"]),
    "pretrain, selective": (2, [*PRETRAIN, "train.checkpointing=selective"]),
}


@pytest.mark.parametrize("way", WAYS)
def test_a_training_step_waits_for_the_device_once(tmp_path, monkeypatch, way):
    """Pointers, the two masks, the norm of the gradients and the optimizers included."""
    # Which no setting names.
    monkeypatch.setattr("dlm_rag.training.processes.choose_device", lambda name: META)
    copies, words = WAYS[way]
    with traffic() as seen:
        trainer, _ = open_trainer(load_config(None, [*MICRO, *words]), tmp_path)
        trainer.denoiser.to(META)  # the rotary frequencies too, which have contents here as on the CPU
        for _ in range(2):
            seen.clear()
            trainer.step()
            assert Counter(seen) == {IN: copies, OUT: 1}


@pytest.mark.parametrize(
    ("broken", "said"),
    [
        (lambda x: torch.tensor([0, 1], device=META), "in, waiting"),
        (lambda x: torch.zeros(3).to(META), "in, waiting"),
        (lambda x: torch.zeros(3).to(META, non_blocking=True), "in"),
        (lambda x: x[torch.tensor([0, 1])], "in, waiting"),
        (lambda x: x[[0, 1]], "in, waiting"),
        (lambda x: x[:, np.array([0, 1])], "in, waiting"),
        (lambda x: x.new_tensor([0, 1]), "in, waiting"),
        (lambda x: x.cpu(), "out"),
        (lambda x: torch.zeros(3).copy_(x[0]), "out"),
        (lambda x: float(x.sum()), "wait"),
        (lambda x: x.sum().tolist(), "out"),
        (lambda x: bool((x > 0).any()), "wait"),
        (lambda x: x[x > 0], "wait"),
        (lambda x: x.nonzero(), "wait"),
    ],
)
def test_what_the_note_taker_sees(broken, said):
    with traffic() as seen:
        x = torch.zeros(4, 3, device=META)
        try:
            broken(x)
        except RuntimeError:  # nobody knows how much a mask takes
            assert said == "wait"
    assert {what for what, _ in seen} == {said}, seen


class Counted(TorchDispatchMode):
    """Counts the operators that run while it is open."""

    def __init__(self):
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, operator, types, args=(), kwargs=None):
        self.count += operator is not torch.ops.prim.device.default
        return operator(*args, **(kwargs or {}))


def test_the_operators_of_a_step_do_not_grow_with_its_rows():
    """Nor with their passages: a step of thousands of rows is not made of as many small tensors."""
    denoiser, rng = tiny_denoiser(), random.Random(0)
    objective = Objective(denoiser, "independent", frozenset())

    def operators(rows, passages):
        ids = [tuple(rng.randrange(250) for _ in range(n)) for n in [20] * passages + [8] * rows]
        facts, hidden = tuple(ids[:passages]), (True,) * 8
        few = [Example(Prompt((1, n), facts, ()), ids[passages + n], hidden) for n in range(rows)]
        with Counted() as seen:
            objective(few, counts_of(few, frozenset(), 1.0), Terms())[0].backward()
        return seen.count

    operators(1, 1)  # the first call prepares some things once
    assert operators(16, 8) == operators(2, 2)
