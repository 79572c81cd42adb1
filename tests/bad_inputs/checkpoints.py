"""Checkpoint folders, tokenizers, chat templates, dense models."""

from bad_inputs import ASK, Case

CASES = [
    Case("a model type of nobody", ASK, "'secret' model", {"model/config.json": {"model_type": "secret"}}),
]
