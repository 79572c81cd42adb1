"""The id of a mask token that only the tokenizer of a checkpoint knows, from its JSON files."""

from pathlib import Path
from typing import Any

from dlm_rag.errors import CheckpointError
from dlm_rag.files.hub import read_json


def find_mask_token_id(folder: Path, usual: str) -> int:
    """The id of the token that the folder declares as its mask, else of the family's `usual` one.

    Raises `CheckpointError` where the files know neither.
    """
    files = ("tokenizer_config.json", "special_tokens_map.json", "added_tokens.json", "tokenizer.json")
    declared, ids = None, dict[str, Any]()
    for name in files:  # the last is long, and needed only where the others do not say it
        if name == "tokenizer.json" and (declared or usual) in ids:
            break
        path = folder / name
        raw = read_json(path) if path.exists() else {}
        declared = declared or _content(raw.get("mask_token"))
        ids |= _read_added_tokens(name, raw)
    found = ids.get(declared or usual)
    if type(found) is not int:
        raise CheckpointError(
            "the key 'mask_token_id' is missing, and the tokenizer has not added "
            f"{declared or usual!r:.60}{', which it declares' if declared else ''}: add the key"
        )
    return found


def _read_added_tokens(name: str, raw: dict[str, Any]) -> dict[str, Any]:
    """Text -> id of the tokens that a file adds to the vocabulary."""
    if name == "added_tokens.json":
        return raw
    listed = raw.get("added_tokens")
    if isinstance(listed, list):
        pairs = [(item, item.get("id")) for item in listed if isinstance(item, dict)]
    else:
        known = raw.get("added_tokens_decoder")
        known = known if isinstance(known, dict) else {}
        pairs = [(item, int(token)) for token, item in known.items() if token.isdecimal()]
    return {text: token for item, token in pairs if (text := _content(item)) is not None}


def _content(token: Any) -> str | None:
    """The text of a token, which these files give as it is or with its settings."""
    found = token.get("content") if isinstance(token, dict) else token
    return found if isinstance(found, str) else None
