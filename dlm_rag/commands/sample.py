"""Answer questions, many at a time, retrieving while denoising.

    dlm-rag sample                               # the shipped model on its invented world
    dlm-rag sample "What is Emma?" --corpus passages.jsonl      # SmolLM2 on passages of your own
    dlm-rag sample "Who wrote Emma?" --model DIR_OR_HUB_ID --corpus passages.jsonl
    dlm-rag sample --questions questions.jsonl --model DIR_OR_HUB_ID --corpus passages.jsonl \\
        --out answers.jsonl decode.batch_size=16
    dlm-rag sample --questions - ... < questions.txt     # one a line, or JSON lines

In a terminal you watch the canvas fill in. Piped, or with --out, the output is JSON lines. Run the same
command again to resume. workers=auto uses all devices. If a question fails (it is too long, or its search
fails), its line has an `error`, the others are answered, and the exit status is 1.
"""

import re
import sys
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING

from dlm_rag.cli import CommandParser, print_note
from dlm_rag.commands import answer_job
from dlm_rag.commands.arguments import ANSWER_SETTINGS
from dlm_rag.commands.prepare_decoder import fill_in_shipped_files, gather_questions, prepare_decoder
from dlm_rag.config import Config
from dlm_rag.errors import ConfigError, TraceError
from dlm_rag.files.hub import SHIPPED_FOLDER
from dlm_rag.files.paths import expand_path, write_text_atomic
from dlm_rag.page.render import TraceRun, check_page_target, read_trace_runs, render_page
from dlm_rag.progress import show_status
from dlm_rag.questions import Question, read_questions

if TYPE_CHECKING:
    from dlm_rag.decode.rollout import Rollout


# Chosen among 20 of the shipped world, two each of 1 to 4 hops: all but the last are answered rightly. What
# share of all it answers is in docs/measurements.
FIRST_QUESTIONS = ("q100", "q0", "q3", "q102", "q200", "q201", "q301", "q300")
FIRST_SPEED = 2  # steps a second at which the first of them is shown
SPEED_HELP = "steps a second at which a terminal shows the first answer; 0: as fast as it is decoded"


def main(argv: list[str]) -> None:
    reads, options = (*ANSWER_SETTINGS, "trace", "html"), {"speed": (0, SPEED_HELP)}
    words = answer_job.parse_answer_command_line(__doc__ or "", argv, reads, typed=True, options=options)
    given, speed = words.config, words.options["speed"]
    if given.workers is not None and given.out is None:
        raise ConfigError("workers= answers into a file, not to the screen: add --out FILE")
    if given.record_provisional and given.trace is None and given.html is None:
        raise ConfigError("record_provisional=true has no effect without trace: set it too")
    config = fill_in_shipped_files(given, words.questions)
    show_status("reading questions")
    questions = gather_questions(config, words.questions)
    if given.model.path is None and asks_beyond_shipped_world(given, questions):
        print_note(
            "the shipped model knows only its invented world: what it says here is made up;\n"
            "for passages of your own give --corpus FILE alone, for any question --model DIR_OR_HUB_ID "
            "(GSAI-ML/LLaDA-8B-Instruct)"
        )
    show_status("loading torch")
    if not (given.questions or words.questions or config.limit):
        by_id = {question.id: question for question in questions}
        questions, speed = [by_id[name] for name in FIRST_QUESTIONS], speed or FIRST_SPEED
    if config.out is None:
        failed = decode_to_screen(config, questions, words.announce_reader, speed)
    else:
        job = answer_job.plan_answer_job(config, questions)
        words.announce_reader()
        with answer_job.open_engines(config.workers, [job.prepared]) as engines:
            job.run(engines)
        failed = job.failed
        traced = f", the traces in {config.trace}" if config.trace else ""
        print_note(f"the answers are in {config.out}{traced}")
        if config.html is not None and config.trace is not None:
            write_run_page(config.html, read_trace_runs([Path(config.trace)]), questions)
    if failed:
        raise SystemExit(1)


def asks_beyond_shipped_world(given: Config, questions: list[Question]) -> bool:
    """Whether the shipped model is asked about other passages, or for names that are not in its own."""
    if given.retrieval.corpus is not None:
        return True
    world = SHIPPED_FOLDER / "world" / "corpus.jsonl"  # a service may well have these passages
    known = set(re.findall(r"\w+", world.read_text(encoding="utf-8")))
    return any(not known.issuperset(re.findall(r"(?<=\s)[A-Z]\w+", q.question)) for q in questions)


def decode_to_screen(
    config: Config, questions: list[Question], ready: Callable[[], None], speed: float
) -> int:
    """Answers to a terminal or as JSON lines to a pipe; how many failed; speed: as of `LiveView`."""
    answer_job.check_output_files(config)
    if config.trace is not None and Path(config.trace).is_file() and Path(config.trace).stat().st_size:
        raise ConfigError(f"trace={config.trace} holds something already: choose another, or add --out")
    prepared = prepare_decoder(config, questions)  # what is wrong is said before torch is imported
    ready()
    from rich.console import Console

    from dlm_rag.decode.terminal import LiveView, render_verdict
    from dlm_rag.decode.trace_file import TraceWriter, write_json_line
    from dlm_rag.evaluation.metrics import compute_exact_match

    engines, console = answer_job.LocalEngines(), Console()
    engines.open(prepared)
    show_status("taking the first step")
    shown: list[Rollout] = []
    verdicts: list[bool] = []
    known = {question.id: question.golden_answers for question in questions}
    try:
        with ExitStack() as stack:
            trace = TraceWriter(Path(config.trace), prepared.trace_header()) if config.trace else None
            if trace:
                stack.callback(trace.file.close)
            tally = stack.enter_context(answer_job.count_answers(engines))
            view = stack.enter_context(LiveView(console, speed)) if console.is_terminal else None
            for rollout in engines.stream(questions, view.step if view else None):
                tally.add(rollout)
                if trace:
                    trace.write(rollout)
                if config.html:
                    shown.append(rollout)
                if view:
                    right = compute_exact_match(rollout.answer, known[rollout.id]) > 0
                    verdicts += [right] * bool(known[rollout.id])
                    view.finish(rollout, render_verdict(right, known[rollout.id]))
                    tally.paused_seconds = view.paused_seconds
                else:
                    show_status()
                    write_json_line(sys.stdout, rollout.to_dict())
    except KeyboardInterrupt:
        print_note(f"{tally.answers} of {len(questions)} answered; with --out FILE a stopped run goes on")
        raise
    finally:
        if config.html and shown:
            write_run_page(config.html, [TraceRun("", prepared.trace_header(), shown)], questions)
    if view:
        console.print(tally.summary, style="dim", markup=False, highlight=False)
        scored = f" · {sum(verdicts)} of {len(verdicts)} right" if verdicts else ""
        print(f"{tally.answers} answered in {tally.wall_seconds:.1f} s{scored}")
    else:
        print_note(tally.summary)
    return tally.failed


def write_run_page(path: str, runs: list[TraceRun], questions: list[Question]) -> None:
    write_text_atomic(Path(path), render_page(runs, questions))
    print_note(f"the page is in {path}")


def page(argv: list[str]) -> None:
    """Make a web page that plays the decoding of a trace; it needs no model and no network.

        dlm-rag page trace.jsonl --html page.html
        dlm-rag page static.jsonl interleaved.jsonl --html page.html     # the same questions, side by side
        dlm-rag page trace.jsonl --questions questions.jsonl --html page.html    # with golden answers

    `dlm-rag sample --trace FILE` writes a trace; `dlm-rag sample --html FILE` makes the page directly.
    """
    parser = CommandParser(page.__doc__ or "", prog="dlm-rag page")
    parser.add_argument("traces", nargs="+", metavar="TRACE")
    parser.add_argument("--html", metavar="PATH", required=True, help="where the page goes")
    parser.add_argument("--questions", metavar="PATH", help="the questions with their golden answers")
    given = parser.parse_args(argv)
    if len(given.traces) > 2:
        raise ConfigError(f"a page shows one trace or two, not {len(given.traces)}: leave some out")
    traces = [expand_path(path, TraceError) for path in given.traces]
    target = expand_path(given.html, ConfigError)
    known = read_questions(given.questions) if given.questions else []
    read = {f"trace {number}, {path},": str(path) for number, path in enumerate(traces, start=1)}
    answer_job.check_distinct_paths({"html": str(target)}, read | {"questions": given.questions})
    check_page_target(str(target))
    write_run_page(str(target), read_trace_runs(traces), known)
