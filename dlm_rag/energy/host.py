"""CPUs, by files of the kernel: RAPL's counters, or the ACPI power meters of Grace.

RAPL counts microjoules and wraps within minutes; reading it is for root alone since 2020. Only packages
count: cores and graphics lie within them, `psys` around them; memory is in none of them.
"""

import platform
import re
from collections.abc import Callable
from functools import partial
from pathlib import Path

from dlm_rag.energy.sensors import EnergyCounter, PolledPower, Sensor, SensorError

SYSFS_FOLDER = Path("/sys")
READ_EVERY, RAPL_STEP = 20.0, 0.001  # seconds; a counter of 65 kJ lasts for 131 s of 500 W
DEFAULT_AVERAGING_SECONDS = 1.0  # seconds that a power meter takes the mean of, where it does not say
MIN_POLL_SECONDS = 0.1
MICRO = 1e-6
NO_HOST_SENSOR_MESSAGE = "no RAPL and no power meter in /sys"


def find_host_sensors(root: Path = SYSFS_FOLDER, beside_gpu: bool = False) -> list[Sensor]:
    """A sensor for every CPU of the machine. root: stands for `/sys`. beside_gpu: whether GPUs are measured
    by themselves; a meter that may count them too is left out then.

    Raises `SensorError` where there is none, or it cannot be read.
    """
    found = _rapl(root) or _meters(root, beside_gpu)
    if not found:
        raise SensorError(NO_HOST_SENSOR_MESSAGE)
    return found


def _rapl(root: Path) -> list[Sensor]:
    packages: dict[str, Path] = {}
    # Some packages are there twice, by registers and by memory ("mmio").
    folders = sorted((root / "class/powercap").glob("*"), key=lambda path: ("mmio" in path.name, path.name))
    for folder in folders:
        name = _read_text(folder / "name")
        if re.fullmatch(r"package-\d+(-die-\d+)?", name):
            packages.setdefault(name, folder)
    found: list[Sensor] = []
    for name, folder in packages.items():
        read = _reader(folder / "energy_uj", "sudo chmod a+r /sys/class/powercap/*/energy_uj")
        wraps = _read_text(folder / "max_energy_range_uj")
        if not wraps.isdecimal():
            raise SensorError(f"{folder / 'max_energy_range_uj'} cannot be read")
        scope = f"CPU {name.replace('-', ' ')} without its memory"
        of = f"{platform.node()}:{name}"
        found.append(
            EnergyCounter(
                of, scope, "RAPL", read, RAPL_STEP, READ_EVERY, wraps_at_joules=MICRO * int(wraps)
            )
        )
    return found


def _meters(root: Path, beside_gpu: bool) -> list[Sensor]:
    """Of each socket what counts all of its CPU side, else its cores alone; of no socket, the machine."""
    meters: dict[str, Path] = {}
    for hwmon in sorted((root / "class/hwmon").glob("*")):
        for folder in (hwmon, hwmon / "device"):  # the driver of Linux before 6.18 has them in the second
            named = "power_meter" in (_read_text(hwmon / "name"), _read_text(hwmon / "device/name"))
            if named and (folder / "power1_average").exists():
                meters.setdefault(_read_text(folder / "power1_oem_info"), folder)
    sockets = sorted({label.rpartition(" ")[2] for label in meters if " Power Socket " in label})
    labels = []
    for socket in sockets:
        there = [f"{kind} Power Socket {socket}" for kind in ("Grace", "CPU")]
        labels += [label for label in there if label in meters][:1]
    if not sockets and not beside_gpu:
        labels = list(meters)[:1]  # of a server: what its supply gives
    found: list[Sensor] = []
    for label in labels:
        folder = meters[label]
        said = _read_text(folder / "power1_average_interval")
        mean_of = int(said) / 1e3 if said.isdecimal() and int(said) else DEFAULT_AVERAGING_SECONDS
        scope = f"the power meter '{label}'" if label else "the machine's power meter"
        name, of = "ACPI power meter, polled", f"{platform.node()}:{label or 'power meter'}"
        read = _reader(folder / "power1_average", f"sudo chmod a+r {folder / 'power1_average'}")
        found.append(PolledPower(of, scope, name, read, mean_of, max(mean_of, MIN_POLL_SECONDS)))
    return found


def _reader(path: Path, remedy: str) -> Callable[[], float]:
    """Reads millionths out of a file; raises `SensorError` where it cannot be read now."""
    read = partial(_millionths, path)
    try:
        read()
    except PermissionError:
        raise SensorError(f"{path} is for root alone to read", remedy) from None
    except (OSError, ValueError):
        raise SensorError(f"{path} cannot be read") from None
    return read


def _millionths(path: Path) -> float:
    return MICRO * int(path.read_bytes())


def _read_text(path: Path) -> str:
    """What a file holds; nothing where it cannot be read."""
    try:
        return path.read_text(errors="replace").strip()
    except OSError:
        return ""
