"""The task of learning by reward: rollouts of the policy of the step, and the gradient of their reward."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import nn

from dlm_rag.config import Config, TrainConfig
from dlm_rag.decode.engine import with_checkpoint_defaults
from dlm_rag.decode.trace_file import build_trace_header
from dlm_rag.errors import ConfigError
from dlm_rag.machine import choose_device, choose_dtype
from dlm_rag.model.context_parallel import ContextParallel
from dlm_rag.model.denoiser import Denoiser
from dlm_rag.model.denoiser_config import DenoiserConfig
from dlm_rag.tokenizer import Tokenizer
from dlm_rag.training.initial_weights import copy_frozen_denoiser
from dlm_rag.training.rl.policy_loss import (
    GateDecisions,
    HeadsObjective,
    PolicyObjective,
    PolicyRow,
    make_policy_rows,
)
from dlm_rag.training.rl.rollouts import (
    QuestionSource,
    RolloutBuffer,
    WeightedStep,
    fill_rollout_buffer,
    make_rollout_decoder,
    make_rollout_settings,
)
from dlm_rag.training.task import TaskState

STEPS_PER_ROLLOUT = 8.0  # that a rollout counts in the divisor, whatever it took
ALARM_PATIENCE_STEPS = 10  # steps that something must last before it is reported
MIN_ENTROPY_NATS = 0.02  # of entropy a step, under which nothing is tried any more


@dataclass(frozen=True)
class RlMicrobatch:
    """Some groups of a step: what was counted of them, and what is learned from."""

    sums: dict[str, float]
    rows: list[PolicyRow]
    commits: GateDecisions
    searches: GateDecisions


class RlTask:
    """Groups of rollouts by reward (GRPO, arXiv 2402.03300).

    The state is what the alarms count: steps without a mixed group, steps nearly without entropy, the
    searches of a rollout at first and now; and the alarms that the run has reported, each once.
    """

    name, can_prefetch = "rl", False

    def __init__(
        self, questions: QuestionSource, config: Config, train: TrainConfig, tokenizer: Tokenizer
    ) -> None:
        self._questions, self._config, self._train = questions, config, train
        self._tokenizer = tokenizer
        self.items, self.rows, self.updates = (
            train.items,
            train.items * train.num_generations,
            train.num_iterations,
        )
        self._denoiser: Denoiser | None = None

    def objective(self, denoiser: Denoiser, share: ContextParallel | None) -> nn.Module:
        self._denoiser = denoiser
        check_rl_shape(denoiser.config, self._train)
        settings = make_rollout_settings(self._config, self._train)
        if self._train.trainable == "policy_heads":
            return HeadsObjective(denoiser, settings, self._train)
        dtype = choose_dtype(self._train.dtype, choose_device(self._config.model.device))
        reference = copy_frozen_denoiser(denoiser, dtype) if self._train.kl_coef else None
        return PolicyObjective(denoiser, settings, self._tokenizer.mask_id, self._train, reference)

    def conditions(self, state: TaskState) -> None:
        return None

    def make_microbatch(self, step: int, items: Sequence[int], conditions: None) -> RlMicrobatch:
        buffer, layout = self.collect_rollouts(step, items)
        rows = (
            self.make_denoiser_rows(buffer.weighted_steps, layout)
            if self._train.trainable != "policy_heads"
            else []
        )
        return RlMicrobatch(
            buffer.sums,
            rows,
            GateDecisions.from_commits(buffer.weighted_steps),
            GateDecisions.from_searches(buffer.weighted_steps),
        )

    def collect_rollouts(self, step: int, items: Sequence[int]) -> tuple[RolloutBuffer, str]:
        """The rollouts of some questions of a step, and how their evidence was laid out."""
        assert self._denoiser is not None
        train = self._train
        asked, retriever = self._questions.draw_questions(step, items)
        decoder = make_rollout_decoder(self._denoiser, retriever, self._tokenizer, self._config, train)
        return fill_rollout_buffer(decoder, asked, train, step / train.max_steps), decoder.evidence_layout

    def make_denoiser_rows(self, taken: Sequence[WeightedStep], layout: str) -> list[PolicyRow]:
        """What the denoiser learns from steps that were taken."""
        assert self._denoiser is not None
        shape = self._denoiser.config
        settings = with_checkpoint_defaults(make_rollout_settings(self._config, self._train), shape)
        header = build_trace_header(
            shape, self._tokenizer, layout, settings,
            top_k=self._config.retrieval.top_k, model="", corpus="",
        )  # fmt: skip
        assert settings.finished_block_context is not None
        return make_policy_rows(taken, header, self._tokenizer, shape, settings.finished_block_context)

    def loss_weights(self, step: int) -> None:
        return None

    def count_microbatch(self, part: RlMicrobatch, terms: None) -> dict[str, float]:
        runs = [row.state.canvas_segment for row in part.rows]
        return part.sums | {
            "rows": part.sums["rollouts"],
            "tokens": float(sum(len(run.ids) for run in runs)),
            "supervised": float(sum(len(row.candidates) for row in part.rows)),
            "visited": sum(row.steps_represented for row in part.rows),
            "divisor": (part.sums["rollouts"] + part.sums["failed"]) * STEPS_PER_ROLLOUT,
        }

    def metrics(
        self, sums: dict[str, float], counts: dict[str, float], state: TaskState
    ) -> dict[str, float]:
        rollouts, groups = max(1.0, counts["rollouts"]), max(1.0, counts["groups"])
        learned = max(1.0, sums["learned"])
        means = ("reward", "exact_match", "f1", "recall", "forwards", "searches", "unanswered")
        found = {
            "loss": (self._train.kl_coef * sums["divergence"] - sums["policy"]) / counts["divisor"],
            **{f"rollout_{name}": counts[name] / rollouts for name in means},
            "rollouts_failed": counts["failed"],
            **{name: counts[name] / groups for name in ("groups_right", "groups_wrong", "groups_mixed")},
            "forced_share": counts["forced"] / max(1.0, counts["steps"]),
            "ratio_error": sums["ratio_error"] / learned,
            "clipped_share": sums["clipped"] / learned,
            "entropy": sums["entropy"] / learned,
            "scale_score": sums["scale_score"] / learned,
        }
        if self._train.kl_coef:
            found["divergence"] = sums["divergence"] / max(1.0, counts["visited"])
        return found

    def advance(self, state: TaskState, metrics: dict[str, Any], counts: dict[str, float]) -> TaskState:
        first = state.get("searches_at_first", metrics["rollout_searches"])
        reported = state.get("alarms", [])
        state = {
            "unmixed": 0 if metrics["groups_mixed"] else state.get("unmixed", 0) + 1,
            "certain": state.get("certain", 0) + 1 if 0 < metrics["entropy"] < MIN_ENTROPY_NATS else 0,
            "searches_at_first": first,
            "searches": 0.9 * state.get("searches", first) + 0.1 * metrics["rollout_searches"],
        }
        found = find_alarms(state, bool(self._train.forward_cost or self._train.search_cost))
        if new := found.keys() - reported:
            cause = min(new)
            metrics["alarm"], reported = found[cause], [*reported, cause]
        return state | {"alarms": reported}


def find_alarms(state: TaskState, priced: bool) -> dict[str, str]:
    """What goes wrong while the reward may not show it: a sentence for each cause that lasts."""
    found = {}
    if state["unmixed"] >= ALARM_PATIENCE_STEPS:
        learned = "only prices were" if priced else "nothing was"
        found["unmixed"] = (
            f"no group of {ALARM_PATIENCE_STEPS} steps had both right and wrong rollouts, so {learned} "
            "learned: ask "
            "other questions (min_hops, hops), or reward parts of an answer (f1_weight, recall_weight)"
        )
    if state["certain"] >= ALARM_PATIENCE_STEPS:
        found["certain"] = (
            "hardly anything is decided by lot any more, so nothing new is tried: lower the learning rate, "
            "or raise rollout_temperature or decode.gate_temperature"
        )
    if state["searches"] > 2 * max(1.0, state["searches_at_first"]):
        found["searches"] = (
            "rollouts search twice as often as at first: set search_cost, or look at the retriever"
        )
    return found


def check_rl_shape(shape: DenoiserConfig, train: TrainConfig) -> None:
    """Raises `ConfigError` for a denoiser whose steps cannot be computed again as they were."""
    if train.trainable == "policy_heads" or not shape.block_size:
        return
    if shape.shifted or shape.finished_block_context in ("append", "frozen"):
        raise ConfigError(
            "rl of the denoiser computes steps again from the canvas alone, which does not do for "
            + (
                "shifted models in blocks"
                if shape.shifted
                else f"finished_block_context={shape.finished_block_context}"
            )
            + ": set train.trainable=policy_heads"
        )
