"""DiffusionGemma through the class of `transformers`: text only, its code, weights from safetensors.

A causal encoder writes keys and values of the prompt, once; the decoder, of the same weights, sees them and
a canvas, which sees itself whole. In layers with a sliding window the canvas sees the last `window` - 1
tokens before it; their keys are kept all the same, so that a prompt can be cut back to any length.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import pad

from dlm_rag.errors import CheckpointError, suggest_nearest, translate_failures
from dlm_rag.files.hub import read_checkpoint_json
from dlm_rag.model.checkpoint import Checkpoint
from dlm_rag.model.denoiser import HostedDenoiser
from dlm_rag.model.denoiser_config import DenoiserConfig
from dlm_rag.model.families import require_key
from dlm_rag.model.packed_batch import to_device
from dlm_rag.model.stored_tensors import Family, NamedShapes

PromptKeysValues = list[tuple[Tensor, Tensor]]  # of each layer, each (1, heads, tokens, head_dim)
LAYER_KINDS = ("sliding_attention", "full_attention")
VISION_PREFIXES = ("model.encoder.vision_tower.", "model.encoder.embed_vision.")  # no use for text


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
        return import_module("dlm_rag.diffusion_gemma.decoding")


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
    """`config` with how the checkpoint is decoded: schedule, bound, stopping rule, and length of answers.

    What `generation_config.json` leaves out is the default of `transformers`. Raises `CheckpointError`
    without that file.
    """
    from transformers.models.diffusion_gemma import generation_diffusion_gemma as generation

    path, block = folder / "generation_config.json", config.block_size or 1
    if not path.exists():
        raise CheckpointError(
            f"{folder} has no generation_config.json, which has the settings of its decoding: fetch it too"
        )
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


def build_gemma_config(raw: dict[str, Any], place: Path) -> Any:
    """The config as the class of `transformers` takes it; raises `CheckpointError` naming `place`."""
    from transformers import DiffusionGemmaConfig

    with translate_failures(CheckpointError, str(place)):
        return DiffusionGemmaConfig.from_dict(raw)


def list_text_tensor_shapes(raw: dict[str, Any], place: Path) -> NamedShapes:
    """Every tensor that text needs, by its name in the class: its shape, and the names of those tied to it.

    Raises `CheckpointError`.
    """
    from transformers import DiffusionGemmaForBlockDiffusion

    config = build_gemma_config(raw, place)
    with translate_failures(CheckpointError, f"{place}: the model cannot be built"), torch.device("meta"):
        model = DiffusionGemmaForBlockDiffusion(config)
    tied = model.all_tied_weights_keys
    return {
        name: (tuple(value.shape), tuple(other for other, source in tied.items() if source == name))
        for name, value in model.state_dict().items()
        if name not in tied and not name.startswith(VISION_PREFIXES)
    }


@dataclass(frozen=True)
class StackedCaches:
    """What canvases see before them: keys and values, who sees which, and where each canvas stands."""

    cache: Any
    masks: dict[str, Tensor | None]
    positions: Tensor  # (rows, canvas)


class DiffusionGemma(HostedDenoiser):
    """`DiffusionGemmaForBlockDiffusion`, as `GemmaRunner` calls it."""

    config: GemmaConfig

    def __init__(self, checkpoint: Checkpoint, device: torch.device, dtype: torch.dtype) -> None:
        """Loads the weights of a checkpoint; raises `CheckpointError`.

        With `accelerate` the files are read straight to a GPU, else through the host's memory.
        """
        from transformers import DiffusionGemmaForBlockDiffusion
        from transformers.utils.logging import disable_progress_bar

        assert isinstance(checkpoint.config, GemmaConfig)
        disable_progress_bar()  # of theirs
        kind: Any = DiffusionGemmaForBlockDiffusion
        folder, self.config, self.device, self.dtype = checkpoint.folder, checkpoint.config, device, dtype
        straight = device.type != "cpu" and find_spec("accelerate") is not None
        with translate_failures(CheckpointError, f"{folder} cannot be loaded"):
            model = kind.from_pretrained(
                folder, config=build_gemma_config(checkpoint.raw_config, folder / "config.json"),
                dtype=dtype, use_safetensors=True, local_files_only=True, trust_remote_code=False,
                attn_implementation="sdpa", device_map={"": device} if straight else None,
            )  # fmt: skip
        self.model = model.to(device).eval()
        text = self.model.config.text_config
        self._window, self._kinds = text.sliding_window, text.layer_types

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

    def stack_caches(self, texts: Sequence[PromptKeysValues], canvas: int) -> StackedCaches:
        """A batch of texts, as canvases of `canvas` tokens after them see them."""
        from transformers import DynamicCache

        cache, masks = DynamicCache(), dict[str, Tensor | None]()
        lengths = [text[0][0].shape[2] for text in texts]
        for layer, kind in enumerate(self._kinds):
            seen = [min(n, self._window - 1) if kind == "sliding_attention" else n for n in lengths]
            longest, pairs = max(seen), [text[layer] for text in texts]
            keys, values = (
                torch.cat(
                    [_pad_last_tokens(pair[part], n, longest) for pair, n in zip(pairs, seen, strict=True)]
                )
                for part in (0, 1)
            )
            cache.update(keys, values, layer)
            if kind not in masks:  # (rows, 1, canvas, longest + canvas): which keys are seen; None: all
                masks[kind] = None
                if min(seen) < longest:
                    there = np.arange(longest + canvas)
                    hidden = (there >= np.array(seen)[:, None]) & (there < longest)
                    (visible,) = to_device([~hidden], self.device)
                    masks[kind] = visible[:, None, None, :].expand(-1, -1, canvas, -1)
        (positions,) = to_device([np.array(lengths)[:, None] + np.arange(canvas)], self.device)
        return StackedCaches(cache, masks, positions)

    def compute_canvas_logits(
        self, canvas: Tensor, texts: StackedCaches, before: Sequence[Tensor | None]
    ) -> Tensor:
        """Logits (rows, canvas, V) float32 for canvases (rows, canvas) after their texts.

        before: the logits of the step before, each over its temperature; None at the first of a canvas.
        """
        given = [logits for logits in before if logits is not None]
        conditioning = mask = None
        if given:
            none = torch.zeros_like(given[0])
            conditioning = torch.stack([none if logits is None else logits for logits in before])
            (mask,) = to_device([np.array([logits is not None for logits in before])], self.device)
        found: Tensor = self.model(
            decoder_input_ids=canvas, past_key_values=texts.cache, self_conditioning_logits=conditioning,
            self_conditioning_mask=mask, decoder_attention_mask=texts.masks,
            decoder_position_ids=texts.positions,
        ).logits  # fmt: skip
        return found


def _pad_last_tokens(kept: Tensor, count: int, length: int) -> Tensor:
    """The last `count` tokens of (1, heads, tokens, head_dim), padded with zeros to `length`."""
    return pad(kept[:, :, kept.shape[2] - count :], (0, 0, 0, length - count))


FAMILY = Family(
    read_gemma_config,
    {},
    separate_experts=False,
    load=DiffusionGemma,
    complete_config=add_generation_config,
    list_named_shapes=list_text_tensor_shapes,
)
