"""Training rows, their batches and their loss.

How canvas, masks and evidence of a row are drawn, and what it copies; typical rows for plans; what a step
minimises: cross-entropy at supervised positions, and where two heads should look.
"""

import math
import random
from collections.abc import Collection, Iterable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import cached_property, partial
from itertools import accumulate
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from dlm_rag.evidence.encode_segments import encode_canvases
from dlm_rag.evidence.prompt_segments import ContextBudget, fit_passages, lay_out_prompt
from dlm_rag.model.denoiser import Denoiser
from dlm_rag.model.denoiser_config import DenoiserConfig
from dlm_rag.model.layers import AttentionProbe, get_compute_dtype
from dlm_rag.model.packed_batch import LaidOutRow
from dlm_rag.nvtx_ranges import profile_stage
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


def mask_blocks_at_time(
    prompt: Prompt, target: Sequence[int], time: float, rng: np.random.Generator, shape: DenoiserConfig
) -> list[Example]:
    """The rows of `mask_at_time` for a denoiser: where attention has blocks one for each, given those
    before it as they are (BD3-LM, arXiv 2503.09573). Rows without a mask are left out."""
    laid, rows, begin = lay_out_prompt(prompt, shape), list[Example](), 0
    while begin < len(target):
        end = min(laid.block_bounds(begin)[1], len(target))
        row = mask_at_time(prompt, target[begin:end], time, rng)
        masked = (*[False] * begin, *row.masked)
        rows.append(replace(row, target=tuple(target[:end]), masked=masked, finished=begin))
        begin = end
    return [row for row in rows if any(row.masked)]


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
        numbered = {str(number): text for number, text in enumerate(passages)}
        return fit_passages(
            self.tokenizer, question, numbered, ContextBudget.from_config(self.shape)
        ).prompt

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
    supervision: (n,) targets, weights, whether it can be copied. pointers, places: of `locate_pointers`.
    """

    states: list[LaidOutRow]
    read: list[tuple[int, ...]]
    supervision: list[NDArray[Any]]
    pointers: list[int]
    places: NDArray[np.int64]
    pointer_weight: float
    counts: Sums


def make_masked_batch(
    examples: Sequence[Example], shape: DenoiserConfig, layout: str, end_ids: Collection[int] = (),
    weights: LossWeights = LossWeights(),
) -> MaskedBatch:  # fmt: skip
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
        "tokens": count_tokens(states),
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


def count_tokens(states: Sequence[LaidOutRow]) -> float:
    """Tokens that go through the layers for these rows, those of a segment that they share once."""
    shared = {segment for row in states for segment in row.context_segments}
    return float(sum(len(run.ids) for run in (*shared, *(row.canvas_segment for row in states))))


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
    and last + 1 of the passage, and the token; the row, and the place among its pointers."""
    found = []
    starts = accumulate((len(state.canvas_segment.ids) for state in states), initial=0)
    for row, (example, state, start) in enumerate(zip(examples, states, starts, strict=False)):
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


class ChunkedCrossEntropy(torch.autograd.Function):
    """Weighted cross-entropy, summed, whose logits exist `chunk` rows at a time and only once.

    The sum is linear in each token's loss, so the gradients of a chunk are known as soon as its logits
    are (as in Liger Kernel, arXiv 2410.10989): they are computed at once and the logits dropped.
    """

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, head: Tensor, targets: Tensor, weights: Tensor, chunk: int
    ) -> tuple[Tensor, Tensor]:
        """x (n, hidden), head (V, hidden), targets and weights (n,) -> the sum in float32, and which
        targets (n,) are the most probable token."""
        need_x, need_head = ctx.needs_input_grad[:2]
        ctx.dtypes = x.dtype, head.dtype
        d_x = torch.empty_like(x) if need_x else None
        d_head = torch.zeros_like(head, dtype=torch.float32) if need_head else None
        summed, right = torch.zeros((), device=x.device), torch.zeros_like(targets, dtype=torch.bool)
        low = head.to(get_compute_dtype(x))
        for start in range(0, len(x), chunk):
            rows = slice(start, start + chunk)
            part = x[rows].to(low.dtype)
            logits = (part @ low.t()).float()
            target, weight = targets[rows], weights[rows]
            right[rows] = logits.argmax(-1) == target
            logits -= logits.logsumexp(-1, keepdim=True)
            summed -= (logits.gather(1, target[:, None]).squeeze(1) * weight).sum()
            if not (need_x or need_head):
                continue
            slope = logits.exp_()
            slope.scatter_add_(1, target[:, None], torch.full_like(weight, -1.0)[:, None])
            slope = (slope * weight[:, None]).to(low.dtype)
            if d_x is not None:
                d_x[rows] = slope @ low
            if d_head is not None:
                d_head += slope.t() @ part
        ctx.gradients = d_x, d_head
        ctx.mark_non_differentiable(right)
        return summed, right

    @staticmethod
    def backward(ctx: Any, slope: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
        pairs = zip(ctx.gradients, ctx.dtypes, strict=True)
        found = [None if gradient is None else gradient.mul_(slope).to(dtype) for gradient, dtype in pairs]
        return (*found, None, None, None)


PASSAGE_HEAD, TOKEN_HEAD = 0, 1


def compute_pointer_loss(
    counts: Sequence[int], places: Tensor, probe: AttentionProbe
) -> tuple[Tensor, Tensor]:
    """Sum of -log(mass on the passage) - log(mass on the token), and the sum of masses on the passage.

    counts, places: of `locate_pointers`, the latter on the device. In float32, whatever autocast
    says: the log of a small mass is what is asked for.
    """
    sight = probe.sight
    assert probe.queries is not None and probe.keys is not None and sight is not None
    count, group = probe.queries.shape[1], probe.queries.shape[1] // probe.keys.shape[1]
    heads = [min(head, count - 1) for head in (PASSAGE_HEAD, TOKEN_HEAD)]
    start, length = sight.key_ends[:-1], sight.key_ends.diff()
    off: Any = torch.autocast(probe.queries.device.type, enabled=False)
    at, first, last, token, row, slot = places
    with off:
        queries = torch.stack([probe.queries[:, head] for head in heads], 1).float()
        keys = torch.stack([probe.keys[:, head // group] for head in heads], 1).float()
        if not len(row):
            return queries.new_zeros(()), queries.new_zeros(())
        place = torch.arange(max(sight.key_lengths), device=row.device)
        padded = keys[(start[:, None] + place).clamp(max=len(keys) - 1)]  # (rows, keys, 2, D)
        asked = queries.new_zeros((len(counts), max(counts), *queries.shape[1:]))
        asked = asked.index_put((row, slot), queries[at])
        scores = torch.einsum("rnhd,rkhd->rnhk", asked, padded)[row, slot] / math.sqrt(queries.shape[-1])
        seen = length[row] if sight.visible_counts is None else sight.visible_counts[at]
        scores = scores.masked_fill((place >= seen[:, None])[:, None], -math.inf)
        log_mass = scores.log_softmax(-1)  # (p, 2, keys)
        outside = (place < first[:, None]) | (place >= last[:, None])
        on_passage = log_mass[:, PASSAGE_HEAD].masked_fill(outside, -math.inf).logsumexp(-1)
        on_token = log_mass[:, TOKEN_HEAD].gather(1, token[:, None]).squeeze(1)
        losses = -(on_passage + on_token).sum()
        mass = on_passage.detach().exp().sum()
    return losses, mass


class MaskedObjective(nn.Module):
    """The loss of a batch as one call, which is what DDP and FSDP wrap."""

    logit_chunk = 4096  # supervised positions whose logits exist at a time

    def __init__(self, denoiser: Denoiser) -> None:
        super().__init__()
        self.denoiser = denoiser

    def forward(self, batch: MaskedBatch, counts: Sums) -> tuple[Tensor, dict[str, Tensor]]:
        """What a batch adds to the loss of a step, a scalar; and sums that only the denoiser tells.

        counts: of the whole step, in all its parts on all processes. Sums, in nats and counts: the losses
        of tokens by weight, the pointer losses, the mass of the passage head on the right passage, the
        tokens to be copied that the denoiser finds most probable.
        """
        denoiser, states, weight = self.denoiser, batch.states, batch.pointer_weight
        probe = None
        if weight and counts["pointed"]:
            probe = AttentionProbe(max(0, denoiser.config.num_hidden_layers - 2))
        added = [*batch.supervision, batch.places]
        hidden, found = encode_canvases(denoiser, states, batch.read, added, probe)
        targets, weights, copied, places = found
        # A validation, which records no gradients, is a stage of its own.
        with profile_stage("loss") if torch.is_grad_enabled() else nullcontext():
            normed, head = denoiser.norm(hidden), denoiser.lm_head.weight
            summed, right = ChunkedCrossEntropy.apply(normed, head, targets, weights, self.logit_chunk)
            loss = summed / counts["divisor"]
            pointed, mass = summed.new_zeros(2)
            if probe is not None:
                pointed, mass = compute_pointer_loss(batch.pointers, places, probe)
                loss = loss + pointed * (weight / counts["pointed"])
            names = (right & copied).sum().float()
        sums = {"tokens": summed, "pointers": pointed, "passage_mass": mass, "names_right": names}
        return loss, {name: value.detach() for name, value in sums.items()}
