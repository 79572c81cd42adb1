"""The engine: questions come and go, all of them take their steps together.

    step 0     retrieve with the question alone
    step s     encode the evidence and denoise the canvas       (the model, behind `ModelRunner`)
               commit what the commit rule chooses              (diffusion/commit_rules.py)
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
from dlm_rag.config.fields import replace_settings
from dlm_rag.config.ineffective_settings import check_checkpoint_effects
from dlm_rag.config.inference import DEFAULT_ENTROPY_BOUND_NATS
from dlm_rag.decode.canvas import Canvas, UniformNoiseCanvas, uniform_tokens
from dlm_rag.decode.denoise_step import DenoiseStep
from dlm_rag.decode.model_runner import ModelRunner
from dlm_rag.decode.provisional_log import ProvisionalRecorder
from dlm_rag.decode.retrieval_step import RetrievalStep
from dlm_rag.decode.rollout import Rollout
from dlm_rag.decode.row import PendingSearch, Row, RowGroup, Ticket
from dlm_rag.diffusion.commit_rules import find_rule
from dlm_rag.errors import ConfigError
from dlm_rag.evidence.prompt_segments import check_finished_blocks
from dlm_rag.model.denoiser_config import DenoiserConfig, UniformNoiseConfig
from dlm_rag.model.evidence_layouts import EVIDENCE_LAYOUTS
from dlm_rag.model.policy_heads import PolicyHeads
from dlm_rag.nvtx_ranges import StageClock, mark_event, profile_stage, profile_step
from dlm_rag.questions import Question
from dlm_rag.randomness import make_keyed_generator, sample_uniform
from dlm_rag.retrieval.base import Retriever
from dlm_rag.tokenizer import Tokenizer

_tickets = count(1)  # of all engines of the process: a retriever may serve several


@dataclass(frozen=True)
class StepEvent:
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
        proposer: ModelRunner,
        retriever: Retriever,
        tokenizer: Tokenizer,
        settings: DecodeConfig | None = None,
        layout: str | None = None,
        heads: PolicyHeads | None = None,
    ) -> None:
        self.settings = with_checkpoint_defaults(settings or DecodeConfig(), proposer.shape)
        layout = layout or proposer.shape.evidence_layout
        if layout not in EVIDENCE_LAYOUTS:
            raise ConfigError(f"evidence_layout={layout} is not one of {', '.join(EVIDENCE_LAYOUTS)}")
        self.model_runner, self.retriever, self.tokenizer = proposer, retriever, tokenizer
        self._layout, self._heads, self._clock = layout, heads, StageClock()
        self._denoising = DenoiseStep(proposer, tokenizer, heads)
        self._retrieval = RetrievalStep(proposer, retriever, tokenizer, layout, heads)
        places = self.settings.batch_size
        halves = 2 if self.settings.overlap == "pipeline" and places > 1 else 1
        self._groups = [RowGroup() for _ in range(halves)]
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
        own, shape = self.settings, self.model_runner.shape
        if settings is not None:
            mine = replace_settings(settings, batch_size=own.batch_size, overlap=own.overlap)
            own = with_checkpoint_defaults(mine, shape)
        assert own.max_new_tokens is not None and own.finished_block_context is not None
        check_finished_blocks(shape, own.finished_block_context, self._layout)
        check_policy_heads(own, self._heads is not None)
        generator, length = make_keyed_generator(own.seed, question.id), own.max_new_tokens
        row = Row(
            ticket=Ticket(next(_tickets)),
            question=question,
            settings=own,
            slot=heappop(self._free),  # the lowest: memory is kept up to the highest in use
            canvas=self._make_canvas(own, generator),
            generator=generator,
            rollout=Rollout(question.id, question.question, self._layout, length, settings=asdict(own)),
            end_ids=self.tokenizer.end_ids,
            recorder=ProvisionalRecorder(self.tokenizer.token_text) if guesses else None,
        )
        min(self._groups, key=lambda group: len(group.rows)).rows.append(row)
        return row.ticket

    def _make_canvas(self, settings: DecodeConfig, generator: torch.Generator) -> Canvas:
        """A fresh canvas, all masked or all noise."""
        shape, mask_id, length = self.model_runner.shape, self.tokenizer.mask_id, settings.max_new_tokens
        assert length is not None
        if shape.noise is None:
            return Canvas(length, mask_id, frozen_length=None if settings.edit_threshold is None else 0)
        noise = uniform_tokens(sample_uniform(generator, 1, length)[0], shape.vocab_size)
        return UniformNoiseCanvas(length, mask_id, 0, noise=noise, vocab_size=shape.vocab_size)

    def cancel(self, ticket: Ticket) -> None:
        """Drops a question that is in flight, and all that is kept for it; others do not notice.

        Raises `KeyError` for a ticket that is not in flight.
        """
        for group in self._groups:
            for row in group.rows:
                if row.ticket == ticket:
                    row.rollout.error = "cancelled"
                    self._remove_row(group, row)
                    return
        raise KeyError(f"ticket {ticket} is not in flight")

    def close(self) -> None:
        """Cancels what is in flight and ends the search thread."""
        for group in self._groups:
            for row in list(group.rows):
                self.cancel(row.ticket)
            self._retrieval.apply_search(group.search)
        self._retrieval.close()

    def step(self) -> list[StepEvent]:
        """One step of all rows, or of one half of them in turn with `overlap=pipeline`.

        Returns an event for every question whose step is over, in the order in which they came. A question
        that failed (it does not fit the context; its search or its logits fail) is finished, with an
        `error` in its rollout. What the model itself raises (no memory, say) is passed on; the questions
        that took part are cancelled then.
        """
        group = self._groups[self._turn % len(self._groups)]
        try:
            with self._clock, profile_step(self._turn, len(group.rows)):
                closed = self._take_step(group)
        except BaseException:
            for row in list(group.rows):  # half a step is no state to go on from
                self.cancel(row.ticket)
            raise
        self._turn += 1
        for row in closed:
            if row.rollout.finished:
                mark_event(f"question {row.question.id}")
                self._remove_row(group, row)
        return [StepEvent(row.ticket, row.rollout) for row in closed]

    def _take_step(self, group: RowGroup) -> list[Row]:
        """Takes a step with the rows of a group; returns those whose step is over."""
        if self.settings.overlap == "none":
            self._denoise(group.ready_rows)
            self._apply_search(self._start_search(group.active_rows))
            return self._end_step(group.rows)
        # The search is under way while the other group denoises: the same tokens.
        self._apply_search(group.search)
        closed = self._end_step(group.started_rows)
        self._denoise(group.ready_rows)
        group.search = self._start_search(group.active_rows, aside=True)
        return closed

    def _denoise(self, rows: list[Row]) -> None:
        self._denoising.run(rows)
        self._split_seconds(rows)

    def _start_search(self, rows: list[Row], aside: bool = False) -> PendingSearch:
        search = self._retrieval.start_search(rows, aside)
        self._split_seconds(rows)
        return search

    def _apply_search(self, search: PendingSearch) -> None:
        self._retrieval.apply_search(search)
        self._split_seconds(search.rows)

    def _end_step(self, rows: list[Row]) -> list[Row]:
        """Ends the step of each row, and the answer where the text is certain; returns the rows."""
        for row in rows:
            row.end_step()
        answered = [row for row in rows if not row.rollout.error and row.is_done]
        with profile_stage("detokenize"):
            for row in answered:
                row.finish(self.tokenizer)
                row.record.seconds = row.rollout.steps[-1].seconds  # which this is counted in
        self._split_seconds(answered)
        return list(rows)

    def _split_seconds(self, rows: list[Row]) -> None:
        """Splits the seconds since the last call among the rows that took part."""
        for name, value in self._clock.pop_seconds().items():
            for row in rows:
                seconds = row.record.seconds
                seconds[name] = seconds.get(name, 0.0) + value / len(rows)

    def _remove_row(self, group: RowGroup, row: Row) -> None:
        group.rows.remove(row)
        heappush(self._free, row.slot)
        self.model_runner.release(row.slot)
        self.retriever.forget(str(row.ticket))


def check_policy_heads(settings: DecodeConfig, there: bool) -> None:
    """Raises `ConfigError` for settings that need policy heads where the checkpoint has none."""
    asked = "retrieval_gate" if settings.retrieval_gate == "policy_head" else ""
    if settings.commit_rule is not None and "head" in find_rule(settings.commit_rule).statistics:
        asked = "commit_rule"
    if asked and not there:
        raise ConfigError(
            f"{asked}={getattr(settings, asked)} needs heads beside the model, and this checkpoint "
            "has none: train them with --config search_rl.yaml train.trainable=policy_heads"
        )


def with_checkpoint_defaults(settings: DecodeConfig, own: DenoiserConfig) -> DecodeConfig:
    """`settings` with what they leave to the checkpoint: lengths of canvas and blocks, who decides.

    Raises `ConfigError` for settings that the checkpoint cannot be decoded by.
    """
    _check_effects(settings, own)
    if own.noise is not None:
        return _with_uniform_defaults(settings, own, own.noise)
    canvas, block = settings.max_new_tokens or own.canvas_length, settings.block_length
    if block is None:
        block = own.block_length or 0
        if block > canvas:  # blocks of attention may be longer than the canvas, and are written whole
            block = canvas if own.block_size is None else 0
    return replace_settings(
        settings,
        max_new_tokens=canvas,
        block_length=block,
        finished_block_context=settings.finished_block_context or own.finished_block_context,
        commit_rule=settings.commit_rule or own.commit_rule,
        retrieval_gate=settings.retrieval_gate or own.retrieval_gate,
        entropy_bound=DEFAULT_ENTROPY_BOUND_NATS
        if settings.entropy_bound is None
        else settings.entropy_bound,
    )


def _check_effects(settings: DecodeConfig, own: DenoiserConfig) -> None:
    """Raises `ConfigError` for settings that have no effect on the checkpoint."""
    facts = {"noise": "mask" if own.noise is None else "uniform", "attention_blocks": bool(own.block_size)}
    names = ("commit_rule", "retrieval_gate")
    left = {name: getattr(own, name) for name in names if getattr(settings, name) is None}
    facts |= {f"decode.{name}": value for name, value in left.items()}
    check_checkpoint_effects("decode", settings, facts, _own_settings(own))


def _own_settings(own: DenoiserConfig) -> dict[str, Any]:
    """The settings that a checkpoint gives, as far as they cannot be others."""
    found: dict[str, Any] = {"finished_block_context": own.finished_block_context}
    if own.noise is not None:
        found |= {"block_length": own.block_size, "commit_rule": own.commit_rule}
        found |= {"retrieval_gate": own.retrieval_gate, "query_window": 0}
    return found


def _with_uniform_defaults(
    settings: DecodeConfig, own: DenoiserConfig, noise: UniformNoiseConfig
) -> DecodeConfig:
    """`settings` with the checkpoint's own schedule, bound and stopping rule; a canvas of whole blocks."""
    block = own.block_size
    assert block is not None
    low, high = settings.temperature_low, settings.temperature_high
    low = noise.temperature_low if low is None else low
    high = noise.temperature_high if high is None else high
    if low > high:
        raise ConfigError(
            f"temperature_low={low} is above temperature_high={high}: a block of noise cools down"
        )
    least = settings.max_new_tokens or own.canvas_length
    stable, bound = settings.convergence_steps, settings.entropy_bound
    sure = settings.stop_entropy
    return replace_settings(
        settings,
        **_own_settings(own),
        max_new_tokens=-(-least // block) * block,
        steps_per_block=settings.steps_per_block or noise.steps,
        entropy_bound=noise.entropy_bound if bound is None else bound,
        temperature_high=high,
        temperature_low=low,
        convergence_steps=noise.convergence_steps if stable is None else stable,
        stop_entropy=noise.stop_entropy if sure is None else sure,
    )
