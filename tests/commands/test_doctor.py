"""The doctor: each finding against a fake of what is wrong; no check can end the others."""

import json
import logging
import math
import shutil
import subprocess
import sys
from importlib import metadata
from types import SimpleNamespace
from unittest.mock import Mock

import pytest
import torch

from dlm_rag.__main__ import dispatch
from dlm_rag.commands import doctor
from dlm_rag.commands.doctor import HINT, OK, PROBLEM, Finding
from dlm_rag.config import Config
from dlm_rag.config.inference import EngineConfig, ModelConfig, RetrievalConfig
from dlm_rag.machine import choose_dtype
from dlm_rag.model import attention


@pytest.fixture(autouse=True)
def log_level(monkeypatch):
    """The doctor sets it, for nobody comes after it."""
    monkeypatch.setattr(logging.getLogger("dlm_rag"), "level", logging.INFO)


def found(check, config=None) -> Finding:
    (finding,) = check(config or Config())
    return finding


@pytest.mark.parametrize(
    ("capability", "dtype"),
    [((7, 0), torch.float16), ((7, 5), torch.float16), ((8, 0), torch.bfloat16), ((12, 1), torch.bfloat16)],
)
def test_the_dtype_is_one_that_the_gpu_computes_in(monkeypatch, capability, dtype):
    """`torch.cuda.is_bf16_supported` says yes where bfloat16 is only emulated."""
    monkeypatch.setattr("torch.cuda.get_device_capability", lambda device: capability)
    assert choose_dtype("auto", torch.device("cuda")) == dtype
    assert choose_dtype("auto", torch.device("cpu")) == torch.float32


@pytest.fixture
def gpu(monkeypatch):
    """A machine with one GPU of a given compute capability, on which torch computes, or fails to."""

    def make(capability, error=None):
        properties = SimpleNamespace(
            name="NVIDIA Fake", total_memory=96 * 10**9, major=capability[0], minor=capability[1]
        )
        fakes = {
            "is_available": lambda: True,
            "device_count": lambda: 1,
            "get_device_name": lambda *_: "NVIDIA Fake",
            "get_device_capability": lambda *_: capability,
            "get_device_properties": lambda *_: properties,
        }
        for name, fake in fakes.items():
            monkeypatch.setattr(torch.cuda, name, fake)
        monkeypatch.setattr(torch.version, "cuda", "13.0")
        monkeypatch.setattr(torch, "ones", Mock(side_effect=error))
        monkeypatch.setattr(doctor, "choose_device", lambda name: torch.device("cuda", 0))
        attention.get_backend_problem.cache_clear()
        attention._first_working.cache_clear()

    yield make
    attention.get_backend_problem.cache_clear()
    attention._first_working.cache_clear()


@pytest.mark.parametrize(("capability", "index"), [((13, 0), "cu130"), ((7, 0), "cu126")])
def test_a_gpu_on_which_torch_does_not_compute_is_a_problem(gpu, capability, index):
    """torch has code for a V100 in its builds for CUDA 12.6 alone."""
    gpu(capability, RuntimeError("CUDA error: no kernel image is available for execution on the device"))
    finding = found(doctor.check_torch)
    assert finding.state == PROBLEM and "no kernel image" in finding.what
    assert finding.remedy.startswith("pip install") and finding.remedy.endswith(index)
    gpu((12, 1))
    finding = found(doctor.check_torch)
    assert finding.state == OK and "96 GB, compute capability 12.1" in finding.what


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_the_range_of_the_shipped_model_is_looked_at_while_it_answers(monkeypatch, dtype):
    config = Config(model=ModelConfig(dtype=dtype))
    finding = found(doctor.check_range, config)
    assert finding.state == OK and finding.what.startswith("8 questions") and "65,504" in finding.what
    monkeypatch.setattr(doctor, "NEAR_FLOAT16_MAX", 0.01)
    finding = found(doctor.check_range, config)
    assert finding.state == HINT and ("model.dtype=float32" in finding.remedy) == (dtype == "float16")
    monkeypatch.setattr(
        "dlm_rag.model.activation_range.ActivationRange.largest_by_layer", lambda _: [1.0, math.nan]
    )
    assert found(doctor.check_range, config).state == (PROBLEM if dtype == "float16" else HINT)


@pytest.mark.parametrize(
    ("build", "error", "remedy"),
    [
        (None, AssertionError("not compiled with CUDA"), "pip"),
        ("13.0", RuntimeError("old driver"), "nvidia"),
    ],
)
def test_a_gpu_that_torch_does_not_see_is_a_hint_in_torchs_words(monkeypatch, build, error, remedy):
    monkeypatch.setattr(shutil, "which", lambda name: f"/usr/bin/{name}")
    monkeypatch.setattr(torch.version, "cuda", build)
    monkeypatch.setattr(torch.cuda, "init", Mock(side_effect=error))
    finding = found(doctor.check_torch)
    assert finding.state == HINT and str(error) in finding.what and finding.remedy.startswith(remedy)


def test_the_kernel_comes_with_why_not_a_better_one(gpu, monkeypatch):
    finding = found(doctor.check_attention_kernel)
    assert finding.state == OK and finding.what.startswith("sdpa")
    assert "not flash: it needs a CUDA device" in finding.what
    gpu((9, 0))
    monkeypatch.setattr(attention, "find_spec", lambda name: None)
    finding = found(doctor.check_attention_kernel)
    assert finding.state == HINT and finding.what.startswith("varlen") and "not flash: " in finding.what
    assert "flash" in finding.remedy
    gpu((7, 5))
    assert "not varlen: it needs compute capability 8.0" in found(doctor.check_attention_kernel).what


def test_packages_that_are_missing_or_newer(monkeypatch):
    def faked(name):
        if name == "torch":
            return "99.0"
        if name in ("bm25s", "ray"):
            raise metadata.PackageNotFoundError(name)
        return metadata.version(name)

    monkeypatch.setattr(doctor, "version", faked)
    missing, newer, summary = doctor.check_packages(Config())
    assert newer.state == HINT and newer.what.startswith("in another version: torch")
    assert "dlm_rag[workers]" in summary.what
    assert missing.state == PROBLEM and missing.remedy.startswith("pip install 'bm25s")


def of_cache(folder) -> Finding:
    return found(doctor.check_cache, Config(retrieval=RetrievalConfig(index_dir=str(folder))))


def test_the_cache_its_disk_and_whether_it_can_be_written(tmp_path, monkeypatch):
    (tmp_path / "indexes").mkdir()
    assert of_cache(tmp_path / "indexes").state == OK
    assert of_cache(tmp_path / "not" / "yet").state == OK and not (tmp_path / "not").exists()
    (tmp_path / "file").touch()
    assert of_cache(tmp_path / "file").state == PROBLEM
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=0))
    finding = of_cache(tmp_path / "indexes")
    assert (
        finding.state == PROBLEM and "0 kB are free" in finding.what and "DLM_RAG_CACHE" in finding.remedy
    )


def test_the_evidence_store_where_one_is_named(tmp_path, monkeypatch):
    assert not [*doctor.check_evidence_store(Config())]
    (tmp_path / "ab").mkdir()
    (tmp_path / "ab" / f"{'0' * 64}.safetensors").write_bytes(bytes(2_000_000))
    config = Config(engine=EngineConfig(store=tmp_path, store_gib=1))
    finding = found(doctor.check_evidence_store, config)
    assert finding.state == OK and "1 entries, 2.0 MB of at most 1.1 GB" in finding.what
    monkeypatch.setattr("os.access", lambda *_: False)
    assert found(doctor.check_evidence_store, config).state == HINT


def test_too_many_threads_and_little_memory_are_hints(monkeypatch):
    monkeypatch.setattr(torch, "get_num_threads", lambda: 999)
    monkeypatch.setattr(doctor, "read_host_memory", lambda: {"total": 8 * 10**9, "available": 10**9})
    cores, memory = doctor.check_cores_and_memory(Config())
    assert cores.state == memory.state == HINT and "OMP_NUM_THREADS=" in cores.remedy


def test_the_shipped_model_answers_and_a_wrong_answer_is_a_problem(monkeypatch):
    finding = found(doctor.check_answer)
    assert finding.state == OK and "cpu float32 sdpa" in finding.what
    monkeypatch.setattr("dlm_rag.decode.rollout.Rollout.answer", property(lambda _: "Jerur Wba"))
    finding = found(doctor.check_answer)
    assert finding.state == PROBLEM and "'Jerur Wba'" in finding.what and "expected was" in finding.what


def test_a_check_that_fails_leaves_the_others_alone_and_hints_the_exit_status(monkeypatch, capsys):
    def broken(_):
        raise RuntimeError("no\x1b[31m such library\nat line 1")
        yield

    hint = Finding("nsys", HINT, "not found", "apt install nsight-systems")
    checks = {"nsys": lambda _: iter([hint])}
    monkeypatch.setattr(doctor, "DOCTOR_CHECKS", {"first": broken} | checks)
    with pytest.raises(SystemExit) as stop:
        dispatch(["doctor"])
    shown = capsys.readouterr().out
    assert stop.value.code == 1 and "cannot be looked at: no [31m such library\n" in shown
    assert "$ apt install nsight-systems" in shown
    monkeypatch.setattr(doctor, "DOCTOR_CHECKS", checks)
    dispatch(["doctor", "--json"])
    written = json.loads(capsys.readouterr().out)
    assert written["findings"] == [hint._asdict()] and "PyTorch version" in written["environment"]


@pytest.mark.slow
def test_the_command_answers_from_the_shipped_model_and_says_nothing_else():
    command = [sys.executable, "-m", "dlm_rag", "doctor"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0 and "an answer" in done.stdout, done.stdout + done.stderr
    assert not done.stderr
