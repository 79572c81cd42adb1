"""DiffusionGemma through the class of `transformers`: text only, its code, weights from safetensors.

A causal encoder writes keys and values of the prompt, once; the decoder, of the same weights, sees them and
a canvas, which sees itself whole. In layers with a sliding window the canvas sees the last `window` - 1
tokens before it; their keys are kept all the same, so that a prompt can be cut back to any length.

The canvas starts as random tokens: a step proposes for all positions of a block, accepts some and draws the
others again, also those accepted before.
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from importlib import import_module
from importlib.util import find_spec
from itertools import takewhile
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.functional import pad

from dlm_rag.config import DecodeConfig, EngineConfig, ModelConfig
from dlm_rag.config.fields import CheckedSettings, replace_settings
from dlm_rag.engine.cache import CacheStats
from dlm_rag.engine.policy import sample_at_quantile
from dlm_rag.engine.row import Canvas, CanvasChange, Span, TokenIds
from dlm_rag.engine.rules import Proposals, Rule, select_by_entropy_bound
from dlm_rag.engine.runner import ModelRunner, gather_proposals
from dlm_rag.errors import CheckpointError, ConfigError, suggest_nearest, translate_failures
from dlm_rag.files.hub import read_checkpoint_json
from dlm_rag.model.checkpoint import Checkpoint
from dlm_rag.model.denoiser import HostedDenoiser
from dlm_rag.model.denoiser_config import DenoiserConfig
from dlm_rag.model.families import require_key
from dlm_rag.model.packed_batch import RowInput, to_device
from dlm_rag.model.stored_tensors import Family, NamedShapes
from dlm_rag.nvtx_ranges import profile_stage
from dlm_rag.randomness import sample_uniform
from dlm_rag.retrieval.base import find_query_policy
from dlm_rag.retrieval.corpus import Passage
from dlm_rag.tokenizer import Tokenizer

PromptKeysValues = list[tuple[Tensor, Tensor]]  # of each layer, each (1, heads, tokens, head_dim)
LAYER_KINDS = ("sliding_attention", "full_attention")
VISION_PREFIXES = ("model.encoder.vision_tower.", "model.encoder.embed_vision.")  # no use for text

# The rule in records of decoding. What it commits the canvas has chosen, and may take back.
REDRAW = Rule(lambda proposals, context: np.arange(len(proposals.positions)), redraws=True)
REDRAW_PATH = f"{__name__}:REDRAW"
READ_SETTINGS = {  # of `decode`; the others have no effect
    "max_new_tokens", "steps_per_block", "query_policy", "query_threshold", "retrieval_interval", "seed",
    "batch_size", "overlap", "abstain", "answer_threshold", "early_stopping",
}  # fmt: skip


@dataclass(frozen=True)
class GemmaConfig(DenoiserConfig):
    """The shape, and how a canvas is denoised, as `generation_config.json` says it."""

    steps_per_block: int = 48  # the most
    entropy_bound: float = 0.1  # nats that a step may accept together
    temperature_high: float = 0.8  # of the first step of a block, from which it falls linearly
    temperature_low: float = 0.4  # that the last step approaches
    convergence_steps: int = 1  # steps without a change after which a block is finished, if it is sure:
    stop_entropy: float = 0.005  # mean nats below which it is

    @property
    def adapter(self) -> Any:
        return import_module(__name__)


def read_gemma_config(raw: dict[str, Any]) -> GemmaConfig:
    """The shape; how it is denoised is in the generation config (`add_generation_config`)."""
    text, block = require_key(raw, "text_config"), require_key(raw, "canvas_length")
    if not isinstance(text, dict):
        raise CheckpointError(f"text_config={text!r:.60} must be an object")
    for kind in text.get("layer_types") or ():
        if kind not in LAYER_KINDS:
            hint = suggest_nearest(str(kind), LAYER_KINDS)
            raise CheckpointError(f"layer_types has {kind!r:.60}, known are {', '.join(LAYER_KINDS)}{hint}")
    if text.get("use_bidirectional_attention") == "all":
        raise CheckpointError(
            "use_bidirectional_attention='all' is not supported: only null and 'vision' are, with which a "
            "prompt can be kept"
        )
    if not require_key(text, "sliding_window") > 1:
        raise CheckpointError(f"sliding_window={text['sliding_window']!r:.60} must be at least 2")
    same = (
        "vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads",
        "head_dim", "intermediate_size", "max_position_embeddings",
    )  # fmt: skip
    return GemmaConfig(
        **{name: require_key(text, name) for name in same}, tie_word_embeddings=True,
        mask_token_id=require_key(text, "pad_token_id"),  # in records, where nothing is accepted
        evidence_layout="prefix", canvas_length=block, block_length=block, block_size=block,
    )  # fmt: skip


def add_generation_config(folder: Path, config: DenoiserConfig) -> DenoiserConfig:
    """`config` with how the checkpoint is decoded, as its file says, else as `transformers` does it."""
    from transformers.models.diffusion_gemma import generation_diffusion_gemma as generation

    path, block = folder / "generation_config.json", config.block_size or 1
    raw = read_checkpoint_json(path)
    with translate_failures(CheckpointError, str(path)):
        found: Any = generation.DiffusionGemmaGenerationConfig.from_dict(raw)
        found.update(**found._get_default_generation_params(), defaults_only=True)
        found.validate()
        bound = found.sampler_config.entropy_bound
        own = {
            "steps_per_block": found.max_denoising_steps, "entropy_bound": bound,
            "temperature_high": found.t_max, "temperature_low": found.t_min,
            "convergence_steps": found.stability_threshold, "stop_entropy": found.confidence_threshold,
        }  # fmt: skip
    return replace(config, **own, canvas_length=-(-found.max_new_tokens // block) * block)


def make_class_config(raw: dict[str, Any]) -> Any:
    """The config of the class; its tower for images is the least one where a checkpoint has none."""
    from transformers import DiffusionGemmaConfig

    small = dict.fromkeys(("hidden_size", "num_attention_heads", "position_embedding_size"), 8)
    least = {"model_type": "gemma4_vision", "num_hidden_layers": 0, **small}
    return DiffusionGemmaConfig.from_dict({**raw, "vision_config": raw.get("vision_config") or least})


def list_named_shapes(raw: dict[str, Any], place: Path) -> NamedShapes:
    """Every tensor that text needs, by its name in the class: its shape, and names of those tied to it."""
    from transformers import DiffusionGemmaForBlockDiffusion

    with translate_failures(CheckpointError, f"{place}: the model cannot be built"), torch.device("meta"):
        model = DiffusionGemmaForBlockDiffusion(make_class_config(raw))
    tied = model.all_tied_weights_keys
    return {
        name: (tuple(value.shape), tuple(other for other, source in tied.items() if source == name))
        for name, value in model.state_dict().items()
        if name not in tied and not name.startswith(VISION_PREFIXES)
    }


class DiffusionGemma(HostedDenoiser):
    """`DiffusionGemmaForBlockDiffusion`, as `GemmaRunner` calls it."""

    config: GemmaConfig

    def __init__(self, checkpoint: Checkpoint, device: torch.device, dtype: torch.dtype) -> None:
        """Reads the weights: with `accelerate` straight to a GPU, else through the host's memory."""
        from transformers import DiffusionGemmaForBlockDiffusion
        from transformers.utils.logging import disable_progress_bar

        assert isinstance(checkpoint.config, GemmaConfig)
        disable_progress_bar()  # of theirs
        kind: Any = DiffusionGemmaForBlockDiffusion
        folder, self.config, self.device, self.dtype = checkpoint.folder, checkpoint.config, device, dtype
        straight = device.type != "cpu" and find_spec("accelerate") is not None
        with translate_failures(CheckpointError, f"{folder} cannot be loaded"):
            model = kind.from_pretrained(
                folder, config=make_class_config(read_checkpoint_json(folder / "config.json")), dtype=dtype,
                use_safetensors=True, local_files_only=True, trust_remote_code=False,
                attn_implementation="sdpa", device_map={"": device} if straight else None,
            )  # fmt: skip
        self.model = model.to(device).eval()
        text = self.model.config.text_config
        self._window, self._kinds = text.sliding_window, text.layer_types

    def make_runner(self) -> "GemmaRunner":
        return GemmaRunner(self)

    def extend_cache(self, kept: PromptKeysValues, ids: Sequence[int]) -> PromptKeysValues:
        """The keys and values of a text whose beginning is `kept`, and whose rest `ids` are run."""
        from transformers import DynamicCache

        cache: Any = DynamicCache()  # without a config every layer keeps all
        for layer, pair in enumerate(kept):
            cache.update(*pair, layer)
        begin = kept[0][0].shape[2] if kept else 0
        at = torch.arange(begin, begin + len(ids), device=self.device)[None]
        (tokens,) = to_device([np.array([ids])], self.device)
        self.model.model.encoder.language_model(
            input_ids=tokens, position_ids=at, past_key_values=cache, use_cache=True
        )
        return [(layer.keys, layer.values) for layer in cache.layers]

    def stack_caches(self, texts: Sequence[PromptKeysValues], canvas: int) -> dict[str, Any]:
        """What canvases of `canvas` tokens see of the texts before them, as keywords of the model."""
        from transformers import DynamicCache

        cache, masks = DynamicCache(), dict[str, Tensor | None]()
        lengths = [text[0][0].shape[2] for text in texts]
        for layer, kind in enumerate(self._kinds):
            seen = [min(n, self._window - 1) if kind == "sliding_attention" else n for n in lengths]
            longest = max(seen)
            kept = (
                [pad(x, (0, 0, n - x.shape[2], longest - n)) for x in text[layer]]
                for text, n in zip(texts, seen, strict=True)
            )
            keys, values = map(torch.cat, zip(*kept, strict=True))
            cache.update(keys, values, layer)
            if kind not in masks:  # (rows, 1, canvas, longest + canvas): which keys are seen; None: all
                masks[kind] = None
                if min(seen) < longest:
                    there = np.arange(longest + canvas)
                    hidden = (there >= np.array(seen)[:, None]) & (there < longest)
                    (visible,) = to_device([~hidden], self.device)
                    masks[kind] = visible[:, None, None, :].expand(-1, -1, canvas, -1)
        (at,) = to_device([np.array(lengths)[:, None] + np.arange(canvas)], self.device)
        return {"past_key_values": cache, "decoder_attention_mask": masks, "decoder_position_ids": at}

    def compute_canvas_logits(
        self, canvas: Tensor, texts: Mapping[str, Any], before: Sequence[Tensor | None]
    ) -> Tensor:
        """Logits (rows, canvas, V) float32 for canvases (rows, canvas) after their texts.

        texts: as of `stack_caches`. before: logits of the last step over its temperature, or None.
        """
        given = [logits for logits in before if logits is not None]
        conditioning = mask = None
        if given:
            none = torch.zeros_like(given[0])
            conditioning = torch.stack([none if logits is None else logits for logits in before])
            (mask,) = to_device([np.array([logits is not None for logits in before])], self.device)
        return self.model(
            decoder_input_ids=canvas, self_conditioning_logits=conditioning, self_conditioning_mask=mask,
            **texts,
        ).logits  # fmt: skip


def resolve_settings(settings: DecodeConfig, shape: GemmaConfig) -> DecodeConfig:
    """`settings` with the checkpoint's own for what is unset; raises `ConfigError` for any it ignores."""
    block = shape.block_size
    assert block is not None
    fixed = {
        "mode": "diffusion", "block_length": block, "query_window": 0, "commit_rule": REDRAW_PATH,
        "finished_block_context": "recompute",
    }  # fmt: skip
    _refuse_idle("decode", settings, READ_SETTINGS, fixed)
    find_query_policy(settings.query_policy)
    blocks = -(-(settings.max_new_tokens or shape.canvas_length) // block)  # whole ones
    steps, abstain = settings.steps_per_block or shape.steps_per_block, settings.abstain or shape.abstain
    return replace_settings(
        settings, **fixed, steps_per_block=steps, max_new_tokens=blocks * block, abstain=abstain
    )


def check_settings(model: ModelConfig, engine: EngineConfig) -> None:
    """Raises `ConfigError` for settings that are not supported."""
    fixed = {"attn_implementation": "sdpa", "evidence_layout": "prefix"}
    _refuse_idle("model", model, ("path", "device", "dtype"), fixed)
    _refuse_idle("engine", engine, (), {})


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
        """Accepts proposals within the entropy bound; at the end of a block, the most probable tokens."""
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
    assert settings.max_new_tokens is not None
    numbers = sample_uniform(generator, 1, settings.max_new_tokens)[0]
    noise = uniform_tokens(numbers, shape.vocab_size)
    return UniformNoiseCanvas(len(noise), tokenizer.mask_id, 0, shape=shape, noise=noise)


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

    def reset_cache(self) -> None:
        self._slots, self.cache_stats = dict[int, PrefixSlot](), CacheStats()
        self._stacked: tuple[list[tuple[int, tuple[int, ...]]], dict[str, Any]] | None = None

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
        self.cache_stats.requested_tokens += len(ids)
        if slot.ids == ids:
            return slot
        pairs = zip(slot.ids, ids, strict=False)
        same = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))
        kept = [(keys[:, :, :same], values[:, :, :same]) for keys, values in slot.keys_values if same]
        if rest := ids[same:]:  # none where the text has been cut
            self.cache_stats.encoded_tokens += len(rest)
            kept = self.denoiser.extend_cache(kept, rest)
        slot.ids, slot.keys_values = ids, kept
        return slot

    @torch.inference_mode()
    def propose(self, views: Sequence[RowInput]) -> Callable[[], list[Proposals]]:
        with profile_stage("encode_evidence"):
            slots = []
            for view in views:
                finished = view.canvas[: view.finished_length].tolist()
                slots.append(self.prefill(view.row, (*view.laid_out_prompt.canvas_prefix.ids, *finished)))
            open_blocks = np.stack([view.canvas[view.finished_length :] for view in views])
            stacked = self._stack_texts([view.row for view in views], slots, open_blocks.shape[1])
        with profile_stage("denoise"):
            quantiles = [view.quantiles.astype(np.float32) for view in views if view.quantiles is not None]
            canvas, *drawn = to_device([open_blocks, *quantiles], self.denoiser.device)
            before = [
                slot.previous_logits if slot.logits_block_start == view.finished_length else None
                for slot, view in zip(slots, views, strict=True)
            ]
            found, seen = [], []
            for row, logits in enumerate(self.denoiser.compute_canvas_logits(canvas, stacked, before)):
                cooled = logits / views[row].temperature
                found.append(_read_logits(logits, cooled, drawn[row]))
                seen.append(cooled.to(self.denoiser.dtype))
            wait = gather_proposals(views, found)
            for view, slot, logits in zip(views, slots, seen, strict=True):  # of a step that did not fail
                slot.logits_block_start, slot.previous_logits = view.finished_length, logits
            return wait

    def _stack_texts(self, numbers: list[int], slots: list[PrefixSlot], canvas: int) -> dict[str, Any]:
        """The texts of slots; put together again only where one has changed, or a row has come or gone."""
        key = [(number, slot.ids) for number, slot in zip(numbers, slots, strict=True)]
        if self._stacked is None or self._stacked[0] != key:
            self._stacked = None  # freed first
            self._stacked = key, self.denoiser.stack_caches([slot.keys_values for slot in slots], canvas)
        return self._stacked[1]


def _read_logits(logits: Tensor, cooled: Tensor, uniform: Tensor) -> dict[str, Tensor]:
    """The fields of `Proposals` (n,). Tokens are drawn from the `cooled` logits (n, V), at the quantiles
    `uniform` (n,); probabilities are those of the logits themselves, at temperature 1."""
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
    names = ("token_ids", "confidence", "log_prob")
    return proposals.replace(**{name: proposals.records[f"best_{name}"] for name in names})


FAMILY = Family(read_gemma_config, {}, separate_experts=False)
