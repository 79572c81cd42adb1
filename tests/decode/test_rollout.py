"""The trajectory as data: replayed and scored without the model."""

import pytest

from dlm_rag.decode.rollout import RolloutStep
from dlm_rag.text import extract_sentences
from tests.support.rollouts import canvases_of, make_committed_token, make_two_step_rollout


def test_replay_shows_the_canvas_after_each_step():
    """Tokens of a step were committed with the evidence of the step before."""
    rollout = make_two_step_rollout()
    assert list(canvases_of(rollout, 9)) == [[9, 9, 9], [5, 6, 9], [5, 7, 9]]
    assert rollout.commit_steps() == {0: 1, 1: 2}
    assert rollout.evidence_at(1) == ("a", "b") and rollout.evidence_at(2) == ("b", "c")
    with pytest.raises(ValueError, match="step 0 commits nothing"):
        rollout.evidence_at(0)


def test_an_edit_is_the_token_from_its_step_on():
    """And no commit, where the last steps that committed within a block are counted."""
    rollout = make_two_step_rollout()
    assert [rollout.count_steps_within(*span) for span in ((0, 2), (1, 2), (2, 3))] == [2, 2, 0]
    edited = (make_committed_token(0, 8, "w", 0.9),)
    rollout.steps.append(RolloutStep(3, None, ("c",), False, edited=edited))
    assert list(canvases_of(rollout, 9))[-1] == [8, 7, 9]
    assert rollout.commit_steps() == {0: 3, 1: 2} and rollout.tokens_committed == 2
    assert rollout.count_steps_within(0, 2) == 0


def test_counts_and_the_line_of_the_answers_file():
    rollout = make_two_step_rollout()
    assert rollout.seconds == {"retrieve": 0.5}
    expected = {
        "id": "q1", "question": "Who?", "answer": "z", "response": "x ### z", "evidence": ["b", "c"],
        "unsupported": [], "citations": [], "steps": 2, "forwards": 2, "retrievals": 2, "tokens": 2,
        "seconds": {"retrieve": 0.5},
    }  # fmt: skip
    assert rollout.to_dict() == expected


def test_sentences_end_at_stops_line_ends_and_the_marker():
    assert extract_sentences("A b. C d! \n E ### F ... ") == ["A b.", "C d!", "E", "F ..."]
