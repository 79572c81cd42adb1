"""Attention over ragged rows, and the kernel that computes it here.

Rows are packed one after another without padding, so a question gets the same arithmetic alone and in a
batch. Rows that need a mask run under SDPA on a CPU, which adds it, and under FlexAttention on a GPU: there
SDPA would compute grouped heads with a mask from whole matrices of scores. `indexed` has masks of its own.

Shapes: Tq, Tk packed query and key tokens; H query heads; Hk key-value heads; D head width.

No block tables: kernels want pages of 256 tokens, while a passage has about 100. Rows are gathered, but for
SDPA on a CPU, which reads them one by one, and for `indexed`, which reads them where they are: it is ours,
and chosen by name alone until it has been measured on a GPU.
FlashAttention 4 alone is named `flash_attn`, too, but lacks the function of flash-attn 2: we look for that.
"""

import logging
import os
from collections.abc import Callable, Iterable, Iterator
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from itertools import groupby
from typing import Any

import torch
import torch.nn.attention
import torch.nn.functional as F
from torch import Tensor

from dlm_rag.errors import ConfigError
from dlm_rag.model.packed_batch import AttentionMetadata

log = logging.getLogger(__name__)

torch.backends.cuda.enable_cudnn_sdp(False)  # SDPA prefers it on Hopper, where it plans each new shape anew

FLASH_MODULE = "flash_attn.flash_attn_interface"
ATTENTION_BACKENDS = ("flash", "varlen", "sdpa")  # the first that works is taken
FLEX_MIN_HEAD_DIM = 16  # FlexAttention has no narrower heads on a GPU
FLEX_GRAPHS = 64  # of one process: lengths below and above a tile, one row or more, dtypes, with gradients


def compute_attention(q: Tensor, k: Tensor, v: Tensor, sight: AttentionMetadata, backend: str) -> Tensor:
    """Row r of `q` (Tq, H, D) attends to row r of `k`, `v` (Tk, Hk, D); returns (Tq, H, D).

    With `sight.key_places`, for sdpa and indexed, `k` and `v` are all that a memory holds, (tokens, Hk, D),
    and rows see the places that are theirs. `backend`: one of `choose_backend`'s.
    """
    if backend == "indexed":  # which has no backward
        backend = "sdpa" if torch.is_grad_enabled() and q.requires_grad else backend
    elif any(sight.partial_view_rows) and not sight.causal:
        backend = "sdpa"  # no other kernel takes a mask
    return _KERNELS[backend](q, k, v, sight)


def _sdpa(q: Tensor, k: Tensor, v: Tensor, sight: AttentionMetadata) -> Tensor:
    partial = sight.partial_view_rows or (False,) * len(sight.query_lengths)
    shapes = list(zip(sight.query_lengths, sight.key_lengths, partial, strict=True))
    seen_by_them: Iterable[tuple[Tensor, ...]]
    if sight.key_places is None:  # consecutive rows of equal lengths are one call
        runs = [(len(list(same)), *shape) for shape, same in groupby(shapes)]
        # Not slices: the gradient of each would be as long as all keys.
        lengths = [rows * seen for rows, _, seen, _ in runs]
        seen_by_them = zip(k.split(lengths), v.split(lengths), strict=True)
    else:
        runs, seen_by_them = [(1, *shape) for shape in shapes], _read_rows(k, v, sight)
    found, at, row, queries = [], 0, 0, q.split([rows * n for rows, n, _, _ in runs])
    for (rows, n, seen, bounded), own, seen_by_it in zip(runs, queries, seen_by_them, strict=True):
        run_q = own.unflatten(0, (rows, n)).transpose(1, 2)
        run_k, run_v = (x.unflatten(0, (rows, seen)).transpose(1, 2) for x in seen_by_it)
        if n and bounded and not sight.causal:
            assert sight.visible_counts is not None
            limits = sight.visible_counts[at : at + rows * n].view(rows, n)
            out = attend_masked(run_q, run_k, run_v, limits, sight.masks, row)
        else:
            causal = bounded and sight.causal
            out = F.scaled_dot_product_attention(run_q, run_k, run_v, is_causal=causal, enable_gqa=True)
        found.append(out.transpose(1, 2).flatten(0, 1))
        at, row = at + rows * n, row + rows
    return found[0] if len(found) == 1 else torch.cat(found)


def _read_rows(k: Tensor, v: Tensor, sight: AttentionMetadata) -> Iterator[tuple[Tensor, Tensor]]:
    """Keys and values of each row, one after another through the same small room, which stays in cache."""
    assert sight.key_places is not None
    room = k.new_empty((2, max(sight.key_lengths), *k.shape[1:]))
    for places, queries in zip(sight.key_places.split(sight.key_lengths), sight.query_lengths, strict=True):
        read = room[:, : len(places)]
        if queries:
            torch.index_select(k, 0, places, out=read[0])
            torch.index_select(v, 0, places, out=read[1])
        yield read[0], read[1]


def attend_masked(
    q: Tensor, k: Tensor, v: Tensor, limits: Tensor, masks: dict[Any, Any], name: Any
) -> Tensor:
    """Attention of q (rows, H, n, D), each to the first `limits` (rows, n) of its k, v (rows, Hk, m, D)."""
    flex = q.is_cuda and q.shape[-1] >= FLEX_MIN_HEAD_DIM
    if name not in masks:  # kept by name, for the other layers
        masks[name] = (build_flex_mask if flex else build_dense_mask)(limits, q, k)
    if flex:
        return attend_flex(q, k, v, masks[name])
    repeat = q.is_cuda and q.shape[1] > k.shape[1]  # with a mask SDPA's kernels take no grouped heads there
    if repeat:
        k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
    return F.scaled_dot_product_attention(q, k, v, masks[name], enable_gqa=not repeat)


def build_dense_mask(limits: Tensor, q: Tensor, k: Tensor) -> Tensor:
    """(rows, 1, n, m): 0 where a query sees a key, else minus infinity; all layers add it."""
    seen = torch.arange(k.shape[2], device=q.device) < limits[:, None, :, None]
    return q.new_full(seen.shape, float("-inf")).masked_fill_(seen, 0.0)


def build_flex_mask(limits: Tensor, q: Tensor, k: Tensor) -> Any:
    """The mask of FlexAttention, which knows the tiles that nobody or everybody sees."""

    def is_seen(row: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return key < limits[row, query]

    return _import_flex(q.is_cuda)[0](is_seen, len(q), None, q.shape[2], k.shape[2], device=q.device)


def attend_flex(q: Tensor, k: Tensor, v: Tensor, mask: Any) -> Tensor:
    """FlexAttention, compiled on a GPU; without its decoding kernel, which splits keys by the batch."""
    options = {"FORCE_USE_FLEX_ATTENTION": True} if q.is_cuda else None
    attend = _import_flex(q.is_cuda)[1]
    return attend(q, k, v, block_mask=mask, enable_gqa=True, kernel_options=options)


@cache
def _import_flex(compiled: bool) -> tuple[Any, ...]:
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    if not compiled:
        return create_block_mask, flex_attention
    # Beyond its limit torch runs what is left uncompiled, with whole matrices of scores.
    torch._dynamo.config.recompile_limit = max(FLEX_GRAPHS, torch._dynamo.config.recompile_limit)
    attend = torch.compile(flex_attention, dynamic=True, fullgraph=True)
    return torch.compile(create_block_mask, dynamic=True), attend


def _varlen(q: Tensor, k: Tensor, v: Tensor, sight: AttentionMetadata) -> Tensor:
    """A row is not split, which would depend on the others, where that can be said."""
    from torch.nn.attention.varlen import varlen_attn

    made, options = tuple(map(int, torch.__version__.split(".")[:2])), dict[str, Any]()
    # torch 2.12 refuses `num_splits`, even 1, of FlashAttention 2 (pytorch #179760).
    if made >= (2, 13) or torch.nn.attention.current_flash_attention_impl():
        options["num_splits"] = 1
    if made >= (2, 12):  # before, it goes without saying
        options["enable_gqa"] = q.shape[1] != k.shape[1]
    return _call_ragged(varlen_attn, q, k, v, sight, **options)


def _flash(q: Tensor, k: Tensor, v: Tensor, sight: AttentionMetadata) -> Tensor:
    from flash_attn.flash_attn_interface import flash_attn_varlen_func

    return _call_ragged(flash_attn_varlen_func, q, k, v, sight)


def _call_ragged(
    kernel: Any, q: Tensor, k: Tensor, v: Tensor, sight: AttentionMetadata, **options: Any
) -> Tensor:
    """At least 2 queries: for single ones FlashAttention 2 has a path for grouped heads that fails where a
    row has no query, and that may split keys by how many rows there are."""
    longest = max(2, *sight.query_lengths), max(sight.key_lengths)
    window = -1, 0 if sight.causal else -1
    return kernel(q, k, v, sight.query_ends, sight.key_ends, *longest, window_size=window, **options)


def _indexed(q: Tensor, k: Tensor, v: Tensor, sight: AttentionMetadata) -> Tensor:
    from dlm_rag.model.indexed_attention import attend_by_index

    places = torch.arange(len(k), device=k.device) if sight.key_places is None else sight.key_places
    ends = sight.query_ends, sight.key_ends
    return attend_by_index(q, k, v, places, ends, max(sight.query_lengths), sight.visible_counts)


_KERNELS: dict[str, Callable[..., Any]] = {
    "sdpa": _sdpa, "varlen": _varlen, "flash": _flash, "indexed": _indexed
}  # fmt: skip


def choose_backend(
    requested: str, device: torch.device, dtype: torch.dtype, causal_context: bool = False
) -> str:
    """The kernel to use: `requested`, or for "auto" the first of flash, varlen, sdpa that works here.

    causal_context: as in `DenoiserConfig`; in one call some rows are causal then, which only SDPA can mask.
    Raises `ConfigError` when a kernel is asked for by name and cannot run here.
    """
    if causal_context and requested != "indexed":
        if requested not in ("auto", "sdpa"):
            raise ConfigError(f"attn_implementation={requested} has no masks, needed here: set it to sdpa")
        return "sdpa"
    if requested == "auto":
        return _first_working(device, dtype)
    if reason := get_backend_problem(requested, device, dtype):
        raise ConfigError(f"attn_implementation={requested} cannot be used here: {reason}")
    return requested


@cache
def _first_working(device: torch.device, dtype: torch.dtype) -> str:
    chosen = next(name for name in ATTENTION_BACKENDS if not get_backend_problem(name, device, dtype))
    kernel = describe_kernel_version(chosen)
    log.info("attention kernel: %s (%s) on %s in %s", chosen, kernel, device, dtype)
    return chosen


@cache
def get_backend_problem(backend: str, device: torch.device, dtype: torch.dtype) -> str:
    """Why a kernel cannot run here, with the remedy; empty where it can."""
    if backend == "sdpa":
        return ""
    if backend == "indexed":
        if find_spec("triton") is None:
            return "it needs Triton, which comes with torch's CUDA builds; set attn_implementation=sdpa"
        if device.type != "cuda" and not os.environ.get("TRITON_INTERPRET"):
            return "it needs a CUDA device; set attn_implementation=sdpa"
    elif device.type != "cuda" or dtype not in (torch.float16, torch.bfloat16):
        return "it needs a CUDA device and dtype=bfloat16 or float16; set attn_implementation=sdpa"
    if device.type == "cuda" and torch.cuda.get_device_capability(device) < (8, 0):
        return "it needs compute capability 8.0 or newer; set attn_implementation=sdpa"
    if backend == "flash" and not _has_flash_attn():
        return "install it with `pip install 'dlm_rag[flash]'` (FlashAttention 4 alone is another package)"
    return ""


def _has_flash_attn() -> bool:
    try:
        return find_spec(FLASH_MODULE) is not None and bool(version("flash-attn"))
    except (ModuleNotFoundError, PackageNotFoundError):
        return False


def describe_kernel_version(backend: str) -> str:
    """The kernel and the version of the package it is in, as stamped on results."""
    if package := {"flash": "flash-attn", "indexed": "triton"}.get(backend):
        return f"{package} {version(package)}"
    return f"torch {torch.__version__}"
