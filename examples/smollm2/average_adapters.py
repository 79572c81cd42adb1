"""Writes the mean of adapters that began as one: it keeps most of what each of them learned.

    python examples/smollm2/average_adapters.py runs/mean dlm_rag/shipped/smollm2 runs/two_hops

The result is in PEFT's format, with the other files of the first folder. A and B of each matrix are
averaged by themselves, which is near the mean of their products where adapters are near each other.
"""

import argparse
import shutil
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

ADAPTER_FILE = "adapter_model.safetensors"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("out", type=Path)
    parser.add_argument("adapters", type=Path, nargs="+", metavar="FOLDER")
    given = parser.parse_args()
    found = [load_file(folder / ADAPTER_FILE) for folder in given.adapters]
    mean = {
        name: torch.stack([each[name].float() for each in found]).mean(0).to(value.dtype)
        for name, value in found[0].items()
    }
    given.out.mkdir(parents=True, exist_ok=True)
    for path in given.adapters[0].glob("*.json"):
        shutil.copy(path, given.out)
    save_file(mean, given.out / ADAPTER_FILE, metadata={"format": "pt"})


if __name__ == "__main__":
    main()
