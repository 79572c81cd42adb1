"""`dlm-rag chat`: one question after another, in a terminal or a pipe."""

import io
import sys

import pytest

from dlm_rag.commands.serve import chat
from tests.support.commands import call, model  # noqa: F401 - fixtures


@pytest.fixture
def say(call, monkeypatch):
    """What the chat prints when these lines are typed: exit code, output, errors."""

    def run(*lines, **more):
        typed = "".join(f"{line}\n" for line in lines).encode(errors="surrogateescape")
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(typed), "utf-8"))
        return call(program=chat, **more)

    return run


def test_questions_are_answered_one_after_another_until_quit(say):
    asked = ("", "Wh\udcff?", "Who wrote Emma?", "/sources", "/why", "/quit", "Who wrote Emma?")
    code, out, err = say("hello", "/sources", "/what", *asked)
    assert code == 0 and err.count("error") == err.count("error: question 1: the text is not UTF-8") == 1
    assert "step  wrote" in out and out.count("Who wrote Emma?") == 1, "asked first, in /why alone"
    assert out.count("I answer questions about these") == 2, "at the start, and for the greeting"
    assert "nothing was answered yet" in out and out.count("/quit: end") == 2
