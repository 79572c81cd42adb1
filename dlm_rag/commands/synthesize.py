"""Make rows to train on from what is there: questions, a corpus alone, another model as writer.

    dlm-rag synthesize --questions questions.jsonl --model DIR_OR_HUB_ID --corpus passages.jsonl \\
        --out rows/traces                                        # traces that end in the known answer
    dlm-rag synthesize ... synthesis.keep=evidence               # where no answer is known
    dlm-rag synthesize synthesis.kind=corpus --corpus passages.jsonl --out rows/corpus     # no questions
    dlm-rag synthesize synthesis.kind=writer synthesis.writer=http://localhost:8000/v1 \\
        synthesis.writer_model=NAME --questions questions.jsonl --out rows/paraphrased

The folder of --out gets Parquet files, a card and, where rows are held out, held_out/. A run that was
stopped, however it was, goes on when the same command is given again. Training takes the folder as it is:

    dlm-rag train data.questions=rows/corpus data.corpus=passages.jsonl

Traces of many questions: workers=N decodes in as many processes, as `sample` does; the rows are the same.
What fails for one source alone is asked again by the same command; the exit status is 1 then.
"""

import datetime
import hashlib
import json
import shlex
import sys
import time
from collections.abc import Callable, Generator, Iterator
from contextlib import closing
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dlm_rag.commands.job import Asked
from dlm_rag.commands.prepare import gather_questions, prepare, with_shipped
from dlm_rag.commands.words import parse
from dlm_rag.errors import ConfigError, CorpusError
from dlm_rag.machine import commit_of_code
from dlm_rag.program import note
from dlm_rag.progress import progress, status
from dlm_rag.questions import Question, read_questions
from dlm_rag.text import visible

if TYPE_CHECKING:
    from dlm_rag.config import Config
    from dlm_rag.decode.rollout import Rollout
    from dlm_rag.synthesis.shards import Outcome, RowsFolder

# Settings of the section that rows depend on: of all, and of one kind.
ALWAYS = ("kind", "near_duplicates", "form")
OF_KIND = {
    "traces": ("keep", "known_hops"),
    "corpus": ("chain", "held_out"),
    "writer": ("writer_model", "template", "each", "temperature", "most_tokens"),
}


@dataclass
class Work:
    """What is to be done: everything but the weights has been checked.

    outcomes: of the sources that are not among those given. failed: how many have come to nothing so far.
    energy: what was drawn so far, as a stamp has it.
    """

    sources: int
    depends_on: dict[str, Any]
    model: str
    columns: dict[str, str]
    outcomes: "Callable[[set[str]], Generator[Outcome]]"
    failed: Callable[[], int] = lambda: 0
    energy: Callable[[], dict[str, Any] | None] = lambda: None


def main(argv: list[str]) -> None:
    words = parse(__doc__ or "", argv, typed=False, chosen=True, answers=True)
    config = words.config
    if config.out in (None, "-"):
        raise ConfigError("synthesis needs --out FOLDER")
    unread = ("trace", "html", "guesses", "compare")
    if other := [key for key in unread if getattr(config, key) not in (None, False)]:
        raise ConfigError(f"synthesis has no use for {other[0]}: leave it out")
    if config.workers is not None and config.synthesis.kind != "traces":
        raise ConfigError(
            f"workers= decode traces, and synthesis.kind={config.synthesis.kind} decodes none: leave it out"
        )
    from dlm_rag.synthesis.duplicates import check_datasketch
    from dlm_rag.synthesis.shards import RowsFolder, check_form

    settings = config.synthesis
    check_form(settings.form)
    if settings.near_duplicates is not None:
        check_datasketch()
    depends_on = settings_of(config)  # which reads evaluation sets: what is wrong is said before the work
    refuse_unread(words.settings, settings.kind)
    work = {"traces": traces, "corpus": corpus, "writer": written}[settings.kind](config)
    words.tell()
    depends_on |= work.depends_on
    failed = run(work, RowsFolder(Path(str(config.out)), depends_on, work.model), config)
    if failed:
        note(f"{failed} failed; the same command asks again")
        raise SystemExit(1)


def refuse_unread(given: list[str], kind: str) -> None:
    """Raises `ConfigError` for settings that rows of a kind do not depend on."""
    others = {f"synthesis.{key}" for keys in OF_KIND.values() for key in keys}
    others -= {f"synthesis.{key}" for key in OF_KIND[kind]}
    decoding = () if kind == "traces" else ("model.", "decode.", "engine.")
    for key in (word.partition("=")[0] for word in given):
        if key in others or key.startswith(decoding):
            raise ConfigError(f"{key} has no effect with synthesis.kind={kind}: leave it out")


def run(work: Work, folder: "RowsFolder", config: "Config") -> int:
    """Does what is left to do, and writes the files; returns how many sources failed."""
    name, settings, rows, done = visible(str(folder.folder)), config.synthesis, 0, 0
    try:
        folder.begin(stamp())
        if folder.complete:
            note(f"{name} is complete")
            return 0
        if folder.done:
            note(f"{len(folder.done):,} of {work.sources:,} sources are done already")
        start = time.perf_counter()
        bar = progress("synthesizing", work.sources, done=len(folder.done))
        try:
            with bar as advance, closing(work.outcomes(folder.done)) as outcomes:
                for outcome in outcomes:
                    folder.add(outcome)
                    done, rows = done + 1, rows + len(outcome.rows)
                    advance(1)
        finally:
            folder.add_energy(work.energy())
        seconds = time.perf_counter() - start
        counts = folder.finish(settings, work.columns, complete=not work.failed())
    except KeyboardInterrupt:
        note(f"{len(folder.done):,} of {work.sources:,} sources done; the same command goes on from here")
        raise
    finally:
        folder.close()
    of = f"{done:,} source{'s' * (done != 1)} in {seconds:.1f} s"
    note(f"{rows:,} row{'s' * (rows != 1)} of {of}, {rows / seconds:,.1f} rows/s")
    read, wrote = (counts.get(f"spent: {what}_tokens", 0) for what in ("prompt", "response"))
    if price := (read * settings.prompt_price + wrote * settings.response_price) / 1e6:
        note(f"{read:,} tokens read and {wrote:,} written by the writer: ${price:,.2f}")
    kept = sum(n for key, n in counts.items() if key.startswith(("rows: ", "held out: ")))
    note(f"{kept:,} row{'s are' if kept != 1 else ' is'} in {name}, README.md says which")
    return work.failed()


def settings_of(config: "Config") -> dict[str, Any]:
    """What of the section rows depend on; of evaluation sets the digests."""
    settings = config.synthesis
    keys = (*ALWAYS, *OF_KIND[settings.kind])
    against = settings.against.split(",") if settings.against else []
    return {f"synthesis.{key}": getattr(settings, key) for key in keys} | {
        "synthesis.against": [digest_of(read_questions(path.strip())) for path in against]
    }


def stamp() -> dict[str, Any]:
    """What a card says of the run that began a folder."""
    command = shlex.join([Path(sys.argv[0]).name, *sys.argv[1:]])
    now = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
    return {"command": command, "date": now, "commit": commit_of_code()}


def traces(config: "Config") -> Work:
    """Questions to be decoded. Raises `UserError`."""
    config = with_shipped(config, [])
    if config.questions is None:
        raise ConfigError("traces of a model or corpus of your own need --questions FILE")
    questions, settings = gather_questions(config, []), config.synthesis
    for question in questions:
        if settings.keep == "answer" and not question.golden_answers:
            raise ConfigError(
                f"question '{question.id}' has no golden_answers: set synthesis.keep=evidence, which "
                "needs none"
            )
        if settings.known_hops and question.hops is None:
            raise ConfigError(f"synthesis.known_hops=true: question '{question.id}' has no hops")
    if config.workers is not None:
        from dlm_rag.workers.places import check_installed

        check_installed()
    asked = Asked(config, questions, prepare(config, questions))
    from dlm_rag.synthesis.shards import QUESTIONS
    from dlm_rag.synthesis.traces import Traces

    prepared = asked.prepared
    work, decoding = Traces(questions, settings, prepared.tokenizer), Decoding(asked)

    def outcomes(done: set[str]) -> "Generator[Outcome]":
        if remaining := work.remaining(done):
            yield from work.outcomes(decoding.rollouts(remaining))

    depends_on = prepared.answers_depend_on() | {"questions": digest_of(questions)}
    return Work(
        len(work), depends_on, prepared.checkpoint.folder.name, QUESTIONS, outcomes,
        lambda: work.failed, decoding.energy,
    )  # fmt: skip


class Decoding:
    """Questions decoded in this process or by workers, and what that has taken."""

    def __init__(self, asked: Asked) -> None:
        self._asked = asked
        self._energy: dict[str, Any] | None = None

    def energy(self) -> dict[str, Any] | None:
        """What was drawn and for what, once the rollouts have ended; None where nobody asked."""
        return self._energy

    def rollouts(self, questions: list[Question]) -> "Iterator[Rollout]":
        """Finished rollouts as they come; says what they took once they have ended."""
        from dlm_rag.commands.engines import answering
        from dlm_rag.decode.view import Tally

        asked, tally = self._asked, Tally(self._asked.prepared.tokenizer.end_ids)
        with answering(asked.config.workers, [asked.prepared]) as engines:
            gauge, engine = engines.gauge(asked), engines.open(asked)
            start = time.perf_counter()
            try:
                with gauge:
                    for rollout in engine.stream(questions):
                        tally.add(rollout)
                        yield rollout
            finally:
                self._energy = tally.energy(gauge.reading)
                seconds = time.perf_counter() - start
                note(f"{tally.text_tokens / seconds:,.1f} tokens/s · "
                     f"{tally.line(seconds, engine.describe(), gauge.reading)}")  # fmt: skip


def digest_of(questions: list[Question]) -> str:
    """Of all that is known of the questions."""
    known = [{k: v for k, v in asdict(question).items() if k != "place"} for question in questions]
    text = json.dumps(known)
    return hashlib.sha256(text.encode()).hexdigest()


def corpus(config: "Config") -> Work:
    """A corpus without questions. Raises `UserError`."""
    if config.retrieval.corpus is None:
        raise ConfigError("synthesis.kind=corpus needs --corpus FILE")
    if config.questions is not None or config.limit or config.quick:
        raise ConfigError("synthesis.kind=corpus reads no questions: leave them out, or set another kind")
    from dlm_rag.retrieval.corpus import open_corpus
    from dlm_rag.synthesis.corpus import CorpusRows
    from dlm_rag.synthesis.shards import QUESTIONS

    status("reading the corpus")
    opened = open_corpus(config.retrieval.corpus, config.retrieval.index_folder)
    work = CorpusRows(opened, config.synthesis.chain, config.synthesis.held_out)
    if not work.names.count:
        raise CorpusError(f"{config.retrieval.corpus} has no titles that stand for one passage alone")
    return Work(len(work), {"corpus": opened.fingerprint}, "", QUESTIONS, work.outcomes)


def written(config: "Config") -> Work:
    """Texts by another model: of questions for the template paraphrase, of passages for the others.

    Raises `UserError`, also where the writer does not answer.
    """
    from dlm_rag.retrieval.corpus import open_corpus
    from dlm_rag.synthesis.shards import QUESTIONS, TEXTS
    from dlm_rag.synthesis.writer import PROMPTS, Writer

    settings = config.synthesis
    of_questions = settings.template == "paraphrase"
    given = {"--questions": config.questions, "--corpus": config.retrieval.corpus}
    wanted, other = list(given) if of_questions else list(given)[::-1]
    if given[wanted] is None or given[other] is not None:
        raise ConfigError(f"synthesis.template={settings.template} needs {wanted}, and not {other}")
    depends_on: dict[str, Any] = {"prompt": PROMPTS[settings.template]}
    if of_questions:
        questions = gather_questions(config, [])
        writer, columns = Writer(questions, settings), QUESTIONS
        depends_on["questions"] = digest_of(questions)
    else:
        opened = open_corpus(str(config.retrieval.corpus), config.retrieval.index_folder)
        writer, columns = Writer(opened, settings), TEXTS
        depends_on["corpus"] = opened.fingerprint
    writer.client.check()
    return Work(
        len(writer), depends_on, settings.writer_model, columns, writer.outcomes, lambda: writer.failed
    )
