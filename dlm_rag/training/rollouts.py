"""The rollout buffer of a step: groups of rollouts of the same question, as the decoder makes them.

One loop decodes for training, evaluation and people; a rollout holds all that its likelihood follows
from, in ids. Everything is drawn by (seed, step, question, member): nothing has to be saved to go on.
"""

import random
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

from dlm_rag.config import Config, DecodeConfig, TrainConfig
from dlm_rag.decode.decoder import Decoder
from dlm_rag.decode.rollout import Rollout, Step
from dlm_rag.model.denoiser import Denoiser
from dlm_rag.questions import Question
from dlm_rag.randomness import permutation
from dlm_rag.retrieval.base import CorpusRetriever
from dlm_rag.stages import stage
from dlm_rag.tokenizer import Tokenizer
from dlm_rag.training.reward import Outcome, advantages, outcome, reward
from dlm_rag.training.rows.worlds import IndexedWorld, ask


class Questions(Protocol):
    """Where the questions of a step come from."""

    def ask(self, step: int, items: Iterable[int]) -> tuple[list[Question], CorpusRetriever]:
        """Some questions of a step, and what answers their searches."""
        ...


class WorldQuestions:
    """Of invented worlds, a new one every `train.steps_per_world` steps."""

    def __init__(self, train: TrainConfig, top_k: int) -> None:
        self._train, self._top_k = train, top_k
        self._open: OrderedDict[int, IndexedWorld] = OrderedDict()

    def ask(self, step: int, items: Iterable[int]) -> tuple[list[Question], CorpusRetriever]:
        train, number = self._train, step // self._train.steps_per_world
        if number not in self._open:
            self._open.clear()
            seed = train.seed * 1_000_003 + 500_000 + number
            self._open[number] = IndexedWorld(seed, train.world_passages, self._top_k)
        indexed, questions = self._open[number], []
        for item in items:
            rng = random.Random(f"rl/{train.seed}/{step}/{item}")
            found = ask(rng, indexed, rng.randint(train.least_hops, train.hops))
            support = tuple(subject.id for subject in found.subjects)
            questions.append(
                Question(f"{step}.{item}", found.question, (found.answer,), support, found.hops)
            )
        return questions, indexed.retriever


class FileQuestions:
    """Of a file, in an order that is drawn anew whenever all have been asked."""

    def __init__(
        self, questions: Sequence[Question], retriever: CorpusRetriever, train: TrainConfig, phase: str
    ) -> None:
        self._questions, self._retriever, self._train = questions, retriever, train
        self._key = (train.seed, phase)

    def ask(self, step: int, items: Iterable[int]) -> tuple[list[Question], CorpusRetriever]:
        found = []
        for item in items:
            epoch, place = divmod(step * self._train.items + item, len(self._questions))
            order = permutation((*self._key, "rl", epoch), len(self._questions))
            found.append(replace(self._questions[int(order[place])], id=f"{step}.{item}"))
        return found, self._retriever


@dataclass(frozen=True)
class Taken:
    """A step of a rollout that is learned from."""

    rollout: Rollout
    step: Step
    weight: float  # its advantage, times `stands_for`
    stands_for: float = 1.0  # steps of its rollout


@dataclass(frozen=True)
class Buffer:
    """Some groups of a step, and what was counted of them."""

    rollouts: list[Rollout]
    taken: list[Taken]
    sums: dict[str, float]


def make_buffer(
    decoder: Decoder, asked: Sequence[Question], train: TrainConfig, share_done: float
) -> Buffer:
    """Decodes `train.rows` rollouts of each question, and weighs their steps.

    share_done: of the steps of the phase. Rollouts with an error leave their group, and are counted. Groups
    without differences are learned from only where divergence is: it counts in every rollout.
    """
    members = [replace(q, id=f"{q.id}.{member}") for q in asked for member in range(train.rows)]
    with stage("rollout"):
        rollouts = decoder.decode(members)
    with stage("reward"):
        priced = bool(train.forward_price or train.search_price) and share_done >= train.prices_from
        taken: list[Taken] = []
        sums = dict.fromkeys(SUMS, 0.0)
        for number, question in enumerate(asked):
            group = rollouts[number * train.rows : (number + 1) * train.rows]
            sound = [rollout for rollout in group if not rollout.error]
            found = [outcome(rollout, question) for rollout in sound]
            rewards = [reward(part, train, priced) for part in found]
            count(sums, group, found, rewards)
            for rollout, advantage in zip(sound, advantages(rewards, priced), strict=True):
                if advantage or train.kl_weight:
                    taken += steps_of(rollout, float(advantage), train)
    return Buffer(rollouts, taken, sums)


def steps_of(rollout: Rollout, advantage: float, train: TrainConfig) -> list[Taken]:
    """The steps of a rollout that are learned from, each weighed by how many it stands for.

    `steps_of_rollout` of S by lot, without putting back: the expectation of their weighted sum is the sum
    over all.
    """
    steps = [step for step in rollout.steps if step.action is not None]
    most = train.steps_of_rollout or len(steps)
    if most >= len(steps):
        return [Taken(rollout, step, advantage) for step in steps]
    rng = random.Random(f"steps/{train.seed}/{rollout.id}")
    each = len(steps) / most
    return [Taken(rollout, step, advantage * each, each) for step in rng.sample(steps, most)]


SUMS = (
    "rollouts", "failed", "reward", "exact_match", "f1", "recall", "forwards", "searches", "unanswered",
    "groups", "groups_right", "groups_wrong", "groups_mixed", "steps", "forced",
)  # fmt: skip


def count(
    sums: dict[str, float], group: Sequence[Rollout], found: Sequence[Outcome], rewards: Sequence[float]
) -> None:
    """Adds a group to the sums."""
    sums["rollouts"] += len(found)
    sums["failed"] += len(group) - len(found)
    sums["reward"] += sum(rewards)
    for name in ("exact_match", "f1", "recall", "forwards", "searches", "unanswered"):
        sums[name] += sum(getattr(part, name) for part in found)
    right = sum(part.exact_match for part in found)
    sums["groups"] += 1
    kind = "right" if right == len(found) else "mixed" if right else "wrong"
    sums[f"groups_{kind}"] += 1
    actions = [step.action for rollout in group for step in rollout.steps if step.action is not None]
    sums["steps"] += len(actions)
    sums["forced"] += sum(action.forced for action in actions)


def rollout_settings(config: Config, train: TrainConfig) -> DecodeConfig:
    """How rollouts are decoded: as the config says, but by lot."""
    if train.learn == "heads":
        headed = {"commit_rule": "head", "head_cut": None, "temperature": 0.0}
    else:
        headed = {"commit_rule": "sampled", "temperature": train.rollout_temperature, "search": "always"}
    places = min(config.decode.batch_size, train.items * train.rows)
    return replace(config.decode, **headed, batch_size=places, seed=train.seed)  # type: ignore[arg-type]


def decoder_of(
    denoiser: Denoiser, retriever: CorpusRetriever, tokenizer: Tokenizer, config: Config, train: TrainConfig
) -> Decoder:
    """A decoder of rollouts around the weights as they are now; it keeps nothing of older ones."""
    settings, engine = rollout_settings(config, train), config.engine.beside_training
    return Decoder(denoiser, retriever, tokenizer, settings, engine=engine)
