"""What the terminal shows, rendered to plain text."""

import io

from rich.console import Console

from dlm_rag.decode.terminal import LiveView, render_answer, render_progress, render_steps, render_verdict
from dlm_rag.questions import as_questions
from tests.support.decoding import QUESTIONS, make_decoder
from tests.support.rollouts import make_committed_token, make_two_step_rollout, render_to_text


def test_progress_shows_canvas_query_and_the_passages_that_came_and_went():
    rollout = make_two_step_rollout()
    rollout.steps = rollout.steps[:2]
    text = render_to_text(render_progress(rollout))
    assert "Who?" in text and "xy·" in text and "query  Who? x" in text
    marks = [line.strip("│ ").split() for line in text.splitlines() if line.strip("│ ")[:1] in ("+", "-")]
    assert marks == [["+", "c"], ["-", "a"]]
    assert "step 1 · 2 of 3 tokens · searched" in text
    rollout.response, rollout.passages = "1990", dict.fromkeys("abc", "x")
    written = enumerate(["1", "9", "9", "0", "<end>", "<end>"])
    rollout.steps[1].committed = tuple(make_committed_token(n, 0, token, 0.9) for n, token in written)
    assert " 1990<end> " in render_to_text(render_steps(rollout))


def test_live_view_survives_a_whole_run_and_prints_every_answer(corpus_file):
    """Also that of a question that fails at once."""
    console = Console(width=100, height=40, record=True, force_terminal=True, file=io.StringIO())
    decoder = make_decoder(corpus_file, batch_size=2)
    with LiveView(console, speed=1000) as view:
        for rollout in decoder.stream(as_questions(["why " * 2000, *QUESTIONS]), view.step):
            view.finish(rollout, render_verdict(rollout.id == "q2", ["x"]))
    text = console.export_text()
    assert text.count("✓") == 1 and text.count("(known answer: x)") == len(QUESTIONS)
    assert view.paused_seconds > 0, "the first question is shown slowly"
    assert "tokens too long" in text and all(question[:40] in text for question in QUESTIONS)


def test_foreign_text_is_shown_as_it_is():
    """Brackets are no markup, and control characters do not reach the terminal."""
    rollout = make_two_step_rollout()
    rollout.question = "What is [bold]this[/]\x1b[2J?"
    rollout.evidence_texts = {"b": "evil\x1b]0;title\x07"}
    shown = render_to_text(render_progress(rollout)) + render_to_text(render_answer(rollout))
    assert "What is [bold]this[/]" in shown and "evil" in shown
    assert "\x1b" not in shown and "\x07" not in shown
