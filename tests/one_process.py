"""Run under torchrun by test_gpu.py: steps, validation, checkpoint, export of one process with one shard.

torchrun --nproc-per-node 1 tests/one_process.py FOLDER DEVICE
"""

import json
import sys
from pathlib import Path
from unittest import mock

import torch
import torch.distributed as dist
from two_processes import CASES, run

from dlm_rag.training.processes import Processes
from dlm_rag.training.sharding import shard


def main() -> None:
    root, device = sys.argv[1:]
    dist.init_process_group("cuda:nccl,cpu:gloo" if device == "cuda" else "gloo")
    torch.set_num_threads(1)
    for case, dtype in (("sft sharded", "float32"), ("sft bfloat16 sharded", "bfloat16")):
        CASES[case] = [*CASES[case], f"train.dtype={dtype}", f"model.device={device}"]
        folder = Path(root, case)
        folder.mkdir()
        with mock.patch("dlm_rag.training.trainer.shard", wraps=shard) as sharding:
            found = run(case, folder, Processes.join())
        assert sharding.called
        (folder / "found.json").write_text(json.dumps(found))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
