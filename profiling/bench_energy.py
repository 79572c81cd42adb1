"""What measuring energy costs a run: CPU time of the meter, over sensors that are files and functions.

    python profiling/bench_energy.py [questions]

First the seconds of a reading of each kind of sensor, times how often it is read: two packages of RAPL,
eight power meters, eight GPUs whose power is polled. Drivers take their time beside that: it is no CPU time
of ours, and while they do, Python goes on. Then what it does to a decode of the shipped model, 16 questions
at a time: CPU seconds of the process with the meter of all of these sensors and without, in turns.
"""

import itertools
import tempfile
import time
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from statistics import median

from rich.console import Console
from rich.table import Column, Table

from dlm_rag.cli import run_program
from dlm_rag.commands.cli_args import parse_command_line, parse_int_args
from dlm_rag.commands.startup import apply_shipped_defaults, gather_questions, prepare_decoder
from dlm_rag.energy.host import find_host_sensors
from dlm_rag.energy.meter import EnergyMeter
from dlm_rag.energy.nvml import MEAN_OF, POLL_EVERY, POLLED
from dlm_rag.energy.sensors import PolledPower, Sensor
from dlm_rag.errors import ConfigError

READINGS, ROUNDS, SEVERAL = 2000, 7, 8


def write_sysfs_files(folder: Path, **contents: object) -> None:
    folder.mkdir(parents=True)
    for name, value in contents.items():
        (folder / name).write_text(f"{value}\n")


def make_fake_sensors(root: Path) -> dict[str, list[Sensor]]:
    """Sensors of each kind, from a folder that stands for /sys."""
    for number in range(2):
        folder = root / f"cpus/class/powercap/intel-rapl:{number}"
        write_sysfs_files(
            folder, name=f"package-{number}", energy_uj=10**9, max_energy_range_uj=262_143_328_850
        )
    for number in range(SEVERAL):
        folder = root / f"meters/class/hwmon/hwmon{number}"
        label, of = f"Grace Power Socket {number}", {"power1_average_interval": 50}
        write_sysfs_files(
            folder, name="power_meter", power1_oem_info=label, power1_average=150_000_000, **of
        )
    watts = itertools.cycle((250.0, 300.0))
    polled = [
        PolledPower(f"{n}", f"GPU {n}", POLLED, watts.__next__, MEAN_OF, POLL_EVERY) for n in range(SEVERAL)
    ]
    return {
        "2 packages of RAPL": find_host_sensors(root / "cpus"),
        f"{SEVERAL} power meters": find_host_sensors(root / "meters"),
        f"{SEVERAL} GPUs, power polled": [*polled],
    }


def read_repeatedly(read: Callable[[], object]) -> None:
    for _ in range(READINGS):
        read()


def measure_cpu_seconds(work: Callable[[], object]) -> float:
    """Of all threads of this process."""
    begun = time.process_time()
    work()
    return time.process_time() - begun


def main(argv: list[str]) -> None:
    limit, *more = parse_int_args(__doc__ or "", argv, "questions", [40])
    if more:
        raise ConfigError("the one word of this benchmark is a number of questions")
    config = apply_shipped_defaults(
        parse_command_line("", ["decode.batch_size=16"], typed=False).config, []
    )
    questions = gather_questions(config, [])[:limit]
    decoder = prepare_decoder(config, questions).load()
    list(decoder.stream(questions))
    right = (Column(heading, justify="right") for heading in ("us a reading", "every, s", "share"))
    table = Table("sensors", *right)
    with tempfile.TemporaryDirectory() as folder:
        kinds = make_fake_sensors(Path(folder))
        for name, sensors in kinds.items():
            meter, period = (
                EnergyMeter(sensors),
                min(s.poll_seconds for s in sensors if s.poll_seconds is not None),
            )
            meter.start()
            each = measure_cpu_seconds(partial(read_repeatedly, meter.read)) / READINGS
            meter.stop()
            table.add_row(name, f"{1e6 * each:.0f}", f"{period:g}", f"{each / period:.4%}")
        found: dict[bool, list[float]] = {True: [], False: []}
        for number in range(2 * ROUNDS):
            metered = number % 2 == 0
            with EnergyMeter(list(itertools.chain(*kinds.values()))) if metered else nullcontext():
                decoder.reset_cache()
                found[metered].append(measure_cpu_seconds(partial(decoder.decode, questions)))
    Console().print(table)
    shares = [a / b - 1 for a, b in zip(found[True], found[False], strict=True)]
    print(
        f"a decode of {len(questions)} questions, {ROUNDS} times with the meter and without: "
        f"{median(found[False]):.2f} s of CPU time, {median(shares):+.2%} with all of these sensors "
        f"({min(shares):+.2%} to {max(shares):+.2%})"
    )


if __name__ == "__main__":
    run_program(main)
