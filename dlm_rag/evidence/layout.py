"""From a prompt to what the transformer runs: the three evidence layouts, and what does not fit.

| layout | context segments (see themselves) | run with the canvas |
|---|---|---|
| `joint` | none | the whole prompt: everything sees everything |
| `prefix` | the prompt | nothing |
| `independent` | each passage, the question | nothing |

The canvas sees itself and every context segment. Keys and values of a segment depend on nothing but
the segment, which is what may be kept between steps and questions.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch
from torch import Tensor

from dlm_rag.errors import QuestionError
from dlm_rag.model.denoiser import Denoiser, KeysValues, Watch, of_rows
from dlm_rag.model.shape import DenoiserConfig
from dlm_rag.model.sharing import SequenceShare, Stretches
from dlm_rag.model.store import StoredRows
from dlm_rag.tokenizer import Prompt


@dataclass(frozen=True)
class Segment:
    """Token ids at consecutive positions from `start`."""

    ids: tuple[int, ...]
    start: int

    @property
    def end(self) -> int:
        return self.start + len(self.ids)


@dataclass(frozen=True)
class Arrangement:
    """A prompt laid out: segments that see themselves, and the lead that runs before the canvas."""

    context: tuple[Segment, ...]
    lead: Segment


@dataclass(frozen=True)
class Cut:
    """What of the evidence did not fit into the context."""

    tokens: int = 0
    passages_shortened: int = 0
    passages_dropped: int = 0


def arrange(prompt: Prompt, layout: str, shifted: bool, passage_length: int) -> Arrangement:
    """Lays a prompt out.

    In a `shifted` denoiser the row before a position predicts it, so the last prompt token runs
    with the canvas whose first token it predicts. In `independent` every passage starts at position
    0 and the question at `passage_length`, wherever the passage ranks and whatever the others are.
    """
    if layout == "joint":
        return Arrangement((), Segment(tuple(prompt.ids), 0))
    if layout == "prefix":
        passages: tuple[Segment, ...] = ()
        question = Segment(tuple(prompt.ids), 0)
    elif layout == "independent":
        passages = tuple(Segment(fact, 0) for fact in prompt.facts if fact)
        question = Segment(prompt.head + prompt.tail, passage_length)
    else:
        raise ValueError(f"'{layout}' is not an evidence layout")
    keep = len(question.ids) - shifted
    lead = Segment(question.ids[keep:], question.start + keep)
    return Arrangement((*passages, Segment(question.ids[:keep], question.start)), lead)


def fit(
    prompt: Prompt, layout: str, context_length: int, canvas_length: int, passage_length: int
) -> tuple[Prompt, Cut]:
    """The prompt with as much evidence as the context holds, and what was cut.

    `joint` and `prefix`: passages keep their tokens in rank order until the context is full; the one
    that crosses the end is shortened, later ones are dropped. `independent`: each passage is
    shortened to `passage_length`. What is dropped leaves an empty fact. Raises `QuestionError` when
    the question alone does not fit.
    """
    fixed = len(prompt.head) + len(prompt.tail) + canvas_length
    if layout == "independent":
        room, limits = context_length - passage_length - fixed, [passage_length] * len(prompt.facts)
    else:
        room, limits = context_length - fixed, []
        for fact in prompt.facts:
            limits.append(max(0, min(len(fact), room - sum(limits))))
    if room < 0:
        raise QuestionError(
            f"the question is {-room} tokens too long: the context of {context_length} must hold it "
            f"beside the canvas of {canvas_length}"
        )
    facts = [fact[:limit] for fact, limit in zip(prompt.facts, limits, strict=True)]
    lost = [len(fact) - len(kept) for fact, kept in zip(prompt.facts, facts, strict=True)]
    cut = Cut(
        tokens=sum(lost),
        passages_shortened=sum(1 for kept, n in zip(facts, lost, strict=True) if n and kept),
        passages_dropped=sum(1 for kept in facts if not kept),
    )
    return Prompt(prompt.head, tuple(facts), prompt.tail), cut


def fit_to(prompt: Prompt, shape: DenoiserConfig) -> Prompt:
    """As `fit`, with the layout, context and canvas of a denoiser's own config."""
    return fit(
        prompt, shape.evidence_layout, shape.max_position_embeddings, shape.canvas_length,
        shape.passage_length,
    )[0]  # fmt: skip


def encode_segments(
    denoiser: Denoiser, segments: Sequence[Segment], *, masked_only: bool = True
) -> list[Tensor]:
    """Keys and values (layers, 2, n, kv_heads, head_dim) of each segment, in one packed call.

    What a segment gives depends on nothing but the segment. Of the last layer only keys and values are
    needed; without `masked_only` the rest of it is run all the same.
    """
    kept, lengths = _keys_values(denoiser, segments, masked_only)
    return list(torch.stack([torch.stack(layer) for layer in kept]).split(lengths, dim=2))


def _keys_values(
    denoiser: Denoiser, segments: Sequence[Segment], masked_only: bool
) -> tuple[KeysValues, list[int]]:
    ids, positions = pack(segments, denoiser.device)
    read = [()] * len(segments) if masked_only else None
    lengths = [len(segment.ids) for segment in segments]
    return denoiser.encode(ids, positions, lengths, keep=True, read=read)[1], lengths


def encode_contexts(denoiser: Denoiser, laid: Sequence[Arrangement]) -> list[list[KeysValues]] | None:
    """Per row the keys and values of its segments, or None.

    Segments that several rows share are encoded once. Gradients flow through, layer by layer, without
    a copy; decoding, which keeps them from step to step, has `pool.Contexts` instead.
    """
    segments = list(dict.fromkeys(segment for row in laid for segment in row.context))
    if not segments:
        return None
    rows = of_rows(*_keys_values(denoiser, segments, masked_only=True))
    by_segment = dict(zip(segments, rows, strict=True))
    return [[by_segment[segment] for segment in row.context] for row in laid]


def encode_canvases(
    denoiser: Denoiser,
    leads: Sequence[Segment],
    canvases: Sequence[Sequence[int]],
    contexts: Sequence[Sequence[KeysValues]] | StoredRows | None,
    read: Sequence[Sequence[int]],
    watch: Watch | None = None,
    ahead: int | None = None,
) -> Tensor:
    """Hidden states (n, hidden) that predict the canvas positions `read` (from 0, ascending), row by row.

    Only these go through the last layer. ahead: as in `Denoiser.encode`.
    """
    ids, positions, lengths = _runs(denoiser, leads, canvases)
    first = first_rows(denoiser, leads)
    asked = [[start + place for place in places] for start, places in zip(first, read, strict=True)]
    return denoiser.encode(ids, positions, lengths, contexts, ahead, watch=watch, read=asked)[0]


def encode_stretches(
    denoiser: Denoiser,
    leads: Sequence[Segment],
    canvases: Sequence[Sequence[int]],
    read: Sequence[Sequence[int]],
    share: SequenceShare,
) -> tuple[Tensor, list[list[int]]]:
    """As `encode_canvases` without contexts, on this process's stretch of every row.

    Returns the hidden states and the places that they are of: those of `read` that are predicted here.
    """
    runs = [Segment((*lead.ids, *canvas), lead.start) for lead, canvas in zip(leads, canvases, strict=True)]
    own = [share.stretch(len(run.ids)) for run in runs]
    parts = [
        Segment(run.ids[s.start : s.stop], run.start + s.start) for run, s in zip(runs, own, strict=True)
    ]
    rows = list(zip(first_rows(denoiser, leads), own, read, strict=True))
    here = [[place for place in places if start + place in s] for start, s, places in rows]
    asked = [
        [start + place - s.start for place in places]
        for (start, s, _), places in zip(rows, here, strict=True)
    ]
    ids, positions = pack(parts, denoiser.device)
    stretches = Stretches(share, tuple(len(run.ids) for run in runs))
    hidden, _ = denoiser.encode(ids, positions, stretches.own, read=asked, stretches=stretches)
    return hidden, here


def encode_everywhere(
    denoiser: Denoiser,
    leads: Sequence[Segment],
    canvases: Sequence[Sequence[int]],
    contexts: Sequence[Sequence[KeysValues]] | StoredRows | None,
) -> tuple[Tensor, list[int]]:
    """Hidden states (T, hidden) of each row's lead and canvas, and which of them predicts each canvas's
    first position; the one after it predicts the second, and so on.
    """
    ids, positions, lengths = _runs(denoiser, leads, canvases)
    hidden, _ = denoiser.encode(ids, positions, lengths, contexts)
    return hidden, canvas_starts(denoiser, leads, canvases)


def canvas_starts(
    denoiser: Denoiser, leads: Sequence[Segment], canvases: Sequence[Sequence[int]]
) -> list[int]:
    """Where in the packed rows of lead and canvas the state stands that predicts each first position."""
    lengths = [len(lead.ids) + len(canvas) for lead, canvas in zip(leads, canvases, strict=True)]
    starts = accumulate(lengths[:-1], initial=0)
    return [start + first for start, first in zip(starts, first_rows(denoiser, leads), strict=True)]


def first_rows(denoiser: Denoiser, leads: Sequence[Segment]) -> list[int]:
    """Where in each row of lead and canvas the state stands that predicts the first position."""
    return [len(lead.ids) - int(denoiser.config.shifted) for lead in leads]


def _runs(
    denoiser: Denoiser, leads: Sequence[Segment], canvases: Sequence[Sequence[int]]
) -> tuple[Tensor, Tensor, list[int]]:
    runs = [Segment((*lead.ids, *canvas), lead.start) for lead, canvas in zip(leads, canvases, strict=True)]
    return *pack(runs, denoiser.device), [len(run.ids) for run in runs]


def pack(segments: Sequence[Segment], device: torch.device) -> tuple[Tensor, Tensor]:
    """Ids and positions (T,) of segments behind one another, on the device."""
    ids = [token for segment in segments for token in segment.ids]
    positions = [place for segment in segments for place in range(segment.start, segment.end)]
    both = torch.tensor((ids, positions), pin_memory=device.type == "cuda")
    both = both.to(device, non_blocking=True)
    return both[0], both[1]
