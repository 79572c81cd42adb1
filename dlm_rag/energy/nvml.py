"""GPUs by NVIDIA's management library: its energy counter, or power that is polled where it has none.

The counter moves in steps of about 0.1 s. Polled power is a mean of up to 1 s, of which some GPUs see a
quarter (arXiv 2312.02741): it is a fallback, and named so.
"""

import re
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from dlm_rag.energy.sensors import EnergyCounter, PolledPower, Sensor, SensorError
from dlm_rag.errors import summarize_error

COUNTER, POLLED = "NVML energy counter", "NVML power, polled"
COUNTER_STEP_SECONDS, MEAN_OF, POLL_EVERY = 0.1, 1.0, 0.1  # seconds
MIG_UNSUPPORTED_MESSAGE = "MIG: NVML counts no energy of an instance"


def find_gpu_sensors(gpus: Sequence[tuple[str, str]], nvml: Any = None) -> list[Sensor]:
    """A sensor for every GPU. gpus: UUID, with or without `GPU-`, and name, as CUDA tells them; so it does
    not matter how CUDA_VISIBLE_DEVICES numbers or names them. nvml: the module `pynvml`, or a fake.

    Raises `SensorError` where one of them has none.
    """
    if any(re.search(r"\bMIG\b", name) for _, name in gpus):
        raise SensorError(MIG_UNSUPPORTED_MESSAGE)
    nvml = nvml or _pynvml()
    try:
        nvml.nvmlInit()
    except nvml.NVMLError as error:
        raise SensorError(f"NVML does not start: {summarize_error(error)}") from None
    return [_sensor(uuid, nvml) for uuid, _ in gpus]


def _pynvml() -> Any:
    try:
        import pynvml
    except ImportError:
        remedy = "pip install 'dlm_rag[energy]'"
        raise SensorError(f"nvidia-ml-py is not installed: {remedy}", remedy) from None
    return pynvml


def _sensor(uuid: str, nvml: Any) -> Sensor:
    uuid = f"GPU-{uuid.removeprefix('GPU-')}"
    try:
        handle = nvml.nvmlDeviceGetHandleByUUID(uuid)
        index, name = nvml.nvmlDeviceGetIndex(handle), nvml.nvmlDeviceGetName(handle)
    except nvml.NVMLError as error:
        raise SensorError(f"NVML does not know {uuid}: {summarize_error(error)}") from None
    if _is_mig_enabled(handle, nvml):
        raise SensorError(MIG_UNSUPPORTED_MESSAGE)
    scope, whole = describe_gpu_scope(name, index)
    counter: Callable[[], float] = partial(_scaled, nvml.nvmlDeviceGetTotalEnergyConsumption, handle)
    power: Callable[[], float] = partial(_scaled, nvml.nvmlDeviceGetPowerUsage, handle)
    try:
        counter()
        return EnergyCounter(uuid, scope, COUNTER, counter, COUNTER_STEP_SECONDS, may_include_cpu=whole)
    except nvml.NVMLError:
        pass
    try:
        power()
        return PolledPower(uuid, scope, POLLED, power, MEAN_OF, POLL_EVERY, whole)
    except nvml.NVMLError as error:
        raise SensorError(f"GPU {index} ({name}) tells NVML no energy: {summarize_error(error)}") from None


def _scaled(read: Callable[[Any], int], handle: Any) -> float:
    """NVML has thousandths: of joules, of watts."""
    return read(handle) / 1e3


def _is_mig_enabled(handle: Any, nvml: Any) -> bool:
    """Whether a GPU is cut into instances: a program then computes on one of them."""
    try:
        return bool(nvml.nvmlDeviceGetMigMode(handle)[0])
    except nvml.NVMLError:  # it cannot be
        return False


def describe_gpu_scope(name: str, index: int) -> tuple[str, bool]:
    """What the counter of a GPU counts, in words, and whether the CPU is or may be in it."""
    gpu = f"GPU {index} ({name})"
    if "GH200" in name:  # seen by zeus (#172)
        return f"the whole module of {gpu}, CPU and memory too", True
    if re.search(r"\bGB\d", name):
        return f"{gpu}, whether with its CPU NVML does not say", True
    return gpu, False
