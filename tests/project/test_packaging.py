"""What is given away: locked versions, the container, the citation, examples that run from any folder."""

import os
import re
import runpy
import subprocess
import sys
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from tests.support.paths import ROOT

LOCKS = sorted((ROOT / "requirements").glob("*.txt"))


def pinned(lock: Path) -> dict[str, str]:
    """name -> version of a lock file."""
    return dict(re.findall(r"^([\w.-]+)==([^\s\\]+)", lock.read_text(), re.MULTILINE))


@pytest.mark.parametrize("lock", LOCKS, ids=lambda path: path.stem)
def test_every_range_is_locked_within_itself(lock):
    """Where setup.py has changed, `python requirements/lock.py` makes the files anew."""
    locked = pinned(lock)
    ranges = runpy.run_path(str(ROOT / "requirements" / "lock.py"))["requirements"]()
    assert any(line.startswith("torch") for line in ranges)
    for line in ranges:
        wanted = Requirement(line)
        version = locked.get(wanted.name)
        assert version and wanted.specifier.contains(version), f"{line}: {version} is locked"


def test_locks_name_public_places_only():
    for lock in LOCKS:
        text = lock.read_text()
        indexes = {f"https://download.pytorch.org/whl/{build}" for build in ("cpu", "cu126")}
        assert set(re.findall(r"\S+://\S+", text)) <= indexes
        assert not re.search(r"(?:^|\s|=)/\w|find-links|index-url https?://(?!download\.pytorch)", text)
    cpu, cuda = (pinned(ROOT / "requirements" / name) for name in ("cpu.txt", "cuda.txt"))
    assert cpu["torch"] == cuda["torch"] + "+cpu"
    assert "nvidia-nccl-cu13" in cuda and not [name for name in cpu if name.startswith("nvidia")]
    assert {name: version for name, version in cpu.items() if name != "torch"}.items() <= cuda.items()


def test_a_v100_gets_the_versions_of_others_and_torchs_last_build_with_code_for_it():
    cuda, v100 = (pinned(ROOT / "requirements" / name) for name in ("cuda.txt", "v100.txt"))
    assert v100.pop("torch") == cuda.pop("torch") + "+cu126" and v100.items() <= cuda.items()
    assert all(name.startswith(("cuda-", "nvidia-")) for name in cuda.keys() - v100.keys())
    assert "requirements/v100.txt" in (ROOT / "configs" / "v100x4.yaml").read_text()


def test_the_container_is_made_of_what_is_there():
    text = (ROOT / "Dockerfile").read_text()
    lock = re.search(r"^ARG LOCK=(\w+)$", text, re.MULTILINE)[1]
    seen = {line[1:] for line in (ROOT / ".dockerignore").read_text().splitlines() if line.startswith("!")}
    copied = [
        name.replace("${LOCK}", lock)
        for line in re.findall(r"^COPY (.+)$", text, re.MULTILINE)
        for name in line.split()[:-1]
    ]
    assert {"setup.py", "dlm_rag", "configs", "requirements/cpu.txt"} <= set(copied)
    for name in copied:
        assert (ROOT / name).exists() and name.partition("/")[0] in seen, name
    assert re.search(r"^USER [1-9]\d*$", text, re.MULTILINE), "not root"


def run_example(name: str, folder: Path) -> str:
    """What an example prints, run in a folder with nothing in it; nothing is left there."""
    done = subprocess.run(
        [sys.executable, ROOT / "examples" / name],
        cwd=folder, capture_output=True, text=True, timeout=300, env=os.environ | {"PYTHONPATH": str(ROOT)},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert not list(folder.iterdir())
    return done.stdout


@pytest.mark.slow
def test_a_trajectory_is_read(tmp_path):
    printed = run_example("ask_own_passages.py", tmp_path)
    first, later = printed.split("step 1 ")
    assert "finds Hostil under Samoul\n" in first and "Klenouth on Vairo" not in first
    assert "finds Klenouth on Vairo\n" in later and "### lenses" in later
    assert "lenses  <- Klenouth on Vairo" in later


@pytest.mark.slow
def test_a_query_policy_of_ones_own_is_compared(tmp_path):
    lines = run_example("own_query_policy.py", tmp_path).splitlines()
    matches = {line[:10].strip(): int(re.search(r"(\d+)%", line)[1]) for line in lines}
    assert matches["question"] < 20 < 60 < matches["ask_names"] and matches["proxy"] > 60


@pytest.mark.slow
def test_a_few_steps_of_training_teach_a_new_wording(tmp_path):
    before, after = re.findall(r"^(\d+) of 24 right", run_example("train_own.py", tmp_path), re.MULTILINE)
    assert int(before) <= 2 and int(after) >= 6


@pytest.mark.slow
def test_tests_for_a_gpu_need_no_packages_of_other_tests():
    """As `docs/how-to/first-day-on-a-gpu.md` installs them: pytest beside what the program needs."""
    program = "import sys; sys.modules.update(dict.fromkeys(('hypothesis', 'openai'))); import pytest; "
    program += "sys.exit(pytest.main(['-m', 'gpu', '--collect-only', '-p', 'no:cacheprovider']))"
    without = os.environ | {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=ROOT, env=without, capture_output=True, text=True
    )
    assert done.returncode == 0 and "test_gpu" in done.stdout, done.stdout[-3000:]
