"""A batch with all that the host makes for it, ready to travel to the device; made ahead of its step."""

import gc
from collections.abc import Callable, Hashable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch.utils.data import DataLoader

from dlm_rag.evidence.encode_segments import run_starts
from dlm_rag.evidence.prompt_segments import LaidOutRow, lay_out_prompt
from dlm_rag.model.denoiser_config import DenoiserConfig
from dlm_rag.model.device_io import make_consecutive_ranges, to_device
from dlm_rag.model.packed_batch import (
    PackedRows,
    SharedContext,
    map_arrays,
    pack_rows,
)
from dlm_rag.training.examples import Example

CPU = torch.device("cpu")
PREFETCHED_STEPS = 3  # steps that each worker process makes ahead
Sums = dict[str, float]


@dataclass(frozen=True)
class LossWeights:
    """What the parts of the loss count in a step."""

    end_token: float = 1.0  # of an end token, where a token counts 1
    pointer: float = 0.0


@dataclass(frozen=True)
class PreparedBatch:
    """What `MaskedObjective` needs of some examples; arrays until they are `moved`.

    counts: as `count_examples`. contexts: segments that rows share, None without any. canvases: the rows,
    whose context is to come. pointers: of each row.
    supervision: of the supervised tokens (n,) targets, weights and whether they can be copied. places: of
    the pointers, as `locate_pointers` gives them.
    """

    counts: Sums
    weights: LossWeights
    contexts: PackedRows | None
    canvases: PackedRows
    pointers: list[int]
    supervision: tuple[Any, ...]
    places: Any

    def moved(self, device: torch.device) -> "PreparedBatch":
        """The same with tensors on a device, in one copy."""
        arrays: list[NDArray[Any]] = []
        map_arrays(self, lambda array: arrays.append(array))
        there = iter(to_device(arrays, device))
        return map_arrays(self, lambda _: next(there))


@dataclass(frozen=True)
class BatchMaker:
    """Lays out and packs examples on the host."""

    shape: DenoiserConfig
    layout: str
    end_ids: frozenset[int]

    def prepare(self, examples: Sequence[Example], weights: LossWeights) -> PreparedBatch:
        """The batch of some rows."""
        states = lay_out_examples(examples, self.shape, self.layout)
        places = [list(example.supervised_positions) for example in examples]
        asked = [[row.find_state(n) for n in read] for row, read in zip(states, places, strict=True)]
        pointers, pointed = locate_pointers(examples, states)
        runs = [row.canvas_segment for row in states]
        contexts, context = None, None
        if segments := list(dict.fromkeys(segment for row in states for segment in row.context_segments)):
            segments.sort(key=lambda segment: len(segment.ids))  # equal lengths are attended to together
            sizes = [len(segment.ids) for segment in segments]
            at = dict(zip(segments, make_consecutive_ranges(sizes), strict=True))
            ranges = [[at[segment] for segment in row.context_segments] for row in states]
            stand_in: Any = [(range(sum(sizes)),)]  # of keys and values there is only the number yet
            contexts = pack_rows(segments, CPU, read=[()] * len(segments))
            context = SharedContext(stand_in, ranges)
        canvases = replace(pack_rows(runs, CPU, asked, context), context=None)
        supervision = list_supervision(examples, places, self.end_ids, weights.end_token)
        counts = count_examples(examples, self.end_ids, weights.end_token)
        batch = PreparedBatch(counts, weights, contexts, canvases, pointers, supervision, pointed)
        return map_arrays(batch, lambda array: array if isinstance(array, np.ndarray) else array.numpy())


def lay_out_examples(examples: Sequence[Example], shape: DenoiserConfig, layout: str) -> list[LaidOutRow]:
    """What the denoiser runs for each example."""
    assert shape.mask_token_id is not None
    return [
        lay_out_prompt(example.prompt, shape, layout).build_row(
            example.canvas(shape.mask_token_id), example.finished, shape.shifted
        )
        for example in examples
    ]


def locate_pointers(
    examples: Sequence[Example], states: Sequence[LaidOutRow]
) -> tuple[list[int], NDArray[np.int64]]:
    """How many pointers each row has, p in all; and (6, p): their packed query; of the row's keys the first
    and last + 1 of the passage, and the token; the row, and the place among its pointers.
    """
    found = []
    laid_out = zip(examples, states, run_starts(states), strict=True)
    for row, (example, state, start) in enumerate(laid_out):
        facts, head = example.prompt.facts, len(example.prompt.head)
        # Where the prompt is in one piece, the passages follow its head; else each is a segment.
        bounds = dict(zip(range(len(facts)), accumulate(map(len, facts), initial=head), strict=False))
        ends = accumulate((len(segment.ids) for segment in state.context_segments), initial=0)
        at = dict(zip(((s.ids, s.start) for s in state.context_segments), ends, strict=False))
        for slot, pointer in enumerate(example.supervised_pointers):
            fact = facts[pointer.fact]
            first = at.get((fact, 0), bounds[pointer.fact])
            span = first, first + len(fact), first + pointer.token
            found.append((start + state.find_state(pointer.position), *span, row, slot))
    counts = [len(example.supervised_pointers) for example in examples]
    return counts, np.array(found, dtype=np.int64).reshape(-1, 6).T


def count_examples(examples: Sequence[Example], end_ids: frozenset[int], end_weight: float) -> Sums:
    """What is known of examples before the denoiser has seen them.

    supervised: tokens. divisor: of their losses, which counts them by weight, or all of a document.
    pointed: those that a passage in the prompt spells out. tokens: of prompts and canvases.
    """
    found = dict.fromkeys(("supervised", "divisor", "pointed", "tokens", "rows"), 0.0)
    for example in examples:
        targets = [example.target[n] for n in example.supervised_positions]
        counted = sum(end_weight if token in end_ids else 1.0 for token in targets)
        found["supervised"] += len(targets)
        found["divisor"] += counted if example.divisor is None else example.divisor
        found["pointed"] += len({pointer.position for pointer in example.supervised_pointers})
        found["tokens"] += len(example.prompt) + len(example.target)
        found["rows"] += 1
    return found


def list_supervision(
    examples: Sequence[Example], places: Sequence[Sequence[int]], end_ids: frozenset[int], end_weight: float
) -> tuple[NDArray[Any], ...]:
    """Targets (n,) of the supervised tokens, their weights, and whether they can be copied."""
    found = []
    for example, row in zip(examples, places, strict=True):
        names = {pointer.position for pointer in example.pointers}
        for place in row:
            token = example.target[place]
            weight = example.weight * (end_weight if token in end_ids else 1.0)
            found.append((token, weight, place in names))
    columns = zip(*found, strict=True) if found else ((), (), ())
    dtypes = (np.int64, np.float32, np.bool_)
    return tuple(np.array(column, dtype) for column, dtype in zip(columns, dtypes, strict=True))


class Prefetcher:
    """The batches of the steps of a run, made ahead: by worker processes, or one step ahead by a thread.

    make: the batches of a step, by its number and its conditions. conditions: what batches depend on
    besides the number of their step, from this and the task's state; workers know no state.
    """

    def __init__(
        self, make: Callable[[int, Any], Any], conditions: Callable[[int, Any], Hashable], workers: int
    ) -> None:
        self._make, self._conditions, self._workers = make, conditions, workers
        self._thread = ThreadPoolExecutor(1, "batches")
        self._ahead: dict[tuple[int, Hashable], Future[Any]] = {}  # at most one
        self._made: Iterator[Any] | None = None  # by worker processes

    def take(self, step: int, state: Any, steps: int) -> Any:
        """The batches of this step; `steps`: of the run."""
        if self._workers:
            self._made = self._made or make_in_workers(
                self._make_of_number, range(step, steps), self._workers
            )
            return next(self._made)
        key = step, self._conditions(step, state)
        self.wait()
        ready = self._ahead.get(key)
        found = self._make(*key) if ready is None else ready.result()
        after = step + 1, self._conditions(step + 1, state)
        self._ahead = {after: self._thread.submit(self._make, *after)}
        return found

    def wait(self) -> None:
        """Until the thread is at rest: two searches at once would not do."""
        wait(self._ahead.values())

    def _make_of_number(self, step: int) -> Any:
        return self._make(step, self._conditions(step, {}))


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
            worker_init_fn=_begin_worker,
            multiprocessing_context="fork",
        )
    )


def _begin_worker(worker: int) -> None:
    torch.set_num_threads(1)
    gc.freeze()  # what was opened before stays: looking through it took half of a worker's time
