"""Every row of `bad_inputs/`: one sentence, the right exit status, no traceback, no hang, nothing lost."""

import importlib
import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import transformers  # noqa: F401 - its log handler keeps the stderr of its first import

from dlm_rag.__main__ import dispatch
from dlm_rag.cli import run_program
from tests.bad_inputs import ABSENT, BadInputCase, checkpoints, outputs, passages, programs, settings
from tests.support.passages import PASSAGES, write_jsonl_file
from tests.support.paths import ROOT
from tests.support.tiny_models import byte_tokenizer, tiny_denoiser

CASES = [case for room in (settings, checkpoints, passages, outputs, programs) for case in room.CASES]
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


def merge(old: dict, new: dict) -> dict:
    """A JSON object with other keys, which join the objects that are there."""
    joined = {
        key: old[key] | value if isinstance(value, dict) and isinstance(old.get(key), dict) else value
        for key, value in new.items()
    }
    return {key: value for key, value in (old | joined).items() if value is not ABSENT}


def put(path: Path, content) -> None:
    """Makes the file of a case."""
    path.parent.mkdir(parents=True, exist_ok=True)
    if callable(content):
        content(path)
    elif content is None:
        path.unlink()
    elif isinstance(content, dict):
        path.write_text(json.dumps(merge(json.loads(path.read_text()) if path.is_file() else {}, content)))
    else:
        path.write_bytes(content if isinstance(content, bytes) else content.encode())


def contents(folder: Path) -> dict[str, bytes]:
    """Every regular file below a folder by its path."""
    return {str(p.relative_to(folder)): p.read_bytes() for p in folder.rglob("*") if p.is_file()}


def fail_of_time(*_) -> None:
    raise AssertionError(f"no answer within {MOST_SECONDS} seconds")


@pytest.fixture
def call(monkeypatch, capfd, tmp_path):
    """Runs a command in `tmp_path`, within this process: exit status, standard output, standard error."""

    def invoke(case: BadInputCase) -> tuple[int, str, str]:
        given = tmp_path.with_name(f"{tmp_path.name}.stdin")
        given.write_bytes(case.stdin)
        monkeypatch.chdir(tmp_path)
        monkeypatch.setattr("dlm_rag.cli.exit_rank", sys.exit)  # which would end this process
        for name, value in case.env.items():
            monkeypatch.delenv(name, raising=False) if value is None else monkeypatch.setenv(name, value)
        words = shlex.split(case.command)
        is_module = "." in words[0]  # as after `python -m`
        main = importlib.import_module(words[0]).main if is_module else dispatch
        monkeypatch.setattr(sys, "argv", words if is_module else ["dlm-rag", *words])
        if case.exit and not case.loads:
            monkeypatch.setattr("dlm_rag.model.denoiser.load_denoiser", None)
            monkeypatch.setattr("transformers.DiffusionGemmaForBlockDiffusion.from_pretrained", None)
        old = signal.signal(signal.SIGALRM, fail_of_time)
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


def name_case(case: BadInputCase) -> str:
    """What tells a case from others: the end of its command, the first of its files."""
    return ascii(f"{case.command[-60:]} {', '.join(case.files)[:30]} {case.says}"[:120])


def is_alone(case: BadInputCase) -> bool:
    """Whether a case has a process of its own."""
    return case.alone or ".py" in case.command.split()[0]


def mark_cases() -> list:
    """The cases as parameters: of those of a program that break the same files, the first alone is fast."""
    found, seen = [], set()
    for case in CASES:
        group = case.command.split()[0], *case.files
        slow = group in seen or is_alone(case)
        seen |= set() if slow else {group}
        found.append(pytest.param(case, id=name_case(case), marks=[pytest.mark.slow] * slow))
    return found


@pytest.mark.parametrize("case", mark_cases())
def test_it_is_answered_in_a_sentence(case: BadInputCase, call, good, tmp_path):
    shutil.copytree(good, tmp_path, dirs_exist_ok=True)
    for path, content in case.files.items():
        put(tmp_path / path, content)
    before = contents(tmp_path)
    code, out, err = call_alone(case, tmp_path) if is_alone(case) else call(case)
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
    assert "was-run" not in after, "code of a file was executed"
