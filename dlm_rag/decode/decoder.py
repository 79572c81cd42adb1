"""Answers questions from any iterator: a thin driver of the engine."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import astuple, dataclass
from itertools import islice

from dlm_rag.config import DecodeConfig, EngineConfig
from dlm_rag.decode.engine import Engine, with_checkpoint_defaults
from dlm_rag.decode.memory_budget import DecodeBudget
from dlm_rag.decode.model_runner import MaskedModelRunner
from dlm_rag.decode.rollout import Rollout
from dlm_rag.decode.uniform_runner import UniformModelRunner
from dlm_rag.errors import ConfigError, QuestionError
from dlm_rag.evidence.segment_kv_cache import CacheStats
from dlm_rag.model.denoiser import AnyDenoiser, Denoiser
from dlm_rag.model.evidence_layouts import EVIDENCE_LAYOUTS
from dlm_rag.model.policy_heads import copy_heads_to_cpu
from dlm_rag.questions import Question, parse_typed_questions
from dlm_rag.retrieval.base import Retriever
from dlm_rag.tokenizer import Tokenizer


@dataclass(frozen=True)
class DecoderStats:
    """What a decoder, or many of them, work with, in words; what they have reused and compiled."""

    runtime: str
    cache_stats: CacheStats
    compiled_graphs: int | None = None

    def __add__(self, other: "DecoderStats") -> "DecoderStats":
        """Both together; `used` is the same for decoders of one job."""
        counts = zip(astuple(self.cache_stats), astuple(other.cache_stats), strict=True)
        graphs = (
            None if self.compiled_graphs is None else self.compiled_graphs + (other.compiled_graphs or 0)
        )
        return DecoderStats(self.runtime, CacheStats(*(one + more for one, more in counts)), graphs)

    def describe(self) -> str:
        """In words for a person."""
        used, reuse = self.runtime, self.cache_stats
        if reuse.requested_tokens:
            used += f", {reuse.reused_share:.1%} of it reused"
        if reuse.evicted_segments:
            used += f", {reuse.evicted_segments:,} passages left the pool (engine.prefix_cache_gib)"
        return used if self.compiled_graphs is None else f"{used}, {self.compiled_graphs} graphs compiled"


class Decoder:
    """Answers questions with a denoiser, a retriever and a `DecodeConfig`.

    `evidence_layout` and the lengths of canvas and blocks default to the checkpoint's own. `engine` says
    how the work is done; it changes no token, but `compile` rounding. Raises `ConfigError` for a layout
    that the prompt template cannot have.
    """

    def __init__(
        self,
        denoiser: AnyDenoiser,
        retriever: Retriever,
        tokenizer: Tokenizer,
        config: DecodeConfig | None = None,
        evidence_layout: str | None = None,
        engine: EngineConfig | None = None,
    ) -> None:
        self.denoiser, self.retriever, self.tokenizer = denoiser, retriever, tokenizer
        self.config = with_checkpoint_defaults(config or DecodeConfig(), denoiser.config)
        self.evidence_layout = evidence_layout or denoiser.config.evidence_layout
        separate = EVIDENCE_LAYOUTS[self.evidence_layout].separate_passages
        if separate and tokenizer.template.numbers_facts:
            raise ConfigError(
                f"evidence_layout={self.evidence_layout} needs a prompt whose facts have no number: "
                f"make the tokenizer with Tokenizer.from_pretrained(path, '{self.evidence_layout}')"
            )
        self.record_provisional = False  # whether steps record what is guessed at masked positions
        self._engine = engine or EngineConfig()
        if self._engine.memory_gib is not None:
            raise ConfigError(
                "engine.memory_gib is reckoned before weights are read, as sample and evaluate do it: "
                "leave it out here, and call `set_memory_budget`"
            )
        self.model_runner: MaskedModelRunner | UniformModelRunner
        if not isinstance(denoiser, Denoiser):
            self.model_runner = UniformModelRunner(denoiser)
            return
        if self._engine.compile:
            denoiser.compile_layers()
        self.model_runner = MaskedModelRunner(denoiser, tokenizer.mask_id, self._engine)

    def set_memory_budget(self, budget: DecodeBudget) -> None:
        """Drops all keys and values, and takes no more for them than `plan_decode_budget` has found."""
        assert isinstance(self.denoiser, Denoiser), "others refuse a budget"
        self.model_runner = MaskedModelRunner(self.denoiser, self.tokenizer.mask_id, self._engine, budget)

    def reset_cache(self) -> None:
        """Drops all keys and values; to be called when the denoiser's weights have changed."""
        self.model_runner.reset_cache()

    def new_engine(self) -> Engine:
        """An engine to be stepped by hand; it shares what is kept with this decoder's others."""
        parts = self.model_runner, self.retriever, self.tokenizer
        heads = None if self.denoiser.heads is None else copy_heads_to_cpu(self.denoiser.heads)
        return Engine(*parts, self.config, self.evidence_layout, heads)

    @property
    def stats(self) -> "DecoderStats":
        """What this decoder works with, and what came of it until now."""
        denoiser, dtype = self.denoiser, str(self.denoiser.dtype).removeprefix("torch.")
        used = f"{denoiser.device.type} {dtype} {denoiser.backend}, {self.evidence_layout} evidence"
        return DecoderStats(used, self.model_runner.cache_stats, denoiser.compilations)

    def describe(self) -> str:
        """Device, dtype, kernel and layout, in words for a person, and what was reused."""
        return self.stats.describe()

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
                    engine.submit(question, guesses=self.record_provisional)
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
    numbered = parse_typed_questions([q if isinstance(q, str) else q.question for q in questions])
    asked = [
        given if isinstance(given, Question) else record
        for given, record in zip(questions, numbered, strict=True)
    ]
    if len({question.id for question in asked}) < len(asked):
        raise QuestionError("two questions have the same id")
    return asked
