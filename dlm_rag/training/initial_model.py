"""What a run begins with and ends in: a denoiser and its tokenizer; how they are built and exported."""

import shutil
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from dlm_rag.model.checkpoint import Checkpoint, save_tensors
from dlm_rag.model.denoiser import Denoiser
from dlm_rag.model.denoiser_config import DenoiserConfig
from dlm_rag.model.diffusion_gemma import DiffusionGemma
from dlm_rag.model.families.diffusion_gemma import to_checkpoint_names
from dlm_rag.model.policy_heads import HEADS_PREFIX
from dlm_rag.tokenizer import Tokenizer
from dlm_rag.training.initial_weights import allocate_denoiser, build_meta_denoiser, init_weights


@dataclass(frozen=True)
class InitialModel:
    """An architecture with its tokenizer, before any weight is there."""

    config: DenoiserConfig
    tokenizer: Tokenizer
    checkpoint: Checkpoint | None  # that the weights come from; None: fresh ones
    seed: int
    lora_rank: int
    heads_only: bool = False  # the weights stay as they are
    layers_checkpoint: Checkpoint | None = None  # of which a fresh denoiser has the layers

    def build_on_meta(self, frozen: torch.dtype) -> Any:
        """The denoiser on the meta device; frozen: the dtype of weights that are not trained."""
        if self.config.noise is not None and self.checkpoint is not None:
            return DiffusionGemma.build_on_meta(self.checkpoint)
        return build_meta_denoiser(self.config, self.lora_rank, frozen, self.heads_only)

    def materialize(self, denoiser: Any, device: torch.device, trained: bool = True) -> None:
        """Gives a meta denoiser, or its shards, memory on the device and the first weights.

        trained: as in `init_weights`.
        """
        if self.config.noise is not None and self.checkpoint is not None:
            denoiser.load(self.checkpoint, device, torch.float32)
            return
        allocate_denoiser(denoiser, device)
        init_weights(denoiser, self.checkpoint, self.seed, trained, self.layers_checkpoint)

    def build_denoiser(self, device: torch.device, frozen: torch.dtype = torch.float32) -> Denoiser:
        """The whole denoiser with its first weights, float32 where they are trained."""
        denoiser = self.build_on_meta(frozen)
        self.materialize(denoiser, device)
        return denoiser

    def export(
        self, folder: Path, tensors: dict[str, Tensor], rope_theta: float, dtype: torch.dtype
    ) -> None:
        """A folder that `sample.py --model` reads; of a public family, also that family's own classes.

        tensors: the whole state of the denoiser, adapters included, which are merged into the weights.
        """
        whole = merge_lora_weights(tensors, self.lora_rank)
        if self.config.noise is not None and self.checkpoint is not None:
            whole = to_checkpoint_names(whole, self.checkpoint.raw_config, self.checkpoint.folder)
        tensors = {
            n: value if n.startswith(HEADS_PREFIX) else value.to(dtype) for n, value in whole.items()
        }
        template = self.tokenizer.template
        extra: dict[str, Any] = {
            "prompt": {"head": template.head, "fact": template.fact, "tail": template.tail},
            "eos_token_id": self.tokenizer.end_id,
        }
        if self.checkpoint is not None:
            extra.pop("eos_token_id")
        config = replace(self.config, rope_theta=rope_theta)
        save_tensors(tensors, config, folder, extra, self.checkpoint)
        self.tokenizer.inner.save_pretrained(folder)
        if self.checkpoint is not None:
            for path in self.checkpoint.folder.iterdir():
                # The code that public classes consist of; it is copied, never run.
                if path.is_file() and (path.suffix == ".py" or path.name == "generation_config.json"):
                    shutil.copyfile(path, folder / path.name)


def merge_lora_weights(tensors: dict[str, Tensor], rank: int) -> dict[str, Tensor]:
    """A denoiser's tensors by their plain names, adapters added to their weights: W + 2 B A."""
    if not rank:
        return tensors
    found = {}
    for name, value in tensors.items():
        if ".lora_" in name:
            continue
        if ".base_layer." in name and name.endswith(".weight"):
            a, b = (tensors[name.replace("base_layer", f"lora_{x}.default")].float() for x in "AB")
            value = (value.float() + 2.0 * b @ a).to(value.dtype)
        found[name.replace(".base_layer", "")] = value
    return found
