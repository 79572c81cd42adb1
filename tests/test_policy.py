"""Policies over a step: outcomes that are enumerated, scores whose mean is 0, gradients by differences."""

import functools
import itertools
import json
import math

import numpy as np
import pytest
import torch
from conftest import examples
from hypothesis import given
from hypothesis import strategies as st

from dlm_rag.decode.actions import sampled
from dlm_rag.decode.proposals import Wanted, read_proposals
from dlm_rag.diffusion.commit import Proposals, threshold
from dlm_rag.diffusion.policy import Soft, drawn, gate_log_prob, outcomes, picked, step_log_prob
from dlm_rag.retrieval.base import Query
from dlm_rag.retrieval.bm25 import BM25Retriever
from dlm_rag.retrieval.corpus import open_corpus

V, MASK = 4, torch.tensor([3])  # three tokens and the mask
SOFT = Soft(0.8, 0.7, 0.6)


def logits_of(seed: int, n: int, dtype=torch.float64) -> torch.Tensor:
    return torch.randn(n, V, generator=torch.Generator().manual_seed(seed), dtype=dtype) * 2


def actions(n: int):
    """Every action at n candidates: what each took (-1: it stayed), and whether that was forced."""
    tokens = range(V - 1)
    for taken in itertools.product([-1, *tokens], repeat=n):
        if any(token >= 0 for token in taken):
            yield taken, False
    for place, token in itertools.product(range(n), tokens):
        yield tuple(token if at == place else -1 for at in range(n)), True


def log_prob_of(logits, taken, forced, soft=SOFT):
    taken = torch.tensor(taken)
    parts = picked(outcomes(logits, MASK, soft), taken)
    step = torch.zeros(len(taken), dtype=torch.long)
    return step_log_prob(parts, step, taken >= 0, torch.tensor([forced]))[0]


@pytest.mark.parametrize(("dtype", "close"), [(torch.float64, 1e-12), (torch.float32, 1e-6)])
@pytest.mark.parametrize("n", [1, 2, 3])
def test_the_outcomes_of_a_step_sum_to_one_and_their_mean_score_is_zero(n, dtype, close):
    logits = logits_of(n, n, dtype).requires_grad_()
    log_probs = torch.stack([log_prob_of(logits, *action) for action in actions(n)])
    assert abs(float(log_probs.detach().exp().sum()) - 1) < close
    (score,) = torch.autograd.grad((log_probs.detach().exp() * log_probs).sum(), logits)
    assert float(score.abs().max()) < 10 * close
    one = outcomes(logits, MASK, SOFT)
    whole = one.log_commit.exp().sum(-1) + one.log_stay.exp()
    assert float((whole - 1).detach().abs().max()) < close


def test_certain_and_hopeless_logits_have_finite_scores():
    extreme = torch.tensor([[80.0, 0, 0, 0], [0, -80, 0, 0], [0, 0, 0, 90]], requires_grad=True)
    found = outcomes(extreme, MASK, SOFT)
    assert bool(found.log_stay.isfinite().all()) and bool(found.urge.isfinite().all())
    (found.log_stay.sum() + found.log_commit[:, :3].sum()).backward()
    assert bool(extreme.grad.isfinite().all())


WORDS = ("amber", "birch", "cedar")
TEXTS = ("amber of the coast", "birch and birch and cedar", "cedar, a wood")


@pytest.fixture(scope="module")
def search(tmp_path_factory):
    """BM25 over three passages: the number of the best for what is written, by words."""
    path = tmp_path_factory.mktemp("toy") / "corpus.jsonl"
    records = [{"id": str(n), "title": "", "text": text} for n, text in enumerate(TEXTS)]
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    retriever = BM25Retriever(open_corpus(path), 1)

    @functools.cache
    def best(canvas):
        query = " ".join(WORDS[token] for token in canvas if token < V - 1)
        return int(retriever.search([Query(query, (), "toy")])[0][0].id) if query else 0

    assert [best((0, 3)), best((3, 1)), best((2, 3)), best((2, 1))] == [0, 1, 2, 1]
    return best


@pytest.mark.parametrize("evidence", ["none", "BM25"])
def test_policy_gradient_of_two_steps_equals_finite_differences_of_the_expected_reward(evidence, search):
    """A toy whose second step sees what the first has written, or the passage that this finds (the query
    being the committed tokens); reward by the final canvas."""
    passages = len(TEXTS) if evidence == "BM25" else 1
    shape = (passages, 2 * V, V)
    table = torch.randn(shape, generator=torch.Generator().manual_seed(5), dtype=torch.float64) * 1.5

    def logits_at(weights, canvas):
        """Of each position, by what stands at the other (V - 1: the mask) and the evidence."""
        seen = weights[search(canvas) if evidence == "BM25" else 0]
        return torch.stack([seen[at * V + canvas[1 - at]] for at in range(2)])

    def reward(canvas):
        return float(canvas == (1, 2)) + 0.3 * float(canvas[0] == 1)

    def walk(weights, canvas, log_prob, score):
        open_ = [at for at in range(2) if canvas[at] == V - 1]
        if not open_:
            value = reward(canvas)
            return math.exp(log_prob) * value, math.exp(log_prob) * value * score
        logits = logits_at(weights, canvas)[open_]
        expected, surrogate = 0.0, torch.zeros((), dtype=torch.float64)
        for taken, forced in actions(len(open_)):
            own = log_prob_of(logits, taken, forced)
            after = list(canvas)
            for at, token in zip(open_, taken, strict=True):
                after[at] = token if token >= 0 else canvas[at]
            value, part = walk(weights, tuple(after), log_prob + float(own.detach()), score + own)
            expected, surrogate = expected + value, surrogate + part
        return expected, surrogate

    weights = table.clone().requires_grad_()
    start = (V - 1, V - 1)
    _, surrogate = walk(weights, start, 0.0, torch.zeros((), dtype=torch.float64))
    (gradient,) = torch.autograd.grad(surrogate, weights)
    places = [(0, 0), (3, 1), (3, 2), (5, 1), (7, 0), (7, 2)]
    assert all(bool(gradient[passage].any()) for passage in range(passages)), "each has its say"
    with torch.no_grad():
        for passage, (row, column) in itertools.product(range(passages), places):
            values = []
            for step in (1e-5, -1e-5):
                moved = table.clone()
                moved[passage, row, column] += step
                values.append(walk(moved, start, 0.0, torch.zeros(()))[0])
            found = float(gradient[passage, row, column])
            assert found == pytest.approx((values[0] - values[1]) / 2e-5, abs=1e-8)


def proposals_of(logits, soft, lots):
    """What the loop gets of these logits, drawn at lots (5, n)."""
    n = len(logits)
    numbers = torch.tensor([[value] * n for value in (soft.temperature, soft.threshold, soft.width)])
    none = torch.zeros(0, dtype=torch.long)
    wanted = Wanted(
        MASK, torch.zeros(n, dtype=torch.long), none, torch.zeros(0), torch.zeros(0), none, torch.arange(n),
        torch.cat((numbers, torch.from_numpy(lots[:2]).float())),
    )  # fmt: skip
    values = read_proposals(logits.float(), wanted).double().numpy()
    token, *others = values[:6]
    return Proposals(np.arange(n), token.astype(np.int64), *others, values[6:])


def test_what_is_drawn_is_as_frequent_as_its_recorded_probability_says():
    logits, rng, draws = logits_of(9, 2), np.random.default_rng(0), 4000
    soft = Soft(0.8, 0.95, 1.5)  # so that all stay now and then
    seen: dict = {}
    for _ in range(draws):
        chosen, action = sampled(proposals_of(logits, soft, lots := rng.random((5, 2))), lots)
        taken = [-1, -1]
        for position, token in zip(chosen.positions, chosen.token_ids, strict=True):
            taken[position] = int(token)
        count, recorded = seen.get((tuple(taken), action.forced), (0, action.log_prob))
        assert recorded == pytest.approx(action.log_prob, abs=1e-6)
        seen[tuple(taken), action.forced] = count + 1, recorded
    for taken, forced in actions(2):
        count, recorded = seen.get((taken, forced), (0, None))
        share = math.exp(expected := float(log_prob_of(logits, taken, forced, soft)))
        assert recorded is None or recorded == pytest.approx(expected, abs=1e-5)
        assert abs(count - draws * share) < 5 * math.sqrt(draws * share) + 3, (taken, forced)
    assert any(forced for _, forced in seen)


@examples(60)
@given(st.integers(0, 10**6), st.integers(1, 6), st.floats(0.3, 0.9))
def test_a_hard_gate_at_temperature_zero_is_the_commit_threshold(seed, n, tau):
    logits = logits_of(seed, n)
    soft = Soft(1e-3, tau, 1e-3)
    found = proposals_of(logits, soft, lots := np.random.default_rng(seed).random((5, n)))
    if np.abs(found.confidence - tau).min() < 0.01 or len(set(found.confidence.round(2))) < n:
        return  # at the threshold, or of equal confidence, both may be right
    chosen, action = sampled(found, lots)
    assert chosen.positions.tolist() == threshold(found.confidence, tau).tolist()
    assert chosen.token_ids.tolist() == found.token_ids[chosen.positions].tolist()
    assert action.log_prob == pytest.approx(0, abs=1e-3)


def test_divergence_is_that_of_the_enumerated_outcomes():
    ours, theirs = outcomes(logits_of(1, 3), MASK, SOFT), outcomes(logits_of(2, 3), MASK, SOFT)
    expected = []
    for at in range(3):
        p, q = (torch.cat((x.log_commit[at, :3], x.log_stay[at : at + 1])) for x in (ours, theirs))
        expected.append(float((p.exp() * (p - q)).sum()))
    assert ours.divergence(theirs).tolist() == pytest.approx(expected, abs=1e-9)
    assert float(ours.divergence(ours).abs().max()) < 1e-12
    entropy = [float(-(torch.cat((x, y)).exp() * torch.cat((x, y))).sum())
               for x, y in zip(ours.log_commit[:, :3], ours.log_stay[:, None], strict=True)]  # fmt: skip
    assert ours.entropy().tolist() == pytest.approx(entropy, abs=1e-9)


def test_steps_of_one_call_are_those_of_calls_of_their_own():
    logits, taken = logits_of(4, 7), torch.tensor([-1, 2, -1, 0, -1, -1, 1])
    step, forced = torch.tensor([0, 0, 1, 1, 1, 2, 2]), torch.tensor([False, True, False])
    together = step_log_prob(picked(outcomes(logits, MASK, SOFT), taken), step, taken >= 0, forced)
    alone = [
        float(log_prob_of(logits[step == n], taken[step == n].tolist(), bool(forced[n]))) for n in range(3)
    ]
    assert together.tolist() == pytest.approx(alone, abs=1e-12)


def test_gates_are_bernoulli():
    logit, opened = torch.tensor([0.3, -2.0, 5.0]), torch.tensor([True, False, False])
    p = logit.sigmoid()
    expected = [math.log(p[0]) + math.log(1 - p[1]), math.log(1 - p[2])]
    found = gate_log_prob(logit, torch.tensor([0, 0, 1]), opened, 2)
    assert found.tolist() == pytest.approx(expected, abs=1e-5)


def test_draws_never_are_the_mask():
    logits = torch.tensor([[0.0, 0, 0, 30.0]] * 50)
    uniform = torch.linspace(0, 1, 50)
    found = drawn(logits, MASK, SOFT, uniform, uniform)
    assert set(found[0].tolist()) | set(found[6].tolist()) <= {0.0, 1.0, 2.0}
