"""Decode settings for a checkpoint: what is unset is the checkpoint's own, what it rules out is refused."""

from collections.abc import Mapping
from typing import Any

from dlm_rag.config import DecodeConfig
from dlm_rag.config.fields import fill_unset, find_idle_settings, flatten_settings, replace_settings
from dlm_rag.engine.rules import find_rule, samples_actions
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
    facts = {"attention_blocks": bool(block), "decode.mode": mode}
    settings = _take_own_settings(settings, shape.decode_settings, facts)
    order, rule = shape.finished_block_context, settings.commit_rule or "threshold"
    own = {"finished_block_context": order, "commit_rule": rule}
    idle = find_idle_settings("decode", settings, facts | {"decode.commit_rule": rule})
    for name, reason in idle.items():
        if (name, settings.finished_block_context) != ("finished_block_context", order):
            raise ConfigError(f"decode.{name}={reason}: leave it out")
    if block and settings.block_length and block % settings.block_length:
        raise ConfigError(
            f"block_length={settings.block_length} does not divide this model's blocks of {block} tokens"
        )
    defaults = {"mode": mode, "max_new_tokens": shape.canvas_length, "finished_block_context": order}
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
    for find, entry in ((find_rule, settings.commit_rule), (find_query_policy, settings.query_policy)):
        if entry is not None:
            find(entry)
    if settings.blocks_at_once > 1 and (shape.predicts_next_block or samples_actions(settings)):
        why = "predicts the first token of the next" if shape.predicts_next_block else "is sampled alone"
        raise ConfigError(
            f"blocks_at_once={settings.blocks_at_once}: a finished block {why} here; set blocks_at_once=1"
        )
    return settings


# Settings of a checkpoint that do not go with others: what is left out where somebody has set the first.
_EXCLUDES = {
    "edit_threshold": ("blocks_at_once", "block_add_threshold", "semi_complete_threshold"),
    "blocks_at_once": ("edit_threshold",),
    "tokens_per_step": ("steps_per_block",),
    "steps_per_block": ("tokens_per_step",),
}


def _take_own_settings(
    settings: DecodeConfig, own: Mapping[str, Any], facts: Mapping[str, Any]
) -> DecodeConfig:
    """`settings` with a checkpoint's `own` for those that nobody has set, but for what then has no effect.

    facts: about the checkpoint, and how it is read.
    """
    given = [name for name in settings.given if getattr(settings, name) is not None]
    ruled_out = {other for name in given for other in _EXCLUDES.get(name, ())}
    own = {name: value for name, value in own.items() if name not in settings.given | ruled_out}
    found = fill_unset(settings, own)
    while True:
        known = {k: v for k, v in flatten_settings(found, "decode.").items() if v is not None}
        values = {name: getattr(found, name) for name in own}
        idle = find_idle_settings("decode", found, {**known, **facts}, values)
        if not idle:
            return found
        defaults = DecodeConfig.__dataclass_fields__
        found = replace_settings(found, **{name: defaults[name].default for name in idle})
