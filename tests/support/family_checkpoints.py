"""Checkpoints of families, changed."""

import json


def change(folder, **keys):
    """Gives the config other keys; None takes one away."""
    path = folder / "config.json"
    raw = json.loads(path.read_text()) | keys
    path.write_text(json.dumps({key: value for key, value in raw.items() if value is not None}))
