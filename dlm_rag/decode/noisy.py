"""How a model that denoises from uniform noise answers a step: `Proposer` for DiffusionGemma."""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from dlm_rag.config import EngineConfig, ModelConfig
from dlm_rag.decode.proposer import View
from dlm_rag.diffusion.commit import Proposals
from dlm_rag.diffusion.policy import quantile
from dlm_rag.errors import ConfigError
from dlm_rag.evidence.layout import Arrangement
from dlm_rag.evidence.pool import Reuse
from dlm_rag.evidence.prefix import Prefixes, Slot
from dlm_rag.model.gemma import NoiseDenoiser, Stacked
from dlm_rag.model.shape import DenoiserConfig
from dlm_rag.model.transfer import to_device, to_host
from dlm_rag.stages import stage


class NoiseProposer:
    """One call over the open blocks of all rows; of the texts before them what has changed is run."""

    def __init__(self, denoiser: NoiseDenoiser) -> None:
        self.denoiser = denoiser
        self.forget()

    @property
    def shape(self) -> DenoiserConfig:
        return self.denoiser.config

    @property
    def reuse(self) -> Reuse:
        """What was reused since the last `forget`."""
        return self._prefixes.reuse

    def forget(self) -> None:
        """Drops all keys and values; to be called when the denoiser's weights have changed."""
        self._prefixes = Prefixes(self.denoiser)
        self._stacked: tuple[list[tuple[int, tuple[int, ...]]], Stacked] | None = None

    def prefetch(self, arrangement: Arrangement) -> None:
        """Does nothing: what a prompt lacks is known once its slot is."""

    def release(self, slot: int) -> None:
        self._prefixes.release(slot)
        self._stacked = None

    @torch.inference_mode()
    def propose(self, views: Sequence[View]) -> list[Proposals]:
        with stage("encode_evidence"):
            slots = [self._prefixes.load(view.slot, _before(view)) for view in views]
            texts = self._side_by_side([view.slot for view in views], slots)
        with stage("denoise"):
            open_blocks = np.stack([view.canvas[view.finished :] for view in views])
            lots = [view.uniform.astype(np.float32) for view in views if view.uniform is not None]
            canvas, *drawn = to_device([open_blocks, *lots], self.denoiser.device)
            before = [
                slot.logits if slot.block == view.finished else None
                for slot, view in zip(slots, views, strict=True)
            ]
            found = []
            for row, logits in enumerate(self.denoiser.logits(canvas, texts, before)):
                view, slot = views[row], slots[row]
                cooled = logits / view.temperature
                found.append(_read(logits, cooled, canvas[row], drawn[row]))
                slot.block, slot.logits = view.finished, cooled.to(self.denoiser.dtype)
            values = to_host(torch.stack(found)).astype(np.float64)
        return [_proposals(view, part) for view, part in zip(views, values, strict=True)]

    def _side_by_side(self, numbers: list[int], slots: list[Slot]) -> Stacked:
        """The texts of slots; put together again only where one has changed, or a row has come or gone."""
        key = [(number, slot.ids) for number, slot in zip(numbers, slots, strict=True)]
        if self._stacked is None or self._stacked[0] != key:
            self._stacked = None  # freed first
            block = self.shape.attention_block
            assert block is not None
            self._stacked = key, self.denoiser.stack([slot.kept for slot in slots], block)
        return self._stacked[1]


def _before(view: View) -> tuple[int, ...]:
    """What stands before the block under work: the prompt, and the blocks that are finished."""
    return (*view.arrangement.lead.ids, *view.canvas[: view.finished].tolist())


def _read(logits: Tensor, cooled: Tensor, canvas: Tensor, uniform: Tensor) -> Tensor:
    """(8, n): of each position token, its probability and log-probability, the entropy, the probability of
    what stands there, and the most probable token with its own two.

    logits, cooled: (n, V) float32, the second over the temperature, by which tokens are drawn, at the
    quantiles `uniform` (n,), and which the entropy is of. Probabilities are those of temperature 1.
    """
    drawn = quantile(cooled, uniform)
    best, log_prob = cooled.argmax(-1), logits.log_softmax(-1)
    entropy = torch.special.entr(cooled.softmax(-1)).sum(-1)
    said = [log_prob.gather(1, ids[:, None]).squeeze(1) for ids in (drawn, canvas, best)]
    one, written, most = said
    return torch.stack(
        [drawn.float(), one.exp(), one, entropy, written.exp(), best.float(), most.exp(), most]
    )


def _proposals(view: View, found: np.ndarray) -> Proposals:
    token, confidence, log_prob, entropy, written, best, likely, log_likely = found
    at, none = view.positions, np.zeros(len(view.positions))
    most = Proposals(at, best.astype(np.int64), likely, log_likely, entropy, none, written)
    return Proposals(at, token.astype(np.int64), confidence, log_prob, entropy, none, written, best=most)


def check_machinery(model: ModelConfig, engine: EngineConfig) -> str:
    """The attention kernel of such a model; raises `ConfigError` for settings that it cannot have."""
    if model.attention not in ("auto", "sdpa"):
        raise ConfigError(
            f"attention={model.attention} cannot be had for a model that denoises from uniform noise: set "
            "model.attention=sdpa"
        )
    if model.evidence_layout not in (None, "prefix"):
        raise ConfigError(
            f"evidence_layout={model.evidence_layout} cannot be had for a model that denoises from uniform "
            "noise, whose prompt sees itself alone: set model.evidence_layout=prefix"
        )
    usual = EngineConfig()
    for name in ("memory_gib", "pool_gib", "host_pool_gib", "compile"):
        if getattr(engine, name) != getattr(usual, name):
            raise ConfigError(
                f"engine.{name} has no effect on a model that denoises from uniform noise: leave it out"
            )
    return NoiseDenoiser.backend
