"""Micro settings of training and their trainers."""

import json
import subprocess
import sys

import torch

from dlm_rag.config import load_config
from dlm_rag.training.distributed import DistributedContext
from dlm_rag.training.trainer import open_trainer
from tests.support.paths import ROOT
from tests.support.processes import TORCHRUN_COMMAND

MICRO_SETTINGS = [
    "train.hidden_size=64", "train.num_hidden_layers=2", "train.vocab_size=400",
    "train.passage_sets_per_step=2", "train.rows_per_set=4", "train.world_passages=100",
    "train.max_steps=8", "train.save_steps=2", "train.steps_per_world=2", "train.eval_steps=100",
    "train.eval_questions=1", "decode.max_new_tokens=120", "retrieval.top_k=3",
]  # fmt: skip
SINGLE_PROCESS = DistributedContext(0, 1, 0)
CPU = torch.device("cpu")


def run_train_program(folder, *words, processes=1, **more):
    """`train.py --out folder`, to its end; under torchrun where there are several processes."""
    launcher = [sys.executable] if processes == 1 else [*TORCHRUN_COMMAND, str(processes)]
    command = [*launcher, "train.py", "--out", str(folder), *words]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, **more)


def make_trainer(folder, *words):
    return open_trainer(load_config(None, [*MICRO_SETTINGS, *words]), folder)[0]


def build_denoiser(origin, frozen=torch.float32):
    """The whole denoiser with its first weights, float32 where they are trained."""
    denoiser = origin.build_on_meta(frozen)
    origin.materialize(denoiser, CPU)
    return denoiser


def clone_weights(trainer):
    return {name: value.clone() for name, value in trainer.denoiser.state_dict().items()}


METRICS_LINES = [
    json.dumps({"step": step, "seconds": 1, "rows": 8, "supervised_tokens": 5}) + "\n" for step in range(3)
]
