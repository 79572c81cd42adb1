"""Training of many processes on CUDA devices that are not there; run by tests/fake_cuda/test_fake_cuda.py.

torch's fake process group lets one process be any of them: its collectives have the shapes of real ones and
do nothing.
"""

import re
from contextlib import contextmanager
from math import prod
from unittest.mock import Mock

import pytest
import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore
from transformers import Qwen2Config, Qwen2ForCausalLM

from dlm_rag.commands.prepare_decoder import prepare_decoder
from dlm_rag.config import CONFIG_FOLDER, load_config
from dlm_rag.errors import ConfigError
from dlm_rag.questions import Question
from dlm_rag.training.distributed import DistributedContext, wrap_in_ddp
from dlm_rag.training.trainer import open_trainer
from tests.fake_cuda.checked_kernels import checked_kernels
from tests.fake_cuda.decode import STEP_TRAFFIC
from tests.fake_cuda.device import fake_cuda
from tests.fake_cuda.training import WAITS_BY_SETUP, record_step_traffic
from tests.support.passages import write_jsonl_file
from tests.support.setup_matrix import force_mixed_rewards, make_setup_trainer, write_setup_checkpoints
from tests.support.tiny_models import write_autoregressive_checkpoint
from tests.support.training_data import write_own_data

IN, OUT, WAIT = STEP_TRAFFIC
MANY = 128
PAINTERS = "Ada Brown,Bo Carver,Cleo Dunn,Dov Ellis,Ema Frost,Fay Grant,Gus Hale,Ivy Jones".split(",")
TOWNS = ["Marwick", "Norvale", "Oakham", "Penrose"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Checkpoints and data that training begins with."""
    folder = write_setup_checkpoints(tmp_path_factory.mktemp("checkpoints"))
    write_autoregressive_checkpoint(folder / "qwen", Qwen2Config, Qwen2ForCausalLM)
    write_own_data(folder)
    lives = "{} is painter number {} and lives in {}."
    people = [
        {"id": f"p{n}", "title": name, "contents": lives.format(name, n, TOWNS[n % 4])}
        for n, name in enumerate(PAINTERS)
    ]
    lands = [f"{town} is a town in the land of king {n}." for n, town in enumerate(TOWNS)]
    towns = [{"id": t, "title": t, "contents": land} for t, land in zip(TOWNS, lands, strict=True)]
    write_jsonl_file(folder / "titles.jsonl", people + towns)
    return folder


@pytest.fixture(autouse=True)
def in_copies(monkeypatch):
    """DDP asks the device for what it can only be told by contents: how its own sums went."""
    copies = wrap_in_ddp

    def summed(state, bucket):
        done = torch.futures.Future()
        done.set_result(bucket.buffer())
        return done

    def wrapped(objective):
        found = copies(objective)
        found.register_comm_hook(None, summed)
        found.logger = Mock()
        return found

    monkeypatch.setattr(
        "torch.nn.parallel.distributed._verify_param_shape_across_processes", lambda *_: True
    )
    monkeypatch.setattr("dlm_rag.training.distributed.wrap_in_ddp", wrapped)


@contextmanager
def last_of(count):
    """The process that comes last, which has the smallest shards; alone without a group."""
    if count > 1:
        dist.init_process_group("fake", store=FakeStore(), rank=count - 1, world_size=count)
    try:
        yield DistributedContext(count - 1, count, 0)
    finally:
        if count > 1:
            dist.destroy_process_group()


def shard_words(items):
    sizes = f"train.passage_sets_per_step={items}", f"train.prompts_per_step={items}"
    return ["model.device=cuda", "train.parallel=fsdp", *sizes]


def check_shards(trainer, count):
    """Of every tensor a process has no more rows than its share."""
    for name, value in trainer.denoiser.named_parameters():
        rows, *others = value.shape
        assert value.to_local().numel() <= -(-rows // count) * prod(others), name


SHARDED = ["sft in parts", "adapters", "experts", "rl"]


@pytest.mark.parametrize("way", SHARDED)
def test_a_step_in_shards_waits_for_the_device_once(tmp_path, monkeypatch, folder, way):
    force_mixed_rewards(monkeypatch)
    with last_of(2) as processes, fake_cuda() as seen, checked_kernels():
        trainer, _ = make_setup_trainer(tmp_path, folder, way, *shard_words(4), processes=processes)
        assert record_step_traffic(trainer, seen) == {IN: WAITS_BY_SETUP[way], OUT: 1, WAIT: 1}
        check_shards(trainer, 2)


def test_muon_on_more_processes_than_a_matrix_has_rows_is_refused(tmp_path, folder):
    with last_of(MANY) as processes, fake_cuda(), pytest.raises(ConfigError, match="train.optimizer=adamw"):
        make_setup_trainer(tmp_path, folder, "sft", *shard_words(MANY), processes=processes)


# The configs, at a toy size.

TRAINED, DECODED = [], []
for path in sorted(CONFIG_FOLDER.glob("*.yaml")):
    (TRAINED if "\ntrain:" in path.read_text() else DECODED).append(path.stem)
TOY = [
    "model.device=cuda", "decode.max_new_tokens=64", "retrieval.top_k=2", "train.passage_length=96",
    "train.world_passages=100", "train.eval_questions=1", "train.rows_per_set=2", "train.num_generations=2",
]  # fmt: skip
FRESH = ["train.hidden_size=256", "train.num_hidden_layers=2", "train.vocab_size=400"]
OWN = {
    "tiny": FRESH,
    "world": FRESH,
    "b200": ["model.path={folder}/qwen", "data.documents={folder}/web.jsonl"],
}  # fmt: skip


def toy_settings(name, folder, count):
    """What makes a config a toy on so many processes: one item for each in every part of a step."""
    plain = load_config(CONFIG_FOLDER / f"{name}.yaml", [])
    words = [*TOY, *OWN.get(name, [])]
    if plain.model.path is not None and not plain.model.path.startswith("dlm_rag"):
        words = ["model.path={folder}/plain", *words]
    train = plain.train
    parts = min(2, train.gradient_accumulation_steps)
    items = count * parts
    words.append(f"train.gradient_accumulation_steps={parts}")
    if train.objective == "pretrain":
        words += ["train.sequence_length=64", f"train.batch_tokens={items * 64}"]
    else:
        key = "prompts_per_step" if train.objective == "rl" else "passage_sets_per_step"
        words.append(f"train.{key}={items}")
    if train.objective == "rl":  # a rollout is as many steps as its canvas has tokens
        words.append("decode.max_new_tokens=8")
    return [word.format(folder=folder) for word in words]


def processes_of(name):
    """As many as the command in a config starts."""
    text = (CONFIG_FOLDER / f"{name}.yaml").read_text()
    return prod(int(number) for number in re.findall(r"--(?:nnodes|nproc-per-node) (\d+)", text))


@pytest.mark.parametrize("name", TRAINED)
def test_a_step_of_every_config_on_its_own_processes(tmp_path, monkeypatch, folder, name):
    force_mixed_rewards(monkeypatch)
    count = processes_of(name)
    config = load_config(CONFIG_FOLDER / f"{name}.yaml", toy_settings(name, folder, count))
    capability = (7, 0) if name.startswith("v100") else (9, 0)
    with last_of(count) as processes, fake_cuda(capability) as seen, checked_kernels():
        trainer, _ = open_trainer(config, tmp_path, processes)
        found = record_step_traffic(trainer, seen)
        assert found.pop(IN) and found == {OUT: 1, WAIT: 1}
        assert trainer.state.step == 1
        if trainer.train.parallel == "fsdp" and count > 1:
            check_shards(trainer, count)


@pytest.mark.parametrize("name", DECODED)
def test_steps_of_every_config_of_decoding(monkeypatch, corpus_file, folder, name):
    # Which waits for the contents of weights.
    monkeypatch.setattr("dlm_rag.model.checkpoint._check_values", lambda *_: None)
    model = "blocks" if name.startswith(("llada2", "fast_dllm_v2")) else "plain"
    words = ["decode.max_new_tokens=64", "model.device=cuda", f"retrieval.corpus={corpus_file}"]
    words.append(f"model.path={folder}/{model}")
    config = load_config(CONFIG_FOLDER / f"{name}.yaml", words)
    asked = [Question("1", "Who wrote Emma?")]
    with fake_cuda() as seen, checked_kernels():
        engine = prepare_decoder(config, asked).load().new_engine()
        engine.submit(asked[0])
        engine.step()
        seen.clear()
        engine.step()
        assert seen == STEP_TRAFFIC
