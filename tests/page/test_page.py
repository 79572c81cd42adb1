"""The trace page: its data, and what a real browser makes of it (skipped where there is no Chromium)."""

import json
import re
import subprocess
import sys
from dataclasses import replace

import numpy as np
import pytest
from PIL import Image

from dlm_rag.commands import page as page_command
from dlm_rag.decode.provisional_log import ProvisionalDelta, ProvisionalRecorder
from dlm_rag.decode.rollout import CommittedToken, Rollout, RolloutStep
from dlm_rag.decode.trace_file import read_trace
from dlm_rag.diffusion.commit_rules import Proposals
from dlm_rag.errors import TraceError
from dlm_rag.page.render import (
    TraceRun,
    align_tokens,
    attribute_words,
    build_page_record,
    find_bridge_entities,
    read_trace_runs,
    render_live_page,
    render_page,
    split_content_words,
    write_page,
)
from dlm_rag.questions import Question
from tests.support.legibility import COLOURS, WIDTHS, contrast
from tests.support.pages import END, cited, header, make_two_hop_rollout, write_trace
from tests.support.paths import ROOT
from tests.support.rollouts import make_committed_token, make_two_step_rollout
from tests.support.synthetic_rollout import make_synthetic_rollout

SEPARATORS = "\u2028\u2029"
HOSTILE = (
    f"</script><script>alert(1)</script><!-- <img src=x onerror=alert(2)> {SEPARATORS} @data@ &lt; \ud800"
)
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
        at = np.array([*GUESSED[step.step]], dtype=np.int64)
        tokens, sure = (np.array([guess[n] for guess in GUESSED[step.step].values()]) for n in (0, 1))
        found = Proposals(at, tokens, sure, *[np.zeros(len(at))] * 3)
        steps.append(replace(step, guesses=recorder.record_step(found)))
    return replace(rollout, steps=steps)


def static(rollout: Rollout) -> Rollout:
    """The same question asked once, of which nothing is cited."""
    steps = [replace(step, query=None, passage_ids=("emma",), dropped=()) for step in rollout.steps]
    steps[0] = rollout.steps[0]
    return replace(
        rollout, steps=steps, citations=[], settings={"query_policy": "question", "query_threshold": 0.0}
    )


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
    assert [text[start:stop] for start, stop in align_tokens(tokens, text)] == texts


def test_words_are_attributed_to_the_passage_that_is_cited_for_them():
    found = attribute_words(make_two_hop_rollout())
    assert [(f["word"], f["at"], f["step"], f["passage"]) for f in found] == [
        ("jane", [0], 1, "emma"), ("austen", [1], 1, "emma"), ("steventon", [3], 4, "austen"),
        ("steventon", [5], 4, "austen"),
    ]  # fmt: skip
    bare = make_two_hop_rollout()
    bare.citations[1] = cited("Steventon", unsupported=["steventon"])
    assert attribute_words(bare)[2]["passage"] is None
    assert attribute_words(replace(bare, citations=[])) == []


def test_pieces_are_the_text_and_its_content_words():
    cut = split_content_words("The Straße <b>")
    assert cut == ["The ", ["Straße", "strasse"], " <", ["b"], ">"]
    assert "".join(piece if isinstance(piece, str) else piece[0] for piece in cut) == "The Straße <b>"


def test_a_bridge_is_asked_for_and_then_found_or_never():
    """What stands in brackets is no part of a name; Emma is in the question, Dune is not cited."""
    one, other = find_bridge_entities([static(make_two_hop_rollout()), make_two_hop_rollout()])
    assert other == [{"passage": "austen", "entity": "Jane Austen", "asked": 1, "found": 2}]
    assert one == [{"passage": "austen", "entity": "Jane Austen", "asked": None, "found": None}]


def data_of(html):
    return json.loads(re.search(r'<script id="data"[^>]*>(.*?)</script>', html, re.DOTALL)[1])


def test_no_text_of_a_trace_ends_the_element_that_holds_it():
    rollout = make_two_hop_rollout()
    rollout.question = rollout.id = rollout.response = HOSTILE
    rollout.passages = dict.fromkeys(rollout.passages, HOSTILE)
    rollout.steps[1] = replace(
        rollout.steps[1], query=HOSTILE, committed=(CommittedToken(0, 1, HOSTILE, 0.5),)
    )
    runs = [TraceRun(HOSTILE, None, [rollout])]
    html = render_page(runs)
    assert html.count("<script") == html.count("</script") == 2 and html.isascii() is False
    assert not [mark for mark in SEPARATORS if mark in html]
    assert data_of(html) == json.loads(json.dumps(build_page_record(runs)))


def test_two_traces_share_the_questions_of_one_id_and_text(tmp_path):
    other = replace(make_two_hop_rollout(), id="q2")
    one = write_trace(tmp_path / "static.jsonl", static(make_two_hop_rollout()), static(other))
    two = write_trace(
        tmp_path / "interleaved.jsonl", make_two_hop_rollout(), replace(other, question="Why?")
    )
    record = build_page_record(read_trace_runs([one, two]))
    assert [question["id"] for question in record["questions"]] == ["q1"] and record["left_out"] == 2
    assert record["names"] == ["static", "interleaved"]
    assert record["settings"] == [["decode.query_policy=question"], ["decode.query_policy=proxy"]]
    (tmp_path / "other").mkdir()
    again = write_trace(tmp_path / "other" / "static.jsonl", make_two_hop_rollout())
    assert [run.name for run in read_trace_runs([one, again])] == [tmp_path.name, "other"]
    foreign = write_trace(tmp_path / "foreign.jsonl", replace(make_two_hop_rollout(), question="Why?"))
    with pytest.raises(TraceError, match="static and foreign have no question in common"):
        build_page_record(read_trace_runs([one, foreign]))


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
    page_command.main([str(trace), "--html", str(out)])  # of its own pages it writes the newer one
    assert out.read_text() == render_page(read_trace_runs([trace]))


def test_steps_that_no_decode_has_made_are_refused(tmp_path):
    rollout = make_two_hop_rollout()
    rollout.steps[1] = replace(rollout.steps[1], guesses=ProvisionalDelta("50"))
    path = write_trace(tmp_path / "t.jsonl", rollout)
    with pytest.raises(TraceError, match="t.jsonl: the line of question 'q1' is not from a decode"):
        read_trace_runs([path])


@pytest.mark.parametrize(
    "settings",
    [
        {"query_policy": ["proxy"]},
        {"query_policy": {}, "query_threshold": 0.5},
        {"query_policy": "proxy", "query_threshold": "0.5"},
        {"abstain": ["answer"]},
        {"abstain": "answer", "abstain_threshold": "high"},
    ],
    ids=str,
)
def test_settings_that_no_decode_has_are_refused(tmp_path, settings):
    path = write_trace(tmp_path / "t.jsonl", make_two_hop_rollout())
    header, *lines = map(json.loads, path.read_text().splitlines())
    header["settings"] |= settings
    path.write_text("\n".join(map(json.dumps, [header, *lines])) + "\n")
    with pytest.raises(TraceError, match="t.jsonl: .*"):
        read_trace_runs([path])


TWO_TRACES = {
    "static": [static(make_two_hop_rollout())],
    "interleaved": [haunted(make_two_hop_rollout())],
}

# In the browser.

CANVAS = """page.panes.map((pane) =>
  pane.tokens.map((node) => node.className.includes(' w ') ? node.textContent : null))"""
# The guess at each position, with the shade of its confidence; null where none is.
SEEN_GHOSTS = """page.panes[0].tokens.map((node) => node.classList.contains('g')
  ? [node.dataset.guess, Number(node.className.match(/ g([0-4])/)[1])] : null)"""
GHOST_COLOURS = """page.panes[1].tokens.filter((node) => node.matches('.g:not(.repeated)')).map((node) =>
  [Number(node.className.match(/ g([0-4])/)[1]), getComputedStyle(node, '::after').color])"""


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


def test_the_contrast_of_black_and_white_is_21():
    assert contrast("rgb(0, 0, 0)", "rgb(255, 255, 255)") == pytest.approx(21)
    assert contrast("rgb(119, 119, 119)", "rgb(255, 255, 255)") == pytest.approx(4.48, abs=0.01)


@pytest.fixture
def show(browser, tmp_path):
    """Opens the page of rollouts, or of two traces by their names."""

    def show(*rollouts, place="", traces=None, **window):
        traces = traces or {"": list(rollouts)}
        runs = [TraceRun(name, header(given[0]), given) for name, given in traces.items()]
        write_page(tmp_path / "page.html", runs)
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


AFTER = "getComputedStyle(page.panes[0].tokens[%d], '::after').content"


@pytest.mark.slow
def test_ghosts_come_and_go_by_key_and_by_box(browser, show):
    show(haunted(make_two_hop_rollout()), place="#step=3")
    facts = "page.panes[0].facts.textContent"
    assert "Steventon" in browser.run(AFTER % 5)
    assert "×" in browser.run(AFTER.replace("after", "before") % 3)
    assert browser.run("document.querySelector('.ghost').textContent") == "guesses, not committed"
    browser.run("page.panes[0].tokens[4].focus()")
    browser.press_key("ArrowRight")
    assert browser.run(facts) == "guess “ Steventon” · position 5 · not committed · confidence 0.70"
    browser.press_key("g")
    assert browser.run("[page.ghosts, byId('ghosts').checked]") == [False, False]
    assert "Steventon" not in browser.run(AFTER % 5) and browser.run(facts) == "masked · position 5"
    browser.run("byId('ghosts').focus()")
    browser.press_key(" ")
    assert browser.run("page.ghosts") and "Steventon" in browser.run(AFTER % 5)
    assert browser.run("page.timer === null"), "in a box a blank ticks, and plays nothing"


@pytest.mark.slow
def test_a_trace_without_guesses_says_so(browser, show):
    """Also where another one beside it has them."""
    told = "[...document.querySelectorAll('.pane')].map((p) => p.querySelector('h4 .note').textContent)"
    none = "its trace holds no guesses"
    show(make_two_hop_rollout())
    assert browser.run(told) == [none] and browser.run("byId('ghosts').disabled")
    browser.press_key("g")
    assert browser.run("page.ghosts")
    show(traces={"one": [make_two_hop_rollout()], "two": [haunted(make_two_hop_rollout())]})
    assert browser.run(told) == [none, "and guesses, not committed"]
    assert not browser.run("byId('ghosts').disabled")


@pytest.mark.slow
def test_what_is_shown_of_a_step(browser, show):
    """The query with its new, guessed and lost words, cards that come and go, words that are taken."""
    show(make_two_hop_rollout(), place="#step=1")
    texts = "(s) => [...document.querySelectorAll(s)].map((node) => node.textContent)"
    seen = lambda selector: browser.run(f"({texts})({selector!r})")  # noqa: E731
    assert seen(".query ins") == ["Jane", "Austen.", "Bat"] and seen(".query .guess") == ["Austen.", "Bat"]
    assert seen(".card.new b") == ["Dune"] and seen(".card mark") == ["Jane", "Austen"]
    browser.press_key("ArrowRight")
    assert "none was due" in seen(".asked h4")[0] and seen(".query ins") == []
    assert seen(".card.new b") == ["Jane Austen (author)"]
    assert seen(".card.left b") == ["Emma (novel)", "Dune"]
    assert "without room in the prompt: Emma (novel)" in seen(".found p.note")[-1]
    assert seen(".bridges button.reached") == ["step 1", "step 2"]
    assert not browser.run("page.panes[0].final.checkVisibility()")
    browser.press_key("ArrowRight")
    assert seen(".query del") == ["Bat"] and seen(".t.fallen") == [""]
    assert seen(".query .guess") == ["Steventon"], "it was masked again"
    assert seen(".t.end") == ["<end>"] and seen(".t.repeated") == []
    browser.press_key("End")
    assert browser.run("page.panes[0].final.checkVisibility()")
    assert browser.run("page.panes[0].final.textContent") == "Steventon" and seen(".query .guess") == []
    sources = ["Emma (novel) (emma, step 1)", *["Jane Austen (author) (austen, step 1)"] * 2]
    assert seen(".sources small") == sources
    assert seen(".t.repeated") == ["<end>"]
    words = browser.run("[...page.panes[0].rollout.wordsOnCanvas()]")
    assert words == ["Jane", "Austen.", "Steventon", "###"], "what ends the text is no word"
    browser.press_key("Home")
    assert seen(".card.new") == seen(".query ins") == [], "nothing was there before"


@pytest.mark.slow
def test_a_token_tells_its_step_confidence_and_source(browser, show):
    show(make_two_hop_rollout(), place="#step=4")
    facts = "page.panes[0].facts.textContent"
    box = "page.panes[0].tokens[1].getBoundingClientRect()"
    browser.move_pointer(*browser.run(f"[{box}.x + {box}.width / 2, {box}.y + {box}.height / 2]"))
    source = "“austen” from Emma (novel) (emma)"
    assert browser.run(facts) == f"“ Austen” · position 1 · step 1 · confidence 0.600 · {source}"
    browser.run("page.panes[0].tokens[0].focus()")
    for _ in range(3):
        browser.press_key("ArrowRight")
    assert browser.run("document.activeElement.textContent") == " Steventon"
    assert "step 4 · confidence 0.910" in browser.run(facts)
    assert browser.run("page.at") == 4, "within the canvas arrows go from token to token"
    assert browser.run("document.querySelector('.card.source b').textContent") == "Jane Austen (author)"
    browser.run("page.go(2)")
    assert "“ Bath” · position 3 · step 2" in browser.run(facts)
    assert "from" not in browser.run(facts), "the word was taken away again"


LINES = """page.panes[0].node.querySelectorAll('.lines path').values().map((path) => {
  const end = path.getPointAtLength(path.getTotalLength());
  const box = page.panes[0].node.getBoundingClientRect();
  const near = (mark) => Math.hypot(mark.getBoundingClientRect().left - box.left - end.x,
    mark.getBoundingClientRect().top + mark.getBoundingClientRect().height / 2 - box.top - end.y);
  const marks = [...document.querySelectorAll('mark')].sort((a, b) => near(a) - near(b));
  const card = marks[0].closest('.card').querySelector('b').textContent;
  return [card, marks[0].textContent, near(marks[0]) < 4, path.classList.contains('strong')];
}).toArray()"""


@pytest.mark.slow
@pytest.mark.parametrize("width", [390, 1280])
def test_lines_lead_from_the_words_of_a_step_to_their_passages(browser, show, width):
    show(make_two_hop_rollout(), place="#step=1", width=width)
    emma = "Emma (novel)"
    assert browser.run(LINES) == [[emma, "Jane", True, False], [emma, "Austen", True, False]]
    browser.run("page.go(3)")
    assert browser.run(LINES) == [], "the step wrote no word that a passage gave"
    browser.run("page.go(4)")
    assert browser.run(LINES) == [["Jane Austen (author)", "Steventon", True, False]] * 2
    browser.run("page.panes[0].tokens[2].focus()")
    browser.press_key("ArrowRight")
    assert browser.run("page.panes[0].told") == 3
    assert [line[3] for line in browser.run(LINES)] == [True, False]


def known(rollout, gold, hops=None):
    return Question(rollout.id, rollout.question, gold, hops=hops)


@pytest.mark.slow
def test_answers_are_right_or_wrong_where_gold_answers_are_known(browser, tmp_path):
    """By id and text; exact match, as `evaluate` has it. Lists are narrowed down by it, hops and words."""
    rollouts = [replace(make_two_hop_rollout(), id=f"q{n}", question=f"Where {n}?") for n in range(6)]
    rollouts[4].response = "### Bath"
    told = [known(rollouts[n], ("the Steventon.",), hops=1 + n % 2) for n in (0, 3, 4)]
    told += [known(rollouts[1], ("Bath", "Lyme"), 2), replace(told[0], id="q2")]
    write_page(tmp_path / "page.html", [TraceRun("", header(rollouts[0]), rollouts)], told)
    browser.open(tmp_path / "page.html", "#question=2&step=4")
    assert browser.run("page.data.questions.map(({sides}) => sides[0].right ?? null)") == [
        True, False, None, True, False, None,
    ]  # fmt: skip
    said = browser.run(
        "[...page.panes[0].answer.children].map((node) => node.hidden ? '' : node.innerText)"
    )
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


@pytest.mark.slow
def test_where_no_answer_is_given_the_page_says_why(browser, show):
    rollout = make_two_hop_rollout()
    rollout.response, rollout.citations = "### unknown", []
    closest = "I could not read an answer in these; closest:"
    for abstain, said in (("answer", closest), ("never", "unknown")):
        rollout.settings = rollout.settings | {"abstain": abstain}
        show(rollout, place="#step=99")
        assert browser.run("page.panes[0].final.innerText") == said
        marked = browser.run("page.panes[0].sources.querySelectorAll('mark').length")
        assert marked == (2 if abstain == "answer" else 0)


def test_a_page_of_a_trace_names_the_questions_file(tmp_path):
    trace = write_trace(tmp_path / "trace.jsonl", make_two_hop_rollout())
    asked = tmp_path / "asked.jsonl"
    row = {"id": "q1", "question": make_two_hop_rollout().question, "golden_answers": ["Steventon"]}
    asked.write_text(json.dumps(row) + "\n")
    page_command.main([str(trace), "--questions", str(asked), "--html", str(tmp_path / "p.html")])
    (question,) = data_of((tmp_path / "p.html").read_text())["questions"]
    assert question["gold"] == ["Steventon"] and question["sides"][0]["right"]


@pytest.mark.slow
def test_nothing_is_under_the_controls(browser, show):
    """They are above what they move, and stay in sight."""
    show(make_two_hop_rollout(), width=390, height=500)
    top = "document.querySelector(%r).getBoundingClientRect().%s"
    assert browser.run(top % ("#player", "bottom")) <= browser.run(top % (".pane", "top"))
    browser.run("scrollTo(0, 1e6)")
    assert browser.run(top % ("#player", "top")) == 0
    assert browser.run(top % (".found", "bottom")) > browser.run(top % ("#player", "bottom"))


@pytest.mark.slow
def test_on_a_phone_the_list_makes_room_for_the_question_that_is_chosen(browser, show):
    show(make_two_hop_rollout(), replace(make_two_hop_rollout(), id="q2", question="Why?"), width=390)
    shown = "[byId('questions').open, byId('question').textContent, byId('view').open]"
    browser.press_key("/")
    assert browser.run(shown)[0], "its search is in the list"
    browser.run("page.items[1].click()")
    assert browser.run(shown) == [False, "Why?", False]


@pytest.mark.slow
def test_a_page_without_a_question_has_no_controls(browser, tmp_path):
    (tmp_path / "live.html").write_text(render_live_page(False))
    browser.open(tmp_path / "live.html")
    assert not browser.run("byId('player').checkVisibility()")


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
def test_keys_slider_and_player_move(browser, show):
    show(make_two_hop_rollout(), replace(make_two_hop_rollout(), id="q2", question="Why?"))
    at = lambda: browser.run("[page.at, Number(page.step.value), byId('where').value]")  # noqa: E731
    for key, step in (("ArrowRight", 1), ("End", 4), ("ArrowLeft", 3), ("Home", 0)):
        browser.press_key(key)
        assert at() == [step, step, f"step {step} of 4"]
    browser.press_key("ArrowRight", shift=True)
    assert at()[0] == 4, "a leap ends at the last step"
    browser.run("page.step.value = 2; page.step.dispatchEvent(new Event('input'))")
    assert at()[:2] == [2, 2] and browser.run(CANVAS) == [list(canvases(make_two_hop_rollout()))[2]]
    browser.run("byId('speed').value = 60")
    browser.press_key(" ")
    wait = "const wait = () => page.timer ? setTimeout(wait, 5) : done(); wait();"
    browser.run(f"new Promise((done) => {{ {wait} }})")
    assert at()[0] == 4, "it has played to the end"
    browser.run("byId('speed').focus()")
    browser.press_key("ArrowLeft")
    assert at()[0] == 4, "there the arrows choose a speed"
    browser.run("page.items[0].focus()")
    browser.press_key("ArrowDown")
    assert browser.run("document.activeElement.textContent") == "Why?"
    browser.run("document.activeElement.click()")
    assert browser.run("document.querySelector('#question').textContent") == "Why?" and at()[0] == 0
    browser.run("new Promise((done) => setTimeout(done, 2 * SETTLED))")
    assert browser.run("location.hash") == "#question=2&step=0"


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
def test_what_a_trace_does_not_hold_is_not_shown(browser, tmp_path):
    """A trace of version 1 has neither texts of passages nor citations; a question that failed, no step."""
    old = replace(make_two_hop_rollout(), passages={}, citations=[], settings={})
    failed = Rollout("q2", "Why?", "joint", 4, error="the search failed")
    path = tmp_path / "page.html"
    write_page(path, [TraceRun("", None, [old, failed])])
    browser.open(path, "#step=4")
    assert browser.run(CANVAS) == [list(canvases(old))[4]]
    assert browser.run("document.querySelector('.card b').textContent") == "austen"
    assert (
        browser.run("document.querySelectorAll('mark, .bridges tr, .guess, .settings, .sources li').length")
        == 0
    )
    browser.run("page.open(1); page.play()")
    assert browser.run("page.panes[0].final.textContent") == "none, the search failed"
    assert browser.run(CANVAS) == [[None] * 4]


@pytest.mark.slow
def test_hostile_text_is_shown_as_text(browser, show):
    rollout = make_two_hop_rollout()
    shown = HOSTILE.replace("\ud800", "\ufffd")
    rollout.question = HOSTILE
    rollout.passages = {name: f"{name}\n{HOSTILE}" for name in rollout.passages}
    rollout.steps[1] = replace(
        rollout.steps[1], query=HOSTILE, committed=(CommittedToken(0, 1, HOSTILE, 0.5),)
    )
    guesses = ProvisionalDelta("  50", (1, 7), ((7, HOSTILE),))
    rollout.steps[1] = replace(rollout.steps[1], guesses=guesses)
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
@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
@pytest.mark.parametrize("width", [360, 1440])
def test_all_texts_can_be_read(browser, show, width, dark):
    """Contrast of 4.5 at every step and by both colours, of guesses of 3, the fainter the less sure; no
    text is wider than the window.
    """
    show(traces=TWO_TRACES, width=width, dark=dark)
    paper = browser.run("getComputedStyle(page.panes[1].node).backgroundColor")
    poor, shades = set(), {}
    for by in ("step", "confidence"):
        browser.run(f"byId('colour').value = '{by}'; page.colour()")
        for step in range(5):
            browser.run(f"page.go({step})")
            poor |= {name for name, text, behind in browser.run(COLOURS) if contrast(text, behind) < 4.5}
            shades |= {shade: contrast(colour, paper) for shade, colour in browser.run(GHOST_COLOURS)}
            wide, window = browser.run(WIDTHS)
            assert wide <= window == width
    assert not poor and sorted(shades) == [0, 1, 2, 3, 4]
    assert [shades[n] for n in range(5)] == sorted(shades.values())
    assert shades[0] >= 3 and shades[4] >= 4.5
    ground = browser.run("getComputedStyle(document.body).backgroundColor")
    assert (contrast(ground, "rgb(0, 0, 0)") < 2) == dark


@pytest.mark.slow
def test_a_reader_of_screens_hears_what_can_be_used_and_no_ghosts(browser, show):
    """As the browser's own accessibility tree has it; nor are ghosts in what is copied."""
    show(traces=TWO_TRACES, place="#step=1")
    assert browser.run("page.panes[1].canvas.textContent") == " Jane Austen"
    nodes = browser.call("Accessibility.getFullAXTree")["nodes"]
    named = [(node["role"]["value"], node["name"]["value"]) for node in nodes if "name" in node]
    said = [name for _, name in named]
    assert " Austen" in said and not any("Steventon" in text for text in said)
    used = [name for role, name in named if role in ("button", "slider", "combobox", "checkbox")]
    assert {"Step", "Speed", "Colour", "Guesses", "First step", "Play"} < {*used} and all(used)
    assert named.count(("group", "Canvas; arrow keys go from token to token")) == 2


@pytest.mark.slow
def test_a_thousand_steps_of_a_thousand_tokens(browser, show):
    """The bound is a hundred times what it takes: for what would grow with steps times tokens."""
    rollout = make_synthetic_rollout(1000, 1000)
    show(rollout)
    for step in (1, 500, 499, 1000, 0, 777):
        browser.run(f"page.go({step})")
        check_step(browser, rollout, step)
    spent = browser.run(
        "(() => { const begun = performance.now(); for (let n = 0; n < 20; n++) { page.go(500 + n);"
        " document.body.offsetHeight; } return (performance.now() - begun) / 20; })()"
    )
    assert spent < 1000


@pytest.mark.slow
def test_sample_makes_the_page_of_what_it_answers(browser, tmp_path):
    """On the screen, and with --out of its trace; the canvases are those of the trace."""
    for words in (["--trace", "t1"], ["--out", "answers.jsonl", "--trace", "t2"]):
        asked = ["--questions", ROOT / "dlm_rag/shipped/world/questions.jsonl", "--limit", "2"]
        command = [sys.executable, ROOT / "sample.py", *asked, "--html", "page.html", *words]
        done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
        assert done.returncode == 0 and "the page is in page.html" in done.stderr, done.stderr
        browser.open(tmp_path / "page.html")
        for number, rollout in enumerate(read_trace(tmp_path / words[-1])):
            browser.run(f"page.open({number})")
            assert any(map(any, ghosts(rollout)))
            for step in range(len(rollout.steps)):
                browser.run(f"page.go({step})")
                check_step(browser, rollout, step)


@pytest.mark.slow
def test_a_picture_of_a_page_has_a_frame_for_every_step(browser, tmp_path):
    page = tmp_path / "page.html"
    write_page(page, [TraceRun("", header(make_two_hop_rollout()), [make_two_hop_rollout()])])
    for name, frames in (("all.webp", 5), ("one.png", 1)):
        words = [sys.executable, ROOT / "docs" / "picture.py", page, tmp_path / name, "--width", "600"]
        subprocess.run(words, check=True)
        with Image.open(tmp_path / name) as picture:
            assert (picture.n_frames, picture.width) == (frames, 600)
            assert len({picture.seek(n) or picture.tobytes() for n in range(frames)}) == frames
