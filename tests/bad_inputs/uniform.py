"""Training a model of uniform noise with what it cannot have."""

import shutil
import tempfile
from collections.abc import Callable
from functools import cache
from pathlib import Path

from tests.bad_inputs import BadInputCase
from tests.support.tiny_diffusion_gemma import write_tiny_gemma

TRAIN = "train --out run --model noisy"


@cache
def _once() -> Path:
    from transformers.utils import logging

    logging.disable_progress_bar()
    return write_tiny_gemma(Path(tempfile.mkdtemp()) / "noisy")


def noisy(folder: Path) -> None:
    """A tiny DiffusionGemma."""
    shutil.copytree(_once(), folder)


def lacking(folder: Path) -> None:
    """One that does not say how it is decoded."""
    noisy(folder)
    (folder / "generation_config.json").unlink()


def train(what: str, words: str, says: str, files: Callable[[Path], None] = noisy) -> BadInputCase:
    """A run that begins with it."""
    return BadInputCase(what, f"{TRAIN} {words}", says, {"noisy": files})


CASES = [
    train("adapters beside noise", "train.lora_rank=4", "lora_rank=4 is not supported by noisy"),
    train("heads beside noise", "train.trainable=policy_heads train.objective=rl", "objective=rl is not supported by"),
    train("a reward for noise", "--config search_rl.yaml", "objective=rl is not supported by"),
    train("noise adapted to masks", "train.objective=adapt", "objective=adapt is not supported by"),
    train("a later phase for noise", "'train.phases={a: {max_steps: 1}, b: {objective: pretrain, max_steps: 1}}'",
          "objective=pretrain is not supported by"),
    train("documents for noise", "train.objective=pretrain", "objective=pretrain is not supported by"),
    train("a layout for noise", "model.evidence_layout=joint", "evidence_layout=joint is not supported by"),
    train("a kernel for noise", "model.attn_implementation=varlen", "attn_implementation=varlen is not supported by"),
    train("blocks for noise", "model.block_size=8", "block_size=8 has no effect on"),
    train("shards of noise", "train.parallel=fsdp", "parallel=fsdp is not supported by"),
    train("half of the layers again", "train.activation_checkpointing=selective", "set activation_checkpointing=full"),
    train("compiled noise", "train.compile=true", "compile=true has no effect"),
    train("other positions for noise", "train.rope_theta=1e6", "rope_theta=1000000.0 has no effect"),
    train("pointers for noise", "train.pointer_loss_weight=0.3", "pointer_loss_weight=0.3 has no effect"),
    train("a commit rule of masks", "decode.commit_threshold=0.5", "commit_threshold=0.5 has no effect"),
    train("a plan for noise", "--plan", "a plan is made for denoisers of masks"),
    train("a share above one", "train.self_conditioning=2", "self_conditioning=2 must be"),
    BadInputCase("layers of noise", "train --out run train.init_layers_from=noisy", "uniform noise, which a fresh denoiser does not: give it as model.path",
         {"noisy": noisy}),
    train("noise without its generation config", "", "has no generation_config.json", lacking),
    BadInputCase("noise for masks", "train --out run --model model train.uniform_loss=nelbo",
         "uniform_loss=nelbo has no effect"),
]  # fmt: skip
