"""Real sessions: of nsys where it is installed, of torch.profiler everywhere; and reports that are none."""

import json
import shutil
import subprocess
import sys

import pytest

from tests.support.nsys_reports import DOMAIN_CREATE, PUSH_POP, write_nsys_sqlite
from tests.support.paths import ROOT
from tests.support.training import MICRO_SETTINGS

HERE = shutil.which("nsys")
needs_nsys = pytest.mark.skipif(
    HERE is None, reason="nsys is not installed (docs/tutorials/profile-a-run.md)"
)


def profiling(script, *words, code=0):
    """Runs a program of profiling/; what it printed, or said of an error."""
    done = subprocess.run(
        [sys.executable, str(ROOT / "profiling" / script), *map(str, words)],
        cwd=ROOT, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == code, done.stderr
    assert "Traceback" not in done.stderr
    return done.stderr if code else done.stdout


def attribution(folder):
    return json.loads((folder / "report.json").read_text())["now"]


def adds_up(found):
    times, shares = (sum(part[key] for part in found["stages"]) for key in ("self_time", "share"))
    assert times == pytest.approx(found["wall"]) and shares == pytest.approx(1)
    assert all(part["self_time"] >= 0 for part in found["stages"])


@pytest.mark.slow
@needs_nsys
def test_stage_times_of_a_session_are_those_of_the_answers(tmp_path):
    answers = tmp_path / "answers.jsonl"
    profiling("nsys.py", "sample", "--from-step", 0, "--steps", 0, "decode.batch_size=4", f"out={answers}",
              "--report", tmp_path)  # fmt: skip
    found = attribution(tmp_path)
    adds_up(found)
    records = [json.loads(line) for line in answers.read_text().splitlines()]
    assert found["questions"] == len(records) == 8
    for part in found["stages"]:
        if part["stage"] not in ("step", "outside of all stages"):
            told = sum(record["seconds"][part["stage"]] for record in records)
            assert part["wall"] == pytest.approx(told, rel=0.05, abs=1e-3), part["stage"]
    turns = sum(record["forwards"] + 1 for record in records)  # the first turn of a row only searches
    assert found["steps"]["count"] * found["steps"]["rows"] == pytest.approx(turns)
    assert (tmp_path / "report.md").stat().st_size > 500


@pytest.mark.slow
def test_a_session_of_training_covers_backward_and_the_steps_that_were_asked_for(tmp_path):
    """Validations decode in steps of their own, which are not those of the window."""
    words = ("train", "--with", "torch", "--from-step", 3, "--steps", 4, "--report", tmp_path / "session")
    profiling("nsys.py", *words, *MICRO_SETTINGS, "train.eval_steps=2", f"out={tmp_path / 'run'}")
    found = attribution(tmp_path / "session")
    adds_up(found)
    calls = {part["stage"]: part["calls"] for part in found["stages"]}
    assert found["steps"]["count"] == 4 and found["questions"] == 0
    names = ("data", "forward", "loss", "backward", "optimizer")
    assert {name: calls[name] for name in names} == dict.fromkeys(names, 4)
    assert calls["checkpoint"] in (1, 2) and calls["evaluate"] in (1, 2) and calls["denoise"] > 4


@pytest.mark.slow
def test_torch_profiler_makes_the_same_report(tmp_path):
    profiling("nsys.py", "sample", "--with", "torch", "--from-step", 2, "decode.batch_size=4",
              "decode.overlap=pipeline", "--report", tmp_path)  # fmt: skip
    found = attribution(tmp_path)
    adds_up(found)
    stages = {part["stage"]: part for part in found["stages"]}
    assert {"denoise", "encode_evidence", "commit", "retrieve"} <= set(stages)
    assert stages["retrieve"]["beside"] > 0, "searches have a thread of their own"
    assert found["questions"] == 8
    assert "attention sdpa" in (tmp_path / "report.md").read_text()
    layers = stages["denoise"]["layers"]
    assert [*layers] == [str(n) for n in range(len(layers))] and len(layers) > 1
    assert 0.5 * stages["denoise"]["wall"] < sum(layers.values()) < stages["denoise"]["wall"]
    assert "aten::linear" in stages["denoise"]["kernels"]


@pytest.mark.slow
def test_a_baseline_shows_what_got_slower_first(tmp_path):
    for name, factor in (("before", 1), ("after", 3)):
        write_session(tmp_path / f"{name}.sqlite", 4, denoise=factor * 1000, commit=500 // factor)
    told = profiling("attribute.py", tmp_path / "after.sqlite", "--baseline", tmp_path / "before.sqlite")
    lines = [line for line in told.split("against the baseline")[1].splitlines() if "│" in line]
    assert "denoise" in lines[0] and "commit" in lines[-1]


def write_session(path, steps, denoise=1000, commit=500):
    """An sqlite export of `steps` steps, two stages and a kernel in each; nanoseconds."""
    events, calls, kernels = [(0, None, DOMAIN_CREATE, "dlm_rag", None, 1, 7)], [], []
    for step in range(steps):
        at = step * (denoise + commit + 100)
        middle, end = at + denoise, at + denoise + commit
        ranges = [(at, end, f"step {step} rows 2"), (at, middle, "denoise"), (middle, end, "commit")]
        events += [(a, b, PUSH_POP, name, None, 1, 7) for a, b, name in ranges]
        calls.append((at + 1, at + 2, 7, step, None))
        kernels.append((at + 11, at + 2 + denoise // 2, 0, step, None))
    write_nsys_sqlite(path, (), events, calls, kernels)


STEPS = 100_000  # of three ranges


@pytest.mark.slow
def test_many_ranges_take_seconds_and_little_memory(tmp_path):
    write_session(tmp_path / "huge.sqlite", STEPS)
    code = f"""
import resource, runpy, sys
resource.setrlimit(resource.RLIMIT_CPU, (20, 20))
sys.argv = ["attribute.py", {str(tmp_path / "huge.sqlite")!r}, "--out", {str(tmp_path)!r}]
sys.path.insert(0, {str(ROOT / "profiling")!r})
try:
    runpy.run_path({str(ROOT / "profiling" / "attribute.py")!r}, run_name="__main__")
finally:
    print(open("/proc/self/status").read().split("VmHWM:")[1].split()[0])  # ru_maxrss is also the parent's
"""
    done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    assert int(done.stdout.splitlines()[-1]) < 1e6, "kilobytes"
    found = attribution(tmp_path)
    adds_up(found)
    assert found["steps"]["count"] == STEPS
    denoise = next(part for part in found["stages"] if part["stage"] == "denoise")
    assert denoise["gpu_busy"] == pytest.approx(STEPS * 491e-9)
