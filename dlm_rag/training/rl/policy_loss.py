"""The policy-gradient loss: what was decided, made more likely by its advantage.

    loss = sum over steps of represents x (kl_coef x KL(step) - advantage x log pi(step)) / divisor

A sampled step is weighted by the number of steps it represents. KL(step) is the divergence of all that
might have been decided there, from the policy that the phase began with; that the weights also move which
steps are visited has no gradient in it.

The divisor is constant, so that long rollouts count no less a step than short ones (arXiv 2503.20783). The
log-probabilities are those of the decoder, computed again with gradients from the same inputs:
`ratio_error` says how far apart. Each buffer is used for one update, so no ratio needs clipping.
"""

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from dlm_rag.config import DecodeConfig, TrainConfig
from dlm_rag.engine.policy import (
    ActionDistribution,
    SoftThreshold,
    compute_action_distribution,
    gather_action_log_probs,
    step_kl_divergence,
    step_log_prob,
)
from dlm_rag.evidence.encode_segments import encode_canvases, encode_contexts
from dlm_rag.model.denoiser import Denoiser
from dlm_rag.model.device_io import to_device
from dlm_rag.nvtx_ranges import profile_stage
from dlm_rag.training.rl.rollouts import PolicyRow, RolloutBuffer

MAX_LOGIT_BYTES = 4 * 2**30  # of logits that exist at a time, with all that is computed of them
LOGIT_COPIES = 20  # numbers of float32 for each logit at the peak, which is in backward, with a reference


class PolicyObjective(nn.Module):
    """The policy-gradient loss of a denoiser: a soft threshold over its own logits."""

    logit_chunk = 4096  # candidates whose logits exist at a time, at most

    def __init__(
        self,
        denoiser: Denoiser,
        settings: DecodeConfig,
        mask_id: int,
        train: TrainConfig,
        reference: Denoiser | None = None,
    ) -> None:
        """settings: of the rollouts. reference: the frozen denoiser from which divergence is counted."""
        super().__init__()
        self.denoiser, self.train_config = denoiser, train
        self.excluded_ids = np.array([mask_id, *denoiser.config.excluded_token_ids])
        self.soft = SoftThreshold(
            settings.temperature, settings.commit_threshold, settings.gate_temperature
        )
        self.reference = reference
        fitting = MAX_LOGIT_BYTES // (4 * LOGIT_COPIES * denoiser.config.vocab_size)
        self.logit_chunk = max(1, min(self.logit_chunk, fitting))

    def forward(self, part: RolloutBuffer, counts: dict[str, float]) -> tuple[Tensor, dict[str, Tensor]]:
        """What the rows of a part add to the loss of a step, and sums over their decisions."""
        rows, reference = part.rows, self.reference
        hidden = self._encode(self.denoiser, rows)
        with profile_stage("loss"):
            seen: list[Tensor] = []  # by the reference
            if reference is not None:
                with torch.no_grad():
                    seen = [self._encode(reference, rows)]
            arrays = [
                np.array([token for row in rows for token in row.committed_tokens], np.int64),
                np.repeat(np.arange(len(rows)), [len(row.candidates) for row in rows]),
                np.array([row.forced for row in rows], np.bool_),
                np.array([row[-3:] for row in rows], np.float32).T,
                self.excluded_ids,
            ]
            taken, step, forced, numbers, excluded_ids = to_device(arrays, hidden.device)
            weights, recorded, represents = numbers
            pieces = zip(*(x.split(self.logit_chunk) for x in (taken, hidden, *seen)), strict=True)
            found, entropy = [], torch.zeros_like(weights[0])
            for at, *states in pieces:
                # Logits exist a chunk at a time: backward computes them again.
                found.append(checkpoint(self._gather, at, excluded_ids, *states, use_reentrant=False))
                with torch.no_grad():
                    entropy += self._find_actions(self.denoiser, states[0], excluded_ids).entropy().sum()
            parts = torch.cat(found, 1)
            log_prob = step_log_prob(parts[:4], step, taken >= 0, forced)
            gained = (weights * log_prob).sum()
            loss, divergence = -gained, torch.zeros_like(gained)
            if reference is not None:
                own = torch.cat((parts[1:3], parts[4:6]))
                each = step_kl_divergence(own, parts[6], step, len(rows))
                divergence = (represents * each).sum()
                loss = loss + self.train_config.kl_coef * divergence
            loss = loss / counts["divisor"]
        with torch.no_grad():
            ratios = (log_prob.double() - recorded.double()).exp()
            learns = float(rows[0].steps_represented > 0)  # else it is there for the other processes
            sums = {
                "policy": gained, "ratio_error": (ratios - 1).abs().sum(), "entropy": entropy,
                "divergence": divergence, "learned": gained.new_full((), len(rows)),
            }  # fmt: skip
            return loss, {name: learns * value.detach().double() for name, value in sums.items()}

    def _encode(self, denoiser: Denoiser, rows: list[PolicyRow]) -> Tensor:
        """The hidden states (n, hidden) that predict the candidates of all rows."""
        states, read = [row.state for row in rows], [row.candidates for row in rows]
        return encode_canvases(denoiser, states, encode_contexts(denoiser, states), read)

    def _gather(
        self, taken: Tensor, excluded_ids: Tensor, hidden: Tensor, seen: Tensor | None = None
    ) -> Tensor:
        """The log-probabilities (4, n) of `gather_action_log_probs`; with hidden states of the reference
        (7, n): also the two rows of the divergence from it, and its `forced_logit`.
        """
        found = self._find_actions(self.denoiser, hidden, excluded_ids)
        parts = gather_action_log_probs(found, taken)
        if self.reference is None or seen is None:
            return parts
        with torch.no_grad():
            other = self._find_actions(self.reference, seen, excluded_ids)
        return torch.cat((parts, found.kl_divergence(other), other.forced_logit[None]))

    def _find_actions(self, denoiser: Denoiser, hidden: Tensor, excluded_ids: Tensor) -> ActionDistribution:
        """The outcomes at hidden states (n, hidden) in float32; the trainer counts the work of the head."""
        # No name for the logits: it would keep them while all else is computed.
        return compute_action_distribution(
            denoiser.lm_head(denoiser.norm(hidden)).float(), excluded_ids, self.soft
        )
