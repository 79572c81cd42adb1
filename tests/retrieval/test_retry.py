"""Calls to a service: they end by their deadline, until which they are tried again."""

import pytest

from dlm_rag.retrieval import http
from dlm_rag.retrieval.base import SearchUnavailableError
from dlm_rag.retrieval.http import RetryableFailure, call_with_retries


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
    monkeypatch.setattr(http, "time", found)
    monkeypatch.setattr(http, "_draw_jitter", lambda: 0.5)
    return found


def call(service):
    return call_with_retries("http://x", 15.0, service.ask)


def test_every_attempt_has_a_third_of_the_time(service):
    service.replies = [RetryableFailure("reset"), "found"]
    assert call(service) == "found" and service.given == [5.0, 5.0]


def test_a_service_that_is_back_before_the_deadline_answers(service):
    service.replies, service.back = ["found"], 12.0
    assert call(service) == "found"
    assert len(service.given) > 3 and 12.0 <= service.now <= 15.0


@pytest.mark.parametrize("takes", [0.0, 2.0, 60.0])
@pytest.mark.parametrize("chance", [0.0, 0.99])
def test_a_call_ends_by_its_deadline_and_waits_double(service, monkeypatch, takes, chance):
    monkeypatch.setattr(http, "_draw_jitter", lambda: chance)
    service.takes = takes
    with pytest.raises(SearchUnavailableError, match="^http://x: refused$"):
        call(service)
    assert 10.0 <= service.now <= 15.0 + 1e-9
    assert max(service.given) == 5.0 and min(service.given) >= 2.5, "none is over before it can be answered"
    jitter, longest = 0.5 + chance, http.MAX_BACKOFF_SECONDS
    expected = [min(0.1 * 2**n, longest) * jitter for n in range(len(service.waited))]
    assert service.waited == pytest.approx(expected)


def test_other_errors_are_raised_at_once(service):
    service.replies = [KeyError("no such field")]
    with pytest.raises(KeyError):
        call(service)
    assert len(service.given) == 1 and not service.waited
