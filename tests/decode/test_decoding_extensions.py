"""A commit rule, a stochastic one and a query policy of one's own, named as `module:function`."""

import numpy as np
import pytest

from dlm_rag.engine.rules import Rule, SampledCommits, find_rule
from dlm_rag.errors import ConfigError
from dlm_rag.model.denoiser_config import EVIDENCE_LAYOUTS, EvidenceLayout
from dlm_rag.text import split_words
from tests.support.decoding import make_decoder

QUESTION = "Who wrote Emma?"


def commit_ends(candidates, context):
    """The first and the last candidate."""
    return np.unique([0, len(candidates.positions) - 1])


def toss_coins(candidates, context):
    """Each candidate with probability 1/2, by the question's own numbers; at least the first."""
    opened = context.draws[2, candidates.positions] < 0.5
    forced = not opened.any()
    opened[0] |= forced
    return SampledCommits(opened, len(opened) * np.log(0.5), forced)


coin = Rule(toss_coins, samples=True)


def ask_last_word(question, response, top_passage):
    return split_words(f"{question} {response}")[-1]


def commits(rollout):
    return [[token.position for token in step.committed] for step in rollout.steps[1:]]


def test_own_commit_rule(corpus_file):
    decoder = make_decoder(
        corpus_file, max_new_tokens=6, early_stopping=False, commit_rule=f"{__name__}:commit_ends"
    )
    assert commits(decoder.decode([QUESTION])[0]) == [[0, 5], [1, 4], [2, 3]]


@pytest.mark.parametrize("chosen", [None, [], "all", [0.5], [7], [-1], {0}, np.zeros(6, bool)], ids=str)
def test_what_an_own_rule_returns_is_checked(corpus_file, monkeypatch, chosen):
    monkeypatch.setitem(globals(), "commit_ends", lambda candidates, context: chosen)
    find_rule.cache_clear()
    decoder = make_decoder(corpus_file, max_new_tokens=6, commit_rule=f"{__name__}:commit_ends")
    with pytest.raises(ConfigError, match="not the indices of at least 1 of"):
        decoder.decode([QUESTION])
    find_rule.cache_clear()


def test_own_stochastic_rule_is_recorded_and_the_same_in_a_batch(corpus_file):
    settings = {"max_new_tokens": 8, "early_stopping": False, "commit_rule": f"{__name__}:coin"}
    alone = make_decoder(corpus_file, batch_size=1, **settings).decode([QUESTION])[0]
    together = make_decoder(corpus_file, batch_size=3, **settings).decode([QUESTION, "Who?", "Why?"])[0]
    assert commits(alone) == commits(together)
    for step in alone.steps[1:]:
        assert step.action.log_prob == pytest.approx(len(step.action.candidates) * np.log(0.5))


def place_question_first(prompt, passage_length):
    """The question from position 0, all passages as one segment after it."""
    asked, facts = prompt.head + prompt.tail, tuple(token for fact in prompt.facts for token in fact)
    return [(facts, len(asked)), (asked, 0)]


def test_own_evidence_layout(corpus_file, monkeypatch):
    for name in list(EVIDENCE_LAYOUTS):
        own = EvidenceLayout(place_question_first) if name == "prefix" else EVIDENCE_LAYOUTS[name]
        monkeypatch.setitem(EVIDENCE_LAYOUTS, f"own_{name}", own)
    found = {
        name: commits(make_decoder(corpus_file, name).decode([QUESTION])[0])
        for name in ("own_joint", "joint", "own_independent", "independent", "own_prefix", "prefix")
    }
    assert found["own_joint"] == found["joint"] and found["own_independent"] == found["independent"]
    alone = make_decoder(corpus_file, "own_prefix", batch_size=1).decode([QUESTION])[0]
    assert commits(alone) == found["own_prefix"] and alone.finished


def test_own_query_policy(corpus_file):
    decoder = make_decoder(corpus_file, max_new_tokens=4, query_policy=f"{__name__}:ask_last_word")
    assert decoder.decode([QUESTION])[0].steps[0].query == "emma"
