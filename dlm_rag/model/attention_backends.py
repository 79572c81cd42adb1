"""Which attention kernel runs here, and how each version of it is called.

Read in the sources and wheels of torch 2.11 to 2.13 and flash-attn, not yet confirmed on a GPU:

- torch's own FlashAttention 2 reads block tables from 2.12 on (pages of a multiple of 256 tokens) and needs
  the ends of the keys too. In 2.12 it refuses `num_splits`, even 1 (pytorch #179760). From 2.13 on it must
  be 1: split rows of paged keys may not be written at all (pytorch #194167), and how a row is split depends
  on the other rows.
- FlashAttention 3 reads block tables on compute capability 9, FlashAttention 4 in torch only on 10; both
  refuse the ends of the keys with them.
- flash-attn (2.x) reads block tables from 2.5.7 on. FlashAttention 4 alone is also named `flash_attn` but
has
  another function, so we look for the module with the function.
"""

import logging
from dataclasses import dataclass, field
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from typing import Any

import torch
import torch.nn.attention

from dlm_rag.errors import ConfigError

log = logging.getLogger(__name__)

FLASH_MODULE = "flash_attn.flash_attn_interface"
ATTENTION_BACKENDS = ("flash", "varlen", "sdpa")  # the first that works is taken


@dataclass(frozen=True)
class PagedAttentionSupport:
    """How `varlen_attn` is called on a device."""

    reads_block_table: bool = False
    needs_key_offsets: bool = True  # the ends of the keys, with a block table
    kernel_options: dict[str, Any] = field(default_factory=dict)


@cache
def get_paged_attention_support(device: torch.device) -> PagedAttentionSupport:
    """The rule for torch's kernel that is active on a device."""
    implementation = torch.nn.attention.current_flash_attention_impl()
    reads = {"FA3": 9, "FA4": 10}  # block tables, on this generation of GPUs
    if implementation in reads:
        return PagedAttentionSupport(
            get_compute_capability_major(device) == reads[implementation], False, {"num_splits": 1}
        )
    newest = get_torch_version() >= (2, 13)
    return PagedAttentionSupport(
        get_torch_version() >= (2, 12), kernel_options={"num_splits": 1} if newest else {}
    )


def get_compute_capability_major(device: torch.device) -> int:
    """The major number of a GPU's compute capability."""
    return torch.cuda.get_device_capability(device)[0]


def get_torch_version() -> tuple[int, int]:
    """Major and minor."""
    major, minor = torch.__version__.split(".")[:2]
    return int(major), int(minor)


def choose_backend(requested: str, device: torch.device, dtype: torch.dtype) -> str:
    """The kernel to use: `requested`, or for "auto" the first of flash, varlen, sdpa that works here.

    Raises `ConfigError` when a kernel is asked for by name and cannot run here.
    """
    if requested != "auto":
        reason = get_backend_problem(requested, device, dtype)
        if reason:
            raise ConfigError(f"attention={requested} cannot be used here: {reason}")
        return requested
    return _first_working(device, dtype)


def describe_kernel_version(backend: str) -> str:
    """The kernel and the version of the package it is in, as stamped on results."""
    return f"flash-attn {version('flash-attn')}" if backend == "flash" else f"torch {torch.__version__}"


@cache
def _first_working(device: torch.device, dtype: torch.dtype) -> str:
    chosen = next(name for name, reason in collect_backend_problems(device, dtype).items() if not reason)
    log.info(
        "attention kernel: %s (%s) on %s in %s", chosen, describe_kernel_version(chosen), device, dtype
    )
    return chosen


def collect_backend_problems(device: torch.device, dtype: torch.dtype) -> dict[str, str]:
    """Every kernel, best first, with why it cannot run here; empty where it can."""
    return {name: get_backend_problem(name, device, dtype) for name in ATTENTION_BACKENDS}


@cache
def get_backend_problem(backend: str, device: torch.device, dtype: torch.dtype) -> str:
    """Why a kernel cannot run here, with the remedy; empty where it can."""
    if backend == "sdpa":
        return ""
    if device.type != "cuda" or dtype not in (torch.float16, torch.bfloat16):
        return "it needs a CUDA device and dtype=bfloat16 or float16; set attention=sdpa"
    if torch.cuda.get_device_capability(device) < (8, 0):
        return "it needs compute capability 8.0 or newer; set attention=sdpa"
    if backend == "flash":
        return _flash_missing()
    return "" if get_torch_version() >= (2, 12) else "it needs torch 2.12 or newer; set attention=sdpa"


def _flash_missing() -> str:
    try:
        if find_spec(FLASH_MODULE) is not None:
            version("flash-attn")
            return ""
    except (ModuleNotFoundError, PackageNotFoundError):
        pass
    return "install it with `pip install 'dlm_rag[flash]'` (FlashAttention 4 alone is another package)"
