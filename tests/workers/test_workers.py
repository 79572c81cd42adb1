"""Workers without Ray: who is asked what, how many there are, what one of them does."""

import asyncio
import json
import pickle
import shutil
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from dlm_rag import machine
from dlm_rag.commands.answer_job import make_decoder_factory, open_engines, plan_answer_job
from dlm_rag.commands.prepare_decoder import check_weights_fit, prepare_decoder
from dlm_rag.config import Config
from dlm_rag.decode.trace_file import read_trace
from dlm_rag.errors import ConfigError, CorpusError
from dlm_rag.model.checkpoint import open_checkpoint
from dlm_rag.model.denoiser import Denoiser
from dlm_rag.model.denoiser_config import DenoiserConfig
from dlm_rag.model.quantize import count_weight_bytes
from dlm_rag.questions import Question
from dlm_rag.workers.worker_pool import Worker, WorkerPlacement, describe_local_node, plan_workers
from tests.support.fake_workers import FakeDecoderFactory
from tests.support.rollouts import strip_times_and_confidences
from tests.support.tiny_models import byte_tokenizer, tiny_denoiser

CPU = torch.device("cpu")
ASKED = [Question(f"q{n}", "Who?") for n in range(40)]


@pytest.mark.parametrize(("system", "counted"), [("linux", 3 * 2**20), ("darwin", 3 * 2**30)])
def test_peak_memory_is_in_bytes_whatever_the_system_counts(monkeypatch, system, counted):
    monkeypatch.setattr("resource.getrusage", lambda _: SimpleNamespace(ru_maxrss=counted))
    monkeypatch.setattr("sys.platform", system)
    assert machine.get_peak_memory_bytes() == 3 * 2**30


GPU = torch.device("cuda")


@pytest.mark.parametrize(
    ("workers", "device", "weights", "placement"),
    [
        ("auto", CPU, 10**6, (8, 1, 8)),
        ("auto", CPU, 4 * 10**9, (4, 2, 4)),  # twice the weights for each
        ("auto", CPU, 40 * 10**9, (1, 8, 1)),
        ("3", CPU, 10**6, (3, 2, 3)),
        ("16", CPU, 10**6, (16, 1, 16)),
        ("auto", GPU, 10**9, (4, 2, 1, 1)),
        ("2", GPU, 10**9, (2, 4, 1, 1)),
        ("5", CPU, 16 * 10**9, "workers=5 load 16 GB of weights each, and 32 GB"),
        ("5", GPU, 10**9, "workers=5 load 1.0 GB .* and 4 GPUs are free here"),
        ("auto", torch.device("cuda:1"), 10**9, "model.device=cuda:1 is one"),
        ("auto", torch.device("mps"), 10**9, "model.device=mps is one"),
    ],
    ids=str,
)
def test_workers_share_the_cores_and_the_memory_of_this_machine(
    monkeypatch, workers, device, weights, placement
):
    monkeypatch.setattr("joblib.cpu_count", lambda: 8)
    monkeypatch.setattr("dlm_rag.workers.worker_pool.read_host_memory", lambda: {"available": 32 * 10**9})
    monkeypatch.setattr("torch.cuda.device_count", lambda: 4)
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)

    def plan():
        return plan_workers(workers, [describe_local_node(device)], device, weights)

    if isinstance(placement, str):
        with pytest.raises(ConfigError, match=placement):
            plan()
        return
    assert plan() == WorkerPlacement(*placement)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    assert plan().threads_per_worker == 1, "no more threads than one process would take"


def test_workers_of_a_cluster_are_as_many_as_its_nodes_offer(monkeypatch):
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    gpus = [{"CPU": 16.0, "GPU": 4.0, "memory": 1e9}, {"CPU": 8.0, "GPU": 4.0, "memory": 1e9}]
    cores = [{"CPU": 4.0, "memory": 8e9}, {"CPU": 8.0, "memory": 64e9}, {"memory": 64e9}]
    assert plan_workers("auto", gpus, GPU, 10**12) == WorkerPlacement(8, 2, 1, gpus_per_worker=1)
    assert plan_workers("auto", cores, CPU, 10**9) == WorkerPlacement(12, 1, 8)
    assert plan_workers("auto", cores, CPU, 2 * 10**9) == WorkerPlacement(10, 1, 8)
    for nodes, device in ((gpus, CPU), (cores, GPU), ([{}], CPU)):
        with pytest.raises(ConfigError, match=f"GPUs and . nodes for model.device={device}"):
            plan_workers("auto", nodes, device, 1)


def test_without_ray_the_remedy_is_a_command(monkeypatch):
    monkeypatch.setattr("dlm_rag.commands.answer_job.find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"pip install 'dlm_rag\[workers\]'"):
        plan_answer_job(Config(out="answers.jsonl", workers="2"), [])


@pytest.mark.parametrize("tied", [False, True])
def test_bytes_of_weights_are_those_of_the_denoiser(tied):
    shape = DenoiserConfig(vocab_size=300, num_hidden_layers=3, tie_word_embeddings=tied, qk_norm=True)
    with torch.device("meta"):
        numbers = sum(p.numel() for p in Denoiser(shape).parameters())
    assert count_weight_bytes(shape, 2) == 2 * numbers


@pytest.fixture
def config(tmp_path, corpus_file) -> Config:
    tiny_denoiser().save_pretrained(tmp_path / "model", eos_token_id=257)
    byte_tokenizer().save_pretrained(tmp_path / "model")
    found = Config(out=str(tmp_path / "a.jsonl"), trace=str(tmp_path / "t.jsonl"))
    return replace(
        found,
        model=replace(found.model, path=str(tmp_path / "model")),
        retrieval=replace(found.retrieval, corpus=str(corpus_file), top_k=2),
        decode=replace(found.decode, max_new_tokens=8, batch_size=3),
    )


def test_weights_that_a_device_cannot_hold_are_refused_before_they_are_read(config, monkeypatch):
    checkpoint = open_checkpoint(config.model.path)
    size = count_weight_bytes(checkpoint.config, 4)
    monkeypatch.setattr("dlm_rag.machine.get_device_memory_bytes", lambda device: size - 1.0)
    with pytest.raises(
        ConfigError, match=r"take 0.1 MB|take \d+ kB in float32, and this cpu has .*bfloat16"
    ):
        prepare_decoder(config, ASKED)
    check_weights_fit(checkpoint, [CPU], torch.bfloat16)
    monkeypatch.setattr("dlm_rag.machine.get_device_memory_bytes", lambda device: size / 2 - 1)
    with pytest.raises(ConfigError, match="of memory: set model.quantize=int8, or choose a smaller model"):
        check_weights_fit(checkpoint, [CPU], torch.bfloat16)
    check_weights_fit(checkpoint, [CPU], torch.bfloat16, quantize="int8")
    monkeypatch.setattr("dlm_rag.machine.get_device_memory_bytes", lambda device: 1.0)
    with pytest.raises(ConfigError, match="in bfloat16, .* of memory: choose a smaller model"):
        check_weights_fit(checkpoint, [CPU], torch.bfloat16, quantize="int8")


@pytest.fixture
def make_worker(monkeypatch):
    """Makes a worker in this process, which keeps its environment."""
    for name in ("OMP_NUM_THREADS", "NUMBA_NUM_THREADS"):
        monkeypatch.setenv(name, "1")
    return lambda factory: Worker(factory, threads=1, workers_per_machine=2)


def make_factory(config, questions=ASKED):
    """What a job sends to its workers, through pickle as to another process."""
    return pickle.loads(pickle.dumps(make_decoder_factory(prepare_decoder(config, questions))))


def open_worker(make_worker, factory):
    worker = make_worker(factory)
    return worker, asyncio.run(worker.open())


def answer_all(worker, questions):
    async def gather():
        return await asyncio.gather(*(worker.answer(question) for question in questions))

    return asyncio.run(gather())


def test_worker_answers_equal_those_of_a_decoder(config, make_worker, tmp_path):
    job = plan_answer_job(config, ASKED)
    with open_engines(None, [job.prepared]) as engines:
        job.run(engines)
    expected = {
        rollout.id: strip_times_and_confidences(rollout) for rollout in read_trace(tmp_path / "t.jsonl")
    }
    worker, described = open_worker(make_worker, make_factory(replace(config, record_provisional=True)))
    stamp = json.loads((tmp_path / "a.jsonl.run.json").read_text())
    assert [described] == stamp["machines"], "stamped alike"
    answers = answer_all(worker, ASKED)
    for question, answer in zip(ASKED, answers, strict=True):
        rollout, other = answer[0], expected[question.id]
        assert all((step.guesses is None) == (step.step == 0) for step in rollout.steps)
        assert rollout.citations and strip_times_and_confidences(rollout).steps == other.steps
        assert (rollout.response, rollout.settings) == (other.response, other.settings)
    assert answers[-1][1].describe().startswith("cpu float32")


def test_a_worker_with_another_corpus_names_its_node(config, make_worker, corpus_file):
    factory = make_factory(config)
    assert Path(factory.args[0].retrieval.corpus).is_absolute()
    corpus_file.write_text(corpus_file.read_text().replace("Tacoma", "Oslo"))
    with pytest.raises(ConfigError, match=r"on \S+: corpus is \w+, and \w+ in the main process"):
        open_worker(make_worker, factory)
    corpus_file.unlink()
    with pytest.raises(CorpusError, match=r"on \S+: .*corpus.jsonl"):
        open_worker(make_worker, factory)


def test_a_worker_with_other_code_is_refused_before_it_loads(config, make_worker, monkeypatch):
    factory = make_factory(config)
    monkeypatch.setattr("dlm_rag.commands.prepare_decoder.PreparedDecoder.load", None)
    monkeypatch.setattr("dlm_rag.commands.answer_job.compute_code_digest", lambda: "another")
    with pytest.raises(ConfigError, match=r"on \S+: dlm_rag is \S+ \(another\)"):
        open_worker(make_worker, factory)


def test_code_digest_depends_on_every_byte_and_name_and_no_folder(tmp_path):
    found = set()
    for name, text in (("a", "x = 1"), ("a", "x = 2"), ("b", "x = 2")):
        package = tmp_path / f"{len(found)}" / "package"
        (package / "room").mkdir(parents=True)
        (package / "room" / f"{name}.py").write_text(text)
        found.add(machine.compute_code_digest(package))
        same = shutil.copytree(package, tmp_path / f"{len(found)}-moved")
        (same / "cache.pyc").touch()
        assert machine.compute_code_digest(same) in found
    assert len(found) == 3


def test_an_error_of_the_engine_fails_every_call(make_worker):
    worker = make_worker(FakeDecoderFactory(places=2))

    async def gather():
        asked = [*ASKED[:5], Question("bad", "raise")]
        return await asyncio.gather(*map(worker.answer, asked), return_exceptions=True)

    answers = asyncio.run(gather())
    assert [isinstance(answer, CorpusError) for answer in answers] == [False] * 4 + [True] * 2
    assert answers[0][1].answers == 2, "batches of two"
