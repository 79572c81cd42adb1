"""Settings that were renamed or removed: errors say so, and files that we wrote still open."""

from typing import Any

# Section, old name, new name; the section "" has the settings of no section.
_RENAMED = {
    "": {"f1": "f1_rule", "guesses": "record_provisional"},
    "model": {"attention": "attn_implementation", "attention_block": "block_size"},
    "retrieval": {
        "kind": "method", "index_folder": "index_dir", "dense_model": "embedding_model",
        "dense_batch_size": "embedding_batch_size", "words_of": "bm25_query",
        "url_seconds": "timeout",
    },
    "decode": {
        "canvas_length": "max_new_tokens", "finished_blocks": "finished_block_context",
        "lookahead": "query_window", "gate_width": "gate_temperature", "head_cut": "head_threshold",
        "edit_rounds": "max_edit_steps",
        "copy_price": "copy_penalty", "stable_steps": "convergence_steps",
        "confident_below": "stop_entropy", "query": "query_policy", "retrieve_every": "retrieval_interval",
        "retrieve_below": "retrieval_threshold", "search": "retrieval_gate", "stop_early": "early_stopping",
    },
    "engine": {"pool_gib": "prefix_cache_gib", "host_pool_gib": "cpu_offload_gib"},
    "train": {
        "layers": "init_layers_from", "vocabulary": "vocab_size", "learn": "trainable",
        "groups": "passage_sets_per_step", "rows": "rows_per_set", "steps": "max_steps",
        "accumulate": "gradient_accumulation_steps", "checkpointing": "activation_checkpointing",
        "updates": "num_iterations", "clip": "clip_eps", "kl_weight": "kl_coef",
        "forward_price": "forward_cost", "search_price": "search_cost", "prices_from": "cost_start",
        "steps_of_rollout": "train_steps_per_rollout", "least_hops": "min_hops", "hops": "max_hops",
        "crossed": "counterfactual_share", "matrix_learning_rate": "muon_learning_rate",
        "decay_share": "decay_fraction", "opening_share": "attention_anneal_fraction",
        "end_weight": "eos_weight", "late_end_weight": "final_eos_weight",
        "pointer_weight": "pointer_loss_weight", "late_pointer_weight": "final_pointer_loss_weight",
        "save_every": "save_steps", "validate_every": "eval_steps",
        "validation_questions": "eval_questions", "next_stage_accuracy": "curriculum_accuracy",
    },
    "plan": {"link_gbit": "network_gbit", "kwh_price": "price_per_kwh", "hour_price": "price_per_hour"},
    "synthesis": {
        "kind": "method", "keep": "filter", "chain": "max_hops", "writer": "writer_url", "each": "n",
        "at_once": "concurrency", "most_tokens": "max_tokens", "tries": "max_retries",
        "against": "decontaminate_against", "form": "format", "near_duplicates": "dedup_threshold",
    },
    "serving": {
        "keys": "api_keys_file", "waiting": "max_queue_per_key", "seconds": "timeout",
        "tokens": "max_tokens", "connections": "max_connections",
    },
}  # fmt: skip
# Settings that are gone, in stored files too: a sentence on each, by its dotted key.
_REMOVED = {
    f"{section}.{name}": reason
    for section, names, reason in (
        ("decode", ("remask_threshold", "revision_threshold"),
         "committed tokens are masked no more: leave it out, or set decode.edit_threshold"),
        ("retrieval", ("bm25_cache_gib", "search_memory_gib"),
         "BM25 keeps no scores any more, and finds the same: leave it out"),
    )
    for name in names
}  # fmt: skip
# Values that had other names, by the setting that has them, without its section.
_RENAMED_VALUES = {
    "bm25_query": {"query": "whole", "parts": "sentences"},
    "finished_block_context": {"reread": "recompute", "text": "no_evidence"},
    "commit_rule": {"head": "policy_head"},
    "retrieval_gate": {"head": "policy_head"},
    "trainable": {"heads": "policy_heads"},
}
# Values that are gone: a sentence on each, by the setting that had them, without its section.
_REMOVED_VALUES = {
    "finished_block_context": dict.fromkeys(
        ("append", "frozen", "kept"),
        "finished blocks that see evidence are always run again with new evidence: set it to recompute",
    )
}
_OF_REWARD = {"groups": "prompts_per_step", "rows": "num_generations"}  # of `train` with objective=rl
_OF_CHECKPOINTS = {"finished_blocks": "finished_block_context", "search": "retrieval_gate"}


def _get_section(path: str) -> str:
    """The section whose settings a dotted path has: the phases of training have those of `train`."""
    return "train" if path.startswith("train.phases.") else path


def explain_old_key(key: str) -> str | None:
    """What has become of a dotted key that was a setting, and the remedy; None for any other key."""
    path, _, leaf = key.rpartition(".")
    section = _get_section(path)
    if key in _REMOVED:
        return f"was removed: {_REMOVED[key]}"
    if (name := _RENAMED.get(section, {}).get(leaf)) is None:
        return None
    new = f"{path}.{name}".removeprefix(".")
    if section == "train" and leaf in _OF_REWARD:
        new += f" (with objective=rl {path}.{_OF_REWARD[leaf]})"
    return f"is now called {new}: write that"


def find_new_value(name: str, value: Any) -> str | None:
    """The present name of a value of the setting `name`; None for any other value."""
    return _RENAMED_VALUES.get(name, {}).get(value) if isinstance(value, str) else None


def explain_old_value(name: str, value: Any) -> str | None:
    """What has become of a value of the setting `name`, and the remedy; None for any other value."""
    if new := find_new_value(name, value):
        return f"is now {name}={new}: write that"
    reason = _REMOVED_VALUES.get(name, {}).get(value) if isinstance(value, str) else None
    return reason and f"was removed: {reason}"


def upgrade_settings(settings: dict[str, Any], path: str = "") -> dict[str, Any]:
    """Settings as older versions stored them, by dotted keys or nested, under the names of today.

    path: the section or phase that the keys are in.
    """
    upgraded: dict[str, Any] = {}
    for key, value in settings.items():
        whole = f"{path}.{key}".removeprefix(".")
        if whole in _REMOVED and (value is None or not whole.startswith("decode.")):
            continue  # else it has changed answers, with which no others are mixed
        above, _, leaf = whole.rpartition(".")
        section = _get_section(above)
        renamed = _RENAMED.get(section, {}) | ({} if section else {"attention_block": "block_size"})
        if isinstance(value, dict):
            value = upgrade_settings(value, whole)
        names = [renamed.get(leaf, leaf)]
        if section == "train" and leaf in _OF_REWARD:
            names.append(_OF_REWARD[leaf])
        for name in names:
            new = find_new_value(name, value) if section in _RENAMED else None
            upgraded[str(key).removesuffix(leaf) + name] = new or value
    return upgraded


def upgrade_checkpoint(raw: dict[str, Any]) -> dict[str, Any]:
    """The config.json of a checkpoint that was trained here, under the names of today."""
    if "evidence_layout" not in raw:
        return raw
    named = {_OF_CHECKPOINTS.get(name, name): value for name, value in raw.items()}
    return {name: find_new_value(name, value) or value for name, value in named.items()}
