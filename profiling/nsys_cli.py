"""The program nsys: where it is, and what it makes of its own recordings."""

import shutil
import subprocess
from pathlib import Path

from dlm_rag.errors import ConfigError

NSYS_MISSING_HINT = (
    "nsys is not installed: take it from developer.nvidia.com/nsight-systems or Debian's non-free "
    "nsight-systems; `nsys.py --with torch` works without it, and attribute.py reads what "
    "`nsys export --type=sqlite` made elsewhere"
)


def find_nsys() -> str:
    """The nsys on the PATH; raises `ConfigError` with the remedy."""
    found = shutil.which("nsys")
    if found is None:
        raise ConfigError(NSYS_MISSING_HINT)
    return found


def import_qdstrm(raw: Path) -> Path:
    """The .nsys-rep of a .qdstrm, beside it; anything else is returned as it is.

    Debian's nsys 2022 does not find its own importer, which lies beside the host's libraries. Raises
    `ConfigError` where there is none or it fails.
    """
    if raw.suffix != ".qdstrm":
        return raw
    report = raw.with_suffix(".nsys-rep")
    places = [Path(find_nsys()).resolve().parent.parent, Path("/usr/lib/nsight-systems")]
    importers = [found for place in places for found in place.glob("host-linux-*/QdstrmImporter")]
    if not importers:
        raise ConfigError(f"nsys could not import {raw}, and its QdstrmImporter was not found")
    report.unlink(missing_ok=True)
    subprocess.run([str(importers[0]), "-i", str(raw), "-o", str(report)], check=False, capture_output=True)
    if not report.is_file():
        raise ConfigError(f"{raw} is no whole recording of nsys: {importers[0].name} could not import it")
    return report


def export_sqlite(report: Path) -> Path:
    """The report as sqlite, beside it; raises `ConfigError` where nsys cannot read it."""
    target, part = report.with_suffix(".sqlite"), report.with_suffix(".part.sqlite")
    if target.is_file() and target.stat().st_mtime >= report.stat().st_mtime:
        return target
    line = ["export", "--type=sqlite", "--force-overwrite=true", f"--output={part}", str(report)]
    done = subprocess.run([find_nsys(), *line], capture_output=True, text=True, check=False)
    if done.returncode or not part.is_file() or not part.stat().st_size:
        part.unlink(missing_ok=True)
        says = (done.stderr or done.stdout).strip().splitlines()
        raise ConfigError(f"nsys cannot export {report}: {says[-1] if says else 'it says nothing'}")
    part.rename(target)
    return target
