"""DiffusionGemma's configs in our words, and the tensors that it needs; text only.

The transformer itself is the class of `transformers` (`diffusion_gemma/model.py`).
"""

from dataclasses import dataclass, replace
from importlib import import_module
from pathlib import Path
from typing import Any

import torch

from dlm_rag.errors import CheckpointError, suggest_nearest, translate_failures
from dlm_rag.files.hub import read_checkpoint_json
from dlm_rag.model.denoiser_config import DenoiserConfig
from dlm_rag.model.families import require_key
from dlm_rag.model.stored_tensors import Family, NamedShapes

LAYER_KINDS = ("sliding_attention", "full_attention")
VISION_PREFIXES = ("model.encoder.vision_tower.", "model.encoder.embed_vision.")  # no use for text
# For a folder of text alone, which has no tower that looks at images.
DUMMY_VISION_CONFIG = {
    "hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 1,
    "num_key_value_heads": 1, "head_dim": 8, "patch_size": 2, "position_embedding_size": 4,
    "model_type": "gemma4_vision",
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
        return import_module("dlm_rag.diffusion_gemma.decoding")


def read_gemma_config(raw: dict[str, Any]) -> GemmaConfig:
    """The shape; how it is denoised is in the generation config (`add_generation_config`)."""
    text, block = require_key(raw, "text_config"), require_key(raw, "canvas_length")
    if not isinstance(text, dict):
        raise CheckpointError(f"text_config={text!r:.60} must be an object")
    layers = text.get("layer_types")
    for kind in layers if isinstance(layers, list) else []:
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
        return DiffusionGemmaConfig.from_dict(
            raw if raw.get("vision_config") else raw | {"vision_config": DUMMY_VISION_CONFIG}
        )


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


def load_model(checkpoint: Any, device: torch.device, dtype: torch.dtype) -> Any:
    """The model of a checkpoint; raises `CheckpointError`."""
    model = import_module("dlm_rag.diffusion_gemma.model")
    return model.DiffusionGemma.from_pretrained(checkpoint, device, dtype)


FAMILY = Family(
    read_gemma_config,
    lambda name: name,
    separate_experts=False,
    load=load_model,
    complete_config=add_generation_config,
    list_named_shapes=list_text_tensor_shapes,
)
