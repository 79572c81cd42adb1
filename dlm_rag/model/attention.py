"""Attention over ragged rows, through one function with three interchangeable kernels.

Rows are packed one behind another without padding, so a question gets the same arithmetic alone
and in a batch. Who sees whom is decided by which keys a row is given, and by how far it sees ahead.

Shapes: Tq, Tk packed query and key tokens; H query heads; Hk key-value heads (H a multiple of Hk);
D head width.
"""

import inspect
import logging
from dataclasses import dataclass
from functools import cache, cached_property
from importlib.util import find_spec
from itertools import accumulate, groupby
from typing import Any

import torch
import torch.nn.attention
import torch.nn.functional as F
from torch import Tensor

from dlm_rag.errors import ConfigError
from dlm_rag.model.store import StoredRows

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Ragged:
    """Where the rows of a packed tensor end: lengths in tokens, in order."""

    lengths: tuple[int, ...]
    device: torch.device

    @cached_property
    def cumulative(self) -> Tensor:
        """(rows + 1,) int32 on the device: 0, then the end of each row."""
        return torch.tensor([0, *accumulate(self.lengths)], dtype=torch.int32, device=self.device)

    @cached_property
    def counts(self) -> Tensor:
        """(rows,) int32 on the device: the length of each row."""
        return torch.tensor(self.lengths, dtype=torch.int32, device=self.device)

    @property
    def longest(self) -> int:
        return max(self.lengths)


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    queries: Ragged,
    keys: Ragged,
    backend: str,
    ahead: int | None = None,
    stored: StoredRows | None = None,
) -> Tensor:
    """Row r of `q` (Tq, H, D) attends to row r of `k`, `v` (Tk, Hk, D); returns (Tq, H, D).

    With `stored`, `k` and `v` are the slots (slots, capacity, Hk, D) of a `ContextStore`: row r sees the
    first keys.lengths[r] tokens of its slot. ahead: how many tokens after itself each one sees, 0 in a
    causal model, for rows of equal query and key length; None: all. `backend` is one of
    `choose_backend`'s.
    """
    assert ahead is None or queries.lengths == keys.lengths, "such rows see only themselves"
    if ahead is not None and ahead >= keys.longest - 1:
        ahead = None
    return _KERNELS[backend](q, k, v, queries, keys, ahead, stored)


def _sdpa(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    queries: Ragged,
    keys: Ragged,
    ahead: int | None,
    stored: StoredRows | None,
) -> Tensor:
    lengths = list(zip(queries.lengths, keys.lengths, strict=True))
    if stored is None:  # rows of equal lengths behind one another are one call
        runs = [(len(list(same)), *both) for both, same in groupby(lengths)]
        run_keys, run_values = (x.split([rows * n for rows, _, n in runs]) for x in (k, v))
    else:
        runs = [(1, *both) for both in lengths]
        run_keys, run_values = stored.views(k, keys.lengths), stored.views(v, keys.lengths)
    found = []
    run_queries = q.split([rows * n for rows, n, _ in runs])
    for (rows, n, seen), *packed in zip(runs, run_queries, run_keys, run_values, strict=True):
        run_q, run_k, run_v = (
            x.unflatten(0, (rows, length)).transpose(1, 2)
            for x, length in zip(packed, (n, seen, seen), strict=True)
        )
        mask = _window(ahead, n, q.device)
        out = F.scaled_dot_product_attention(
            run_q, run_k, run_v, mask, is_causal=ahead == 0, enable_gqa=True
        )
        found.append(out.transpose(1, 2).flatten(0, 1))
    return found[0] if len(found) == 1 else torch.cat(found)


def _window(ahead: int | None, length: int, device: torch.device) -> Tensor | None:
    """(length, length) who sees whom; None where the kernel needs no mask for it."""
    if not ahead:
        return None
    place = torch.arange(length, device=device)
    return place[None, :] <= place[:, None] + ahead


def _varlen(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    queries: Ragged,
    keys: Ragged,
    ahead: int | None,
    stored: StoredRows | None,
) -> Tensor:
    from torch.nn.attention.varlen import varlen_attn

    options: dict[str, Any] = {}
    if "num_splits" in inspect.signature(varlen_attn).parameters:
        options["num_splits"] = 1  # else rounding would depend on the other rows
    paged = stored is not None and _torch_reads_pages()
    if stored is not None and paged:
        options |= {"seqused_k": keys.counts, "block_table": stored.table}
    elif stored is not None:
        k, v = (torch.cat(stored.views(x, keys.lengths)) for x in (k, v))
    out = varlen_attn(
        q, k, v, queries.cumulative, None if paged else keys.cumulative, queries.longest, keys.longest,
        window_size=(-1, -1 if ahead is None else ahead), enable_gqa=q.shape[1] != k.shape[-2], **options,
    )  # fmt: skip
    assert isinstance(out, Tensor)
    return out


def _flash(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    queries: Ragged,
    keys: Ragged,
    ahead: int | None,
    stored: StoredRows | None,
) -> Tensor:
    from flash_attn import flash_attn_varlen_func

    table = None if stored is None else stored.table
    return flash_attn_varlen_func(
        q, k, v, queries.cumulative, keys.cumulative, queries.longest, keys.longest,
        window_size=(-1, -1 if ahead is None else ahead), block_table=table,
    )  # fmt: skip


def _torch_reads_pages() -> bool:
    """Whether FlashAttention 3 or 4 is active in torch: its own FlashAttention 2 has no block tables."""
    return torch.nn.attention.current_flash_attention_impl() in ("FA3", "FA4")


_KERNELS = {"sdpa": _sdpa, "varlen": _varlen, "flash": _flash}


def choose_backend(requested: str, device: torch.device, dtype: torch.dtype) -> str:
    """The kernel to use: `requested`, or for "auto" the first of flash, varlen, sdpa that works here.

    Raises `ConfigError` when a kernel is asked for by name and cannot run here.
    """
    if requested != "auto":
        reason = _missing(requested, device, dtype)
        if reason:
            raise ConfigError(f"attention={requested} cannot be used here: {reason}")
        return requested
    return _first_working(device, dtype)


@cache
def _first_working(device: torch.device, dtype: torch.dtype) -> str:
    chosen = next(name for name in ("flash", "varlen", "sdpa") if not _missing(name, device, dtype))
    log.info("attention kernel: %s on %s in %s", chosen, device, dtype)
    return chosen


@cache
def _missing(backend: str, device: torch.device, dtype: torch.dtype) -> str:
    if backend == "sdpa":
        return ""
    if device.type != "cuda" or dtype not in (torch.float16, torch.bfloat16):
        return "it needs a CUDA device and dtype=bfloat16 or float16; set attention=sdpa"
    if torch.cuda.get_device_capability(device) < (8, 0):
        return "it needs compute capability 8.0 or newer; set attention=sdpa"
    if backend == "flash":
        return "" if find_spec("flash_attn") else "install it with `pip install 'dlm_rag[flash]'`"
    if not find_spec("torch.nn.attention.varlen"):
        return "this torch has no variable-length kernel; install torch 2.12 or newer"
    from torch.nn.attention.varlen import varlen_attn

    known = inspect.signature(varlen_attn).parameters
    return "" if "enable_gqa" in known else "it needs torch 2.12 or newer"
