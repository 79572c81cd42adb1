"""Commit rules: arithmetic a reader can follow."""

import numpy as np
import pytest

from dlm_rag.config import DecodeConfig
from dlm_rag.engine import rules
from dlm_rag.errors import ConfigError


def values(*numbers):
    return np.array(numbers, dtype=np.float64)


def proposals(confidence, entropy=None, margin=None):
    n = len(confidence)
    zeros = np.zeros(n)
    return rules.Proposals.from_arrays(
        positions=np.arange(n), token_ids=np.arange(n), confidence=values(*confidence),
        log_prob=np.log(values(*confidence)), entropy=zeros if entropy is None else values(*entropy),
        margin=zeros if margin is None else values(*margin),
    )  # fmt: skip


def choose(rule, found, **settings):
    least = settings.pop("least", 1)
    config = DecodeConfig(commit_rule=rule, **settings)
    chosen, _ = rules.choose_commits(found, rules.RuleContext(config, least))
    return chosen.positions.tolist()


IDS, SURE = np.arange(4), values(0.95, 0.99, 0.4, 0.99)
ENTROPY = values(0.5, 0.01, 0.06, 0.04)  # ascending: the sums without the largest are 0, 0.01, 0.05, 0.11


@pytest.mark.parametrize(
    ("chosen", "expected"),
    [
        (rules.select_by_threshold(values(0.95, 0.2, 0.9), 0.9), [0, 2]),
        (
            rules.select_by_threshold(values(0.1, 0.5, 0.5), 0.9),
            [1],
        ),  # none clears: the earlier of two equals
        (rules.select_by_threshold(values(1.0, 1.0, 1.0), 1.01), [0]),  # one token a call
        (rules.select_by_threshold(values(0.95, 0.5, 0.92, 0.91), 0.9, least=2), [0, 2, 3]),
        (rules.select_highest(values(0.1, 0.9, 0.5, 0.9), 3), [1, 2, 3]),  # in canvas order
        (rules.select_highest(values(0.1), 3), [0]),
        (rules.select_by_entropy_bound(ENTROPY, 0.1), [1, 2, 3]),
        (rules.select_by_entropy_bound(ENTROPY, 0.11 + 1e-9), [0, 1, 2, 3]),
        (rules.select_by_entropy_bound(ENTROPY, 0.0), [1]),
        (rules.select_left_to_right(IDS, SURE, 0.9), [0, 1]),  # no token behind an unsure one
        (rules.select_left_to_right(IDS, SURE, 0.999, least=3), [0, 1, 2]),
        (rules.select_left_to_right(IDS, SURE, 0.1), [0, 1, 2, 3]),
        (
            rules.select_left_to_right(np.array([5, 6, 6, 7]), np.ones(4), 0.9),
            [0, 1],
        ),  # a repeated token waits
        (rules.select_left_to_right(np.array([5, 6, 6, 7]), np.ones(4), 0.9, least=4), [0, 1, 2, 3]),
    ],
)
def test_rules_by_hand(chosen, expected):
    assert chosen.tolist() == expected


def test_steps_of_a_block():
    assert rules.compute_step_sizes(16, 10, "even") == (2,) * 6 + (1,) * 4
    for length in range(1, 40):
        for steps in range(1, 40):
            for schedule in ("even", "rounded"):
                sizes = rules.compute_step_sizes(length, steps, schedule)
                assert sum(sizes) == length and min(sizes) >= 1 and len(sizes) <= steps
                assert max(sizes) - min(sizes) <= 1


def test_a_rounded_schedule_takes_its_share_of_what_is_left():
    """16 in 10 steps: 1.6, 14/9, 1.5, 10/7, 1.5, 1.4, 1.5, 5/3, 1.5, 2; a half goes either way."""
    assert rules.compute_step_sizes(16, 10, "rounded") == (2, 2, 2, 1, 2, 1, 1, 2, 1, 2)
    assert rules.compute_step_sizes(4, 3, "rounded") == (1, 1, 2)
    assert rules.compute_step_sizes(4, 3, "even") == (2, 1, 1)


@pytest.mark.parametrize(
    ("rule", "expected"),
    [
        ("threshold", [0, 1, 2]), ("top_k", [0, 1, 2]), ("sequential", [0, 1, 2]),
        ("entropy_bound", [1, 2, 3]), ("entropy", [1, 2, 3]), ("margin", [1, 2, 3]),
    ],
)  # fmt: skip
def test_the_least_that_a_step_commits(rule, expected):
    found = proposals((0.8, 0.7, 0.6, 0.5), (0.9, 0.7, 0.6, 0.5), (0.1, 0.2, 0.3, 0.4))
    assert choose(rule, found, least=3) == expected
    assert len(choose(rule, found)) == 1
    assert len(choose(rule, found, least=9)) == 4, "never more than there are"


def test_select_reads_the_value_that_belongs_to_the_rule():
    found = proposals((0.9, 0.8, 0.7), entropy=(0.3, 0.1, 0.2), margin=(0.1, 0.2, 0.3))
    assert choose("top_k", found, tokens_per_step=2) == [0, 1]
    assert choose("entropy", found, tokens_per_step=2) == [1, 2]
    assert choose("margin", found) == [2], "one a step where nothing is said"
    assert choose("threshold", found, commit_threshold=0.75) == [0, 1]
    assert choose("threshold", found, commit_threshold=0.5, tokens_per_step=2) == [0, 1], "at most two"
    with pytest.raises(ConfigError, match=r"decode\.commit_rule=magic"):
        rules.find_rule("magic")
