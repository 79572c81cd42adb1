"""The optimizers of a run, and how their rates rise and fall."""

from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from dlm_rag.config import TrainConfig
from dlm_rag.errors import ConfigError
from dlm_rag.machine import has_bfloat16
from dlm_rag.model.denoiser import Denoiser


def make_optimizers(denoiser: Denoiser, train: TrainConfig) -> list[torch.optim.Optimizer]:
    """Muon on the matrices of the layers, AdamW on the rest, four times as fast on the QK gains; or
    AdamW on all.

    Raises `ConfigError` for Muon on a matrix with fewer rows than shards, which torch cannot compute.
    """
    matrices: list[Tensor] = []
    gains, rest = list[Tensor](), list[Tensor]()
    for name, value in denoiser.named_parameters():
        if not value.requires_grad:
            continue
        if value.dim() == 2 and "layers." in name:
            (matrices if train.optimizer == "muon" else rest).append(value)
        elif train.optimizer == "muon" and name.endswith(("q_norm.weight", "k_norm.weight")):
            gains.append(value)
        else:
            rest.append(value)
    mesh = getattr(matrices[0], "device_mesh", None) if matrices else None
    if mesh is not None and (rows := min(map(len, matrices))) < mesh.size():
        raise ConfigError(
            f"optimizer=muon cannot share a matrix of {rows} rows among {mesh.size()} processes: set "
            "train.optimizer=adamw, or take fewer processes"
        )
    rate = train.learning_rate
    groups = [{"params": rest, "lr": rate}, {"params": gains, "lr": 4 * rate}]
    found: list[torch.optim.Optimizer] = []
    if matrices:
        device = matrices[0].device
        kind = torch.optim.Muon if device.type != "cpu" and has_bfloat16(device) else MuonInFloat32
        found.append(kind(matrices, lr=train.muon_learning_rate, weight_decay=0.0))
    if groups := [group for group in groups if group["params"]]:  # adapters are matrices of the layers only
        fused = not any(value.is_meta for value in (*rest, *gains))
        found.append(torch.optim.AdamW(groups, betas=(0.9, 0.95), weight_decay=0.0, fused=fused))
    for group in (group for optimizer in found for group in optimizer.param_groups):
        group["initial_lr"] = group["lr"]
    return found


class MuonInFloat32(torch.optim.Muon):
    """torch's Muon, which orthogonalises in bfloat16, as it is without that.

    For GPUs that only emulate bfloat16, and CPUs: one without products in bfloat16 takes ten times as long
    for them as for those in float32, more than for the forward and backward of a small denoiser.
    """

    def step(self, closure: Any = None) -> Any:
        with _WithoutBFloat16():
            return super().step(closure)


class _WithoutBFloat16(TorchFunctionMode):
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is Tensor.bfloat16:
            return args[0].clone()
        return func(*args, **(kwargs or {}))


def set_learning_rates(optimizers: list[torch.optim.Optimizer], train: TrainConfig, step: int) -> float:
    """Sets the rates of a step (warm-up, constant, linear fall); returns their share of the
    full ones.
    """
    share = compute_decay_factor(step, train.max_steps, train.decay_fraction)
    share = min(share, (step + 1) / (train.warmup_steps + 1))
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            group["lr"] = group["initial_lr"] * share
    return share


def compute_decay_factor(step: int, steps: int, decay_fraction: float) -> float:
    """What is left of the full rate: 1, then a linear fall to 0 over the last `decay_fraction` of steps."""
    return min(1.0, (steps - step) / max(1.0, decay_fraction * steps))
