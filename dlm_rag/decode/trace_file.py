"""Files of traces and of answers.

An answers file has one line a question, appended as it finishes; a stopped run goes on from there. Traces
are rollouts as JSON lines, from which every prompt, page and training row can be made again:

    {"trace": 2, "prompt_layout": ..., "settings": {...}, ...}      what the whole file has in common
    {"passage": "emma", "text": "..."}                              before the first question that found it
    {"id": "q1", "question": "...", "steps": [...], ...}            one line a question, as it finishes

Needed besides the file is the tokenizer of the checkpoint; neither corpus nor retriever nor weights.
What only some steps have (`OPTIONAL_STEP_KEYS`) is left out of the others. Readers pass over keys of a
step that they do not know, so one more of them, as `guesses`, is no new version.
"""

import json
import logging
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, TextIO

from dlm_rag.config import DecodeConfig
from dlm_rag.decode.rollout import Rollout, RolloutStep
from dlm_rag.errors import ConfigError, TraceError
from dlm_rag.files import journal
from dlm_rag.files.checked_json import read_json_or_empty, validate_json_value
from dlm_rag.files.paths import write_text_atomic
from dlm_rag.model.denoiser_config import DenoiserConfig
from dlm_rag.questions import Question
from dlm_rag.tokenizer import Tokenizer
from dlm_rag.tokenizer.prompts import PromptTemplate

log = logging.getLogger(__name__)

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
    shape: DenoiserConfig, tokenizer: Tokenizer, prompt_layout: str, settings: DecodeConfig, **run: Any
) -> TraceHeader:
    """The header of what a denoiser decodes; run: `top_k`, the fingerprints of `model` and `corpus`."""
    same = ("passage_length", "shifted", "block_size", "block_grid")
    return TraceHeader(
        prompt_layout=prompt_layout, context_length=shape.max_position_embeddings,
        template=tokenizer.template, mask_id=tokenizer.mask_id, end_ids=tuple(sorted(tokenizer.end_ids)),
        settings=asdict(settings), **{name: getattr(shape, name) for name in same}, **run,
    )  # fmt: skip


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
    supports: list[str] | None = None  # of oracle evidence: once others count, the question is asked again

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

    The constructor writes nothing. The caller ensures that nobody else writes, and that the last line ends.
    """

    def __init__(self, path: Path, header: TraceHeader, held: TraceContents | None = None) -> None:
        held = held or scan_trace(path)
        self.file, self._written = journal.Journal(path), dict(held.passages)
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
    for _, entry in _entries(path, AnswerLine):
        return entry
    raise TraceError(f"{path} is no trace: it is empty")


def read_trace(path: str | Path) -> Iterator[Rollout]:
    """The rollouts of a trace file, one by one; only passage texts stay in memory.

    `evidence_texts` are missing. A cut last line is skipped. Raises `TraceError` naming file and line.
    """
    settings, texts = dict[str, Any](), dict[str, str]()
    for place, entry in _entries(Path(path), Rollout):
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
            if not isinstance(own.get("answer_threshold", 0.0), int | float):
                raise TraceError(
                    f"{place}: this is no line of a trace: answer_threshold="
                    f"{own['answer_threshold']!r:.60} is no number"
                )
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


def _entries(path: Path, kind: type[AnswerLine | Rollout]) -> Iterator[tuple[str, Any]]:
    """The lines of a trace file, told apart, with their places; those of questions as `kind`."""
    if not path.is_file():
        raise TraceError(f"trace '{path}' was not found")
    for number, (place, record) in enumerate(journal.read_json_lines(path, TraceError)):
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
    more = ("citations", "cut", "error", "usage", "confidence", "relevance")
    optional = {"settings": own} | {k: getattr(rollout, k) for k in more}
    if rollout.answer_form != "marked":
        optional["answer_form"] = rollout.answer_form
    return record | {key: value for key, value in optional.items() if value or value == 0}


def _passage_ids(steps: Iterable[RolloutStep]) -> list[str]:
    return list(dict.fromkeys(name for step in steps for name in (*step.passage_ids, *step.dropped)))


class AnswersFile:
    """Answers (and traces) on disk, with a stamp beside them: `<name>.run.json`.

    The constructor only reads; `open_run` is the first to write. What is there is only ever added to, but
    for the lines of questions that are asked again and a last line that a kill has cut short. Raises
    `ConfigError` or `TraceError` for files of other programs, or answers and traces of different runs.
    """

    def __init__(
        self, out: Path, trace: Path | None = None, supports: Mapping[str, list[str]] | None = None
    ) -> None:
        self._out, self._trace, self._file = out, trace, journal.Journal(out)
        self._supports = supports or {}
        self._writer: TraceWriter | None = None
        self._opened = ExitStack()
        self._stamp_path = out.with_name(f"{out.name}.run.json")
        self._read()

    def _read(self) -> None:
        """Takes in what the files hold now; another process may be adding to them."""
        self._stamp = self._read_stamp()
        self._answered: dict[str, str] = {}
        self._failed: set[str] = set()
        answers: dict[str, int] = {}
        for place, record in journal.read_json_lines(self._out, ConfigError):
            none = f"{place} is no line of this program's: choose another file"
            line = validate_json_value(AnswerLine, record, none, ConfigError)
            answers[line.id] = line.answer_hash
            known = self._supports.get(line.id, line.supports)
            if line.error or line.supports not in (None, known):
                self._failed.add(line.id)
            else:
                self._answered[line.id] = line.question
        # Read after the answers: each trace is written before its answer, so none can be missing.
        self._traced = TraceContents() if self._trace is None else scan_trace(self._trace)
        traces, asked = self._traced.questions, self._answered
        foreign = traces and not self._stamp_path.is_file()
        if self._trace is not None and (foreign or any(traces.get(n) != answers[n] for n in asked)):
            self._refuse_trace()

    def _refuse_trace(self) -> None:
        raise ConfigError(
            f"trace={self._trace} does not hold the traces of out={self._out}, one for each answer: choose "
            "other files for both"
        )

    def _read_stamp(self) -> dict[str, Any] | None:
        if not self._out.is_file() or not self._out.stat().st_size:
            return None
        stamp = read_json_or_empty(self._stamp_path)
        machines = stamp.setdefault("machines", [])
        known = isinstance(stamp.get("answers_depend_on"), dict) and isinstance(machines, list)
        if not known or not all(isinstance(machine, dict) for machine in machines):
            raise ConfigError(
                f"out={self._out} holds something without a readable {self._stamp_path.name} beside it, "
                "so it is not known what answered: choose another --out"
            )
        return stamp

    def remaining(self, questions: Sequence[Question]) -> list[Question]:
        """The questions without an answer here, those that failed among them.

        Final after `begin`: before, others may answer some. Raises `ConfigError` where an id was another's.
        """
        for question in questions:
            if self._answered.get(question.id, question.question) != question.question:
                raise ConfigError(
                    f"out={self._out} holds the answer to another question with the id "
                    f"'{question.id}': choose another --out"
                )
        return [question for question in questions if question.id not in self._answered]

    def check_same_settings(self, depends_on: Mapping[str, Any]) -> None:
        """Raises `ConfigError` naming what this run does otherwise than the one that began the file."""
        then = self._stamp["answers_depend_on"] if self._stamp else depends_on
        journal.check_same_settings(then, depends_on, f"out={self._out} holds answers")

    def open_run(self, stamp: dict[str, Any], header: TraceHeader | None = None) -> None:
        """Takes the files for this process; header: of the trace, where there is one.

        stamp: "answers_depend_on", "machines" (a list of one, see `machine.describe_machine`) and whatever
        else is to be known of the run that begins the files. A run that goes on with them adds its machine,
        and warns when it is another one, or its code another version. Lines of questions that failed, and a
        trace without its answer, are taken out: they are asked again. Raises as the constructor does.
        """
        try:
            for name, path in {"out": self._out, "trace": self._trace}.items():
                if path is not None:  # each may be another run's, too
                    lock = journal.hold_file_lock(Path(f"{path}.lock"), f"{name}={path}")
                    self._opened.enter_context(lock)
            self._read()
            self.check_same_settings(stamp["answers_depend_on"])
            if self._trace is not None:
                assert header is not None, "a trace begins with a header"
                held = self._traced if self._answered else TraceContents()
                self._writer = TraceWriter(self._trace, header, held)
            with journal.explain_write_errors(self._out):
                self._remove_unfinished()
                for file in [self._file] if self._writer is None else [self._file, self._writer.file]:
                    self._opened.callback(file.close)
                    file.open_existing()
                (machine,) = stamp["machines"]
                if self._stamp is None:
                    self._write_stamp(stamp)
                elif (then := _describe_code(self._stamp)) != (now := _describe_code(stamp)):
                    log.warning("out=%s was begun by %s, now %s: answers may differ", self._out, then, now)
            self.add_machine(machine)
        except BaseException:
            self.close()
            raise

    def _remove_unfinished(self) -> None:
        """Takes out what is asked again; the trace first, so that a kill leaves no answer without one."""
        unanswered = {*self._traced.questions} - {*self._answered} - self._failed
        if len(unanswered) > 1:  # a kill leaves one
            self._refuse_trace()
        asked_again = unanswered | self._failed
        for path in (self._trace, self._out):
            if path is not None and path.is_file():
                journal.repair_last_line(path)
                if asked_again:
                    journal.drop_lines(path, asked_again)
        if self._trace is not None and not self._answered:
            self._trace.unlink(missing_ok=True)  # its header may be of other settings

    def add_machine(self, machine: dict[str, Any]) -> None:
        """Stamps the files with a machine that answers too; warns where it is another than before."""
        assert self._stamp is not None, "begun"
        machines = self._stamp["machines"]
        if machine in machines:
            return
        for last in machines[-1:]:
            keys = [key for key in {**last, **machine} if last.get(key) != machine.get(key)]
            had, has = (", ".join(f"{key}={each.get(key)}" for key in keys) for each in (last, machine))
            log.warning(
                "out=%s holds answers made with %s, this run has %s: rounding may differ, and with it "
                "an answer", self._out, had, has
            )  # fmt: skip
        with journal.explain_write_errors(self._out):
            self._write_stamp(self._stamp | {"machines": [*machines, machine]})

    def _write_stamp(self, stamp: dict[str, Any]) -> None:
        self._stamp = stamp
        write_text_atomic(self._stamp_path, json.dumps(stamp, indent=2, ensure_ascii=False) + "\n")

    def add_energy(self, part: Mapping[str, Any] | None) -> None:
        """Adds to the stamp what this part of the run has spent; a run that goes on adds another.

        None: it was not measured. A full disk is a warning: what was computed is already stored.
        """
        if part is None or self._stamp is None:
            return
        before = self._stamp.get("energy")
        parts = [*(before if isinstance(before, list) else []), part]
        try:
            self._write_stamp(self._stamp | {"energy": parts})
        except OSError as error:
            log.warning("%s does not get the joules of this part: %s", self._stamp_path, error.strerror)

    def append(self, rollout: Rollout) -> None:
        """Adds a finished rollout: first its trace, then its answer, which marks it as done.

        Raises `RunError` where the disk is full, or a file is another's by now; what is there stays.
        """
        with journal.explain_write_errors(self._out):
            if self._stamp is not None and not self._stamp_path.exists():  # taken away meanwhile
                self._write_stamp(self._stamp)
            if self._writer is not None:
                self._writer.write(rollout)
            known = self._supports.get(rollout.id)
            self._file.append(rollout.to_dict() | ({"supports": known} if known else {}))

    def close(self) -> None:
        self._opened.close()


def _describe_code(stamp: Mapping[str, Any]) -> str:
    """The version of dlm_rag in a stamp, and its commit where one is known."""
    versions, commit = stamp.get("versions"), stamp.get("commit")
    version = versions.get("dlm_rag") if isinstance(versions, dict) else None
    return f"dlm_rag {version or 'of unknown version'}" + f" (commit {commit})" * bool(commit)


def write_json_line(stream: TextIO, record: dict[str, Any]) -> None:
    """One JSON line, out at once; in ASCII where the stream is not UTF-8."""
    utf8 = (stream.encoding or "utf-8").lower().replace("-", "") == "utf8"
    stream.write(json.dumps(record, ensure_ascii=not utf8) + "\n")
    stream.flush()
