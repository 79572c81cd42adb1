"""The layers of a step as CUDA graphs: captured once for each size, replayed for any rows of that size.

Rows stay ragged. What is missing to the size of a graph is tokens of no row, rows without tokens, and a
dump that nobody sees as their places. All that a step reads travels in one copy. A graph knows the numbers
of the host that it was captured with, so its key holds them all: the sizes and the longest row; all graphs
go when the memory has moved. Head and sampling stay eager, and so do steps of more than `MAX_TOKENS`.

On a CPU the layers run over the same padded tensors without a graph, which is how the tests see them.
"""

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from dlm_rag.config import EngineConfig
from dlm_rag.engine.cache import KVMemory
from dlm_rag.errors import ConfigError
from dlm_rag.model.denoiser import Denoiser
from dlm_rag.model.denoiser_config import DenoiserConfig
from dlm_rag.model.packed_batch import PackedRows, to_device

SIZES_AN_OCTAVE = 4  # of tokens: a tenth is padding on average, a quarter at most
MAX_TOKENS = 8192  # of a graph; a larger step keeps the device busy as it is
# What each array of `pack_rows` is as long as, and what fills it up: the dump, or the last end again.
DUMP, LAST = "dump", "last"
PADDING: dict[str, tuple[str, int | str]] = {
    "ids": ("tokens", 0), "positions": ("tokens", 0), "places": ("tokens", DUMP), "limits": ("tokens", 1),
    "seen": ("keys", DUMP), "read": ("reads", 0), "last_limits": ("reads", 1),
    "queries": ("ends", LAST), "keys": ("ends", LAST), "reads": ("ends", LAST),
}  # fmt: skip


def round_up_size(count: int, sizes_an_octave: int = SIZES_AN_OCTAVE) -> int:
    """The next of so many sizes between powers of two; at least 8."""
    count = max(8, count)
    unit = max(1, (1 << ((count - 1).bit_length() - 1)) // sizes_an_octave)
    return -(-count // unit) * unit


@dataclass
class _Graph:
    """A captured step: the tensors that it reads, its output, and what runs it."""

    given: list[Tensor]
    output: Tensor
    replay: Callable[[], Any]


def check_step_graphs(
    engine: EngineConfig, shape: DenoiserConfig, attention: str, devices: Collection[torch.device]
) -> None:
    """Raises `ConfigError` where `engine.cuda_graphs` is set and no graph can hold the model's layers.

    attention: the kernel that was chosen. devices: where the layers are.
    """
    kernel = attention == "indexed" and engine.cache_dtype == "auto"
    layers = not engine.compile and shape.experts is None and len({*devices}) == 1
    if engine.cuda_graphs and not (kernel and layers):
        raise ConfigError(
            "engine.cuda_graphs=true needs model.attn_implementation=indexed, engine.cache_dtype=auto, one "
            "device, and neither engine.compile nor a mixture of experts"
        )


class StepGraphs:
    """The graphs of one memory of keys and values; to be made anew when weights are replaced."""

    def __init__(self, denoiser: Denoiser, memory: KVMemory) -> None:
        self._denoiser, self._memory = denoiser, memory
        self._graphs: dict[Any, _Graph] = {}
        # Rows on their way: the key of their graph, tokens that are read, the longest rows, tensors.
        self._sent: tuple[Any, int, list[int], list[Tensor]] | None = None
        self._address = 0
        self._pool = torch.cuda.graph_pool_handle() if denoiser.device.type == "cuda" else None

    def __len__(self) -> int:
        return len(self._graphs)

    def send(self, arrays: Mapping[str, NDArray[Any]]) -> list[Tensor]:
        """The arrays of `pack_rows` on the device, padded to the sizes of a graph if it is to have one."""
        device = self._denoiser.device
        if len(arrays["ids"]) > MAX_TOKENS:
            self._sent = None
            return to_device([*arrays.values()], device)
        if (address := self._memory.layer(0).data_ptr()) != self._address:
            self._graphs.clear()  # the memory has grown, and lies elsewhere
            self._address = address
        sizes = {
            "tokens": round_up_size(len(arrays["ids"]) + 1),
            "keys": round_up_size(int(arrays["keys"][-1]) + 1, 1),
            "reads": round_up_size(len(arrays["read"]), 1),
            "ends": round_up_size(len(arrays["queries"]) - 1, 1) + 1,
        }
        padded = {name: self._pad(name, array, sizes) for name, array in arrays.items()}
        longest = [round_up_size(int(np.diff(arrays[name]).max()), 1) for name in ("queries", "reads")]
        found = to_device([*padded.values()], device)
        self._sent = (*sizes.values(), *longest, *padded), len(arrays["read"]), longest, found
        return found

    def encode(self, rows: PackedRows) -> Tensor:
        """The hidden states that are read, (n, hidden), of the rows that were sent last."""
        if self._sent is None:
            return self._denoiser.encode(rows)[0]
        key, reads, longest, tensors = self._sent
        held = self._graphs.get(key)
        if held is None:
            held = self._graphs[key] = self._capture(rows, longest, tensors)
        elif self._pool is not None:  # all lie in one buffer, in the same order
            new, old = (
                x.new_empty(0, dtype=torch.uint8).set_(x.untyped_storage())
                for x in (tensors[0], held.given[0])
            )
            old.copy_(new)
        else:
            for new, old in zip(tensors, held.given, strict=True):
                old.copy_(new)
        held.replay()
        self._denoiser.count_work(rows)
        return held.output[:reads]

    def _pad(self, name: str, array: NDArray[Any], sizes: Mapping[str, int]) -> NDArray[Any]:
        kind, value = PADDING[name]
        if isinstance(value, str):
            value = self._memory.dump if value == DUMP else array[-1]
        return np.concatenate((array, np.full(sizes[kind] - len(array), value, dtype=array.dtype)))

    def _capture(self, rows: PackedRows, longest: list[int], tensors: list[Tensor]) -> _Graph:
        """Captures the layers over these tensors, after one run that sets up kernels and libraries."""
        denoiser, work = self._denoiser, self._denoiser.flop_count
        sight, last = rows.attention_metadata, rows.last_layer_metadata
        whole = replace(sight, query_lengths=(longest[0],))
        top = whole if last is sight else replace(last, query_lengths=(longest[1],))
        shown = replace(rows, attention_metadata=whole, last_layer_metadata=top)
        if self._pool is None:
            output = denoiser.encode(shown)[0]
            found = _Graph(tensors, output, lambda: output.copy_(denoiser.encode(shown)[0]))
        else:
            aside = torch.cuda.Stream(denoiser.device)
            aside.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(aside):
                denoiser.encode(shown)
            torch.cuda.current_stream().wait_stream(aside)
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, pool=self._pool):
                output = denoiser.encode(shown)[0]
            found = _Graph(tensors, output, graph.replay)
        denoiser.flop_count = work
        return found
