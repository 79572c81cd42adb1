"""DiffusionGemma through the class of `transformers`: text only, its code, weights from safetensors.

A causal encoder writes keys and values of the prompt, once; the decoder, of the same weights, sees them and
a canvas, which sees itself whole. In layers with a sliding window the canvas sees the last `window` - 1
tokens before it; their keys are kept all the same, so that a prompt can be cut back to any length.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import pad

from dlm_rag.diffusion_gemma.config import VISION_PREFIXES, GemmaConfig, build_gemma_config
from dlm_rag.errors import CheckpointError, translate_failures
from dlm_rag.model.checkpoint import Checkpoint
from dlm_rag.model.denoiser import HostedDenoiser
from dlm_rag.model.device_io import to_device

PromptKeysValues = list[tuple[Tensor, Tensor]]  # of each layer, each (1, heads, tokens, head_dim)


def load_diffusion_gemma(checkpoint: Checkpoint, device: torch.device, dtype: torch.dtype) -> Any:
    """`DiffusionGemmaForBlockDiffusion` with the weights of a checkpoint; raises `CheckpointError`.

    With `accelerate` the files are read straight to a GPU, else through the host's memory.
    """
    from transformers import DiffusionGemmaForBlockDiffusion
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()  # of theirs
    kind: Any = DiffusionGemmaForBlockDiffusion
    folder = checkpoint.folder
    straight = device.type != "cpu" and find_spec("accelerate") is not None
    with translate_failures(CheckpointError, f"{folder} cannot be loaded"):
        model, report = kind.from_pretrained(
            folder, config=build_gemma_config(checkpoint.raw_config, folder / "config.json"), dtype=dtype,
            use_safetensors=True, local_files_only=True, trust_remote_code=False,
            attn_implementation="sdpa", output_loading_info=True,
            device_map={"": device} if straight else None,
        )  # fmt: skip
    missing = sorted(name for name in report["missing_keys"] if not name.startswith(VISION_PREFIXES))
    if missing:
        raise CheckpointError(f"{folder}: the tensor {missing[0]} is missing")
    return model.to(device).eval()


class DiffusionGemma(HostedDenoiser):
    """The class of `transformers`, as `GemmaRunner` calls it."""

    config: GemmaConfig

    def __init__(self, model: Any, config: GemmaConfig) -> None:
        """model: as `load_diffusion_gemma` gives it."""
        self.model, self.config = model, config
        text = model.config.text_config
        self._window, self._kinds = text.sliding_window, text.layer_types

    @classmethod
    def from_pretrained(
        cls, checkpoint: Checkpoint, device: torch.device, dtype: torch.dtype
    ) -> "DiffusionGemma":
        """The model of a checkpoint; raises `CheckpointError`."""
        assert isinstance(checkpoint.config, GemmaConfig)
        return cls(load_diffusion_gemma(checkpoint, device, dtype), checkpoint.config)

    def make_runner(self) -> Any:
        return import_module("dlm_rag.diffusion_gemma.decoding").GemmaRunner(self)

    @property
    def device(self) -> torch.device:
        return next(self.model.parameters()).device

    @property
    def dtype(self) -> torch.dtype:
        return next(self.model.parameters()).dtype

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

    def stack_caches(self, texts: Sequence[PromptKeysValues], canvas: int) -> "StackedCaches":
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
        self, canvas: Tensor, texts: "StackedCaches", before: Sequence[Tensor | None]
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


@dataclass(frozen=True)
class StackedCaches:
    """What canvases see before them: keys and values, who sees which, and where each canvas stands."""

    cache: Any
    masks: dict[str, Tensor | None]
    positions: Tensor  # (rows, canvas)


def _pad_last_tokens(kept: Tensor, count: int, length: int) -> Tensor:
    """The last `count` tokens of (1, heads, tokens, head_dim), padded with zeros to `length`."""
    return pad(kept[:, :, kept.shape[2] - count :], (0, 0, 0, length - count))
