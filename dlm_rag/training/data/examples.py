"""A training row: how its canvas, masks and evidence are drawn, what it copies; typical rows for plans."""

import random
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import takewhile

from dlm_rag.config import TrainConfig
from dlm_rag.evidence.prompt_segments import LaidOutPrompt
from dlm_rag.model.denoiser_config import DenoiserConfig
from dlm_rag.retrieval.corpus import Passage
from dlm_rag.tokenizer import Prompt

FULL_CANVAS_SHARE = 0.2  # share of rows with the whole canvas; others end soon after their response
UNIFORM_MASK_SHARE = 0.5  # share of rows masked at a uniform time; in others all after a cut is masked
STRAY_MASK_SHARE = 0.05  # share of the positions before the cut that are masked all the same
RETRIEVAL_CUT_SHARE = 0.6  # share of rows that are cut where the response stood when the evidence was found
MIN_COPY_TOKENS = 3  # tokens in a row that a response and a passage share
LONG_QUESTION_TOKENS = 64  # a long question of a world; small vocabularies need up to twice as many
MAX_LOOKAHEAD_BLOCKS = 3  # masked blocks after the current one, at most


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
    supervised: tuple[bool, ...] | None = None  # None: what is hidden
    finished: int = 0  # positions at its start that are whole finished blocks, where attention has blocks

    @cached_property
    def supervised_positions(self) -> tuple[int, ...]:
        """The supervised canvas positions, ascending."""
        counted = self.masked if self.supervised is None else self.supervised
        return tuple(place for place, counts in enumerate(counted) if counts)

    @property
    def supervised_pointers(self) -> list[Pointer]:
        """The pointers of supervised positions."""
        places = set(self.supervised_positions)
        return [pointer for pointer in self.pointers if pointer.position in places]

    def canvas(self, mask_id: int) -> list[int]:
        """What the denoiser sees of the target."""
        return [mask_id if hide else token for token, hide in zip(self.target, self.masked, strict=True)]


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
    rng: random.Random, used: int, longest: int, stands: int, block: int, first: int
) -> tuple[tuple[bool, ...], int]:
    """Which positions of a canvas that attention takes in blocks are masked, and how many are finished.

    One block is under work, masked in part; those before are finished, those after it (a few: what queries
    may guess at) masked. used, stands: as for `draw_random_mask`; first: positions of the first block. The
    canvas is as long as what is returned.
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


def make_masked_canvas(
    rng: random.Random, ids: list[int], stands: int, laid: LaidOutPrompt, shape: DenoiserConfig,
    end_id: int | None,
) -> tuple[tuple[int, ...], tuple[bool, ...], int]:  # fmt: skip
    """A canvas around a response, which of it is masked, and how many positions are finished blocks.

    laid: the prompt before it.
    """
    assert end_id is not None, "a tokenizer without an end token"
    if shape.block_size is None:
        target = make_padded_canvas(rng, ids, shape.canvas_length, end_id)
        return tuple(target), draw_random_mask(rng, len(ids), len(target), stands), 0
    block, first = shape.block_size, laid.block_bounds(0)[1]
    hidden, finished = draw_block_mask(rng, len(ids), shape.canvas_length, stands, block, first)
    padded = ids + [end_id] * shape.canvas_length
    return tuple(padded[: len(hidden)]), hidden, finished


def make_padded_canvas(rng: random.Random, ids: list[int], longest: int, end_id: int) -> list[int]:
    """A response with end tokens after it: a few, or now and then up to the whole canvas."""
    length = longest if rng.random() < FULL_CANVAS_SHARE else min(longest, len(ids) + rng.randint(1, 10))
    return (ids + [end_id] * length)[:length]


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


def find_copy_pointers(ids: Sequence[int], facts: Sequence[Sequence[int]]) -> tuple[Pointer, ...]:
    """Where a passage spells out the tokens `ids` of a response, run by run, each as long as can be.

    Of equally long runs the one in the first passage counts, there the first. Runs of fewer than
    `MIN_COPY_TOKENS` tokens may be chance and have no pointers.
    """
    places: dict[tuple[int, ...], list[tuple[int, int]]] = {}
    for row, fact in enumerate(facts):
        for at in range(len(fact) - MIN_COPY_TOKENS + 1):
            places.setdefault(tuple(fact[at : at + MIN_COPY_TOKENS]), []).append((row, at))
    found: list[Pointer] = []
    position = 0
    while position < len(ids):
        starts = places.get(tuple(ids[position : position + MIN_COPY_TOKENS]), ())
        runs = [(_count_common_tokens(ids, position, facts[row], at), row, at) for row, at in starts]
        length, row, at = max(runs, key=lambda run: run[0], default=(1, 0, 0))
        if runs:
            found += [Pointer(position + n, row, at + n) for n in range(length)]
        position += length
    return tuple(found)


def _count_common_tokens(ids: Sequence[int], position: int, fact: Sequence[int], at: int) -> int:
    """How many tokens agree from there on."""
    pairs = zip(ids[position:], fact[at:], strict=False)
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))


def sample_document_rows(shape: DenoiserConfig, length: int, count: int) -> list[Example]:
    """`count` packed sequences of `length` tokens."""
    rng, hidden = random.Random(0), tuple(n % 2 == 0 for n in range(length))
    return [
        Example(Prompt((), (), ()), _draw_ids(rng, shape, length), hidden, (), 1.0, float(length))
        for _ in range(count)
    ]


def sample_prompt_rows(
    shape: DenoiserConfig, train: TrainConfig, top_k: int, rows: Sequence[int], searched: int = 1
) -> list[Example]:
    """Rows of items, `rows[n]` of item n; searched: how many times `top_k` passages an item has.

    Rows of an item with one search have their own questions; with several, one question.
    """
    rng, hidden = random.Random(0), tuple(n % 2 == 0 for n in range(shape.canvas_length))
    found = []
    for count in rows:
        passages = [_draw_ids(rng, shape, train.passage_length) for _ in range(searched * top_k)]
        asked = count if searched == 1 else 1
        questions = [_draw_ids(rng, shape, LONG_QUESTION_TOKENS) for _ in range(asked)]
        for row in range(count):
            first = row % ((searched - 1) * top_k + 1)
            facts = tuple(passages[first : first + top_k])
            prompt = Prompt(questions[row % len(questions)], facts, ())
            found.append(Example(prompt, _draw_ids(rng, shape, shape.canvas_length), hidden))
    return found


def _draw_ids(rng: random.Random, shape: DenoiserConfig, length: int) -> tuple[int, ...]:
    return tuple(rng.randrange(shape.vocab_size) for _ in range(length))
