"""The rollout buffer of a step: groups of rollouts of the same question, as the decoder makes them.

One loop decodes for training, evaluation and people; a rollout holds all that its likelihood follows
from, in ids. Everything is drawn by (seed, step, question, member): nothing has to be saved to go on.
"""

import random
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Any

from dlm_rag.config import Config, DecodeConfig, TrainConfig
from dlm_rag.decode.decoder import Decoder
from dlm_rag.decode.rollout import Action, Rollout, RolloutStep
from dlm_rag.nvtx_ranges import profile_stage
from dlm_rag.questions import Question
from dlm_rag.randomness import sample_permutation
from dlm_rag.retrieval.base import CorpusRetriever
from dlm_rag.training.data.world_examples import IndexedWorld, draw_world_question
from dlm_rag.training.rl.reward import (
    REWARDS,
    compute_advantages,
    compute_reward,
    compute_reward_parts,
    has_prices,
)

# Some questions of a step, by their numbers in it, and what answers their searches.
QuestionSource = Callable[[int, Iterable[int]], tuple[list[Question], CorpusRetriever]]


def make_world_source(train: TrainConfig, top_k: int) -> QuestionSource:
    """Questions of invented worlds, a new one every `train.steps_per_world` steps."""

    @lru_cache(1)
    def open_world(number: int) -> IndexedWorld:
        return IndexedWorld(train.seed * 1_000_003 + 500_000 + number, train.world_passages, top_k)

    def draw(step: int, items: Iterable[int]) -> tuple[list[Question], CorpusRetriever]:
        indexed, questions = open_world(step // train.steps_per_world), []
        for item in items:
            rng = random.Random(f"rl/{train.seed}/{step}/{item}")
            found = draw_world_question(rng, indexed, rng.randint(train.min_hops, train.max_hops))
            support = tuple(subject.id for subject in found.subjects)
            golden = (found.answer,)
            questions.append(Question(f"{step}.{item}", found.question, golden, support, found.hops))
        return questions, indexed.retriever

    return draw


def make_file_source(
    questions: Sequence[Question], retriever: CorpusRetriever, train: TrainConfig, phase: str
) -> QuestionSource:
    """Questions of a file, shuffled again whenever all have been asked."""

    def draw(step: int, items: Iterable[int]) -> tuple[list[Question], CorpusRetriever]:
        found = []
        for item in items:
            epoch, place = divmod(step * train.prompts_per_step + item, len(questions))
            order = sample_permutation((train.seed, phase, "rl", epoch), len(questions))
            found.append(replace(questions[int(order[place])], id=f"{step}.{item}"))
        return found, retriever

    return draw


@dataclass(frozen=True)
class WeightedStep:
    """A step of a rollout that is learned from."""

    rollout: Rollout
    step: RolloutStep
    weight: float  # its advantage, times `steps_represented`
    steps_represented: float = 1.0  # steps of its rollout

    @property
    def action(self) -> Action:
        """What the policy drew; steps without an action are not learned from."""
        assert self.step.action is not None
        return self.step.action


@dataclass(frozen=True)
class RolloutBuffer:
    """Some groups of a step: what was counted of them, and what is learned from.

    rows: what the denoiser saw at these steps, where it is learned (`policy_loss.PolicyRow`).
    """

    sums: dict[str, float]
    steps: list[WeightedStep]
    rows: list[Any] = field(default_factory=list)


def fill_rollout_buffer(
    decoder: Decoder, asked: Sequence[Question], train: TrainConfig, share_done: float
) -> RolloutBuffer:
    """Decodes `train.num_generations` rollouts of each question, and weighs their steps.

    share_done: of the steps of the phase. Rollouts with an error leave their group, and are counted. Groups
    without differences are learned from only where divergence is: it counts in every rollout.
    """
    members = [replace(q, id=f"{q.id}.{member}") for q in asked for member in range(train.num_generations)]
    with profile_stage("rollout"):
        rollouts = decoder.decode(members)
    with profile_stage("reward"):
        priced = has_prices(train) and share_done >= train.cost_start
        taken: list[WeightedStep] = []
        sums = dict.fromkeys(ROLLOUT_SUMS, 0.0)
        for number, question in enumerate(asked):
            group = rollouts[number * train.num_generations : (number + 1) * train.num_generations]
            sound = [rollout for rollout in group if not rollout.error]
            found = [compute_reward_parts(rollout, question, train.reward) for rollout in sound]
            rewards = [compute_reward(part, train, priced) for part in found]
            _count_group(sums, group, found, rewards)
            for rollout, advantage in zip(sound, compute_advantages(rewards, priced), strict=True):
                if advantage or train.kl_coef:
                    taken += sample_rollout_steps(rollout, float(advantage), train)
    return RolloutBuffer(sums, taken)


def sample_rollout_steps(rollout: Rollout, advantage: float, train: TrainConfig) -> list[WeightedStep]:
    """The steps of a rollout that are learned from, each weighed by how many it stands for.

    `train_steps_per_rollout` of S, sampled without replacement: the expectation of their weighted sum is
    the sum over all.
    """
    steps = [step for step in rollout.steps if step.action is not None]
    most = train.train_steps_per_rollout or len(steps)
    if most >= len(steps):
        return [WeightedStep(rollout, step, advantage) for step in steps]
    rng = random.Random(f"steps/{train.seed}/{rollout.id}")
    each = len(steps) / most
    return [WeightedStep(rollout, step, advantage * each, each) for step in rng.sample(steps, most)]


ROLLOUT_SUMS = (
    "rollouts", "failed", "reward", *REWARDS,
    "groups", "groups_right", "groups_wrong", "groups_mixed", "steps", "forced",
)  # fmt: skip


def _count_group(
    sums: dict[str, float], group: Sequence[Rollout], found: list[dict[str, float]], rewards: list[float]
) -> None:
    sums["rollouts"] += len(found)
    sums["failed"] += len(group) - len(found)
    sums["reward"] += sum(rewards)
    for name in REWARDS:
        sums[name] += sum(part[name] for part in found)
    right = sum(part["exact_match"] for part in found)
    sums["groups"] += 1
    kind = "right" if right == len(found) else "mixed" if right else "wrong"
    sums[f"groups_{kind}"] += 1
    actions = [step.action for rollout in group for step in rollout.steps if step.action is not None]
    sums["steps"] += len(actions)
    sums["forced"] += sum(action.forced for action in actions)


def make_rollout_settings(config: Config, train: TrainConfig) -> DecodeConfig:
    """How rollouts are decoded: as the config says, but sampled."""
    places = min(config.decode.batch_size, train.prompts_per_step * train.num_generations)
    return replace(
        config.decode,
        commit_rule="sampled",
        temperature=train.rollout_temperature,
        batch_size=places,
        seed=train.seed,
    )
