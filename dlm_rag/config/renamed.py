"""Settings of released versions that were renamed or removed: errors say so, stored files still open."""

import re
from typing import Any

# Section, old name, new name; the section "" has the settings of no section. A name with blanks is a
# sentence on a setting that is gone, in stored files too.
_RENAMED = {
    "": {"f1": "f1_rule"},
    "model": {"attention": "attn_implementation"},
    "retrieval": {
        "kind": "method", "index_folder": "index_dir", "dense_model": "embedding_model",
        "dense_batch_size": "embedding_batch_size",
        "search_memory_gib": "BM25 keeps no scores any more, and finds the same: leave it out",
    },
    "decode": {
        "canvas_length": "max_new_tokens", "query": "query_policy", "retrieve_every": "retrieval_interval",
        "retrieve_below": "retrieval_threshold", "stop_early": "early_stopping",
        "revision_threshold":
            "committed tokens are masked no more: leave it out, or set decode.edit_threshold",
    },
    "engine": {"pool_gib": "prefix_cache_gib", "host_pool_gib": "cpu_offload_gib"},
    "train": {
        "vocabulary": "vocab_size", "groups": "passage_sets_per_step", "rows": "rows_per_set",
        "steps": "max_steps", "accumulate": "gradient_accumulation_steps",
        "checkpointing": "activation_checkpointing", "hops": "max_hops",
        "matrix_learning_rate": "muon_learning_rate", "decay_share": "decay_fraction",
        "opening_share": "attention_anneal_fraction", "pointer_weight": "pointer_loss_weight",
        "late_pointer_weight": "final_pointer_loss_weight", "save_every": "save_steps",
        "validate_every": "eval_steps", "validation_questions": "eval_questions",
        **dict.fromkeys(
            ("end_weight", "late_end_weight", "next_stage_accuracy"),
            "it has one value now: leave it out",
        ),
    },
    "plan": {"kwh_price": "price_per_kwh", "hour_price": "price_per_hour"},
}  # fmt: skip


def _find_new_name(key: str) -> str | None:
    """What `_RENAMED` has for a dotted key, also for one of a phase of training; None for any other key."""
    section, _, leaf = re.sub(r"^train\.phases\.[^.]+\.", "train.", key).rpartition(".")
    return _RENAMED.get(section, {}).get(leaf)


def explain_old_key(key: str) -> str | None:
    """What has become of a dotted key that was a setting, and the remedy; None for any other key."""
    if (name := _find_new_name(key)) is None:
        return None
    new = f"{key.rpartition('.')[0]}.{name}".removeprefix(".")
    return f"was removed: {name}" if " " in name else f"is now called {new}: write that"


def upgrade_settings(settings: dict[str, Any], path: str = "") -> dict[str, Any]:
    """Settings as older versions stored them, by dotted keys or nested, under the names of today.

    path: the section or phase that the keys are in.
    """
    upgraded: dict[str, Any] = {}
    for key, value in settings.items():
        whole = f"{path}.{key}".removeprefix(".")
        leaf = whole.rpartition(".")[2]
        name = _find_new_name(whole) or leaf
        if " " in name:
            if value is None or not whole.startswith("decode."):
                continue
            name = leaf  # it has changed answers, with which no others are mixed
        if isinstance(value, dict):
            value = upgrade_settings(value, whole)
        upgraded[str(key).removesuffix(leaf) + name] = value
    return upgraded
