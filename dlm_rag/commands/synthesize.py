"""Make training rows: the responses that a model gives to questions, where they end in the known answer.

    dlm-rag synthesize --questions questions.jsonl --model DIR_OR_HUB_ID --corpus passages.jsonl --out rows

The folder of --out gets rows.jsonl, rows.json with what was left out and why, and traces/ with all answers
and traces. Run the same command again to resume. Train on the folder:

    dlm-rag train data.questions=rows data.corpus=passages.jsonl

With workers=N, N processes decode the same rows. If a question fails, exit status 1: repeat the command.
"""

import json
import shlex
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from dlm_rag.cli import print_note
from dlm_rag.commands.answer_job import open_engines, parse_answer_command_line, plan_answer_job
from dlm_rag.commands.arguments import ANSWER_SETTINGS
from dlm_rag.commands.prepare_decoder import fill_in_shipped_files, gather_questions
from dlm_rag.decode.rollout import Rollout
from dlm_rag.decode.trace_file import read_trace
from dlm_rag.errors import ConfigError
from dlm_rag.evaluation.metrics import compute_exact_match
from dlm_rag.files.paths import make_folder, write_text_atomic
from dlm_rag.questions import Question
from dlm_rag.text import replace_control_chars, split_words

ROWS, NOTE, TRACES = "rows.jsonl", "rows.json", "traces"


def main(argv: list[str]) -> None:
    words = parse_answer_command_line(__doc__ or "", argv, (*ANSWER_SETTINGS, "-record_provisional"))
    if words.config.out in (None, "-"):
        raise ConfigError("synthesis needs --out FOLDER")
    out, config = Path(str(words.config.out)), fill_in_shipped_files(words.config, [])
    check_rows_folder(out)
    questions = gather_questions(config, [], scored=True)
    traces = make_folder(out / TRACES, "out=")
    config = replace(config, out=str(traces / "answers.jsonl"), trace=str(traces / "trace.jsonl"))
    job = plan_answer_job(config, questions)
    words.announce_reader()
    with open_engines(config.workers, [job.prepared]) as engines:
        job.run(engines)
    rows, counts = make_rows(read_trace(traces / "trace.jsonl"), questions)
    write_text_atomic(out / ROWS, "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows))
    note = {"command": shlex.join(["dlm-rag", "synthesize", *argv]), "counts": counts}
    write_text_atomic(out / NOTE, json.dumps(note, indent=2, ensure_ascii=False) + "\n")
    shown = ", ".join(f"{key} {count:,}" for key, count in counts.items())
    print_note(f"{replace_control_chars(str(out))}: {shown}")
    if job.failed:
        print_note(f"{job.failed} failed; the same command asks again")
        raise SystemExit(1)


def check_rows_folder(out: Path) -> None:
    """Raises `ConfigError` where a folder holds anything else, which a training would read, or a link."""
    names = [path.name for path in make_folder(out, "out=").iterdir()]
    if foreign := sorted(name for name in names if name not in (ROWS, NOTE, TRACES) and name[0] != "."):
        raise ConfigError(f"{out} holds '{foreign[0]}', which is of no rows: name a new or empty folder")
    for path in (out / name for name in (ROWS, NOTE, TRACES)):
        if path.is_symlink():
            raise ConfigError(f"{path} is a symbolic link, which is not written through: remove it")


def make_rows(
    rollouts: Iterable[Rollout], questions: Sequence[Question]
) -> tuple[list[dict[str, Any]], dict[str, int]]:
    """The rows in the order of their questions, and counts of them and of what was left out, by reason.

    Kept are responses that end in a known answer and cite a passage in every sentence, one a question.
    """
    asked = {question.id: question for question in questions}
    counts, kept, rows, seen = Counter(rows=0), dict[str, Rollout](), list[dict[str, Any]](), set[str]()
    for rollout in rollouts:
        cited = {(unit["kind"], bool(unit["passages"])) for unit in rollout.citations}
        if rollout.id not in asked:
            continue
        if rollout.error:
            counts["failed"] += 1
        elif compute_exact_match(rollout.answer, asked[rollout.id].golden_answers) < 1:
            counts["left out: not the answer"] += 1
        elif cited != {("reasoning", True), ("answer", True)}:
            counts["left out: not cited"] += 1
        else:
            kept[rollout.id] = rollout
    for question in (question for question in questions if question.id in kept):
        said, rollout = " ".join(split_words(question.question)), kept[question.id]
        if said in seen:
            counts["left out: equal to an earlier row"] += 1
            continue
        seen.add(said)
        support = dict.fromkeys(p["id"] for unit in rollout.citations for p in unit["passages"])
        rows.append(
            {"id": question.id, "question": question.question, "supporting_ids": [*support],
             "golden_answers": [*question.golden_answers], "hops": question.hops,
             "response": rollout.response}
        )  # fmt: skip
    counts["rows"] = len(rows)
    return rows, dict(sorted(counts.items()))
