"""Every line of `bad_inputs/`: one sentence, the right exit status, no traceback, no hang, nothing lost."""

import importlib
import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
from itertools import pairwise
from pathlib import Path

import pytest

from dlm_rag.__main__ import dispatch
from dlm_rag.cli import run_program
from tests.bad_inputs import BadInputCase, checkpoints, outputs, passages, settings, synthesis, uniform
from tests.support.passages import PASSAGES, write_jsonl_file
from tests.support.paths import ROOT
from tests.support.tiny_models import byte_tokenizer, tiny_denoiser

CASES = [
    case for room in (settings, checkpoints, passages, outputs, synthesis, uniform) for case in room.CASES
]
MOST_SECONDS = 30
# What moves a cursor, rings a bell or hides text; a line break and a tab do not.
CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")


@pytest.fixture(scope="module")
def good(tmp_path_factory) -> Path:
    """A folder in which every command works."""
    folder = tmp_path_factory.mktemp("good")
    tiny_denoiser().save_pretrained(folder / "model", eos_token_id=257)
    byte_tokenizer().save_pretrained(folder / "model")
    write_jsonl_file(
        folder / "corpus.jsonl", [{"id": i, "title": t, "contents": c} for i, t, c in PASSAGES]
    )
    asked = [
        {"id": f"n{n}", "question": f"Who wrote book {n}?", "golden_answers": ["Austen"]} for n in range(3)
    ]
    write_jsonl_file(folder / "questions.jsonl", asked)
    return folder


def put(path: Path, content) -> None:
    """Makes the file of a case."""
    path.parent.mkdir(parents=True, exist_ok=True)
    if callable(content):
        content(path)
    elif content is None:
        path.unlink()
    elif isinstance(content, dict):
        there = json.loads(path.read_text()) if path.is_file() else {}
        path.write_text(json.dumps(there | content))
    else:
        path.write_bytes(content if isinstance(content, bytes) else content.encode())


def contents(folder: Path) -> dict[str, bytes]:
    """Every regular file below a folder by its path."""
    return {str(p.relative_to(folder)): p.read_bytes() for p in folder.rglob("*") if p.is_file()}


def hangs(*_) -> None:
    raise AssertionError(f"no answer within {MOST_SECONDS} seconds")


@pytest.fixture
def call(monkeypatch, capfd, tmp_path):
    """Runs a command in `tmp_path`, within this process: exit status, standard output, standard error."""

    def invoke(command: str, stdin: bytes = b"") -> tuple[int, str, str]:
        given = tmp_path.with_name(f"{tmp_path.name}.stdin")
        given.write_bytes(stdin)
        monkeypatch.chdir(tmp_path)
        words = shlex.split(command)
        monkeypatch.setattr(sys, "argv", ["dlm-rag", *words])
        main = dispatch
        if "." in words[0]:  # a module of the package, as after `python -m`
            main = importlib.import_module(words[0]).main
            monkeypatch.setattr(sys, "argv", words)
        old = signal.signal(signal.SIGALRM, hangs)
        signal.setitimer(signal.ITIMER_REAL, MOST_SECONDS)
        try:
            with given.open() as file, pytest.raises(SystemExit) as stop:
                monkeypatch.setattr(sys, "stdin", file)
                run_program(main)
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
            signal.signal(signal.SIGALRM, old)
        out = capfd.readouterr()
        return stop.value.code, out.out, out.err

    return invoke


def call_alone(case: BadInputCase, folder: Path) -> tuple[int, str, str]:
    """Runs a command in a process of its own."""
    first, *words = shlex.split(case.command)
    program = [str(ROOT / first)] if first.endswith(".py") else ["-m", "dlm_rag", first]
    if "." in first and not first.endswith(".py"):
        program = ["-m", first]
    given = {**os.environ, "PYTHONPATH": str(ROOT)} | case.env
    done = subprocess.run(
        [sys.executable, *program, *words],
        cwd=folder,
        env={name: value for name, value in given.items() if value is not None},
        input=case.stdin,
        capture_output=True,
        timeout=6 * MOST_SECONDS,
    )
    return done.returncode, done.stdout.decode(errors="replace"), done.stderr.decode(errors="replace")


@pytest.mark.parametrize(
    "case",
    [pytest.param(case, id=case.what, marks=[pytest.mark.slow] if case.slow else []) for case in CASES],
)
def test_it_is_answered_in_a_sentence(case: BadInputCase, call, good, tmp_path, monkeypatch):
    if {"--model gemma", "--model noisy"} & {*map(" ".join, pairwise(shlex.split(case.command)))}:
        # Their weights must not be reached.
        monkeypatch.setattr("transformers.DiffusionGemmaForBlockDiffusion.from_pretrained", None)
    shutil.copytree(good, tmp_path, dirs_exist_ok=True)
    for path, content in case.files.items():
        put(tmp_path / path, content)
    before = contents(tmp_path)
    code, out, err = (
        call_alone(case, tmp_path) if case.needs_own_process else call(case.command, case.stdin)
    )
    assert code == case.exit, out + err
    text = err if code else out + err
    assert "Traceback" not in text and not CONTROL.search(out + err)
    if code:
        assert len([line for line in err.splitlines() if line.startswith("error: ")]) == 1, err
    at = 0
    for words in (case.says,) if isinstance(case.says, str) else case.says:
        assert words in text[at:], text
        at = text.index(words, at) + len(words)
    after = contents(tmp_path)
    changed = {path for path, data in before.items() if after.get(path) != data}
    assert changed <= set(case.changes), "what was there is not what it was"


def test_names_of_cases_are_all_different():
    assert len({case.what for case in CASES}) == len(CASES)
