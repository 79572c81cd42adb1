"""Workers under Ray, which restarts those that die; they answer questions and know of no files.

    with WorkerPool("local", placement) as pool:
        pool.open(factory, model, energy="none", batch_size=8)
        for rollout in pool.stream(questions, make_failed_rollout): ...

Ray restarts an actor (`max_restarts`) and repeats `open` on it (`max_task_retries`). It does not repeat
`answer`, for the actor may wait for a place: whichever worker is ready first gets a dead one's questions.
"""

import logging
import shutil
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import reduce
from operator import add
from typing import TYPE_CHECKING, Any

from dlm_rag.decode.decoder import DecoderStats
from dlm_rag.decode.rollout import Rollout
from dlm_rag.energy.meter import EnergyReading, merge_readings
from dlm_rag.errors import ConfigError, RunError
from dlm_rag.progress import show_status
from dlm_rag.questions import Question
from dlm_rag.workers.placement import WorkerPlacement
from dlm_rag.workers.ray_cluster import join_ray, start_ray, summarize_ray_error
from dlm_rag.workers.worker import NotOpenedError, Worker, WorkerAnswer

if TYPE_CHECKING:
    from dlm_rag.workers.worker import DecoderFactory

    # For a cluster a function of the resources of its nodes.
    Placement = WorkerPlacement | Callable[[Sequence[Mapping[str, float]]], WorkerPlacement]

log = logging.getLogger(__name__)

MAX_SHARED_DEATHS = 2  # deaths of a question's worker after which it is asked alone
MAX_SOLO_DEATHS = 3  # deaths of a worker that had this question alone, after which it is given up
MAX_FAILED_STARTS = 5  # deaths in a row before a worker is ready
PLACEMENT_TIMEOUT_SECONDS = 60.0  # in which a worker must find a place and start
ENERGY_TIMEOUT_SECONDS, POLL_SECONDS = 10.0, 0.5


class QuestionQueue:
    """Which worker has which question; the questions of a worker that died are asked again."""

    def __init__(self, questions: Iterable[Question]) -> None:
        self._waiting = deque(questions)  # those that are asked alone come last
        self._held: defaultdict[int, dict[str, Question]] = defaultdict(dict)
        self._deaths: Counter[str] = Counter()

    @property
    def done(self) -> bool:
        """Whether every question was answered or given up."""
        return not (self._waiting or any(self._held.values()))

    def assign(self, worker: int, most: int, workers: int) -> list[Question]:
        """New questions for a worker, which then holds at most `most`; the last are shared evenly."""
        held, given = self._held[worker], list[Question]()
        unanswered = len(self._waiting) + sum(map(len, self._held.values()))
        most = min(most, -(-unanswered // workers))
        while self._waiting and len(held) < most and not any(map(self._is_suspect, held)):
            if held and self._is_suspect(self._waiting[0].id):
                break
            given.append(question := self._waiting.popleft())
            held[question.id] = question
        return given

    def mark_answered(self, worker: int, name: str) -> None:
        del self._held[worker][name]

    def requeue(self, worker: int) -> list[Question]:
        """Queues again, first of all, what a dead worker held; returns the questions that are given up."""
        given_up = []
        for question in reversed(self._held.pop(worker, {}).values()):
            self._deaths[question.id] += 1
            if self._deaths[question.id] == MAX_SHARED_DEATHS + MAX_SOLO_DEATHS:
                given_up.append(question)
            elif self._is_suspect(question.id):
                self._waiting.append(question)
            else:
                self._waiting.appendleft(question)
        return given_up

    def _is_suspect(self, name: str) -> bool:
        return self._deaths[name] >= MAX_SHARED_DEATHS


@dataclass(eq=False)
class _Slot:
    """A worker, restarts included."""

    number: int
    actor: Any
    ready: bool = False
    restarts: int = 0
    placed: Any = None  # Ray's reference of a call that ends once the actor runs


class WorkerPool:
    """The workers of a run; leaving the context ends all that it started.

    address: "local" starts Ray on this machine for this run; ray://HOST:PORT joins a cluster.
    """

    def __init__(self, address: str, placement: "Placement") -> None:
        self._address, self._placement = address, placement
        self._log_folder: str | None = None
        self._slots: list[_Slot] = []
        self._calls: dict[Any, _Slot] = {}  # under way, by Ray's reference
        self._machines: list[dict[str, str | int]] = []
        self._stats: dict[tuple[int, int], DecoderStats] = {}  # of this job, by worker and restart
        self._energy, self._deaths = "none", 0

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

    def open(
        self, factory: "DecoderFactory", model: object, energy: str, batch_size: int
    ) -> list[dict[str, str | int]]:
        """Gets all workers ready for a job; returns their machines, each once. The first call starts them.

        Raises `ConfigError` if Ray or a place is missing, whatever `factory` raises, and `RunError` if
        workers keep dying.
        """
        import ray

        first = self._log_folder is None
        if first:
            self._start()
        show_status("opening the workers")
        self._opening, self._batch_size = (factory, model), batch_size
        self._calls, self._stats, self._machines = {}, {}, []
        self._energy, self._deaths = energy, 0
        for slot in self._slots:
            self._open(slot)
        placed = self._wait_for_places(first)
        while not all(slot.ready for slot in placed):
            self._poll()
        if energy != "none":
            show_status("measuring the idle power" if energy == "idle" else "")
            ray.get([slot.actor.start_energy.remote(energy) for slot in placed])
        show_status()
        return self._machines

    def stream(
        self, questions: Iterable[Question], make_failed_rollout: Callable[[Question, str], Rollout]
    ) -> Iterator[Rollout]:
        """One finished rollout for each question, as they come; make_failed_rollout makes that of a
        question whose workers died again and again. Raises whatever a worker raises, and `RunError` once
        all have died and none finds a place again.
        """
        import ray

        queue, most = QuestionQueue(questions), self._batch_size + max(1, self._batch_size // 2)
        while not queue.done:
            ready = [slot for slot in self._slots if slot.ready]
            for slot in ready:
                for question in queue.assign(slot.number, most, len(ready)):
                    self._calls[slot.actor.answer.options(max_task_retries=0).remote(question)] = slot
            if not ready and not ray.wait(self._placed(), timeout=PLACEMENT_TIMEOUT_SECONDS)[0]:
                raise RunError(
                    f"all workers died, and Ray at {self._address} found no place for one within "
                    f"{PLACEMENT_TIMEOUT_SECONDS:.0f} s: run the same command again to resume"
                )
            slot, answer = self._poll()
            if isinstance(answer, WorkerAnswer):
                queue.mark_answered(slot.number, answer.rollout.id)
                self._stats[slot.number, slot.restarts] = answer.stats
                for level, text in answer.warnings:
                    log.log(level, "%s", text)
                yield answer.rollout
            elif isinstance(answer, Exception):
                reason = f"{MAX_SHARED_DEATHS + MAX_SOLO_DEATHS} workers died with this question, the last "
                reason += f"{MAX_SOLO_DEATHS} alone: {summarize_ray_error(answer)}"
                yield from (
                    make_failed_rollout(question, reason) for question in queue.requeue(slot.number)
                )

    def read_energy(self) -> EnergyReading:
        """What the workers have used since all were open."""
        import ray

        if self._energy == "none":
            return EnergyReading(0.0)
        if not self._deaths:
            with suppress(Exception):  # of a worker that is gone, in whatever way
                readings = [slot.actor.read_energy.remote() for slot in self._slots if slot.ready]
                return merge_readings(ray.get(readings, timeout=ENERGY_TIMEOUT_SECONDS))
        return EnergyReading(0.0, reason="a worker has died, and its part is not known")

    def describe(self) -> str:
        """The number of workers, and their statistics added up."""
        count = f"{len(self._slots)} worker{'s' * (len(self._slots) != 1)}"
        return f"{count}, {reduce(add, self._stats.values()).describe()}" if self._stats else count

    def _start(self) -> None:
        import ray

        show_status("starting the workers")
        self._log_folder = ""
        if isinstance(self._placement, WorkerPlacement):
            placement, self._log_folder = self._placement, start_ray(self._placement)
        else:
            join_ray(self._address)
            placement = self._placement([node["Resources"] for node in ray.nodes() if node["Alive"]])
        actor = ray.remote(Worker).options(
            num_cpus=1, num_gpus=placement.gpus_per_worker,
            max_restarts=-1, max_task_retries=MAX_FAILED_STARTS - 1,
        )  # fmt: skip
        own = placement.threads_per_worker, placement.workers_per_machine
        self._slots = [_Slot(n + 1, actor.remote(*own)) for n in range(placement.num_workers)]

    def _placed(self) -> list[Any]:
        return [slot.placed for slot in self._slots]

    def _wait_for_places(self, first: bool) -> list[_Slot]:
        """The workers that run. Raises `ConfigError` if one does not at the first job, or none later."""
        import ray

        count = len(self._slots)
        found, _ = ray.wait(self._placed(), num_returns=count, timeout=PLACEMENT_TIMEOUT_SECONDS)
        for slot in self._slots:
            if slot.placed not in found:
                message = (
                    f"no place for worker {slot.number} of {count} within {PLACEMENT_TIMEOUT_SECONDS:.0f} s"
                )
                if first or not found:
                    raise ConfigError(
                        f"{message}: the cluster is in use (`ray status`); wait, or leave workers out"
                    )
                log.warning("%s: the others go on", message)
        return [slot for slot in self._slots if slot.placed in found]

    def _open(self, slot: _Slot) -> None:
        slot.ready = False
        slot.placed = slot.actor.__ray_ready__.remote()
        self._calls[slot.actor.open.remote(*self._opening)] = slot

    def _poll(self) -> tuple[_Slot, Any]:
        """Waits a moment for a call to end: its worker, and its result or what the worker died of."""
        import ray
        from ray.exceptions import RayError, RaySystemError, RayTaskError

        try:
            ended, _ = ray.wait(list(self._calls), timeout=POLL_SECONDS)
            if not ended:
                return self._slots[0], None
            slot = self._calls.pop(ended[0])
            result = ray.get(ended[0])
        except ConnectionError as error:
            raise RunError(
                f"Ray at {self._address} is gone ({summarize_ray_error(error)}): the same command goes on"
            ) from None
        except RayTaskError as error:
            if isinstance(error.cause, RaySystemError):
                raise RunError(
                    f"a worker cannot read its task: {summarize_ray_error(error.cause)}"
                ) from None
            if not isinstance(error.cause, NotOpenedError):
                raise error.cause from error  # keeps the worker's traceback
            return slot, self._reopen(slot, error.cause)
        except RayError as error:
            return slot, self._reopen(slot, error)
        if isinstance(result, dict):
            slot.ready = True
            self._machines += [result] * (result not in self._machines)
        return slot, result

    def _reopen(self, slot: _Slot, death: Exception) -> Exception:
        """Opens a worker again that died; raises `RunError` if it had not been ready."""
        cause = summarize_ray_error(death)
        if not slot.ready:
            logs = f"; its log is in {self._log_folder}" if self._log_folder else ""
            raise RunError(
                f"worker {slot.number} died {MAX_FAILED_STARTS} times before it was ready ({cause}){logs}"
            ) from None
        log.warning(
            "worker %d died (%s): it is restarted and its questions asked again", slot.number, cause
        )
        self._deaths, slot.restarts = self._deaths + 1, slot.restarts + 1
        self._calls = {call: other for call, other in self._calls.items() if other is not slot}
        self._open(slot)
        return death
