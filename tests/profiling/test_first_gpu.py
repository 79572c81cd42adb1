"""The first look at a GPU, on a CPU: what fails leaves its error, the rest of the page is made."""

import json
import subprocess
import sys
import time

import pytest

from tests.support.paths import ROOT

sys.path.insert(0, str(ROOT / "profiling"))

import first_gpu
import first_gpu_parts
import first_gpu_report

SCRIPT = [sys.executable, str(ROOT / "profiling" / "first_gpu.py")]


def look(folder, *words):
    return subprocess.run([*SCRIPT, "--out", str(folder), *words], capture_output=True, text=True)


def test_a_part_that_fails_or_hangs_says_so_and_is_over(tmp_path):
    def taken(code, limit=30.0):
        return first_gpu.run_part_process([sys.executable, "-c", code], tmp_path / "log", limit)

    assert taken("print('fine')") == ""
    assert taken("raise SystemExit('no such kernel')") == "exit status 1: no such kernel"
    begun = time.monotonic()
    sleeper = "[sys.executable, '-c', 'import time; time.sleep(60)']"  # a compiler's worker, say
    hangs = f"import subprocess, sys; subprocess.run({sleeper})"
    assert taken(hangs, 1.0) == "it took more than its 1 s" and time.monotonic() - begun < 50
    assert taken("print('fine')", -1.0) == "no time was left for it"


def test_what_a_part_has_found_is_whole_after_every_line(tmp_path):
    record = first_gpu_parts.PartRecord(tmp_path / "part.json")
    record.add(shape="1b")
    record.add(line={"setting": "reference"})
    record.add(line={"setting": "batch of 1"}, parameters=3)
    found = json.loads((tmp_path / "part.json").read_text())
    assert found == {
        "lines": [{"setting": "reference"}, {"setting": "batch of 1"}], "shape": "1b", "parameters": 3,
    }  # fmt: skip


def test_time_that_is_left_over_goes_to_the_next_parts(tmp_path, monkeypatch):
    limits = []

    def taken(command, log, limit):
        limits.append(round(limit))
        return "it broke" if len(limits) == 2 else ""

    monkeypatch.setattr(first_gpu, "run_part_process", taken)
    parts = {name: first_gpu.ReportPart(seconds) for name, seconds in (("a", 10), ("b", 20), ("c", 30))}
    first_gpu.run_parts(parts, tmp_path, [], 100)
    assert limits == [50, 70, 100], "nothing took any time here"
    page = (tmp_path / "page.md").read_text()
    assert "**b**: it broke" in page and "**a**" not in page
    limits.clear()
    first_gpu.run_parts(parts, tmp_path, [], 5)
    assert limits == [5, 5, 5], "all of them together have no more than that"


LINE = {
    "setting": "reference", "answers_per_second": 2.0, "answers_per_second_range": [1.5, 2.5],
    "speed_up": 1.0, "forwards": 12.0, "seconds_per_forward": 0.04, "gflop_per_answer": 1234.5,
    "roofline_share": 0.25, "bound": "memory", "reuse": 0.5, "evicted": 3, "peak_gib": 17.25,
}  # fmt: skip
STEP = {
    "switch": "full", "tokens_per_second": 12345.6, "tflops_per_second": 300.0, "mfu": 0.3,
    "seconds": 0.5, "peak_gib": 30.5, "planned_gib": 31.25,
}  # fmt: skip


def test_the_page_says_what_was_found_until_a_part_broke_off(tmp_path):
    found = {
        "machine": {"lines": [], "error": "", "seconds": 3},
        "7b": {
            "lines": [LINE], "error": "it took more than its 9 s", "seconds": 9, "parameters": 7.6e9,
            "layout": "joint",
        },
        "training": {
            "lines": [STEP], "error": "", "seconds": 5, "parameters": 1.1e9, "sequence_length": 4096,
            "batch_tokens": 16384,
        },
        "gemma": {
            "lines": [
                {"rows": 4, "prompt_ms": 61.5, "model_ms": 100.25, "step_ms": 123.5, "peak_gib": 55.125}
            ],
            "error": "", "seconds": 7, "parameters": 25.25e9, "weights_gib": 47.03, "shape": "26b-a4b",
            "prompt_tokens": 2000, "canvas": 256,
        },
        "shipped": {"lines": [], "error": "exit status 1: no memory", "seconds": 1},
    }  # fmt: skip
    first_gpu_report.write_first_gpu_report(tmp_path, found)
    page = (tmp_path / "page.md").read_text()
    assert "| reference | 2.00 [1.50, 2.50] | 1.00 | 12.0 | 40.00 | 1,234.5 | 25.0% (memory) |" in page
    assert "| full | 12,346 | 300.00 | 30.0% | 500 | 30.50 | 31.25 |" in page
    assert "| 4 | 100.2 | 123.5 | 30.9 | 61.5 | 55.12 |" in page
    assert "25,250 M parameters, 47.03 GiB. A step proposes 256 tokens" in page
    assert "**7b**: it took more than its 9 s" in page and "**shipped**: exit status 1: no memory" in page
    assert json.loads((tmp_path / "page.json").read_text()) == found
    assert (tmp_path / "page.png").stat().st_size > 10_000


def test_all_parts_have_their_time():
    assert sum(part.seconds for part in first_gpu.FULL_PARTS.values()) <= 60 * 9.5


@pytest.mark.slow
def test_the_steps_of_uniform_noise_on_a_cpu(tmp_path):
    """The part alone: its page, and where its time goes."""
    done = look(tmp_path, "--quick", "--only", "gemma")
    assert done.returncode == 0, done.stderr
    page, found = (tmp_path / "page.md").read_text(), json.loads((tmp_path / "page.json").read_text())
    assert "## What went wrong\n\nNothing." in page and "## Denoising from uniform noise" in page, page
    assert [line["rows"] for line in found["gemma"]["lines"]] == [1, 3]
    assert "## Where the time goes: gemma" in page and "| denoise |" in page


@pytest.mark.slow
def test_the_whole_look_on_a_cpu(tmp_path):
    done = look(tmp_path, "--quick")
    assert done.returncode == 0, done.stderr
    page, found = (tmp_path / "page.md").read_text(), json.loads((tmp_path / "page.json").read_text())
    assert "**On a CPU**" in page and "## What went wrong\n\nNothing." in page, page
    for name in ("shipped", "tiny"):
        lines = found[name]["lines"]
        assert [line["setting"] for line in lines] == ["reference", "batch of 4", "batch of 1"]
        assert all(line["answers_per_second"] > 0 and 0 < line["roofline_share"] < 2 for line in lines)
        assert lines[0]["reuse"] == 0 < lines[1]["reuse"]
        assert (tmp_path / f"attribution-{name}" / "report.png").stat().st_size > 10_000
    switches = [line["switch"] for line in found["training"]["lines"]]
    assert switches == ["none", "logit_chunk 16", "selective", "full"]
    assert all(line["planned_gib"] > 0 for line in found["training"]["lines"])
    ways = {(line["dtype"], line["way"]): line for line in found["exactness"]["lines"]}
    assert len(ways) == 10 and "## The same tokens?" in page
    assert all(line["same_tokens"] == 3 for (dtype, _), line in ways.items() if dtype == "float32")
    assert ways["float32", "alone, again"]["farthest_confidence"] == 0
    assert [line["rows"] for line in found["gemma"]["lines"]] == [1, 3]
    assert all(min(line["model_ms"], line["step_ms"]) > 0 for line in found["gemma"]["lines"])
    assert "## Denoising from uniform noise" in page
    for stage in ("| denoise |", "| backward |"):
        assert stage in page


def test_one_part_alone_and_bad_words(tmp_path):
    done = look(tmp_path / "one", "--quick", "--only", "machine")
    assert done.returncode == 0, done.stderr
    page = (tmp_path / "one" / "page.md").read_text()
    assert "| matrix products, TFLOP/s |" in page and "kernel sdpa" in page and "## Decoding" not in page
    done = look(tmp_path, "--only", "9b")
    assert done.returncode == 2 and done.stderr.startswith("error: '9b' is not a part of it: machine,")
    (tmp_path / "file").touch()
    done = look(tmp_path / "file")
    assert done.returncode == 2 and "cannot be a folder" in done.stderr
