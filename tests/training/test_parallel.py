"""The same global batch is the same step: alone, in copies, in shards."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from functools import cache

import pytest
import torch
from safetensors.torch import load_file

from dlm_rag.config import load_config
from dlm_rag.errors import ConfigError, RunError
from dlm_rag.training.checkpoints import find_latest_checkpoint
from dlm_rag.training.distributed import DistributedContext, translate_distributed_errors
from dlm_rag.training.plan import check_run_fits
from tests.support.paths import ROOT
from tests.support.processes import TORCHRUN_COMMAND, count_lines, wait_until
from tests.support.tiny_models import byte_tokenizer, tiny_denoiser
from tests.support.torchrun_training_cases import STEPS, TRAINING_CASES, run_training_case
from tests.support.training import run_train_program

ALONE = DistributedContext(0, 1, 0)
SAME = {  # case on two processes -> case on one
    "sft float16, overflows on one": "sft float16, overflows on one",
    "sft bfloat16 sharded": "sft bfloat16",
    "sft sharded, accumulated, checkpointed": "sft",
    "adapters sharded": "adapters",
    "rl sharded": "rl",
    **{case: case for case in TRAINING_CASES if "rows on one" in case},
    "pretrain": "pretrain",
    "pretrain sharded, checkpointed": "pretrain",
}
FAILING = "uneven, searches fail on one"
slow = pytest.mark.slow


def torchrun(folder, *cases, processes=2):
    program = ROOT / "tests/support/torchrun_training_cases.py"
    command = [*TORCHRUN_COMMAND, str(processes), str(program), str(folder), *cases]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=400)
    assert done.returncode == 0, done.stderr[-4000:]
    return {case: json.loads((folder / case / "found.json").read_text()) for case in cases}


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """Where the cases run on one process and on two; each has the checkpoint that adapters stand beside."""
    found = tmp_path_factory.mktemp("alone"), tmp_path_factory.mktemp("together")
    for folder in found:
        tiny_denoiser(max_position_embeddings=512).save_pretrained(folder / "checkpoint", eos_token_id=257)
        byte_tokenizer().save_pretrained(folder / "checkpoint")
    return found


@pytest.fixture(scope="module")
def alone(folders):
    """What one process computes in a case."""

    @cache
    def found(case):
        (folders[0] / case).mkdir()
        return run_training_case(case, folders[0] / case, ALONE)

    return found


@pytest.fixture(scope="module")
def together(folders):
    """What two processes compute in a case; few launches, for each is seconds of imports."""

    @cache
    def launched(cases):
        return torchrun(folders[1], *cases)

    return lambda case: launched((*SAME, FAILING))[case]


@slow
@pytest.mark.parametrize("case", SAME)
def test_two_processes_take_the_steps_of_one(alone, together, case):
    """Up to the order of additions; in bfloat16, shards round gains and embeddings before they are used."""
    theirs, ours = alone(SAME[case]), together(case)
    low = 3 if "bfloat16" in case or "adapters" in case or "float16" in case else 1
    assert ours["loss"] == pytest.approx(theirs["loss"], rel=low * 1e-3)
    assert ours["norm"] == pytest.approx(theirs["norm"], rel=low * 1e-2, nan_ok=True)
    assert ours["scores"].keys() == theirs["scores"].keys()
    assert ours["scores"]["nelbo_per_token"] == pytest.approx(
        theirs["scores"]["nelbo_per_token"], rel=low * 1e-3
    )
    assert ours["again"] == ours["loss"][STEPS // 2 :] and ours["same"], "resumed bit for bit"


@slow
def test_searches_that_fail_on_one_process_hold_up_no_other(together):
    """It has no canvas to denoise where the other has two, step by step; both must end, and together."""
    found = together(FAILING)["scores"]
    assert found["forwards_per_answer"] == pytest.approx(2 * 48 / 3), "two of three questions are answered"
    assert 0 < found["nelbo_per_token"] < 10, "whose passages are named"


@slow
@pytest.mark.parametrize("case", [case for case in SAME if case.startswith("pretrain")])
def test_the_work_of_all_processes_is_that_of_one(alone, together, case):
    """What MFU is made of."""
    assert together(case)["flops"] == pytest.approx(alone(SAME[case])["flops"], rel=1e-6)


@pytest.mark.parametrize(
    ("processes", "words", "said"),
    [
        (4, ["train.passage_sets_per_step=7", "train.gradient_accumulation_steps=2"], "no work for 4 proc"),
        (5, TRAINING_CASES["pretrain"], "a step of 4 has no work for 5 processes"),
    ],
)  # fmt: skip
def test_what_cannot_be_shared_is_refused_before_anything_is_read(processes, words, said):
    with pytest.raises(ConfigError, match=said):
        check_run_fits(load_config(None, words), processes, torch.device("cpu"))


@slow
@pytest.mark.parametrize(
    "case", ["sft sharded, accumulated, checkpointed", "pretrain sharded, checkpointed", "adapters sharded"]
)
def test_what_shards_export_is_whole(alone, together, folders, case):
    assert alone(SAME[case]) and together(case)
    ours, theirs = (
        load_file(folder / name / "model" / "model.safetensors")
        for folder, name in zip(folders, (SAME[case], case), strict=True)
    )
    assert ours.keys() == theirs.keys()
    for name, value in ours.items():
        torch.testing.assert_close(
            value, theirs[name], rtol=1e-2, atol=2e-3 if "adapters" in case else 2e-4
        )


@slow
@pytest.mark.parametrize(
    ("begun", "resumed"), [("sft sharded, accumulated, checkpointed", "sft"), ("rl sharded", "rl")]
)
def test_what_two_shards_saved_goes_on_on_one_process(alone, together, folders, tmp_path, begun, resumed):
    assert together(begun)
    shutil.copytree(folders[1] / begun / "checkpoints", tmp_path / resumed / "checkpoints")
    (tmp_path / "checkpoint").symlink_to(folders[1] / "checkpoint")
    second_half = run_training_case(resumed, tmp_path / resumed, ALONE)
    assert second_half["from"] == STEPS // 2
    assert second_half["loss"] == pytest.approx(alone(resumed)["loss"][STEPS // 2 :], rel=1e-3)


@pytest.mark.parametrize(
    ("said", "gone"),
    [
        ("[/gloo/transport/tcp/pair.cc:538] Connection closed by peer [127.0.0.1]:3156", True),
        ("Read error [127.0.0.1]:3156: Connection reset by peer", True),
        ("[../socket.cpp:792] The client socket has timed out after 600000ms", True),
        ("[Rank 0] Watchdog caught collective operation timeout: WorkNCCL(SeqNum=3)", True),
        ("NCCL error in: x.cpp:3690, ncclRemoteError: A call failed possibly due to a network error", True),
        ("NCCL error in: x.cpp:3690, ncclSystemError: System call (e.g. socket, malloc) failed", False),
        ("Expected all tensors to be on the same device", False),
    ],
)
def test_only_a_dead_process_is_called_dead_and_the_cause_is_kept(said, gone):
    with pytest.raises(RuntimeError) as caught, translate_distributed_errors():
        raise RuntimeError(f"{said}\nException raised from somewhere")
    assert isinstance(caught.value, RunError) == gone
    assert str(caught.value).partition("\n")[0].count(said) == 1
    if gone:
        assert str(caught.value.__cause__).startswith(said)


def start_training(folder, *words, launcher=()):
    command = [*(launcher or [sys.executable]), "train.py", "--out", str(folder), *words]
    process = subprocess.Popen(command, cwd=ROOT, stderr=subprocess.PIPE, text=True)
    wait_until(lambda: count_lines(folder / "metrics.jsonl") > 2, process)
    return process


LONG = [word for word in TRAINING_CASES["sft"] if "steps" not in word] + [
    "train.max_steps=500", "train.save_steps=1000", "train.eval_steps=1000",
]  # fmt: skip


def workers_of(launched):
    listed = subprocess.run(
        ["ps", "--ppid", str(launched.pid), "-o", "pid="], capture_output=True, text=True, check=True
    )
    return sorted(int(pid) for pid in listed.stdout.split())


@slow
def test_two_processes_stop_at_the_same_step_even_in_a_validation(tmp_path):
    words = [word for word in LONG if "eval_steps" not in word]
    process = start_training(tmp_path, *words, "train.eval_steps=1", launcher=[*TORCHRUN_COMMAND, "2"])
    for worker in workers_of(process):
        os.kill(worker, signal.SIGTERM)
        time.sleep(0.05)
    _, error = process.communicate(timeout=300)
    assert process.returncode == 0 and "--resume goes on" in error, error
    steps = (tmp_path / "metrics.jsonl").read_text().count("\n")
    assert find_latest_checkpoint(tmp_path)[0].name == f"step-{steps:08d}", (
        "a validated step is saved, and so is the last"
    )


@slow
def test_processes_with_folders_of_their_own_are_refused(tmp_path):
    """As on two machines without a common file system."""
    script = f"exec {sys.executable} train.py --out {tmp_path}/$RANK {' '.join(TRAINING_CASES['sft'])}"
    command = [*TORCHRUN_COMMAND, "2", "--no-python", "bash", "-c", script]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode != 0 and "is not the same folder for all processes" in done.stderr
    assert not list(tmp_path.glob("*/checkpoints"))


@slow
def test_a_dead_process_is_named_and_the_checkpoint_stays(tmp_path):
    words = [*LONG, "train.save_steps=1"]
    process = start_training(tmp_path, *words, launcher=[*TORCHRUN_COMMAND, "2"])
    os.kill(workers_of(process)[-1], signal.SIGKILL)
    _, error = process.communicate(timeout=300)
    assert process.returncode != 0 and "another process of this run has died" in error, error
    done = run_train_program(tmp_path, "--resume", *words, "train.max_steps=3")
    assert done.returncode == 0 and "going on from step" in done.stderr, (error, done.stderr)
