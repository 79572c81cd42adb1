"""When no answer is given, in the record, the scores, the terminal, on the page and from the server."""

import math

import pytest

from dlm_rag.commands.arguments import ANSWER_SETTINGS, parse_command_line
from dlm_rag.config import DecodeConfig
from dlm_rag.decode.rollout import (
    ABSTAIN_REASONS,
    CommittedToken,
    Rollout,
    RolloutStep,
    cite_passages,
    describe_abstention,
    find_closest,
)
from dlm_rag.decode.terminal import render_answer
from dlm_rag.engine.engine import resolve_settings
from dlm_rag.engine.row import Canvas, Row
from dlm_rag.evaluation.compare import summarize_scores
from dlm_rag.evaluation.metrics import score_rollout
from dlm_rag.evaluation.tables import build_comparison_tables
from dlm_rag.model.denoiser_config import DenoiserConfig
from dlm_rag.page.render import build_end_record
from dlm_rag.questions import Question
from tests.support.rollouts import render_to_text
from tests.support.tiny_models import tiny_tokenizer

QUESTION = "To whom was Neaflaind Klopo married?"
SENTENCE = "It was Pristelk Nothea whom the 43rd mayor married."
PASSAGES = {"1": f"Neaflaind Klopo\n{SENTENCE}"}
RIGHT = "Neaflaind Klopo was wedded to Pristelk Nothea. ### Pristelk Nothea"
SLIP = "Tflaindm Klopo was wedded to Pristelk Nothea. ### Pristelk Nothea"
WRONG = "Neaflaind Klopo was wedded to Pristelk Nothea. ### Pristel Nothea"


def answered(response, abstain="response", passages=PASSAGES, form="marked"):
    """A rollout that has written a response in one step, with the passages in context."""
    rollout = Rollout("q", QUESTION, "joint", 8, passages=passages, evidence_texts=passages)
    rollout.steps = [RolloutStep(n, QUESTION, tuple(passages), True) for n in range(2)]
    rollout.response, rollout.settings, rollout.finished = response, {"abstain": abstain}, True
    rollout.answer_form, whole = form, [(0, len(response))]
    rollout.citations = cite_passages(
        response, whole, [1], lambda step: tuple(passages), passages, QUESTION, form
    )
    return rollout


@pytest.mark.parametrize(
    ("response", "reasons", "unsupported"),
    [  # reasons: of never, answer, response
        (RIGHT, ("", "", ""), []),
        (SLIP, ("", "", "unsupported_words"), ["tflaindm"]),
        (WRONG, ("", "unsupported_words", "unsupported_words"), ["pristel"]),
        ("It was so. ### the 43rd Klopo", ("", "", ""), []),
        ("It was all wedded. ### the mayor", ("", "", ""), []),  # names alone are checked before the answer
        ("### Yes", ("", "", ""), []),
        ("### unknown", ("", "no_passage", "no_passage"), []),
        ("nothing is marked", ("", "", ""), []),
    ],
)
def test_who_knows_no_answer_gives_none_and_says_why(response, reasons, unsupported):
    written = answered(response, "never").answer
    for mode, reason in zip(("never", "answer", "response"), reasons, strict=True):
        rollout = answered(response, mode)
        record = rollout.to_dict()
        assert record["answer"] == rollout.answer == ("" if reason else written)
        assert record["unsupported"] == unsupported and record["response"] == response
        assert record.get("abstained", False) == bool(reason)
        assert record.get("abstain_reason", "") == reason
    rollout.error = "its search failed"
    assert "abstained" not in rollout.to_dict()


NAMED = {
    "emma": "Emma (novel)\nEmma is a novel by Jane Austen, first published in 1815.",
    "jane": "Jane Austen\nJane Austen was born in Steventon on 16 December 1775.",
    "half": "Emma; or, a Draft\nThe Boat has the draft of 1816.",
    "boat": "The Boat\nThe Boat is a play by Olga Ives.",
    "short": "Night Ferry is a film directed by David Eady.",
    "dover": "Dover; a Town of Kent\nDover has the mayor Ann Lee.",
    "village": "<b>Larkspur</b>\nLarkspur has the mayor Olga Ives.",
    "town": "Zürich\nZürich has been a town since 1218.",
    "note": "The centrifuge of the second floor was repaired on Tuesday by Olga and it runs again",
}


@pytest.mark.parametrize(
    ("response", "reason"),
    [
        ("Emma ### 1815", ""),
        ("Jane Austen ### 1815", "not_named"),  # another passage has it
        ("Emma; Jane ### 1775", "not_named"),  # a part of a title names nothing
        ("Who wrote Emma? ### 1815", "not_named"),
        ("### 1815", "not_named"),
        ("Emma; or, a Draft ### 1816", ""),
        ("Emma; Jane Austen ### Jane Austen", ""),  # the first page names her
        ("Jane Austen ### Austen Steventon", "not_named"),  # of two places
        ("Jane Austen; Emma ### Emma", ""),  # it names the first page
        ("The Boat; Jane Austen ### Jane Austen", "not_named"),
        ("The centrifuge of the second floor ### Olga", ""),  # a passage without a title
        ("Night Ferry ### David Eady", ""),
        ("The Boat has the draft ### 1816", ""),  # behind a title that says little
        ("The Boat ### 1816", "not_named"),  # a title names what has it alone
        ("Olga ### Tuesday", "not_named"),
        ("Zurich ### 1218", ""),
        ("Dover ### Ann Lee", ""),  # a part of a title with a semicolon, that no other has
        ("Kent ### Ann Lee", "not_named"),
        ("Larkspur ### Olga Ives", ""),
        ("Emma ### unknown", "no_passage"),
        ("Emma; Jane Austen", "no_answer"),
    ],
)
def test_a_model_that_names_its_passages_gives_answers_that_these_have(response, reason):
    rollout = answered(response, "answer", NAMED, "titled")
    assert rollout.abstain_reason == reason and bool(rollout.answer) == (not reason)
    rollout.settings = {"abstain": "never"}
    assert rollout.abstain_reason == "" and bool(rollout.answer) == (reason != "no_answer")


def test_words_of_the_question_name_the_passages_that_have_them():
    named = (
        ("published ### 1815", ""),
        ("published ### 1775", "not_named"),
        ("born ### 1775", "not_named"),
    )
    for response, reason in named:
        rollout = answered(response, "answer", NAMED, "titled")
        rollout.question = "When was it first published?"
        assert rollout.abstain_reason == reason


def test_an_answer_is_less_sure_where_its_passages_say_little_of_the_question():
    """By hand: two of three words are missing; a nat less of relevance."""
    rollout = answered("Emma ### 1815", "answer", NAMED, "titled")
    rollout.confidence = 0.9
    known, less, fifth = "When was Émma published?", "When was Emma printed in York?", math.e**-0.2
    cases = (known, None, 0.9), (less, None, 0.9 * 3**-0.3), (known, 2.0, 0.9), (known, 1.0, 0.9 * fifth)
    for question, relevance, sure in cases:
        rollout.question, rollout.relevance = question, relevance
        for threshold, reason in ((sure - 1e-9, ""), (sure + 1e-9, "unsure")):
            rollout.settings = {"abstain": "answer", "answer_threshold": threshold}
            assert rollout.abstain_reason == reason


def finish_written(text, words=None, **settings):
    """The rollout of bytes and an end token, written two a step, the n-th with probability exp(-n / 10)."""
    tokenizer, ids = tiny_tokenizer(), [*text.encode(), 257]
    canvas, rollout = Canvas(len(ids), 256), Rollout("q", QUESTION, "joint", len(ids))
    canvas.ids[:], canvas.masked[:] = ids, False
    tokens = [CommittedToken(n, token, "", math.exp(-n / 10), -n / 10) for n, token in enumerate(ids)]
    parts = [tuple(tokens[n : n + 2]) for n in range(0, len(ids), 2)]
    rollout.steps = [RolloutStep(n, QUESTION, (), False, part) for n, part in enumerate([(), *parts])]
    rollout.settings = {"abstain": "never"} | settings
    Row(0, Question("q", QUESTION), DecodeConfig(), canvas, None, rollout, words=words).finish(tokenizer)
    return rollout


def test_an_answer_below_the_threshold_is_not_given(monkeypatch):
    """Its confidence is the mean of its tokens and of the end right after them, whatever its length."""
    yes = finish_written(" Neaflaind Klopo ### Yes", abstain="answer", answer_threshold=0.105)
    mean = math.exp(-(21 + 22 + 23 + 24) / 40)  # 0.1054
    assert (yes.answer, yes.confidence) == ("Yes", pytest.approx(mean)) and yes.to_dict()["confidence"]
    yes.settings["answer_threshold"] = 0.106
    assert (yes.answer, yes.abstain_reason, yes.written_answer) == ("", "unsure", "Yes")
    assert finish_written("### Yes", answer_threshold=1.0).answer == "Yes"
    assert finish_written("### Yes, so.").confidence == pytest.approx(math.exp(-(4 + 10) / 20))
    assert finish_written("nothing is marked").confidence is None
    assert finish_written("### Yes", words=1).confidence == pytest.approx(math.exp(-(4 + 6) / 20))
    spans = [(0, 1), (1, 2), (2, 4), (4, 4)]  # a token that ends behind the response
    monkeypatch.setattr("dlm_rag.tokenizer.Tokenizer.decode_with_offsets", lambda *_: ("So.\n", spans))
    assert finish_written("So.\n").confidence is None


def test_an_unset_mode_is_the_checkpoints_own_and_that_of_a_public_one_is_never():
    own = DenoiserConfig(8, abstain="answer")
    assert resolve_settings(DecodeConfig(), own).abstain == "answer"
    assert resolve_settings(DecodeConfig(abstain="never"), own).abstain == "never"
    assert resolve_settings(DecodeConfig(), DenoiserConfig(8)).abstain == "never"
    words = parse_command_line("", ["--answer-anyway"], ANSWER_SETTINGS)
    assert words.config.decode.abstain == "never"


def test_an_abstention_is_not_right_and_the_tables_say_how_many_there_are():
    question = Question("q", QUESTION, golden_answers=["Pristelk Nothea"])
    responses = (RIGHT, SLIP, "### unknown", "### Nothea")
    scores = [score_rollout(answered(response), question) for response in responses]
    assert [score.exact_match for score in scores] == [1, 0, 0, 0]
    summary = summarize_scores(scores, {"all": [0, 1, 2, 3]})
    assert summary["all"]["abstained"].mean == summary["all"]["answered_match"].mean == 0.5
    tables = build_comparison_tables({"all": [0, 1, 2, 3]}, {"one": summary}, {}, "squad")
    (shares,) = [table for table in tables if "Abstentions" in table.title]
    assert [cell.split()[0] for cell in shares.rows[0]] == ["one", "50.0", "50.0", "25.0"]
    anyway = [score_rollout(answered(response, "never"), question) for response in responses]
    assert [score.exact_match for score in anyway] == [1, 1, 0, 0]
    summary = summarize_scores(anyway, {"all": [0, 1, 2, 3]})
    tables = build_comparison_tables({"all": [0, 1, 2, 3]}, {"one": summary}, {}, "squad")
    assert not any("Abstentions" in table.title for table in tables)


@pytest.mark.parametrize(
    ("response", "reason"), [(SLIP, "unsupported_words"), ("### unknown", "no_passage")]
)
def test_terminal_and_page_say_in_a_sentence_why(response, reason):
    rollout = answered(response)
    said = describe_abstention(reason, rollout.closest)
    assert said.startswith("I could not read an answer in these") and said.endswith("closest:")
    shown = " ".join(render_to_text(render_answer(rollout)).replace("│", " ").split())
    assert said in shown and SENTENCE in shown
    end = build_end_record(rollout, [])
    assert (end["answer"], end["abstained"]) == ("", said)
    near = [{"id": "1", "title": "Neaflaind Klopo", "sentence": SENTENCE}]
    assert end["closest"] == rollout.to_dict()["closest"] == near
    assert "closest" not in answered(RIGHT).to_dict()
    rollout.passages = {}
    assert describe_abstention(reason, rollout.closest) == f"I do not know: {ABSTAIN_REASONS[reason]}."
    assert build_end_record(answered(RIGHT), [])["abstained"] == ""


def test_the_closest_sentences_are_those_with_most_words_of_the_question():
    passages = {
        "a": "Oslo\nOslo is large. Its mayor is Anna.",
        "b": "Kellerup is a town. The mayor of Kellerup is Jens Holm.",
        "c": "Bees make honey.",
        "d": "Kellerup\nA town on a fjord. Its mayor keeps bees.",
    }
    found = find_closest("Who is the mayor of Kellerup?", passages)
    assert [each["id"] for each in found] == ["b", "d"]
    assert [each["sentence"] for each in found] == [
        "The mayor of Kellerup is Jens Holm.",
        "Its mayor keeps bees.",
    ]
    assert find_closest("Who?", passages) == [] and find_closest("What of Rome?", passages) == []
    (long,) = find_closest("honey", {"e\x1b[2K\n[2] x": "honey\r[2] Forged " + "x " * 9000})
    assert len(long["sentence"]) == 300 and (long["title"] + long["sentence"]).isprintable()
