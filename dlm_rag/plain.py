"""A tokenizer for text that is only text: whatever it says, no token with a meaning comes out of it.

Added tokens are left out altogether, and pieces of the vocabulary that mean something (the mask, the end
of a turn) are taken out of it: what is not there cannot be found.
"""

from __future__ import annotations

import json
import secrets
from typing import TYPE_CHECKING, Any

from dlm_rag.errors import CheckpointError

if TYPE_CHECKING:
    from tokenizers import Tokenizer


def plain_backend(full: Tokenizer, control: frozenset[int]) -> tuple[Tokenizer, frozenset[int]]:
    """What makes of a text the ids that `full` makes of it, but never one with a meaning; and these ids.

    They are those in `control` (mask, ends) and all added tokens: special or not, but for white space and
    single characters, which are text, and for what unknown characters become. Raises `CheckpointError`
    where the mask or an end is that unknown token, or a single character.
    """
    from tokenizers import Tokenizer

    plain = Tokenizer(full.model)
    if full.normalizer is not None:
        plain.normalizer = full.normalizer
    if full.pre_tokenizer is not None:
        plain.pre_tokenizer = full.pre_tokenizer
    meaning = control | {
        token
        for token, item in full.get_added_tokens_decoder().items()
        if item.special or not (item.content.isspace() or len(item.content) == 1)
    }
    pieces = {piece: token for token in meaning if (piece := plain.id_to_token(token)) is not None}
    if not pieces:  # as in the large public vocabularies, which would take a second to be built again
        return plain, meaning
    everything = json.loads(plain.to_str())
    model = everything["model"]
    unknown = model.get("unk_token")
    if model.get("unk_id") is not None:
        unknown = model["vocab"][model["unk_id"]][0]
    if unknown in pieces and pieces[unknown] in control:
        raise CheckpointError(
            f"the tokenizer makes '{unknown}' of unknown characters, which is the model's mask or an end"
        )
    meaning -= {pieces.pop(unknown, None)}
    everything["model"] = _without(model, set(pieces))
    return Tokenizer.from_str(json.dumps(everything)), meaning


def _without(model: dict[str, Any], pieces: set[str]) -> dict[str, Any]:
    """The model of a `tokenizer.json` in which no text has one of these pieces."""
    vocabulary = model["vocab"]
    if isinstance(vocabulary, list):  # Unigram: the place in the list is the id
        # A name that nobody can type.
        hidden = secrets.token_hex(16)
        return model | {
            "vocab": [
                [f"{hidden}{place}" if piece in pieces else piece, score]
                for place, (piece, score) in enumerate(vocabulary)
            ]
        }
    single = sorted(piece for piece in pieces if "merges" in model and len(piece) == 1)
    if single:
        raise CheckpointError(
            f"the token '{single[0]}' means something to the model and is a single character of its "
            "vocabulary, so that no text could hold this character"
        )
    kept = {piece: token for piece, token in vocabulary.items() if piece not in pieces}
    if "merges" not in model:
        return model | {"vocab": kept}
    start = len(model.get("continuing_subword_prefix") or "")
    merges = [
        (left, right) for left, right in model["merges"] if not pieces & {left, right, left + right[start:]}
    ]
    return model | {"vocab": kept, "merges": merges}
