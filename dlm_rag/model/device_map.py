"""The layers of one model on several devices of one process, for a model that is too large for one.

Layers run one after another, so devices take turns: this adds memory, not speed. Between two devices the
hidden states are copied; what attention needs to know of the rows is copied once a call.
"""

from collections.abc import Sequence
from itertools import accumulate
from math import prod
from typing import Any

import torch
from torch import Tensor

from dlm_rag.errors import ConfigError
from dlm_rag.machine import choose_device
from dlm_rag.model.denoiser_config import DenoiserConfig
from dlm_rag.model.layers import list_tensor_shapes
from dlm_rag.model.packed_batch import map_arrays


def list_devices(device_map: str | Sequence[str] | None) -> list[torch.device]:
    """The devices of `model.device_map`; none where it is not set. Raises `ConfigError`."""
    if device_map == "auto":
        if not (count := torch.cuda.device_count()):
            raise ConfigError("model.device_map=auto finds no CUDA device: leave it out")
        device_map = [f"cuda:{number}" for number in range(count)]
    names = device_map.split(",") if isinstance(device_map, str) else device_map or ()
    devices = [choose_device(name.strip()) for name in names]
    if len({device.type for device in devices}) > 1:
        raise ConfigError(f"model.device_map={device_map} mixes kinds of devices: name GPUs alone")
    return devices


def assign_devices(config: DenoiserConfig, devices: Sequence[torch.device]) -> dict[str, torch.device]:
    """The device of each tensor by its name: runs of layers with about as many numbers on each device.

    Embedding, norm and head are on the first.
    """
    sizes = {name: prod(shape) for name, shape in list_tensor_shapes(config).items()}
    layers = [0] * config.num_hidden_layers
    for name, size in sizes.items():
        if name.startswith("layers."):
            layers[int(name.split(".")[1])] += size
    total = sum(sizes.values())
    middles = [end - size / 2 for size, end in zip(layers, accumulate(layers), strict=True)]
    first = total - sum(layers)
    homes = [devices[int((first + middle) / total * len(devices))] for middle in middles]
    return {name: homes[int(name.split(".")[1])] for name in sizes if name.startswith("layers.")}


def move_to_device(value: Any, device: torch.device) -> Any:
    """Tensors on a device, in tuples and in what describes the rows of a call; caches stay."""
    if isinstance(value, tuple):
        return tuple(move_to_device(part, device) for part in value)

    def move(tensor: Tensor) -> Tensor:
        return tensor.to(device)

    return map_arrays(value, move)
