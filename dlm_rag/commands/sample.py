"""Answer questions: retrieve while denoising, many at once.

    dlm-rag sample                               # the shipped model on its invented world
    dlm-rag sample "Who wrote Emma?" --model DIR_OR_HUB_ID --corpus passages.jsonl
    dlm-rag sample --questions questions.jsonl --model DIR_OR_HUB_ID --corpus passages.jsonl \\
        --out answers.jsonl decode.batch_size=16
    dlm-rag sample --questions - ... < questions.txt     # one a line, or JSON lines

In a terminal the canvas fills in before your eyes. Piped or with --out: JSON lines only; a run that
was stopped goes on when the same command is given again. A question that fails (it is too long, its
search fails) gets an `error` in its line, the others are answered, and the exit status is 1.
In a checkout `python sample.py` is the same program.
"""

import re
import sys
import time
from collections import Counter
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING

from dlm_rag.commands.job import check_files, gather_questions, plan, prepare, with_shipped
from dlm_rag.commands.words import parse
from dlm_rag.errors import ConfigError
from dlm_rag.program import note
from dlm_rag.progress import status

if TYPE_CHECKING:
    from dlm_rag.config import Config
    from dlm_rag.questions import Question


def main(argv: list[str]) -> None:
    words = parse(__doc__ or "", argv, chosen=True)
    if words.config.compare is not None:
        raise ConfigError("sample answers under one setting: leave compare out, or run evaluate")
    config = with_shipped(words.config, words.questions)
    status("reading questions")
    questions = gather_questions(config, words.questions)
    if words.config.model.path is None and leads_out_of_its_world(words.config, config, questions):
        note(
            "the shipped model knows only its invented world: what it says here is made up;\n"
            "for another give --model DIR_OR_HUB_ID --corpus FILE (GSAI-ML/LLaDA-8B-Instruct)"
        )
    status("loading torch")
    if not (words.config.questions or words.questions or config.limit or config.quick):
        questions = a_few(questions)
    if config.out is not None:
        job = plan(config, questions)
        job.run()
        failed = job.failed
        traced = f", the traces in {config.trace}" if config.trace else ""
        note(f"the answers are in {config.out}{traced}")
    else:
        failed = decode_to_screen(config, questions)
    if failed:
        raise SystemExit(1)


def leads_out_of_its_world(given: "Config", config: "Config", questions: "list[Question]") -> bool:
    """Whether the shipped model is asked about other passages, or for names that are not in its own."""
    if given.retrieval.corpus is not None:
        return True
    known = set(re.findall(r"\w+", Path(str(config.retrieval.corpus)).read_text(encoding="utf-8")))
    return any(not known.issuperset(re.findall(r"(?<=\s)[A-Z]\w+", q.question)) for q in questions)


def a_few(questions: "list[Question]", each: int = 2) -> "list[Question]":
    """The first questions of every number of hops."""
    seen: Counter[int | None] = Counter()
    kept = []
    for question in questions:
        seen[question.hops] += 1
        if seen[question.hops] <= each:
            kept.append(question)
    return kept


def decode_to_screen(config: "Config", questions: "list[Question]") -> int:
    """Answers to standard output: a live view in a terminal, JSON lines in a pipe.

    Returns how many questions failed.
    """
    from rich.console import Console

    from dlm_rag.decode.answers import write_line
    from dlm_rag.decode.trace import TraceWriter
    from dlm_rag.decode.view import LiveView, Tally

    check_files(config)
    if config.trace is not None and Path(config.trace).is_file() and Path(config.trace).stat().st_size:
        raise ConfigError(f"trace={config.trace} holds something already: choose another, or add --out")
    prepared = prepare(config, questions)
    decoder = prepared.load()
    status("taking the first step")
    tally, start, console = Tally(), time.perf_counter(), Console()
    try:
        with ExitStack() as stack:
            trace = config.trace and TraceWriter(Path(config.trace), prepared.trace_header())
            view = stack.enter_context(LiveView(console)) if console.is_terminal else None
            for rollout in decoder.stream(questions, view.step if view else None):
                tally.add(rollout)
                if trace:
                    trace.write(rollout)
                if view:
                    view.finish(rollout)
                else:
                    status()
                    write_line(sys.stdout, rollout.answer_record())
    except KeyboardInterrupt:
        note(
            f"{tally.answers} of {len(questions)} answered; with --out FILE a run that was stopped goes on"
        )
        raise
    figures = tally.line(time.perf_counter() - start, decoder.describe())
    if view:
        console.print(figures, markup=False, highlight=False)
    else:
        note(figures)
    return tally.failed
