"""Progress: a bar in a terminal, a line a minute elsewhere, nothing of what is short."""

import io
import logging
import sys

import pytest

from dlm_rag import progress as module
from dlm_rag.progress import report_progress

ERASE = "\r\x1b[2K"


class Terminal(io.StringIO):
    """A standard error that says it is a terminal."""

    def isatty(self):
        return True


@pytest.fixture
def clock(monkeypatch):
    """A clock that goes on when it is told to: `clock[0] += 3`."""
    now = [100.0]
    monkeypatch.setattr(module, "perf_counter", lambda: now[0])
    return now


@pytest.fixture
def open_terminal(monkeypatch):
    """Makes standard error a terminal; to be called in the test, for pytest sets it anew before."""
    for name, value in {"TERM": "xterm", "COLUMNS": "80"}.items():
        monkeypatch.setenv(name, value)
    for name in ("RANK", "NO_COLOR"):
        monkeypatch.delenv(name, raising=False)

    def replace():
        monkeypatch.setattr(sys, "stderr", found := Terminal())
        return found

    return replace


def test_a_bar_comes_after_two_seconds_says_how_far_and_goes(open_terminal, clock):
    terminal = open_terminal()
    with report_progress("embedding passages", 2960) as advance:
        clock[0] += 1.9
        advance(10)
        assert not terminal.getvalue()
        clock[0] += 8.1
        advance(1014)
        shown = "embedding passages [#######             ] 1,024 of 2,960 after 10 s, 19 s left"
        assert terminal.getvalue() == shown
        drawn = len(terminal.getvalue())
        clock[0] += 0.05
        advance(1)
        assert len(terminal.getvalue()) == drawn, "ten times a second are enough"
    assert terminal.getvalue() == shown + ERASE


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt])
def test_an_error_leaves_the_terminal_as_it_was(open_terminal, clock, error):
    terminal = open_terminal()
    with pytest.raises(error), report_progress("outer", 10) as outer, report_progress("inner", 10) as inner:
        clock[0] += 3
        outer(1), inner(2)
        raise error
    assert "outer" in terminal.getvalue() and "inner" in terminal.getvalue()
    assert terminal.getvalue().endswith(ERASE) and not module._tasks


def test_without_a_terminal_there_is_a_line_a_minute(clock, caplog, capsys):
    caplog.set_level(logging.INFO)
    with report_progress("hashing the corpus", 5e9, "bytes") as advance:
        for _ in range(125):
            clock[0] += 1
            advance(4e7)
    said = [record.getMessage() for record in caplog.records]
    assert said == [
        "hashing the corpus: 2.4 GB of 5.0 GB after 60 s, 65 s left",
        "hashing the corpus: 4.8 GB of 5.0 GB after 2 min, 5 s left",
    ]
    assert capsys.readouterr().err == ""
