"""The decoding trajectory as data: replayed and scored without the model, filed by `trace_file.py`."""

from collections.abc import Collection, Iterator
from dataclasses import dataclass, field
from itertools import takewhile
from typing import Any

from dlm_rag.decode.citations import Citation
from dlm_rag.decode.provisional_log import ProvisionalDelta, ProvisionalToken, replay_provisional
from dlm_rag.text import find_answer_span


@dataclass(frozen=True)
class CommittedToken:
    """One token written down: its canvas position (from 0) and how sure the denoiser was of it.

    confidence: its probability at temperature 1; log_prob: the natural logarithm of that, finite where
    the probability underflows, None in traces of version 1.
    """

    position: int
    token_id: int
    token: str
    confidence: float
    log_prob: float | None = None


@dataclass(frozen=True)
class Action:
    """What was decided by lot at a step, and how likely it was (`diffusion/policy.py`,
    `policy_sampling.py`).

    candidates: canvas positions that might have been committed; those that were are the step's. forced:
    whether none would have been, so that one had to. log_prob: of commits and stays, in nats. features: of
    each candidate, where a head decided. search_features: where a head decided whether to search, which
    `RolloutStep.retrieved` says; search_log_prob: of that, in nats.
    """

    candidates: tuple[int, ...] = ()
    forced: bool = False
    log_prob: float = 0.0
    features: tuple[tuple[float, ...], ...] = ()
    search_features: tuple[float, ...] = ()
    search_log_prob: float = 0.0


@dataclass
class RolloutStep:
    """One step, filled in until it is over: what was committed, then what was asked and which passages are
    the evidence now.

    Step 0 asks with the question alone and commits nothing. The tokens of step s were committed
    with the evidence of step s - 1 in context. `query` is None when no refresh was due; `retrieved`
    is False when the query equalled the last one. `remasked` lists positions masked again (of
    uniform noise; in older traces), `edited` tokens that took the place of committed ones (only
    with an edit threshold). `seconds` is this question's share of each stage.
    `dropped` are the passages that were found and found no place in the prompt; they rank behind those
    of `passage_ids`.
    """

    step: int
    query: str | None
    passage_ids: tuple[str, ...]
    retrieved: bool
    committed: tuple[CommittedToken, ...] = ()
    remasked: tuple[int, ...] = ()
    seconds: dict[str, float] = field(default_factory=dict)
    dropped: tuple[str, ...] = ()
    edited: tuple[CommittedToken, ...] = ()
    action: Action | None = None  # where a policy sampled
    guesses: ProvisionalDelta | None = None  # of positions that stay masked, where they are recorded

    @property
    def written_tokens(self) -> tuple[CommittedToken, ...]:
        """What the step put on the canvas."""
        return (*self.committed, *self.edited)


@dataclass
class Rollout:
    """The record of one question, complete once `finished`."""

    id: str
    question: str
    prompt_layout: str
    canvas_length: int
    steps: list[RolloutStep] = field(default_factory=list)
    response: str = ""
    settings: dict[str, Any] = field(default_factory=dict)  # it was decoded with; as in `DecodeConfig`
    passages: dict[str, str] = field(default_factory=dict)  # every passage ever found, by id, as found
    evidence_texts: dict[str, str] = field(default_factory=dict)  # what of them was in the prompt
    citations: list[Citation] = field(default_factory=list)
    cut: dict[str, int] = field(default_factory=dict)  # the largest cut of any step
    finished: bool = False
    error: str = ""  # why there is no answer

    @property
    def answer(self) -> str:
        """The answer in the response (see `text.find_answer_span`), empty when there is none."""
        start, stop = find_answer_span(self.response)
        return self.response[start:stop]

    @property
    def evidence(self) -> tuple[str, ...]:
        """Ids of the passages in the evidence after the last step, in rank order."""
        return self.steps[-1].passage_ids if self.steps else ()

    @property
    def forwards(self) -> int:
        """Denoising passes; every step but step 0 makes one."""
        return sum(1 for step in self.steps if step.step > 0)

    @property
    def retrievals(self) -> int:
        """Searches made; an unchanged query makes none."""
        return sum(step.retrieved for step in self.steps)

    @property
    def tokens_committed(self) -> int:
        """Positions that hold a token after the last step."""
        return len(self.commit_steps())

    def tokens_before_end(self, end_ids: Collection[int]) -> int:
        """Of these, those before the first end token: the text, without what fills the canvas behind it."""
        last = {token.position: token.token_id for step in self.steps for token in step.written_tokens}
        held = self.commit_steps()
        end = min((n for n in held if last[n] in end_ids), default=self.canvas_length)
        return sum(position < end for position in held)

    @property
    def seconds(self) -> dict[str, float]:
        """This question's share of the seconds of each stage, over all steps."""
        total: dict[str, float] = {}
        for step in self.steps:
            for name, value in step.seconds.items():
                total[name] = total.get(name, 0.0) + value
        return total

    def replay(self) -> Iterator[dict[int, CommittedToken]]:
        """The committed tokens by position after each step, from step 0 (none) to the last."""
        canvas: dict[int, CommittedToken] = {}
        for step in self.steps:
            for position in step.remasked:
                canvas.pop(position, None)
            canvas.update({token.position: token for token in step.written_tokens})
            yield dict(canvas)

    def canvases(self, mask_id: int) -> Iterator[list[int]]:
        """The token ids of the canvas after each step, from step 0 (all masked) to the last."""
        for state in self.replay():
            yield [state[n].token_id if n in state else mask_id for n in range(self.canvas_length)]

    def provisional_tokens(self) -> Iterator[dict[int, ProvisionalToken]]:
        """The guesses after each step, by position; none where they are not recorded."""
        return replay_provisional(step.guesses for step in self.steps)

    def commit_steps(self) -> dict[int, int]:
        """For every position that holds a token after the last step, the step that wrote it."""
        steps: dict[int, int] = {}
        for step in self.steps:
            for position in step.remasked:
                steps.pop(position, None)
            steps.update({token.position: step.step for token in step.written_tokens})
        return steps

    def count_steps_within(self, begin: int, end: int) -> int:
        """How many of the last steps in a row have committed, and only positions from `begin` to `end`."""
        last = takewhile(
            lambda step: step.committed and all(begin <= t.position < end for t in step.committed),
            reversed(self.steps),
        )
        return sum(1 for _ in last)

    def evidence_at(self, step: int) -> tuple[str, ...]:
        """Ids of the passages that were in context when the tokens of `step` were committed."""
        if step < 1:
            raise ValueError("step 0 commits nothing")
        return next(s.passage_ids for s in reversed(self.steps) if s.step < step)

    def answer_record(self) -> dict[str, Any]:
        """The line of the answers file."""
        record = {
            "id": self.id,
            "question": self.question,
            "answer": self.answer,
            "response": self.response,
            "evidence": list(self.evidence),
            "citations": self.citations,
            "steps": len(self.steps) - 1,
            "forwards": self.forwards,
            "retrievals": self.retrievals,
            "tokens": self.tokens_committed,
            "seconds": {name: round(value, 6) for name, value in self.seconds.items()},
        }
        return record | {key: value for key in ("cut", "error") if (value := getattr(self, key))}
