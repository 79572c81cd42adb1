"""What a run begins with and ends in: a denoiser with its first weights and its tokenizer; its export.

A denoiser is built without contents, put where it belongs (in shards, where it has any), and then filled:
a process reads or makes one tensor at a time and keeps the rows that are its own. A row is the same
whoever has it, bit for bit.
"""

import shutil
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from dlm_rag.errors import ConfigError
from dlm_rag.model.checkpoint import Checkpoint, save_tensors, write_generation_config
from dlm_rag.model.denoiser import Denoiser
from dlm_rag.model.denoiser_config import DenoiserConfig
from dlm_rag.progress import quiet_imports
from dlm_rag.randomness import make_keyed_generator
from dlm_rag.tokenizer import Tokenizer
from dlm_rag.training.distributed import get_local

LORA_TARGET_MODULES = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
EMBEDDING_NAMES = ("embed_tokens.weight", "lm_head.weight")
MEAN_CHUNK_ROWS = 4096  # of a tensor whose mean is taken


def build_meta_denoiser(config: DenoiserConfig, lora_rank: int, frozen: torch.dtype) -> Denoiser:
    """A denoiser on the meta device: shapes, float32 where it is trained, else in `frozen`."""
    with torch.device("meta"):
        denoiser = Denoiser(config)
        if lora_rank:
            add_lora_adapters(denoiser, lora_rank)
        for parameter in denoiser.parameters():
            if not parameter.requires_grad:
                parameter.data = parameter.data.to(frozen)
    return denoiser


def add_lora_adapters(denoiser: Denoiser, rank: int) -> None:
    """Low-rank adapters (LoRA, arXiv 2106.09685) on all matrices of the layers, which are frozen."""
    try:
        with quiet_imports():
            from peft import LoraConfig, inject_adapter_in_model
    except ImportError:
        raise ConfigError("lora_rank needs peft: install it with `pip install 'dlm_rag[lora]'`") from None
    inject_adapter_in_model(
        LoraConfig(r=rank, lora_alpha=2 * rank, target_modules=list(LORA_TARGET_MODULES)), denoiser
    )
    for name, parameter in denoiser.named_parameters():
        parameter.requires_grad_("lora_" in name)


def allocate_denoiser(denoiser: Denoiser, device: torch.device) -> None:
    """Gives an empty denoiser memory on the device, for its shards alone where it has any."""
    denoiser.to_empty(device=device)
    denoiser.tie_weights()
    denoiser.set_rope_theta(denoiser.config.rope_theta)


def _read_local_rows(value: Tensor, checkpoint: Checkpoint, name: str) -> None:
    """Reads this process's rows; tokens that the checkpoint did not have get the mean of all others."""
    own, local = _local_rows(value), get_local(value)
    old = checkpoint.config.vocab_size if name in EMBEDDING_NAMES else value.shape[0]
    kept = slice(min(own.start, old), min(own.stop, old))
    if kept.start < kept.stop:
        local[: kept.stop - kept.start].copy_(checkpoint.read_tensor_rows(name, kept))
    if own.stop > max(own.start, old):
        starts = range(0, old, MEAN_CHUNK_ROWS)
        parts = (slice(start, min(start + MEAN_CHUNK_ROWS, old)) for start in starts)
        sums = (checkpoint.read_tensor_rows(name, part).double().sum(0) for part in parts)
        local[kept.stop - own.start :].copy_(sum(sums, torch.zeros(())) / old)


def draw_fresh_weights(config: DenoiserConfig, seed: int) -> Iterator[tuple[str, Tensor]]:
    """Every tensor of a fresh denoiser by its name, whole, on the CPU.

    Matrices are normal with variance 1 / fan-in, those that write into the residual stream smaller by
    the square root of their number; gains are 1, those of queries and keys 1.5.
    """
    with torch.device("meta"):
        shapes = Denoiser(config)
    generator = make_keyed_generator("weights", seed)
    for name, shape in shapes.named_parameters():
        value = torch.zeros(shape.shape)
        if value.dim() == 2:
            value.normal_(0.0, value.shape[1] ** -0.5, generator=generator)
        elif not name.endswith("bias"):
            value.fill_(1.5 if name.endswith(("q_norm.weight", "k_norm.weight")) else 1.0)
        if name.endswith(("o_proj.weight", "down_proj.weight")):
            value.mul_((2 * config.num_hidden_layers) ** -0.5)
        yield name, value


def _draw_adapter(name: str, shape: Sequence[int], seed: int) -> Tensor:
    """A uniform with variance 1 / (3 fan-in), as a linear layer's; B zero, so that nothing changes yet."""
    value = torch.zeros(shape)
    if ".lora_A." in name:
        bound = shape[1] ** -0.5
        value.uniform_(-bound, bound, generator=make_keyed_generator("adapter", seed, name))
    return value


def _local_rows(value: Tensor) -> slice:
    """Which rows of a parameter this process has: all, or its shard's."""
    if not hasattr(value, "device_mesh"):
        return slice(0, value.shape[0])
    size = -(-value.shape[0] // value.device_mesh.size())
    start = min(value.device_mesh.get_local_rank() * size, value.shape[0])
    return slice(start, start + len(get_local(value)))


def _copy_local_rows(value: Tensor, whole: Tensor) -> None:
    get_local(value).copy_(whole[_local_rows(value)])


@dataclass(frozen=True)
class InitialModel:
    """An architecture with its tokenizer, before any weight is there."""

    config: DenoiserConfig
    tokenizer: Tokenizer
    checkpoint: Checkpoint | None  # that the weights come from; None: fresh ones
    seed: int
    lora_rank: int

    def build_on_meta(self, frozen: torch.dtype) -> Denoiser:
        """The denoiser on the meta device; frozen: the dtype of weights that are not trained."""
        return build_meta_denoiser(self.config, self.lora_rank, frozen)

    def materialize(self, denoiser: Denoiser, device: torch.device, trained: bool = True) -> None:
        """Gives a meta denoiser, or its shards, memory on the device and the first weights.

        trained: also those under training; else only what is frozen, as where a run has saved the rest.
        """
        allocate_denoiser(denoiser, device)
        self.fill(denoiser, trained)

    @torch.no_grad()
    def fill(self, denoiser: Denoiser, trained: bool) -> None:
        """The checkpoint's weights, or fresh ones that depend on the seed; adapters besides."""
        fresh = dict[str, Tensor]()
        for name, value in denoiser.named_parameters():
            if value.requires_grad and not trained:
                continue
            if ".lora_" in name:
                _copy_local_rows(value, _draw_adapter(name, value.shape, self.seed))
            elif self.checkpoint is not None:
                _read_local_rows(value, self.checkpoint, name.replace(".base_layer", ""))
            else:
                fresh[name] = value
        for name, made in draw_fresh_weights(self.config, self.seed) if fresh else ():
            _copy_local_rows(fresh[name], made)

    def export(self, folder: Path, tensors: dict[str, Tensor], dtype: torch.dtype) -> None:
        """A folder that `sample.py --model` reads; of a public family, also that family's own classes.

        tensors: the whole state of the denoiser, adapters included, which are merged into the weights.
        """
        whole = merge_lora_weights(tensors, self.lora_rank)
        tensors = {name: value.to(dtype) for name, value in whole.items()}
        extra: dict[str, Any] = {"prompt": asdict(self.tokenizer.template)}
        if self.checkpoint is None:
            extra["eos_token_id"] = self.tokenizer.end_id
        save_tensors(tensors, self.config, folder, extra, self.checkpoint)
        self.tokenizer.inner.save_pretrained(folder)
        for path in self.checkpoint.folder.iterdir() if self.checkpoint is not None else ():
            # The code that public classes consist of; it is copied, never run.
            if path.is_file() and (path.suffix == ".py" or path.name == "generation_config.json"):
                shutil.copyfile(path, folder / path.name)
        write_generation_config(folder, self.config)


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
