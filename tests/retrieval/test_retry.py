"""Calls to a service: they end by their deadline, until which they are tried again; the circuit."""

import pytest

from dlm_rag.retrieval import retry
from dlm_rag.retrieval.retry import CircuitBreaker, RetryableFailure, SearchUnavailableError


class Service:
    """A service and the clock: it gives `replies`, none before `back`, and every attempt takes `takes`."""

    def __init__(self):
        self.replies, self.back, self.takes = [], 0.0, 0.0
        self.given, self.waited, self.now = [], [], 0.0

    def ask(self, seconds):
        self.given.append(seconds)
        self.now += min(self.takes, seconds)
        reply = (
            self.replies.pop(0) if self.replies and self.now >= self.back else RetryableFailure("refused")
        )
        if isinstance(reply, BaseException):
            raise reply
        return reply

    def sleep(self, seconds):
        self.waited.append(seconds)
        self.now += seconds

    def monotonic(self):
        return self.now


@pytest.fixture
def service(monkeypatch):
    found = Service()
    monkeypatch.setattr(retry, "time", found)
    monkeypatch.setattr(retry, "_draw_jitter", lambda: 0.5)
    return found


@pytest.fixture
def breaker(service):
    return CircuitBreaker("http://x", 15.0)


def fails(breaker, service):
    with pytest.raises(SearchUnavailableError) as caught:
        breaker.call(service.ask)
    return str(caught.value)


def test_every_attempt_has_a_third_of_the_time(service, breaker):
    service.replies = [RetryableFailure("reset"), "found"]
    assert breaker.call(service.ask) == "found" and service.given == [5.0, 5.0]


def test_a_service_that_is_back_before_the_deadline_answers(service, breaker):
    service.replies, service.back = ["found"], 12.0
    assert breaker.call(service.ask) == "found"
    assert len(service.given) > 3 and 12.0 <= service.now <= 15.0


@pytest.mark.parametrize("takes", [0.0, 0.3, 2.0, 60.0])
@pytest.mark.parametrize("chance", [0.0, 0.5, 0.99])
def test_a_call_ends_by_its_deadline_and_waits_double(service, breaker, monkeypatch, takes, chance):
    monkeypatch.setattr(retry, "_draw_jitter", lambda: chance)
    service.takes = takes
    assert fails(breaker, service) == "http://x: refused"
    assert 10.0 <= service.now <= 15.0 + 1e-9
    assert max(service.given) == 5.0 and min(service.given) >= 2.5, "none is over before it can be answered"
    jitter, longest = 0.5 + chance, retry.MAX_BACKOFF_SECONDS
    expected = [min(0.1 * 2**n, longest) * jitter for n in range(len(service.waited))]
    assert service.waited == pytest.approx(expected)


def test_other_errors_are_raised_at_once(service, breaker):
    service.replies = [KeyError("no such field")]
    with pytest.raises(KeyError):
        breaker.call(service.ask)
    assert len(service.given) == 1 and not service.waited


def open_circuit(service, breaker):
    for _ in range(retry.CIRCUIT_FAILURE_THRESHOLD):
        fails(breaker, service)
    service.given.clear()


def test_an_open_circuit_fails_at_once_with_the_last_reason(service, breaker):
    open_circuit(service, breaker)
    service.now += retry.CIRCUIT_OPEN_SECONDS - 0.01
    assert fails(breaker, service).startswith("http://x: refused; 3 calls failed in a row")
    assert not service.given


def test_only_failures_in_a_row_open_the_circuit(service, breaker):
    for answer in ("found", "again"):
        fails(breaker, service)
        fails(breaker, service)
        service.replies = [answer]
        assert breaker.call(service.ask) == answer


def test_after_the_pause_one_attempt_of_one_call_decides(service, breaker):
    open_circuit(service, breaker)
    service.now += retry.CIRCUIT_OPEN_SECONDS
    fails(breaker, service)
    fails(breaker, service)
    assert len(service.given) == 1, "its failure begins the pause again"
    service.now += retry.CIRCUIT_OPEN_SECONDS

    def slow(seconds):
        assert "not asked" in fails(breaker, service), "while one call is on trial others fail"
        return "found"

    assert breaker.call(slow) == "found" and len(service.given) == 1
    service.replies = [RetryableFailure("reset"), "found"]
    assert breaker.call(service.ask) == "found", "it is closed again"
