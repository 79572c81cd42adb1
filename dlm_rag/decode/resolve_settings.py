"""Decode settings for a checkpoint: what is unset is the checkpoint's own, what it rules out is refused."""

from dlm_rag.config import DecodeConfig
from dlm_rag.config.fields import replace_settings
from dlm_rag.config.ineffective_settings import check_checkpoint_effects
from dlm_rag.diffusion.commit_rules import find_rule, samples_actions
from dlm_rag.errors import ConfigError
from dlm_rag.model.denoiser_config import DenoiserConfig
from dlm_rag.retrieval.query import find_query_policy


def resolve_settings(settings: DecodeConfig, shape: DenoiserConfig) -> DecodeConfig:
    """`settings` with the checkpoint's own lengths and rules for what is unset.

    Raises `ConfigError` for settings that the checkpoint cannot be decoded by or does not read, and for a
    rule or query policy that cannot be imported.
    """
    if shape.adapter is not None:
        found: DecodeConfig = shape.adapter.resolve_settings(settings, shape)
        return found
    block, modes = shape.block_size, shape.decode_modes
    if (mode := settings.mode or modes[0]) not in modes:
        raise ConfigError(
            f"decode.mode={mode}: this model was trained for {' and '.join(modes)} alone, leave it out"
        )
    names = ("finished_block_context", "commit_rule")
    own = {name: getattr(shape, name) for name in names}
    facts = {"attention_blocks": bool(block), "decode.mode": mode}
    facts |= {f"decode.{name}": own[name] for name in names[1:] if getattr(settings, name) is None}
    check_checkpoint_effects("decode", settings, facts, {names[0]: own[names[0]]})
    if block and settings.block_length and block % settings.block_length:
        raise ConfigError(
            f"block_length={settings.block_length} does not divide this model's blocks of {block} tokens"
        )
    defaults = {"mode": mode, "max_new_tokens": shape.canvas_length, names[0]: own[names[0]]}
    if mode == "diffusion":  # others read nothing else
        defaults |= own
    changes = {name: value for name, value in defaults.items() if getattr(settings, name) is None}
    length = settings.max_new_tokens or shape.canvas_length
    if settings.block_length is None and mode == "diffusion":
        # Blocks of attention may be longer than the canvas, and are written whole.
        longest = length if block is None else 0
        own_length = shape.block_length or 0
        changes["block_length"] = own_length if own_length <= length else longest
    settings = replace_settings(settings, **changes, abstain=settings.abstain or shape.abstain)
    for find, name in ((find_rule, settings.commit_rule), (find_query_policy, settings.query_policy)):
        if name is not None:
            find(name)
    if settings.blocks_at_once > 1 and (shape.predicts_next_block or samples_actions(settings)):
        why = "predicts the first token of the next" if shape.predicts_next_block else "is sampled alone"
        raise ConfigError(
            f"blocks_at_once={settings.blocks_at_once}: a finished block {why} here; set blocks_at_once=1"
        )
    return settings
