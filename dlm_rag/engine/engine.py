"""Decoding: questions come and go, and all that are in flight take their denoising steps together.

    step 0     retrieve with the question alone
    step s     encode the evidence and denoise the canvas       (engine/runner.py)
               commit what the commit rule chooses              (engine/rules.py)
               build the query from what the canvas says now    (retrieval/base.py)
               retrieve; what was found is the evidence of step s + 1

Rows are packed without padding and share nothing but the call, so a question gets the same tokens alone
and in a batch; what goes wrong in one row ends that row alone. Every row has decode settings of its own.
"""

import os
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import fields
from functools import cached_property
from itertools import count, islice
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

from dlm_rag.cli import print_note
from dlm_rag.config import Config, DecodeConfig, EngineConfig
from dlm_rag.config.fields import (
    check_effects,
    check_section,
    fill_unset,
    find_idle_settings,
    flatten_settings,
    replace_settings,
    suggest_setting,
)
from dlm_rag.config.sections import list_ruled_out
from dlm_rag.decode.provisional_log import ProvisionalRecorder
from dlm_rag.decode.rollout import Rollout
from dlm_rag.engine.copying import WordTable
from dlm_rag.engine.row import Row, Ticket, make_canvas
from dlm_rag.engine.rules import find_rule
from dlm_rag.engine.runner import DecoderStats, MaskedModelRunner, ModelRunner, check_unread_settings
from dlm_rag.engine.step import LaunchedStep, Searches, finish_step, launch_step
from dlm_rag.errors import ConfigError, NamesRemedy
from dlm_rag.evidence.prompt_segments import check_finished_blocks
from dlm_rag.files.hub import MODEL_NAME, READER, SHIPPED_FOLDER, WORLD_MODELS, is_world_model
from dlm_rag.machine import choose_device, choose_dtype, use_one_thread_after_fork
from dlm_rag.model.checkpoint import open_checkpoint
from dlm_rag.model.denoiser import AnyDenoiser, Denoiser, load_denoiser
from dlm_rag.model.denoiser_config import EVIDENCE_LAYOUTS, DenoiserConfig
from dlm_rag.model.quantize import describe_precision
from dlm_rag.nvtx_ranges import StageClock, mark_event, profile_stage, profile_step
from dlm_rag.questions import Askable, Question, as_questions, number_questions
from dlm_rag.randomness import make_keyed_generator
from dlm_rag.retrieval import load_retriever
from dlm_rag.retrieval.base import Retriever, find_query_policy
from dlm_rag.tokenizer import Tokenizer

SECTIONS = ("model", "retrieval", "decode", "engine")  # whose settings `load` takes, by their bare names
WORLD_CORPUS = SHIPPED_FOLDER / "world" / "corpus.jsonl"
_tickets = count(1)  # of all engines of the process: a retriever may serve several


class Decoder(NamesRemedy):
    """Answers questions with a denoiser, a retriever and a `DecodeConfig`; `dlm_rag.load` makes one.

    `evidence_layout` and the lengths of canvas and blocks default to the checkpoint's own. `engine` says
    how decoding is run; it changes no token except by rounding (`compile`, `cuda_graphs`,
    `cache_dtype=int8`). Raises `ConfigError` for a layout that the prompt template cannot have.
    """

    _instead: ClassVar = {
        **dict.fromkeys("generate answer chat run predict query pipe".split(), "ask(question)"),
        "invoke": "ask(question)", "ainvoke": "ask(question)", "eval": "the decoder as it is",
        **dict.fromkeys(("cuda", "to", "half"), 'dlm_rag.load(model, corpus, device="cuda")'),
        **dict.fromkeys(("retrieve", "search"), "decoder.retriever.search(text)"),
        **dict.fromkeys(("batch", "abatch", "batch_decode"), "decode(questions)"),
        **dict.fromkeys(("generate_stream", "astream"), "stream(questions, on_step)"),
        **{name: f"denoiser.{name}" for name in ("device", "dtype", "parameters", "save_pretrained")},
        "add_documents": "dlm_rag.load(model, corpus)", "index": "retriever", "corpus": "retriever.corpus",
        "model": "denoiser", "evaluate": "`dlm-rag evaluate`", "train": "`dlm-rag train`",
    }  # fmt: skip

    def __init__(
        self, denoiser: AnyDenoiser, retriever: Retriever, tokenizer: Tokenizer,
        config: DecodeConfig | None = None, evidence_layout: str | None = None,
        engine: EngineConfig | None = None,
    ) -> None:  # fmt: skip
        if not hasattr(retriever, "search"):
            raise ConfigError(f"{type(retriever).__name__} is no retriever: use load_retriever(corpus)")
        self.denoiser, self.retriever, self.tokenizer = denoiser, retriever, tokenizer
        self.evidence_layout = layout = evidence_layout or denoiser.config.evidence_layout
        if layout not in EVIDENCE_LAYOUTS:
            raise ConfigError(f"evidence_layout={layout} is not one of {', '.join(EVIDENCE_LAYOUTS)}")
        if EVIDENCE_LAYOUTS[layout].separate_passages and tokenizer.template.numbers_facts:
            raise ConfigError(
                f"evidence_layout={layout} needs a prompt whose facts have no number: make the tokenizer "
                f"with Tokenizer.from_pretrained(path, '{layout}')"
            )
        if layout != (own := denoiser.config.evidence_layout):
            print_note(f"evidence_layout={layout}: the model was trained with {own}, and may answer worse")
        self.config = self.resolve_settings(config or DecodeConfig())  # with the checkpoint's own
        check_section("decode", self.config, ())
        self.record_provisional = False  # whether steps record what is guessed at masked positions
        self.lock, self._process = threading.RLock(), os.getpid()  # one step at a time, whatever the thread
        self.model_runner: ModelRunner
        if isinstance(denoiser, Denoiser):
            self.model_runner = MaskedModelRunner(denoiser, tokenizer.mask_id, engine or EngineConfig())
        else:
            self.model_runner = denoiser.make_runner()

    @classmethod
    def from_pretrained(
        cls, model: str | Path | None = None, corpus: Any = None, **settings: Any
    ) -> "Decoder":
        """The decoder that `dlm_rag.load` makes of the same arguments."""
        return load(model, corpus, **settings)

    def __repr__(self) -> str:
        dtype = str(self.denoiser.dtype).removeprefix("torch.")
        used = f"{dtype} on {self.denoiser.device}, {self.evidence_layout} evidence"
        return f"Decoder({used}, {self.retriever!r})"

    def __deepcopy__(self, memo: dict[int, Any]) -> "Decoder":
        raise ConfigError("a decoder is not copied: share it, it serves several threads, or load another")

    def resolve_settings(self, settings: DecodeConfig, **changes: Any) -> DecodeConfig:
        """`settings` with these changes, in place of what the checkpoint alone set and what another mode
        reads; raises `ConfigError` for what this decoder cannot take."""
        shape, known = self.denoiser.config, DecodeConfig.__dataclass_fields__
        mode = changes.get("mode") or settings.mode
        idle = find_idle_settings("decode", settings, {"decode.mode": mode} if mode else {})
        unset = (*shape.decode_settings, *idle, "block_length")  # which depends on the canvas
        bare = fill_unset(settings, {name: known[name].default for name in unset})
        found = resolve_settings(replace_settings(bare, **changes), shape, self.evidence_layout)
        if changes:
            check_section("decode", found, changes)
        return found

    def new_engine(self, **settings: Any) -> "Engine":
        """An engine to be stepped by hand, on this decoder's cache; settings: in place of the own."""
        if self._process != os.getpid():
            self._process, self.lock = os.getpid(), threading.RLock()
            use_one_thread_after_fork()
        return Engine(self, self.resolve_settings(self.config, **settings))

    @cached_property
    def words(self) -> WordTable:
        """How words go on, for `decode.copy_words`."""
        return WordTable(self.tokenizer, self.denoiser.config.vocab_size, self.config.batch_size)

    @property
    def stats(self) -> DecoderStats:
        """What this decoder works with, and what came of it until now."""
        denoiser, runner = self.denoiser, self.model_runner
        used = f"{describe_precision(denoiser)} {denoiser.backend}, {self.evidence_layout} evidence"
        store = "" if runner.cache is None or runner.cache.store is None else runner.cache.store.describe()
        return DecoderStats(used, runner.cache_stats, denoiser.compilations, store)

    def describe(self) -> str:
        """Device, dtype, kernel and layout, in words for a person, and what was reused."""
        return self.stats.describe()

    def ask(self, question: Askable, **settings: Any) -> Rollout:
        """The finished rollout of one question; it prints as its answer."""
        return self.decode([question], **settings)[0]

    __call__ = ask

    def decode(self, questions: Askable | Iterable[Askable], **settings: Any) -> list[Rollout]:
        """One finished rollout per question, in order; settings: as in `new_engine`.

        Raises `QuestionError` for a blank question. If one question fails (it does not fit the context, or
        its search or logits fail), its rollout has an `error`, and the others continue.
        """
        asked = as_questions(questions)
        by_id = {rollout.id: rollout for rollout in self.stream(asked, **settings)}
        return [by_id[question.id] for question in asked]

    def stream(
        self,
        questions: Askable | Iterable[Askable],
        on_step: Callable[[Rollout], None] | None = None,
        **settings: Any,
    ) -> Iterator[Rollout]:
        """Finished rollouts, each as soon as it is complete; settings: as in `new_engine`.

        A question is taken from the iterator when a row is free. `on_step` is called with the growing
        rollout of every question after each of its steps.
        """
        source = number_questions(questions)
        with self.new_engine(**settings) as engine:
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


def load(model: str | Path | None = None, corpus: Any = None, **settings: Any) -> Decoder:
    """The decoder of a model and a corpus, ready for `ask`, `decode` and `stream`.

    model: a folder, a hub id, `smollm2`, or what ships (`dlm_rag/shipped/model`); unset: SmolLM2 with the
    adapter that ships (93 MB are fetched at the first use), without a corpus the model of the invented
    world. corpus: a file or folder, passages as texts or dicts, or a retriever. settings: any of `model`,
    `retrieval`, `decode` and `engine` by its bare name, as `top_k=3, device="cuda"`. Raises `UserError`.
    """
    default = WORLD_MODELS[0] if corpus is None and "url" not in settings else READER
    if not isinstance(model, str | Path | None):
        raise ConfigError(f"load: the model is {type(model).__name__}: write load(corpus=...) for texts")
    name = str(default if model is None else model)
    sections = {section: getattr(Config(), section) for section in SECTIONS}
    names = {item.name: name for name in SECTIONS for item in fields(sections[name])}
    for key, value in settings.items():
        if key not in names:
            instead = {"retriever": "corpus", "tokenizer": "model"}.get(key)  # of what it takes besides
            right = f" (nearest: '{instead}')" if instead else suggest_setting(key, names)
            raise ConfigError(f"load has no setting '{key}'{right}")
        if key in ("device", "dtype"):  # also as objects of torch
            value = str(value).removeprefix("torch.")
        sections[names[key]] = replace_settings(sections[names[key]], **{key: value})
    config = Config(**sections | {"model": replace_settings(sections["model"], path=name)})
    check_effects([(config, [f"{names[key]}.{key}" for key in settings])])
    if name == MODEL_NAME:
        print_note(f"{name} is the model as published; what is trained to answer from passages is {READER}")
    wanted, retrieval = sections["model"], sections["retrieval"]
    checkpoint = open_checkpoint(name, wanted.block_size)
    check_unread_settings(wanted, sections["engine"], checkpoint.config)
    device = choose_device(wanted.device)
    layout = wanted.evidence_layout or checkpoint.config.evidence_layout
    if corpus is None and retrieval.url is None:
        if not is_world_model(name):
            raise ConfigError("load: give corpus= a file, a folder, a list of texts, or a retriever")
        corpus = WORLD_CORPUS
    if hasattr(corpus, "search") and hasattr(corpus, "key"):
        retriever = corpus
        if own := [key for key in settings if names[key] == "retrieval"]:
            raise ConfigError(f"load: {own[0]} has no effect on a retriever that is made: leave it out")
    else:
        retriever = load_retriever(retrieval, corpus, model=name)
    denoiser = load_denoiser(
        checkpoint, device, choose_dtype(wanted.dtype, device), wanted.attn_implementation, wanted.quantize,
        wanted.device_map,
    )  # fmt: skip
    tokenizer = Tokenizer.from_pretrained(checkpoint, layout)
    return Decoder(denoiser, retriever, tokenizer, sections["decode"], layout, sections["engine"])


class StepEvent(NamedTuple):
    """A question has taken a step; its rollout grows with the next one unless it is `finished`."""

    ticket: Ticket
    rollout: Rollout

    @property
    def finished(self) -> bool:
        return self.rollout.finished


class Engine(AbstractContextManager["Engine"]):
    """Answers questions for a decoder; everything in flight is its state.

        engine = decoder.new_engine()
        ticket = engine.submit(Question("1", "Who wrote Emma?"))
        while engine.busy:
            for event in engine.step():
                print(event.ticket, event.rollout.tokens_committed, event.finished)

    The decoder's settings are those of questions submitted without their own; of these `batch_size`, how
    many questions have a place, and `overlap` hold for all.
    """

    def __init__(self, decoder: Decoder, settings: DecodeConfig) -> None:
        """settings: in place of the decoder's."""
        self.decoder, self.settings, self.tokenizer = decoder, settings, decoder.tokenizer
        self.model_runner, layout = decoder.model_runner, decoder.evidence_layout
        self._searches = Searches(self.model_runner, decoder.retriever, self.tokenizer, layout)
        self._clock = StageClock()
        halves = 2 if self.settings.overlap == "pipeline" and self.settings.batch_size > 1 else 1
        self._groups = [list[Row]() for _ in range(halves)]  # each takes its steps together
        self._launched: dict[int, LaunchedStep] = {}  # by the id of the group
        self._turn = 0

    def __exit__(self, *error: object) -> None:
        self.close()

    @property
    def capacity(self) -> int:
        """How many questions may be submitted now."""
        return self.settings.batch_size - sum(map(len, self._groups))

    @property
    def busy(self) -> bool:
        return any(self._groups)

    def submit(
        self, question: Question, settings: DecodeConfig | None = None, guesses: bool = False
    ) -> Ticket:
        """Takes a question in; it takes part in the next step. Raises `RuntimeError` without capacity.

        guesses: whether its steps record what is guessed at masked positions; no token depends on it.
        """
        if self.capacity <= 0:
            raise RuntimeError("the engine has no free place: submit when its capacity is above 0")
        own, shape = self.settings, self.model_runner.shape
        if settings is not None:
            own = self.decoder.resolve_settings(settings, batch_size=own.batch_size, overlap=own.overlap)
        length, layout = own.max_new_tokens, self.decoder.evidence_layout
        assert length is not None
        generator = make_keyed_generator(own.seed, question.id)
        row = Row(
            ticket=Ticket(next(_tickets)),
            question=question,
            settings=own,
            canvas=make_canvas(own, shape, self.tokenizer, generator),
            generator=generator,
            rollout=Rollout(question.id, question.question, layout, length, settings=flatten_settings(own)),
            end_ids=self.tokenizer.end_ids,
            words=self.decoder.words if own.copy_words else None,
            recorder=ProvisionalRecorder(self.tokenizer.token_text) if guesses else None,
        )
        min(self._groups, key=len).append(row)
        return row.ticket

    def cancel(self, ticket: Ticket) -> None:
        """Drops a question in flight and all that is kept for it; raises `KeyError` for one that is not."""
        with self.decoder.lock:
            for group in self._groups:
                for row in [row for row in group if row.ticket == ticket]:
                    row.rollout.error = "cancelled"
                    self._remove_row(group, row)
                    return
        raise KeyError(f"ticket {ticket} is not in flight")

    def close(self) -> None:
        """Cancels what is in flight and ends the search thread."""
        self._cancel_all()  # nobody takes what their searches find, nor what they raise
        self._searches.close()

    def _cancel_all(self) -> None:
        for row in [row for group in self._groups for row in group]:
            self.cancel(row.ticket)

    def step(self) -> list[StepEvent]:
        """One step of all rows, or of one half of them in turn with `overlap=pipeline`.

        Returns an event for every question whose step is over, in the order in which they came. A question
        that failed (it does not fit the context, or alone the memory; its search or logits fail) is over,
        with an `error`. What else the model raises is passed on; the questions of that step are cancelled.
        """
        group, other = (self._groups[(self._turn + n) % len(self._groups)] for n in (0, 1))
        try:
            with self.decoder.lock, self._clock, profile_step(self._turn, len(group)):
                closed = self._take_step(group, other)
        except BaseException:
            self._cancel_all()  # half a step is no state to go on from
            self._launched.clear()
            raise
        self._turn += 1
        for row in closed:
            if row.rollout.finished:
                mark_event(f"question {row.question.id}")
                with self.decoder.lock:
                    self._remove_row(group, row)
        return [StepEvent(row.ticket, row.rollout) for row in closed]

    def _take_step(self, group: list[Row], other: list[Row]) -> list[Row]:
        if self.settings.overlap == "none":
            self._launch(group)
            self._commit(group, in_background=False)
            return self._end_step(group, list(group))
        # This group is launched before the other one is waited for, and searches are under way while the
        # other denoises: the device has work while the host has. The tokens are the same.
        closed = self._end_step(group, [row for row in group if row.step or row.record.query is not None])
        self._launch(group)
        self._commit(other, in_background=True)
        return closed

    def _launch(self, group: list[Row]) -> None:
        rows = [row for row in group if row.is_active and row.evidence is not None]
        if rows:
            self._launched[id(group)] = launch_step(self.model_runner, rows)
        self._split_seconds(rows)

    def _commit(self, group: list[Row], in_background: bool) -> None:
        """Waits for the step that was launched, commits, and starts the searches that are due."""
        if (launched := self._launched.pop(id(group), None)) is not None:
            finish_step(launched, self.tokenizer)
            self._split_seconds(launched.rows)
        rows = [row for row in group if row.is_active]
        self._searches.start(rows, in_background)
        self._split_seconds(rows)

    def _end_step(self, group: list[Row], rows: list[Row]) -> list[Row]:
        """Takes what was found for a group, and closes the step of these of its rows."""
        self._split_seconds(self._searches.apply(group))
        for row in rows:
            row.end_step()
        answered = [row for row in rows if not row.rollout.error and row.is_done]
        self._searches.note_relevance(answered)
        with profile_stage("detokenize"):
            for row in answered:
                row.finish(self.tokenizer)
                row.record = row.rollout.steps[-1]  # to which these seconds belong
        self._split_seconds(answered)
        return rows

    def _split_seconds(self, rows: list[Row]) -> None:
        spent = self._clock.pop_seconds().items()
        for seconds in [row.record.seconds for row in rows]:
            for name, value in spent:
                seconds[name] = seconds.get(name, 0.0) + value / len(rows)

    def _remove_row(self, group: list[Row], row: Row) -> None:
        group.remove(row)
        self.model_runner.release(row.ticket)


def resolve_settings(
    settings: DecodeConfig, shape: DenoiserConfig, layout: str | None = None
) -> DecodeConfig:
    """`settings` with the checkpoint's own lengths and rules for what is unset.

    layout: of the evidence, by default the checkpoint's own. Raises `ConfigError` for settings that the
    checkpoint does not support or read, and for a rule or query policy that cannot be imported.
    """
    if shape.adapter is not None:
        return shape.adapter.resolve_settings(settings, shape)
    block, modes = shape.block_size, shape.decode_modes
    if (mode := settings.mode or shape.decode_settings.get("mode") or modes[0]) not in modes:
        raise ConfigError(f"decode.mode={mode}: this model is only for {' and '.join(modes)}, leave it out")
    facts: dict[str, Any] = {"attention_blocks": bool(block), "decode.mode": mode}
    if settings.abstain is None:
        facts["decode.abstain"] = shape.abstain
    order, way = shape.finished_block_context, "threshold" if mode == "diffusion" else "left_to_right"
    settings = _take_own_settings(settings, shape.decode_settings, {"decode.commit_rule": way} | facts)
    rule = settings.commit_rule or way
    idle = find_idle_settings("decode", settings, facts | {"decode.commit_rule": rule})
    for name, reason in idle.items():
        if (name, settings.finished_block_context) != ("finished_block_context", order):
            raise ConfigError(f"decode.{name}={reason}: leave it out")
    if block and settings.block_length and block % settings.block_length:
        raise ConfigError(f"block_length={settings.block_length} must divide the model's blocks of {block}")
    length = settings.max_new_tokens or shape.canvas_length
    if not block and (settings.block_length or 0) > length:
        raise ConfigError(f"block_length={settings.block_length} is longer than max_new_tokens={length}")
    defaults: dict[str, Any] = {
        "mode": mode, "max_new_tokens": length, "finished_block_context": order, "abstain": shape.abstain
    }  # fmt: skip
    if mode == "diffusion":  # others read nothing else
        # Blocks of attention may be longer than the canvas, and are written whole.
        own_length = shape.block_length or 0
        defaults |= {"commit_rule": rule, "block_length": own_length if block else min(own_length, length)}
    changes = {name: value for name, value in defaults.items() if getattr(settings, name) is None}
    given, settings = settings.given, replace_settings(settings, **changes)
    settings.__dict__["given"] = given  # nobody has set the others
    find_query_policy(settings.query_policy)
    if settings.blocks_at_once > 1 and settings.tokens_per_step:
        raise ConfigError("tokens_per_step counts in one block: leave it or blocks_at_once out")
    if (find_rule(rule).samples or shape.predicts_next_block) and settings.blocks_at_once > 1:
        why = "predicts the first token of the next" if shape.predicts_next_block else "is sampled alone"
        raise ConfigError(
            f"blocks_at_once={settings.blocks_at_once}: a finished block {why} here; set blocks_at_once=1"
        )
    assert settings.finished_block_context is not None
    check_finished_blocks(shape, settings.finished_block_context, layout or shape.evidence_layout, mode)
    return settings


def _take_own_settings(
    settings: DecodeConfig, own: Mapping[str, Any], facts: Mapping[str, Any]
) -> DecodeConfig:
    """`settings` with those of a checkpoint that nobody has set and that, by the facts, have an effect."""
    ruled_out = list_ruled_out({name: getattr(settings, name) for name in settings.given})
    own = {name: value for name, value in own.items() if name not in settings.given | ruled_out}
    while True:
        found = fill_unset(settings, own)
        known = {k: v for k, v in flatten_settings(found, "decode.").items() if v is not None}
        values = {name: getattr(found, name) for name in own}
        idle = find_idle_settings("decode", found, {**facts, **known}, values)
        if not idle:
            return found
        own = {name: value for name, value in own.items() if name not in idle}
