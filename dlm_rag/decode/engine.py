"""The engine: questions come and go, all of them take their steps together.

    step 0     retrieve with the question alone
    step s     encode the evidence and denoise the canvas       (the model, behind `Proposer`)
               commit what the commit rule chooses              (diffusion/commit.py)
               build the query from what the canvas says now    (retrieval/query.py)
               retrieve; what was found is the evidence of step s + 1

Rows are packed without padding and share nothing but the call, so a question gets the same tokens alone
and in a batch; what goes wrong in one row ends that row alone. Every row has decode settings of its own.

    engine = Engine(proposer, retriever, tokenizer)
    ticket = engine.submit(Question("1", "Who wrote Emma?"))
    while engine.busy:
        for event in engine.step():
            print(event.ticket, event.rollout.tokens_committed, event.finished)
"""

from dataclasses import asdict, dataclass
from heapq import heappop, heappush
from itertools import count
from typing import Any

import torch

from dlm_rag.config import DecodeConfig
from dlm_rag.config.checked import with_values
from dlm_rag.config.decoding import ENTROPY_BOUND
from dlm_rag.decode.canvas import Canvas, NoisyCanvas
from dlm_rag.decode.guesses import Recorder
from dlm_rag.decode.proposer import Proposer
from dlm_rag.decode.rollout import Rollout
from dlm_rag.decode.row import Group, Row, Ticket
from dlm_rag.decode.schedules import SCHEDULES
from dlm_rag.decode.steps import Steps
from dlm_rag.diffusion.renoise import uniform_tokens
from dlm_rag.errors import ConfigError
from dlm_rag.evidence.layout import check_order
from dlm_rag.model.heads import Heads
from dlm_rag.model.shape import EVIDENCE_LAYOUTS, DenoiserConfig, UniformNoise
from dlm_rag.questions import Question
from dlm_rag.randomness import keyed_generator, uniform_numbers
from dlm_rag.retrieval.base import Retriever
from dlm_rag.stages import mark, step_range
from dlm_rag.tokenizer import Tokenizer

OF_NOISE = ("temperature_high", "temperature_low", "stable_steps", "confident_below")
OF_MASKS = (
    "commit_threshold", "gate_width", "head_cut", "tokens_per_step", "schedule", "revision_threshold",
    "edit_threshold", "edit_rounds", "temperature", "copy_price",
)  # fmt: skip
_tickets = count(1)  # of all engines of the process: a retriever may serve several


@dataclass(frozen=True)
class Event:
    """A question has taken a step; its rollout grows with the next one unless it is `finished`."""

    ticket: Ticket
    rollout: Rollout

    @property
    def finished(self) -> bool:
        return self.rollout.finished


class Engine:
    """Answers questions with a model, a retriever and settings; everything in flight is its state.

    settings: of questions submitted without their own; of these `batch_size`, how many questions have a
    place, and `overlap` hold for all. layout: of the evidence, the model's own where None. heads: what
    decides for the commit rule `head`, and for `search=head`.
    """

    def __init__(
        self,
        proposer: Proposer,
        retriever: Retriever,
        tokenizer: Tokenizer,
        settings: DecodeConfig | None = None,
        layout: str | None = None,
        heads: Heads | None = None,
    ) -> None:
        self.settings = with_checkpoints_own(settings or DecodeConfig(), proposer.shape)
        layout = layout or proposer.shape.evidence_layout
        if layout not in EVIDENCE_LAYOUTS:
            raise ConfigError(f"evidence_layout={layout} is none of {', '.join(EVIDENCE_LAYOUTS)}")
        self._steps = Steps(proposer, retriever, tokenizer, layout, heads)
        self._schedule = SCHEDULES[self.settings.overlap]
        places = self.settings.batch_size
        halves = 2 if self.settings.overlap == "pipeline" and places > 1 else 1
        self._groups = [Group() for _ in range(halves)]
        self._free = list(range(places))
        self._turn = 0

    def __enter__(self) -> "Engine":
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    @property
    def capacity(self) -> int:
        """How many questions may be submitted now."""
        return len(self._free)

    @property
    def busy(self) -> bool:
        """Whether any question is in flight."""
        return any(group.rows for group in self._groups)

    def submit(
        self, question: Question, settings: DecodeConfig | None = None, guesses: bool = False
    ) -> Ticket:
        """Takes a question in; it takes part in the next step. Raises `RuntimeError` without capacity.

        guesses: whether its steps record what is guessed at masked positions; no token depends on it.
        """
        if not self._free:
            raise RuntimeError("the engine has no free place: submit when its capacity is above 0")
        own, shape = self.settings, self._steps.proposer.shape
        if settings is not None:
            mine = with_values(settings, batch_size=own.batch_size, overlap=own.overlap)
            own = with_checkpoints_own(mine, shape)
        assert own.canvas_length is not None and own.finished_blocks is not None
        check_order(shape, own.finished_blocks, self._steps.layout)
        check_heads(own, self._steps.heads is not None)
        # Revision may still change the text before an end token.
        certain = own.stop_early and own.revision_threshold is None
        generator = keyed_generator(own.seed, question.id)
        row = Row(
            ticket=Ticket(next(_tickets)),
            question=question,
            settings=own,
            slot=heappop(self._free),  # the lowest: memory is kept up to the highest in use
            canvas=self._canvas(own, generator),
            generator=generator,
            rollout=Rollout(
                question.id, question.question, self._steps.layout, own.canvas_length, settings=asdict(own)
            ),
            stop_at=self._steps.tokenizer.end_ids if certain else frozenset(),
            end_ids=self._steps.tokenizer.end_ids,
            recorder=Recorder(self._steps.tokenizer.token_text) if guesses else None,
        )
        min(self._groups, key=lambda group: len(group.rows)).rows.append(row)
        return row.ticket

    def _canvas(self, settings: DecodeConfig, generator: torch.Generator) -> Canvas:
        """A fresh canvas, all masked or all noise."""
        length, mask_id, shape = (
            settings.canvas_length,
            self._steps.tokenizer.mask_id,
            self._steps.proposer.shape,
        )
        assert length is not None
        if shape.noise is None:
            return Canvas(length, mask_id, closed=None if settings.edit_threshold is None else 0)
        noise = uniform_tokens(uniform_numbers(generator, 1, length)[0], shape.vocab_size)
        return NoisyCanvas(length, mask_id, closed=0, noise=noise)

    def cancel(self, ticket: Ticket) -> None:
        """Drops a question that is in flight, and all that is kept for it; others do not notice.

        Raises `KeyError` for a ticket that is not in flight.
        """
        for group in self._groups:
            for row in group.rows:
                if row.ticket == ticket:
                    row.rollout.error = "cancelled"
                    self._leave(group, row)
                    return
        raise KeyError(f"ticket {ticket} is not in flight")

    def close(self) -> None:
        """Cancels what is in flight and ends the search thread."""
        for group in self._groups:
            for row in list(group.rows):
                self.cancel(row.ticket)
            self._steps.receive(group.search)
        self._steps.close()

    def step(self) -> list[Event]:
        """One step of all rows, or of one half of them in turn with `overlap=pipeline`.

        Returns an event for every question whose step is over, in the order in which they came. A question
        that failed (it does not fit the context; its search or its logits fail) is finished, with an
        `error` in its rollout. What the model itself raises (no memory, say) is passed on; the questions
        that took part are cancelled then.
        """
        group = self._groups[self._turn % len(self._groups)]
        try:
            with self._steps.clock, step_range(self._turn, len(group.rows)):
                closed = self._schedule(self._steps, group)
        except BaseException:
            for row in list(group.rows):  # half a step is no state to go on from
                self.cancel(row.ticket)
            raise
        self._turn += 1
        for row in closed:
            if row.rollout.finished:
                mark(f"question {row.question.id}")
                self._leave(group, row)
        return [Event(row.ticket, row.rollout) for row in closed]

    def _leave(self, group: Group, row: Row) -> None:
        group.rows.remove(row)
        heappush(self._free, row.slot)
        self._steps.proposer.release(row.slot)
        self._steps.retriever.forget(str(row.ticket))


def check_heads(settings: DecodeConfig, there: bool) -> None:
    """Raises `ConfigError` for settings that need heads where none are there."""
    if there or (settings.commit_rule != "head" and settings.search != "head"):
        return
    asked = "commit_rule=head" if settings.commit_rule == "head" else "search=head"
    raise ConfigError(
        f"{asked} needs heads beside the model, and this checkpoint has none: train them with "
        "--config search_rl.yaml train.learn=heads"
    )


def with_checkpoints_own(settings: DecodeConfig, own: DenoiserConfig) -> DecodeConfig:
    """`settings` with what they leave to the checkpoint: lengths of canvas and blocks, who decides.

    Raises `ConfigError` for settings that the checkpoint cannot be decoded by.
    """
    if own.noise is not None:
        return _of_noise(settings, own, own.noise)
    for name in OF_NOISE:
        if getattr(settings, name) is not None:
            raise ConfigError(f"{name} has no effect on a model that denoises from masks: leave it out")
    canvas, block = settings.canvas_length or own.canvas_length, settings.block_length
    if block is None:
        block = own.block_length or 0
        if block > canvas:  # blocks of attention may be longer than the canvas, and are written whole
            block = canvas if own.attention_block is None else 0
    if settings.edit_threshold is not None and own.attention_block is None:
        raise ConfigError(
            f"edit_threshold={settings.edit_threshold} is for checkpoints whose attention has blocks, and "
            "this one's has none: leave it out, or set revision_threshold"
        )
    return with_values(
        settings,
        canvas_length=canvas,
        block_length=block,
        finished_blocks=settings.finished_blocks or own.finished_blocks,
        commit_rule=settings.commit_rule or own.commit_rule,
        search=settings.search or own.search,
        entropy_bound=ENTROPY_BOUND if settings.entropy_bound is None else settings.entropy_bound,
    )


def _of_noise(settings: DecodeConfig, own: DenoiserConfig, noise: UniformNoise) -> DecodeConfig:
    """`settings` with the checkpoint's own schedule, bound and stopping rule; a canvas of whole blocks."""
    block = own.attention_block
    assert block is not None
    fixed: dict[str, Any] = {
        "block_length": block, "finished_blocks": own.finished_blocks, "commit_rule": own.commit_rule,
        "search": own.search, "lookahead": 0,
    }  # fmt: skip
    usual = DecodeConfig()
    for name in (*fixed, *OF_MASKS):
        value, default = getattr(settings, name), getattr(usual, name)
        if value not in (default, fixed.get(name, default)):
            raise ConfigError(
                f"{name}={value} has no effect on a model that denoises from uniform noise: leave it out"
            )
    low, high = settings.temperature_low, settings.temperature_high
    low = noise.temperature_low if low is None else low
    high = noise.temperature_high if high is None else high
    if low > high:
        raise ConfigError(
            f"temperature_low={low} is above temperature_high={high}: a block of noise cools down"
        )
    least = settings.canvas_length or own.canvas_length
    stable, bound = settings.stable_steps, settings.entropy_bound
    sure = settings.confident_below
    return with_values(
        settings,
        **fixed,
        canvas_length=-(-least // block) * block,
        steps_per_block=settings.steps_per_block or noise.steps,
        entropy_bound=noise.entropy_bound if bound is None else bound,
        temperature_high=high,
        temperature_low=low,
        stable_steps=noise.stable_steps if stable is None else stable,
        confident_below=noise.confident_below if sure is None else sure,
    )
