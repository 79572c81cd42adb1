"""Energy: exact joules out of a fake NVML and a fake /sys; without a sensor the reason, and no figure."""

import json
import re
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pynvml
import pytest
import torch
from conftest import ROOT
from test_rollout import make_two_step_rollout as two_steps

from dlm_rag.commands import doctor, executors
from dlm_rag.commands.startup import SHIPPED_FOLDER
from dlm_rag.config import Config
from dlm_rag.decode.results_file import AnswersFile
from dlm_rag.decode.terminal import RunTotals
from dlm_rag.energy import meter as metering
from dlm_rag.energy.host import find_host_sensors
from dlm_rag.energy.meter import EnergyMeter, describe_sensors, find_sensors, open_meter
from dlm_rag.energy.nvml import describe_gpu_scope, find_gpu_sensors
from dlm_rag.energy.reading import (
    DeviceEnergy,
    EnergyReading,
    format_energy,
    format_three_digits,
    format_unmeasured_energy,
    merge_readings,
    summarise_energy,
)
from dlm_rag.energy.sensors import EnergyCounter, PolledPower, SensorError
from dlm_rag.evaluation.report import build_energy_table
from dlm_rag.training.distributed import DistributedContext
from dlm_rag.training.energy import EnergyWindows
from dlm_rag.training.metrics_logger import read_metrics
from dlm_rag.training.planning.plan_report import describe_measured_energy

sys.path.insert(0, str(ROOT / "profiling"))

import attribute
import attribution
import attribution_report

CPU, CUDA = torch.device("cpu"), torch.device("cuda", 0)
ONE = DistributedContext(0, 1, 0)


class Clock:
    """Time that passes when it is told to."""

    def __init__(self):
        self.now = 100.0

    def __call__(self):
        return self.now

    def sleep(self, seconds):
        self.now += seconds


class FakeNvml:
    """GPUs by UUID; each with its name and, in thousandths, joules and watts, None where it has none."""

    class NVMLError(Exception):
        pass

    def __init__(self, mig=False, **gpus):
        self.mig, self.starts = mig, True
        self.gpus = {f"GPU-{uuid}": SimpleNamespace(**gpu) for uuid, gpu in gpus.items()}

    def _of(self, uuid, what):
        value = getattr(self.gpus[uuid], what, None)
        if value is None:
            raise self.NVMLError("Not Supported")
        return value

    def nvmlInit(self):  # noqa: N802
        if not self.starts:
            raise self.NVMLError("Driver Not Loaded")

    def nvmlDeviceGetHandleByUUID(self, uuid):  # noqa: N802
        if uuid not in self.gpus:
            raise self.NVMLError("Not Found")
        return uuid

    def nvmlDeviceGetIndex(self, uuid):  # noqa: N802
        return list(self.gpus).index(uuid)

    def nvmlDeviceGetName(self, uuid):  # noqa: N802
        return self._of(uuid, "name")

    def nvmlDeviceGetMigMode(self, uuid):  # noqa: N802
        return [int(self.mig), int(self.mig)]

    def nvmlDeviceGetTotalEnergyConsumption(self, uuid):  # noqa: N802
        return self._of(uuid, "millijoules")

    def nvmlDeviceGetPowerUsage(self, uuid):  # noqa: N802
        return self._of(uuid, "milliwatts")


def h200(**more):
    return {"name": "NVIDIA H200", "millijoules": 7_000_000} | more


def rapl(
    root: Path, folder: str, name: str, energy_uj: int, wraps_at_joules: int = 262_143_328_850
) -> Path:
    """A domain of RAPL in a fake /sys; returns its counter."""
    path = root / "class/powercap" / folder
    path.mkdir(parents=True)
    (path / "name").write_text(f"{name}\n")
    (path / "max_energy_range_uj").write_text(f"{wraps_at_joules}\n")
    (path / "energy_uj").write_text(f"{energy_uj}\n")
    return path / "energy_uj"


def power_meter(
    root: Path, number: int, label: str, microwatts: int, milliseconds: int | None = 1000
) -> Path:
    """An ACPI power meter in a fake /sys, as on Grace; returns its power."""
    hwmon = root / f"class/hwmon/hwmon{number}"
    (hwmon / "device").mkdir(parents=True)
    (hwmon / "name").write_text("power_meter\n")
    (hwmon / "device/power1_oem_info").write_text(f"{label}\n")
    (hwmon / "device/power1_average").write_text(f"{microwatts}\n")
    if milliseconds is not None:
        (hwmon / "device/power1_average_interval").write_text(f"{milliseconds}\n")
    return hwmon / "device/power1_average"


def counter(values, **more):
    """A counter of joules that has these values, one after another."""
    return EnergyCounter(
        "d", "a thing", "fake", iter(values).__next__, **({"time_uncertainty_seconds": 0.1} | more)
    )


def measured(seconds, *values, **more) -> EnergyReading:
    """What a counter with these two values is read as over a window."""
    clock = Clock()
    meter = EnergyMeter([counter(values, **more)], clock=clock)
    meter.start()
    clock.now += seconds
    return meter.stop()


# Counters and powers.


def test_a_counter_is_the_difference_of_its_two_moments_with_the_error_of_its_step():
    reading = measured(10.0, 5000.0, 6200.0)
    assert (reading.joules, reading.seconds) == (1200.0, 10.0)
    assert reading.error == pytest.approx(0.1 * 120), "0.1 s of the mean power, 120 W"
    assert (reading.sensor, reading.scope, reading.unmeasured_reason) == ("fake", "a thing", "")


def test_a_counter_that_has_begun_anew_gets_its_range():
    assert measured(10.0, 990.0, 15.0, wraps_at_joules=1000.0).joules == 25.0


def test_a_counter_that_wraps_must_be_read_at_least_once_a_minute():
    assert measured(60.0, 1.0, 2.0, wraps_at_joules=1000.0).joules == 1.0
    assert "was not read for 61 s" in measured(61.0, 1.0, 2.0, wraps_at_joules=1000.0).unmeasured_reason
    assert measured(3600.0, 1.0, 2.0).joules == 1.0, "one that never wraps need not be"


@pytest.mark.parametrize(
    ("values", "says"),
    [((7.0, 2.0), "went backwards"), ((7.0, 7.0), "stands still")],
    ids=["back", "still"],
)
def test_a_counter_that_cannot_be_right_is_no_figure(values, says):
    reading = measured(5.0, *values)
    assert reading.joules is None and reading.error is None and says in reading.unmeasured_reason


def test_a_window_under_two_seconds_is_too_short():
    reading = measured(1.9, 0.0, 100.0)
    assert reading.joules is None and reading.unmeasured_reason == "1.9 s are too short: 2 s at least"
    assert measured(2.0, 0.0, 100.0).joules == 100.0


def test_power_is_integrated_by_trapezoids():
    """100 W rising to 300 W within 2 s, then 300 W for 3 s: 400 J and 900 J."""
    clock, watts = Clock(), iter([100.0, 300.0, 300.0])
    meter = EnergyMeter(
        [PolledPower("d", "a thing", "polled", watts.__next__, time_uncertainty_seconds=1.0)], clock=clock
    )
    meter.start()
    clock.now += 2
    assert meter.lap().joules == 400.0
    clock.now += 3
    assert meter.stop().joules == 1300.0 and meter.reading.error == 260.0


def test_laps_add_up_to_the_whole():
    clock = Clock()
    meter = EnergyMeter([counter([10.0, 20.0, 50.0, 90.0])], clock=clock)
    meter.start()
    laps = []
    for seconds in (2, 3, 4):
        clock.now += seconds
        assert meter.elapsed == seconds
        laps.append(meter.lap() if seconds < 4 else meter.stop())
    assert [lap.joules for lap in laps] == [10.0, 30.0, 80.0] and laps[-1].seconds == 9
    assert sum(lap.joules for lap in laps[:2]) + 40.0 == laps[-1].joules


# RAPL and power meters.


def test_rapl_counts_packages_alone_and_each_once(tmp_path):
    """Cores lie within the package, psys around it, and mmio is the package again."""
    rapl(tmp_path, "intel-rapl:0", "package-0", 1)
    rapl(tmp_path, "intel-rapl:0:0", "core", 2)
    rapl(tmp_path, "intel-rapl:0:1", "dram", 3)
    rapl(tmp_path, "intel-rapl:1", "package-1", 4)
    rapl(tmp_path, "intel-rapl:2", "psys", 5)
    rapl(tmp_path, "intel-rapl-mmio:0", "package-0", 6)
    found = find_host_sensors(tmp_path)
    assert [(s.scope, s.read()) for s in found] == [
        ("CPU package 0 without its memory", pytest.approx(1e-6)),
        ("CPU package 1 without its memory", pytest.approx(4e-6)),
    ]
    assert all(sensor.poll_seconds < 60 for sensor in found), "read at least once a minute"


def test_joules_of_two_packages_are_exact_through_their_wraps(tmp_path):
    """65 kJ of range: 65,000 to 500 by way of the end is 1,000 J; the other goes from 100 to 350."""
    first = rapl(tmp_path, "intel-rapl:0", "package-0", 65_000_000_000, wraps_at_joules=65_500_000_000)
    second = rapl(tmp_path, "intel-rapl:1", "package-1", 100_000_000, wraps_at_joules=65_500_000_000)
    clock = Clock()
    meter = EnergyMeter(find_host_sensors(tmp_path), clock=clock)
    meter.start()
    for energy_uj in (65_400_000_000, 200_000_000, 500_000_000):
        clock.now += 20
        first.write_text(str(energy_uj))
        meter.read()  # as the thread does
    second.write_text("350000000")
    reading = meter.stop()
    assert [part.joules for part in reading.parts] == [pytest.approx(1000), pytest.approx(250)]
    assert reading.joules == pytest.approx(1250) and reading.error == pytest.approx(0.001 * 1250 / 60)


def test_a_thread_reads_what_needs_it_between_both_ends(tmp_path):
    """The counter goes around three times; were it read at both ends only it would show 1 J."""
    values, seen = [0.0], metering.threading.Event()

    def read():
        values.append((values[-1] + 7.0) % 20.0)
        if len(values) > 12:
            seen.set()
        return values[-1]

    clock = Clock()
    meter = EnergyMeter(
        [EnergyCounter("d", "s", "n", read, 0.001, poll_seconds=0.001, wraps_at_joules=20.0)], clock=clock
    )
    meter.start()
    assert seen.wait(120)
    clock.now += 5
    reading = meter.stop()
    assert reading.joules == pytest.approx(7.0 * (len(values) - 2))
    assert meter._thread is None


def test_a_counter_for_root_alone_is_not_measured_and_the_remedy_is_named(tmp_path, monkeypatch):
    rapl(tmp_path, "intel-rapl:0", "package-0", 1)

    def refuse(path):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Path, "read_bytes", refuse)
    with pytest.raises(SensorError, match=r"energy_uj is for root alone to read") as error:
        find_host_sensors(tmp_path)
    assert error.value.remedy == "sudo chmod a+r /sys/class/powercap/*/energy_uj"


@pytest.mark.parametrize(
    ("file", "says"), [("energy_uj", "cannot be read"), ("max_energy_range_uj", "range")]
)
def test_a_counter_that_is_no_number_is_not_measured(tmp_path, file, says):
    rapl(tmp_path, "intel-rapl:0", "package-0", 1).with_name(file).write_text("what?\n")
    with pytest.raises(SensorError, match=says):
        find_host_sensors(tmp_path)


def test_a_machine_without_sensors_says_so(tmp_path):
    with pytest.raises(SensorError, match="no RAPL and no power meter in /sys"):
        find_host_sensors(tmp_path)


def test_of_the_meters_of_grace_the_one_around_the_others_counts(tmp_path):
    for number, (label, watts) in enumerate(
        {"Module": 500, "Grace": 150, "CPU": 120, "SysIO": 10}.items(), start=1
    ):
        power_meter(tmp_path, number, f"{label} Power Socket 0", watts * 1_000_000, 50)
    power_meter(tmp_path, 9, "CPU Power Socket 1", 60_000_000, None)
    first, second = find_host_sensors(tmp_path)
    assert (first.read(), first.time_uncertainty_seconds, first.poll_seconds) == (150.0, 0.05, 0.1)
    assert (second.read(), second.time_uncertainty_seconds, second.poll_seconds) == (60.0, 1.0, 1.0)
    assert first.scope == "the power meter 'Grace Power Socket 0'" and "polled" in first.name


def test_a_meter_without_a_socket_is_the_machines_and_never_beside_a_gpu(tmp_path):
    power_meter(tmp_path, 0, "", 300_000_000)
    (found,) = find_host_sensors(tmp_path)
    assert found.scope == "the machine's power meter" and found.read() == 300.0
    with pytest.raises(SensorError, match="no RAPL"):
        find_host_sensors(tmp_path, beside_gpu=True)


def test_other_chips_of_hwmon_are_no_power_meters(tmp_path):
    power_meter(tmp_path, 0, "", 40_000_000)
    (tmp_path / "class/hwmon/hwmon0/name").write_text("amdgpu\n")
    with pytest.raises(SensorError, match="no power meter"):
        find_host_sensors(tmp_path)


# NVML.


def test_the_counter_of_the_gpus_that_are_used_whatever_their_number():
    """UUIDs come from CUDA: the program's first GPU may be NVML's last."""
    nvml = FakeNvml(
        a=h200(), b=h200(millijoules=5000), c=h200(name="NVIDIA RTX PRO 6000", millijoules=1000)
    )
    found = find_gpu_sensors([("c", "RTX"), ("GPU-a", "H200")], nvml)
    assert [(s.device, s.scope, s.read()) for s in found] == [
        ("GPU-c", "GPU 2 (NVIDIA RTX PRO 6000)", 1.0),
        ("GPU-a", "GPU 0 (NVIDIA H200)", 7000.0),
    ]
    assert {(s.name, s.time_uncertainty_seconds, s.poll_seconds) for s in found} == {
        ("NVML energy counter", 0.1, None)
    }


def test_joules_of_two_gpus_are_added():
    nvml, clock = FakeNvml(a=h200(), b=h200(millijoules=1)), Clock()
    meter = EnergyMeter(find_gpu_sensors([("a", ""), ("b", "")], nvml), clock=clock)
    meter.start()
    clock.now += 4
    nvml.gpus["GPU-a"].millijoules += 2_000_000
    nvml.gpus["GPU-b"].millijoules += 800_500
    reading = meter.stop()
    assert reading.joules == pytest.approx(2800.5) and reading.error == pytest.approx(0.1 * 2800.5 / 4)
    assert reading.scope == "GPU 0 (NVIDIA H200); GPU 1 (NVIDIA H200)"
    assert reading.sensor == "NVML energy counter"


def test_power_is_polled_where_there_is_no_counter_and_that_is_said():
    (found,) = find_gpu_sensors([("a", "P100")], FakeNvml(a={"name": "Tesla P100", "milliwatts": 250_000}))
    assert isinstance(found, PolledPower) and found.name == "NVML power, polled" and found.read() == 250.0
    assert found.poll_seconds == 0.1 and found.time_uncertainty_seconds == 1.0


@pytest.mark.parametrize(
    ("gpus", "nvml", "says"),
    [
        ([("a", "H200 MIG 1g.18gb")], FakeNvml(a=h200()), "MIG: NVML counts no energy of an instance"),
        ([("a", "H200")], FakeNvml(mig=True, a=h200()), "MIG"),
        ([("x", "H200")], FakeNvml(a=h200()), "NVML does not know GPU-x: Not Found"),
        (
            [("a", "?")],
            FakeNvml(a={"name": "Tesla K80"}),
            "GPU 0 .Tesla K80. tells NVML no energy: Not Supp",
        ),
        ([("a", ""), ("b", "")], FakeNvml(a=h200(), b={"name": "K80"}), "GPU 1 .K80. tells NVML no energy"),
    ],
)
def test_gpus_without_a_sensor_are_not_measured(gpus, nvml, says):
    with pytest.raises(SensorError, match=says):
        find_gpu_sensors(gpus, nvml)


def test_nvml_that_does_not_start_or_is_not_installed(monkeypatch):
    nvml = FakeNvml()
    nvml.starts = False
    with pytest.raises(SensorError, match="NVML does not start: Driver Not Loaded"):
        find_gpu_sensors([("a", "")], nvml)
    monkeypatch.setitem(sys.modules, "pynvml", None)
    with pytest.raises(SensorError, match="nvidia-ml-py is not installed") as error:
        find_gpu_sensors([("a", "")])
    assert error.value.remedy == "pip install 'dlm_rag[energy]'"


def test_the_fake_has_the_functions_of_the_package_and_no_others():
    used = [name for name in vars(FakeNvml) if name.lower().startswith("nvml")]
    assert len(used) == 8 and all(callable(getattr(pynvml, name)) for name in used)


@pytest.mark.parametrize(
    ("name", "says", "whole"),
    [
        ("NVIDIA H200", "GPU 1 (NVIDIA H200)", False),
        ("NVIDIA GH200 480GB", "the whole module of GPU 1 (NVIDIA GH200 480GB), CPU and memory too", True),
        ("NVIDIA GB10", "GPU 1 (NVIDIA GB10), whether with its CPU NVML does not say", True),
    ],
)
def test_the_scope_of_a_counter_in_words(name, says, whole):
    assert describe_gpu_scope(name, 1) == (says, whole)


# What a program is measured by.


@pytest.fixture
def cuda(monkeypatch):
    """Torch with one GPU of UUID `a` and a name."""

    def make(name="NVIDIA H200"):
        properties = SimpleNamespace(uuid="a", name=name)
        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
        waits = []
        monkeypatch.setattr(torch.cuda, "synchronize", waits.append)
        return waits

    return make


def test_a_gpu_is_measured_with_the_cpus_beside_it(tmp_path, cuda):
    cuda()
    rapl(tmp_path, "intel-rapl:0", "package-0", 1)
    sensors, lacking = find_sensors(CUDA, root=tmp_path, nvml=FakeNvml(a=h200()))
    assert [s.name for s in sensors] == ["NVML energy counter", "RAPL"] and lacking is None
    sensors, _ = find_sensors(CUDA, host=False, root=tmp_path, nvml=FakeNvml(a=h200()))
    assert [s.name for s in sensors] == ["NVML energy counter"], "another process counts the CPUs"


def test_the_cpu_of_a_module_is_not_counted_twice(tmp_path, cuda):
    cuda()
    power_meter(tmp_path, 0, "Grace Power Socket 0", 150_000_000)
    nvml = FakeNvml(a=h200(name="NVIDIA GH200 480GB"))
    sensors, lacking = find_sensors(CUDA, root=tmp_path, nvml=nvml)
    assert [s.name for s in sensors] == ["NVML energy counter"] and lacking is None


def test_both_ends_come_after_a_synchronize(tmp_path, cuda):
    waits = cuda()
    meter = open_meter("auto", CUDA, root=tmp_path, nvml=FakeNvml(a=h200()))
    meter.start()
    assert waits == [CUDA]
    meter.stop()
    assert waits == [CUDA, CUDA]


def test_a_gpu_without_a_sensor_is_not_measured_by_the_cpu_beside_it(tmp_path, cuda):
    cuda("NVIDIA H200 MIG 1g.18gb")
    rapl(tmp_path, "intel-rapl:0", "package-0", 1)
    with open_meter("auto", CUDA, root=tmp_path, nvml=FakeNvml()) as meter:
        pass
    assert meter.reading.joules is None and meter.reading.unmeasured_reason.startswith("MIG")


def test_a_cpu_is_measured_without_the_gpus_that_are_not_used(tmp_path):
    rapl(tmp_path, "intel-rapl:0", "package-0", 1)
    assert [s.name for s in open_meter("auto", CPU, root=tmp_path).sensors] == ["RAPL"]
    assert not open_meter("auto", CPU, host=False, root=tmp_path).sensors


def test_other_devices_have_no_sensor():
    assert "no sensor of mps is known" in str(describe_sensors(torch.device("mps"))[0])


def test_none_measures_nothing_and_says_nothing(tmp_path):
    rapl(tmp_path, "intel-rapl:0", "package-0", 1)
    with open_meter("none", CPU, root=tmp_path) as meter:
        pass
    assert not meter.reading.was_requested and meter.reading.to_record() is None
    assert "energy" not in RunTotals().summary_line(1.0, "cpu", meter.reading)


def test_idle_is_measured_before_and_told_beside_the_total():
    """10 s idle at 50 W, then 4 s at 200 W: 800 J, 600 of them above idle."""
    clock = Clock()
    sensor = counter([0.0, 500.0, 500.0, 1300.0])
    meter = EnergyMeter([sensor], idle_seconds=10.0, clock=clock, sleep=clock.sleep)
    meter.start()
    assert clock.now == 110.0
    clock.now += 4
    reading = meter.stop()
    assert (reading.joules, reading.idle_joules, reading.seconds) == (800.0, 200.0, 4.0)
    assert open_meter("idle", CPU, root=Path("/nowhere"))._idle_seconds == 0.0, "nothing to wait for"


def test_a_sensor_that_fails_on_the_way_ends_the_figure_and_not_the_run():
    def broken():
        yield 1.0
        yield 2.0
        raise OSError(5, "Input/output error")

    clock = Clock()
    meter = EnergyMeter([counter([5.0, 6.0, 9.0]), counter(broken())], clock=clock)
    meter.start()
    for _ in range(2):
        clock.now += 3
        lap = meter.lap()
    assert [part.joules for part in lap.parts] == [3.0, None]
    assert lap.joules is None, "the part of a machine would look like a saving"
    assert lap.unmeasured_reason == "a thing: [Errno 5] Input/output error"
    assert meter.stop().joules is None


def test_a_device_that_cannot_be_waited_for_is_no_error_of_the_meter():
    def gone():
        raise RuntimeError("CUDA error: device-side assert triggered")

    meter = EnergyMeter([counter([1.0, 2.0])], synchronize=gone)
    with pytest.raises(KeyError, match="of the run"), meter:
        raise KeyError("of the run")
    assert meter.reading.joules is None


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
def test_a_gpu_at_work_draws_more_than_idle_and_less_than_a_kettle():
    with open_meter("idle", CUDA, host=False) as meter:
        a = torch.randn(4096, 4096, device=CUDA)
        for _ in range(30):
            began = metering.time.perf_counter()
            while metering.time.perf_counter() - began < 0.1:
                a = torch.nn.functional.normalize(a @ a)
            torch.cuda.synchronize()
    reading = meter.reading
    if reading.joules is None:
        assert "MIG" in reading.unmeasured_reason or "tells NVML no energy" in reading.unmeasured_reason
        return
    assert torch.cuda.get_device_name(CUDA) in reading.scope
    assert 5 < reading.idle_joules / reading.seconds < reading.joules / reading.seconds < 2000


# What becomes of a reading.


def part(device="d", joules=100.0, **more):
    return replace(DeviceEnergy(device, f"scope {device}", "a sensor", joules, 1.0, 40.0), **more)


def test_what_workers_read_at_the_same_time_counts_every_device_once():
    """Both have a GPU of their own and see the same CPU, the second for longer."""
    one = EnergyReading(5.0, (part("gpu1"), part("cpu", 60.0)))
    two = EnergyReading(6.0, (part("gpu2", 200.0), part("cpu", 70.0)))
    whole = merge_readings([two, one, EnergyReading(9.0)])
    assert (whole.joules, whole.error, whole.seconds) == (370.0, 3.0, 9.0)
    assert merge_readings([one, EnergyReading(6.0, (), "MIG")]).joules is None
    assert not merge_readings([EnergyReading(1.0), EnergyReading(2.0)]).was_requested


def entry(**more):
    reading = EnergyReading(10.0, (part(joules=1000.0, error=10.0),))
    return reading.to_record() | {"answers": 20, "tokens": 500} | more


def test_figures_of_a_run_by_hand():
    found = summarise_energy([entry()])
    assert found["joules_per_answer"] == 50 and found["tokens_per_joule"] == 0.5 and found["watts"] == 100
    assert format_energy(found) == (
        "energy: 1,000 J ± 10, 960 above idle · 50 J/answer · 0.5 tokens/J · 100 W · a sensor: scope d"
    )
    assert [format_three_digits(x) for x in (0.01234, 1.234, 99.94, 12345.6)] == [
        "0.0123",
        "1.23",
        "99.9",
        "12,346",
    ]


def test_parts_that_were_not_measured_count_neither_joules_nor_answers():
    assert "device" not in entry()["parts"][0], "names of machines are nobody's business"
    lost = EnergyReading(3.0, (), "MIG").to_record() | {"answers": 70, "tokens": 9}
    found = summarise_energy([entry(), lost, entry(idle_joules=None)])
    assert (found["joules"], found["answers"], found["idle_joules"]) == (2000.0, 40, None)
    assert summarise_energy([lost]) is None and lost["joules"] is None and lost["reason"] == "MIG"


@pytest.mark.parametrize(
    "what", [None, 3, [3], [{}], [{"joules": 5}], [entry(joules=0)], [entry(seconds="x")]]
)
def test_what_is_no_record_of_energy_is_passed_over(what):
    assert summarise_energy(what) is None


def test_tokens_are_those_before_the_first_end_token():
    """Token 5 stands at position 0, token 7 at 1, where 6 has been; what is at an end token is no text."""
    rollout = two_steps()
    found = {end: rollout.tokens_before_end({end}) for end in (5, 6, 7, 9)}
    assert found == {5: 0, 6: 2, 7: 1, 9: 2} and rollout.tokens_committed == 2
    tally = RunTotals({7})
    tally.add(rollout)
    line = tally.summary_line(10.0, "cpu", EnergyReading(10.0, (part(joules=50.0),)))
    assert "0.02 tokens/J" in line and "50 J/answer" in line
    assert tally.summary_line(1.0, "cpu", EnergyReading(1.0, (), "why")).endswith(
        format_unmeasured_energy("why")
    )


def test_every_part_of_a_run_stands_in_the_stamp(tmp_path):
    out = tmp_path / "a.jsonl"
    stamp = {"answers_depend_on": {}, "machines": [{"device": "cpu"}], "energy": None}
    for record in (entry(), entry(answers=3)):
        file = AnswersFile(out)
        file.open_run(stamp)
        file.append(two_steps())
        file.add_energy(None)
        file.add_energy(record)
        file.close()
    found = json.loads(Path(f"{out}.run.json").read_text())
    assert [part["answers"] for part in found["energy"]] == [20, 3] and found["answers_depend_on"] == {}
    assert summarise_energy(found["energy"])["joules_per_answer"] == pytest.approx(2000 / 23)


def test_a_table_of_settings_names_what_was_not_measured():
    assert build_energy_table({"a": None}) == []
    (grid,) = build_energy_table({"a": summarise_energy([entry()]), "b": None})
    assert grid.rows[0][:7] == ["a", "50", "0.5", "100", "1,000", "10", "960"]
    assert (
        grid.rows[1][0] == "b" and grid.rows[1][-1] == "not measured" and set(grid.rows[1][1:-1]) == {"-"}
    )


def test_sample_puts_its_joules_into_line_and_stamp(tmp_path, monkeypatch, capsys):
    """The whole way, with a counter that has drawn 500 J in 8 s when the run is over."""
    from dlm_rag.commands.sample import main

    clock = iter([0.0, 0.0, 8.0, 8.0])
    meter = EnergyMeter([counter([0.0, 500.0])], clock=clock.__next__)
    monkeypatch.setattr(executors, "open_meter", lambda choice, device: meter)
    words = [
        "--questions",
        str(SHIPPED_FOLDER / "world/questions.jsonl"),
        "--out",
        str(tmp_path / "a.jsonl"),
    ]
    main([*words, "--limit", "2"])
    stamp = json.loads((tmp_path / "a.jsonl.run.json").read_text())
    (found,) = stamp["energy"]
    assert (found["joules"], found["seconds"], found["answers"]) == (500.0, 8.0, 2) and found["tokens"] > 10
    assert "energy: 500 J ± 6.25 · 250 J/answer" in capsys.readouterr().err
    assert "energy" not in stamp["answers_depend_on"]
    monkeypatch.undo()
    main([*words, "--limit", "3", "energy=none"])
    assert "1 question in" in (said := capsys.readouterr().err) and "energy" not in said
    assert json.loads((tmp_path / "a.jsonl.run.json").read_text())["energy"] == [found]


def test_rows_have_the_joules_of_all_parts_on_their_card(tmp_path, monkeypatch, capsys):
    """Traces of two questions, stopped after one and gone on with; the second part was too short."""
    from dlm_rag.commands.synthesize import main
    from dlm_rag.synthesis.shards import RowsFolder

    ends, add = iter([8.0, 1.0]), RowsFolder.append_outcome

    def opened(choice, device):
        end = next(ends)
        return EnergyMeter([counter([0.0, 500.0])], clock=iter([0.0, 0.0, end, end]).__next__)

    def stopped(folder, outcome):
        add(folder, outcome)
        raise KeyboardInterrupt

    monkeypatch.setattr(executors, "open_meter", opened)
    words = [
        "--questions",
        str(SHIPPED_FOLDER / "world/questions.jsonl"),
        "--limit",
        "2",
        "decode.batch_size=1",
    ]
    words += ["synthesis.format=jsonl", "synthesis.filter=evidence", "--out", str(tmp_path / "rows")]
    with monkeypatch.context() as stop, pytest.raises(KeyboardInterrupt):
        stop.setattr(RowsFolder, "append_outcome", stopped)
        main(words)
    assert "energy: 500 J ± 6.25 · 500 J/answer" in capsys.readouterr().err
    main(words)
    said = capsys.readouterr().err
    assert " tokens/s · 1 question in" in said and "energy: not measured (1.0 s are too short" in said
    first, second = json.loads((tmp_path / "rows/rows.json").read_text())["energy"]
    assert (first["joules"], first["answers"]) == (500.0, 1) and second["joules"] is None
    assert "energy: 500 J ± 6.25 · 500 J/answer" in (tmp_path / "rows/README.md").read_text()


def test_evaluate_has_a_table_of_joules_and_null_where_it_was_too_short(tmp_path, monkeypatch, capsys):
    from dlm_rag.commands.evaluate import main

    ends = iter([8.0, 1.0])

    def opened(choice, device):
        end = next(ends)
        return EnergyMeter([counter([0.0, 500.0])], clock=iter([0.0, 0.0, end, end]).__next__)

    monkeypatch.setattr(executors, "open_meter", opened)
    main(["--out", str(tmp_path), "--limit", "2", "--compare", "static,none"])
    found = json.loads((tmp_path / "scores.json").read_text())["settings"]
    assert found["static"]["energy"]["joules_per_answer"] == 250 and found["none"]["energy"] is None
    assert found["none"]["stamp"]["energy"][0]["reason"] == "1.0 s are too short: 2 s at least"
    assert re.search(r"\| static \| 250 \| .* fake: a thing \|", (tmp_path / "scores.md").read_text())
    out, err = capsys.readouterr()
    assert "Energy, measured" in out and "energy: not measured (1.0 s are too short" in err


# Training, the plan, profiles, the doctor.


def step(tokens=1000):
    return {"tokens": tokens, "supervised_tokens": tokens // 10}


def test_training_tells_joules_by_windows_of_two_seconds():
    clock = Clock()
    windows = EnergyWindows(EnergyMeter([counter([0.0, 300.0, 700.0, 710.0])], clock=clock), ONE)
    found = []
    for _ in range(5):
        clock.now += 1.5
        found.append(windows.add_step(step()))
    assert [bool(figures) for figures in found] == [False, True, False, True, False]
    first, second = found[1], found[3]
    assert (first["joules"], first["joules_steps"], first["joules_seconds"], first["watts"]) == (
        300,
        2,
        3,
        100,
    )
    assert first["joules_error"] == pytest.approx(10) and first["joules_of"] == "fake: a thing"
    assert second["joules"] == 400 and second["tokens_per_joule"] == 5
    assert second["supervised_tokens_per_joule"] == 0.5
    assert windows.stop_and_describe().startswith(
        "energy: 710 J ± 9.47 · 7.04 tokens/J · 94.7 W · fake: a thing · 142 J/step"
    )


def test_training_without_a_sensor_says_so_once_and_has_no_figures():
    windows = EnergyWindows(EnergyMeter(reason="no RAPL"), ONE)
    assert (
        windows.add_step(step()) == {} and windows.stop_and_describe() == "energy: not measured (no RAPL)"
    )
    windows = EnergyWindows(EnergyMeter(), ONE)
    assert windows.add_step(step()) == {} and windows.stop_and_describe() == ""


def test_a_sensor_that_fails_while_training_leaves_null():
    clock = Clock()
    windows = EnergyWindows(EnergyMeter([counter([5.0, 1.0])], clock=clock), ONE)
    clock.now += 3
    found = windows.add_step(step())
    assert found["joules"] is None and found["joules_steps"] == 1 and "watts" not in found
    assert "went backwards" in windows.stop_and_describe()


class Pair(DistributedContext):
    """This process beside one like it, that has drawn as much, or has no sensor."""

    other_fails = False

    def all_reduce_sum(self, values):
        more = [*values[:-3], *([1.0] * 3 if len(values) == 6 and self.other_fails else values[-3:])]
        return [a + b for a, b in zip(values, more, strict=True)]


@pytest.mark.parametrize("fails", [False, True])
def test_joules_are_those_of_all_processes_or_none(fails, monkeypatch):
    monkeypatch.setattr(Pair, "other_fails", fails)
    clock = Clock()
    windows = EnergyWindows(EnergyMeter([counter([0.0, 300.0])], clock=clock), Pair(0, 2, 0))
    clock.now += 3
    found = windows.add_step(step())
    assert found["joules"] == (None if fails else 600)
    assert found["joules_of"].endswith("a thing, with the devices of 1 other process")


def write_metrics(folder):
    lines = [
        {"step": n, "seconds": 1.0, "rows": 1, "supervised_tokens": 5, "joules": joules}
        | {"joules_steps": 2, "joules_seconds": 4.0}
        for n, joules in enumerate((100.0, None, 300.0))
    ]
    folder.mkdir(exist_ok=True)
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return folder / "metrics.jsonl"


def test_the_plan_stands_beside_what_was_measured(tmp_path):
    config = Config(out=str(tmp_path / "run"))
    assert describe_measured_energy(config) == f"Nothing was measured in {tmp_path / 'run'}."
    write_metrics(tmp_path / "run")
    steps = config.train.max_steps
    assert (
        f"100 J a step over 4 steps, which makes {100 * steps / 3.6e6:.3g} kWh"
        in describe_measured_energy(config)
    )


def test_stages_get_joules_by_their_share_of_time_and_the_page_says_so(tmp_path):
    (tmp_path / "stamp.json").write_text(json.dumps({"energy": [entry()]}))
    assert attribute.read_mean_watts(tmp_path / "stamp.json") == 100
    metrics = write_metrics(tmp_path / "run")
    assert attribute.read_mean_watts(metrics) == 50 and len(read_metrics(metrics)) == 3
    (tmp_path / "none.json").write_text('{"energy": null}')
    with pytest.raises(Exception, match="holds no joules"):
        attribute.read_mean_watts(tmp_path / "none.json")
    stage = attribution.StageTime("denoise", 2, 3.0, 3.0, 0.75, 0.0, 0.0, 0.0, 0.0, {})
    found = attribution.Attribution("x", 4.0, [stage], None, 0, 0.0, 0.0, 0, watts=100.0)
    (_, headings, (row, whole)), *_ = attribution_report.build_tables(found, None)
    assert headings[-1] == "J, by time share" and (row[-1], whole[-1]) == ("300", "400")
    assert "the mean of the run, times self time" in attribution_report.format_overlap_note(found)
    assert len(attribution_report.build_tables(replace(found, watts=None), None)[0][1]) == len(headings) - 1


def test_the_doctor_names_the_sensors_and_what_would_add_to_them(tmp_path, cuda, monkeypatch):
    cuda()
    nvml = FakeNvml(a=h200())
    said, remedy = describe_sensors(CUDA, tmp_path, nvml)
    assert said == (
        "NVML energy counter: GPU 0 (NVIDIA H200); not the CPU: no RAPL and no power meter in /sys"
    )
    assert remedy == ""
    monkeypatch.setitem(sys.modules, "pynvml", None)
    said, remedy = describe_sensors(CUDA, tmp_path)
    assert said.startswith("not measured: nvidia-ml-py") and remedy == "pip install 'dlm_rag[energy]'"
    (finding,) = doctor.check_energy(Config())
    assert finding.name == "energy" and finding.state in (doctor.OK, doctor.HINT)
