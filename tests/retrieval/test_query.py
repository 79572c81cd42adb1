"""Query policies and the retrieval schedule: pure functions, each sentence of theirs a test."""

import pytest

from dlm_rag.retrieval.base import build_query, resolve_query_threshold


@pytest.mark.parametrize(
    ("policy", "text"),
    [
        ("proxy", "Who wrote it? Emma was written by Jane."),
        ("committed", "Who wrote it? Emma was written by Jane."),
        ("question", "Who wrote it?"),
        ("feedback", "Who wrote it? Emma A novel."),
        ("two_rounds", "Who wrote it? Emma A novel."),
    ],
)
def test_what_each_policy_asks(policy, text):
    response = " Emma  was was written\nby Jane. "
    assert build_query(policy, " Who wrote  it?", response, "Emma\nA novel.").text == text


def test_the_question_keeps_its_repeated_words_the_rest_does_not():
    assert build_query("proxy", "was it was it", "it was it").text == "was it was it it was"


def test_parts_are_the_question_and_each_sentence_once():
    query = build_query("proxy", "Who?", "A wrote B. B was C. A wrote B. ### C")
    assert query.parts == ("Who?", "A wrote B.", "B was C.", "C")


def test_guesses_enter_from_the_query_threshold_on_and_never_at_one():
    assert resolve_query_threshold("proxy", 0.0) == 0.0 and resolve_query_threshold("proxy", 0.4) == 0.4
    assert resolve_query_threshold("proxy", 1.0) > 1 and resolve_query_threshold("committed", 0.0) > 1
