"""The proof for a GPU, on a CPU: what fails leaves its error, the rest of the page is made."""

import json
import sys
import time

import pytest

from tests.support.paths import ROOT

sys.path.insert(0, str(ROOT / "profiling"))

import gpu_proof
import gpu_proof_parts


def look(folder):
    for call in ("1", "2"):
        gpu_proof.main(["--out", str(folder), "--quick", "--call", call])
    page, found = (folder / "page.md").read_text(), json.loads((folder / "page.json").read_text())
    assert "## What went wrong\n\nNothing." in page, page
    return page, {name: part["rows"] for name, part in found.items()}


@pytest.mark.slow
def test_a_part_that_fails_or_hangs_says_so_and_is_over(tmp_path):
    def taken(code, limit=30.0):
        return gpu_proof.run_part_process([sys.executable, "-c", code], tmp_path / "part.json", limit)

    assert taken("print('fine')") == ""
    assert taken("raise SystemExit('no such kernel')") == "exit status 1: no such kernel"
    begun = time.monotonic()
    sleeper = "[sys.executable, '-c', 'import time; time.sleep(60)']"  # a compiler's worker, say
    hangs = f"import subprocess, sys; subprocess.run({sleeper})"
    assert taken(hangs, 1.0) == "it took more than its 1 s" and time.monotonic() - begun < 50
    assert taken("print('fine')", -1.0) == "no time was left for it"


def test_the_page_says_what_was_found_until_a_part_broke_off(tmp_path):
    record = gpu_proof_parts.PartRecord(tmp_path / "part.json", tmp_path)
    record.add(title="Decoding: 7b", text="7,600 M parameters.")
    record.add({"setting": "reference", "answers/s": [1.5, 2.0, 2.5], "peak GiB": None})
    record.add({"setting": "batch of 1", "answers/s": [1234.5], "peak GiB": 17.25})
    part = json.loads((tmp_path / "part.json").read_text())
    found = {
        "7b": part | {"error": "it took more than its 9 s", "seconds": 9},
        "shipped": {"rows": [], "error": "exit status 1: no memory", "seconds": 1},
    }
    gpu_proof.write_gpu_report(tmp_path, found)
    page = (tmp_path / "page.md").read_text()
    assert "## Decoding: 7b\n\n7,600 M parameters." in page
    assert (
        "| reference | 2 [1.5, 2.5] |  |" in page
        and "| batch of 1 | 1,234 [1,234, 1,234] | 17.25 |" in page
    )
    assert "**7b**: it took more than its 9 s" in page and "**shipped**: exit status 1: no memory" in page
    assert json.loads((tmp_path / "page.json").read_text()) == found
    assert (tmp_path / "page.png").stat().st_size > 10_000


@pytest.mark.slow
def test_the_whole_look_on_a_cpu(tmp_path):
    page, found = look(tmp_path)
    assert "**On a CPU**" in page and "| matrix products, TFLOP/s |" in page and "kernel sdpa" in page
    for name in ("shipped", "tiny"):
        rows = found[name]
        assert [row["setting"] for row in rows] == ["reference", "batch of 4", "batch of 1"]
        assert all(min(row["answers/s"]) > 0 and 0 < row["roofline %"] < 200 for row in rows)
        assert rows[0]["reused %"] == 0 < rows[1]["reused %"]
        assert (tmp_path / f"attribution-{name}" / "report.md").stat().st_size > 500
    assert [row["setting"] for row in found["full_tiny"]] == ["1 rows", "4 rows", "4 rows"]
    assert all(row["answers/s"][0] > 0 and 0 < row["roofline %"] < 200 for row in found["full_tiny"])
    switches = [row["switch"] for row in found["training"]]
    assert switches == ["none", "selective", "full"]
    assert all(row["planned GiB"] > 0 for row in found["training"])
    ways = {(row["precision"], row["way"]): row for row in found["exactness"]}
    assert len(ways) == 10 and "## The same tokens?" in page
    exact = [row["same tokens as alone"] for (dtype, _), row in ways.items() if dtype == "float32"]
    assert exact == ["3 of 3"] * 5
    assert ways["float32", "alone, again"]["confidences differ by, at most"] == 0
    for said in ("## Where the time goes: training", "| denoise |", "| backward |"):
        assert said in page
