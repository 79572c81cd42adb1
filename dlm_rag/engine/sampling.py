"""What a step asks of a model, and what becomes of its logits: tokens for canvas positions."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from dlm_rag.engine.policy import SoftThreshold, draw_actions, sample_at_quantile
from dlm_rag.engine.rules import ACTION_STATISTICS
from dlm_rag.evidence.prompt_segments import LaidOutPrompt
from dlm_rag.model.denoiser_config import DenoiserConfig

LOGITS_CHUNK_POSITIONS = 1024  # logits that exist at a time: the vocabulary is the memory
Arrays = list[NDArray[Any]]


@dataclass(frozen=True)
class ModelInput:
    """What a model is shown of a row that is to take a step."""

    row: int  # its ticket: what is kept for it is kept under this number
    laid_out_prompt: LaidOutPrompt
    canvas: NDArray[np.int64]  # (length,) the ids that stand there now, as far as the model is to look
    # Those to propose for, ascending; (length,) alone: the masked one behind.
    positions: NDArray[np.int64]
    temperature: float = 0.0
    # At which tokens are drawn: (n,) with a temperature; (2, n) of a policy, the second where it is forced.
    quantiles: NDArray[np.float64] | None = None
    soft_threshold: tuple[float, float, float] | None = None  # of a policy: temperature, threshold, width
    needs_entropy: bool = False  # whether entropy and margin are wanted
    finished_length: int = 0  # positions in front that are whole blocks and change no more


def split_logit_chunks(views: Sequence[ModelInput]) -> Iterator[list[ModelInput]]:
    """The views in chunks of at most `LOGITS_CHUNK_POSITIONS` positions; only longer rows are divided."""
    most, chunk, room = LOGITS_CHUNK_POSITIONS, list[ModelInput](), LOGITS_CHUNK_POSITIONS
    for view in views:
        for start in range(0, len(view.positions), most):
            part, piece = slice(start, start + most), view
            if len(view.positions) > most:
                quantiles = None if view.quantiles is None else view.quantiles[..., part]
                piece = replace(view, positions=view.positions[part], quantiles=quantiles)
            if len(piece.positions) > room:
                yield chunk
                chunk, room = [], most
            chunk.append(piece)
            room -= len(piece.positions)
    yield chunk


def collect_sampling_metadata(
    views: Sequence[ModelInput], mask_id: int, shape: DenoiserConfig, policy: bool
) -> Arrays:
    """The fields of `SamplingMetadata` for these views; policy: whether any row of the call has one.

    An autoregressive model may have no mask: then it is beyond the vocabulary.
    """
    counts, soft = [len(view.positions) for view in views], [view.soft_threshold for view in views]
    temperature = np.repeat([view.temperature for view in views], counts)
    drawn, quantiles = np.flatnonzero(temperature), np.zeros((2, len(temperature)))
    for view, end in zip(views, np.cumsum(counts), strict=True):
        if view.quantiles is not None:
            quantiles[:, end - len(view.positions) : end] = view.quantiles
    entropy = np.flatnonzero(np.repeat([view.needs_entropy for view in views], counts))
    sampled = (values[drawn].astype(np.float32) for values in (temperature, quantiles[0]))
    never = np.array([n for n in (mask_id, *shape.excluded_token_ids) if n < shape.vocab_size], np.int64)
    arrays: Arrays = [never, drawn, *sampled, entropy]
    if policy:
        index = np.flatnonzero(np.repeat([each is not None for each in soft], counts))
        params = np.repeat([each or (1.0, 0.5, 1.0) for each in soft], counts, axis=0).T
        arrays += [index, np.concatenate((params, quantiles)).astype(np.float32)[:, index]]
    return arrays


@dataclass(frozen=True)
class SamplingMetadata:
    """What is wanted of n positions; tensors lie on the device of the logits.

    excluded_ids: (e,) tokens that are never proposed, the mask among them. sampled_index: (m,) which
    positions take a token at random, at the quantile `quantiles` (m,) of the distribution at `temperature`
    (m,), above 0; the others take the most probable one. entropy_index: (s,) of which positions entropy and
    margin are wanted. policy_index: (k,) for which positions a policy draws, None where there is none in
    the call; policy_params: (5, k) its temperature, threshold and width, and the two quantiles that it
    draws at.
    """

    excluded_ids: Tensor
    sampled_index: Tensor
    temperature: Tensor
    quantiles: Tensor
    entropy_index: Tensor
    policy_index: Tensor | None = None
    policy_params: Tensor | None = None


def sample_proposals(logits: Tensor, wanted: SamplingMetadata) -> Tensor:
    """A row (n,) for each of `STATISTICS`, then, where a policy draws, for each of `ACTION_STATISTICS`.

    logits: (n, V) float32. The mask itself is never proposed. Confidence is a token's probability at
    temperature 1, whatever it was sampled at; the log-probability is finite where that underflows. Entropy
    and margin cost a pass over the whole distribution, and are 0 where nobody wants them.
    """
    # The largest weight is 1 and confidences near 1 stay apart, which log-sum-exp would round away.
    highest = logits.amax(-1, keepdim=True)
    weights = (logits - highest).exp_()
    total = weights.sum(-1)
    entropy, margin = torch.zeros_like(total), torch.zeros_like(total)
    if len(wanted.entropy_index):
        probability = weights[wanted.entropy_index] / total[wanted.entropy_index, None]
        best = probability.topk(2, dim=-1).values
        entropy.index_copy_(0, wanted.entropy_index, torch.special.entr(probability).sum(-1))
        margin.index_copy_(0, wanted.entropy_index, best[:, 0] - best[:, 1])
    allowed = logits.index_fill(1, wanted.excluded_ids, -math.inf)
    token = allowed.argmax(-1)
    if len(wanted.sampled_index):
        above = allowed[wanted.sampled_index]
        above = above - above.amax(-1, keepdim=True)
        exact = above if above.device.type == "mps" else above.double()
        tempered = exact / wanted.temperature[:, None].to(exact.dtype)
        token = token.index_copy(0, wanted.sampled_index, sample_at_quantile(tempered, wanted.quantiles))
    log_prob = (allowed.gather(1, token[:, None]) - highest).squeeze(1) - total.log()
    confidence = weights.gather(1, token[:, None]).squeeze(1) / total
    # As in `STATISTICS`. Token ids are exact in float32 below 2 ** 24; not every device has float64.
    found = torch.stack([token.float(), confidence, log_prob, entropy, margin])
    if wanted.policy_index is None or wanted.policy_params is None:
        return found
    draws = found.new_zeros(len(ACTION_STATISTICS), len(logits))
    if len(wanted.policy_index):
        temperature, threshold, width, uniform, forced = wanted.policy_params
        draws[:, wanted.policy_index] = draw_actions(
            logits[wanted.policy_index],
            wanted.excluded_ids,
            SoftThreshold(temperature, threshold, width),
            uniform,
            forced,
        )
    return torch.cat([found, draws])
