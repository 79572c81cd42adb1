"""Make training rows: the responses that a model gives to questions, where they pass a filter.

    dlm-rag synthesize --questions questions.jsonl --model DIR_OR_HUB_ID --corpus passages.jsonl \\
        --out rows                                       # responses that end in the known answer
    dlm-rag synthesize ... synthesis.filter=evidence     # where no answer is known

The folder of --out gets rows.jsonl, rows.json with what was left out and why, and traces/ with all answers
and traces. Run the same command again to resume; with another filter it decodes nothing again. Train on the
folder:

    dlm-rag train data.questions=rows data.corpus=passages.jsonl

With workers=N, N processes decode; the rows are the same. If a question fails, the exit status is 1, and
the same command tries it again.
"""

import json
import shlex
from dataclasses import asdict, replace
from pathlib import Path

from dlm_rag.cli import print_note
from dlm_rag.commands.answer_job import open_engines, parse_answer_command_line, plan_answer_job
from dlm_rag.commands.arguments import ANSWER_SETTINGS
from dlm_rag.commands.prepare_decoder import fill_in_shipped_files, gather_questions
from dlm_rag.config import Config
from dlm_rag.errors import ConfigError
from dlm_rag.files.paths import make_folder, write_text_atomic
from dlm_rag.questions import Question
from dlm_rag.text import replace_control_chars

ROWS, NOTE, TRACES = "rows.jsonl", "rows.json", "traces"


def main(argv: list[str]) -> None:
    reads = (*ANSWER_SETTINGS, "synthesis", "-record_provisional")
    words = parse_answer_command_line(__doc__ or "", argv, reads)
    if words.config.out in (None, "-"):
        raise ConfigError("synthesis needs --out FOLDER")
    out, settings = Path(str(words.config.out)), words.config.synthesis
    check_rows_folder(out)
    config = fill_in_shipped_files(words.config, [])
    questions = read_asked_questions(config)
    from dlm_rag.decode.trace_file import read_trace
    from dlm_rag.synthesis import collect_evaluation_ngrams, make_trace_rows

    evaluated = collect_evaluation_ngrams(settings.decontaminate_against)
    traces = make_folder(out / TRACES, "out=")
    config = replace(config, out=str(traces / "answers.jsonl"), trace=str(traces / "trace.jsonl"))
    job = plan_answer_job(config, questions)
    words.announce_reader()
    with open_engines(config.workers, [job.prepared]) as engines:
        job.run(engines)
    rows, counts = make_trace_rows(read_trace(Path(str(config.trace))), questions, settings, evaluated)
    write_text_atomic(out / ROWS, "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows))
    note = {"command": shlex.join(["dlm-rag", "synthesize", *argv]), "synthesis": asdict(settings)}
    write_text_atomic(
        out / NOTE, json.dumps(note | {"counts": counts}, indent=2, ensure_ascii=False) + "\n"
    )
    shown = ", ".join(f"{key} {count:,}" for key, count in counts.items())
    print_note(f"{replace_control_chars(str(out))}: {shown}")
    if job.failed:
        print_note(f"{job.failed} failed; the same command asks again")
        raise SystemExit(1)


def check_rows_folder(out: Path) -> None:
    """Raises `ConfigError` where a folder holds anything else: a training would read it with the rows."""
    names = [path.name for path in make_folder(out, "out=").iterdir()]
    if foreign := sorted(name for name in names if name not in (ROWS, NOTE, TRACES) and name[0] != "."):
        raise ConfigError(f"{out} holds '{foreign[0]}', which is of no rows: name a new or empty folder")


def read_asked_questions(config: Config) -> list[Question]:
    """The questions to be decoded. Raises `ConfigError` where the filter needs answers that are unknown."""
    if config.questions is None:
        raise ConfigError("traces of a model or corpus of your own need --questions FILE")
    questions = gather_questions(config, [])
    for question in questions:
        if config.synthesis.filter == "answer" and not question.golden_answers:
            raise ConfigError(f"'{question.id}' has no golden_answers: set synthesis.filter=evidence")
    return questions
