"""The program in a terminal, as a person sees it: what comes first, and what an interrupt leaves behind."""

import os
import pty
import select
import signal
import subprocess
import sys
import time

import pytest

from tests.support.paths import ROOT

SHOW_CURSOR, HIDE_CURSOR = b"\x1b[?25h", b"\x1b[?25l"
MOST_SECONDS = 120
# Children ignore what a background ignores; code between fork and exec would meet locks of other threads.
HEARS_INTERRUPTS = """import os, signal, sys
signal.signal(signal.SIGINT, signal.SIG_DFL)
os.execv(sys.argv[1], sys.argv[1:])"""


class Session:
    """A program whose streams are a terminal of its own."""

    def __init__(self, *words, **environment):
        self._fd, other = pty.openpty()
        settings = os.environ | {"TERM": "xterm-256color"} | environment
        command = [sys.executable, "-c", HEARS_INTERRUPTS, sys.executable, "sample.py", *words]
        self.process = subprocess.Popen(
            command, cwd=ROOT, env=settings, stdin=other, stdout=other, stderr=other
        )
        os.close(other)
        self.seen = b""

    def read_until(self, words: bytes | None) -> bytes:
        """All that was shown until now, once `words` are in it; None: at the end."""
        end = time.monotonic() + MOST_SECONDS
        while words is None or words not in self.seen:
            assert time.monotonic() < end, self.seen
            if select.select([self._fd], [], [], 1)[0]:
                try:
                    self.seen += os.read(self._fd, 65536)
                except OSError:  # the other end is closed
                    assert words is None, self.seen
                    break
        return self.seen

    def status(self) -> int:
        os.close(self._fd)
        return self.process.wait(MOST_SECONDS)


@pytest.mark.slow
def test_the_first_sign_is_there_before_torch_and_goes_when_the_view_begins():
    session = Session()
    stages = ["reading questions", "loading torch", "reading the corpus", "reading weights"]
    shown = session.read_until(None).decode()
    places = [shown.index(stage) for stage in stages]
    assert places == sorted(places) and places[0] == 0
    first_panel = shown.index("╭")
    last = shown.rindex("taking the first step", 0, first_panel)
    assert "\r\x1b[2K" in shown[last:first_panel], "the line of the status is taken away"
    assert session.status() == 0
    assert shown.count("✓") >= 5, "what is right is ticked"
    line = shown.strip().splitlines()[-1]
    assert line.endswith(" right") and len(line) < 80


@pytest.mark.slow
def test_an_interrupt_says_how_to_go_on_and_shows_the_cursor_again():
    session = Session("limit=400", "decode.commit_threshold=0.99999", "decode.batch_size=1")
    session.read_until("╭".encode())
    session.process.send_signal(signal.SIGINT)
    shown = session.read_until(None)
    assert session.status() == 130
    assert b"of 400 answered; with --out FILE" in shown and b"Traceback" not in shown
    assert shown.rindex(SHOW_CURSOR) > shown.rindex(HIDE_CURSOR)
