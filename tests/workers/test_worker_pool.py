"""The pool with stand-ins for Ray and its workers: how long it waits, and how it shares questions."""

import sys
from types import ModuleType, SimpleNamespace

import pytest

from dlm_rag.errors import RunError
from dlm_rag.questions import Question
from dlm_rag.workers.placement import WorkerPlacement
from dlm_rag.workers.worker import WorkerAnswer
from dlm_rag.workers.worker_pool import WorkerPool
from tests.support.fake_workers import make_finished_rollout

MACHINE = {"name": "a machine"}


class RayError(Exception):
    """As Ray's, for a worker that died."""


class FakeCall:
    """A reference to what a worker was asked, which ends after so many time limits."""

    def __init__(self, limits, fails=False):
        self.limits, self.fails = limits, fails


class SlowWorker:
    """A worker whose `open` takes longer than so many time limits."""

    def __init__(self, limits, dies=False):
        self.open = SimpleNamespace(remote=lambda *job: FakeCall(limits, dies))
        self.__ray_ready__ = SimpleNamespace(remote=lambda: FakeCall(0))


def wait(calls, num_returns=1, timeout=None):
    """As `ray.wait`: a time limit passes where no call has ended."""
    ended = [call for call in calls if call.limits == 0][:num_returns]
    if not ended and timeout:
        for call in calls:
            call.limits -= 1
    return ended, [call for call in calls if call not in ended]


def get(call):
    """As `ray.get`."""
    if call.fails:
        raise RayError("killed")
    return MACHINE


@pytest.fixture
def fake_ray(monkeypatch):
    ray, errors = ModuleType("ray"), ModuleType("ray.exceptions")
    ray.wait, ray.get = wait, get
    errors.RayError = RayError
    errors.RayTaskError, errors.RaySystemError = (type(name, (RayError,), {}) for name in "ab")
    monkeypatch.setitem(sys.modules, "ray", ray)
    monkeypatch.setitem(sys.modules, "ray.exceptions", errors)


def make_pool(*workers, replacement=None):
    pool = WorkerPool("local", WorkerPlacement(len(workers), 1, len(workers)))
    pool._workers, pool._make_worker = [*workers], lambda: replacement
    return pool


def test_the_run_ends_where_no_worker_is_ready_in_time(fake_ray):
    assert make_pool(SlowWorker(0)).open(None, "model", batch_size=4) == [MACHINE]
    with pytest.raises(RunError, match="was ready within 30 minutes"):
        make_pool(SlowWorker(0, dies=True), replacement=SlowWorker(3)).open(None, "model", batch_size=4)


class AnsweringWorker:
    answer = SimpleNamespace(remote=lambda question: object())


class SharingPool(WorkerPool):
    """Workers that answer in turn; notes what each holds at first."""

    def __init__(self, workers):
        super().__init__("local", WorkerPlacement(workers, 1, workers))
        self._ready = {AnsweringWorker(): [] for _ in range(workers)}
        self._batch_size, self.shares = 4, []

    def _poll(self):
        self.shares = self.shares or [len(held) for held in self._ready.values()]
        held = max(self._ready.values(), key=len)
        return WorkerAnswer(make_finished_rollout(held.pop(0)), None, [])


@pytest.mark.parametrize(
    ("questions", "workers", "shares"),
    [(9, 3, [3, 3, 3]), (7, 3, [3, 3, 1]), (40, 3, [6, 6, 6]), (3, 1, [3]), (40, 1, [6])],
)
def test_few_questions_are_shared_evenly_and_each_worker_gets_no_more_than_it_holds(
    questions, workers, shares
):
    pool = SharingPool(workers)
    asked = [Question(f"q{n}", "Who?") for n in range(questions)]
    found = list(pool.stream(asked, make_finished_rollout))
    assert sorted(rollout.id for rollout in found) == sorted(question.id for question in asked)
    assert pool.shares == shares
