"""The trace page: its data, and what a real browser makes of it (skipped where there is no Chromium)."""

import json
import re
import subprocess
import sys
from dataclasses import replace

import pytest

from dlm_rag.commands.sample import page as page_command
from dlm_rag.decode.provisional_log import ProvisionalDelta, ProvisionalRecorder
from dlm_rag.decode.rollout import CommittedToken, Rollout, RolloutStep
from dlm_rag.decode.trace_file import read_trace
from dlm_rag.errors import TraceError
from dlm_rag.page import render
from dlm_rag.questions import Question
from tests.support.pages import END, cited, header, make_two_hop_rollout, write_trace
from tests.support.paths import ROOT
from tests.support.rollouts import make_committed_token, make_two_step_rollout

SEPARATORS = "\u2028\u2029"
HOSTILE = (
    f"</script><script>alert(1)</script><!-- <img src=x onerror=alert(2)> {SEPARATORS} @data@ &lt; \ud800"
)
WRITTEN = (CommittedToken(0, 1, HOSTILE, 0.5),)
SURE = (0.5, 0.7, 0.9, 0.99)  # as in page.js


GHOSTS = {2: " of", 4: ".", 5: "\n", 6: " Steventon", END: "<end>"}
# By step, the token and the confidence guessed at a position; 6 and 7 end the text for a while.
GUESSED = {
    1: {2: (4, 0.4), 3: (6, 0.55), 4: (5, 0.2), 5: (2, 0.35), 6: (END, 0.75), 7: (END, 0.999)},
    2: {2: (4, 0.92), 4: (5, 0.61), 5: (2, 0.35), 6: (2, 0.1)},
    3: {3: (6, 0.71), 5: (6, 0.7), 6: (END, 0.992)},
    4: {},
}


def haunted(rollout: Rollout) -> Rollout:
    """The same with guesses at positions that stay masked."""
    recorder = ProvisionalRecorder(GHOSTS.__getitem__)
    steps = [rollout.steps[0]]
    for step in rollout.steps[1:]:
        guessed = GUESSED[step.step]
        tokens = ([given[n] for given in guessed.values()] for n in (0, 1))
        steps.append(replace(step, guesses=recorder.record_step([*guessed], *tokens)))
    return replace(rollout, steps=steps)


def static(rollout: Rollout) -> Rollout:
    """The same question asked once, of which nothing is cited."""
    steps = [replace(step, query=None, passage_ids=("emma",), dropped=()) for step in rollout.steps]
    steps[0] = rollout.steps[0]
    settings = {"query_policy": "question", "query_threshold": 0.0}
    return replace(rollout, steps=steps, citations=[], settings=settings)


@pytest.mark.parametrize(
    ("tokens", "text", "texts"),
    [
        ([" Jane", " Aus", "ten", ".", "<end>"], "Jane Austen.", ["Jane", "Aus", "ten", ".", ""]),
        (["▁Jane"[1:], "Aus", "ten"], "Jane Austen", ["Jane", "Aus", "ten"]),
        (["a", "\ufffd", "\ufffd", " b"], "a\U0001f600 b", ["a", "", "", "b"]),
        (["\n", "a", " ", "a"], "a a", ["", "a", "", "a"]),
        ([], "", []),
    ],
    ids=["blanks before words", "no blanks", "a character of two tokens", "blanks alone", "nothing"],
)
def test_tokens_stand_where_their_texts_do(tokens, text, texts):
    assert [text[start:stop] for start, stop in render.align_tokens(tokens, text)] == texts


def test_words_are_attributed_to_the_passage_that_is_cited_for_them():
    found = render.attribute_words(make_two_hop_rollout())
    assert [(f["word"], f["at"], f["step"], f["passage"]) for f in found] == [
        ("jane", [0], 1, "emma"), ("austen", [1], 1, "emma"), ("steventon", [3], 4, "austen"),
        ("steventon", [5], 4, "austen"),
    ]  # fmt: skip
    bare = make_two_hop_rollout()
    bare.citations[1] = cited("Steventon", unsupported=["steventon"])
    assert render.attribute_words(bare)[2]["passage"] is None
    assert render.attribute_words(replace(bare, citations=[])) == []


def data_of(html):
    return json.loads(re.search(r'<script id="data"[^>]*>(.*?)</script>', html, re.DOTALL)[1])


def test_no_text_of_a_trace_ends_the_element_that_holds_it():
    rollout = make_two_hop_rollout()
    rollout.question = rollout.id = rollout.response = HOSTILE
    rollout.passages = dict.fromkeys(rollout.passages, HOSTILE)
    rollout.steps[1] = replace(rollout.steps[1], query=HOSTILE, committed=WRITTEN)
    runs = [render.TraceRun(HOSTILE, header(rollout), [rollout])]
    html = render.render_page(runs)
    assert html.count("<script") == html.count("</script") == 2 and html.isascii() is False
    assert not [mark for mark in SEPARATORS if mark in html]
    assert data_of(html) == json.loads(json.dumps(render.build_page_record(runs)))


def test_two_traces_share_the_questions_of_one_id_and_text(tmp_path):
    other = replace(make_two_hop_rollout(), id="q2")
    one = write_trace(tmp_path / "static.jsonl", static(make_two_hop_rollout()), static(other))
    why = replace(other, question="Why?")
    two = write_trace(tmp_path / "interleaved.jsonl", make_two_hop_rollout(), why)
    record = render.build_page_record(render.read_trace_runs([one, two]))
    assert [question["id"] for question in record["questions"]] == ["q1"] and record["left_out"] == 2
    assert record["names"] == ["static", "interleaved"]
    assert record["settings"] == [["decode.query_policy=question"], ["decode.query_policy=proxy"]]
    (tmp_path / "other").mkdir()
    again = write_trace(tmp_path / "other" / "static.jsonl", make_two_hop_rollout())
    assert [run.name for run in render.read_trace_runs([one, again])] == [tmp_path.name, "other"]
    foreign = write_trace(tmp_path / "foreign.jsonl", replace(make_two_hop_rollout(), question="Why?"))
    with pytest.raises(TraceError, match="static and foreign have no question in common"):
        render.build_page_record(render.read_trace_runs([one, foreign]))


@pytest.mark.slow
def test_a_page_is_made_of_a_trace_without_torch(tmp_path):
    trace, out = write_trace(tmp_path / "trace.jsonl", make_two_hop_rollout()), tmp_path / "page.html"
    code = (
        "import sys\n"
        "from dlm_rag.__main__ import dispatch\n"
        f"dispatch(['page', {str(trace)!r}, '--html', {str(out)!r}])\n"
        "heavy = {'torch', 'transformers', 'numba', 'bm25s'} & set(sys.modules)\n"
        "assert not heavy, heavy\n"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0 and f"the page is in {out}" in done.stderr, done.stderr
    assert data_of(out.read_text())["questions"][0]["id"] == "q1"
    page_command([str(trace), "--html", str(out)])  # of its own pages it writes the newer one
    assert out.read_text() == render.render_page(render.read_trace_runs([trace]))


# In the browser.

CANVAS = """page.panes.map((pane) =>
  pane.tokens.map((node) => node.className.includes(' w ') ? node.textContent : null))"""
# The guess at each position, with the shade of its confidence; null where none is.
SEEN_GHOSTS = """page.panes[0].tokens.map((node) => node.classList.contains('g')
  ? [node.dataset.guess, Number(node.className.match(/ g([0-4])/)[1])] : null)"""


def canvases(rollout):
    """What the page shows of every step, as `Rollout.replay` has it."""
    for state in rollout.replay():
        yield [state[n].token if n in state else None for n in range(rollout.canvas_length)]


def ghosts(rollout):
    """What the page shows of the guesses of every step, as `Rollout.provisional_tokens` has them."""
    for found in rollout.provisional_tokens():
        shown = {
            n: (guess.token.replace("\n", "\u21b5"), sum(guess.confidence >= bound for bound in SURE))
            for n, guess in found.items()
        }
        yield [list(shown[n]) if n in shown else None for n in range(rollout.canvas_length)]


@pytest.fixture
def show(browser, tmp_path):
    """Opens the page of rollouts, or of two traces by their names."""

    def show(*rollouts, place="", traces=None, **window):
        traces = traces or {"": list(rollouts)}
        runs = [render.TraceRun(name, header(given[0]), given) for name, given in traces.items()]
        (tmp_path / "page.html").write_text(render.render_page(runs))
        browser.open(tmp_path / "page.html", place, **window)

    return show


def check_step(browser, rollout, step):
    """Canvas and guesses on the page are those of the trace."""
    assert browser.run(CANVAS) == [list(canvases(rollout))[step]], f"{rollout.id}, step {step}"
    assert browser.run(SEEN_GHOSTS) == list(ghosts(rollout))[step], f"{rollout.id}, step {step}"


@pytest.mark.slow
def test_canvas_and_ghosts_at_every_step_are_those_of_the_trace(browser, show):
    """Forwards, backwards and in leaps; with tokens that are masked again and edited, and guesses that come
    back before the token that replaced them.
    """
    edited = make_two_step_rollout()
    edited.steps.append(RolloutStep(3, None, ("c",), False, edited=(make_committed_token(0, 8, "w", 0.9),)))
    edited.settings = {"query_policy": "proxy"}
    rollouts = [haunted(make_two_hop_rollout()), replace(edited, id="q2")]
    assert [sum(map(bool, shown)) for shown in ghosts(rollouts[0])] == [0, 6, 4, 3, 0]
    show(*rollouts)
    for number, rollout in enumerate(rollouts):
        browser.run(f"page.open({number})")
        last = len(rollout.steps) - 1
        for step in [*range(last + 1), *range(last, -1, -1), last, 1, last, 0, 2]:
            browser.run(f"page.go({step})")
            check_step(browser, rollout, step)
    browser.run("page.open(1); page.go(3)")
    assert browser.run("page.panes[0].tokens.map((node) => node.classList.contains('edited'))")[0]
    browser.run("page.open(0); page.go(1)")
    repeated = browser.run("page.panes[0].tokens.map((node) => node.classList.contains('repeated'))")
    assert repeated == [False] * 7 + [True], "of guesses that end the text only the first is spelled out"


def known(rollout, gold, hops=None):
    return Question(rollout.id, rollout.question, gold, hops=hops)


@pytest.mark.slow
def test_answers_are_right_or_wrong_where_gold_answers_are_known(browser, tmp_path):
    """By id and text; exact match, as `evaluate` has it. Lists are narrowed down by it, hops and words."""
    rollouts = [replace(make_two_hop_rollout(), id=f"q{n}", question=f"Where {n}?") for n in range(6)]
    rollouts[4].response = "### Bath"
    told = [known(rollouts[n], ("the Steventon.",), hops=1 + n % 2) for n in (0, 3, 4)]
    told += [known(rollouts[1], ("Bath", "Lyme"), 2), replace(told[0], id="q2")]
    (tmp_path / "page.html").write_text(
        render.render_page([render.TraceRun("", header(rollouts[0]), rollouts)], told)
    )
    browser.open(tmp_path / "page.html", "#question=2&step=4")
    right = browser.run("page.data.questions.map(({sides}) => sides[0].right ?? null)")
    assert right == [True, False, None, True, False, None]
    said = browser.run("[...page.panes[0].answer.children].map((n) => n.hidden ? '' : n.innerText)")
    assert said == ["", "Steventon wrong", "gold: Bath or Lyme"]
    shown = lambda: [  # noqa: E731
        browser.run("page.shownItems().map((item) => page.items.indexOf(item))"),
        browser.run("byId('count').textContent"),
    ]
    choose = "byId(%r).value = %r; byId(%r).dispatchEvent(new Event('input'))"
    assert shown() == [[0, 1, 2, 3, 4, 5], "(6)"]
    browser.run(choose % ("outcome", "right", "outcome"))
    assert shown() == [[0, 3], "(2 of 6)"]
    browser.run(choose % ("hops", "2 hops", "hops"))
    assert shown() == [[3], "(1 of 6)"]
    browser.run(choose % ("hops", "", "hops") + ";" + choose % ("outcome", "", "outcome"))
    browser.press_key("/")
    browser.press_key("4")
    assert shown() == [[4], "(1 of 6)"]
    browser.press_key("ArrowDown")
    browser.press_key("Enter")
    assert browser.run("page.number") == 4


def test_a_page_of_a_trace_names_the_questions_file(tmp_path):
    trace = write_trace(tmp_path / "trace.jsonl", make_two_hop_rollout())
    asked = tmp_path / "asked.jsonl"
    row = {"id": "q1", "question": make_two_hop_rollout().question, "golden_answers": ["Steventon"]}
    asked.write_text(json.dumps(row) + "\n")
    page_command([str(trace), "--questions", str(asked), "--html", str(tmp_path / "p.html")])
    (question,) = data_of((tmp_path / "p.html").read_text())["questions"]
    assert question["gold"] == ["Steventon"] and question["sides"][0]["right"]


@pytest.mark.slow
def test_the_keyboard_alone_reaches_everything(browser, show):
    show(make_two_hop_rollout(), replace(make_two_hop_rollout(), id="q2", question="Why?"))
    found = []
    for _ in range(25):
        browser.press_key("Tab")
        found.append(browser.run("document.activeElement.id || document.activeElement.className"))
    wanted = ["sought", "step", "first", "back", "play", "on", "last", "speed", "colour", "t", "query"]
    places = [found.index(name) for name in wanted]
    assert places == sorted(places), "in the order of reading"


@pytest.mark.slow
def test_two_traces_side_by_side(browser, show):
    """The shorter one stays at its end; the bridge is entered by one and never by the other."""
    short = static(make_two_hop_rollout())
    short.steps = short.steps[:3]
    show(traces={"static": [short], "interleaved": [make_two_hop_rollout()]}, place="#step=4", width=1600)
    assert browser.run(CANVAS) == [list(canvases(short))[2], list(canvases(make_two_hop_rollout()))[4]]
    cells = "[...document.querySelectorAll('.bridges td')].map((node) => node.textContent)"
    assert browser.run(cells) == ["never", "never", "step 1", "step 2"]
    heads = browser.run("[...document.querySelectorAll('.pane h3')].map((node) => node.textContent)")
    assert heads == ["static decode.query_policy=question", "interleaved decode.query_policy=proxy"]
    browser.run("document.querySelectorAll('.bridges button')[1].click()")
    assert browser.run("page.at") == 2


@pytest.mark.slow
def test_hostile_text_is_shown_as_text(browser, show):
    rollout = make_two_hop_rollout()
    shown = HOSTILE.replace("\ud800", "\ufffd")
    rollout.question = HOSTILE
    rollout.passages = {name: f"{name}\n{HOSTILE}" for name in rollout.passages}
    guesses = ProvisionalDelta("  50", (1, 7), ((7, HOSTILE),))
    rollout.steps[1] = replace(rollout.steps[1], query=HOSTILE, committed=WRITTEN, guesses=guesses)
    show(traces={HOSTILE: [rollout, rollout]}, place="#step=1")
    assert browser.run("page.panes[0].tokens[1].dataset.guess.toWellFormed()") == shown
    for node in (
        "document.querySelector('#question')",
        "document.querySelector('.card p')",
        "page.panes[0].tokens[0]",
    ):
        assert browser.run(f"{node}.textContent.toWellFormed()") == shown
    assert browser.run("[document.scripts.length, document.images.length]") == [2, 0]


@pytest.mark.slow
def test_steps_are_added_to_a_trace_that_is_running(browser, show):
    """Step by step it comes to show what the page of the finished trace shows."""
    shown = "document.querySelector('#panes').innerHTML.replace(/min-height: [0-9.]+px/, '')"
    show(haunted(make_two_hop_rollout()), place="#step=4")
    whole = browser.run(shown)
    browser.run(
        "side = page.data.questions[0].sides[0]; given = side.steps; ended = side.end;"
        "Object.assign(side, {steps: [], end: null}); page.open(0)"
    )
    for step in range(5):
        browser.run(f"page.addStep(given[{step}])")
        assert browser.run("[page.at, Number(page.step.max)]") == [step, step]
        assert browser.run(CANVAS) == [list(canvases(make_two_hop_rollout()))[step]]
    browser.run("page.finish(ended)")
    assert browser.run(shown) == whole
    browser.run("page.go(1); page.addStep({...given[4], written: [], remasked: [], texts: {}})")
    assert browser.run("page.at") == 1, "who looks back is left there"


@pytest.mark.slow
def test_sample_makes_the_page_of_what_it_answers(browser, tmp_path):
    """The canvases are those of the trace."""
    asked = ["--questions", ROOT / "dlm_rag/shipped/world/questions.jsonl", "--limit", "2"]
    command = [sys.executable, ROOT / "sample.py", *asked, "--html", "page.html", "--trace", "t1"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0 and "the page is in page.html" in done.stderr, done.stderr
    browser.open(tmp_path / "page.html")
    for number, rollout in enumerate(read_trace(tmp_path / "t1")):
        browser.run(f"page.open({number})")
        assert any(map(any, ghosts(rollout)))
        for step in range(len(rollout.steps)):
            browser.run(f"page.go({step})")
            check_step(browser, rollout, step)
