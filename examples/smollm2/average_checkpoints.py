"""Writes the mean of several checkpoints of a run that trains LoRA adapters, merged into its base.

    python examples/smollm2/average_checkpoints.py runs/mean kept/step-00000{120,135,150} \
        model.path=dlm_rag/shipped/smollm2 train.lora_rank=16 train.objective=rl decode.block_length=16

The run keeps its last two checkpoints: copy earlier ones. Words with = are its settings. The mean of
several products B A is one product: of the B side by side, divided by their number, and the A stacked.
"""

import argparse
from pathlib import Path

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint import HuggingFaceStorageReader
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from dlm_rag.config import load_config
from dlm_rag.training.initial_model import open_initial_model

PREFIX = "model.denoiser."  # of a weight in a checkpoint


def read_adapters(checkpoint: Path) -> dict[str, Tensor]:
    """Returns the adapters of a checkpoint by the denoiser's names."""
    reader = HuggingFaceStorageReader(str(checkpoint))  # which puts shards of several processes together
    tensors = {
        name: torch.empty(found.size, dtype=found.properties.dtype)
        for name, found in reader.read_metadata().state_dict_metadata.items()
        if isinstance(found, TensorStorageMetadata) and name.startswith(PREFIX) and ".lora_" in name
    }
    dcp.load(tensors, storage_reader=reader)
    return {name.removeprefix(PREFIX): value for name, value in tensors.items()}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("out", type=Path)
    parser.add_argument("words", nargs="+", metavar="CHECKPOINT_OR_SETTING")
    given = parser.parse_args()
    origin = open_initial_model(load_config(None, [word for word in given.words if "=" in word]))
    adapters = [read_adapters(Path(word)) for word in given.words if "=" not in word]
    if not adapters or not all(adapters):
        parser.error("name checkpoints of a run with train.lora_rank (folders step-...)")
    mean = {
        name: torch.cat([each[name] for each in adapters])
        if ".lora_A." in name
        else torch.cat([each[name] for each in adapters], 1) / len(adapters)
        for name in adapters[0]
    }
    shapes = origin.build_on_meta(torch.float32).state_dict()  # what is frozen is read from the base
    if not mean.keys() <= shapes.keys():
        parser.error("name the settings of the run, train.lora_rank among them")
    origin.export(given.out, {**shapes, **mean})


if __name__ == "__main__":
    main()
