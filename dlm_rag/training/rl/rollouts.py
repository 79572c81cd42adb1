"""The rollout buffer of a step: groups of rollouts of the same question, as the decoder makes them.

One loop decodes for training, evaluation and people. Everything is drawn by (seed, step, question, member):
nothing has to be saved to go on.
"""

import random
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from functools import lru_cache
from typing import Any, NamedTuple

from dlm_rag.config import Config, DecodeConfig, TrainConfig
from dlm_rag.config.fields import replace_settings
from dlm_rag.decode.rollout import Rollout, RolloutStep
from dlm_rag.engine.engine import Decoder
from dlm_rag.evidence.prompt_segments import LaidOutRow
from dlm_rag.nvtx_ranges import profile_stage
from dlm_rag.questions import Question
from dlm_rag.randomness import sample_permutation
from dlm_rag.retrieval.base import CorpusRetriever
from dlm_rag.training.rl.reward import (
    REWARDS,
    compute_advantages,
    compute_reward_parts,
)
from dlm_rag.training.sources import IndexedWorld, draw_world_question

# Some questions of a step, by their numbers in it, and what answers their searches.
QuestionSource = Callable[[int, Iterable[int]], tuple[list[Question], CorpusRetriever]]
STEPS_PER_ROLLOUT = 8.0  # steps that a rollout counts in the divisor, whatever it took
ROLLOUT_SUMS = (
    "rollouts", "failed", "reward", *REWARDS,
    "groups", "groups_right", "groups_wrong", "groups_mixed", "steps", "forced",
)  # fmt: skip


class PolicyRow(NamedTuple):
    """A step that is learned from: what the denoiser saw, what it did, how likely that was."""

    state: LaidOutRow
    candidates: tuple[int, ...]
    committed_tokens: tuple[int, ...]  # of each candidate the token that it committed, -1 where it stayed
    forced: bool
    weight: float  # its advantage, times the number of steps of its rollout that it represents
    old_log_prob: float
    learns: bool = True  # False: it is there for the other processes


class RolloutBuffer(NamedTuple):
    """Some groups of a step: what was counted of them, and the steps that are learned from."""

    sums: dict[str, float]
    rows: list[PolicyRow]

    @property
    def counts(self) -> dict[str, float]:
        """As `Task` says."""
        return self.sums | {
            "rows": self.sums["rollouts"],
            "tokens": float(sum(len(row.state.canvas_segment.ids) for row in self.rows)),
            "supervised": float(sum(len(row.candidates) for row in self.rows)),
            "divisor": (self.sums["rollouts"] + self.sums["failed"]) * STEPS_PER_ROLLOUT,
        }


def make_world_source(train: TrainConfig, top_k: int) -> QuestionSource:
    """Questions of invented worlds, a new one every `train.steps_per_world` steps."""

    @lru_cache(1)
    def open_world(number: int) -> IndexedWorld:
        return IndexedWorld(train.seed * 1_000_003 + 500_000 + number, train.world_passages, top_k)

    def draw_one(indexed: IndexedWorld, step: int, item: int) -> Question:
        rng = random.Random(f"rl/{train.seed}/{step}/{item}")
        found = draw_world_question(rng, indexed, rng.randint(train.min_hops, train.max_hops))
        support = tuple(subject.id for subject in found.subjects)
        return Question(f"{step}.{item}", found.question, (found.answer,), support, found.hops)

    def draw(step: int, items: Iterable[int]) -> tuple[list[Question], CorpusRetriever]:
        indexed = open_world(step // train.steps_per_world)
        return [draw_one(indexed, step, item) for item in items], indexed.retriever

    return draw


def make_file_source(
    questions: Sequence[Question], retriever: CorpusRetriever, train: TrainConfig
) -> QuestionSource:
    """Questions of a file, shuffled again whenever all have been asked."""

    @lru_cache(2)  # a step may end one epoch and begin the next
    def shuffle(epoch: int) -> Any:
        return sample_permutation((train.seed, "rl", epoch), len(questions))

    def draw(step: int, items: Iterable[int]) -> tuple[list[Question], CorpusRetriever]:
        places = {item: divmod(step * train.prompts_per_step + item, len(questions)) for item in items}
        found = {item: questions[int(shuffle(epoch)[at])] for item, (epoch, at) in places.items()}
        return [replace(question, id=f"{step}.{item}") for item, question in found.items()], retriever

    return draw


def make_rollout_settings(config: Config) -> DecodeConfig:
    """How rollouts are decoded: as the config and the checkpoint say, but sampled.

    What a checkpoint may ask for and no gradient is computed for is left out.
    """
    train = config.train
    return replace_settings(
        config.decode,
        commit_rule="sampled",
        temperature=1.0,
        edit_threshold=None,
        blocks_at_once=1,
        batch_size=min(config.decode.batch_size, train.prompts_per_step * train.num_generations),
        seed=train.seed,
    )


def fill_rollout_buffer(decoder: Decoder, asked: Sequence[Question], train: TrainConfig) -> RolloutBuffer:
    """Decodes `train.num_generations` rollouts of each question, and weighs their steps.

    Rollouts with an error leave their group, and are counted. From groups without differences nothing is
    learned.
    """
    members = [replace(q, id=f"{q.id}.{member}") for q in asked for member in range(train.num_generations)]
    with profile_stage("rollout"):
        rollouts = decoder.decode(members)
    with profile_stage("reward"):
        buffer = RolloutBuffer(dict.fromkeys(ROLLOUT_SUMS, 0.0), [])
        for number, question in enumerate(asked):
            group = rollouts[number * train.num_generations : (number + 1) * train.num_generations]
            sound = [rollout for rollout in group if not rollout.error]
            found = [compute_reward_parts(rollout, question, train.reward) for rollout in sound]
            advantages = compute_advantages([part["reward"] for part in found])
            _count_group(buffer.sums, group, found)
            buffer.sums["groups_mixed"] += advantages.any()
            for rollout, advantage in zip(sound, advantages, strict=True):
                if advantage:
                    buffer.rows.extend(sample_rollout_steps(rollout, float(advantage), train))
    return buffer


def sample_rollout_steps(rollout: Rollout, advantage: float, train: TrainConfig) -> list[PolicyRow]:
    """The steps of a rollout that are learned from, each weighted by the number of steps it represents.

    `train_steps_per_rollout` of S, sampled without replacement: the expectation of their weighted sum is
    the sum over all.
    """
    steps = [step for step in rollout.steps if step.action is not None]
    most = train.train_steps_per_rollout or len(steps)
    if most >= len(steps):
        return [_make_row(rollout, step, advantage, 1.0) for step in steps]
    rng = random.Random(f"steps/{train.seed}/{rollout.id}")
    each = len(steps) / most
    return [_make_row(rollout, step, advantage, each) for step in rng.sample(steps, most)]


def _make_row(rollout: Rollout, step: RolloutStep, advantage: float, represented: float) -> PolicyRow:
    action, written = step.action, {token.position: token.token_id for token in step.committed}
    assert action is not None
    tokens = tuple(written.get(position, -1) for position in action.candidates)
    state, numbers = rollout.states[step.step].training_row, (advantage * represented, action.log_prob)
    return PolicyRow(state, action.candidates, tokens, action.forced, *numbers)


def _count_group(sums: dict[str, float], group: Sequence[Rollout], found: list[dict[str, float]]) -> None:
    actions = [step.action for rollout in group for step in rollout.steps if step.action is not None]
    right = sum(part["exact_match"] for part in found)
    counted = {name: sum(part[name] for part in found) for name in ("reward", *REWARDS)} | {
        "rollouts": len(found),
        "failed": len(group) - len(found),
        "groups": 1,
        "groups_right": bool(found) and right == len(found),
        "groups_wrong": not right,
        "steps": len(actions),
        "forced": sum(action.forced for action in actions),
    }
    for name, value in counted.items():
        sums[name] += value
