"""What `pip install dlm_rag` brings: three programs that work from any folder, without the source tree."""

import json
import os
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import venv
import zipfile
from pathlib import Path

import pytest

from tests.support.paths import ROOT

pytestmark = pytest.mark.slow


def run(*words, cwd, **kept):
    """Without PYTHONPATH, so that nothing but the virtual environment is importable."""
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    return subprocess.run(
        [*map(str, words)], cwd=cwd, env=environment | kept, capture_output=True, text=True, timeout=300
    )


PIP = (sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check")
LOCAL = ("--no-deps", "--no-index")


def must(*words, cwd):
    done = run(*words, cwd=cwd)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.fixture(scope="module")
def source(tmp_path_factory) -> Path:
    """A copy of what a package is built from: building leaves files behind."""
    folder = tmp_path_factory.mktemp("source")
    made = shutil.ignore_patterns(".*", "__pycache__", "*.egg-info", "build", "runs", "wandb")
    return shutil.copytree(ROOT, folder, ignore=made, dirs_exist_ok=True)


def build(kind: str, source: Path, into: Path) -> Path:
    """What setuptools makes of the source."""
    code = f"from setuptools import build_meta as b; b.build_{kind}('{into}')"
    must(sys.executable, "-c", code, cwd=source)
    (built,) = into.iterdir()
    return built


def fresh_environment(folder: Path, wheel: Path) -> Path:
    """The `bin` of a virtual environment with one wheel of ours, and the packages of this one behind it."""
    venv.create(folder)
    must(*PIP, "--python", folder / "bin" / "python", "install", *LOCAL, wheel, cwd=folder)
    (packages,) = folder.glob("lib/python*/site-packages")
    # Behind the environment's own; the .pth files in there, of editable installs, are not read.
    (packages / "dependencies.pth").write_text(sysconfig.get_path("purelib") + "\n")
    return folder / "bin"


@pytest.fixture(scope="module")
def archives(source, tmp_path_factory) -> tuple[Path, Path]:
    """The sdist, and the wheel that pip makes of it."""
    folder = tmp_path_factory.mktemp("dist")
    archive = build("sdist", source, folder / "sdist")
    must(*PIP, "wheel", "--no-build-isolation", *LOCAL, archive, "--wheel-dir", folder, cwd=folder)
    (wheel,) = folder.glob("*.whl")
    return archive, wheel


@pytest.fixture(scope="module")
def installed(archives, tmp_path_factory) -> Path:
    """The wheel's environment, in a repository of somebody else's."""
    folder, (_, wheel) = tmp_path_factory.mktemp("elsewhere"), archives
    found = fresh_environment(folder / "env", wheel)
    for words in (["init", "--quiet"], ["add", "env/pyvenv.cfg"], ["commit", "--quiet", "-m", "not ours"]):
        must("git", "-c", "user.name=a", "-c", "user.email=a@b", *words, cwd=folder)
    return found


def test_archives_hold_the_package_and_no_more(archives):
    archive, wheel = archives
    with tarfile.open(archive) as file:
        packed = {name.partition("/")[2] for name in file.getnames()}
    shipped = ("shipped/model/model.safetensors", "shipped/world/corpus.jsonl")
    shipped += ("page/page.js", "page/live.html", "page/live.js")
    data = {
        "configs/tiny.yaml",
        "profiling/nsys.py",
        "examples/passages.jsonl",
        *(f"dlm_rag/{name}" for name in shipped),
    }
    assert data | {"LICENSE", "README.md", "pyproject.toml"} <= packed
    rooms = {name.partition("/")[0] for name in packed} - {""}
    assert not rooms & {"tests", "requirements", "docs"}
    with zipfile.ZipFile(wheel) as file:
        unpacked = set(file.namelist())
    assert {f"dlm_rag/{name.removeprefix('dlm_rag/')}" for name in data} <= unpacked
    assert {name.partition("/")[0].partition("-")[0] for name in unpacked} == {"dlm_rag"}
    assert any(name.endswith("LICENSE") for name in unpacked)


def test_sample_answers_with_the_shipped_model(installed, tmp_path):
    first = (ROOT / "dlm_rag/shipped/world/questions.jsonl").read_text().splitlines()[0]
    question = json.loads(first)
    out = tmp_path / "answers.jsonl"
    done = run(installed / "dlm-rag", "sample", question["question"], cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    (line,) = done.stdout.splitlines()
    answer = json.loads(line)
    assert answer["answer"] in question["golden_answers"] and answer["evidence"]

    again = ("-m", "dlm_rag", "sample", question["question"], "--out", out)
    done = run(installed / "python", *again, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert json.loads(out.read_text())["response"] == answer["response"]
    stamp = json.loads(Path(f"{out}.run.json").read_text())
    assert stamp["commit"] is None, "the repository that the environment lies in is not ours"


def test_train_finds_the_configs_and_programs_their_flags(installed, tmp_path):
    code = "import dlm_rag; print(dlm_rag.__file__)"
    program, python = [installed / "dlm-rag"], [installed / "python"]
    for words, status, said in (
        ([*program, "train", "--config", "tiny.yaml", "--print-config"], 0, "hops: 2"),
        ([*program, "train", "--config", "tinny.yaml", "--plan"], 2, "nearest: 'tiny.yaml'"),
        ([*python, "-c", code], 0, str(installed.parent)),  # not of the source tree
        ([*program, "profile", "--help"], 0, "--with"),
    ):
        done = run(*words, cwd=tmp_path)
        assert done.returncode == status and said in done.stdout + done.stderr, done.stderr
    assert not list(tmp_path.iterdir()), "nothing is written by asking"


def test_an_extra_is_named_from_any_folder(installed, tmp_path):
    """Messages say `pip install 'dlm_rag[NAME]'`: the name is on no index, but the package is here."""
    must(*PIP, "--python", installed / "python", "install", *LOCAL, "dlm_rag[serve,energy]", cwd=tmp_path)
