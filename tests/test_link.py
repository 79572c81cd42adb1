"""Calls to a service: deadlines are handed on, attempts are bounded, the circuit opens and closes."""

import threading

import pytest

from dlm_rag.retrieval import link
from dlm_rag.retrieval.link import Link, SearchUnavailableError, Unreachable


class Service:
    """Answers, or fails with what it is told; notes what it was given and how long was waited."""

    def __init__(self, *replies):
        self.replies, self.given, self.waited, self.now = list(replies), [], [], 0.0

    def ask(self, seconds):
        self.given.append(seconds)
        reply = self.replies.pop(0) if self.replies else Unreachable("refused")
        if isinstance(reply, Exception):
            raise reply
        return reply

    def link(self, chance=0.5):
        return Link(
            "http://x", 2.0, clock=lambda: self.now, sleep=self.waited.append, chance=lambda: chance
        )


def fails(called, ask):
    with pytest.raises(SearchUnavailableError) as caught:
        called.call(ask)
    return str(caught.value)


def test_an_answer_comes_back_and_every_attempt_is_told_its_deadline():
    service = Service(Unreachable("reset"), "found")
    assert service.link().call(service.ask) == "found" and service.given == [2.0, 2.0]


@pytest.mark.parametrize(
    ("chance", "waited"), [(0.0, [0.05, 0.1]), (0.5, [0.1, 0.2]), (0.99, [0.149, 0.298])]
)
def test_attempts_are_bounded_and_waits_double_with_jitter(chance, waited):
    service = Service()
    assert fails(service.link(chance), service.ask) == "http://x: refused"
    assert len(service.given) == 3 and service.waited == pytest.approx(waited)


def test_what_is_no_trouble_of_the_network_goes_through_at_once():
    service = Service(KeyError("no such field"))
    with pytest.raises(KeyError, match="no such field"):
        service.link().call(service.ask)
    assert len(service.given) == 1 and not service.waited


def broken(service):
    """A link whose circuit is open since 0 seconds."""
    called = service.link()
    for _ in range(link.OPENS_AFTER):
        fails(called, service.ask)
    service.given.clear()
    return called


def test_an_open_circuit_fails_at_once_with_the_last_reason():
    service = Service()
    called = broken(service)
    service.now = link.PAUSE - 0.01
    assert fails(called, service.ask).startswith("http://x: refused; 3 calls failed in a row")
    assert not service.given


def test_calls_that_failed_but_not_in_a_row_open_nothing():
    refused = [Unreachable("refused")] * 3
    service = Service(*refused, *refused, "found", *refused, *refused, "again")
    called = service.link()
    for answer in ("found", "again"):
        fails(called, service.ask)
        fails(called, service.ask)
        assert called.call(service.ask) == answer


def test_after_the_pause_one_attempt_decides():
    service = Service()
    called = broken(service)
    service.now = link.PAUSE
    fails(called, service.ask)
    assert len(service.given) == 1, "a trial has one attempt"
    fails(called, service.ask)
    assert len(service.given) == 1, "and its failure begins the pause anew"
    service.now = 2 * link.PAUSE
    service.replies = ["found", Unreachable("reset"), "found"]
    assert [called.call(service.ask), called.call(service.ask)] == ["found", "found"], "it is closed again"


def test_while_one_call_is_on_trial_the_others_go_on_failing():
    service, begun, go_on = Service(), threading.Event(), threading.Event()
    called, found = broken(service), []
    service.now = link.PAUSE

    def slow(_):
        begun.set()
        assert go_on.wait(5)
        return "found"

    trial = threading.Thread(target=lambda: found.append(called.call(slow)))
    trial.start()
    assert begun.wait(5)
    assert "left alone" in fails(called, service.ask) and not service.given
    go_on.set()
    trial.join()
    service.replies = ["too"]
    assert found == ["found"] and called.call(service.ask) == "too"


def test_a_trial_that_is_interrupted_leaves_the_way_free():
    service = Service()
    called = broken(service)
    service.now = link.PAUSE

    def interrupted(_):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        called.call(interrupted)
    service.replies = ["found"]
    assert called.call(service.ask) == "found"
