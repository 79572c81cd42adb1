"""Several settings compared: which they are, intervals against known ones, tables that hold what is."""

import json
import math
import random

import pytest

from dlm_rag.errors import ConfigError
from dlm_rag.evaluation.compare import (
    Estimate,
    bootstrap,
    compare_to_first,
    group_questions,
    read_settings,
    summarise,
)
from dlm_rag.evaluation.metrics import Score
from dlm_rag.evaluation.report import answers_per_second, grids, markdown, percent, plot
from dlm_rag.questions import Question


def a_score(exact_match, recall=1.0):
    return Score(exact_match, exact_match, recall, recall, 3.0, 20.0, 0.5)


def test_settings_by_name_by_value_and_joined():
    assert " ".join(read_settings("all")) == "interleaved committed static feedback none oracle"
    found = read_settings("static, oracle+retrieval.kind=dense,decode.commit_rule=grounded")
    assert found["static"] == ["decode.query=question"]
    assert found["oracle+retrieval.kind=dense"][-1] == "retrieval.kind=dense"
    assert found["decode.commit_rule=grounded"] == ["decode.commit_rule=grounded"]
    with pytest.raises(ConfigError, match="'statik' is neither .*nearest: 'static'"):
        read_settings("interleaved,statik")
    with pytest.raises(ConfigError, match="'questions=other.jsonl' is neither"):
        read_settings("static,questions=other.jsonl")  # it would be scored against these questions
    with pytest.raises(ConfigError, match="named twice"):
        read_settings("static,static")


def test_questions_are_grouped_by_hops_and_labels():
    questions = [
        Question("a", "?", hops=1),
        Question("b", "?", hops=2, labels=("hard",)),
        Question("c", "?", hops=3, labels=("hard",)),
    ]
    assert group_questions(questions) == {
        "all": [0, 1, 2], "1 hop": [0], "2 hops": [1], "3 hops": [2], "hard": [1, 2],
        "2 hops, hard": [1], "3 hops, hard": [2], "unlabelled": [0], "1 hop, unlabelled": [0],
    }  # fmt: skip
    assert list(group_questions([Question("a", "?")])) == ["all"]


def test_the_bootstrap_interval_is_the_normal_one_for_many_values():
    rng = random.Random(0)
    values = [float(rng.random() < 0.3) for _ in range(400)]
    found = bootstrap(values)
    half = 1.96 * math.sqrt(found.mean * (1 - found.mean) / 400)
    assert found.low == pytest.approx(found.mean - half, abs=0.008)
    assert found.high == pytest.approx(found.mean + half, abs=0.008)
    assert bootstrap(values) == found, "seeded"
    assert bootstrap([1.0, None, 1.0]) == Estimate(1.0, 1.0, 1.0) and bootstrap([None]) is None


def test_paired_differences_are_narrower_than_the_settings_apart():
    """Two settings that agree on all questions but ten: the difference is known far better."""
    rng = random.Random(1)
    first = [float(rng.random() < 0.5) for _ in range(200)]
    second = [0.0 if n < 20 else value for n, value in enumerate(first)]
    groups = {"all": list(range(200))}
    scores = {"first": [a_score(v) for v in first], "second": [a_score(v) for v in second]}
    (difference,) = compare_to_first(scores, groups).values()
    found, alone = difference["all"]["exact_match"], bootstrap(first)
    assert found.mean == pytest.approx(sum(first[:20]) / 200)
    assert found.low > 0 and found.high - found.low < 0.6 * (alone.high - alone.low)


def test_tables_and_picture_hold_what_was_measured(tmp_path):
    questions = [Question("a", "?", hops=1), Question("b", "?", hops=2)]
    groups = group_questions(questions)
    scores = {"one": [a_score(1.0), a_score(1.0)], "two": [a_score(0.0), a_score(1.0, None)]}
    summaries = {name: summarise(theirs, groups) for name, theirs in scores.items()}
    found = grids(groups, summaries, compare_to_first(scores, groups))
    assert found[0].rows[1] == ["1 hop (1)", "100.0 [100, 100]", "0.0 [0, 0]"]
    assert found[1].rows[0][-1] == "2.00 [2.00, 2.00]", "answers a second"
    assert found[-1].rows[1] == ["1 hop (1)", "+100.0 [+100, +100]"]
    stamp = {"commit": "c0ffee", "date": "d", "device": "cpu", "threads": 2, "attention": "sdpa", "seed": 0}
    text = markdown(found, stamp)
    assert "| 1 hop (1) | 100.0 [100, 100] | 0.0 [0, 0] |" in text and "c0ffee" in text
    plot(tmp_path / "scores.png", groups, summaries)
    assert (tmp_path / "scores.png").read_bytes().startswith(b"\x89PNG")


def test_numbers_as_people_read_them():
    assert percent(Estimate(0.85, 0.801, 0.892)) == "85.0 [80, 89]" and percent(None) == "-"
    assert percent(Estimate(-0.05, -0.1, 0.0), signed=True) == "-5.0 [-10, +0]"
    assert answers_per_second(Estimate(0.5, 0.25, 1.0)) == Estimate(2.0, 1.0, 4.0)


def test_labels_of_questions_are_their_true_fields(tmp_path):
    from dlm_rag.questions import read_questions

    path = tmp_path / "q.jsonl"
    row = {"id": 1, "question": "?", "held_out_path": True, "held_out_wording": False, "hops": 2}
    path.write_text(json.dumps(row))
    assert read_questions(path)[0].labels == ("held_out_path",)
