"""Workers under Ray that answer nothing real: killed, placed, held up; every question is answered once."""

import json
import os
import random
import re
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from contextlib import contextmanager
from functools import partial
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

from dlm_rag.decode.trace_file import AnswersFile
from dlm_rag.errors import ConfigError, CorpusError, RunError
from dlm_rag.questions import Question
from dlm_rag.workers import worker_pool as pool_module
from dlm_rag.workers.worker_pool import WorkerPlacement, WorkerPool, plan_workers, summarize_ray_error
from tests.support.fake_workers import FakeDecoderFactory, make_finished_rollout
from tests.support.ray_runs import gone, mark, processes, surroundings, workers  # noqa: F401 - fixtures
from tests.support.results import make_stamp
from tests.support.traces import HEADER

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(find_spec("ray") is None, reason="pip install 'dlm_rag[workers]'"),
]
PLACES = partial(plan_workers, "auto", device=torch.device("cpu"), weights=1)


def open_pool(crew: WorkerPool, **fake) -> list[dict]:
    return crew.open(FakeDecoderFactory(**fake), 4)


def asked(count: int, prefix: str = "q", **texts: str) -> list[Question]:
    """Questions; `texts`: of some of them, what the fake is to do."""
    return [Question(f"{prefix}{n}", texts.get(f"{prefix}{n}", "Who?")) for n in range(count)]


def test_summaries_of_deaths_have_no_ids_of_ray():
    from ray import exceptions

    name = "0123456789abcdef01000000"
    for error in (
        exceptions.ActorUnavailableError("rpc error: peer closed", bytes.fromhex(name[:8] * 4)),
        exceptions.WorkerCrashedError(),
        exceptions.LocalRayletDiedError(),
        exceptions.ObjectLostError(name, None, ""),
        exceptions.OwnerDiedError(name, None, ""),
        exceptions.RpcError(f"actor {name} is of another job"),
    ):
        said = summarize_ray_error(error)
        assert said and not re.search("[0-9a-f]{16}", said) and "/tmp/ray" not in said, said


def test_forty_kills_lose_nothing_and_repeat_nothing(tmp_path, mark):
    """Workers are killed while they start, load and answer; each run has files of its own."""
    rng, kills, runs = random.Random(0), [], 0

    def kill():
        """At some time after the answer that brought it about; whoever is there then, ready or not."""
        time.sleep(rng.random() * 0.2)
        if alive := workers(mark):
            os.kill(rng.choice(alive), signal.SIGKILL)
            kills.append(time.monotonic())

    with WorkerPool("local", WorkerPlacement(3, 1, 3)) as crew:
        while len(kills) < 40:
            files = tmp_path / f"{runs}.jsonl", tmp_path / f"{runs}-trace.jsonl"
            file, questions = AnswersFile(*files), asked(300)
            file.open_run(make_stamp(), HEADER)
            open_pool(crew, places=4, seconds=0.01)
            killer = threading.Thread(target=kill)
            for rollout in crew.stream(questions, make_finished_rollout):
                file.append(rollout)
                if len(kills) < 40 and not killer.is_alive() and rng.random() < 0.1:
                    killer = threading.Thread(target=kill)
                    killer.start()
            if killer.ident is not None:
                killer.join()
            file.close()
            runs += 1
            for path in files:
                lines = [json.loads(line) for line in path.read_text().splitlines()]
                lines = [line for line in lines if "id" in line]
                assert sorted(line["id"] for line in lines) == sorted(q.id for q in questions)
                assert not [line for line in lines if line.get("error")]
    assert len(kills) == 40 and runs > 1
    assert gone(mark), processes(mark)


def test_what_kills_its_workers_is_given_up_and_the_others_are_answered(mark, caplog):
    with WorkerPool("local", WorkerPlacement(2, 1, 2)) as crew:
        open_pool(crew)
        found = {r.id: r for r in crew.stream(asked(30, q7="kill"), make_finished_rollout)}
        assert len(found) == 30 and "answered" in crew.describe() and "2 workers" in crew.describe()
        failed = {name: rollout.error for name, rollout in found.items() if rollout.error}
        assert {r.seconds["denoise"] for r in found.values() if not r.error} == {1 / 2}, "two work at once"
        assert set(failed) == {"q7"} and "a worker died (" in caplog.text
        assert failed["q7"].startswith("workers died with this question alone: ")
        with pytest.raises(CorpusError, match="^the corpus has changed$"):
            list(crew.stream(asked(3, "r", r1="raise"), make_finished_rollout))
    with (
        pytest.raises(RunError, match=r"a worker failed before it was ready .*log is in /tmp") as end,
        WorkerPool("local", WorkerPlacement(1, 1, 1)) as crew,
    ):
        open_pool(crew, dies_while_loading=True)
    logs = Path(str(end.value).rpartition(" ")[2])
    assert logs.is_dir()
    shutil.rmtree(logs)
    assert gone(mark)


def port() -> int:
    """A free one below those that Ray gives to its workers."""
    for number in range(9400, 9900):
        with socket.socket() as probe:
            if probe.connect_ex(("127.0.0.1", number)):
                return number
    raise AssertionError("no port is free")


@contextmanager
def cluster(monkeypatch, nodes: int, cores_of_head: int = 1):
    """A cluster of nodes of one core on this machine: its address, itself, its nodes except the head."""
    for name, value in {
        "RAY_USAGE_STATS_ENABLED": "0",
        "GRPC_ENABLE_FORK_SUPPORT": "0",  # see docs/how-to/use-many-devices.md
        "RAY_health_check_initial_delay_ms": "500",
        "RAY_health_check_period_ms": "300",
        "RAY_health_check_failure_threshold": "3",
    }.items():
        monkeypatch.setenv(name, value)
    from ray.cluster_utils import Cluster

    own = {"num_cpus": 1, "object_store_memory": 100 * 2**20}
    head = own | {"ray_client_server_port": (at := port()), "include_dashboard": False}
    head["num_cpus"] = cores_of_head
    there = Cluster(initialize_head=True, head_node_args=head)
    try:
        yield f"ray://127.0.0.1:{at}", there, [there.add_node(**own) for _ in range(nodes - 1)]
    finally:
        there.shutdown()


def test_a_node_that_is_killed_and_one_that_others_hold(monkeypatch, mark, caplog):
    with cluster(monkeypatch, 3) as (address, there, others):
        with WorkerPool(address, PLACES) as crew:
            machines = open_pool(crew)
            assert machines == [{"name": "a machine", "sharing": 1}]
            found = []
            for rollout in crew.stream(questions := asked(600), make_finished_rollout):
                found.append(rollout)
                if len(found) == 60:
                    there.remove_node(others[0], allow_graceful=False)
                    there.add_node(num_cpus=1, object_store_memory=100 * 2**20)
            assert sorted(r.id for r in found) == sorted(q.id for q in questions)
            assert not [r for r in found if r.error]
        hold = (
            "import ray, sys, time\n"
            "ray.init(sys.argv[1], log_to_driver=False)\n"
            "print(ray.get(ray.util.placement_group([{'CPU': 1}]).ready()), flush=True)\n"
            "time.sleep(600)\n"
        )
        other = subprocess.Popen([sys.executable, "-c", hold, address], stdout=subprocess.PIPE)
        monkeypatch.setattr(pool_module, "PLACEMENT_TIMEOUT_SECONDS", 10.0)  # the other worker has to start
        try:
            assert other.stdout.readline()
            with (
                pytest.raises(ConfigError, match="no place for 1 of 3 workers within 10 s"),
                WorkerPool(address, PLACES) as crew,
            ):
                open_pool(crew)
        finally:
            other.kill()
            other.wait()


def test_the_run_ends_once_no_node_is_left_for_a_worker(monkeypatch, mark):
    with (
        cluster(monkeypatch, 2, cores_of_head=0) as (address, there, others),
        WorkerPool(address, PLACES) as pool,
    ):
        open_pool(pool)
        monkeypatch.setattr(pool_module, "ANSWER_TIMEOUT_SECONDS", 3.0)
        rollouts = pool.stream(asked(600), make_finished_rollout)
        next(rollouts)
        there.remove_node(others[0], allow_graceful=False)
        with pytest.raises(RunError, match="no worker of Ray at .* has answered"):
            list(rollouts)


def test_a_cluster_that_is_not_there_is_a_sentence_at_once():
    with (
        pytest.raises(ConfigError, match="can be reached at ray://127.0.0.1:1"),
        WorkerPool("ray://127.0.0.1:1", PLACES) as crew,
    ):
        open_pool(crew)
