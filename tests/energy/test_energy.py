"""Energy: exact joules from a fake NVML and a fake /sys; without a sensor the reason and no figure."""

import json
import re
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pynvml
import pytest
import torch

from dlm_rag.commands import answer_job
from dlm_rag.commands.prepare_decoder import SHIPPED_FOLDER
from dlm_rag.decode.answers_file import AnswersFile
from dlm_rag.decode.terminal import RunTotals
from dlm_rag.energy import meter as meters
from dlm_rag.energy.meter import (
    EnergyCounter,
    EnergyMeter,
    EnergyReading,
    format_energy,
    format_three_digits,
    merge_readings,
    open_meter,
    summarise_energy,
)
from dlm_rag.training.distributed import DistributedContext
from dlm_rag.training.run import describe_energy
from tests.support.paths import ROOT
from tests.support.rollouts import make_two_step_rollout as two_steps

sys.path.insert(0, str(ROOT / "profiling"))

import attribute
import attribution

CPU, CUDA = torch.device("cpu"), torch.device("cuda", 0)
ONE = DistributedContext(0, 1, 0)
QUESTIONS = str(SHIPPED_FOLDER / "world/questions.jsonl")


@pytest.fixture
def clock(monkeypatch):
    """The time that meters see; tests advance `now`."""
    found = SimpleNamespace(now=100.0, perf_counter=lambda: found.now)
    monkeypatch.setattr(meters, "time", found)
    return found


def fake_nvml(millijoules=7_000_000, driver=True):
    """NVML with one GPU of UUID "a", number 2."""

    class NVMLError(Exception):
        pass

    def answer(value, error=""):
        if error:
            raise NVMLError(error)
        return value

    return SimpleNamespace(
        NVMLError=NVMLError,
        nvmlInit=lambda: answer(None, "" if driver else "Driver Not Loaded"),
        nvmlDeviceGetHandleByUUID=lambda uuid: answer(None, "" if uuid == "GPU-a" else "Not Found"),
        nvmlDeviceGetTotalEnergyConsumption=lambda handle: answer(
            millijoules, "" if millijoules is not None else "Not Supported"
        ),
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
    """Makes torch see one GPU of UUID `a` with this name, and NVML too; returns what waited for it."""

    def make(name="NVIDIA H200", nvml=None):
        properties = SimpleNamespace(uuid="a", name=name)
        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
        monkeypatch.setitem(sys.modules, "pynvml", nvml or fake_nvml())
        waits = []
        monkeypatch.setattr(torch.cuda, "synchronize", waits.append)
        return waits

    return make


def counter(values, wraps_at=0.0, device="d"):
    """A counter with these values of joules, one after another."""
    return EnergyCounter(device, "fake: a thing", iter(values).__next__, wraps_at)


def measure(clock, seconds, *values, **more) -> EnergyReading:
    with EnergyMeter([counter(values, **more)]) as meter:
        clock.now += seconds
    return meter.reading


def test_joules_are_the_difference_of_both_ends(clock):
    reading = measure(clock, 10.0, 5000.0, 6200.0)
    assert (reading.joules, reading.seconds) == (1200.0, 10.0)
    assert reading.to_record()["sensor"] == "fake: a thing" and reading.reason == ""
    assert measure(clock, 10.0, 990.0, 15.0, wraps_at=1000.0).joules == 25.0
    assert measure(clock, 2.0, 0.0, 100.0).joules == 100.0
    assert measure(clock, 3600.0, 1.0, 2.0).joules == 1.0


@pytest.mark.parametrize(
    ("seconds", "values", "wraps_at", "reason"),
    [
        (5.0, (7.0, 2.0), 0.0, "backwards"),
        (5.0, (7.0, 7.0), 0.0, "still"),
        (1.9, (0.0, 100.0), 0.0, "1.9 s are too short: 2 s"),
        (5.0, (1.0, 2.0), 0.0, "a thing: [Errno 5] Input/output error"),
    ],
)
def test_a_reading_that_cannot_be_right_has_a_reason_and_no_joules(
    clock, seconds, values, wraps_at, reason
):
    def broken():
        yield 1.0
        raise OSError(5, "Input/output error")

    counters = [counter(values, wraps_at)] + [counter(broken())] * ("Errno" in reason)
    with EnergyMeter(counters) as meter:
        clock.now += seconds
    reading = meter.reading
    assert reading.joules is None and reason in reading.reason


def test_joules_of_two_packages_are_exact_when_a_counter_wraps(rapl, clock):
    """Range 65,500 J: from 65,000 to 500 by way of the end is 1,000 J; the other goes from 100 to 350.

    Cores lie within the package, psys around it, and mmio is the package again.
    """
    first = rapl("intel-rapl:0", "package-0", 65_000_000_000, range_uj=65_500_000_000)
    second = rapl("intel-rapl:1", "package-1", 100_000_000, range_uj=65_500_000_000)
    for folder, name in (("0:0", "core"), ("0:1", "dram"), ("2", "psys"), ("-mmio:0", "package-0")):
        rapl(f"intel-rapl:{folder}".replace(":-", "-"), name)
    meter = open_meter("auto", CPU)
    assert [c.sensor for c in meter.counters] == [f"RAPL: CPU package-{n}" for n in (0, 1)]
    meter.start()
    for energy_uj in (65_400_000_000, 200_000_000, 500_000_000):
        clock.now += 20
        first.write_text(str(energy_uj))
        meter.count_joules()  # as the thread does
    second.write_text("350000000")
    reading = meter.stop()
    assert [joules for *_, joules in reading.parts] == [pytest.approx(1000), pytest.approx(250)]
    assert reading.joules == pytest.approx(1250)


def test_a_thread_reads_counters_that_wrap(monkeypatch, clock):
    """The counter goes around three times; were it read at both ends only it would show 1 J."""
    values, seen = [0.0], meters.threading.Event()

    def read():
        values.append((values[-1] + 7.0) % 20.0)
        if len(values) > 12:
            seen.set()
        return values[-1]

    monkeypatch.setattr(meters, "READ_SECONDS", 0.001)
    meter = EnergyMeter([EnergyCounter("d", "s", read, wraps_at=20.0)])
    meter.start()
    assert seen.wait(120)
    clock.now += 5
    joules = meter.stop().joules
    assert joules >= 70 and joules % 7 == 0, "of 7 J a reading"


@pytest.mark.parametrize(
    ("file", "content", "reason"),
    [
        ("energy_uj", None, "only root may read RAPL: sudo chmod"),
        ("energy_uj", "what?", "cannot be read"),
        ("max_energy_range_uj", "what?", "cannot be read"),
    ],
)
def test_a_counter_that_cannot_be_read_is_not_measured(rapl, monkeypatch, file, content, reason):
    def find_reason():
        with open_meter("auto", CPU) as meter:
            return meter.stop().reason

    assert "no RAPL" in find_reason()
    path, read = rapl("intel-rapl:0").with_name(file), Path.read_text
    if content is None:

        def refuse(path):
            if path.name == file:
                raise PermissionError(13, "Permission denied")
            return read(path)

        monkeypatch.setattr(Path, "read_text", refuse)
    else:
        path.write_text(content)
    assert reason in find_reason()


@pytest.mark.parametrize(
    ("name", "names"),
    [
        ("NVIDIA H200", ["NVML: NVIDIA H200", "RAPL: CPU package-0"]),
        ("NVIDIA GH200 480GB", ["NVML: NVIDIA GH200 480GB"]),
        ("NVIDIA GB10", ["NVML: NVIDIA GB10"]),
    ],
)
def test_a_gpu_is_measured_with_its_cpus_after_both_ends_are_synchronized(rapl, cuda, name, names):
    waits = cuda(name)
    rapl("intel-rapl:0")
    assert [c.sensor for c in open_meter("auto", CUDA).counters] == names
    meter = open_meter("auto", CUDA, host=False)
    assert [c.read() for c in meter.counters] == [7000.0], "another process counts the CPUs"
    meter.start()
    assert waits == [CUDA]
    meter.stop()
    assert waits == [CUDA, CUDA]


@pytest.mark.parametrize(
    ("name", "nvml", "reason"),
    [
        ("NVIDIA H200 MIG 1g.18gb", fake_nvml(), "MIG"),
        ("Tesla K80", fake_nvml(millijoules=None), "Tesla K80: Not Supported"),
        ("NVIDIA H200", fake_nvml(driver=False), "Driver Not Loaded"),
    ],
)
def test_a_gpu_without_a_counter_is_not_measured_by_its_cpu(rapl, cuda, name, nvml, reason):
    cuda(name, nvml)
    rapl("intel-rapl:0")
    with open_meter("auto", CUDA) as meter:
        pass
    assert meter.reading.joules is None and reason in meter.reading.reason


def test_the_fake_has_functions_of_the_package():
    used = [name for name in vars(fake_nvml()) if name.startswith("nvml")]
    assert len(used) == 3 and all(callable(getattr(pynvml, name)) for name in used)


def test_a_cpu_is_measured_without_the_gpus_that_are_not_used(rapl):
    rapl("intel-rapl:0")
    assert [c.sensor for c in open_meter("auto", CPU).counters] == ["RAPL: CPU package-0"]
    assert not open_meter("auto", CPU, host=False).counters
    with open_meter("none", CPU) as meter:
        pass
    assert meter.reading.to_record() is None
    assert "energy" not in RunTotals().summary_line(1.0, "cpu", meter.reading)


def test_two_machines_of_one_hostname_have_two_cpus(rapl, tmp_path, monkeypatch):
    rapl("intel-rapl:0")
    monkeypatch.setattr(meters, "BOOT_ID_FILE", tmp_path / "boot_id")
    monkeypatch.setattr(meters.platform, "node", lambda: "localhost")
    names = [open_meter("auto", CPU).counters[0].device]
    for boot_id in ("11111111-2222", "33333333-2222"):
        meters.BOOT_ID_FILE.write_text(boot_id)
        names.append(open_meter("auto", CPU).counters[0].device)
    assert names == ["localhost:package-0", "11111111:package-0", "33333333:package-0"]
    assert merge_readings([part(name) for name in names[1:]]).joules == 200


def test_a_device_that_cannot_be_waited_for_is_no_error_of_the_meter():
    def gone():
        raise RuntimeError("CUDA error: device-side assert triggered")

    meter = EnergyMeter([counter([1.0, 2.0])], synchronize=gone)
    with pytest.raises(KeyError, match="of the run"), meter:
        raise KeyError("of the run")
    assert meter.reading.joules is None


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
def test_a_gpu_at_work_draws_less_than_a_kettle():
    with open_meter("auto", CUDA, host=False) as meter:
        a = torch.randn(4096, 4096, device=CUDA)
        for _ in range(30):
            began = meters.time.perf_counter()
            while meters.time.perf_counter() - began < 0.1:
                a = torch.nn.functional.normalize(a @ a)
            torch.cuda.synchronize()
    reading = meter.reading
    if reading.joules is None:
        assert "MIG" in reading.reason or "no energy counter" in reading.reason
        return
    assert torch.cuda.get_device_name(CUDA) in reading.to_record()["sensor"]
    assert 5 < reading.joules / reading.seconds < 2000


def part(device="d", joules=100.0, seconds=10.0):
    return EnergyReading(seconds, ((device, f"a sensor of {device}", joules),))


def lost(reason, seconds=3.0):
    return EnergyReading(seconds, reason=reason)


def test_what_workers_read_at_the_same_time_counts_every_device_once():
    """Both have a GPU of their own and see the same CPU, the second for longer."""
    one = merge_readings([part("gpu1", seconds=5.0), part("cpu", 60.0, 5.0)])
    two = merge_readings([part("gpu2", 200.0, 6.0), part("cpu", 70.0, 6.0)])
    whole = merge_readings([two, one, EnergyReading(9.0)])
    assert (whole.joules, whole.seconds) == (370.0, 9.0)
    assert merge_readings([one, lost("MIG")]).joules is None
    assert merge_readings([EnergyReading(1.0), EnergyReading(2.0)]).to_record() is None


def entry(**more):
    return part(joules=1000.0).to_record() | {"answers": 20, "tokens": 500} | more


def test_figures_of_a_run_by_hand():
    found = summarise_energy([entry()])
    assert found["joules_per_answer"] == 50 and found["tokens_per_joule"] == 0.5 and found["watts"] == 100
    assert format_energy(found) == ("energy: 1,000 J · 50 J/answer · 0.5 tokens/J · 100 W · a sensor of d")
    assert [format_three_digits(x) for x in (0.01234, 1.234, 99.94, 12345.6)] == [
        "0.0123",
        "1.23",
        "99.9",
        "12,346",
    ]


def test_parts_that_were_not_measured_count_neither_joules_nor_answers():
    mig = lost("MIG").to_record() | {"answers": 70, "tokens": 9}
    found = summarise_energy([entry(), mig, entry()])
    assert (found["joules"], found["answers"]) == (2000.0, 40)
    assert summarise_energy([mig]) is None and mig["joules"] is None and mig["reason"] == "MIG"


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
    line = tally.summary_line(10.0, "cpu", part(joules=50.0))
    assert "0.02 tokens/J" in line and "50 J/answer" in line
    assert "(why)" in tally.summary_line(1.0, "cpu", lost("why"))


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
    assert (found["joules"], found["seconds"], found["answers"]) == (500.0, 8.0, 2) and found["tokens"] > 10
    assert "energy: 500 J · 250 J/answer" in capsys.readouterr().err
    assert "energy" not in stamp["answers_depend_on"]
    main([*words, "--limit", "3", "energy=none"])
    assert "1 question in" in (said := capsys.readouterr().err) and "energy" not in said
    assert json.loads((tmp_path / "a.jsonl.run.json").read_text())["energy"] == [found]


def test_rows_have_the_joules_of_all_parts_on_their_card(tmp_path, clock, monkeypatch, capsys):
    """Traces of two questions, stopped after one and gone on with; the second part was too short."""
    from dlm_rag.commands.synthesize import main
    from dlm_rag.synthesis.rows_folder import RowsFolder

    add = RowsFolder.append_outcome

    def stopped(folder, outcome):
        add(folder, outcome)
        raise KeyboardInterrupt

    fake_meters(clock, monkeypatch, 8.0, 1.0)
    words = ["--questions", QUESTIONS, "--limit", "2", "decode.batch_size=1"]
    words += ["synthesis.filter=evidence", "--out", str(tmp_path / "rows")]
    with monkeypatch.context() as stop, pytest.raises(KeyboardInterrupt):
        stop.setattr(RowsFolder, "append_outcome", stopped)
        main(words)
    assert "energy: 500 J · 500 J/answer" in capsys.readouterr().err
    main(words)
    said = capsys.readouterr().err
    assert " tokens/s · 1 question in" in said and "energy: not measured (1.0 s are too short" in said
    first, second = json.loads((tmp_path / "rows/rows.json").read_text())["energy"]
    assert (first["joules"], first["answers"]) == (500.0, 1) and second["joules"] is None
    assert "energy: 500 J · 500 J/answer" in (tmp_path / "rows/README.md").read_text()


def test_evaluate_has_a_table_of_joules_and_null_where_it_was_too_short(
    tmp_path, clock, monkeypatch, capsys
):
    from dlm_rag.commands.evaluate import main

    fake_meters(clock, monkeypatch, 8.0, 1.0)
    main(["--out", str(tmp_path), "--limit", "2", "--compare", "static,none"])
    found = json.loads((tmp_path / "scores.json").read_text())["settings"]
    assert found["static"]["energy"]["joules_per_answer"] == 250 and found["none"]["energy"] is None
    assert found["none"]["stamp"]["energy"][0]["reason"] == "1.0 s are too short: 2 s at least"
    text = (tmp_path / "scores.md").read_text()
    assert re.search(r"\| static \| 250 \| \S+ \| 62.5 \| 500 \| 8 \| fake: a thing \|", text)
    assert re.search(r"\| none( \| -){5} \| not measured \|", text)
    out, err = capsys.readouterr()
    assert "Energy, measured" in out and "energy: not measured (1.0 s are too short" in err


@pytest.mark.parametrize(
    ("meter", "said"),
    [
        (EnergyMeter([counter([0.0, 710.0])]), "energy: 710 J · 142 J/step · 94.7 W · fake: a thing"),
        (EnergyMeter(reason="no RAPL"), "energy: not measured (no RAPL)"),
        (EnergyMeter(), ""),
        (EnergyMeter([counter([5.0, 1.0])]), "energy: not measured (fake: a thing: the counter went back"),
    ],
)
def test_training_says_its_joules_or_why_it_has_none(clock, meter, said):
    meter.start()
    clock.now += 7.5
    text = describe_energy(meter, ONE, 5)
    assert text.startswith(said) and bool(text) == bool(said)


@pytest.mark.parametrize("other", [part("e", 300.0), lost("no RAPL")])
def test_joules_are_those_of_all_processes_or_none(other, clock, monkeypatch):
    monkeypatch.setattr(DistributedContext, "all_gather_object", lambda self, own: [own, other])
    meter = EnergyMeter([counter([0.0, 300.0])])
    meter.start()
    clock.now += 3
    assert ("600 J" in describe_energy(meter, ONE, 1)) == bool(other.parts)


def test_stages_get_joules_by_their_share_of_time_and_the_page_says_so(tmp_path):
    (tmp_path / "stamp.json").write_text(json.dumps({"energy": [entry()]}))
    assert attribute.read_mean_watts(tmp_path / "stamp.json") == 100
    (tmp_path / "none.json").write_text('{"energy": null}')
    with pytest.raises(Exception, match="holds no joules"):
        attribute.read_mean_watts(tmp_path / "none.json")
    stage = attribution.StageTime("denoise", 2, 3.0, 3.0, 0.75, 0.0, 0.0, 0.0, 0.0, {})
    found = attribution.Attribution("x", 4.0, [stage], None, 0, 0.0, 0.0, 0, watts=100.0)
    (_, rows), *_ = attribute.build_tables(found, None)
    assert [row["J, by time share"] for row in rows] == ["300", "400"]
    assert "the mean of the run, times self time" in attribute.format_overlap_note(found)
    (_, rows), *_ = attribute.build_tables(replace(found, watts=None), None)
    assert not any("J, by time share" in row for row in rows)
