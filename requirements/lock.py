"""Makes the lock files of this folder anew, from the ranges of setup.py; needs uv.

    python requirements/lock.py [OPTION OF UV]...

cpu.txt: torch's CPU build, from its own index, which the file names (options given here stand in for
that index, as `--find-links DIR` with a wheel at hand). cuda.txt: what PyPI has, with its hashes, the
same for x86_64 and aarch64. v100.txt: the same versions, but torch's build for CUDA 12.6, the last with
code for a V100, from its own index; the libraries of CUDA it pins itself. All are for Linux and Python 3.11
and have wheels only: nothing is built.
"""

import re
import subprocess
import sys
from distutils.core import run_setup
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
EXTRAS = ("parquet", "lora", "serve")  # what runs may need; flash-attn is built where it is used
CPU_INDEX = "https://download.pytorch.org/whl/cpu"
VOLTA_BUILD = "cu126"
VOLTA_INDEX = f"https://download.pytorch.org/whl/{VOLTA_BUILD}"
HEAD = "# {0}, Linux, Python 3.11: made by requirements/lock.py, not by hand.\n--only-binary :all:\n{1}\n"


def requirements() -> list[str]:
    """The ranges that a lock file pins."""
    package: Any = run_setup(str(HERE.parent / "setup.py"), stop_after="init")
    return [*package.install_requires, *(line for name in EXTRAS for line in package.extras_require[name])]


def resolve(machine: str, *options: str) -> str:
    """The newest versions within the ranges, and of all that they need."""
    command = [
        sys.executable, "-m", "uv", "pip", "compile", "-", "--quiet", "--no-header", "--no-annotate",
        "--only-binary=:all:", "--python-version=3.11",
        f"--python-platform={machine}-manylinux_2_28", *options,
    ]  # fmt: skip
    return subprocess.run(
        command, input="\n".join(requirements()), stdout=subprocess.PIPE, text=True, check=True
    ).stdout


def make_volta_lock(cuda: str) -> str:
    """v100.txt of what is in cuda.txt; without hashes, of which pip takes all or none: those of torch's
    build are in its index alone.
    """
    pins = [pin for pin in re.findall(r"^\S+==\S+", cuda, re.M) if not pin.startswith(("cuda-", "nvidia-"))]
    pins = [f"{pin}+{VOLTA_BUILD}" if pin.startswith("torch==") else pin for pin in pins]
    return (
        HEAD.format("CUDA of a V100, x86_64", f"--extra-index-url {VOLTA_INDEX}\n") + "\n".join(pins) + "\n"
    )


def main() -> None:
    cpu = resolve("x86_64", *(sys.argv[1:] or ["--torch-backend=cpu"]))
    assert "+cpu" in cpu, "torch's CPU build was not found"
    cuda, same = (resolve(machine, "--generate-hashes") for machine in ("x86_64", "aarch64"))
    assert cuda == same, "x86_64 and aarch64 need lock files of their own"
    (HERE / "cpu.txt").write_text(HEAD.format("CPU", f"--extra-index-url {CPU_INDEX}\n") + cpu)
    (HERE / "cuda.txt").write_text(HEAD.format("CUDA, x86_64 and aarch64", "") + cuda)
    (HERE / "v100.txt").write_text(make_volta_lock(cuda))


if __name__ == "__main__":
    main()
