"""Settings that were renamed or removed: errors say so, and files that we wrote still open."""

from typing import Any

# Section, old name, new name; the section "" has the settings of no section. A name with blanks is a
# sentence on a setting that is gone, in stored files too.
_RENAMED = {
    "": {"f1": "f1_rule", "guesses": "record_provisional"},
    "model": {"attention": "attn_implementation", "attention_block": "block_size"},
    "retrieval": {
        "kind": "method", "index_folder": "index_dir", "dense_model": "embedding_model",
        "dense_batch_size": "embedding_batch_size", "words_of": "bm25_query",
        "url_seconds": "timeout",
        **dict.fromkeys(
            ("bm25_cache_gib", "search_memory_gib"),
            "BM25 keeps no scores any more, and finds the same: leave it out",
        ),
    },
    "decode": {
        "canvas_length": "max_new_tokens", "finished_blocks": "finished_block_context",
        "lookahead": "query_window", "gate_width": "gate_temperature", "head_cut": "head_threshold",
        "edit_rounds": "max_edit_steps",
        "copy_price": "copy_penalty", "stable_steps": "convergence_steps",
        "confident_below": "stop_entropy", "query": "query_policy", "retrieve_every": "retrieval_interval",
        "retrieve_below": "retrieval_threshold", "search": "retrieval_gate", "stop_early": "early_stopping",
        **dict.fromkeys(
            ("remask_threshold", "revision_threshold"),
            "committed tokens are masked no more: leave it out, or set decode.edit_threshold",
        ),
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
        "pointer_weight": "pointer_loss_weight", "late_pointer_weight": "final_pointer_loss_weight",
        "save_every": "save_steps", "validate_every": "eval_steps",
        "validation_questions": "eval_questions",
        "committed_only": "it learned less than whole steps (docs/rl.md): leave it out",
        **dict.fromkeys(
            ("eos_weight", "final_eos_weight", "end_weight", "late_end_weight", "curriculum_accuracy",
             "next_stage_accuracy"),
            "it has one value now: leave it out",
        ),
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
# By setting, without its section: values that had other names, or are gone, likewise.
_RENAMED_VALUES = {
    "bm25_query": {"query": "whole", "parts": "sentences"},
    "finished_block_context": {
        "reread": "recompute", "text": "no_evidence",
        **dict.fromkeys(
            ("append", "frozen", "kept"),
            "finished blocks that see evidence are always run again with new evidence: set it to recompute",
        ),
    },
    "commit_rule": {"head": "policy_head"},
    "retrieval_gate": {"head": "policy_head"},
    "trainable": {"heads": "policy_heads"},
}  # fmt: skip
_OF_REWARD = {"groups": "prompts_per_step", "rows": "num_generations"}  # of `train` with objective=rl
_OF_HEADERS = _RENAMED[""] | {"attention_block": "block_size"}  # of traces
_OF_CHECKPOINTS = {"finished_blocks": "finished_block_context", "search": "retrieval_gate"}


def _split_key(key: str) -> tuple[str, str, str]:
    """What stands before the last part of a dotted key; the section whose settings it has, which for a
    phase of training is `train`; the last part."""
    path, _, leaf = key.rpartition(".")
    return path, "train" if path.startswith("train.phases.") else path, leaf


def explain_old_key(key: str) -> str | None:
    """What has become of a dotted key that was a setting, and the remedy; None for any other key."""
    path, section, leaf = _split_key(key)
    if (name := _RENAMED.get(section, {}).get(leaf)) is None:
        return None
    if " " in name:
        return f"was removed: {name}"
    new = f"{path}.{name}".removeprefix(".")
    if section == "train" and leaf in _OF_REWARD:
        new += f" (with objective=rl {path}.{_OF_REWARD[leaf]})"
    return f"is now called {new}: write that"


def explain_old_value(name: str, value: Any) -> str | None:
    """What has become of a value of the setting `name`, and the remedy; None for any other value."""
    new = _RENAMED_VALUES.get(name, {}).get(value) if isinstance(value, str) else None
    return new and (f"was removed: {new}" if " " in new else f"is now {name}={new}: write that")


def _upgrade_value(name: str, value: Any) -> Any:
    new = _RENAMED_VALUES.get(name, {}).get(value, " ") if isinstance(value, str) else " "
    return value if " " in new else new  # what is gone is refused where it is read


def upgrade_settings(settings: dict[str, Any], path: str = "") -> dict[str, Any]:
    """Settings as older versions stored them, by dotted keys or nested, under the names of today.

    path: the section or phase that the keys are in.
    """
    upgraded: dict[str, Any] = {}
    for key, value in settings.items():
        whole = f"{path}.{key}".removeprefix(".")
        _, section, leaf = _split_key(whole)
        names = _RENAMED.get(section, {}) if section else _OF_HEADERS
        name = names.get(leaf, leaf)
        if " " in name:
            if value is None or section != "decode":
                continue
            name = leaf  # it has changed answers, with which no others are mixed
        if isinstance(value, dict):
            value = upgrade_settings(value, whole)
        also = [_OF_REWARD[leaf]] if section == "train" and leaf in _OF_REWARD else []
        for each in (name, *also):
            new = _upgrade_value(each, value) if section in _RENAMED else value
            upgraded[str(key).removesuffix(leaf) + each] = new
    return upgraded


def upgrade_checkpoint(raw: dict[str, Any]) -> dict[str, Any]:
    """The config.json of a checkpoint that was trained here, under the names of today."""
    if "evidence_layout" not in raw:
        return raw
    named = {_OF_CHECKPOINTS.get(name, name): value for name, value in raw.items()}
    return {name: _upgrade_value(name, value) for name, value in named.items()}
