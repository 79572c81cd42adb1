"""The policy-gradient loss: what was decided, made more likely by its advantage.

    loss = - sum over steps of represents x advantage x log pi(step) / divisor

A sampled step is weighted by the number of steps it represents.

The divisor is constant, so that long rollouts count no less a step than short ones (arXiv 2503.20783). The
log-probabilities are those of the decoder, computed again with gradients from the same inputs:
`ratio_error` says how far apart. Each buffer is used for one update, so no ratio needs clipping.
"""

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from dlm_rag.config import DecodeConfig
from dlm_rag.engine.policy import (
    ActionDistribution,
    SoftThreshold,
    compute_action_distribution,
    gather_action_log_probs,
    step_log_prob,
)
from dlm_rag.evidence.encode_segments import encode_canvases, encode_contexts
from dlm_rag.model.denoiser import Denoiser
from dlm_rag.model.device_io import to_device
from dlm_rag.nvtx_ranges import profile_stage
from dlm_rag.training.rl.rollouts import RolloutBuffer

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
        self.soft = SoftThreshold(
            settings.temperature, settings.commit_threshold, settings.gate_temperature
        )
        fitting = MAX_LOGIT_BYTES // (4 * LOGIT_COPIES * denoiser.config.vocab_size)
        self.logit_chunk = max(1, min(self.logit_chunk, fitting))

    def forward(self, part: RolloutBuffer, counts: dict[str, float]) -> tuple[Tensor, dict[str, Tensor]]:
        """What the rows of a part add to the loss of a step, and sums over their decisions."""
        rows = part.rows
        states, read = [row.state for row in rows], [row.candidates for row in rows]
        hidden = encode_canvases(self.denoiser, states, encode_contexts(self.denoiser, states), read)
        with profile_stage("loss"):
            arrays = [
                np.array([token for row in rows for token in row.committed_tokens], np.int64),
                np.repeat(np.arange(len(rows)), [len(row.candidates) for row in rows]),
                np.array([row.forced for row in rows], np.bool_),
                np.array([(row.weight, row.old_log_prob) for row in rows], np.float32).T,
                self.excluded_ids,
            ]
            taken, step, forced, numbers, excluded_ids = to_device(arrays, hidden.device)
            weights, recorded = numbers
            found, entropy = [], torch.zeros_like(weights[0])
            for at, seen in zip(*(x.split(self.logit_chunk) for x in (taken, hidden)), strict=True):
                # Logits exist a chunk at a time: backward computes them again.
                found.append(checkpoint(self._gather, at, excluded_ids, seen, use_reentrant=False))
                with torch.no_grad():
                    entropy += self._find_actions(seen, excluded_ids).entropy().sum()
            log_prob = step_log_prob(torch.cat(found, 1), step, taken >= 0, forced)
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

    def _gather(self, taken: Tensor, excluded_ids: Tensor, hidden: Tensor) -> Tensor:
        """The log-probabilities (4, n) of `gather_action_log_probs`."""
        return gather_action_log_probs(self._find_actions(hidden, excluded_ids), taken)

    def _find_actions(self, hidden: Tensor, excluded_ids: Tensor) -> ActionDistribution:
        """The outcomes at hidden states (n, hidden) in float32; the trainer counts the work of the head."""
        head, norm = self.denoiser.lm_head, self.denoiser.norm
        # No name for the logits: it would keep them while all else is computed.
        return compute_action_distribution(head(norm(hidden)).float(), excluded_ids, self.soft)
