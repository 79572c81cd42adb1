"""Answers questions from any iterator: a thin driver of the engine."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import islice

from dlm_rag.config import DecodeConfig, EngineConfig
from dlm_rag.decode.engine import Engine, with_checkpoints_own
from dlm_rag.decode.proposer import DenoiserProposer
from dlm_rag.decode.rollout import Rollout
from dlm_rag.errors import ConfigError, QuestionError
from dlm_rag.model.denoiser import Denoiser
from dlm_rag.questions import Question, typed_questions
from dlm_rag.retrieval.base import Retriever
from dlm_rag.tokenizer import Tokenizer


class Decoder:
    """Answers questions with a denoiser, a retriever and a `DecodeConfig`.

    `evidence_layout` and the lengths of canvas and blocks default to the checkpoint's own. `engine` says
    how the work is done; it changes no token, but `compile` rounding. Raises `ConfigError` for a layout
    that the prompt template cannot have.
    """

    def __init__(
        self,
        denoiser: Denoiser,
        retriever: Retriever,
        tokenizer: Tokenizer,
        config: DecodeConfig | None = None,
        evidence_layout: str | None = None,
        engine: EngineConfig | None = None,
    ) -> None:
        self.denoiser, self.retriever, self.tokenizer = denoiser, retriever, tokenizer
        self.config = with_checkpoints_own(config or DecodeConfig(), denoiser.config)
        self.evidence_layout = evidence_layout or denoiser.config.evidence_layout
        if self.evidence_layout == "independent" and tokenizer.template.numbered:
            raise ConfigError(
                "evidence_layout=independent needs a prompt whose facts have no number: make the tokenizer "
                "with Tokenizer.from_pretrained(path, 'independent')"
            )
        engine = engine or EngineConfig()
        if engine.compile:
            denoiser.compile_layers()
        self.proposer = DenoiserProposer(denoiser, tokenizer.mask_id, engine)

    def forget(self) -> None:
        """Drops all keys and values; to be called when the denoiser's weights have changed."""
        self.proposer.forget()

    def new_engine(self) -> Engine:
        """An engine to be stepped by hand; it shares what is kept with this decoder's others."""
        parts = self.proposer, self.retriever, self.tokenizer
        return Engine(*parts, self.config, self.evidence_layout, self.denoiser.heads)

    def describe(self) -> str:
        """Device, dtype, kernel and layout, in words for a person, and what was reused."""
        denoiser, reuse = self.denoiser, self.proposer.reuse
        dtype = str(denoiser.dtype).removeprefix("torch.")
        used = f"{denoiser.device.type} {dtype} {denoiser.backend}, {self.evidence_layout} evidence"
        if reuse.wanted:
            used += f", {reuse.share:.1%} of it reused"
        if reuse.evicted:
            used += f", {reuse.evicted:,} passages left the pool (engine.pool_gib)"
        graphs = denoiser.compilations
        return used if graphs is None else f"{used}, {graphs} graphs compiled"

    def decode(self, questions: Sequence[str | Question]) -> list[Rollout]:
        """One finished rollout per question, in order.

        Raises `QuestionError` for a blank question. What fails for one question alone (it does not
        fit the context; its search or its logits fail) is the `error` of its rollout, and logged.
        """
        asked = as_questions(questions)
        by_id = {rollout.id: rollout for rollout in self.stream(asked)}
        return [by_id[question.id] for question in asked]

    def stream(
        self, questions: Iterable[Question], on_step: Callable[[Rollout], None] | None = None
    ) -> Iterator[Rollout]:
        """Finished rollouts, each as soon as it is complete.

        Questions are taken from the iterator as places get free, never before. `on_step` is called with
        the growing rollout of every question after each of its steps.
        """
        source = iter(questions)
        with self.new_engine() as engine:
            while True:
                for question in islice(source, engine.capacity):
                    engine.submit(question)
                if not engine.busy:
                    return
                for event in engine.step():
                    if on_step is not None and not event.rollout.error:
                        on_step(event.rollout)
                    if event.finished:
                        yield event.rollout


def as_questions(questions: Sequence[str | Question]) -> list[Question]:
    """Questions as records; texts get the ids q1, q2, ... by their place."""
    if isinstance(questions, str):
        raise QuestionError("questions are a list: put the text into brackets, as in [question]")
    numbered = typed_questions([q if isinstance(q, str) else q.question for q in questions])
    asked = [
        given if isinstance(given, Question) else record
        for given, record in zip(questions, numbered, strict=True)
    ]
    if len({question.id for question in asked}) < len(asked):
        raise QuestionError("two questions have the same id")
    return asked
