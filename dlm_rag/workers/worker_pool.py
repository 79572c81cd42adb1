"""Workers under Ray; those that die are replaced. They answer questions and know of no files."""

import logging
import shutil
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import reduce
from operator import add
from typing import TYPE_CHECKING, Any

from dlm_rag.decode.rollout import Rollout
from dlm_rag.engine.engine import DecoderStats
from dlm_rag.errors import ConfigError, RunError
from dlm_rag.progress import show_status
from dlm_rag.questions import Question
from dlm_rag.workers.placement import WorkerPlacement
from dlm_rag.workers.ray_cluster import join_ray, start_ray, summarize_ray_error
from dlm_rag.workers.worker import Worker, WorkerAnswer

if TYPE_CHECKING:
    from dlm_rag.workers.worker import DecoderFactory

log = logging.getLogger(__name__)

MAX_DEATHS = 5  # of workers with a question, the first with others, until it is given up
MAX_FAILED_STARTS = 5  # in a row, for each worker
PLACEMENT_TIMEOUT_SECONDS = 60.0  # in which a worker must find a place
RESTART_TIMEOUT_SECONDS = 1800.0  # in which one for a dead worker must find a place and load


class WorkerPool:
    """The workers of a run; leaving the context ends all that it started.

    address: "local" starts Ray on this machine for this run; ray://HOST:PORT joins a cluster, and `plan` is
    a function of the resources of its nodes.
    """

    def __init__(
        self,
        address: str,
        plan: WorkerPlacement | Callable[[Sequence[Mapping[str, float]]], WorkerPlacement],
    ) -> None:
        self._address, self._plan = address, plan
        self._log_folder: str | None = None  # "" for a cluster, which others have started
        self._workers: list[Any] = []  # handles of Ray
        self._ready: dict[Any, list[Question]] = {}  # opened workers, and what they have not answered
        self._calls: dict[Any, tuple[Any, Question | None]] = {}  # by reference; None opens the worker
        self._machines: list[dict[str, str | int]] = []
        self._stats: dict[Any, DecoderStats] = {}  # of this job by worker, those that died too
        self._failed_starts, self._cause = 0, ""  # in a row; of the last death

    def __enter__(self) -> "WorkerPool":
        return self

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        if self._log_folder is None:  # nothing was started
            return
        import ray

        show_status("ending the workers")
        with suppress(Exception):
            ray.shutdown()
        if self._log_folder and not isinstance(error, RunError):
            shutil.rmtree(self._log_folder, ignore_errors=True)
        show_status()

    def open(self, factory: "DecoderFactory", model: object, batch_size: int) -> list[dict[str, str | int]]:
        """Gets all workers ready for a job; returns their machines, each once. The first call starts them.

        Raises `ConfigError` if Ray or a place is missing, whatever `factory` raises, and `RunError` if
        workers keep dying.
        """
        self._job, self._batch_size = (factory, model), batch_size
        self._calls, self._ready, self._stats, self._machines = {}, {}, {}, []
        first = not self._workers
        if first:
            self._start()
        self._wait_for_places(first)
        show_status("opening the workers")
        for worker in self._workers:
            self._open(worker)
        while len(self._ready) < len(self._workers):
            self._poll()
        show_status()
        return self._machines

    def stream(
        self, questions: Iterable[Question], make_failed_rollout: Callable[[Question, str], Rollout]
    ) -> Iterator[Rollout]:
        """One finished rollout for each question, as they come.

        What a worker that died had not answered is asked at the end, each question alone;
        make_failed_rollout makes the rollout of one with which workers die again and again. Raises whatever
        a worker raises, and `RunError` once all have died and none finds a place again.
        """
        most = self._batch_size + max(1, self._batch_size // 2)
        lost = yield from self._answer(questions, most)
        for _ in range(1, MAX_DEATHS):
            lost = yield from self._answer(lost, 1)
        for question in lost:
            reason = f"{MAX_DEATHS} workers died with this question, all but the first with it alone"
            yield make_failed_rollout(question, f"{reason}: {self._cause}")

    def describe(self) -> str:
        """The number of workers, and their statistics added up."""
        count = f"{len(self._workers)} worker{'s' * (len(self._workers) != 1)}"
        return f"{count}, {reduce(add, self._stats.values()).describe()}" if self._stats else count

    def _start(self) -> None:
        """Starts or joins Ray, and starts the workers."""
        import ray

        show_status("starting the workers")
        self._log_folder = ""
        if isinstance(self._plan, WorkerPlacement):
            plan, self._log_folder = self._plan, start_ray(self._plan)
        else:
            join_ray(self._address)
            plan = self._plan([node["Resources"] for node in ray.nodes() if node["Alive"]])
        actor = ray.remote(Worker).options(num_cpus=1, num_gpus=plan.gpus_per_worker)
        self._make_worker = lambda: actor.remote(plan.threads_per_worker, plan.workers_per_machine)
        self._workers = [self._make_worker() for _ in range(plan.num_workers)]

    def _wait_for_places(self, first: bool) -> None:
        """Goes on with the workers that run; raises `ConfigError` if not all do at first, or none later."""
        import ray

        calls = {worker.__ray_ready__.remote(): worker for worker in self._workers}
        placed, missing = ray.wait([*calls], num_returns=len(calls), timeout=PLACEMENT_TIMEOUT_SECONDS)
        if missing:
            seconds = f"{PLACEMENT_TIMEOUT_SECONDS:.0f} s"
            message = f"no place for {len(missing)} of {len(calls)} workers within {seconds}"
            if first or not placed:
                raise ConfigError(
                    f"{message}: the cluster is in use (`ray status`); wait, or set no workers"
                )
            log.warning("%s: the others go on", message)
        self._workers = [calls[call] for call in placed]

    def _open(self, worker: Any) -> None:
        self._calls[worker.open.remote(*self._job)] = worker, None

    def _answer(self, questions: Iterable[Question], most: int) -> Generator[Rollout, None, list[Question]]:
        """Rollouts as they come, each worker with at most `most` questions and the last ones shared evenly.

        Returns what dead workers had not answered.
        """
        waiting, lost = deque(questions), list[Question]()
        while waiting or any(self._ready.values()):
            unanswered = len(waiting) + sum(map(len, self._ready.values()))
            share = min(most, -(-unanswered // max(1, len(self._ready))))
            for worker, held in self._ready.items():
                while waiting and len(held) < share:
                    held.append(waiting.popleft())
                    self._calls[worker.answer.remote(held[-1])] = worker, held[-1]
            found = self._poll()
            if isinstance(found, WorkerAnswer):
                for level, text in found.warnings:
                    log.log(level, "%s", text)
                yield found.rollout
            else:
                lost += found
        return lost

    def _poll(self) -> WorkerAnswer | list[Question]:
        """Waits for a call to end: an answer, or the questions of a worker that died.

        Raises what a worker raises, and `RunError` for workers that cannot work.
        """
        import ray
        from ray.exceptions import RayError, RaySystemError, RayTaskError

        try:
            ended, _ = ray.wait([*self._calls], timeout=RESTART_TIMEOUT_SECONDS)
            if not ended and not any(self._ready.values()):
                minutes = f"{RESTART_TIMEOUT_SECONDS / 60:.0f} minutes"
                raise RunError(f"no worker of Ray at {self._address} was ready within {minutes}")
            if not ended:
                return []
            worker, question = self._calls.pop(ended[0])
            result = ray.get(ended[0])
        except ConnectionError as error:
            raise RunError(f"Ray at {self._address} is gone ({summarize_ray_error(error)})") from None
        except RayTaskError as error:
            if isinstance(error.cause, RaySystemError):
                raise RunError(f"a worker cannot read its task: {summarize_ray_error(error)}") from None
            raise error.cause from error  # keeps the worker's traceback
        except RayError as error:
            self._cause = summarize_ray_error(error)
            return self._replace(worker)
        if question is None:
            self._ready[worker], self._failed_starts = [], 0
            self._machines += [result] * (result not in self._machines)
            return []
        answer: WorkerAnswer = result
        self._ready[worker].remove(question)
        self._stats[worker] = answer.stats
        return answer

    def _replace(self, worker: Any) -> list[Question]:
        """Starts a worker for one that died; returns what that had not answered. Raises `RunError`."""
        if worker in self._ready:
            log.warning("a worker died (%s): it is restarted and its questions asked again", self._cause)
        elif (failed := self._failed_starts + 1) >= MAX_FAILED_STARTS * len(self._workers):
            logs = f"; its log is in {self._log_folder}" if self._log_folder else ""
            raise RunError(f"workers died {failed} times before one was ready ({self._cause}){logs}")
        self._failed_starts += worker not in self._ready
        self._calls = {call: asked for call, asked in self._calls.items() if asked[0] != worker}
        other: Any = self._make_worker()
        self._workers[self._workers.index(worker)] = other
        self._open(other)
        return self._ready.pop(worker, [])
