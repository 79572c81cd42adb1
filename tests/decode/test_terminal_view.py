"""What the terminal shows, rendered to plain text."""

import io
import re

from rich.console import Console
from rich.text import Text

from dlm_rag.decode.rollout import CommittedToken, Rollout, RolloutStep
from dlm_rag.decode.terminal import (
    ClippedText,
    LiveView,
    RunTotals,
    render_answer,
    render_canvas,
    render_progress,
)
from dlm_rag.questions import as_questions
from tests.support.decoding import QUESTIONS, make_decoder
from tests.support.rollouts import make_two_step_rollout, render_to_text


def test_progress_shows_canvas_query_and_the_passages_that_came_and_went():
    rollout = make_two_step_rollout()
    rollout.steps = rollout.steps[:2]
    text = render_to_text(render_progress(rollout))
    assert "Who?" in text and "xy·" in text and "query  Who? x" in text
    marks = [line.strip("│ ").split() for line in text.splitlines() if line.strip("│ ")[:1] in ("+", "-")]
    assert marks == [["+", "c"], ["-", "a"]]
    assert "step 1 · 2 of 3 tokens · searched" in text


def test_answer_shows_sources_and_what_was_cut():
    rollout = make_two_step_rollout()
    rollout.evidence_texts = {"b": "Title [b]\ntext"}
    source = {"id": "b", "step": 2, "words": ["z"]}
    rollout.citations = [{"text": "z", "kind": "answer", "passages": [source], "unsupported": []}]
    rollout.cut = {"tokens": 9, "passages_shortened": 1, "passages_dropped": 2}
    text = render_to_text(render_answer(rollout))
    assert "answer  z" in text and "b Title [b] (step 2)" in text
    assert "9 tokens of evidence, 1 passages shortened, 2 dropped" in text


def test_figures_line_by_hand():
    tally = RunTotals()
    for _ in range(2):
        tally.add(make_two_step_rollout())
    figures = "1.00 answers/s · 2.0 forwards/answer · 1.00 tokens/forward · time: retrieve 100% · cpu"
    assert tally.summary_line(2.0, "cpu") == f"2 questions in 2.0 s · {figures}"
    failed = make_two_step_rollout()
    failed.error = "too long"
    tally.add(failed)
    assert tally.summary_line(3.0, "cpu").startswith("3 questions in 3.0 s, 1 failed · 1.00 answers/s")


def test_live_view_survives_a_whole_run_and_prints_every_answer(corpus_file):
    """Also that of a question that fails at once."""
    console = Console(width=100, height=40, record=True, force_terminal=True, file=io.StringIO())
    decoder = make_decoder(corpus_file, batch_size=2)
    with LiveView(console) as view:
        for rollout in decoder.stream(as_questions(["why " * 2000, *QUESTIONS]), view.step):
            view.finish(rollout)
    text = console.export_text()
    assert "tokens too long" in text and all(question[:40] in text for question in QUESTIONS)


def test_foreign_text_is_shown_as_it_is():
    """Brackets are no markup, and control characters do not reach the terminal."""
    rollout = make_two_step_rollout()
    rollout.question = "What is [bold]this[/]\x1b[2J?"
    rollout.evidence_texts = {"b": "evil\x1b]0;title\x07"}
    shown = render_to_text(render_progress(rollout)) + render_to_text(render_answer(rollout))
    assert "What is [bold]this[/]" in shown and "evil" in shown
    assert "\x1b" not in shown and "\x07" not in shown


def test_a_token_in_a_row_is_counted():
    tokens = [CommittedToken(n, 5 if n < 2 else 1, "ab" if n < 2 else "<end>", 1.0) for n in range(8)]
    steps = [RolloutStep(0, "q", (), True), RolloutStep(1, None, (), False, committed=tuple(tokens))]
    shown = render_canvas(Rollout("1", "?", "joint", 10, steps=steps)).plain
    assert shown == "abab<end>×6··"


def test_what_is_more_than_its_lines_is_cut_with_dots():
    shown = render_to_text(ClippedText(Text("one two three four five six"), 2), width=10)
    assert [line.rstrip() for line in shown.splitlines()] == ["one two", "three fou…"]


def test_words_that_no_passage_holds_are_marked_in_the_answer_and_in_its_sentence():
    rollout = make_two_step_rollout()
    rollout.response = "### Jerur Wba"
    rollout.citations = [{"text": "Jerur Wba", "kind": "answer", "passages": [], "unsupported": ["wba"]}]
    console = Console(width=80, force_terminal=True, color_system="truecolor", file=io.StringIO())
    console.print(render_answer(rollout))
    shown = console.file.getvalue()
    answer, source = re.findall(r"\x1b\[([\d;]*)mWba", shown)
    assert answer == "1;4;31" and "4" in source.split(";")  # 4: underlined, 1: bold, 31: red
    assert "underlined" in shown and "Jerur\x1b" not in shown
    rollout.citations[0]["unsupported"] = []
    assert "underlined" not in render_to_text(render_answer(rollout))


def test_only_panels_that_the_terminal_holds_whole_are_shown(corpus_file):
    console = Console(width=80, height=15, force_terminal=True, file=io.StringIO())
    view = LiveView(console)
    for name in "abc":
        rollout = make_two_step_rollout()
        rollout.id = name
        view._flying[name] = rollout
    shown = view._fitting_panels()
    lines = sum(len(console.render_lines(one, pad=False)) for one in shown)
    assert len(shown) == 3 and lines == 15 and shown[2].plain == "and 1 more"
    console.height = 14
    assert len(view._fitting_panels()) == 2
    console.height = 80
    assert len(view._fitting_panels()) == 3
