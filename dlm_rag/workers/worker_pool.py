"""Workers under Ray, which restarts those that die: how many, with which cores, GPU and memory each.

They answer questions and know of no files. What a worker imports before it has set its number of threads is
light: numpy, torch and numba read it when they load.
"""

from __future__ import annotations

import asyncio
import logging
import os
import platform
import re
import secrets
import shutil
import signal
import socket
import sys
import tempfile
import warnings
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from functools import reduce
from operator import add
from typing import TYPE_CHECKING, Any, NamedTuple

from dlm_rag.errors import ConfigError, RunError, UserError, summarize_error
from dlm_rag.machine import get_device_memory_bytes, read_host_memory
from dlm_rag.progress import format_bytes, show_status

if TYPE_CHECKING:
    import torch

    from dlm_rag.decode.rollout import Rollout
    from dlm_rag.engine.engine import Decoder, DecoderStats
    from dlm_rag.questions import Question

    Nodes = Sequence[Mapping[str, float]]  # the resources of each as Ray names them
    WorkerAnswer = tuple[Rollout, DecoderStats, str]  # with the statistics of its machine and process
    # Makes the decoder of a job, for so many workers on the machine; returns it with `describe_machine`. It
    # is pickled, so it comes from a module that workers can import.
    DecoderFactory = Callable[[int], tuple[Decoder, dict[str, str | int]]]

log = logging.getLogger(__name__)

MAX_RESTARTS, MAX_RETRIES = 100, 1  # of a worker; of what it was asked when it died
PLACEMENT_TIMEOUT_SECONDS = 60.0  # in which a worker must find a place
CONNECT_TIMEOUT_SECONDS = 10.0
OBJECT_STORE_BYTES = 100 * 2**20  # weights never pass through it
ANSWER_TIMEOUT_SECONDS = 1800.0  # in which one of all that is asked must be answered
CPU_MEMORY_PER_WEIGHT_BYTE = 2  # memory of a worker on a CPU, in sizes of its weights


class WorkerPlacement(NamedTuple):
    """The workers of a run; gpus_per_worker: 0 or 1."""

    num_workers: int
    threads_per_worker: int
    workers_per_machine: int
    gpus_per_worker: int = 0


def describe_local_node(device: torch.device) -> dict[str, float]:
    """The resources of this machine as Ray names them; GPUs only if they are to be used."""
    import torch
    from joblib import cpu_count

    memory = read_host_memory().get("available") or get_device_memory_bytes(torch.device("cpu"))
    gpus = torch.cuda.device_count() if device.type == "cuda" else 0
    return {"CPU": cpu_count(), "memory": memory, "GPU": gpus}


def plan_workers(workers: str, nodes: Nodes, device: torch.device, weights: int) -> WorkerPlacement:
    """So many workers, or as many as the nodes have GPUs or, for the CPU, cores and memory for.

    weights: bytes that each loads. Those of a node take as many threads as one would. Raises `ConfigError`.
    """
    if device.type == "mps" or device.index is not None:
        raise ConfigError(
            f"workers={workers} uses every visible device, model.device={device} is one: set cpu or cuda"
        )
    kind = "GPU" if device.type == "cuda" else "CPU"
    gpus = sum(int(node.get("GPU", 0)) for node in nodes)
    nodes = [node for node in nodes if node.get(kind, 0) >= 1]
    if not nodes or (kind == "CPU" and gpus):
        raise ConfigError(
            f"workers={workers}: {gpus} GPUs and {len(nodes)} nodes for model.device={device}: give the "
            "command on a machine like the workers', set model.device, or start nodes with --num-cpus"
        )
    counts = [int(node[kind]) for node in nodes]
    if kind == "CPU":
        need = CPU_MEMORY_PER_WEIGHT_BYTE * max(1, weights)
        counts = [max(1, min(int(node["CPU"]), int(node["memory"] // need))) for node in nodes]
    if workers != "auto":
        count, memory = int(workers), sum(node["memory"] for node in nodes)
        if count > (gpus if kind == "GPU" else memory / max(1, weights)):
            raise ConfigError(
                f"workers={count} load {format_bytes(weights)} of weights each, and {format_bytes(memory)} "
                f"of memory and {gpus} GPUs are free here: set fewer"
            )
        counts = [count]
    cores = min(int(node.get("CPU", 1)) // own for node, own in zip(nodes, counts, strict=True))
    wanted = os.environ.get("OMP_NUM_THREADS", "")
    threads = min(cores, int(wanted)) if wanted.isdigit() and int(wanted) else cores
    largest = 1 if kind == "GPU" else max(counts)
    return WorkerPlacement(sum(counts), max(1, threads), largest, int(kind == "GPU"))


class Worker:
    """The Ray actor: an engine in a process of its own.

    Ray calls `answer` for each question. The engine steps while any is unanswered: the batch never drains.
    """

    def __init__(self, factory: DecoderFactory, threads: int, workers_per_machine: int) -> None:
        os.environ |= dict.fromkeys(("OMP_NUM_THREADS", "NUMBA_NUM_THREADS"), str(threads))
        self._factory, self._workers_per_machine = factory, workers_per_machine
        self._decoder: Decoder | None = None
        self._waiting: deque[Question] = deque()
        self._answers: dict[str, asyncio.Future[WorkerAnswer]] = {}
        self._stepping: asyncio.Task[None] | None = None

    async def open(self) -> dict[str, str | int]:
        """Loads the model, once, and describes the machine. Raises `UserError` that names it."""
        if self._decoder is None:
            try:
                self._decoder, self._machine = self._factory(self._workers_per_machine)
            except UserError as error:
                raise type(error)(f"on {platform.node()}: {error}") from None
            self._engine = self._decoder.new_engine()
        return self._machine

    async def answer(self, question: Question) -> WorkerAnswer:
        """Raises whatever the engine raises, as `UserError`."""
        await self.open()  # where Ray has begun this worker again
        self._waiting.append(question)
        answer = self._answers[question.id] = asyncio.get_running_loop().create_future()
        if self._stepping is None or self._stepping.done():
            self._stepping = asyncio.create_task(self._step_until_idle())
        return await answer

    async def _step_until_idle(self) -> None:
        assert self._decoder is not None
        process = f"{platform.node()}:{os.getpid()}"
        while self._answers:
            try:
                while self._waiting and self._engine.capacity:
                    self._engine.submit(self._waiting.popleft(), guesses=self._decoder.record_provisional)
                finished = [event.rollout for event in self._engine.step() if event.finished]
            except Exception as error:
                for answer in self._answers.values():
                    answer.set_exception(error)
                self._answers.clear()
                self._waiting.clear()
                return
            for rollout in finished:
                self._answers.pop(rollout.id).set_result((rollout, self._decoder.stats, process))
            await asyncio.sleep(0)  # Ray's calls come in and go out


class WorkerPool(AbstractContextManager["WorkerPool"]):
    """The workers of a run; leaving the context ends all that it started.

    address: "local" starts Ray here, ray://HOST:PORT joins a cluster; plan: by the resources of its nodes.
    """

    def __init__(self, address: str, plan: WorkerPlacement | Callable[[Nodes], WorkerPlacement]) -> None:
        self._address, self._plan = address, plan
        self._log_folder = ""  # none of a cluster, which others have started
        self._workers: list[Any] = []  # handles of Ray, of this job
        self._placement: WorkerPlacement | None = None  # once Ray has started
        self._stats: dict[str, DecoderStats] = {}  # of this job by process, those that died too

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        if "ray" not in sys.modules:  # nothing was started
            return
        show_status("ending the workers")
        with suppress(Exception):
            sys.modules["ray"].shutdown()
        if self._log_folder and not isinstance(error, RunError):
            shutil.rmtree(self._log_folder, ignore_errors=True)
        show_status()

    def open(self, factory: DecoderFactory, batch_size: int) -> list[dict[str, str | int]]:
        """Makes the workers of a job; returns their machines, each once. The first call starts Ray.

        Raises `ConfigError` if a place is missing, what `factory` raises, `RunError` for workers that die.
        """
        import ray

        self._batch_size, self._stats = batch_size, {}
        if self._placement is None:
            show_status("starting the workers")
            if isinstance(self._plan, WorkerPlacement):
                self._placement, self._log_folder = self._plan, start_ray(self._plan)
            else:
                self._placement = self._plan(join_ray(self._address))
        plan = self._placement
        show_status("opening the workers")
        with self._explain_ray_errors():
            for worker in self._workers:
                ray.kill(worker)
            actor: Any = ray.remote(Worker).options(
                num_cpus=1, num_gpus=plan.gpus_per_worker,
                max_restarts=MAX_RESTARTS, max_task_retries=MAX_RETRIES,
            )  # fmt: skip
            self._workers = [
                actor.remote(factory, plan.threads_per_worker, plan.workers_per_machine)
                for _ in range(plan.num_workers)
            ]
            calls = [worker.__ray_ready__.remote() for worker in self._workers]
            _, missing = ray.wait(calls, num_returns=len(calls), timeout=PLACEMENT_TIMEOUT_SECONDS)
            if missing:
                raise ConfigError(
                    f"no place for {len(missing)} of {len(calls)} workers within "
                    f"{PLACEMENT_TIMEOUT_SECONDS:.0f} s: the cluster is in use; wait, or set no workers"
                )
            machines = ray.get([worker.open.remote() for worker in self._workers])
        show_status()
        return [machine for n, machine in enumerate(machines) if machine not in machines[:n]]

    def stream(
        self, questions: Iterable[Question], make_failed_rollout: Callable[[Question, str], Rollout]
    ) -> Iterator[Rollout]:
        """One finished rollout for each question, as they come.

        Ray asks a restarted worker again. Where that dies too, its questions are asked at the end, each
        alone; make_failed_rollout makes the rollout of one with which workers die again.
        """
        lost = yield from self._answer([*questions], self._batch_size + max(1, self._batch_size // 2))
        lost = yield from self._answer(lost, 1)
        for question in lost:
            yield make_failed_rollout(question, f"workers died with this question alone: {self._cause}")

    def describe(self) -> str:
        """Returns the number of workers, and their statistics added up."""
        count = f"{len(self._workers)} worker{'s' * (len(self._workers) != 1)}"
        return f"{count}, {reduce(add, self._stats.values()).describe()}" if self._stats else count

    def _answer(self, questions: list[Question], slots: int) -> Generator[Rollout, None, list[Question]]:
        """Yields rollouts, each worker with at most `slots` questions; returns what workers died with."""
        from ray.exceptions import ActorDiedError, ActorUnavailableError
        from ray.util import ActorPool

        waiting, busy = {each.id: each for each in questions}, min(len(self._workers), len(questions))
        pool = ActorPool(self._workers * min(slots, -(-len(questions) // len(self._workers))))
        for question in questions:
            pool.submit(lambda worker, asked: worker.answer.remote(asked), question)
        while pool.has_next():
            with self._explain_ray_errors():
                try:
                    rollout, stats, process = pool.get_next_unordered(ANSWER_TIMEOUT_SECONDS)
                except (ActorDiedError, ActorUnavailableError) as error:
                    self._cause = summarize_ray_error(error)
                    log.warning("a worker died (%s): its questions are asked again", self._cause)
                    continue
            self._stats[process] = stats
            del waiting[rollout.id]
            for step in rollout.steps:  # all workers count the same second
                step.seconds = {name: spent / busy for name, spent in step.seconds.items()}
            yield rollout
        return [*waiting.values()]

    @contextmanager
    def _explain_ray_errors(self) -> Iterator[None]:
        """Raises what a worker raises, and `RunError` for workers that cannot work."""
        from ray.exceptions import RayError, RaySystemError, RayTaskError

        try:
            yield
        except (TimeoutError, ConnectionError) as error:
            reason = summarize_ray_error(error)
            raise RunError(f"no worker of Ray at {self._address} has answered: {reason}") from None
        except RayError as error:
            if isinstance(error, RayTaskError) and not isinstance(error.cause, RaySystemError):
                raise error.cause from error  # keeps the worker's traceback
            logs = f"; its log is in {self._log_folder}" if self._log_folder else ""
            reason = summarize_ray_error(error)
            raise RunError(f"a worker failed before it was ready ({reason}){logs}") from None


def summarize_ray_error(error: Exception) -> str:
    """The first sentence, without Ray's ids."""
    first = summarize_error(error).partition(". ")[0]
    return re.sub(r"\b[0-9a-f]{16,}\b ?", "", first)[:200]


def start_ray(placement: WorkerPlacement) -> str:
    """Starts Ray for this process alone; returns the folder of its logs. Raises `RunError`."""
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    # Ray's ports are open to the network: only this run knows the token, which Ray's import reads.
    if "ray" not in sys.modules and "RAY_AUTH_MODE" not in os.environ:
        os.environ |= {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(32)}
    folder = tempfile.mkdtemp(prefix="dlm_rag-", dir="/tmp")  # a short path, for sockets
    _init_ray(
        RunError(f"Ray does not start; its logs are in {folder}"), address="local",
        num_cpus=placement.num_workers, num_gpus=placement.num_workers * placement.gpus_per_worker,
        include_dashboard=False, object_store_memory=OBJECT_STORE_BYTES, _temp_dir=folder,
    )  # fmt: skip
    from ray._private import worker

    worker.print_to_stdstream = lambda *_, **__: None  # raylets report deaths there despite log_to_driver
    return folder


def join_ray(address: str) -> Nodes:
    """Joins a running cluster; returns its nodes. Raises `ConfigError` if there is none."""
    failure = ConfigError(f"no Ray cluster can be reached at {address}: start it, or correct the address")
    host, _, port = address.removeprefix("ray://").rstrip("/").rpartition(":")
    try:  # Ray itself waits half a minute
        socket.create_connection((host.strip("[]"), int(port)), timeout=CONNECT_TIMEOUT_SECONDS).close()
    except (OSError, ValueError):
        raise failure from None
    with warnings.catch_warnings(action="ignore"):
        _init_ray(failure, address=address)
    import ray

    return [node["Resources"] for node in ray.nodes() if node["Alive"]]


def _init_ray(failure: RunError | ConfigError, **options: Any) -> None:
    """Raises `failure`, with Ray's reason. SIGTERM and Ctrl-C keep their meaning, which Ray changes."""
    handlers = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        import ray

        ray.init(log_to_driver=False, logging_level=logging.CRITICAL, **options)
    except Exception as error:
        raise type(failure)(f"{failure} ({summarize_error(error)})") from None
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
