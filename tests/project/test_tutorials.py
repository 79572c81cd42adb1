"""Every shell block of the tutorials runs, at a small size, and so do the notebooks.

For those who write a tutorial, by what stands at the fence of a block:

- bash: it runs here. The blocks of a page are one script, in a folder that looks like a checkout; each
  command must end with status 0. A server is started with `&` and ended by `kill %1` on the same page.
- title="FILE" after any language: the file is written before the script starts.
- console: shown and not run, for what needs a GPU, Docker, Slurm, an installation or the network.
- text: output.

What takes long gets smaller by `SMALLER`. After a change of a tutorial that has a notebook, run
`python docs/build_notebooks.py`.
"""

import json
import os
import re
import runpy
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.support.paths import ROOT

TUTORIALS = sorted((ROOT / "docs" / "tutorials").glob("*.md"))
NOTEBOOKS = sorted((ROOT / "docs" / "notebooks").glob("*.ipynb"))
ONE_STEP = "train.max_steps=1 train.eval_questions=1 train.num_generations=2"  # of RL
SMALLER = {
    "first-experiment": {"--limit 100": "--limit 2", "threshold=0.9,0.7,0.5": "threshold=0.9,0.5"},
    "one-gpu-to-a-cluster": {
        "train.max_steps=20 train.save_steps=10": "train.max_steps=2 train.save_steps=1",
        "train.max_steps=30 train.save_steps=10": "train.max_steps=3 train.save_steps=1",
    },
    "profile-a-run": {
        " limit=8 ": " limit=2 ",
        "--from-step 2 --steps 3": "--from-step 1 --steps 1",
        "train.max_steps=6": "train.max_steps=2",
    },
    "reinforcement-learning": {
        "train.max_steps=12 train.eval_steps=6": ONE_STEP,
        "train.max_steps=2 train.reward": f"{ONE_STEP} train.reward",
        "--per-hop 25": "--per-hop 1 --passages 200",
    },
    "train-on-a-laptop": {
        "--nproc-per-node 2": "--nproc-per-node 1",
        "--config tiny.yaml --resume": "--config tiny.yaml --resume train.max_steps=3",
        "--config tiny.yaml\n": "--config tiny.yaml train.max_steps=2\n",
        "--passages 300": "--passages 100",
        "interleaved,static retrieval": "interleaved,static --limit 2 retrieval",
    },
}
PROGRAMS = {"python": "", "dlm-rag": "-m dlm_rag", "torchrun": "-m torch.distributed.run"}
SECONDS = 900


def read_blocks(page: Path) -> list[tuple[str, str | None, str]]:
    """Language, file and text of each fenced block of a page."""
    found = re.findall(
        r'^```(\S*)(?: title="([^"]+)")?.*\n((?:.*\n)*?)```$', page.read_text(), re.MULTILINE
    )
    return [(language, file or None, text) for language, file, text in found]


def shrink(text: str, page: str) -> str:
    """The commands at the size of a test."""
    for words, smaller in SMALLER.get(page, {}).items():
        text = text.replace(words, smaller)
    return text


def build_script(page: Path) -> str:
    return shrink(
        "".join(text for kind, file, text in read_blocks(page) if kind == "bash" and not file), page.stem
    )


@pytest.fixture
def checkout(tmp_path, monkeypatch) -> Path:
    """A folder that looks like a checkout, with this interpreter's programs first on the path."""
    folder, programs = tmp_path / "checkout", tmp_path / "bin"
    folder.mkdir()
    programs.mkdir()
    for path in [ROOT / name for name in ("configs", "dlm_rag", "docs", "examples", "profiling")] + [
        *ROOT.glob("*.py")
    ]:
        (folder / path.name).symlink_to(path)
    for name, words in PROGRAMS.items():
        (programs / name).write_text(f'#!/bin/sh\nexec "{sys.executable}" {words} "$@"\n')
        (programs / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{programs}:{os.environ['PATH']}")
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    return folder


def is_alive(group: int) -> bool:
    """Whether a process group has a process."""
    try:
        os.killpg(group, 0)
    except ProcessLookupError:
        return False
    return True


@pytest.mark.slow
@pytest.mark.parametrize(
    "page", [page for page in TUTORIALS if build_script(page)], ids=lambda page: page.stem
)
def test_the_shell_blocks_of_a_tutorial_run(page, checkout, tmp_path):
    for _, file, text in read_blocks(page):
        if file:
            (checkout / file).parent.mkdir(parents=True, exist_ok=True)
            (checkout / file).write_text(text)
    log = tmp_path / "log"
    with log.open("w") as out:  # a server that goes on would keep a pipe open
        shell = subprocess.Popen(
            ["bash", "-exo", "pipefail", "-c", build_script(page)],
            cwd=checkout, stdout=out, stderr=out, stdin=subprocess.DEVNULL, start_new_session=True,
        )  # fmt: skip
        try:
            status = shell.wait(SECONDS)
            deadline = time.monotonic() + 30
            while (left := is_alive(shell.pid)) and time.monotonic() < deadline:
                time.sleep(0.1)
        finally:
            if is_alive(shell.pid):
                os.killpg(shell.pid, signal.SIGKILL)
            shell.wait()
    assert status == 0, log.read_text()[-4000:]
    assert not left, "the page leaves a process behind"


def test_notebooks_are_those_of_their_tutorials():
    """Built anew they are the same: the same commands, no outputs, nothing of the machine that ran them."""
    built = runpy.run_path(str(ROOT / "docs" / "build_notebooks.py"))
    assert {path.stem for path in NOTEBOOKS} == set(built["NOTEBOOKS"])
    for path in NOTEBOOKS:
        page = ROOT / "docs" / "tutorials" / f"{built['NOTEBOOKS'][path.stem]}.md"
        assert path.read_text() == built["build_notebook"](page.read_text())


@pytest.mark.slow
def test_a_notebook_runs(checkout, tmp_path, monkeypatch):
    """One of them: their commands are those of the tutorials, which run above."""
    path = NOTEBOOKS[0]
    pytest.importorskip("ipykernel")
    nbclient = pytest.importorskip("nbclient")
    nbformat = pytest.importorskip("nbformat")
    kernel = tmp_path / "jupyter" / "kernels" / "tested"
    kernel.mkdir(parents=True)
    words = [sys.executable, "-m", "ipykernel_launcher", "-f", "{connection_file}"]
    (kernel / "kernel.json").write_text(json.dumps({"argv": words, "display_name": "tested"}))
    monkeypatch.setenv("JUPYTER_PATH", str(tmp_path / "jupyter"))
    monkeypatch.setenv("IPYTHONDIR", str(tmp_path / "ipython"))
    notebook = nbformat.read(path, 4)
    for cell in notebook.cells:
        cell.source = shrink(cell.source, path.stem.replace("_", "-"))
    place = {"metadata": {"path": str(checkout)}}
    nbclient.NotebookClient(notebook, timeout=SECONDS, kernel_name="tested", resources=place).execute()
    outputs = [output for cell in notebook.cells for output in cell.get("outputs", [])]
    assert any("data" in output for output in outputs), "the page or the picture is shown"
