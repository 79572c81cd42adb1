"""Writes the mean of several checkpoints of a run that trains LoRA adapters, merged into its base.

    python examples/smollm2/average_checkpoints.py runs/mean kept/step-00000{120,135,150} \
        model.path=dlm_rag/shipped/smollm2 train.lora_rank=16 train.objective=rl decode.block_length=16

The run keeps its last two checkpoints: copy others. Words with = are its settings. The mean of the products B A is one product: of the A below one another
and of the B, each divided by their number, beside one another.
"""

import sys
from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import Tensor

from dlm_rag.config import load_config
from dlm_rag.training.initial_model import open_initial_model

PREFIX = "model.denoiser."  # of a weight in a checkpoint


def read_adapters(checkpoint: Path) -> dict[str, Tensor]:
    """Returns the adapters of a checkpoint by the denoiser's names."""
    files = (load_file(path) for path in sorted(checkpoint.glob("*.safetensors")))
    found = {name: value for file in files for name, value in file.items()}
    return {name.removeprefix(PREFIX): value for name, value in found.items() if name.startswith(PREFIX)}


def main() -> None:
    out, *words = sys.argv[1:]
    origin = open_initial_model(load_config(None, [word for word in words if "=" in word]))
    adapters = [read_adapters(Path(word)) for word in words if "=" not in word]
    mean = {
        name: torch.cat([each[name] for each in adapters], 0 if ".lora_A." in name else 1)
        / (1 if ".lora_A." in name else len(adapters))
        for name in adapters[0]
    }
    shapes = origin.build_on_meta(torch.float32).state_dict()  # what is frozen is read from the base
    origin.export(Path(out), {**shapes, **mean})


if __name__ == "__main__":
    main()
