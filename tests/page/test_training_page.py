"""The page of a training: what it holds, that a browser follows it, and how a log tells the time left."""

import json
import re

import pytest

from dlm_rag.commands import page as page_command
from dlm_rag.config import load_config
from dlm_rag.errors import ConfigError
from dlm_rag.page.charts import Line, render_chart
from dlm_rag.page.training import MAX_POINTS, TrainingPage
from dlm_rag.training import metrics_logger
from dlm_rag.training.metrics_logger import MetricsLogger
from tests.support.legibility import COLOURS, WIDTHS, contrast
from tests.support.training import MICRO_SETTINGS

QUESTION = "Where was <b>Emma</b> written?"


def step_metrics(step, **more):
    speed = {"seconds": 0.5, "tokens_per_second": 2e3, "supervised_tokens_per_second": 150.0}
    counts = {"rows": 4, "tokens": 1000, "supervised_tokens": 75}
    return {"step": step, "loss": 9 / (1 + step), **speed, **counts, **more}


def validation(step, answer):
    told = {"answer": answer, "gold": "Chawton", "right": answer == "Chawton"}
    scores = {"exact_match": 0.5, "exact_match_1_hops": 0.75, "nelbo_per_token": 3.0}
    return step_metrics(step, **scores, examples={QUESTION: told})


def make_page(path, steps=20, answers=("", "Bath", "Bath", "Chawton")):
    page = TrainingPage(path, "runs/x", steps)
    page.about = "training a model of nothing"
    for step in range(steps):
        page.add_step(step_metrics(step))
    for number, answer in enumerate(answers):
        page.add_validation(validation(5 * number + 4, answer))
    return page


def points_of(svg):
    """The points of the lines of a chart, in its own coordinates."""
    return [
        [tuple(map(float, point.split())) for point in path.split("L")]
        for path in re.findall(r'class="k\d+" d="M([^"]+)"', svg)
    ]


@pytest.mark.parametrize("values", [[9.0, 0.5], [0.0, 0.0], [-3.0, 4.0], [1e-5, 2e-5], [123456.0]])
def test_no_curve_is_clipped(values):
    svg = render_chart("Loss", "nats", [Line("one", list(enumerate(values)))], last_x=9)
    (line,) = points_of(svg)
    assert all(0 <= x <= 1000 and 0 <= y <= 300 for x, y in line)
    assert [y for _, y in line] == sorted((y for _, y in line), reverse=values == sorted(values))


def test_a_long_curve_keeps_its_mean_and_few_points(tmp_path):
    page, count = TrainingPage(tmp_path / "t.html", "x", 5000), 5000
    for step in range(count):
        page.add_step(step_metrics(step, loss=float(step)))
    assert len(page._points) <= MAX_POINTS
    assert sum(p["loss"] for p in page._points) / len(page._points) == pytest.approx(2500, rel=0.05)
    chart = page.render().split("<figure>")[1]
    assert points_of(chart)[0][-1][0] == pytest.approx(1000, abs=3), "to the last step"


def test_answers_are_told_where_they_change(browser, tmp_path):
    make_page(tmp_path / "t.html").write("finished")
    browser.open(tmp_path / "t.html")
    seen = lambda of: browser.run(f"[...document.querySelectorAll('{of}')].map((n) => n.innerText)")  # noqa: E731
    assert seen("article h3") == [QUESTION]
    assert seen("article li") == [
        "step 5 (none) wrong", "step 10 Bath wrong", "step 20 Chawton right"
    ]  # fmt: skip
    assert "finished" in seen("#state")[0] and not seen("#follow")
    assert [text.split()[0] for text in seen("figcaption b")[:1]] == ["Loss"]
    assert browser.run("document.images.length") == 0


def test_a_browser_follows_a_run_until_it_ends_or_is_told_not_to(browser, tmp_path):
    page = make_page(tmp_path / "t.html", steps=20)
    page._steps = 100
    page.write()
    browser.open(tmp_path / "t.html")
    step = "document.querySelector('#state b').textContent"
    assert "step 20 of 100" in browser.run(step) and "40 s left" in browser.run(step)
    page.add_step(step_metrics(20))
    page._due = 0.0
    page.write()
    # Not by a clock of five seconds: what the page has set up is called.
    browser.run("document.querySelector('#follow input').focus()")
    browser.press_key(" ")
    assert browser.run("[box.checked, sessionStorage.getItem('follow')]") == [False, "no"]
    browser.reload()
    assert "step 21 of 100" in browser.run(step) and not browser.run("box.checked")
    assert browser.run("document.activeElement === box"), "where the reader was"
    browser.press_key(" ")
    assert browser.run("sessionStorage.getItem('follow')") == "yes"


@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
@pytest.mark.parametrize("width", [390, 1280, 1920])
def test_all_texts_and_lines_of_the_training_page_can_be_seen(browser, tmp_path, width, dark):
    make_page(tmp_path / "t.html").write()
    browser.open(tmp_path / "t.html", width=width, dark=dark)
    assert not {name for name, text, behind in browser.run(COLOURS) if contrast(text, behind) < 4.5}
    wide, window = browser.run(WIDTHS)
    assert wide <= window == width
    paper = browser.run("getComputedStyle(document.querySelector('figure')).backgroundColor")
    strokes = browser.run(
        "[...document.querySelectorAll('path:not(.grid)')].map((p) => getComputedStyle(p).stroke)"
    )
    assert strokes and all(contrast(stroke, paper) >= 3 for stroke in strokes)


def test_a_run_keeps_its_page_and_ends_it(tmp_path):
    """A resumed one begins with what there is."""
    config = load_config(None, [*MICRO_SETTINGS, "train.max_steps=4"])
    with MetricsLogger(tmp_path, config, 0, page=True) as report:
        for step in range(3):
            report.log_step(step_metrics(step))
        report.log_validation({"exact_match": 1.0}, {QUESTION: {"answer": "a", "gold": "a", "right": True}})
    assert "stopped after step 3" in (tmp_path / "train.html").read_text()
    with MetricsLogger(tmp_path, config, 3, page=True) as report:
        report.log_step(step_metrics(3))
    text = (tmp_path / "train.html").read_text()
    assert "finished" in text and "step 4 of 4" in text and "&lt;b&gt;Emma&lt;/b&gt;" in text
    page_command.main([str(tmp_path), "--html", str(tmp_path / "again.html")])
    assert (tmp_path / "again.html").read_text().count("<path") == text.count("<path")
    (tmp_path / "empty").mkdir()
    with pytest.raises(ConfigError, match="empty is a folder"):
        page_command.main([str(tmp_path / "empty"), "--html", str(tmp_path / "p.html")])


def test_a_log_has_a_line_a_minute_with_the_time_left(tmp_path, monkeypatch):
    clock, said = [0.0], []
    monkeypatch.setattr(metrics_logger.time, "perf_counter", lambda: clock[0])
    monkeypatch.setattr(metrics_logger, "print_note", said.append)
    config = load_config(None, [*MICRO_SETTINGS, "train.max_steps=1000"])
    with MetricsLogger(tmp_path, config, 0) as report:
        for step in range(1000):
            clock[0] += 0.5
            report.log_step(step_metrics(step))
    steps = [int(re.match(r"step ([\d,]+)/1,000 ", line)[1].replace(",", "")) for line in said]
    assert steps == [50, 170, 290, 410, 530, 650, 770, 890, 1000]
    assert [line.rpartition(" · ")[2] for line in said][:2] == ["8 min left", "7 min left"]
    assert json.loads((tmp_path / "metrics.jsonl").read_text().splitlines()[-1])["step"] == 999


def test_the_last_validation_is_told(tmp_path, capfd):
    """The line of the last step precedes its validation, and has the scores of an earlier one."""
    config = load_config(None, [*MICRO_SETTINGS, "train.max_steps=2"])
    with MetricsLogger(tmp_path, config, 0) as report:
        for step, score in enumerate((0.25, 0.75)):
            report.log_step(step_metrics(step))
            report.log_validation({"exact_match": score})
    told = capfd.readouterr()
    line = (told.out + told.err).splitlines()[-1]
    assert "step 2" in line and "75.0%" in line and "25.0%" not in line
