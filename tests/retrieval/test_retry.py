"""Calls to a service: they end by their deadline, until which they are tried again; the circuit."""

import threading

import pytest

from dlm_rag.retrieval import retry
from dlm_rag.retrieval.retry import CircuitBreaker, RetryableFailure, SearchUnavailableError


class Service:
    """Answers, or fails with what it is told; notes what it was given and how long was waited.

    Before `back` it fails whatever it is told. takes: seconds of an attempt, of those that it is given.
    """

    def __init__(self, *replies, back=0.0, takes=0.0):
        self.replies, self.back, self.takes = list(replies), back, takes
        self.given, self.waited, self.now = [], [], 0.0

    def ask(self, seconds):
        self.given.append(seconds)
        self.now += min(self.takes, seconds)
        reply = (
            self.replies.pop(0) if self.replies and self.now >= self.back else RetryableFailure("refused")
        )
        if isinstance(reply, Exception):
            raise reply
        return reply

    def sleep(self, seconds):
        self.waited.append(seconds)
        self.now += seconds

    def link(self, chance=0.5):
        return CircuitBreaker(
            "http://x", 15.0, clock=lambda: self.now, sleep=self.sleep, chance=lambda: chance
        )


def fails(called, ask):
    with pytest.raises(SearchUnavailableError) as caught:
        called.call(ask)
    return str(caught.value)


def test_an_answer_comes_back_and_every_attempt_has_a_third_of_the_time():
    service = Service(RetryableFailure("reset"), "found")
    assert service.link().call(service.ask) == "found" and service.given == [5.0, 5.0]


def test_a_service_that_is_back_before_the_deadline_answers():
    """However many attempts that takes."""
    service = Service("found", back=12.0)
    assert service.link().call(service.ask) == "found"
    assert len(service.given) > 3 and 12.0 <= service.now <= 15.0


@pytest.mark.parametrize("takes", [0.0, 0.3, 2.0, 60.0])
@pytest.mark.parametrize("chance", [0.0, 0.5, 0.99])
def test_a_call_ends_by_its_deadline_whatever_an_attempt_takes(takes, chance):
    service = Service(takes=takes)
    assert fails(service.link(chance), service.ask) == "http://x: refused"
    assert 10.0 <= service.now <= 15.0 + 1e-9
    assert max(service.given) == 5.0 and min(service.given) >= 2.5, "none is over before it can be answered"


@pytest.mark.parametrize("chance", [0.0, 0.5, 0.99])
def test_waits_double_with_jitter_up_to_a_longest(chance):
    service = Service()
    fails(service.link(chance), service.ask)
    jitter, longest = 0.5 + chance, retry.MAX_BACKOFF_SECONDS
    expected = [min(0.1 * 2**n, longest) * jitter for n in range(len(service.waited))]
    assert service.waited == pytest.approx(expected) and expected[-1] == longest * jitter


def test_what_is_no_trouble_of_the_network_goes_through_at_once():
    service = Service(KeyError("no such field"))
    with pytest.raises(KeyError, match="no such field"):
        service.link().call(service.ask)
    assert len(service.given) == 1 and not service.waited


def broken(service):
    """A link whose circuit has just opened."""
    called = service.link()
    for _ in range(retry.CIRCUIT_FAILURE_THRESHOLD):
        fails(called, service.ask)
    service.given.clear()
    return called


def test_an_open_circuit_fails_at_once_with_the_last_reason():
    service = Service()
    called = broken(service)
    service.now += retry.CIRCUIT_OPEN_SECONDS - 0.01
    assert fails(called, service.ask).startswith("http://x: refused; 3 calls failed in a row")
    assert not service.given


def test_calls_that_failed_but_not_in_a_row_open_nothing():
    service = Service()
    called = service.link()
    for answer in ("found", "again"):
        fails(called, service.ask)
        fails(called, service.ask)
        service.replies = [answer]
        assert called.call(service.ask) == answer


def test_after_the_pause_one_attempt_decides():
    service = Service()
    called = broken(service)
    service.now += retry.CIRCUIT_OPEN_SECONDS
    fails(called, service.ask)
    assert len(service.given) == 1, "a trial has one attempt"
    fails(called, service.ask)
    assert len(service.given) == 1, "and its failure begins the pause anew"
    service.now += retry.CIRCUIT_OPEN_SECONDS
    service.replies = ["found", RetryableFailure("reset"), "found"]
    assert [called.call(service.ask), called.call(service.ask)] == ["found", "found"], "it is closed again"


def test_while_one_call_is_on_trial_the_others_go_on_failing():
    service, begun, go_on = Service(), threading.Event(), threading.Event()
    called, found = broken(service), []
    service.now += retry.CIRCUIT_OPEN_SECONDS

    def slow(_):
        begun.set()
        assert go_on.wait(60)
        return "found"

    trial = threading.Thread(target=lambda: found.append(called.call(slow)))
    trial.start()
    assert begun.wait(60)
    assert "left alone" in fails(called, service.ask) and not service.given
    go_on.set()
    trial.join()
    service.replies = ["too"]
    assert found == ["found"] and called.call(service.ask) == "too"


def test_a_trial_that_is_interrupted_leaves_the_way_free():
    service = Service()
    called = broken(service)
    service.now += retry.CIRCUIT_OPEN_SECONDS

    def interrupted(_):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        called.call(interrupted)
    service.replies = ["found"]
    assert called.call(service.ask) == "found"
