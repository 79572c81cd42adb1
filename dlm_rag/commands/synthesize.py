"""Make training rows from questions, from a corpus alone, or with another model as writer.

    dlm-rag synthesize --questions questions.jsonl --model DIR_OR_HUB_ID --corpus passages.jsonl \\
        --out rows/traces                                        # traces that end in the known answer
    dlm-rag synthesize ... synthesis.filter=evidence               # where no answer is known
    dlm-rag synthesize synthesis.method=corpus --corpus passages.jsonl --out rows/corpus     # no questions
    dlm-rag synthesize synthesis.method=writer synthesis.writer_url=http://localhost:8000/v1 \\
        synthesis.writer_model=NAME --questions questions.jsonl --out rows/paraphrased

The folder of --out gets JSON lines, rows.json with what was left out and why and, if rows are held out,
held_out/. Run the same command again to resume. Train on the folder:

    dlm-rag train data.questions=rows/corpus data.corpus=passages.jsonl

With workers=N, N processes decode the traces; the rows are the same. If a source fails, the exit status
is 1, and the same command tries it again.
"""

import datetime
import hashlib
import json
import shlex
import sys
import time
from collections.abc import Iterator
from contextlib import closing
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from dlm_rag.cli import print_note
from dlm_rag.commands.answer_job import PreparedQuestions, count_answers, open_engines
from dlm_rag.commands.arguments import ANSWER_SETTINGS, check_read, parse_command_line
from dlm_rag.commands.prepare_decoder import fill_in_shipped_files, gather_questions, prepare_decoder
from dlm_rag.errors import ConfigError, CorpusError
from dlm_rag.machine import get_code_commit
from dlm_rag.progress import report_progress, show_status
from dlm_rag.questions import Question, read_questions
from dlm_rag.text import replace_control_chars

if TYPE_CHECKING:
    from dlm_rag.config import Config
    from dlm_rag.decode.rollout import Rollout
    from dlm_rag.synthesis.cloze_questions import CorpusRowGenerator
    from dlm_rag.synthesis.llm_writer import LlmWriter
    from dlm_rag.synthesis.rows_folder import RowsFolder
    from dlm_rag.synthesis.trace_rows import TraceRowGenerator

    RowSource = TraceRowGenerator | CorpusRowGenerator | LlmWriter

SYNTHESIS_SETTINGS = ("synthesis", "-record_provisional", "-energy")
# Settings of the section that rows of one kind depend on.
ROW_SETTINGS_BY_KIND = {
    "traces": ("filter",),
    "corpus": ("held_out",),
    "writer": ("writer_model",),
}


class SynthesisPlan(NamedTuple):
    """What is to be done, everything but the weights checked."""

    source: "RowSource"
    depends_on: dict[str, Any]  # all that can change a row
    model: str  # that makes the rows


def main(argv: list[str]) -> None:
    words = parse_command_line(__doc__ or "", argv, (*ANSWER_SETTINGS, *SYNTHESIS_SETTINGS))
    config = words.config
    if config.synthesis.method != "traces":  # nothing is decoded
        check_read(words.settings, ("retrieval", "questions", "limit", "out", "synthesis"))
    if config.out in (None, "-"):
        raise ConfigError("synthesis needs --out FOLDER")
    from dlm_rag.synthesis.rows_folder import RowsFolder

    depends_on = collect_row_settings(config)  # reads evaluation sets: errors in them come before the work
    plans = {"traces": plan_trace_rows, "corpus": plan_corpus_rows, "writer": plan_writer_rows}
    plan = plans[config.synthesis.method](config)
    words.announce_reader()
    folder = RowsFolder(Path(str(config.out)), depends_on | plan.depends_on, plan.model)
    run_synthesis(plan.source, folder, config)
    if failed := plan.source.failed:
        print_note(f"{failed} failed; the same command asks again")
        raise SystemExit(1)


def run_synthesis(source: "RowSource", folder: "RowsFolder", config: "Config") -> None:
    """Does what is left to do, and writes the files."""
    name, rows, before = replace_control_chars(str(folder.folder)), 0, 0
    try:
        command, now = [Path(sys.argv[0]).name, *sys.argv[1:]], datetime.datetime.now(datetime.UTC)
        stamp = {"command": shlex.join(command), "date": now.isoformat(timespec="seconds")}
        folder.begin(stamp | {"commit": get_code_commit()})
        if folder.complete:
            print_note(f"{name} is complete")
            return
        before, start = len(folder.done), time.perf_counter()
        if before:
            print_note(f"{before:,} of {len(source):,} sources are done already")
        bar = report_progress("synthesizing", len(source), done=before)
        with bar as advance, closing(source.outcomes(folder.done)) as outcomes:
            for outcome in outcomes:
                folder.append_outcome(outcome)
                rows += len(outcome.rows)
                advance(1)
        seconds = time.perf_counter() - start
        counts = folder.finish(config.synthesis.decontaminate_against, complete=not source.failed)
    except KeyboardInterrupt:
        print_note(f"{len(folder.done):,} of {len(source):,} sources done; the same command resumes here")
        raise
    finally:
        folder.close()
    done = len(folder.done) - before
    print_note(f"sources: {done:,}, rows: {rows:,}, {seconds:.1f} s, {rows / seconds:,.1f} rows/s")
    print_note(f"{name}: {', '.join(f'{key} {n:,}' for key, n in counts.items())}")


def collect_row_settings(config: "Config") -> dict[str, Any]:
    """What of the section rows depend on; of evaluation sets the digests."""
    settings = config.synthesis
    found = {
        f"synthesis.{key}": getattr(settings, key)
        for key in ("method", *ROW_SETTINGS_BY_KIND[settings.method])
    }
    paths = settings.decontaminate_against.split(",") if settings.decontaminate_against else []
    digests = [digest_questions(read_questions(path.strip())) for path in paths]
    return found | {"synthesis.decontaminate_against": digests}


def plan_trace_rows(config: "Config") -> SynthesisPlan:
    """Questions to be decoded. Raises `UserError`."""
    config = fill_in_shipped_files(config, [])
    if config.questions is None:
        raise ConfigError("traces of a model or corpus of your own need --questions FILE")
    questions, settings = gather_questions(config, []), config.synthesis
    for question in questions:
        if settings.filter == "answer" and not question.golden_answers:
            raise ConfigError(f"'{question.id}' has no golden_answers: set synthesis.filter=evidence")
    if config.workers is not None:
        from dlm_rag.workers.placement import check_ray_installed

        check_ray_installed()
    from dlm_rag.synthesis.trace_rows import TraceRowGenerator

    prepared = prepare_decoder(config, questions)
    asked = PreparedQuestions(config, questions, prepared)
    source = TraceRowGenerator(questions, settings, partial(decode_rollouts, asked))
    depends_on = prepared.answers_depend_on() | {"questions": digest_questions(questions)}
    return SynthesisPlan(source, depends_on, prepared.checkpoint.folder.name)


def decode_rollouts(asked: PreparedQuestions, questions: list[Question]) -> "Iterator[Rollout]":
    """Yields finished rollouts as they come, then prints a line on their time."""
    with open_engines(asked.config.workers, [asked.prepared]) as engines:
        engines.open(asked)
        try:
            with count_answers(engines, asked.prepared) as tally:
                for rollout in engines.stream(questions):
                    tally.add(rollout)
                    yield rollout
        finally:
            print_note(f"{tally.text_tokens / tally.wall_seconds:,.1f} tokens/s · {tally.summary}")


def digest_questions(questions: list[Question]) -> str:
    known = [{k: v for k, v in asdict(question).items() if k != "place"} for question in questions]
    return hashlib.sha256(json.dumps(known).encode()).hexdigest()


def plan_corpus_rows(config: "Config") -> SynthesisPlan:
    """A corpus without questions. Raises `UserError`."""
    if config.retrieval.corpus is None:
        raise ConfigError("synthesis.method=corpus needs --corpus FILE")
    if config.questions is not None or config.limit:
        raise ConfigError("synthesis.method=corpus reads no questions: leave them out")
    from dlm_rag.retrieval.corpus import open_corpus
    from dlm_rag.synthesis.cloze_questions import CorpusRowGenerator

    show_status("reading the corpus")
    opened = open_corpus(config.retrieval.corpus, config.retrieval.index_dir)
    source = CorpusRowGenerator(opened, held_out=config.synthesis.held_out)
    if not source.names.count:
        raise CorpusError(f"{config.retrieval.corpus} has no titles that stand for one passage alone")
    return SynthesisPlan(source, {"corpus": opened.fingerprint}, "")


def plan_writer_rows(config: "Config") -> SynthesisPlan:
    """Questions in another model's words. Raises `UserError`, also where the writer does not answer."""
    from dlm_rag.synthesis.llm_writer import WRITER_PROMPT, LlmWriter

    if config.questions is None or config.retrieval.corpus is not None:
        raise ConfigError("synthesis.method=writer needs --questions, and not --corpus")
    questions = gather_questions(config, [])
    writer = LlmWriter(questions, config.synthesis)
    depends_on = {"prompt": WRITER_PROMPT, "questions": digest_questions(questions)}
    writer.client.check_model()
    return SynthesisPlan(writer, depends_on, config.synthesis.writer_model)
