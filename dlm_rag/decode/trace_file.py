"""Trace files: rollouts as JSON lines, from which every prompt, page and training row can be made again.

    {"trace": 2, "prompt_layout": ..., "settings": {...}, ...}      what the whole file has in common
    {"passage": "emma", "text": "..."}                              before the first question that found it
    {"id": "q1", "question": "...", "steps": [...], ...}            one line a question, as it finishes

Needed besides the file is the tokenizer of the checkpoint; neither corpus nor retriever nor weights.
What only some steps have (`OPTIONAL_STEP_KEYS`) is left out of the others. Readers pass over keys of a
step that they do not know, so one more of them, as `guesses`, is no new version.
"""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, TypeVar

from dlm_rag.config import DecodeConfig
from dlm_rag.decode.rollout import Rollout, RolloutStep
from dlm_rag.errors import TraceError
from dlm_rag.files.checked_json import validate_json_value
from dlm_rag.files.journal import Journal, read_json_lines
from dlm_rag.model.denoiser_config import DenoiserConfig
from dlm_rag.tokenizer import Tokenizer
from dlm_rag.tokenizer.prompts import PromptTemplate

Line = TypeVar("Line")
TRACE_VERSION = 2
# left out of a step that has none
OPTIONAL_STEP_KEYS = ("remasked", "dropped", "edited", "action", "guesses")


@dataclass(frozen=True)
class TraceHeader:
    """What the questions of a trace file have in common; `settings` are those of `DecodeConfig`."""

    prompt_layout: str
    context_length: int
    passage_length: int
    shifted: bool  # as in `DenoiserConfig`
    template: PromptTemplate
    mask_id: int
    end_ids: tuple[int, ...]
    top_k: int
    model: str  # fingerprints
    corpus: str
    settings: dict[str, Any]
    block_size: int | None = None
    block_grid: str = "canvas"


def build_trace_header(
    shape: DenoiserConfig,
    tokenizer: Tokenizer,
    prompt_layout: str,
    settings: DecodeConfig,
    *,
    top_k: int,
    model: str,
    corpus: str,
) -> TraceHeader:
    """The header of what a denoiser of this shape decodes; model, corpus: fingerprints."""
    return TraceHeader(
        prompt_layout=prompt_layout,
        context_length=shape.max_position_embeddings,
        passage_length=shape.passage_length,
        shifted=shape.shifted,
        template=tokenizer.template,
        mask_id=tokenizer.mask_id,
        end_ids=tuple(sorted(tokenizer.end_ids)),
        top_k=top_k,
        model=model,
        corpus=corpus,
        settings=asdict(settings),
        block_size=shape.block_size,
        block_grid=shape.block_grid,
    )


@dataclass(frozen=True)
class PassageText:
    """The text of a passage as the retriever gave it; of two for one id the later counts from there on."""

    passage: str  # its id
    text: str


@dataclass(frozen=True)
class AnswerLine:
    """What tells the lines of questions apart, in traces and in files of answers."""

    id: str
    question: str
    response: str
    error: str = ""

    @property
    def answer_hash(self) -> int:
        """Tells in this process whether the lines of two files are of the same answer."""
        return hash((self.question, self.response))


@dataclass
class TraceContents:
    """What a trace file holds, in little memory: texts and answers by their hashes in this process."""

    header: TraceHeader | None = None  # None for a file without lines
    passages: dict[str, int] = field(default_factory=dict)
    questions: dict[str, int] = field(default_factory=dict)  # `AnswerLine.answer_hash` by id


class TraceWriter:
    """Appends finished rollouts to a trace file, each passage text once; goes on with what it holds.

    The constructor writes nothing. The caller sees to it that no other process writes the file, and that
    its last line has an end.
    """

    def __init__(self, path: Path, header: TraceHeader, held: TraceContents | None = None) -> None:
        held = held or scan_trace(path)
        self.file, self._written = Journal(path), dict(held.passages)
        self._common = (held.header or header).settings
        self._first = [] if held.header else [{"trace": TRACE_VERSION, **asdict(header)}]

    def write(self, rollout: Rollout) -> None:
        """Adds the header and the texts that the file lacks, then the line of the question."""
        new = {
            name: rollout.passages[name]
            for name in _passage_ids(rollout.steps)
            if self._written.get(name) != hash(rollout.passages[name])
        }
        texts = [{"passage": name, "text": text} for name, text in new.items()]
        self.file.append(*self._first, *texts, _question_record(rollout, self._common))
        self._first = []
        self._written |= {name: hash(text) for name, text in new.items()}


def read_trace_header(path: Path) -> TraceHeader:
    """What the questions of a trace file have in common; raises `TraceError` where it has no lines."""
    entry = next((entry for _, entry in _entries(path, AnswerLine)), None)
    if isinstance(entry, TraceHeader):
        return entry
    raise TraceError(f"{path} is no trace: it is empty")


def read_trace(path: Path) -> Iterator[Rollout]:
    """The rollouts of a trace file, one by one; only passage texts stay in memory.

    `evidence_texts` are missing. A last line that was cut short is skipped.
    Raises `TraceError` naming file and line.
    """
    settings, texts = dict[str, Any](), dict[str, str]()
    for place, entry in _entries(path, Rollout):
        if isinstance(entry, TraceHeader):
            settings = entry.settings
        elif isinstance(entry, PassageText):
            texts[entry.passage] = entry.text
        else:
            names = _passage_ids(entry.steps)
            lacking = next((name for name in names if name not in texts), None)
            if lacking is not None:
                raise TraceError(f"{place}: the text of passage '{lacking}' is not in the file")
            passages, own = {name: texts[name] for name in names}, settings | entry.settings
            yield replace(entry, settings=own, passages=passages, evidence_texts={}, finished=True)


def scan_trace(path: Path) -> TraceContents:
    """What a trace file holds; nothing where there is no file. Raises `TraceError` naming file and line."""
    held = TraceContents()
    for _, entry in _entries(path, AnswerLine) if path.is_file() else ():
        if isinstance(entry, TraceHeader):
            held.header = entry
        elif isinstance(entry, PassageText):
            held.passages[entry.passage] = hash(entry.text)
        else:
            held.questions[entry.id] = entry.answer_hash
    return held


def _entries(path: Path, kind: type[Line]) -> Iterator[tuple[str, TraceHeader | PassageText | Line]]:
    """The lines of a trace file, told apart, with their places; those of questions as `kind`.

    Raises `TraceError`.
    """
    if not path.is_file():
        raise TraceError(f"trace '{path}' was not found")
    for number, (place, record) in enumerate(read_json_lines(path, TraceError)):
        if not number and record.get("trace", TRACE_VERSION) != TRACE_VERSION:
            raise TraceError(
                f"{path} is a trace of version {record['trace']!r}, known is {TRACE_VERSION}: read it with "
                "the program that wrote it"
            )
        none = f"{place}: this is no line of a trace"
        if not number and "trace" not in record:
            raise TraceError(f"{none} of version {TRACE_VERSION}, which begins with its settings")
        if not number:
            yield place, validate_json_value(TraceHeader, record, none, TraceError)
        elif "passage" in record:
            yield place, validate_json_value(PassageText, record, none, TraceError)
        else:
            steps = record["steps"] if isinstance(record.get("steps"), list) else []
            if any(isinstance(step, dict) and step.get("deleted") for step in steps):
                raise TraceError(
                    f"{place}: tokens are deleted and inserted, which only version 0.3 reads: decode again"
                )
            wanted = {"steps": None, "response": None}  # which a rollout that begins does without
            yield place, validate_json_value(kind, wanted | record, none, TraceError)


def _question_record(rollout: Rollout, common: Mapping[str, Any]) -> dict[str, Any]:
    """The line of a question; of its settings those that differ from the `common` ones of the header."""
    always = ("id", "question", "prompt_layout", "canvas_length", "steps", "response")
    record = {name: getattr(rollout, name) for name in always}
    record["steps"] = [
        {k: v for k, v in asdict(step).items() if v or k not in OPTIONAL_STEP_KEYS}
        for step in rollout.steps
    ]
    own = {k: v for k, v in rollout.settings.items() if k not in common or common[k] != v}
    optional = {"settings": own} | {k: getattr(rollout, k) for k in ("citations", "cut", "error", "usage")}
    if rollout.answer_form != "marked":
        optional["answer_form"] = rollout.answer_form
    return record | {key: value for key, value in optional.items() if value}


def _passage_ids(steps: Iterable[RolloutStep]) -> list[str]:
    return list(dict.fromkeys(name for step in steps for name in (*step.passage_ids, *step.dropped)))
