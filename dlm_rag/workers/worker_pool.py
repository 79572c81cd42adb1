"""Workers under Ray: placed, opened, kept busy, started again when they die; they know of no file.

    with WorkerPool("local", places) as pool:
        pool.open(opening, 8)
        for rollout in pool.stream(questions, given_up): ...

Every worker has a reservation (a placement group of one), which survives it, and two calls under way, so
that it never waits for this process. Calls of a worker are answered in their order: once one fails, it
is dead and none of the later ones counts.
"""

import logging
import os
import shutil
import signal
import tempfile
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import reduce
from operator import add
from types import FrameType
from typing import Any

from dlm_rag.decode.decoder import DecoderStats
from dlm_rag.decode.rollout import Rollout
from dlm_rag.energy.reading import EnergyReading, merge_readings
from dlm_rag.errors import ConfigError, RunError, summarize_error
from dlm_rag.progress import show_status
from dlm_rag.questions import Question
from dlm_rag.workers.placement import WorkerPlacement
from dlm_rag.workers.question_queue import MAX_SHARED_DEATHS, MAX_SOLO_DEATHS, QuestionQueue
from dlm_rag.workers.ray_cluster import (
    DeadWorkerError,
    RayErrorTranslator,
    get_ray_result,
    join_ray,
    preserve_interrupts,
    start_ray,
)
from dlm_rag.workers.worker import AdvanceResult, DecoderFactory, Worker

log = logging.getLogger(__name__)

PLACEMENT_TIMEOUT_SECONDS = 30.0  # within which a worker must find its place
MAX_FAILED_STARTS = 5  # deaths of a worker in a row before it was ready
MAX_CALLS_IN_FLIGHT = 2  # under way in a worker that has work
POLL_SECONDS = 0.5
MEASURE_TIMEOUT_SECONDS = 10.0  # within which a worker tells what it has drawn

FailedRolloutFactory = Callable[[Question, str], Rollout]


@dataclass
class _Slot:
    """A worker, the one that comes after it where it dies, and so on."""

    number: int
    group: Any  # its reservation
    since: float  # when it began to wait for its place
    actor: Any = None
    ready: bool = False
    looked: float = 0.0  # when it was last seen whether it has one
    missed: bool = False  # whether it was said that it has none
    starts: int = 0  # deaths in a row before it was ready
    calls: deque[Any] = field(default_factory=deque)  # what Ray answers with, oldest first
    machinery: DecoderStats | None = None


class WorkerPool:
    """The workers of a run, a context manager: what was started is gone after it, however it ends.

    address: "local" starts a Ray of its own, of this machine and this run alone; ray://HOST:PORT asks a
    cluster. places: how many workers; of a cluster a function of the resources of its nodes.
    """

    def __init__(
        self,
        address: str,
        places: "WorkerPlacement | Callable[[Sequence[Mapping[str, float]]], WorkerPlacement]",
    ):
        self._address, self._wanted = address, places
        self._slots: list[_Slot] = []
        self._opening: DecoderFactory | None = None
        self._shares = QuestionQueue(())
        self._places: WorkerPlacement | None = None
        self._before: Any = None  # what a SIGTERM did before Ray came
        self._folder = ""  # of the logs of a Ray of our own; kept where something went wrong
        self._terminated = self._kept = False
        self._machines: list[dict[str, str | int]] = []
        self._earlier: list[DecoderStats] = []  # of this job's workers that died
        self._measuring = ""  # how one that comes later measures energy; not at all
        self._deaths = 0

    def __enter__(self) -> "WorkerPool":
        return self

    def __exit__(self, *error: object) -> None:
        """Ends the workers, and the Ray that was started; a SIGTERM that came ends this process then."""
        if self._before is None:  # nothing was started
            return
        import ray

        show_status("ending the workers")
        for slot in self._slots if self._address != "local" else ():
            with suppress(Exception):  # the cluster may be gone
                ray.util.remove_placement_group(slot.group)
        with suppress(Exception):
            ray.shutdown()
        show_status()
        if self._folder and not self._kept:
            shutil.rmtree(self._folder, ignore_errors=True)
        signal.signal(signal.SIGTERM, self._before)
        self._slots, self._before = [], None
        if self._terminated:
            os.kill(os.getpid(), signal.SIGTERM)

    def open(self, opening: DecoderFactory, places: int) -> list[dict[str, str | int]]:
        """Gets all workers ready for a job of `places` questions at a time; their machines, each once.

        The first call starts them. Raises `ConfigError` where Ray or a place is lacking, what the opening
        raises, and `RunError` where workers die again and again.
        """
        self._start()
        show_status("opening the workers")
        # Enough beside those in flight that none waits: what a turn may finish.
        self._opening, self._most = opening, places + max(1, places // 2)
        self._machines, self._earlier = [], []
        for slot in self._slots:
            slot.machinery = None
            if slot.actor is not None:
                slot.ready = False
                slot.calls.append(slot.actor.open.remote(opening))
        self._measuring = ""
        while not all(slot.ready or slot.missed for slot in self._slots):
            self._poll()
        if opening.energy != "none":
            show_status("measuring the idle power" if opening.energy == "idle" else "")
            for slot in self._slots:
                if slot.ready:
                    slot.calls.append(slot.actor.measure.remote(opening.energy))
            self._measuring = "auto"  # of one that comes later: the others are not idle then
            while any(slot.calls for slot in self._slots):
                self._poll()
        show_status()
        return self._machines

    def stream(self, questions: Iterable[Question], given_up: FailedRolloutFactory) -> Iterator[Rollout]:
        """Finished rollouts as they come, one for each question; given_up makes that of one whose workers
        died again and again. Raises what a worker raises, and `RunError` where none is left.
        """
        self._shares = QuestionQueue(questions)
        while not self._shares.done:
            yield from self._poll(given_up)

    def read_energy(self) -> EnergyReading:
        """What the workers have drawn since all were open; not known where one died with its part."""
        import ray

        found = []
        for slot in self._slots:
            if slot.actor is None:
                continue
            try:
                found.append(ray.get(slot.actor.measured.remote(), timeout=MEASURE_TIMEOUT_SECONDS))
            except Exception:  # of a worker that is gone, in whatever way
                found.append(EnergyReading(0.0, (), f"worker {slot.number} is gone"))
        if self._earlier and any(reading.was_requested for reading in found):
            found.append(EnergyReading(0.0, (), "a worker has died, and what it had drawn is not known"))
        return merge_readings(found)

    def describe(self) -> str:
        """In words for a person: how many workers, and what all of them have reused."""
        known = [*self._earlier, *(slot.machinery for slot in self._slots if slot.machinery is not None)]
        count = f"{len(self._slots)} worker{'s' * (len(self._slots) != 1)}"
        return f"{count}, {reduce(add, known).describe()}" if known else count

    def _start(self) -> None:
        if self._slots:
            return
        show_status("starting the workers")
        self._before = signal.getsignal(signal.SIGTERM)
        try:
            with preserve_interrupts():
                if self._address == "local":
                    assert isinstance(self._wanted, WorkerPlacement)
                    self._folder = tempfile.mkdtemp(prefix="dlm_rag-", dir="/tmp")  # sockets want it short
                    start_ray(self._wanted, self._folder)
                else:
                    join_ray(self._address)
        except RunError:
            self._kept = True
            raise
        except SystemExit:  # by the handler that Ray puts there first of all
            self._terminated = True
            raise
        signal.signal(signal.SIGTERM, self._terminate)
        import ray

        if isinstance(self._wanted, WorkerPlacement):
            self._places = self._wanted
        else:
            nodes = [node["Resources"] for node in ray.nodes() if node["Alive"]]
            self._places = self._wanted(nodes)
        bundle = {"CPU": 1.0} | ({"GPU": 1.0} if self._places.gpus_per_worker else {})
        for number in range(1, self._places.num_workers + 1):
            group = ray.util.placement_group([bundle])
            self._slots.append(_Slot(number, group, time.monotonic()))

    def _terminate(self, *_: int | FrameType | None) -> None:
        self._terminated = True
        raise SystemExit

    def _poll(self, given_up: FailedRolloutFactory | None = None) -> list[Rollout]:
        """Waits for a moment, at most, until something happens, and deals with it; answers that came."""
        with RayErrorTranslator(self._address):
            return self._poll_once(given_up)

    def _poll_once(self, given_up: FailedRolloutFactory | None) -> list[Rollout]:
        import ray

        for slot in self._slots:
            if slot.actor is None:
                self._place_worker(slot)
            elif slot.ready:
                self._feed(slot)
        heads = {slot.calls[0]: slot for slot in self._slots if slot.calls}
        if not heads:
            time.sleep(POLL_SECONDS)
            return []
        ready, _ = ray.wait(list(heads), num_returns=1, timeout=POLL_SECONDS)
        found = []
        for ref in ready:
            slot = heads[ref]
            try:
                came = get_ray_result(ref)
            except DeadWorkerError as death:
                found += self._died(slot, death, given_up)
                continue
            slot.calls.popleft()
            if isinstance(came, AdvanceResult):
                found += self._accept_turn(slot, came)
            elif came is not None:
                slot.ready, slot.starts = True, 0
                if came not in self._machines:
                    self._machines.append(came)
                if self._measuring:
                    slot.calls.append(slot.actor.measure.remote(self._measuring))
        return found

    def _feed(self, slot: _Slot) -> None:
        """Keeps calls under way in a worker that has work or can be given some."""
        while len(slot.calls) < MAX_CALLS_IN_FLIGHT:
            ready = sum(other.ready for other in self._slots)
            given = self._shares.assign(slot.number, self._most, ready)
            if not given and not self._shares.count_unanswered(slot.number):
                return
            slot.calls.append(slot.actor.advance.remote(given))

    def _accept_turn(self, slot: _Slot, turn: AdvanceResult) -> list[Rollout]:
        if slot.ready:  # else the turn is the last of the job before
            slot.machinery = turn.machinery
        for level, text in turn.warning_records:
            log.log(level, "%s", text)
        return [rollout for rollout in turn.rollouts if self._shares.mark_answered(slot.number, rollout.id)]

    def _place_worker(self, slot: _Slot) -> None:
        """Starts a worker once its reservation stands; says where that does not come about."""
        import ray
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        assert self._places is not None
        if time.monotonic() - slot.looked < POLL_SECONDS:
            return
        if ray.util.placement_group_table(slot.group)["state"] == "CREATED":
            strategy = PlacementGroupSchedulingStrategy(slot.group)
            actor = ray.remote(Worker).options(
                num_cpus=1,
                num_gpus=self._places.gpus_per_worker,
                scheduling_strategy=strategy,
                max_restarts=0,
            )
            slot.actor, slot.missed = (
                actor.remote(self._places.threads_per_worker, self._places.workers_per_machine),
                False,
            )
            slot.calls.append(slot.actor.open.remote(self._opening))
            return
        slot.looked = time.monotonic()
        if slot.missed or slot.looked - slot.since < PLACEMENT_TIMEOUT_SECONDS:
            return
        others = sum(other.actor is not None for other in self._slots)
        seconds = f"{PLACEMENT_TIMEOUT_SECONDS:.0f} s"
        lacking = f"no place for worker {slot.number} of {len(self._slots)} within {seconds}"
        if not self._deaths:
            raise ConfigError(
                f"{lacking}: others hold what the cluster has (`ray status` there): wait for them, or "
                "leave workers out"
            )
        if not others:
            raise RunError(f"{lacking}, and none is left; the same command goes on from here")
        slot.missed = True
        log.warning("%s: the others go on", lacking)

    def _died(
        self, slot: _Slot, death: DeadWorkerError, given_up: FailedRolloutFactory | None
    ) -> list[Rollout]:
        """Begins anew with a worker that is gone; the answers of questions that are given up."""
        import ray

        with suppress(Exception):  # one that cannot be reached may still live
            ray.kill(slot.actor)
        self._deaths += 1
        slot.starts += not slot.ready
        lost = self._shares.requeue(slot.number)
        if slot.machinery is not None:
            self._earlier.append(slot.machinery)
        slot.actor, slot.machinery, slot.ready, slot.since = None, None, False, time.monotonic()
        slot.calls.clear()
        why = summarize_error(death)
        if slot.starts >= MAX_FAILED_STARTS:
            self._kept = True
            kept = f"; its log is in {self._folder}" if self._folder else ""
            raise RunError(
                f"worker {slot.number} died {slot.starts} times before it was ready ({why}){kept}"
            )
        log.warning("worker %d died (%s): another is started, what it had is asked again", slot.number, why)
        if not lost:
            return []
        assert given_up is not None, "questions are asked in `stream`"
        deaths = MAX_SHARED_DEATHS + MAX_SOLO_DEATHS
        said = f"{deaths} workers died with this question, the last {MAX_SOLO_DEATHS} alone: {why}"
        return [given_up(question, said) for question in lost]
