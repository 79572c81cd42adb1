"""Energy: exact joules from a fake NVML and a fake /sys; without a sensor the reason and no figure."""

import json
import math
import sys
from types import SimpleNamespace

import pytest
import torch

import dlm_rag.energy as meters
from dlm_rag.commands import answer_job
from dlm_rag.commands.prepare_decoder import SHIPPED_FOLDER
from dlm_rag.energy import (
    EnergyCounter,
    EnergyMeter,
    EnergyReading,
    format_three_digits,
    merge_readings,
    open_meter,
    summarise_energy,
)

CPU, CUDA = torch.device("cpu"), torch.device("cuda", 0)
QUESTIONS = str(SHIPPED_FOLDER / "world/questions.jsonl")


@pytest.fixture
def clock(monkeypatch):
    """The time that meters see; tests advance `now`."""
    found = SimpleNamespace(now=100.0, perf_counter=lambda: found.now)
    monkeypatch.setattr(meters, "time", found)
    return found


def fake_nvml(read=lambda handle: 7_000_000):
    """NVML with one GPU of UUID "a"."""
    handles = {"GPU-a": 2}
    return SimpleNamespace(
        nvmlInit=lambda: None,
        nvmlDeviceGetHandleByUUID=handles.__getitem__,
        nvmlDeviceGetTotalEnergyConsumption=read,
    )


@pytest.fixture
def rapl(tmp_path, monkeypatch):
    """Makes a domain of RAPL in a fake /sys; returns its counter."""
    monkeypatch.setattr(meters, "POWERCAP", tmp_path / "powercap")

    def make(folder, name="package-0", energy_uj=1, range_uj=262_143_328_850):
        path = tmp_path / "powercap" / folder
        path.mkdir(parents=True)
        values = {"name": name, "max_energy_range_uj": range_uj, "energy_uj": energy_uj}
        for file, value in values.items():
            (path / file).write_text(f"{value}\n")
        return path / "energy_uj"

    return make


@pytest.fixture
def cuda(monkeypatch):
    """Makes torch see one GPU of UUID `a` with this name, and NVML too."""

    def make(name, nvml):
        properties = SimpleNamespace(uuid="a", name=name)
        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
        monkeypatch.setitem(sys.modules, "pynvml", nvml)

    return make


def counter(values, wraps_at=math.inf):
    """A counter with these values of joules, one after another."""
    return EnergyCounter("fake: a thing", iter(values).__next__, wraps_at)


def measure(clock, seconds, *values, **more) -> EnergyReading:
    meter = EnergyMeter([counter(values, **more)])
    clock.now += seconds
    return meter.stop()


def test_joules_are_the_difference_of_both_ends(clock):
    reading = measure(clock, 10.0, 5000.0, 6200.0)
    assert (reading.joules, reading.seconds) == (1200.0, 10.0)
    assert reading.to_record()["sensor"] == "fake: a thing" and reading.reason == ""
    assert measure(clock, 10.0, 990.0, 15.0, wraps_at=1000.0).joules == 25.0
    assert measure(clock, 2.0, 0.0, 100.0).joules == 100.0
    assert measure(clock, 3600.0, 1.0, 2.0).joules == 1.0


def test_joules_of_two_packages_are_exact_when_a_counter_wraps(rapl, clock):
    """Range 65,500 J: from 65,000 to 500 by way of the end is 1,000 J; the other goes from 100 to 350.

    Cores lie within the package, psys around it, and mmio is the package again.
    """
    first = rapl("intel-rapl:0", "package-0", 65_000_000_000, range_uj=65_500_000_000)
    second = rapl("intel-rapl:1", "package-1", 100_000_000, range_uj=65_500_000_000)
    for folder, name in (("0:0", "core"), ("0:1", "dram"), ("2", "psys"), ("-mmio:0", "package-0")):
        rapl(f"intel-rapl:{folder}".replace(":-", "-"), name)
    meter = open_meter("auto", [CPU])
    assert [c.sensor for c in meter.counters] == [f"RAPL: CPU package-{n}" for n in (0, 1)]
    for energy_uj in (65_400_000_000, 200_000_000, 500_000_000):
        clock.now += 20
        first.write_text(str(energy_uj))
        meter.count_joules()  # as the thread does
    second.write_text("350000000")
    reading = meter.stop()
    assert [each.total for each in meter.counters] == [pytest.approx(1000), pytest.approx(250)]
    assert reading.joules == pytest.approx(1250)


@pytest.mark.parametrize(
    ("name", "names"),
    [
        ("NVIDIA H200", ["NVML: NVIDIA H200", "RAPL: CPU package-0"]),
        ("NVIDIA GH200 480GB", ["NVML: NVIDIA GH200 480GB"]),
    ],
)
def test_a_gpu_is_measured_with_its_cpus(rapl, cuda, name, names):
    cuda(name, fake_nvml())
    rapl("intel-rapl:0")
    assert [c.sensor for c in open_meter("auto", [CUDA]).counters] == names
    meter = open_meter("auto", [CUDA, CUDA], host=False)
    assert [c.read() for c in meter.counters] == [7000.0] * 2, "another process counts the CPUs"


def test_what_cannot_be_measured_says_why(rapl, cuda, clock, monkeypatch):
    def fail(handle):
        raise RuntimeError("Not Supported")

    rapl("intel-rapl:0")
    for name, nvml, reason in (
        ("NVIDIA H200 MIG 1g.18gb", fake_nvml(), "NVML: it counts no energy of a MIG instance"),
        ("NVIDIA V100", None, "pip install 'dlm_rag[energy]'"),
        ("NVIDIA M40", fake_nvml(fail), "NVML: Not Supported"),
    ):
        cuda(name, nvml)
        meter = open_meter("auto", [CUDA])
        assert not meter.counters and reason in meter.stop().reason
    denied = SimpleNamespace(glob=lambda pattern: (_ for _ in ()).throw(PermissionError(13, "denied")))
    monkeypatch.setattr(meters, "POWERCAP", denied)
    assert open_meter("auto", [CPU]).stop().reason.endswith("chmod a+r /sys/class/powercap/*/energy_uj")
    assert open_meter("none", [CUDA]).stop().to_record() is None
    assert measure(clock, 1.0, 0.0, 5.0).reason == "1.0 s are too short: 2 s at least"
    assert "stands still" in measure(clock, 9.0, 5.0, 5.0).reason
    assert "went backwards" in measure(clock, 9.0, 5.0, 4.0).reason
    later = measure(clock, 9.0, 5.0)  # there is no second value
    assert later.reason == "fake: a thing: StopIteration" and later.joules is None


def part(device="d", joules=100.0, seconds=10.0):
    return EnergyReading(seconds, joules, f"a sensor of {device}")


def lost(reason, seconds=3.0):
    return EnergyReading(seconds, reason=reason)


def test_what_processes_read_at_the_same_time_adds_up():
    whole = merge_readings([part("gpu1", seconds=5.0), part("gpu2", 200.0, 6.0), EnergyReading(9.0)])
    assert (whole.joules, whole.seconds) == (300.0, 9.0)
    assert merge_readings([part(), lost("MIG")]).joules is None
    assert merge_readings([EnergyReading(1.0), EnergyReading(2.0)]).to_record() is None


def test_figures_of_a_run_by_hand():
    whole = part(joules=1000.0)
    found = summarise_energy([whole.to_record() | {"answers": 20}, {"joules": None}, None])
    assert found["joules_per_answer"] == 50 and found["watts"] == 100
    assert whole.describe(answer=20) == "energy: 1,000 J · 50 J/answer · 100 W · a sensor of d"
    assert whole.describe(answer=0) == "energy: 1,000 J · 100 W · a sensor of d"
    assert lost("no RAPL").describe(step=5) == "energy: not measured (no RAPL)"
    assert EnergyReading(1.0).describe(step=5) == ""
    assert [*map(format_three_digits, (0.01234, 99.94, 12345.6))] == ["0.0123", "99.9", "12,346"]


def fake_meters(clock, monkeypatch, *seconds):
    """Makes the meters of programs show 500 J in windows of these lengths, one after another."""
    left = iter(seconds)

    class Meter(EnergyMeter):
        def stop(self):
            clock.now += next(left)
            return super().stop()

    monkeypatch.setattr(answer_job, "open_meter", lambda *_: Meter([counter([0.0, 500.0])]))


def test_sample_puts_its_joules_into_line_and_stamp(tmp_path, clock, monkeypatch, capsys):
    from dlm_rag.commands.sample import main

    words = ["--questions", QUESTIONS, "--out", str(tmp_path / "a.jsonl")]
    with monkeypatch.context() as patch:
        fake_meters(clock, patch, 8.0)
        main([*words, "--limit", "2"])
    stamp = json.loads((tmp_path / "a.jsonl.run.json").read_text())
    (found,) = stamp["energy"]
    assert (found["joules"], found["seconds"], found["answers"]) == (500.0, 8.0, 2)
    assert "energy: 500 J · 250 J/answer" in capsys.readouterr().err
    assert "energy" not in stamp["answers_depend_on"]
    main([*words, "--limit", "3", "energy=none"])
    assert "1 question in" in (said := capsys.readouterr().err) and "energy" not in said
    assert json.loads((tmp_path / "a.jsonl.run.json").read_text())["energy"] == [found]
