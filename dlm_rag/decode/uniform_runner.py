"""How a model that denoises from uniform noise answers a step: `ModelRunner` for DiffusionGemma."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import takewhile

import numpy as np
import torch
from torch import Tensor

from dlm_rag.config import EngineConfig, ModelConfig
from dlm_rag.config.ineffective_settings import check_checkpoint_effects
from dlm_rag.decode.model_runner import ModelInput
from dlm_rag.diffusion.commit_rules import Proposals
from dlm_rag.diffusion.policy import sample_at_quantile
from dlm_rag.errors import ConfigError
from dlm_rag.evidence.prompt_segments import LaidOutPrompt
from dlm_rag.evidence.segment_kv_cache import CacheStats
from dlm_rag.model.denoiser_config import DenoiserConfig
from dlm_rag.model.device_io import to_device, to_host
from dlm_rag.model.diffusion_gemma import DiffusionGemma, PromptKeysValues, StackedCaches
from dlm_rag.nvtx_ranges import profile_stage


@dataclass
class PrefixSlot:
    """What is kept for a row: its text, and the logits that the next step of the same block is shown."""

    ids: tuple[int, ...] = ()
    keys_values: PromptKeysValues = field(default_factory=list)
    logits_block_start: int = -1  # where the block begins that `logits` are of
    previous_logits: Tensor | None = None


class PrefixKVCache:
    """Prompts whose tokens see only what precedes them, in slots: one that changes runs from there on.

    `cache_stats` counts the tokens that rows see, and those that were run.
    """

    def __init__(self, denoiser: DiffusionGemma) -> None:
        self._denoiser, self.slots, self.cache_stats = denoiser, dict[int, PrefixSlot](), CacheStats()

    def prefill(self, number: int, ids: Sequence[int]) -> PrefixSlot:
        """The slot with the keys and values of `ids`, at least one; runs those that are missing."""
        slot, wanted = self.slots.setdefault(number, PrefixSlot()), tuple(ids)
        self.cache_stats.requested_tokens += len(wanted)
        if slot.ids == wanted:
            return slot
        pairs = zip(slot.ids, wanted, strict=False)
        same = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))
        kept = (
            [(keys[:, :, :same], values[:, :, :same]) for keys, values in slot.keys_values] if same else []
        )
        if rest := wanted[same:]:  # none where the text has been cut
            self.cache_stats.encoded_tokens += len(rest)
            kept = self._denoiser.extend_cache(kept, rest)
        slot.ids, slot.keys_values = wanted, kept
        return slot

    def release(self, number: int) -> None:
        """Drops what is kept under this number."""
        self.slots.pop(number, None)


class UniformModelRunner:
    """One call over the open blocks of all rows; of the texts before them, what has changed is run."""

    pool = None  # of evidence: prompts are kept row by row

    def __init__(self, denoiser: DiffusionGemma) -> None:
        self.denoiser = denoiser
        self.reset_cache()

    @property
    def shape(self) -> DenoiserConfig:
        return self.denoiser.config

    @property
    def cache_stats(self) -> CacheStats:
        """What was reused since the last `forget`."""
        return self._prefixes.cache_stats

    def reset_cache(self) -> None:
        """Drops all keys and values; to be called when the denoiser's weights have changed."""
        self._prefixes = PrefixKVCache(self.denoiser)
        self._stacked: tuple[list[tuple[int, tuple[int, ...]]], StackedCaches] | None = None

    def prefetch(self, arrangement: LaidOutPrompt) -> None:
        """Does nothing: what a prompt still needs is known once its slot is."""

    def release(self, slot: int) -> None:
        self._prefixes.release(slot)
        self._stacked = None

    @torch.inference_mode()
    def propose(self, views: Sequence[ModelInput]) -> list[Proposals]:
        with profile_stage("encode_evidence"):
            slots = [self._prefixes.prefill(view.slot, _finished_ids(view)) for view in views]
            texts = self._stack_texts([view.slot for view in views], slots)
        with profile_stage("denoise"):
            open_blocks = np.stack([view.canvas[view.finished_length :] for view in views])
            quantiles = [view.quantiles.astype(np.float32) for view in views if view.quantiles is not None]
            canvas, *drawn = to_device([open_blocks, *quantiles], self.denoiser.device)
            before = [
                slot.previous_logits if slot.logits_block_start == view.finished_length else None
                for slot, view in zip(slots, views, strict=True)
            ]
            found = []
            for row, logits in enumerate(self.denoiser.compute_canvas_logits(canvas, texts, before)):
                view, slot = views[row], slots[row]
                cooled = logits / view.temperature
                found.append(_read(logits, cooled, canvas[row], drawn[row]))
                slot.logits_block_start, slot.previous_logits = (
                    view.finished_length,
                    cooled.to(self.denoiser.dtype),
                )
            values = to_host(torch.stack(found)).astype(np.float64)
        return [_proposals(view, part) for view, part in zip(views, values, strict=True)]

    def _stack_texts(self, numbers: list[int], slots: list[PrefixSlot]) -> StackedCaches:
        """The texts of slots; put together again only where one has changed, or a row has come or gone."""
        key = [(number, slot.ids) for number, slot in zip(numbers, slots, strict=True)]
        if self._stacked is None or self._stacked[0] != key:
            self._stacked = None  # freed first
            block = self.shape.block_size
            assert block is not None
            self._stacked = key, self.denoiser.stack_caches([slot.keys_values for slot in slots], block)
        return self._stacked[1]


def _finished_ids(view: ModelInput) -> tuple[int, ...]:
    """The tokens before the open block: the prompt, and the finished blocks."""
    return (*view.laid_out_prompt.canvas_prefix.ids, *view.canvas[: view.finished_length].tolist())


def _read(logits: Tensor, cooled: Tensor, canvas: Tensor, uniform: Tensor) -> Tensor:
    """(8, n): of each position token, its probability and log-probability, the entropy, the probability of
    what stands there, and the most probable token with its own two.

    logits, cooled: (n, V) float32, the second over the temperature, by which tokens are drawn, at the
    quantiles `uniform` (n,), and which the entropy is of. Probabilities are those of temperature 1.
    """
    drawn = sample_at_quantile(cooled, uniform)
    best, log_prob = cooled.argmax(-1), logits.log_softmax(-1)
    entropy = torch.special.entr(cooled.softmax(-1)).sum(-1)
    said = [log_prob.gather(1, ids[:, None]).squeeze(1) for ids in (drawn, canvas, best)]
    one, written, most = said
    return torch.stack(
        [drawn.float(), one.exp(), one, entropy, written.exp(), best.float(), most.exp(), most]
    )


def _proposals(view: ModelInput, found: np.ndarray) -> Proposals:
    token, confidence, log_prob, entropy, written, best, likely, log_likely = found
    at, none = view.positions, np.zeros(len(view.positions))
    most = Proposals(at, best.astype(np.int64), likely, log_likely, entropy, none, written)
    return Proposals(
        at, token.astype(np.int64), confidence, log_prob, entropy, none, written, most_probable=most
    )


def check_uniform_settings(model: ModelConfig, engine: EngineConfig) -> str:
    """The attention kernel of such a model; raises `ConfigError` for settings that it does not support."""
    for name, supported in (
        ("attn_implementation", ("auto", "sdpa")),
        ("evidence_layout", (None, "prefix")),
    ):
        if (value := getattr(model, name)) not in supported:
            raise ConfigError(
                f"model.{name}={value} is not supported by a model of uniform noise: set "
                f"model.{name}={supported[1]}"
            )
    check_checkpoint_effects("engine", engine, {"noise": "uniform"})
    return DiffusionGemma.backend
