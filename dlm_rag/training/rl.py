"""Learning by reward: groups of rollouts of the same question, the policy-gradient loss, the task of both.

    loss = - sum over steps of represents x advantage x log pi(step) / divisor

A sampled step is weighted by the number of steps it represents. The divisor is constant, so that long
rollouts count no less a step than short ones (arXiv 2503.20783). The log-probabilities are those of the
decoder, computed again with gradients from the same inputs: `ratio_error` says how far apart. Each buffer
is used for one update, so no ratio needs clipping. Everything is drawn by (seed, step, question, member).
"""

import random
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from dlm_rag.config import Config, DecodeConfig, TrainConfig
from dlm_rag.config.fields import flatten_settings, replace_settings, resolve_or_import
from dlm_rag.decode.rollout import Rollout
from dlm_rag.engine import policy
from dlm_rag.engine.engine import Decoder, resolve_settings
from dlm_rag.engine.rules import find_rule
from dlm_rag.engine.runner import bar_tokens, collect_bars
from dlm_rag.errors import ConfigError
from dlm_rag.evidence.encode_segments import encode_canvases
from dlm_rag.evidence.prompt_segments import lay_out_prompt
from dlm_rag.model.denoiser import Denoiser
from dlm_rag.model.packed_batch import LaidOutRow, to_device
from dlm_rag.nvtx_ranges import profile_stage
from dlm_rag.questions import Question
from dlm_rag.randomness import pick_shuffled
from dlm_rag.retrieval.base import CorpusRetriever
from dlm_rag.tokenizer import Prompt
from dlm_rag.training import sources
from dlm_rag.training.batches import Sums, count_tokens, lay_out_examples, sample_prompt_rows
from dlm_rag.training.rewards import REWARDS, compute_advantages, compute_reward_parts
from dlm_rag.training.task import Run, Task, TaskState, Validation

# Some questions of a step, by their numbers in it, and what answers their searches.
QuestionSource = Callable[[int, Sequence[int]], tuple[list[Question], CorpusRetriever]]
STEPS_PER_ROLLOUT = 8.0  # steps that a rollout counts in the divisor, whatever it took
ROLLOUT_SUMS = (
    "rollouts", "failed", "reward", *REWARDS,
    "groups", "groups_right", "groups_wrong", "groups_mixed", "steps", "forced",
)  # fmt: skip


class PolicyRow(NamedTuple):
    """A step that is learned from: what the denoiser saw, what it did, how likely that was."""

    state: LaidOutRow
    candidates: tuple[int, ...]
    committed_tokens: tuple[int, ...]  # of each candidate the token drawn, -1 where it stayed
    forced: bool
    weight: float  # its advantage, times the number of steps of its rollout that it represents
    old_log_prob: float
    barred: NDArray[np.bool_] | None = None  # (V,) tokens that the first candidate could not take
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
            "tokens": count_tokens([row.state for row in self.rows]),
            "supervised": float(sum(len(row.candidates) for row in self.rows)),
            "divisor": (self.sums["rollouts"] + self.sums["failed"]) * STEPS_PER_ROLLOUT,
        }


def make_world_source(train: TrainConfig, top_k: int) -> QuestionSource:
    """Questions of invented worlds, a new one every `train.steps_per_world` steps."""

    @lru_cache(1)
    def open_world(number: int) -> sources.IndexedWorld:
        return sources.IndexedWorld(train.seed * 1_000_003 + 500_000 + number, train.world_passages, top_k)

    def draw(step: int, items: Sequence[int]) -> tuple[list[Question], CorpusRetriever]:
        indexed, questions = open_world(step // train.steps_per_world), list[Question]()
        for item in items:
            rng, name = random.Random(f"rl/{train.seed}/{step}/{item}"), f"{step}.{item}"
            least, hops = train.min_hops, rng.randint(train.min_hops, train.max_hops)
            found = sources.draw_world_question(rng, indexed, hops, least=least)
            support = tuple(subject.id for subject in found.subjects)
            questions.append(Question(name, found.question, (found.answer,), support, found.hops))
        return questions, indexed.retriever

    return draw


def make_file_source(
    questions: Sequence[Question], retriever: CorpusRetriever, train: TrainConfig
) -> QuestionSource:
    """Questions of a file, shuffled again whenever all have been asked."""

    def draw(step: int, items: Sequence[int]) -> tuple[list[Question], CorpusRetriever]:
        first = step * train.prompts_per_step
        drawn = {item: pick_shuffled(questions, first + item, train.seed, "rl") for item in items}
        return [replace(question, id=f"{step}.{item}") for item, question in drawn.items()], retriever

    return draw


def fill_rollout_buffer(decoder: Decoder, asked: Sequence[Question], train: TrainConfig) -> RolloutBuffer:
    """Decodes `train.num_generations` rollouts of each question, and weighs their steps. Those with an
    error leave their group, and are counted. Groups without differences teach nothing."""
    members = [replace(q, id=f"{q.id}.{member}") for q in asked for member in range(train.num_generations)]
    with profile_stage("rollout"):
        rollouts = decoder.decode(members)
    with profile_stage("reward"):
        sums, rows = dict.fromkeys(ROLLOUT_SUMS, 0.0), list[PolicyRow]()
        for number, question in enumerate(asked):
            group = rollouts[number * train.num_generations : (number + 1) * train.num_generations]
            sound = [rollout for rollout in group if not rollout.error]
            found = [compute_reward_parts(rollout, question, train.reward) for rollout in sound]
            advantages = compute_advantages([part["reward"] for part in found])
            for name, value in _count_group(group, found).items():
                sums[name] += value
            sums["groups_mixed"] += advantages.any()
            for rollout, advantage in zip(sound, advantages, strict=True):
                if advantage:
                    rows += sample_rollout_steps(rollout, float(advantage), train)
    return RolloutBuffer(sums, rows)


def sample_rollout_steps(rollout: Rollout, advantage: float, train: TrainConfig) -> list[PolicyRow]:
    """`train.train_steps_per_rollout` steps of a rollout, sampled without replacement, each weighted by the
    number of steps it represents: the expectation of their weighted sum is the sum over all."""
    acted = [(rollout.states[step.step], step.action) for step in rollout.steps if step.action is not None]
    most, each = train.train_steps_per_rollout or len(acted), advantage
    if most < len(acted):
        each = advantage * len(acted) / most
        acted = random.Random(f"steps/{train.seed}/{rollout.id}").sample(acted, most)
    return [
        PolicyRow(at.training_row, did.candidates, did.tokens, did.forced, each, did.log_prob, at.barred)
        for at, did in acted
    ]


def _count_group(group: Sequence[Rollout], found: list[dict[str, float]]) -> dict[str, float]:
    actions = [step.action for rollout in group for step in rollout.steps if step.action is not None]
    right = sum(part["exact_match"] for part in found)
    return {name: sum(part[name] for part in found) for name in ("reward", *REWARDS)} | {
        "rollouts": len(found),
        "failed": len(group) - len(found),
        "groups": 1,
        "groups_right": bool(found) and right == len(found),
        "groups_wrong": not right,
        "steps": len(actions),
        "forced": sum(action.forced for action in actions),
    }


MAX_LOGIT_BYTES = 4 * 2**30  # of logits that exist at a time, with all that is computed of them
LOGIT_COPIES = 20  # numbers of float32 for each logit at the peak, which is in backward


class PolicyObjective(nn.Module):
    """The policy-gradient loss of a denoiser: a soft threshold over its own logits."""

    logit_chunk = 4096  # candidates whose logits exist at a time, at most

    def __init__(self, denoiser: Denoiser, settings: DecodeConfig, mask_id: int) -> None:
        """settings: of the rollouts."""
        super().__init__()
        self.denoiser = denoiser
        self.excluded_ids = np.array([mask_id, *denoiser.config.excluded_token_ids])
        soft = settings.temperature, settings.commit_threshold, settings.gate_temperature
        self.soft = policy.SoftThreshold(*soft)
        fitting = MAX_LOGIT_BYTES // (4 * LOGIT_COPIES * denoiser.config.vocab_size)
        self.logit_chunk = max(1, min(self.logit_chunk, fitting))

    def forward(self, part: RolloutBuffer, counts: dict[str, float]) -> tuple[Tensor, dict[str, Tensor]]:
        """What the rows of a part add to the loss of a step, and sums over their decisions."""
        rows = part.rows
        states, read = [row.state for row in rows], [row.candidates for row in rows]
        hidden, _ = encode_canvases(self.denoiser, states, read)
        with profile_stage("loss"):
            barred = collect_bars([len(each) for each in read], [row.barred for row in rows])
            arrays = [
                np.array([token for row in rows for token in row.committed_tokens], np.int64),
                np.repeat(np.arange(len(rows)), [len(row.candidates) for row in rows]),
                np.array([row.forced for row in rows], np.bool_),
                np.array([(row.weight, row.old_log_prob) for row in rows], np.float32).T,
                self.excluded_ids,
                *barred,
            ]
            taken, step, forced, numbers, excluded_ids, *bars = to_device(arrays, hidden.device)
            (weights, recorded), size = numbers, self.logit_chunk
            found, entropy = [], torch.zeros_like(weights[0])
            for n, (at, seen) in enumerate(zip(*(x.split(size) for x in (taken, hidden)), strict=True)):
                given = seen, excluded_ids, n * size, [*barred[:1], *bars]
                # Logits exist a chunk at a time: backward computes them again.
                found.append(checkpoint(self._gather, at, *given, use_reentrant=False))
                with torch.no_grad():
                    entropy += self._find_actions(*given).entropy().sum()
            log_prob = policy.step_log_prob(torch.cat(found, 1), step, taken >= 0, forced)
            gained = (weights * log_prob).sum()
            loss = -gained / counts["divisor"]
        with torch.no_grad():
            ratios = (log_prob.double() - recorded.double()).exp()
            learns = float(rows[0].learns)  # else it is there for the other processes
            sums = {
                "policy": gained, "ratio_error": (ratios - 1).abs().sum(), "entropy": entropy,
                "learned": gained.new_full((), len(rows)),
            }  # fmt: skip
            return loss, {name: learns * value.detach().double() for name, value in sums.items()}

    def _gather(self, taken: Tensor, *given: Any) -> Tensor:
        """The log-probabilities (4, n) of `gather_action_log_probs`."""
        return policy.gather_action_log_probs(self._find_actions(*given), taken)

    def _find_actions(
        self, hidden: Tensor, excluded_ids: Tensor, start: int, bars: Sequence[Any]
    ) -> policy.ActionDistribution:
        """The outcomes at hidden states (n, hidden) in float32; start, bars: as `bar_tokens` takes them.
        The trainer counts the work of the head."""
        head, norm = self.denoiser.lm_head, self.denoiser.norm
        # No name for the logits: it would keep them while all else is computed.
        return policy.compute_action_distribution(
            bar_tokens(head(norm(hidden)).float(), start, bars), excluded_ids, self.soft
        )


ROLLOUT_PASSAGE_FACTOR = 2  # times top_k: passages that all rollouts of a question see; 1.6 to 2.7 measured
# Settings that rollouts override, or that decide what no gradient is computed for; and what is accepted.
NOT_IN_ROLLOUTS = (
    "decode.mode", "decode.commit_rule", "decode.tokens_per_step", "decode.steps_per_block",
    "decode.edit_threshold", "decode.blocks_at_once", "decode.temperature", "decode.seed",
    "engine.cache_dtype",
)  # fmt: skip
ACCEPTED = {"decode.mode": ("diffusion",), "decode.commit_rule": ("threshold", "left_to_right")}


class RlTask(Task):
    """Groups of rollouts by reward (GRPO, arXiv 2402.03300)."""

    name, needs_denoiser = "rl", True
    _source: QuestionSource
    _denoiser: Denoiser
    decode_settings: DecodeConfig

    def __init__(self, run: Run) -> None:
        super().__init__(run)
        self._steps = self.train.train_steps_per_rollout or int(STEPS_PER_ROLLOUT)
        self.forwards_before = STEPS_PER_ROLLOUT / self._steps

    @staticmethod
    def count_items(train: TrainConfig) -> tuple[int, int]:
        return train.prompts_per_step, train.num_generations

    @classmethod
    def check_settings(cls, config: Config) -> None:
        train = config.train
        if config.model.path is None:
            raise ConfigError("rl begins with a model that answers: set model.path")
        resolve_or_import(REWARDS, train.reward, "train.reward", 2)
        if train.min_hops > train.max_hops:
            raise ConfigError(f"min_hops={train.min_hops} is more than max_hops={train.max_hops}")
        values, defaults = flatten_settings(config), flatten_settings(Config())
        for key in NOT_IN_ROLLOUTS:
            if values[key] not in (defaults[key], *ACCEPTED.get(key, ())):
                raise ConfigError(
                    f"{key}={values[key]} does not go with train.objective=rl, whose rollouts are "
                    "sampled, at train.temperature and with train.seed, block by block: leave it out"
                )
        cls.rollout_settings(config)

    @classmethod
    def rollout_settings(cls, config: Config, own_rule: str | None = None) -> DecodeConfig:
        """As the config and the checkpoint say, but sampled, without what no gradient is computed for.

        own_rule: the checkpoint's, if it has one. A rule from left to right is sampled so.
        """
        train, rule = config.train, config.decode.commit_rule or own_rule
        return replace_settings(
            config.decode, temperature=train.temperature, edit_threshold=None, blocks_at_once=1,
            commit_rule="sampled_left_to_right" if find_rule(rule).in_order else "sampled", seed=train.seed,
            batch_size=min(config.decode.batch_size, train.prompts_per_step * train.num_generations),
        )  # fmt: skip

    def open_data(self) -> Validation:
        run, train = self.run, self.train
        if run.config.data.corpus is None:
            self._source = make_world_source(train, run.top_k)
            return sources.open_world_validation(run)
        questions, retriever, validation = sources.open_questions(run, rewards=True)
        self._source = make_file_source(questions, retriever, train)
        return validation

    def sample_batch(self, count: int) -> RolloutBuffer:
        shape, rollouts = self.run.origin.config, self.train.num_generations
        top_k, rows = self.run.top_k, self._steps * rollouts
        examples = sample_prompt_rows(shape, top_k, count, rows, ROLLOUT_PASSAGE_FACTOR)
        states = lay_out_examples(examples, shape, shape.evidence_layout)
        read = [example.supervised_positions for example in examples]
        learned = [
            PolicyRow(state, places, (-1,) * len(places), False, 1.0, 0.0)
            for places, state in zip(read, states, strict=True)
        ]
        return RolloutBuffer({"rollouts": float(count * rollouts), "failed": 0.0}, learned)

    def objective(self, denoiser: Denoiser) -> nn.Module:
        self._denoiser = denoiser
        own_rule = denoiser.config.decode_settings.get("commit_rule")
        self.decode_settings = self.rollout_settings(self.run.config, own_rule)
        settings = resolve_settings(self.decode_settings, denoiser.config)
        return PolicyObjective(denoiser, settings, self.run.origin.tokenizer.mask_id)

    def make_batch(self, step: int, items: Sequence[int], state: TaskState) -> RolloutBuffer:
        """The rollouts of some questions, from the weights as they are now: nothing is kept of older ones.

        Weights in shards are gathered by all processes together, so one that learns from no step gets a row
        that weighs nothing and runs the layers as often as any other: for a context and for a canvas.
        """
        train, engine = self.train, self.run.config.engine.for_training_rollouts
        asked, retriever = self._source(step, items)
        tokenizer = self.run.origin.tokenizer
        decoder = Decoder(self._denoiser, retriever, tokenizer, self.decode_settings, engine=engine)
        buffer = fill_rollout_buffer(decoder, asked, train)
        return buffer if buffer.rows else RolloutBuffer(buffer.sums, [make_idle_row(decoder)])

    def finish_step(self, sums: Sums, counts: Sums, state: TaskState) -> tuple[Sums, TaskState]:
        rollouts, groups = max(1.0, counts["rollouts"]), max(1.0, counts["groups"])
        learned = max(1.0, sums["learned"])
        found = {
            "loss": (0.0 - sums["policy"]) / counts["divisor"],
            **{f"rollout_{name}": counts[name] / rollouts for name in ("reward", *REWARDS)},
            "rollouts_failed": counts["failed"],
            **{name: counts[name] / groups for name in ("groups_right", "groups_wrong", "groups_mixed")},
            "forced_share": counts["forced"] / max(1.0, counts["steps"]),
            "ratio_error": sums["ratio_error"] / learned,
            "entropy": sums["entropy"] / learned,
        }
        return found, state


def make_idle_row(decoder: Decoder) -> PolicyRow:
    """A row of masks that weighs nothing."""
    shape, mask = decoder.denoiser.config, (decoder.tokenizer.mask_id,)
    order = decoder.config.finished_block_context
    laid = lay_out_prompt(Prompt(mask, (mask,), mask), shape, decoder.evidence_layout, order)
    return PolicyRow(laid.build_row(mask, 0, shape.shifted), (0,), (-1,), False, 0.0, 0.0, learns=False)
