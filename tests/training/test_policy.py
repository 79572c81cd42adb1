"""Policies over a step: outcomes that are enumerated, scores whose mean is 0, gradients by differences."""

import functools
import itertools
import json
import math
import random
import weakref
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch._subclasses.fake_tensor import FakeTensorMode

from dlm_rag.config import DecodeConfig, TrainConfig
from dlm_rag.decode.rollout import Action, Rollout, RolloutStep
from dlm_rag.engine import policy
from dlm_rag.engine.rules import RuleContext, choose_commits, select_by_threshold, select_left_to_right
from dlm_rag.engine.runner import gather_proposals, sample_proposals
from dlm_rag.model.denoiser_config import DenoiserConfig
from dlm_rag.model.packed_batch import LaidOutRow, Segment
from dlm_rag.retrieval.base import Query
from dlm_rag.retrieval.bm25 import BM25Retriever
from dlm_rag.retrieval.corpus import open_corpus
from dlm_rag.training.initial_model import build_meta_denoiser
from dlm_rag.training.rl import MAX_LOGIT_BYTES, PolicyObjective, PolicyRow, sample_rollout_steps
from dlm_rag.training.step_memory import MemoryTracker, replace_with_empty_weights
from dlm_rag.training.trainer import make_autocast
from tests.support.properties import hypothesis_settings
from tests.support.tiny_models import tiny_denoiser

V, MASK = 4, torch.tensor([3])  # three tokens and the mask
SOFT = policy.SoftThreshold(0.8, 0.7, 0.6)


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


def ordered_actions(n: int):
    """The same of the rule from left to right: its candidates end with the first that stayed."""
    for length in range(1, n + 1):
        for taken in itertools.product(range(V - 1), repeat=length):
            yield (*taken, -1)[:n], False
    for token in range(V - 1):
        yield (token,), True


def log_prob_of(logits, taken, forced, soft=SOFT):
    taken = torch.tensor(taken)
    parts = policy.gather_action_log_probs(policy.compute_action_distribution(logits, MASK, soft), taken)
    step = torch.zeros(len(taken), dtype=torch.long)
    return policy.step_log_prob(parts, step, taken >= 0, torch.tensor([forced]))[0]


@pytest.mark.parametrize(("dtype", "close"), [(torch.float64, 1e-12), (torch.float32, 1e-6)])
@pytest.mark.parametrize("n", [1, 2, 3])
@pytest.mark.parametrize("outcomes", [actions, ordered_actions])
def test_the_outcomes_of_a_step_sum_to_one_and_their_mean_score_is_zero(outcomes, n, dtype, close):
    logits = logits_of(n, n, dtype).requires_grad_()
    each = ((logits[: len(taken)], taken, forced) for taken, forced in outcomes(n))
    log_probs = torch.stack([log_prob_of(*action) for action in each])
    assert abs(float(log_probs.detach().exp().sum()) - 1) < close
    (score,) = torch.autograd.grad((log_probs.detach().exp() * log_probs).sum(), logits)
    assert float(score.abs().max()) < 10 * close
    one = policy.compute_action_distribution(logits, MASK, SOFT)
    whole = one.log_commit.exp().sum(-1) + one.log_stay.exp()
    assert float((whole - 1).detach().abs().max()) < close


def test_certain_and_hopeless_logits_have_finite_scores():
    extreme = torch.tensor([[80.0, 0, 0, 0], [0, -80, 0, 0], [0, 0, 0, 90]], requires_grad=True)
    found = policy.compute_action_distribution(extreme, MASK, SOFT)
    assert bool(found.log_stay.isfinite().all()) and bool(found.forced_logit.isfinite().all())
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
        return int(retriever.search([Query(query, ())])[0][0].id) if query else 0

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
    quantiles = torch.from_numpy(lots[:2]).float()
    numbers = torch.cat((torch.zeros(1, n), quantiles, numbers))
    found = sample_proposals(logits.float(), MASK, numbers, False, False, True)
    return gather_proposals([SimpleNamespace(positions=np.arange(n))], [found])()[0]


def sample(found, draws, rule="sampled"):
    """What is committed, and how it was drawn."""
    return choose_commits(found, RuleContext(DecodeConfig(commit_rule=rule), draws=draws))


@pytest.mark.parametrize(
    ("rule", "outcomes"), [("sampled", actions), ("sampled_left_to_right", ordered_actions)]
)
def test_what_is_drawn_is_as_frequent_as_its_recorded_probability_says(rule, outcomes):
    logits, rng, draws = logits_of(9, 2), np.random.default_rng(0), 4000
    soft = policy.SoftThreshold(0.8, 0.95, 1.5)  # so that all stay now and then
    seen: dict = {}
    for _ in range(draws):
        chosen, action = sample(proposals_of(logits, soft, lots := rng.random((5, 2))), lots, rule)
        taken = [-1] * len(action.opened)
        for position, token in zip(chosen.positions, chosen.token_ids, strict=True):
            taken[position] = int(token)
        count, recorded = seen.get((tuple(taken), action.forced), (0, action.log_prob))
        assert recorded == pytest.approx(action.log_prob, abs=1e-6)
        seen[tuple(taken), action.forced] = count + 1, recorded
    for taken, forced in outcomes(2):
        count, recorded = seen.get((taken, forced), (0, None))
        share = math.exp(expected := float(log_prob_of(logits[: len(taken)], taken, forced, soft)))
        assert recorded is None or recorded == pytest.approx(expected, abs=1e-5)
        assert abs(count - draws * share) < 5 * math.sqrt(draws * share) + 3, (taken, forced)
    assert any(forced for _, forced in seen)


@hypothesis_settings(60)
@given(st.integers(0, 10**6), st.integers(1, 6), st.floats(0.3, 0.9))
def test_a_hard_gate_at_temperature_zero_is_the_commit_threshold(seed, n, tau):
    logits = logits_of(seed, n)
    soft = policy.SoftThreshold(1e-3, tau, 1e-3)
    found = proposals_of(logits, soft, lots := np.random.default_rng(seed).random((5, n)))
    if np.abs(found.confidence - tau).min() < 0.01 or len(set(found.confidence.round(2))) < n:
        return  # at the threshold, or of equal confidence, both may be right
    if (-logits[:, : V - 1].topk(2).values.diff()).min() < 0.02:
        return  # two tokens are as probable
    repeated = (np.diff(found.token_ids) == 0).any()  # one that repeats the last waits: for another test
    hard = {
        "sampled": select_by_threshold(found.confidence, tau),
        "sampled_left_to_right": select_left_to_right(found.token_ids, found.confidence, tau),
    }
    for rule, expected in [*hard.items()][: 1 if repeated else 2]:
        chosen, action = sample(found, lots, rule)
        assert chosen.positions.tolist() == expected.tolist()
        assert chosen.token_ids.tolist() == found.token_ids[chosen.positions].tolist()
        assert action.log_prob == pytest.approx(0, abs=1e-3)


def test_entropy_of_positions_is_that_of_the_enumerated_outcomes():
    found = policy.compute_action_distribution(logits_of(1, 3), MASK, SOFT)
    p = torch.cat((found.log_commit[:, :3], found.log_stay[:, None]), 1)
    torch.testing.assert_close(found.entropy(), -(p.exp() * p).sum(1), rtol=0, atol=1e-9)


def masked(canvas):
    return [at for at in range(2) if canvas[at] == V - 1]


class Toy:
    """A denoiser of three tokens and a mask, on two positions behind one token."""

    def __init__(self, seed):
        self.denoiser = tiny_denoiser(seed, vocab_size=V, mask_token_id=V - 1).train()
        self.logits, self.log_prob = functools.cache(self.logits), functools.cache(self.log_prob)

    def logits(self, canvas):
        """Of the masked positions."""
        return self.denoiser(torch.tensor([[0, *canvas]]))[0, 1:][masked(canvas)].double()

    def log_prob(self, canvas, taken, forced):
        return log_prob_of(self.logits(canvas), taken, forced)

    def trajectories(self, canvas=(V - 1, V - 1), log_prob=0.0, path=()):
        """Every way from a canvas to a whole one: its probability, its steps, the canvas at the end."""
        if not masked(canvas):
            yield math.exp(log_prob), path, canvas
            return
        for taken, forced in actions(len(masked(canvas))):
            after = list(canvas)
            for at, token in zip(masked(canvas), taken, strict=True):
                after[at] = token if token >= 0 else canvas[at]
            own = float(self.log_prob(canvas, taken, forced).detach())
            step = (canvas, taken, forced)
            yield from self.trajectories(tuple(after), log_prob + own, (*path, step))


@pytest.mark.parametrize("train_steps_per_rollout", [None, 1])
def test_the_loss_is_the_reward_of_all_trajectories(train_steps_per_rollout, monkeypatch):
    """The mean over all trajectories, and over all draws of their steps, of value and gradient of the loss:
    against sums over everything that may happen."""
    ours, train = Toy(1), TrainConfig(train_steps_per_rollout=train_steps_per_rollout)
    rows, expected, total = [], torch.zeros((), dtype=torch.float64), 0.0
    for probability, path, end in ours.trajectories():
        advantage, total = float(end == (1, 2)) - 0.5 * float(end[0] == 1), total + probability
        for step in path:
            expected = expected - probability * advantage * ours.log_prob(*step)
        steps = [RolloutStep(n, None, (), False, action=Action()) for n in range(len(path))]
        states = {n: SimpleNamespace(training_row=step, barred=None) for n, step in enumerate(path)}
        acted = [(states[step.step], step.action) for step in steps]
        draws = list(itertools.combinations(acted, train_steps_per_rollout or len(steps)))
        share = probability / len(draws)
        for draw in draws:
            monkeypatch.setattr(random.Random, "sample", lambda *_, draw=draw: list(draw))
            rollout = Rollout("q", "Who?", "joint", 2, steps, states=states)
            for part in sample_rollout_steps(rollout, advantage, train):
                canvas, taken, forced = part.state
                state = LaidOutRow((), Segment((0, *canvas), 0), 1)
                open_, weight = tuple(masked(canvas)), part.weight * share
                rows.append(PolicyRow(state, open_, taken, forced, weight, 0.0))
    assert total == pytest.approx(1, abs=1e-5)
    soft = {"commit_threshold": SOFT.threshold, "gate_temperature": SOFT.width}
    settings = DecodeConfig(temperature=SOFT.temperature, **soft)
    objective = PolicyObjective(ours.denoiser, settings, V - 1)
    objective.logit_chunk = 5
    loss, sums = objective(SimpleNamespace(rows=rows), {"divisor": 1.0})
    assert loss.item() == pytest.approx(expected.item(), rel=1e-4)
    assert -sums["policy"] == pytest.approx(loss.item(), rel=1e-5)
    weights = list(ours.denoiser.parameters())
    for found, wanted in zip(*(torch.autograd.grad(x, weights) for x in (loss, expected)), strict=True):
        torch.testing.assert_close(found, wanted, rtol=1e-3, atol=2e-5)


LLADA = DenoiserConfig(
    vocab_size=126_464, hidden_size=32, num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=2,
    head_dim=16, intermediate_size=32, mask_token_id=126_336,
)  # fmt: skip


class LogitTracker(MemoryTracker):
    """Counts tensors as wide as the vocabulary by themselves."""

    logits = logits_at_peak = 0

    def track_tensor(self, tensor):
        before, peak = self.live_bytes, self.peak_bytes
        super().track_tensor(tensor)
        size = self.live_bytes - before
        if size and tensor.dim() == 2 and tensor.shape[1] == LLADA.vocab_size:
            self.logits += size
            weakref.finalize(tensor.untyped_storage(), self._forget, size)
        if self.peak_bytes > peak:
            self.logits_at_peak = self.logits

    def _forget(self, size):
        self.logits -= size


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_logits_of_a_large_vocabulary_stay_within_their_budget(dtype, monkeypatch):
    """2,048 candidates: all their logits are 1 GB, and what is computed of them 20 times as much."""
    looks, entropy = [], policy.ActionDistribution.entropy
    monkeypatch.setattr(
        policy.ActionDistribution, "entropy", lambda found: looks.append(0) or entropy(found)
    )
    places, mask = tuple(range(64)), LLADA.mask_token_id
    state = LaidOutRow((), Segment((1, *(mask for _ in places)), 0), 1)
    rows = [PolicyRow(state, places, (5, *(-1 for _ in places[1:])), False, 1.0, -9.0)] * 32
    denoiser = build_meta_denoiser(LLADA, 0, dtype)
    with FakeTensorMode(allow_non_fake_inputs=True):
        denoiser = replace_with_empty_weights(denoiser)
        objective = PolicyObjective(denoiser, DecodeConfig(temperature=0.9), mask)
        with LogitTracker() as alive:
            with make_autocast("cpu", dtype):
                loss, _ = objective(SimpleNamespace(rows=rows), {"divisor": 1.0})
            loss.backward()
    assert MAX_LOGIT_BYTES / 2 < alive.logits_at_peak < MAX_LOGIT_BYTES
    assert alive.peak_bytes < 1.1 * MAX_LOGIT_BYTES, "but for the weights, of which the head has 16 MB"
    assert len(looks) == -(-2048 // (MAX_LOGIT_BYTES // (80 * LLADA.vocab_size))), "once for each chunk"
