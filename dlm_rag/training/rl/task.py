"""The task of learning by reward: rollouts of the policy of the step, and the gradient of their reward."""

from collections.abc import Sequence

from torch import nn

from dlm_rag.config import Config, DecodeConfig, TrainConfig
from dlm_rag.config.fields import flatten_settings, resolve_or_import
from dlm_rag.engine.engine import Decoder
from dlm_rag.engine.resolve_settings import resolve_settings
from dlm_rag.errors import ConfigError, QuestionError
from dlm_rag.evidence.prompt_segments import lay_out_prompt
from dlm_rag.model.denoiser import Denoiser
from dlm_rag.model.denoiser_config import DenoiserConfig
from dlm_rag.tokenizer import Prompt
from dlm_rag.training.batches import Sums, lay_out_examples
from dlm_rag.training.data.examples import sample_prompt_rows
from dlm_rag.training.phase_data import open_questions, open_world_validation
from dlm_rag.training.rl.policy_loss import PolicyObjective
from dlm_rag.training.rl.reward import REWARDS
from dlm_rag.training.rl.rollouts import (
    STEPS_PER_ROLLOUT,
    PolicyRow,
    QuestionSource,
    RolloutBuffer,
    fill_rollout_buffer,
    make_file_source,
    make_rollout_settings,
    make_world_source,
)
from dlm_rag.training.task import Run, Task, TaskState, Validation

ROLLOUT_PASSAGE_FACTOR = 2  # times top_k: passages that all rollouts of a question see; 1.6 to 2.7 measured
# Settings that rollouts override, or that decide what no gradient is computed for; and what is accepted.
NOT_IN_ROLLOUTS = (
    "decode.mode", "decode.commit_rule", "decode.tokens_per_step", "decode.steps_per_block",
    "decode.edit_threshold", "decode.blocks_at_once", "decode.temperature", "decode.seed",
    "engine.cache_dtype",
)  # fmt: skip
ACCEPTED = {"decode.mode": ("diffusion",), "decode.commit_rule": ("threshold", "sampled")}


class RlTask(Task):
    """Groups of rollouts by reward (GRPO, arXiv 2402.03300)."""

    name, can_prefetch, needs_trained_model = "rl", False, True
    _source: QuestionSource

    def __init__(self, run: Run) -> None:
        super().__init__(run)
        self._tokenizer = self._origin.tokenizer
        self._denoiser: Denoiser | None = None
        self._steps = self.train.train_steps_per_rollout or int(STEPS_PER_ROLLOUT)
        self.forwards_before = STEPS_PER_ROLLOUT / self._steps

    @staticmethod
    def count_items(train: TrainConfig) -> tuple[int, int]:
        return train.prompts_per_step, train.num_generations

    @classmethod
    def check_settings(cls, config: Config) -> None:
        train = config.train
        resolve_or_import(REWARDS, train.reward, "train.reward")
        if train.min_hops > train.max_hops:
            raise ConfigError(f"min_hops={train.min_hops} is more than max_hops={train.max_hops}")
        values, defaults = flatten_settings(config), flatten_settings(Config())
        for key in NOT_IN_ROLLOUTS:
            if values[key] not in (defaults[key], *ACCEPTED.get(key, ())):
                raise ConfigError(
                    f"{key}={values[key]} does not go with train.objective=rl, whose rollouts commit by "
                    "the rule sampled at temperature 1 and train.seed, block by block: leave it out"
                )
        make_rollout_settings(config)

    @classmethod
    def rollout_settings(cls, config: Config) -> DecodeConfig:
        return make_rollout_settings(config)

    def open_data(self) -> Validation:
        run, train = self.run, self.train
        if self._config.data.corpus is None:
            self._source = make_world_source(train, self._config.retrieval.top_k)
            return open_world_validation(run)
        questions, retriever, validation = open_questions(run)
        for question in (*questions, *validation.questions):
            if not question.golden_answers:
                raise QuestionError(f"question '{question.id}' has no 'golden_answers' to reward")
        self._source = make_file_source(questions, retriever, train)
        return validation

    def sample_batch(self, shape: DenoiserConfig, count: int) -> RolloutBuffer:
        train, rollouts = self.train, self.train.num_generations
        examples = sample_prompt_rows(
            shape, train.passage_length, self._config.retrieval.top_k, count, self._steps * rollouts,
            ROLLOUT_PASSAGE_FACTOR,
        )  # fmt: skip
        states = lay_out_examples(examples, shape, shape.evidence_layout)
        read = [example.supervised_positions for example in examples]
        rows = [
            PolicyRow(state, places, (-1,) * len(places), False, 1.0, 0.0)
            for places, state in zip(read, states, strict=True)
        ]
        return RolloutBuffer({"rollouts": float(count * rollouts), "failed": 0.0}, rows)

    def objective(self, denoiser: Denoiser) -> nn.Module:
        self._denoiser = denoiser
        shape = denoiser.config
        settings = resolve_settings(make_rollout_settings(self._config), shape)
        if shape.block_size and shape.predicts_next_block:
            raise ConfigError(
                "rl computes steps again from the canvas alone, which excludes models that predict the "
                "first token of a block from before it"
            )
        return PolicyObjective(denoiser, settings, self._tokenizer.mask_id)

    def make_batch(self, step: int, items: Sequence[int], conditions: None) -> RolloutBuffer:
        """The rollouts of some questions, from the weights as they are now: nothing is kept of older ones.

        Weights in shards are gathered by all processes together, so one that learns from no step gets a row
        that weighs nothing and runs the layers as often as any other: for a context and for a canvas.
        """
        assert self._denoiser is not None
        train, engine = self.train, self._config.engine.for_training_rollouts
        asked, retriever = self._source(step, items)
        settings = make_rollout_settings(self._config)
        decoder = Decoder(self._denoiser, retriever, self._tokenizer, settings, engine=engine)
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
    return PolicyRow(laid.build_row(mask, 0, shape.shifted), (0,), (-1,), False, 0.0, 0.0, False)
