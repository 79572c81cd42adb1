"""The task of learning by reward: rollouts of the policy of the step, and the gradient of their reward."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import nn

from dlm_rag.config import Config, TrainConfig
from dlm_rag.decode.engine import with_checkpoints_own
from dlm_rag.decode.trace import header_of
from dlm_rag.errors import ConfigError
from dlm_rag.machine import choose_device, choose_dtype
from dlm_rag.model.denoiser import Denoiser
from dlm_rag.model.shape import DenoiserConfig
from dlm_rag.model.sharing import SequenceShare
from dlm_rag.tokenizer import Tokenizer
from dlm_rag.training.policy_loss import Gates, HeadsObjective, PolicyObjective, PolicyRow, policy_rows
from dlm_rag.training.rollouts import Buffer, Questions, Taken, decoder_of, make_buffer, rollout_settings
from dlm_rag.training.task import State
from dlm_rag.training.weights import frozen_copy

STEPS = 8.0  # that a rollout counts in the divisor, whatever it took
PATIENCE = 10  # steps that something must last before it is reported
FEW_NATS = 0.02  # of entropy a step, under which nothing is tried any more


@dataclass(frozen=True)
class Part:
    """Some groups of a step: what was counted of them, and what is learned from."""

    sums: dict[str, float]
    rows: list[PolicyRow]
    commits: Gates
    searches: Gates


class Rl:
    """Groups of rollouts by reward (GRPO, arXiv 2402.03300).

    The state is what the alarms count: steps without a mixed group, steps nearly without entropy, the
    searches of a rollout at first and now; and the alarms that the run has reported, each once.
    """

    name, ahead_of_time = "rl", False

    def __init__(
        self,
        questions: Questions,
        config: Config,
        train: TrainConfig,
        tokenizer: Tokenizer,
    ) -> None:
        self._questions, self._config, self._train = questions, config, train
        self._tokenizer = tokenizer
        self.items, self.rows, self.updates = train.items, train.items * train.rows, train.updates
        self._denoiser: Denoiser | None = None

    def objective(self, denoiser: Denoiser, share: SequenceShare | None) -> nn.Module:
        self._denoiser = denoiser
        check_shape(denoiser.config, self._train)
        settings = rollout_settings(self._config, self._train)
        if self._train.learn == "heads":
            return HeadsObjective(denoiser, settings, self._train)
        dtype = choose_dtype(self._train.dtype, choose_device(self._config.model.device))
        reference = frozen_copy(denoiser, dtype) if self._train.kl_weight else None
        return PolicyObjective(denoiser, settings, self._tokenizer.mask_id, self._train, reference)

    def conditions(self, state: State) -> None:
        return None

    def part(self, step: int, items: Sequence[int], conditions: None) -> Part:
        buffer, layout = self.buffer(step, items)
        rows = self.policy_rows(buffer.taken, layout) if self._train.learn != "heads" else []
        return Part(buffer.sums, rows, Gates.of_commits(buffer.taken), Gates.of_searches(buffer.taken))

    def buffer(self, step: int, items: Sequence[int]) -> tuple[Buffer, str]:
        """The rollouts of some questions of a step, and how their evidence was laid out."""
        assert self._denoiser is not None
        train = self._train
        asked, retriever = self._questions.ask(step, items)
        decoder = decoder_of(self._denoiser, retriever, self._tokenizer, self._config, train)
        return make_buffer(decoder, asked, train, step / train.steps), decoder.evidence_layout

    def policy_rows(self, taken: Sequence[Taken], layout: str) -> list[PolicyRow]:
        """What the denoiser learns from steps that were taken."""
        assert self._denoiser is not None
        shape = self._denoiser.config
        settings = with_checkpoints_own(rollout_settings(self._config, self._train), shape)
        header = header_of(
            shape, self._tokenizer, layout, settings,
            top_k=self._config.retrieval.top_k, model="", corpus="",
        )  # fmt: skip
        assert settings.finished_blocks is not None
        return policy_rows(taken, header, self._tokenizer, shape, settings.finished_blocks)

    def terms(self, step: int) -> None:
        return None

    def counts(self, part: Part, terms: None) -> dict[str, float]:
        runs = [row.state.run for row in part.rows]
        return part.sums | {
            "rows": part.sums["rollouts"],
            "tokens": float(sum(len(run.ids) for run in runs)),
            "supervised": float(sum(len(row.candidates) for row in part.rows)),
            "visited": sum(row.stands_for for row in part.rows),
            "divisor": (part.sums["rollouts"] + part.sums["failed"]) * STEPS,
        }

    def metrics(self, sums: dict[str, float], counts: dict[str, float], state: State) -> dict[str, float]:
        rollouts, groups = max(1.0, counts["rollouts"]), max(1.0, counts["groups"])
        learned = max(1.0, sums["learned"])
        means = ("reward", "exact_match", "f1", "recall", "forwards", "searches", "unanswered")
        found = {
            "loss": (self._train.kl_weight * sums["divergence"] - sums["policy"]) / counts["divisor"],
            **{f"rollout_{name}": counts[name] / rollouts for name in means},
            "rollouts_failed": counts["failed"],
            **{name: counts[name] / groups for name in ("groups_right", "groups_wrong", "groups_mixed")},
            "forced_share": counts["forced"] / max(1.0, counts["steps"]),
            "ratio_error": sums["ratio_error"] / learned,
            "clipped_share": sums["clipped"] / learned,
            "entropy": sums["entropy"] / learned,
            "scale_score": sums["scale_score"] / learned,
        }
        if self._train.kl_weight:
            found["divergence"] = sums["divergence"] / max(1.0, counts["visited"])
        return found

    def advance(self, state: State, metrics: dict[str, Any], counts: dict[str, float]) -> State:
        first = state.get("searches_at_first", metrics["rollout_searches"])
        reported = state.get("alarms", [])
        state = {
            "unmixed": 0 if metrics["groups_mixed"] else state.get("unmixed", 0) + 1,
            "certain": state.get("certain", 0) + 1 if 0 < metrics["entropy"] < FEW_NATS else 0,
            "searches_at_first": first,
            "searches": 0.9 * state.get("searches", first) + 0.1 * metrics["rollout_searches"],
        }
        found = alarms(state, bool(self._train.forward_price or self._train.search_price))
        if new := found.keys() - reported:
            cause = min(new)
            metrics["alarm"], reported = found[cause], [*reported, cause]
        return state | {"alarms": reported}


def alarms(state: State, priced: bool) -> dict[str, str]:
    """What goes wrong while the reward may not show it: a sentence for each cause that lasts."""
    found = {}
    if state["unmixed"] >= PATIENCE:
        learned = "only prices were" if priced else "nothing was"
        found["unmixed"] = (
            f"no group of {PATIENCE} steps had both right and wrong rollouts, so {learned} learned: ask "
            "other questions (least_hops, hops), or reward parts of an answer (f1_weight, recall_weight)"
        )
    if state["certain"] >= PATIENCE:
        found["certain"] = (
            "hardly anything is decided by lot any more, so nothing new is tried: lower the learning rate, "
            "or raise rollout_temperature or decode.gate_width"
        )
    if state["searches"] > 2 * max(1.0, state["searches_at_first"]):
        found["searches"] = (
            "rollouts search twice as often as at first: set search_price, or look at the retriever"
        )
    return found


def check_shape(shape: DenoiserConfig, train: TrainConfig) -> None:
    """Raises `ConfigError` for a denoiser whose steps cannot be computed again as they were."""
    if train.learn == "heads" or not shape.attention_block:
        return
    if shape.shifted or shape.finished_blocks in ("append", "kept"):
        raise ConfigError(
            "rl of the denoiser computes steps again from the canvas alone, which does not do for "
            + ("shifted models in blocks" if shape.shifted else f"finished_blocks={shape.finished_blocks}")
            + ": set train.learn=heads"
        )
