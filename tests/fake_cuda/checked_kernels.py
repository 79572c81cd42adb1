"""Attention kernels for `fake_cuda` that compute nothing and check what they are handed.

What kernels ask for is in the documentation of flash-attn 2 and of `torch.nn.attention.varlen`. How long
the rows are is taken from what the package knows on the host: on the device there are no contents.
"""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.machinery import ModuleSpec
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest import mock

import torch
import torch.nn.attention.varlen as of_torch

from dlm_rag.model import layers
from tests.fake_cuda.device import CUDA


@contextmanager
def checked_kernels(flash: bool = False, implementation: str | None = None) -> Iterator[list[str]]:
    """While it is open, flash-attn is there or not (`flash`), and torch's own kernel is `implementation`.

    Yields what was called, in order: "sdpa", "varlen", "flash", "flex", "indexed".
    """
    calls, sights, varlen = list[str](), [], of_torch.varlen_attn

    def known(name: str, kernel: Any) -> Any:
        def called(q: Any, k: Any, v: Any, sight: Any, *more: Any, **options: Any) -> Any:
            calls.extend(["sdpa"] if name == "sdpa" else [])
            sights.append(sight)
            return kernel(q, k, v, sight, *more, **options)

        return called

    def of_varlen(q: Any, k: Any, v: Any, *ends: Any, **options: Any) -> Any:
        calls.append("varlen")
        check(sights[-1], (q, k, v), ends, options["window_size"])
        assert options["enable_gqa"] == (q.shape[1] != k.shape[1])
        return varlen(q, k, v, *ends, **options)

    def of_flash(q: Any, k: Any, v: Any, *ends: Any, window_size: Any) -> Any:
        calls.append("flash")
        check(sights[-1], (q, k, v), ends, window_size)
        return q + 0 * (k.mean() + v.mean())

    def of_flex(q: Any, k: Any, v: Any, mask: Any) -> Any:
        calls.append("flex")
        assert mask.dtype == q.dtype and mask.shape == (len(q), 1, q.shape[2], k.shape[2])
        assert k.shape == v.shape and q.shape[1] % k.shape[1] == 0 and q.shape[-1] >= 16
        return q + 0 * (k.mean() + v.mean())

    def of_index(q: Any, k: Any, v: Any, places: Any, ends: Any, longest: int, limits: Any) -> Any:
        calls.append("indexed")
        assert places.dim() == 1 and k.shape == v.shape and k.stride() == v.stride()
        assert all(x.device == CUDA for x in (q, k, v, places, *ends))
        assert ends[0].shape == ends[1].shape and longest >= max(sights[-1].query_lengths)
        assert limits is None or limits.shape == q.shape[:1]
        return q + 0 * (k.mean() + v.mean())

    module = ModuleType(layers.FLASH_MODULE)
    module.__spec__ = ModuleSpec(layers.FLASH_MODULE, None)
    module.flash_attn_varlen_func = of_flash
    package = {layers.FLASH_MODULE: module, "flash_attn": SimpleNamespace(flash_attn_interface=module)}
    ours = {"dlm_rag.model.indexed_attention": SimpleNamespace(attend_by_index=of_index)}
    spied = {name: known(name, kernel) for name, kernel in layers._KERNELS.items()}
    with (
        mock.patch.dict(layers._KERNELS, spied),
        mock.patch.object(layers, "attend_flex", of_flex),
        mock.patch.object(layers, "build_flex_mask", layers.build_dense_mask),
        mock.patch.object(of_torch, "varlen_attn", of_varlen),
        mock.patch("torch.nn.attention.current_flash_attention_impl", lambda: implementation),
        mock.patch.dict(sys.modules, ours | (package if flash else {})),
        mock.patch.object(layers, "find_spec", lambda name: name),  # Triton is there
        mock.patch.object(layers, "version", lambda package: "2.8.3"),
        mock.patch.object(layers, "_has_flash_attn", lambda: flash),
    ):
        yield calls


def check(sight: Any, heads: Any, ends: Any, window: tuple[int, int]) -> None:
    """What the kernels have in common; `ends`: of queries and keys, and the longest of each."""
    (q, k, v), (ends_q, ends_k, longest_q, longest_k) = heads, ends
    queries, keys = sight.query_lengths, sight.key_lengths
    for x in heads:
        assert x.device == CUDA and x.dtype == q.dtype and x.dtype in (torch.float16, torch.bfloat16)
        assert x.stride(-1) == 1 and x.shape[-1] == q.shape[-1] and x.shape[-1] % 8 == 0
    assert q.shape[1] % k.shape[1] == 0 and k.shape == v.shape and q.shape[0] == sum(queries)
    check_numbers(ends_q, (len(queries) + 1,))
    assert type(longest_q) is type(longest_k) is int
    assert longest_q >= max(2, *queries) and longest_k == max(keys)
    assert len(queries) == len(keys) and min(keys) > 0
    assert window == ((-1, 0) if sight.causal else (-1, -1)), "to the right only what a causal model sees"
    check_numbers(ends_k, (len(keys) + 1,))
    assert k.dim() == 3 and k.shape[0] == sum(keys)


def check_numbers(x: torch.Tensor, shape: tuple[int, ...]) -> None:
    """Places and lengths are int32, on the device, without gaps."""
    assert x.device == CUDA and x.dtype == torch.int32 and x.is_contiguous() and tuple(x.shape) == shape
