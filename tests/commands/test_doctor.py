"""The doctor: each finding against a fake of what is wrong; no check can end the others."""

import logging
from types import SimpleNamespace
from unittest.mock import Mock

import pytest
import torch

from dlm_rag.__main__ import dispatch
from dlm_rag.commands import doctor
from dlm_rag.commands.doctor import HINT, OK, PROBLEM, Finding
from dlm_rag.config import Config
from dlm_rag.machine import choose_dtype


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

    return make


@pytest.mark.parametrize(("capability", "index"), [((13, 0), "cu130"), ((7, 0), "cu126")])
def test_a_gpu_on_which_torch_does_not_compute_is_a_problem(gpu, capability, index):
    """torch has code for a V100 in its builds for CUDA 12.6 alone."""
    gpu(capability, RuntimeError("CUDA error: no kernel image is available for execution on the device"))
    finding = [*doctor.check_torch(Config())][-1]
    assert finding.state == PROBLEM and "no kernel image" in finding.what
    assert finding.remedy.startswith("pip install") and finding.remedy.endswith(index)
    gpu((12, 1))
    finding = [*doctor.check_torch(Config())][-1]
    assert finding.state == OK and "96 GB, compute capability 12.1" in finding.what


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
    dispatch(["doctor"])
