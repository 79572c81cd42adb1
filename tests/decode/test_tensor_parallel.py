"""One model on several ranks: its slices, the tokens of one process, and what happens when a rank dies."""

import json
import os
import re
import signal
import subprocess
import threading
import time
from functools import partial
from pathlib import Path
from unittest import mock

import httpx
import pytest
import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

from dlm_rag.decode import tensor_parallel
from dlm_rag.decode.memory_budget import count_kv_bytes
from dlm_rag.decode.tensor_parallel import follow_rank_0, load_on_all_ranks
from dlm_rag.errors import ConfigError
from dlm_rag.model.checkpoint import open_checkpoint
from dlm_rag.model.tensor_parallel import (
    TensorParallel,
    get_tensor_parallel,
    split_checkpoint,
    split_config,
)
from tests.golden.tiny_checkpoints import CONFIGS, write_checkpoint
from tests.model.test_families import PUBLIC, write_public
from tests.support.decoding import QUESTIONS, rollout_records
from tests.support.passages import PASSAGES, write_jsonl_file
from tests.support.paths import ROOT, SHARED
from tests.support.processes import TORCHRUN_COMMAND, count_lines, wait_until
from tests.support.serving import chat_body, find_free_port, start_server_process
from tests.support.setup_matrix import DECODING_SETUPS, EXPERTS, make_setup_decoder
from tests.support.tiny_models import byte_tokenizer, tiny_denoiser

CPU = torch.device("cpu")
ROWS = re.compile(r"\b(q|k|v|gate|up)_proj\.(weight|bias)$")


def slice_of(name, value, rank, size):
    """A rank's part of a whole tensor."""
    if name.endswith("gate_up_proj"):
        return torch.cat([half.chunk(size, 1)[rank] for half in value.chunk(2, 1)], 1)
    if ROWS.search(name):
        return value.chunk(size, 0)[rank]
    return value.chunk(size, -1)[rank] if re.search(r"\b(o|down)_proj", name) else value


@pytest.mark.parametrize("family", [*sorted({*CONFIGS, *PUBLIC}), 4, 8])
def test_each_rank_reads_its_slices(tmp_path, family):
    """Of public checkpoints on two ranks, of our own with stacked experts on more."""
    size = 2 if isinstance(family, str) else family
    if isinstance(family, str):
        write_checkpoint(family, tmp_path) if family in CONFIGS else write_public(tmp_path, family)
    else:
        heads = {"num_attention_heads": 16, "num_key_value_heads": 8, "qkv_bias": True}
        tiny_denoiser(experts=EXPERTS, **heads).save_pretrained(tmp_path)
    whole = open_checkpoint(tmp_path, 4)
    values = dict(whole.iterate_tensors(CPU, torch.float32))
    for rank in range(size):
        part = split_checkpoint(whole, rank, size)
        found = dict(part.iterate_tensors(CPU, torch.float32))
        assert found.keys() == values.keys() and part.fingerprint == whole.fingerprint
        for name, value in values.items():
            torch.testing.assert_close(found[name], slice_of(name, value, rank, size), rtol=0, atol=0)
            assert found[name].is_contiguous()
    assert count_kv_bytes(part.config, 4) * size == count_kv_bytes(whole.config, 4)
    assert part.count_weight_bytes(4) < whole.count_weight_bytes(4)


def test_what_does_not_divide_is_named():
    shape = tiny_denoiser(experts=EXPERTS).config
    with pytest.raises(ConfigError, match="tensor_parallel=4 must divide num_key_value_heads=2$"):
        split_config(shape, 4)
    with pytest.raises(ConfigError, match="=16 must divide moe_intermediate_size=64 into multiples of 8"):
        split_config(shape, 16)


class ThreadRanks(TensorParallel):
    """Ranks that are threads of this process; others: what each has brought to where all meet."""

    def __init__(self, rank, values, barrier):
        super().__init__(rank, len(values))
        self._values, self._barrier = values, barrier

    def _gather(self, value):
        self._values[self.rank] = value
        self._barrier.wait(30)
        found = [*self._values]
        self._barrier.wait(30)
        return found

    def all_reduce(self, module, inputs, output):
        return sum(self._gather(output))

    def least(self, number, group=None):
        return min(self._gather(number))

    def broadcast(self, message=None, in_step=False):
        return self._gather(message)[0]


def split_on_all_ranks(folder, denoiser, quantize="none"):
    """The part of rank 0, once the others are asked for theirs."""
    denoiser.save_pretrained(folder)
    own = split_checkpoint(open_checkpoint(folder), 0, tensor_parallel.get_tensor_parallel().size)
    return load_on_all_ranks(own, CPU, torch.float32, "auto", quantize)


def decode_on_ranks(corpus_file, way, folder, questions=QUESTIONS, quantize="none"):
    decoder = make_setup_decoder(corpus_file, way, partial(split_on_all_ranks, folder, quantize=quantize))
    return decoder.decode(questions), decoder


@pytest.mark.parametrize("way", ["joint", "prefix", "shifted", "experts", "blocks, text", "pipeline"])
def test_two_ranks_give_the_tokens_of_one(corpus_file, tmp_path, monkeypatch, way):
    torch.manual_seed(0)
    whole = make_setup_decoder(corpus_file, way).decode(QUESTIONS)
    values, barrier = [None, None], threading.Barrier(2)
    first, second = (ThreadRanks(rank, values, barrier) for rank in range(2))
    monkeypatch.setattr(tensor_parallel, "get_tensor_parallel", lambda: first)
    other = threading.Thread(target=follow_rank_0, args=(second, CPU))
    other.start()
    found, decoder = decode_on_ranks(corpus_file, way, tmp_path / "model")
    first.broadcast([])
    other.join(30)
    assert not other.is_alive() and rollout_records(found) == rollout_records(whole)
    assert "tensor parallel on 2 ranks" in decoder.describe()


@pytest.mark.parametrize("way", ["independent", "experts"])
def test_every_rank_quantises_its_part(corpus_file, tmp_path, monkeypatch, way):
    values, barrier = [None, None], threading.Barrier(2)
    first, second = (ThreadRanks(rank, values, barrier) for rank in range(2))
    monkeypatch.setattr(tensor_parallel, "get_tensor_parallel", lambda: first)
    other = threading.Thread(target=follow_rank_0, args=(second, CPU))
    other.start()
    found, decoder = decode_on_ranks(corpus_file, way, tmp_path / "model", quantize="int8")
    first.broadcast([])
    other.join(30)
    assert not other.is_alive() and not any(rollout.error for rollout in found)
    assert "with int8 in the linear layers" in decoder.describe() and "on 2 ranks" in decoder.describe()


@pytest.mark.parametrize("size", [4, 8])
def test_shapes_on_many_ranks(corpus_file, tmp_path, monkeypatch, size):
    """In a process group that is not there: sums have the shapes of real ones and do nothing."""
    heads = {"num_attention_heads": 16, "num_key_value_heads": 8, "experts": EXPERTS}
    monkeypatch.setitem(DECODING_SETUPS, "many heads", ("independent", heads, {}))
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=size)
    get_tensor_parallel.cache_clear()
    try:
        with mock.patch.object(dist, "all_reduce", wraps=dist.all_reduce) as summed:
            _, decoder = decode_on_ranks(corpus_file, "many heads", tmp_path / "model", QUESTIONS[:1])
        runner, layers = decoder.model_runner, decoder.denoiser.config.num_hidden_layers
    finally:
        dist.destroy_process_group()
        get_tensor_parallel.cache_clear()
    assert runner._own._contexts._store.keys_values.shape[3] == 8 // size
    shapes = {call.args[0].shape[1:] for call in summed.call_args_list[1:]}  # after that of the pools
    assert shapes == {(32,)} and (len(summed.call_args_list) - 1) % layers == 0


@pytest.mark.slow
def test_two_processes_decode_as_one(tmp_path):
    """All ways of decoding, pools of both forms, the store and golden traces, in one launch."""
    write_corpus(tmp_path)
    golden = [str(SHARED / "golden")] if (SHARED / "golden").is_dir() else []
    program = ["-m", "tests.support.torchrun_tensor_parallel", str(tmp_path), *golden]
    command = [*TORCHRUN_COMMAND, "2", *program]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=400)
    assert done.returncode == 0, done.stderr[-4000:]
    found = json.loads((tmp_path / "found.json").read_text())
    for part in ("setups", "int8", "store", "setups, shared segments"):
        most = 1e-3 if part == "int8" else 1e-5  # a number between two that int8 knows goes either way
        assert all(case["same"] and case["apart"] < most for case in found[part].values()), found[part]
    assert all(half * 2 == whole for whole, half in (case["pools"] for case in found["int8"].values()))
    store = found["store"]
    assert store["filled"]["read"] == 0 < store["read"]["read"] and store["read"]["encoded"] == 0
    assert store["damaged"]["read"] == 0 < store["damaged"]["encoded"], "what one rank lacks, none reads"
    assert len(found["golden"]) >= 18 + 2 * len(golden)
    (said,) = found["what does not fit"]
    assert "raise engine.prefix_cache_gib" in said
    assert (tmp_path / "rank-0").read_text() == (tmp_path / "rank-1").read_text(), "to the bit"


def write_corpus(folder):
    records = [{"id": name, "title": title, "contents": text} for name, title, text in PASSAGES]
    return write_jsonl_file(folder / "corpus.jsonl", records)


def write_model(folder):
    tiny_denoiser().save_pretrained(folder / "model", eos_token_id=257)
    byte_tokenizer().save_pretrained(folder / "model")


def children_of(process):
    listed = subprocess.check_output(["ps", "--ppid", str(process.pid), "-o", "pid="], text=True)
    return sorted(map(int, listed.split()))


def ranks_of(process):
    """The process ids of the ranks: rank 0 is torchrun's first child, or has been started itself."""
    children = children_of(process)
    return children if TORCHRUN_COMMAND[2] in process.args else [process.pid, *children]


def has_ended(number):
    """Whether a process is gone, or waits for nothing but its parent's notice."""
    try:
        return (Path("/proc") / str(number) / "stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except (FileNotFoundError, ProcessLookupError):
        return True


LOSSES = [  # how the run is started, which rank is struck, by what
    ("torchrun", 0, "SIGKILL"),
    ("torchrun", 1, "SIGSTOP"),
    ("rank 0", 1, "SIGKILL"),
    ("rank 0", 0, "SIGSTOP"),
]


@pytest.mark.slow
def test_a_rank_that_is_lost_ends_all_and_the_run_goes_on_from_there(tmp_path):
    write_corpus(tmp_path)
    write_model(tmp_path)
    asked = [{"id": f"q{n}", "question": f"Who wrote book {n}?"} for n in range(60)]
    write_jsonl_file(tmp_path / "questions.jsonl", asked)
    words = [
        "sample.py", "--model", str(tmp_path / "model"), "--corpus", str(tmp_path / "corpus.jsonl"),
        "--questions", str(tmp_path / "questions.jsonl"), "decode.max_new_tokens=24",
        "decode.commit_threshold=1", "decode.batch_size=2", "retrieval.top_k=2",
    ]  # fmt: skip
    env = os.environ | {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    run = partial(subprocess.Popen, cwd=ROOT, env=env, stderr=subprocess.PIPE, text=True)
    out, python = tmp_path / "killed.jsonl", TORCHRUN_COMMAND[0]
    split = [*words, "--out", str(out), "engine.tensor_parallel=2"]
    for start, killed, sent in LOSSES:
        launch = [*TORCHRUN_COMMAND, "2"] if start == "torchrun" else [python]
        kept = count_lines(out)
        process = run([*launch, *split])
        wait_until(lambda kept=kept: count_lines(out) >= kept + 4, process)
        ranks = ranks_of(process)
        assert len(ranks) == 2
        os.kill(ranks[killed], getattr(signal, sent))
        begin = time.monotonic()
        _, error = process.communicate(timeout=120)  # standard error is closed when the last rank has ended
        assert process.returncode and time.monotonic() - begin < 30
        assert all(map(has_ended, ranks))
        assert re.search("another rank has died|answered; the same command goes on from here", error), error
        assert kept + 4 <= count_lines(out) < 60
    whole = tmp_path / "whole.jsonl"
    for command in ([python, *split], [python, *words, "--out", str(whole)]):
        _, error = (process := run(command)).communicate(timeout=300)
        assert process.returncode == 0, error
        assert ("tensor parallel on 2 ranks" in error) == (split[-1] in command)
    found, expected = (
        {line["id"]: line["response"] for line in map(json.loads, path.read_text().splitlines())}
        for path in (out, whole)
    )
    assert found == expected and count_lines(out) == 60


@pytest.mark.slow
def test_a_rank_that_no_other_joins_ends():
    alone = {
        "RANK": "0",
        "WORLD_SIZE": "2",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(find_free_port()),
    }
    program = "from dlm_rag.commands.tensor_parallel import RankMeetings; RankMeetings(1)"
    done = subprocess.run(
        [TORCHRUN_COMMAND[0], "-c", program], cwd=ROOT, env=os.environ | alone, timeout=60,
        stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    assert done.returncode == 1 and "another rank has died or does not answer" in done.stderr


@pytest.mark.slow
def test_a_server_on_two_ranks_answers_and_ends(corpus_file, tmp_path):
    write_model(tmp_path)
    port, program = find_free_port(), (*TORCHRUN_COMMAND[1:], "2", "-m", "dlm_rag")
    words = [
        "--model",
        "model",
        "--corpus",
        "corpus.jsonl",
        "retrieval.top_k=2",
        "decode.max_new_tokens=16",
    ]
    found = []
    for split in (["engine.tensor_parallel=2"], []):
        how = {"program": program} if split else {}
        with start_server_process(tmp_path, port, *words, "energy=none", *split, **how) as process:
            for question in QUESTIONS[:2]:
                answer = httpx.post(
                    f"http://127.0.0.1:{port}/v1/chat/completions", json=chat_body(question), timeout=60
                )
                found.append(answer.json()["choices"][0]["message"]["content"])
            process.send_signal(signal.SIGTERM)
            process.wait(60)
            process.reading.join()
            said = "\n".join(process.said)
            assert "ended: 2 answered" in said and "another rank" not in said
    assert found[:2] == found[2:]
