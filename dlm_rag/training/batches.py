"""Training rows and their batches.

How canvas, masks and evidence of a row are drawn, and what it copies; typical rows for plans; a batch with
all that the host makes for its loss.
"""

import random
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from itertools import accumulate
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dlm_rag.evidence.encode_segments import run_starts
from dlm_rag.evidence.prompt_segments import (
    ContextBudget,
    LaidOutRow,
    lay_out_prompt,
    truncate_evidence,
)
from dlm_rag.model.denoiser_config import DenoiserConfig
from dlm_rag.retrieval.corpus import Passage
from dlm_rag.tokenizer import Prompt, Tokenizer

Sums = dict[str, float]
FULL_CANVAS_SHARE = 0.2  # share of rows with the whole canvas; others end soon after their response
UNIFORM_MASK_SHARE = 0.5  # share of rows masked at a uniform time; in others all after a cut is masked
STRAY_MASK_SHARE = 0.05  # share of the positions before the cut that are masked all the same
RETRIEVAL_CUT_SHARE = 0.6  # share of rows that are cut where the response stood when the evidence was found
LONG_QUESTION_TOKENS = 64  # a long question of a world; small vocabularies need up to twice as many
MAX_LOOKAHEAD_BLOCKS = 3  # masked blocks after the current one, at most
MIN_MASK_TIME = 1e-3  # below it a token of a short row would count too much


@dataclass(frozen=True)
class Pointer:
    """A token of the response that can be copied: its canvas position and where it stands."""

    position: int
    fact: int  # index of the passage in the prompt
    token: int  # index of the token in that fact


@dataclass(frozen=True)
class Example:
    """One row: a prompt, the true canvas, what of it the denoiser does not see, what counts in the loss.

    In the loss of a step each supervised token counts `weight`, and the row adds `divisor` to what the sum
    is divided by; None: what its supervised tokens count.
    """

    prompt: Prompt
    target: tuple[int, ...]
    masked: tuple[bool, ...]  # shown as the mask token
    pointers: tuple[Pointer, ...] = ()
    weight: float = 1.0
    divisor: float | None = None
    finished: int = 0  # positions at its start that are whole finished blocks, where attention has blocks

    @cached_property
    def supervised_positions(self) -> tuple[int, ...]:
        """The supervised canvas positions: those that are hidden, ascending."""
        return tuple(place for place, hidden in enumerate(self.masked) if hidden)

    @property
    def supervised_pointers(self) -> list[Pointer]:
        """The pointers of supervised positions."""
        return [pointer for pointer in self.pointers if self.masked[pointer.position]]

    def canvas(self, mask_id: int) -> list[int]:
        """What the denoiser sees of the target."""
        pairs = zip(self.masked, self.target, strict=True)
        return [mask_id if hidden else token for hidden, token in pairs]


def mask_at_time(prompt: Prompt, target: Sequence[int], time: float, rng: np.random.Generator) -> Example:
    """A row for the NELBO: each token masked with probability t, weighted by 1 / t, divided by the length.

    t, which `time` in [0, 1) stands for, is not below `MIN_MASK_TIME`. A token is untouched with
    probability alpha(t) = 1 - t (the linear schedule of LLaDA, arXiv 2502.09992); the continuous-time NELBO
    weights a masked one by -alpha'(t) / (1 - alpha(t)) (MDLM, arXiv 2406.07524, eq. 10).
    """
    t = MIN_MASK_TIME + (1 - MIN_MASK_TIME) * time
    masked = rng.random(len(target)) >= 1 - t
    return Example(prompt, tuple(target), tuple(masked.tolist()), (), 1 / t, float(len(target)))


def draw_random_mask(rng: random.Random, used: int, length: int, stands: int) -> tuple[bool, ...]:
    """Which positions of a canvas are masked: each with the same probability, or all after a cut.

    used: tokens of the response. stands: how many of them stood when the evidence was found.
    """
    if rng.random() < UNIFORM_MASK_SHARE:
        time = rng.random()
        masked = [rng.random() < time for _ in range(length)]
    else:
        cut = rng.choice((0, rng.randrange(used)))
        if stands and rng.random() < RETRIEVAL_CUT_SHARE:
            cut = stands
        masked = [position >= cut or rng.random() < STRAY_MASK_SHARE for position in range(length)]
    if not any(masked):
        masked[rng.randrange(length)] = True
    return tuple(masked)


def draw_block_mask(
    rng: random.Random, used: int, stands: int, longest: int, block: int, first: int
) -> tuple[tuple[bool, ...], int]:
    """Which positions of a canvas that attention takes in blocks are masked, and how many are finished.

    One block is under work, masked in part; those before are finished, those after it (a few: what queries
    may guess at) masked. The canvas, of at most `longest` positions, is as long as what is returned. used,
    stands: as for `draw_random_mask`; first: positions of the first block.
    """
    cut = rng.randrange(used + 1)
    if stands and rng.random() < RETRIEVAL_CUT_SHARE:
        cut = stands
    cut = min(cut, longest - 1)
    finished = 0 if cut < first else first + (cut - first) // block * block
    end = min(longest, finished + block if finished else first)
    stop = min(longest, end + block * rng.randrange(MAX_LOOKAHEAD_BLOCKS + 1))
    uniform = rng.random() < UNIFORM_MASK_SHARE
    time = rng.random() if uniform else STRAY_MASK_SHARE
    masked = [rng.random() < time or (n >= cut and not uniform) for n in range(finished, end)]
    if not any(masked):
        masked[rng.randrange(len(masked))] = True
    return (*[False] * finished, *masked, *[True] * (stop - end)), finished


@dataclass(frozen=True)
class ExampleBuilder:
    """Makes the prompts and rows of a denoiser."""

    tokenizer: Tokenizer
    shape: DenoiserConfig

    def build_prompt(self, question: str, passages: Iterable[str]) -> Prompt:
        """As decoding has it; raises `QuestionError` for a question that does not fit."""
        prompt = self.tokenizer.build_prompt(question, list(passages))
        return truncate_evidence(prompt, ContextBudget.from_config(self.shape))[0]

    def build_example(
        self, rng: random.Random, prompt: Prompt, ids: list[int], stands: int, pointers: Iterable[Pointer]
    ) -> Example:
        """A row of the response `ids`, of which `stands` tokens stood when the evidence was found."""
        shape, end_id, finished = self.shape, self.tokenizer.end_id, 0
        assert end_id is not None, "a tokenizer without an end token"
        if shape.block_size is None:
            length = shape.canvas_length  # in some rows; others have a few end tokens
            if rng.random() >= FULL_CANVAS_SHARE:
                length = min(length, len(ids) + rng.randint(1, 10))
            masked = draw_random_mask(rng, len(ids), length, stands)
        else:
            first = lay_out_prompt(prompt, shape).block_bounds(0)[1]
            blocks = shape.canvas_length, shape.block_size, first
            masked, finished = draw_block_mask(rng, len(ids), stands, *blocks)
        target = (*ids, *[end_id] * len(masked))[: len(masked)]
        there = tuple(pointer for pointer in pointers if pointer.position < len(target))
        return Example(prompt, target, masked, there, finished=finished)


def sample_passages(
    rng: random.Random, found: Sequence[Passage], needed: Collection[str], count: int
) -> list[Passage]:
    """`count` of the passages that were found (all where they are fewer), in any order.

    needed: ids of those that are kept where they were found; the others are sampled.
    """
    kept = [passage for passage in found if passage.id in needed][-count:]
    others = [passage for passage in found if passage not in kept]
    rng.shuffle(others)
    evidence = kept + others[: count - len(kept)]
    rng.shuffle(evidence)
    return evidence


def sample_document_rows(shape: DenoiserConfig, length: int, count: int) -> list[Example]:
    """`count` packed sequences of `length` tokens."""
    rng, hidden = random.Random(0), tuple(n % 2 == 0 for n in range(length))
    targets = (tuple(rng.choices(range(shape.vocab_size), k=length)) for _ in range(count))
    return [Example(Prompt((), (), ()), target, hidden, (), 1.0, float(length)) for target in targets]


def sample_prompt_rows(
    shape: DenoiserConfig, top_k: int, items: int, rows: int, searches: int = 1
) -> list[Example]:
    """`rows` of each of some items; searches: how many times `top_k` passages an item has.

    Rows of an item with one search have their own questions; with several, one question.
    """
    draw = partial(random.Random(0).choices, range(shape.vocab_size))
    hidden, found = tuple(n % 2 == 0 for n in range(shape.canvas_length)), []
    for _ in range(items):
        passages = [tuple(draw(k=shape.passage_length)) for _ in range(searches * top_k)]
        questions = [tuple(draw(k=LONG_QUESTION_TOKENS)) for _ in range(rows if searches == 1 else 1)]
        for row in range(rows):
            first = row % ((searches - 1) * top_k + 1)
            prompt = Prompt(questions[row % len(questions)], tuple(passages[first : first + top_k]), ())
            found.append(Example(prompt, tuple(draw(k=shape.canvas_length)), hidden))
    return found


@dataclass(frozen=True)
class LossWeights:
    """What the parts of the loss count in a step."""

    end_token: float = 1.0  # of an end token, where a token counts 1
    pointer: float = 0.0


@dataclass(frozen=True)
class MaskedBatch:
    """Rows as the denoiser runs them, and what their loss needs.

    counts: as `Task` says; `divisor`: what the losses of tokens are divided by; `pointed`: supervised
    tokens that a passage in the prompt spells out. read: supervised positions of each row, n in all.
    supervision: (n,) targets, weights, and whether a token can be copied. pointers, places: of
    `locate_pointers`.
    """

    states: list[LaidOutRow]
    read: list[tuple[int, ...]]
    supervision: list[NDArray[Any]]
    pointers: list[int]
    places: NDArray[np.int64]
    pointer_weight: float
    counts: Sums


def make_masked_batch(
    examples: Sequence[Example],
    shape: DenoiserConfig,
    layout: str,
    end_ids: Collection[int] = (),
    weights: LossWeights = LossWeights(),
) -> MaskedBatch:
    """Lays out the rows of a batch; what is in `end_ids` counts as an end token."""
    states = lay_out_examples(examples, shape, layout)
    supervised, divisor = list[tuple[int, float, bool]](), 0.0
    for example in examples:
        copied = {pointer.position for pointer in example.pointers}
        shares = [weights.end_token if token in end_ids else 1.0 for token in example.target]
        found = [(example.target[n], shares[n], n in copied) for n in example.supervised_positions]
        divisor += sum(share for _, share, _ in found) if example.divisor is None else example.divisor
        supervised += [(token, example.weight * share, known) for token, share, known in found]
    columns = zip(*supervised, strict=True) if supervised else ((), (), ())
    dtypes = (np.int64, np.float32, np.bool_)
    counts = {
        "rows": float(len(examples)),
        "tokens": float(sum(len(example.prompt) + len(example.target) for example in examples)),
        "supervised": float(len(supervised)),
        "divisor": float(divisor),
        "pointed": float(sum(known for _, _, known in supervised)),
    }
    return MaskedBatch(
        states,
        [example.supervised_positions for example in examples],
        [np.array(column, dtype) for column, dtype in zip(columns, dtypes, strict=True)],
        *locate_pointers(examples, states),
        weights.pointer,
        counts,
    )


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
