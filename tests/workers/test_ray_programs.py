"""Programs with workers under Ray, interrupted and struck: the answers are those of one process."""

import json
import os
import signal
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from dlm_rag.commands import evaluate
from dlm_rag.commands.prepare_decoder import SHIPPED_FOLDER
from dlm_rag.decode.trace_file import read_trace
from tests.support.commands import call, model  # noqa: F401 - fixtures
from tests.support.passages import write_jsonl_file
from tests.support.paths import ROOT
from tests.support.processes import RAY_TOKEN, count_lines, wait_until
from tests.support.ray_runs import gone, mark, processes, surroundings, workers  # noqa: F401 - fixtures
from tests.support.rollouts import strip_times_and_confidences

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(find_spec("ray") is None, reason="pip install 'dlm_rag[workers]'"),
]
QUESTIONS = SHIPPED_FOLDER / "world" / "questions.jsonl"
COUNT = 160  # of the questions
MOST_SECONDS = 300


def start(out: Path, *more: str) -> "subprocess.Popen[str]":
    """Answers the questions into a file, beside which their trace is."""
    command = [
        sys.executable, str(ROOT / "sample.py"), "--questions", str(QUESTIONS), "--out", str(out),
        "--trace", f"{out}.trace", "decode.batch_size=16", f"limit={COUNT}", *more,
    ]  # fmt: skip
    own = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    return subprocess.Popen(
        command, env={name: value for name, value in own.items() if name not in RAY_TOKEN},
        cwd=out.parent, stderr=subprocess.PIPE, stdout=subprocess.PIPE, text=True, start_new_session=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
    )  # fmt: skip


def until(process: "subprocess.Popen[str]", out: Path, answers: int) -> None:
    """Waits for so many answers."""
    wait_until(lambda: count_lines(out) >= answers, process, MOST_SECONDS)


@pytest.fixture(scope="module")
def whole(tmp_path_factory) -> Path:
    """The answers of one process that nobody interrupts."""
    out = tmp_path_factory.mktemp("whole") / "whole.jsonl"
    _, err = (process := start(out)).communicate(timeout=MOST_SECONDS)
    assert process.returncode == 0 and out.read_text().count("\n") == COUNT, err
    return out


def test_answers_are_those_of_one_process_whatever_ends_the_run(tmp_path, whole, mark):
    """Ended by Ctrl-C with workers and without, by SIGTERM once a worker is killed, by SIGKILL."""
    out, answers = tmp_path / "split.jsonl", 0
    ends = (
        (signal.SIGINT, 130, "workers=2"), (signal.SIGINT, 130, "workers=null"),
        (signal.SIGTERM, -15, "workers=2"), (signal.SIGKILL, -9, "workers=2"),
    )  # fmt: skip
    for number, status, how in ends:
        process = start(out, how)
        until(process, out, answers + 10)
        if number == signal.SIGTERM:
            killed, *_ = before = workers(mark)
            os.kill(killed, signal.SIGKILL)
            wait_until(lambda before=before: {*workers(mark)} - {*before}, process)
        (os.killpg if number == signal.SIGINT else os.kill)(process.pid, number)
        printed, err = process.communicate(timeout=MOST_SECONDS)
        assert process.returncode == status and not printed and "Traceback" not in err and "ray" not in err
        assert ("the same command goes on from here" in err) == (number == signal.SIGINT)
        assert gone(mark), processes(mark)
        kept, answers = answers, out.read_text().count("\n")
        assert not kept or f"{kept} of {COUNT} questions are answered already" in err
    assert 40 <= answers < COUNT
    _, err = (process := start(out)).communicate(timeout=MOST_SECONDS)  # without workers
    assert process.returncode == 0 and "rounding may differ" not in err, err
    assert out.read_text().count("\n") == COUNT
    found, expected = (
        {r.id: strip_times_and_confidences(r) for r in read_trace(Path(f"{path}.trace"))}
        for path in (out, whole)
    )
    assert found == expected and len(found) == COUNT
    assert len([*read_trace(Path(f"{out}.trace"))]) == COUNT
    first, second = (json.loads(Path(f"{path}.run.json").read_text()) for path in (out, whole))
    assert first["machines"] == second["machines"]
    assert first["answers_depend_on"] == second["answers_depend_on"]


def test_evaluate_compares_over_the_same_workers(call, tmp_path, monkeypatch, mark):
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    questions = [{"id": f"n{n}", "question": f"Who wrote book {n}?", "golden_answers": ["x"],
                  "supporting_ids": ["emma"]} for n in range(12)]  # fmt: skip
    path = write_jsonl_file(tmp_path / "q.jsonl", questions)
    words = ["--questions", path, "--compare", "interleaved,static,oracle", "retrieval.top_k=1"]
    code, _, err = call(*words, "--out", tmp_path / "many", "workers=2", program=evaluate)
    assert code == 0 and err.count("12 questions in") == 3 and err.count("2 workers") == 3, err
    assert gone(mark)
    code, _, err = call(*words, "--out", tmp_path / "one", program=evaluate)
    assert code == 0, err
    scores = [json.loads((tmp_path / name / "scores.json").read_text()) for name in ("many", "one")]
    for record in scores:
        del record["command"]
        for setting in record["settings"].values():
            del setting["stamp"]
            for group in setting["groups"].values():
                del group["seconds"]
    assert scores[0] == scores[1]
