"""The page of a profiling session, in a browser."""

import json
import sys

import pytest

from tests.profiling.test_attribution import event
from tests.support.legibility import COLOURS, WIDTHS, contrast
from tests.support.paths import ROOT

sys.path.insert(0, str(ROOT / "profiling"))

import attribute


def write_trace(folder, denoise, command):
    """A session of two steps with two layers each, of `denoise` ms."""
    events = []
    for step in range(2):
        at = 200 * step
        ranges = [
            (f"step {step} rows 2", at, at + 190),
            ("denoise", at + 10, at + 10 + denoise),
            ("layer 0", at + 10, at + 20),
            ("layer 1", at + 20, at + 25),
            ("commit", at + 170, at + 180),
        ]
        events += [event(name, "user_annotation", start, end, 1) for name, start, end in ranges]
        events.append(event("aten::<b>", "cpu_op", at + 11, at + 19, 1))
    folder.mkdir()
    (folder / "trace.json").write_text(json.dumps({"traceEvents": events}))
    (folder / "machine.json").write_text(json.dumps({"command": command, "device": "cpu"}))
    return str(folder / "trace.json")


@pytest.fixture
def compared(tmp_path):
    before = write_trace(tmp_path / "before", 150, "dlm-rag sample engine.prefix_cache_gib=0")
    now = write_trace(tmp_path / "now", 50, "dlm-rag sample <&>")
    attribute.main([now, "--baseline", before, "--out", str(tmp_path / "out")])
    return tmp_path / "out" / "report.html"


def test_it_is_titled_by_what_was_run_and_shows_what_is_below_a_stage(browser, compared):
    browser.open(compared)
    seen = lambda of: browser.run(f"[...document.querySelectorAll('{of}')].map((n) => n.textContent)")  # noqa: E731
    assert seen("h1") == ["dlm-rag sample <&>"] == [browser.run("document.title")]
    assert "Before: dlm-rag sample engine.prefix_cache_gib=0" in seen("p.dim")
    rows = seen(".below tr")
    assert [row[:7] for row in rows[:2]] == ["layer 0", "layer 1"] and "20.0 ms" in rows[0]
    assert rows[2].startswith("aten::<b>16.0 ms")
    assert "device cpu" in seen("p.dim") and "device" not in json.loads(
        (compared.parent / "report.json").read_text()
    )
    browser.press_key("Tab")
    browser.press_key(" ")
    assert browser.run("document.querySelector('details').open") is False, "by the keyboard"


def test_the_bars_of_two_sessions_have_one_scale(browser, compared):
    browser.open(compared)
    widths = browser.run(
        "[...document.querySelector('figure').querySelectorAll('svg')].map((svg) =>"
        " [...svg.children].map((rect) => [rect.textContent, Number(rect.getAttribute('width'))]))"
    )
    before, now = ({text.split(":")[0]: wide for text, wide in bar} for bar in widths)
    assert sum(before.values()) == pytest.approx(sum(now.values()), abs=0.1), "steps of the same length"
    assert before["denoise"] == pytest.approx(3 * now["denoise"], rel=1e-3)


@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
@pytest.mark.parametrize("width", [390, 1280, 1920])
def test_all_of_it_can_be_seen(browser, compared, width, dark):
    browser.open(compared, width=width, dark=dark)
    assert not {name for name, text, behind in browser.run(COLOURS) if contrast(text, behind) < 4.5}
    wide, window = browser.run(WIDTHS)
    assert wide <= window == width
    paper = browser.run("getComputedStyle(document.querySelector('figure')).backgroundColor")
    fills = browser.run(
        "[...document.querySelectorAll('rect:not(.step)')].map((rect) => getComputedStyle(rect).fill)"
    )
    assert fills and all(contrast(fill, paper) >= 3 for fill in fills)
