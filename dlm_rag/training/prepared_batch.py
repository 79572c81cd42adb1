"""A microbatch with all that the host makes for it, ready to travel: from worker processes, to a GPU."""

import gc
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch.utils.data import DataLoader

from dlm_rag.model.device_io import to_device
from dlm_rag.model.kv_store import SharedContext, make_consecutive_ranges
from dlm_rag.model.packed_batch import PackedRows, map_arrays, pack_rows
from dlm_rag.training.data.examples import Example
from dlm_rag.training.losses import count_examples, lay_out_examples, list_supervision, locate_pointers

CPU = torch.device("cpu")
PREFETCHED_STEPS = 3  # of each worker


@dataclass(frozen=True)
class PreparedBatch:
    """What `MaskedObjective` needs of some examples; arrays until they are `moved`.

    contexts: segments that rows share, None without any. canvases: the rows, whose context is to come.
    pointers: of each row. arrays: of the supervised tokens targets, weights and whether they can be copied,
    then the pointers' places, as `list_supervision` and `locate_pointers` give them.
    """

    counts: dict[str, float]
    contexts: PackedRows | None
    canvases: PackedRows
    pointers: tuple[int, ...]
    arrays: tuple[Any, ...]

    def moved(self, device: torch.device) -> "PreparedBatch":
        """The same with tensors on a device, in one copy."""
        arrays: list[NDArray[Any]] = []
        map_arrays(self, lambda array: arrays.append(array))
        there = iter(to_device(arrays, device))
        return map_arrays(self, lambda _: next(there))


def prepare_batch(
    examples: Sequence[Example], shape: Any, layout: str, end_ids: frozenset[int], end_weight: float
) -> PreparedBatch:
    """Lays out and packs examples on the host.

    shape: the `DenoiserConfig`. end_weight: what an end token counts in the loss, where others count 1.
    """
    states = lay_out_examples(examples, shape, layout)
    segments = list(dict.fromkeys(segment for row in states for segment in row.context_segments))
    segments.sort(key=lambda segment: len(segment.ids))
    contexts, context = None, None
    if segments:
        at = dict(zip(segments, make_consecutive_ranges([len(s.ids) for s in segments]), strict=True))
        ranges = [[at[segment] for segment in row.context_segments] for row in states]
        total = sum(len(segment.ids) for segment in segments)
        stand_in: Any = [(range(total),)]  # of keys and values there is only the number yet
        context = SharedContext(stand_in, ranges)
        contexts = pack_rows(segments, CPU, read=[()] * len(segments))
    places = [list(example.supervised_positions) for example in examples]
    asked = [[row.find_state(n) for n in read] for row, read in zip(states, places, strict=True)]
    canvases = pack_rows([row.canvas_segment for row in states], CPU, asked, context)
    pointers, where = locate_pointers(examples, states)
    batch = PreparedBatch(
        count_examples(examples, end_ids, end_weight), contexts, replace(canvases, context=None),
        tuple(pointers), (*list_supervision(examples, places, end_ids, end_weight), where),
    )  # fmt: skip
    return map_arrays(batch, lambda array: array if isinstance(array, np.ndarray) else array.numpy())


def make_in_workers(make: Callable[[Any], Any], steps: range, workers: int) -> Iterator[Any]:
    """What `make` gives for each step, in order, made ahead by so many forked processes."""
    numbers: Any = range(steps.stop)
    return iter(
        DataLoader(
            numbers,
            batch_size=None,
            sampler=steps,
            num_workers=workers,
            collate_fn=make,
            prefetch_factor=PREFETCHED_STEPS,
            worker_init_fn=_begin,
            multiprocessing_context="fork",
        )
    )


def _begin(worker: int) -> None:
    torch.set_num_threads(1)
    gc.freeze()  # what was opened before stays: looking through it took half of a worker's time
