"""Decoding with DiffusionGemma: its settings, its canvas, and how it answers a step.

The canvas starts as random tokens: a step proposes for all positions of a block, accepts some and draws the
others again, also those accepted before.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from itertools import takewhile
from typing import Any, ClassVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from dlm_rag.config import DecodeConfig, EngineConfig, ModelConfig
from dlm_rag.config.fields import CheckedSettings, replace_settings
from dlm_rag.diffusion_gemma.model import DiffusionGemma, GemmaConfig, PromptKeysValues, StackedCaches
from dlm_rag.engine.cache import CacheStats
from dlm_rag.engine.policy import sample_at_quantile
from dlm_rag.engine.row import Canvas, CanvasChange, Span, TokenIds
from dlm_rag.engine.rules import Proposals, Rule, select_by_entropy_bound
from dlm_rag.engine.runner import ModelRunner, split_proposals
from dlm_rag.errors import ConfigError
from dlm_rag.evidence.prompt_segments import RowInput
from dlm_rag.model.packed_batch import to_device
from dlm_rag.nvtx_ranges import profile_stage
from dlm_rag.randomness import sample_uniform
from dlm_rag.retrieval.base import find_query_policy
from dlm_rag.retrieval.corpus import Passage
from dlm_rag.tokenizer import Tokenizer

# The rule in records of decoding. What it commits the canvas has chosen, and may take back.
REDRAW = Rule(lambda proposals, context: np.arange(len(proposals.positions)), redraws=True)
REDRAW_PATH = "dlm_rag.diffusion_gemma.decoding:REDRAW"
READ_SETTINGS = {  # of `decode`; the others have no effect
    "max_new_tokens", "steps_per_block", "query_policy", "query_threshold", "retrieval_interval", "seed",
    "batch_size", "overlap", "abstain", "early_stopping",
}  # fmt: skip


def resolve_settings(settings: DecodeConfig, shape: GemmaConfig) -> DecodeConfig:
    """`settings` with the checkpoint's own for what is unset; raises `ConfigError` for those it does not
    read."""
    block = shape.block_size
    assert block is not None
    fixed = {
        "mode": "diffusion", "block_length": block, "query_window": 0, "commit_rule": REDRAW_PATH,
        "finished_block_context": "recompute",
    }  # fmt: skip
    _refuse_idle("decode", settings, READ_SETTINGS, fixed)
    find_query_policy(settings.query_policy)
    blocks = -(-(settings.max_new_tokens or shape.canvas_length) // block)  # whole ones
    return replace_settings(
        settings,
        **fixed,
        steps_per_block=settings.steps_per_block or shape.steps_per_block,
        max_new_tokens=blocks * block,
        abstain=settings.abstain or shape.abstain,
    )


def check_settings(model: ModelConfig, engine: EngineConfig) -> str:
    """The attention kernel; raises `ConfigError` for settings that are not supported."""
    fixed = {"attn_implementation": "sdpa", "evidence_layout": "prefix"}
    _refuse_idle("model", model, ("path", "device", "dtype"), fixed)
    _refuse_idle("engine", engine, (), {})
    return DiffusionGemma.backend


def _refuse_idle(
    section: str, settings: CheckedSettings, read: Collection[str], fixed: Mapping[str, Any]
) -> None:
    """Raises `ConfigError` for a setting that is not `read`, at its default or at its `fixed` value."""
    for item in fields(settings):
        value, default = getattr(settings, item.name), item.default
        if item.name not in read and value not in (default, fixed.get(item.name, default)):
            shown = str(value).lower() if isinstance(value, bool) else value
            raise ConfigError(
                f"{section}.{item.name}={shown} has no effect on a model that denoises from uniform noise: "
                "leave it out"
            )


@dataclass
class UniformNoiseCanvas(Canvas):
    """A canvas of uniform noise, denoised block after block.

    `ids` hold what is accepted now; elsewhere the model sees `noise`. Invariant: what stands before
    `frozen_length` changes no more; in the block after it every step accepts again.
    """

    chooses_itself: ClassVar[bool] = True
    shape: GemmaConfig = field(kw_only=True)
    noise: TokenIds = field(kw_only=True)  # (length,)
    next_noise: TokenIds | None = field(init=False, default=None)
    block_steps: int = 0  # steps of the current block
    best_ids: TokenIds | None = None  # its most probable tokens at the last of them
    settled_steps: int = 0  # since when they are these

    @property
    def model_ids(self) -> TokenIds:
        return np.where(self.masked, self.noise, self.ids)

    def select_provisional(self, proposals: Proposals) -> Proposals:
        """An accepted token was drawn: the most probable one stands for it until the block is finished."""
        best = _most_probable(proposals)
        return best.subset(best.positions >= self.first_mutable)

    def draw_numbers(
        self, settings: DecodeConfig, generator: torch.Generator
    ) -> tuple[NDArray[np.float64], float]:
        """(2, n), for tokens and the next noise; the temperature falls from step to step of a block."""
        numbers = sample_uniform(generator, 2, self.length)
        self.next_noise = uniform_tokens(numbers[1], self.shape.vocab_size)
        steps, high, low = settings.steps_per_block, self.shape.temperature_high, self.shape.temperature_low
        assert steps is not None
        return numbers, anneal_temperature(self.block_steps, steps, high, low)

    def write(
        self, proposals: Proposals, chosen: Proposals | None, settings: DecodeConfig, block: Span
    ) -> CanvasChange:
        """Accepts proposals within the entropy bound; once the block has converged or its steps are taken,
        the most probable tokens.
        """
        best, shape = _most_probable(proposals), self.shape
        assert self.next_noise is not None
        same = self.best_ids is not None and np.array_equal(self.best_ids, best.token_ids)
        self.best_ids, self.settled_steps = best.token_ids, self.settled_steps + 1 if same else 0
        sure = float(proposals.entropy.mean()) < shape.stop_entropy
        over = sure and self.settled_steps >= shape.convergence_steps
        over = over or self.block_steps + 1 == settings.steps_per_block
        within = proposals.subset(select_by_entropy_bound(proposals.entropy, shape.entropy_bound))
        change = self.accept(best if over else within)
        self.block_steps, self.noise = self.block_steps + 1, self.next_noise
        if over:
            self.frozen_length, self.block_steps, self.best_ids = block[1], 0, None
        return change

    def accept(self, chosen: Proposals) -> CanvasChange:
        """Makes `chosen` all that is accepted of the current block."""
        at, before = chosen.positions, self.masked.copy()
        new, other = before[at], ~before[at] & (self.ids[at] != chosen.token_ids)
        self.masked[self.first_mutable :] = True
        self.masked[at] = False
        taken_back = np.flatnonzero(self.masked & ~before)
        self.ids[at], self.ids[taken_back] = chosen.token_ids, self.mask_id
        return CanvasChange(chosen.subset(new), chosen.subset(other), tuple(taken_back.tolist()))


def make_canvas(
    settings: DecodeConfig, shape: GemmaConfig, tokenizer: Tokenizer, generator: torch.Generator
) -> UniformNoiseCanvas:
    """A canvas of noise that is drawn from the generator."""
    length = settings.max_new_tokens
    assert length is not None
    noise = uniform_tokens(sample_uniform(generator, 1, length)[0], shape.vocab_size)
    return UniformNoiseCanvas(length, tokenizer.mask_id, 0, shape=shape, noise=noise)


def anneal_temperature(taken: int, steps: int, high: float, low: float) -> float:
    """Of the step after `taken` of at most `steps` steps: `high` at first, then linear towards `low`.

    In float32, as transformers does it: a model that reads its own logits amplifies the last bit.
    """
    share = np.float32(steps - taken) / np.float32(steps)
    return float(np.float32(low) + np.float32(high - low) * share)


def uniform_tokens(numbers: NDArray[np.float64], vocabulary: int) -> TokenIds:
    """Token ids (n,), all equally likely, from numbers (n,) in [0, 1)."""
    return np.minimum((numbers * vocabulary).astype(np.int64), vocabulary - 1)


@dataclass
class PrefixSlot:
    """What is kept for a row: its text, and the logits that the next step of the same block is shown."""

    ids: tuple[int, ...] = ()
    keys_values: PromptKeysValues = field(default_factory=list)
    logits_block_start: int = -1  # where the block begins that `logits` are of
    previous_logits: Tensor | None = None


class GemmaRunner(ModelRunner):
    """One call over the open blocks of all rows; of the texts before them, what has changed is run.

    Tokens of a text see only what precedes them. `cache_stats` counts those that rows see, and those run.
    """

    denoiser: DiffusionGemma

    def __init__(self, denoiser: DiffusionGemma) -> None:
        self.denoiser = denoiser
        self.reset_cache()

    @property
    def cache_stats(self) -> CacheStats:
        return self._stats

    def reset_cache(self) -> None:
        self._slots, self._stats = dict[int, PrefixSlot](), CacheStats()
        self._stacked: tuple[list[tuple[int, tuple[int, ...]]], StackedCaches] | None = None

    def release(self, row: int) -> None:
        self._slots.pop(row, None)
        self._stacked = None

    def order_passages(self, before: Sequence[Passage], found: list[Passage]) -> list[Passage]:
        """Those of `before` in their order there, then new ones: a prompt stays up to what has left."""
        now, held = {passage.id for passage in found}, {passage.id for passage in before}
        stay = [passage for passage in before if passage.id in now]
        return [*stay, *(passage for passage in found if passage.id not in held)]

    def prefill(self, row: int, ids: tuple[int, ...]) -> PrefixSlot:
        """The slot of a row with the keys and values of `ids`; runs those that are missing."""
        slot = self._slots.setdefault(row, PrefixSlot())
        self._stats.requested_tokens += len(ids)
        if slot.ids == ids:
            return slot
        pairs = zip(slot.ids, ids, strict=False)
        same = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))
        kept = [(keys[:, :, :same], values[:, :, :same]) for keys, values in slot.keys_values if same]
        if rest := ids[same:]:  # none where the text has been cut
            self._stats.encoded_tokens += len(rest)
            kept = self.denoiser.extend_cache(kept, rest)
        slot.ids, slot.keys_values = ids, kept
        return slot

    @torch.inference_mode()
    def propose(self, views: Sequence[RowInput]) -> list[Proposals]:
        with profile_stage("encode_evidence"):
            slots = []
            for view in views:
                finished = view.canvas[: view.finished_length].tolist()
                slots.append(self.prefill(view.row, (*view.laid_out_prompt.canvas_prefix.ids, *finished)))
            stacked = self._stack_texts([view.row for view in views], slots)
        with profile_stage("denoise"):
            open_blocks = np.stack([view.canvas[view.finished_length :] for view in views])
            quantiles = [view.quantiles.astype(np.float32) for view in views if view.quantiles is not None]
            canvas, *drawn = to_device([open_blocks, *quantiles], self.denoiser.device)
            before = [
                slot.previous_logits if slot.logits_block_start == view.finished_length else None
                for slot, view in zip(slots, views, strict=True)
            ]
            found = []
            for row, logits in enumerate(self.denoiser.compute_canvas_logits(canvas, stacked, before)):
                view, slot = views[row], slots[row]
                cooled = logits / view.temperature
                found.append(_read_logits(logits, cooled, drawn[row]))
                slot.logits_block_start = view.finished_length
                slot.previous_logits = cooled.to(self.denoiser.dtype)
            return split_proposals(views, found)

    def _stack_texts(self, numbers: list[int], slots: list[PrefixSlot]) -> StackedCaches:
        """The texts of slots; put together again only where one has changed, or a row has come or gone."""
        key = [(number, slot.ids) for number, slot in zip(numbers, slots, strict=True)]
        if self._stacked is None or self._stacked[0] != key:
            self._stacked = None  # freed first
            block = self.shape.block_size
            assert block is not None
            self._stacked = key, self.denoiser.stack_caches([slot.keys_values for slot in slots], block)
        return self._stacked[1]


make_runner = GemmaRunner


def _read_logits(logits: Tensor, cooled: Tensor, uniform: Tensor) -> dict[str, Tensor]:
    """Of each position the fields of `Proposals`, with the most probable token and its own two besides.

    logits, cooled: (n, V) float32, the second over the temperature, by which tokens are drawn, at the
    quantiles `uniform` (n,), and which the entropy is of. Probabilities are those of temperature 1.
    """
    drawn, best = sample_at_quantile(cooled, uniform), cooled.argmax(-1)
    entropy = torch.special.entr(cooled.softmax(-1)).sum(-1)
    log_prob = logits.log_softmax(-1)
    one, most = (log_prob.gather(1, ids[:, None]).squeeze(1) for ids in (drawn, best))
    return {
        "token_ids": drawn, "confidence": one.exp(), "log_prob": one, "entropy": entropy,
        "margin": torch.zeros_like(one), "best_token_ids": best, "best_confidence": most.exp(),
        "best_log_prob": most,
    }  # fmt: skip


def _most_probable(proposals: Proposals) -> Proposals:
    """The most probable tokens in the places of those drawn."""
    found = proposals.extra
    return replace(
        proposals,
        token_ids=found["best_token_ids"],
        confidence=found["best_confidence"],
        log_prob=found["best_log_prob"],
    )
