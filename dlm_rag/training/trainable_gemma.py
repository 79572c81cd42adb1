"""DiffusionGemma under training: the class of `transformers`, as the trainer knows a denoiser.

The prompt runs through the causal encoder, whose keys and values the decoder sees beside a canvas; both
have the same weights, and gradients flow through the keys and values.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from dlm_rag.config import Config, TrainConfig
from dlm_rag.decode.engine import with_checkpoint_defaults
from dlm_rag.errors import ConfigError
from dlm_rag.model.checkpoint import Checkpoint
from dlm_rag.model.device_io import to_device
from dlm_rag.model.diffusion_gemma import DiffusionGemmaDenoiser, load_diffusion_gemma
from dlm_rag.model.families.diffusion_gemma import (
    VISION_PREFIXES,
    build_gemma_config,
    list_text_tensor_shapes,
)
from dlm_rag.model.flops import FlopCount

# Settings of a phase that this class, or this kind of noise, has nothing for.
MASK_ONLY_SETTINGS = (
    "context_parallel", "compile", "rope_theta", "logit_chunk", "pointer_loss_weight",
    "final_pointer_loss_weight"
)  # fmt: skip


class TrainableGemma(nn.Module):
    """`DiffusionGemmaForBlockDiffusion` beside what the trainer asks of a denoiser.

    It has no weights before `load`; what only images meet is frozen.
    """

    backend, compilations, heads = "transformers", None, None

    def __init__(self, checkpoint: Checkpoint) -> None:
        """Raises `CheckpointError`."""
        from transformers import DiffusionGemmaForBlockDiffusion

        super().__init__()
        self._checkpoint, self.config = checkpoint, checkpoint.config
        self.attention, self.flop_count = "auto", FlopCount()
        self.from_others = False  # whether its logits go by the other positions alone, as the NELBO has it
        raw = build_gemma_config(checkpoint.raw_config, checkpoint.folder / "config.json")
        with torch.device("meta"):
            self.model: Any = _freeze_vision(DiffusionGemmaForBlockDiffusion(raw))

    def load(self, device: torch.device) -> None:
        """Takes the checkpoint's weights, in float32; raises `CheckpointError`."""
        self.model = _freeze_vision(load_diffusion_gemma(self._checkpoint, device, torch.float32)).train()

    @property
    def device(self) -> torch.device:
        found: torch.device = self.model.device
        return found

    def as_noise_denoiser(self) -> DiffusionGemmaDenoiser:
        """The same weights as a decoder takes them."""
        return DiffusionGemmaDenoiser(self.model, self.config)

    @property
    def checkpointing(self) -> str:
        """`none`, or `full`: activations of the decoder's layers are computed again."""
        return "full" if self.model.is_gradient_checkpointing else "none"

    @checkpointing.setter
    def checkpointing(self, value: str) -> None:
        if value == "full":
            self.model.gradient_checkpointing_enable()

    def forward(
        self, prompts: Sequence[Sequence[int]], canvases: Tensor, conditioned: Sequence[bool]
    ) -> Tensor:
        """Logits (rows, n, V) for canvases (rows, n) behind prompts of any lengths.

        conditioned: which rows are shown the logits of a first pass, without gradients, as decoding
        shows those of the step before (Analog Bits, arXiv 2208.04202).
        """
        (rows, n), longest = canvases.shape, max(map(len, prompts))
        arrays = [
            np.array([[0] * (longest - len(p)) + list(p) for p in prompts]),
            np.array([[len(p)] for p in prompts]), np.array(conditioned),
        ]  # fmt: skip
        ids, lengths, shown = to_device(arrays, canvases.device)
        # Padding stands in front: layers with a sliding window keep what is last.
        there = torch.arange(longest, device=canvases.device) >= longest - lengths
        places = torch.arange(n, device=canvases.device) + lengths
        encoder = self.model.model.encoder
        kept = encoder(
            input_ids=ids, attention_mask=there.long(), position_ids=(there.cumsum(-1) - 1).clamp(min=0)
        ).past_key_values
        seen = torch.cat([there, there.new_ones(rows, n)], dim=1)[:, None, None].expand(-1, -1, n, -1)
        # Whole masks: of a row of flags transformers asks whether anything is hidden, and waits.
        window = min(longest, self.model.config.text_config.sliding_window - 1)
        masks = {"full_attention": seen, "sliding_attention": seen[..., longest - window :]}

        def denoise(before: Tensor | None) -> Tensor:
            found: Tensor = self.model(
                past_key_values=kept,
                decoder_input_ids=canvases,
                decoder_attention_mask=masks,
                decoder_position_ids=places,
                self_conditioning_logits=before,
                self_conditioning_mask=None if before is None else shown,
            ).logits
            return found

        before, twice = None, any(conditioned)
        if twice:
            with torch.no_grad():
                before = denoise(None)
        self._count_flops([len(p) for p in prompts], n, twice)
        return denoise(before)

    def _count_flops(self, lengths: Sequence[int], n: int, twice: bool) -> None:
        """Adds the FLOPs of a call without logits; a first pass, which has no backward, counts a third."""
        passes, config = 1 + twice / 3, self.model.config.text_config
        prompts, canvases = sum(lengths), len(lengths) * n * passes
        share, flops, attention = config.top_k_experts / config.num_experts, 0.0, 0.0
        for layer in self.model.model.decoder.layers:
            each = sum(
                p.numel() * (share if p.dim() == 3 else 1) for p in layer.parameters() if p.dim() > 1
            )
            seen = layer.self_attn.sliding_window or max(lengths)
            pairs = sum(k * min(k, seen) / 2 + n * passes * (n + min(k, seen)) for k in lengths)
            flops += 2 * each * (prompts + canvases)
            attention += 4 * config.num_attention_heads * layer.self_attn.head_dim * pairs
        self.flop_count += FlopCount(flops + attention, attention, 0.0, 1, prompts + round(canvases))


def _freeze_vision(model: Any) -> Any:
    """The model with what text never meets frozen."""
    for name, parameter in model.named_parameters():
        if name.startswith(VISION_PREFIXES):
            parameter.requires_grad_(False)
    return model


def to_checkpoint_names(state: dict[str, Tensor], checkpoint: Checkpoint) -> dict[str, Tensor]:
    """The tensors of a `TrainableGemma` by a checkpoint's names, each once, without what it never had."""
    text = list_text_tensor_shapes(checkpoint.raw_config, checkpoint.folder / "config.json")
    sees = bool(checkpoint.raw_config.get("vision_config"))
    named = {name.removeprefix("model."): value for name, value in state.items()}
    return {
        name: v for name, v in named.items() if name in text or (sees and name.startswith(VISION_PREFIXES))
    }


def check_gemma_training(config: Config, checkpoint: Checkpoint) -> None:
    """Raises `ConfigError` for settings that the training of a DiffusionGemma cannot honour, and those that
    validation, which decodes, cannot.
    """
    model, plain, folder = config.model, TrainConfig(), checkpoint.folder
    phases = list(config.train.get_phase_configs().values())
    for train in phases:  # first: settings of decoding that another objective brings are no news then
        if train.objective != "sft":
            raise ConfigError(
                f"objective={train.objective} is for denoisers of masks: {folder} has uniform noise and "
                "learns by objective=sft"
            )
    with_checkpoint_defaults(config.decode, checkpoint.config)
    if model.evidence_layout not in (None, "prefix"):
        raise ConfigError(
            f"evidence_layout={model.evidence_layout} does not go with {folder}, whose encoder reads the "
            "prompt in one piece: leave it out"
        )
    if model.attn_implementation not in ("auto", "sdpa"):
        raise ConfigError(
            f"attention={model.attn_implementation} does not go with {folder}, which runs on sdpa only"
        )
    for train in phases:
        if train.trainable not in (None, "all") or train.lora_rank:
            raise ConfigError(f"{folder} is trained with all its weights: leave lora_rank and learn out")
        if train.parallel == "fsdp":
            raise ConfigError(f"parallel=fsdp does not go with {folder}: set parallel=ddp or single")
        if train.activation_checkpointing == "selective":
            raise ConfigError(f"checkpointing=selective does not go with {folder}: set checkpointing=full")
        for name in MASK_ONLY_SETTINGS:
            if (value := getattr(train, name)) != getattr(plain, name):
                raise ConfigError(
                    f"{name}={value} is for denoisers of masks, and {folder} is a model of uniform noise: "
                    "leave it out"
                )
