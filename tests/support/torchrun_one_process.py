"""Run under torchrun by test_gpu.py: steps, validation, checkpoint, export of one process with one shard.

torchrun --nproc-per-node 1 -m tests.support.torchrun_one_process FOLDER DEVICE
"""

import json
import sys
from pathlib import Path
from unittest import mock

import torch
import torch.distributed as dist

from dlm_rag.cli import exit_rank
from dlm_rag.training.distributed import DistributedContext, apply_fsdp
from tests.support.torchrun_training_cases import TRAINING_CASES, run_training_case


def main() -> None:
    root, device = sys.argv[1:]
    dist.init_process_group("cuda:nccl,cpu:gloo" if device == "cuda" else "gloo")
    torch.set_num_threads(1)
    for case, dtype in (("sft sharded", "float32"), ("sft bfloat16 sharded", "bfloat16")):
        TRAINING_CASES[case] = [*TRAINING_CASES[case], f"train.dtype={dtype}", f"model.device={device}"]
        folder = Path(root, case)
        folder.mkdir()
        with mock.patch("dlm_rag.training.distributed.apply_fsdp", wraps=apply_fsdp) as sharding:
            found = run_training_case(case, folder, DistributedContext.init())
        assert sharding.called
        (folder / "found.json").write_text(json.dumps(found))
    dist.destroy_process_group()
    exit_rank()


if __name__ == "__main__":
    main()
