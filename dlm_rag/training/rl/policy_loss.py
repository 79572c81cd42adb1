"""The gradient of the expected reward: what was decided, made more likely by its advantage.

    loss = sum over steps of stands_for x (kl_coef x KL(step) - advantage x log pi(step)) / divisor

A step that was drawn stands for so many of its rollout. KL(step) is the divergence of all that might have
been decided there, from the policy that the phase began with; that the weights also move which steps are
visited has no gradient in it.

The divisor is constant, so that long rollouts count no less a step than short ones (arXiv 2503.20783). The
log-probabilities are those of the decoder, computed again with gradients: `ratio_error` says how far apart.
With several updates of a buffer the weights are no longer those that it was made with, and in place of
log pi(step) stands the ratio to the recorded probability, clipped (PPO, arXiv 1707.06347), of whole steps.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from dlm_rag.config import DecodeConfig, TrainConfig
from dlm_rag.decode.trace_file import TraceHeader, make_step_examples
from dlm_rag.diffusion.policy import (
    ActionDistribution,
    SoftThreshold,
    compute_action_distribution,
    gather_action_log_probs,
    step_kl_divergence,
    step_log_prob,
)
from dlm_rag.evidence.encode_segments import encode_canvases, encode_contexts
from dlm_rag.evidence.prompt_segments import LaidOutRow, lay_out_prompt
from dlm_rag.model.denoiser import Denoiser
from dlm_rag.model.denoiser_config import DenoiserConfig
from dlm_rag.model.device_io import to_device
from dlm_rag.nvtx_ranges import profile_stage
from dlm_rag.tokenizer import Prompt, Tokenizer
from dlm_rag.training.rl.rollouts import WeightedStep

POLICY_LOSS_SUMS = ("policy", "ratio_error", "clipped", "entropy", "divergence", "learned")
MAX_LOGIT_BYTES = 4 * 2**30  # of logits that exist at a time, with all that is computed of them
LOGIT_COPIES = 20  # numbers of float32 for each logit at the peak, which is in backward, with a reference


class PolicyRow(NamedTuple):
    """A step that the denoiser learns from: what it saw, what it did, how likely that was."""

    state: LaidOutRow
    candidates: tuple[int, ...]
    committed_tokens: tuple[int, ...]  # of each candidate the token that it committed, -1 where it stayed
    forced: bool
    weight: float
    old_log_prob: float
    steps_represented: float = 1.0  # steps of its rollout


def make_policy_rows(
    taken: Sequence[WeightedStep],
    header: TraceHeader,
    tokenizer: Tokenizer,
    shape: DenoiserConfig,
    order: str,
) -> list[PolicyRow]:
    """The rows of steps of rollouts; what a step saw follows from its rollout. Never empty.

    order: what finished blocks see, as `DenoiserConfig.finished_block_context`. Weights in shards are
    gathered by all processes together, so a process without steps gets a row that weighs nothing and runs
    the layers as often as any other: for its context, where there is one, and for its canvas.
    """
    by_rollout: dict[int, list[WeightedStep]] = {}
    for part in taken:
        by_rollout.setdefault(id(part.rollout), []).append(part)
    found = []
    for parts in by_rollout.values():
        rollout = parts[0].rollout
        rows = {row.step: row for row in make_step_examples(rollout, header, tokenizer)}
        for part in parts:
            row, action = rows[part.step.step], part.action
            laid = lay_out_prompt(row.prompt, shape, rollout.prompt_layout, order)
            begin, end = laid.block_bounds(row.canvas.index(header.mask_id))
            finished = max(0, begin) if laid.block_size else 0
            state = laid.build_row(row.canvas[: min(end, len(row.canvas))], finished, shape.shifted)
            written = {token.position: token.token_id for token in row.committed}
            tokens = tuple(written.get(position, -1) for position in action.candidates)
            numbers = part.weight, action.log_prob, part.steps_represented
            found.append(PolicyRow(state, action.candidates, tokens, action.forced, *numbers))
    if found:
        return found
    mask = (header.mask_id,)
    laid = lay_out_prompt(Prompt(mask, (mask,), mask), shape, header.prompt_layout, order)
    return [PolicyRow(laid.build_row(mask, 0, shape.shifted), (0,), (-1,), False, 0.0, 0.0, 0.0)]


class PolicyObjective(nn.Module):
    """The policy-gradient loss of a denoiser: a soft threshold over its own logits."""

    def __init__(
        self,
        denoiser: Denoiser,
        settings: DecodeConfig,
        mask_id: int,
        train: TrainConfig,
        reference: Denoiser | None = None,
    ) -> None:
        """reference: the frozen denoiser that divergence is counted from, where it is wanted."""
        super().__init__()
        self.denoiser, self.mask_id, self.train_config = denoiser, mask_id, train
        self.soft = SoftThreshold(
            settings.temperature, settings.commit_threshold, settings.gate_temperature
        )
        self.reference = reference
        fitting = MAX_LOGIT_BYTES // (4 * LOGIT_COPIES * denoiser.config.vocab_size)
        self.logit_chunk = max(1, min(train.logit_chunk, fitting))

    def forward(self, part: Any, counts: dict[str, float], terms: None) -> tuple[Tensor, dict[str, Tensor]]:
        """What the rows of a part add to the loss of a step, and sums over their decisions."""
        rows: list[PolicyRow] = part.rows
        states, read = [row.state for row in rows], [row.candidates for row in rows]
        hidden = encode_canvases(self.denoiser, states, encode_contexts(self.denoiser, states), read)
        reference = self.reference
        with profile_stage("loss"):
            seen: list[Tensor] = []  # by the reference
            if reference is not None:
                with torch.no_grad():
                    seen = [encode_canvases(reference, states, encode_contexts(reference, states), read)]
            arrays = [
                np.array([token for row in rows for token in row.committed_tokens], np.int64),
                np.repeat(np.arange(len(rows)), [len(row.candidates) for row in rows]),
                np.array([row.forced for row in rows], np.bool_),
                np.array([row[-3:] for row in rows], np.float32).T,
                np.array([self.mask_id, *self.denoiser.config.excluded_token_ids]),
            ]
            taken, step, forced, numbers, mask_id = to_device(arrays, hidden.device)
            weights, recorded, stands_for = numbers
            pieces = zip(*(x.split(self.logit_chunk) for x in (taken, hidden, *seen)), strict=True)
            found, entropy = [], torch.zeros_like(weights[0])
            for at, *views in pieces:
                # Logits exist a chunk at a time: backward computes them again.
                found.append(checkpoint(self._picked, at, mask_id, *views, use_reentrant=False))
                with torch.no_grad():
                    entropy += self._find_actions(self.denoiser, views[0], mask_id).entropy().sum()
            parts = torch.cat(found, 1)
            took = taken >= 0
            log_prob = step_log_prob(parts[:4], step, took, forced)
            gained, clipped = compute_clipped_surrogate(log_prob, recorded, weights, self.train_config)
            loss, divergence = -gained, torch.zeros_like(gained)
            if reference is not None:
                own = torch.cat((parts[1:3], parts[4:6]))
                each = step_kl_divergence(own, parts[6], step, len(rows))
                divergence = (stands_for * each).sum()
                loss = loss + self.train_config.kl_coef * divergence
            loss = loss / counts["divisor"]
        sums = {name: loss.detach().double() * 0.0 for name in POLICY_LOSS_SUMS}
        if rows[0].steps_represented:  # else it is there for the other processes
            with torch.no_grad():
                sums["policy"] += gained
                sums["clipped"] += clipped
                add_ratio_sums(sums, log_prob.double(), recorded.double())
                sums["entropy"] += entropy
                sums["divergence"] += divergence
        return loss, sums

    def _picked(self, taken: Tensor, mask_id: Tensor, hidden: Tensor, seen: Tensor | None = None) -> Tensor:
        """(4, n): `gather_action_log_probs`; with hidden states of the reference (7, n): the two rows of
        the divergence from it, and its urge, too."""
        found = self._find_actions(self.denoiser, hidden, mask_id)
        parts = gather_action_log_probs(found, taken)
        if self.reference is None or seen is None:
            return parts
        with torch.no_grad():
            other = self._find_actions(self.reference, seen, mask_id)
        return torch.cat((parts, found.kl_divergence(other), other.forced_logit[None]))

    def _find_actions(self, denoiser: Denoiser, hidden: Tensor, mask_id: Tensor) -> ActionDistribution:
        """Of hidden states (n, hidden); in float32. The trainer counts the work of the head."""
        # No name for the logits: it would keep them while all else is computed.
        return compute_action_distribution(
            denoiser.lm_head(denoiser.norm(hidden)).float(), mask_id, self.soft
        )


def compute_clipped_surrogate(
    log_prob: Tensor, recorded: Tensor, weights: Tensor, train: TrainConfig
) -> tuple[Tensor, Tensor]:
    """What is to be made large, summed over steps (S,), and how many of them are clipped."""
    if train.num_iterations == 1:
        return (weights * log_prob).sum(), log_prob.new_zeros(())
    ratio = (log_prob - recorded).exp()
    bounded = weights * ratio.clamp(1 - train.clip_eps, 1 + train.clip_eps)
    return torch.minimum(weights * ratio, bounded).sum(), (bounded < weights * ratio).sum().detach()


def add_ratio_sums(sums: dict[str, Tensor], log_prob: Tensor, recorded: Tensor) -> None:
    """Adds decisions to the sums."""
    sums["ratio_error"] += ((log_prob - recorded).exp() - 1).abs().sum()
    sums["learned"] += len(recorded)
