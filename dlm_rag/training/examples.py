"""A training row: how its canvas, masks and evidence are drawn, what it copies; typical rows for plans."""

import random
from collections import defaultdict
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property, partial

from dlm_rag.evidence.prompt_segments import lay_out_prompt
from dlm_rag.evidence.truncation import ContextBudget, truncate_evidence
from dlm_rag.model.denoiser_config import DenoiserConfig
from dlm_rag.retrieval.corpus import Passage
from dlm_rag.tokenizer import Prompt, Tokenizer

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
    finished: int = 0  # positions at its start that are whole finished blocks, where attention has blocks

    @cached_property
    def supervised_positions(self) -> tuple[int, ...]:
        """The supervised canvas positions: those that are hidden, ascending."""
        return tuple(place for place, hidden in enumerate(self.masked) if hidden)

    @property
    def supervised_pointers(self) -> list[Pointer]:
        """The pointers of supervised positions."""
        places = set(self.supervised_positions)
        return [pointer for pointer in self.pointers if pointer.position in places]

    def canvas(self, mask_id: int) -> list[int]:
        """What the denoiser sees of the target."""
        pairs = zip(self.masked, self.target, strict=True)
        return [mask_id if hidden else token for hidden, token in pairs]


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
        used = min(len(ids) + 1, shape.canvas_length)
        there = tuple(pointer for pointer in pointers if pointer.position < used)
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


class CopyIndex:
    """Where the passages of a prompt have which runs of tokens."""

    def __init__(self, facts: Sequence[Sequence[int]]) -> None:
        self._facts = facts
        self._places = defaultdict[tuple[int, ...], list[tuple[int, int]]](list)
        for row, fact in enumerate(facts):
            runs = zip(*(fact[n:] for n in range(MIN_COPY_TOKENS)), strict=False)
            for at, run in enumerate(runs):
                self._places[run].append((row, at))

    def find(self, ids: Sequence[int]) -> tuple[Pointer, ...]:
        """Where a passage spells out the tokens `ids` of a response, run by run, each as long as can be.

        Of equally long runs the one in the first passage counts, there the first. Runs of fewer than
        `MIN_COPY_TOKENS` tokens may be chance and have no pointers.
        """
        found: list[Pointer] = []
        position = 0
        while position < len(ids):
            starts = self._places.get(tuple(ids[position : position + MIN_COPY_TOKENS]), ())
            runs = [(self._count_run(ids, position, row, at), row, at) for row, at in starts]
            length, row, at = max(runs, key=lambda run: run[0], default=(1, 0, 0))
            if runs:
                found += [Pointer(position + n, row, at + n) for n in range(length)]
            position += length
        return tuple(found)

    def _count_run(self, ids: Sequence[int], position: int, row: int, at: int) -> int:
        """How many tokens agree from there on, `MIN_COPY_TOKENS` at least."""
        fact, length = self._facts[row], MIN_COPY_TOKENS
        most = min(len(ids) - position, len(fact) - at)
        while length < most and ids[position + length] == fact[at + length]:
            length += 1
        return length


def sample_document_rows(shape: DenoiserConfig, length: int, count: int) -> list[Example]:
    """`count` packed sequences of `length` tokens."""
    rng, hidden = random.Random(0), tuple(n % 2 == 0 for n in range(length))
    targets = (tuple(rng.choices(range(shape.vocab_size), k=length)) for _ in range(count))
    return [Example(Prompt((), (), ()), target, hidden, (), 1.0, float(length)) for target in targets]


def sample_prompt_rows(
    shape: DenoiserConfig, passage_length: int, top_k: int, items: int, rows: int, searches: int = 1
) -> list[Example]:
    """`rows` of each of some items; searches: how many times `top_k` passages an item has.

    Rows of an item with one search have their own questions; with several, one question.
    """
    draw = partial(random.Random(0).choices, range(shape.vocab_size))
    hidden, found = tuple(n % 2 == 0 for n in range(shape.canvas_length)), []
    for _ in range(items):
        passages = [tuple(draw(k=passage_length)) for _ in range(searches * top_k)]
        questions = [tuple(draw(k=LONG_QUESTION_TOKENS)) for _ in range(rows if searches == 1 else 1)]
        for row in range(rows):
            first = row % ((searches - 1) * top_k + 1)
            prompt = Prompt(questions[row % len(questions)], tuple(passages[first : first + top_k]), ())
            found.append(Example(prompt, tuple(draw(k=shape.canvas_length)), hidden))
    return found
