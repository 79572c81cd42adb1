"""The proof for a GPU, on a CPU: what fails leaves its error, the rest of the page is made."""

import json
import os
import subprocess
import sys
import time

import pytest

import dlm_rag
from tests.support.paths import ROOT

sys.path.insert(0, str(ROOT / "profiling"))

import gpu_proof
import gpu_proof_parts
from steady_state import FullEngine


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


ROWS = """
import os, signal, sys, time
from pathlib import Path
from gpu_proof_parts import PartRecord
attempt, block = PartRecord(Path(sys.argv[1]), Path()).attempt, signal.pthread_sigmask
attempt("works", 9, lambda: {"setting": "works"})
attempt("fails", 9, lambda: 1 / 0)
attempt("hangs", 1, lambda: time.sleep(60))
attempt("hangs in C", 1, lambda: (block(signal.SIG_BLOCK, [signal.SIGALRM]), time.sleep(60)))
attempt("ends", 9, lambda: os._exit(3))
attempt("follows", 9, lambda: {"setting": "follows"})
"""


@pytest.mark.slow
def test_a_row_that_fails_hangs_or_ends_its_process_costs_no_other(tmp_path, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(sys.path))
    path = tmp_path / "part.json"
    assert gpu_proof.run_part([sys.executable, "-c", ROWS, str(path)], path, time.monotonic() + 300) == ""
    found = json.loads(path.read_text())
    assert [row["setting"] for row in found["rows"]] == ["works", "follows"]
    ended = "the process ended with it, after {} s at most"
    failed = {"fails": "ZeroDivisionError: division by zero", "hangs": "RowTimeout: it took too long"}
    assert found["errors"] == failed | {"hangs in C": ended.format(6), "ends": ended.format(14)}


@pytest.mark.parametrize("overlap", ["none", "pipeline"])
def test_full_batches_count_the_forwards_of_the_model(overlap):
    decoder = dlm_rag.load("dlm_rag/shipped/model", overlap=overlap, batch_size=4, top_k=2)
    propose, rows = decoder.model_runner.propose, []
    decoder.model_runner.propose = lambda inputs: rows.append(len(inputs)) or propose(inputs)
    questions = [f"In which city is {passage.title}?" for passage in decoder.retriever.corpus[:5]]
    with decoder.new_engine() as engine:
        full = FullEngine(engine, dlm_rag.questions.as_questions(questions))
        for _ in range(20):
            full.step()
    assert 0 <= sum(rows) - full.row_forwards <= 4 * (overlap == "pipeline"), "others are under way"
    assert full.row_forwards > 40 and full.answers > 2


INTERPRETED = """
from pathlib import Path
import gpu_proof_parts as parts, steady_state
steady_state.WARMUP_STEPS, record = 1, parts.PartRecord(Path("part.json"), Path())
blocks, compiled = ("indexed", "graphs", "no_evidence"), ("indexed", "compiled", "")
parts.FULL_WAYS = [(*blocks, ("none",)), (*compiled, ("pipeline",))]
parts.measure_full_batches(record, "tiny", {2: None}, steps=2)
like = {"": "", "padded": "", "graphs": "padded"}
ways = {name: (1, 0.1, "indexed" if name else "auto", name, like[name]) for name in like}
parts.compare_ways(record, "float32", ways, 1)
"""


@pytest.mark.slow
def test_rows_of_our_kernel_in_the_interpreter(tmp_path):
    pytest.importorskip("triton")
    here = os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path]), "TRITON_INTERPRET": "1"}
    subprocess.run([sys.executable, "-c", INTERPRETED], cwd=tmp_path, env=here, check=True)
    found = json.loads((tmp_path / "part.json").read_text())
    blocks, compiled, _, attention, *others = found["rows"]
    assert not found["errors"] and blocks["kernel"] == compiled["kernel"] == "indexed"
    assert attention["differ by, at most"] < 1e-5 and not others[1]["differ by, at most"]
    assert [row["same tokens"] for row in others] == ["1 of 1"] * 2


def test_the_page_says_what_was_found_until_a_part_broke_off(tmp_path):
    record = gpu_proof_parts.PartRecord(tmp_path / "part.json", tmp_path)
    record.add(title="Decoding: 7b", text="7,600 M parameters.")
    record.add({"setting": "reference", "answers/s": [1.5, 2.0, 2.5], "peak GiB": None})
    record.add({"setting": "batch of 1", "answers/s": [1234.5], "peak GiB": 17.25})
    part = json.loads((tmp_path / "part.json").read_text())
    found = {
        "7b": part
        | {"error": "it took more than its 9 s", "seconds": 9, "errors": {"8 rows": "no memory"}},
        "shipped": {"rows": [], "error": "exit status 1: no memory", "seconds": 1, "errors": {}},
    }
    gpu_proof.write_gpu_report(tmp_path, found)
    page = (tmp_path / "page.md").read_text()
    assert "## Decoding: 7b\n\n7,600 M parameters." in page
    assert (
        "| reference | 2 [1.5, 2.5] |  |" in page
        and "| batch of 1 | 1,234 [1,234, 1,234] | 17.25 |" in page
    )
    assert "**7b**: it took more than its 9 s" in page and "**shipped**: exit status 1: no memory" in page
    assert "**7b, 8 rows**: no memory" in page
    assert (tmp_path / "page.png").stat().st_size > 10_000


@pytest.mark.slow
def test_the_whole_look_on_a_cpu(tmp_path):
    page, found = look(tmp_path)
    assert "**On a CPU**" in page and "| matrix products, TFLOP/s |" in page and "kernel sdpa" in page
    for name in ("shipped", "full_tiny"):
        rows = found[name]
        first = ["4 rows, auto", "4 rows, auto, pipeline", "1 rows, auto", "1 rows, published"]
        assert [row["setting"] for row in rows][:4] == first
        assert all(0 < row["roofline %"] < 200 for row in rows)
        assert all(row["answers/s"][0] > 0 for row in rows[:3])
        assert (tmp_path / f"attribution-{name}" / "report.md").stat().st_size > 500
    assert [row["setting"] for row in found["full_tiny"]][4] == "4 rows, auto, blocks"
    assert found["rl"][0]["rollout_forwards"] > 1
    switches = [row["switch"] for row in found["training"]]
    assert switches == ["none", "selective", "full"]
    assert all(row["planned GiB"] > 0 for row in found["training"])
    ways = {(row["precision"], row["way"]): row for row in found["exactness"]}
    assert len(ways) == 9 and "## The same tokens?" in page
    exact = [row["same tokens"] for (dtype, _), row in ways.items() if dtype == "float32"]
    assert exact == ["3 of 3"] * 4
    assert ways["float32", "alone, again"]["differ by, at most"] == 0
    for said in ("## Where the time goes: training", "| denoise |", "| backward |"):
        assert said in page
