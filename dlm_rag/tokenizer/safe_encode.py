"""A tokenizer for text that is only text: whatever it says, no token with a meaning comes out of it.

Added tokens are left out altogether. Where the vocabulary itself has pieces that mean something (the
mask, the end of a turn) and a text has one, it is read again by a vocabulary without them: what is not
there cannot be found.
"""

from __future__ import annotations

import json
import secrets
from functools import cached_property
from typing import TYPE_CHECKING, Any

from dlm_rag.errors import CheckpointError

if TYPE_CHECKING:
    from tokenizers import Tokenizer


MAX_GROWTH_FACTOR = 1000  # of a text in a normalizer or decoder, of which every replacement may double it


class PlainTextEncoder:
    """Makes of a text the ids that a tokenizer makes of it, but never one of those in `meaning`.

    These are the ids in `control` (mask, ends) and `marks` (of a chat template) and all added tokens:
    special or not, but for white space and single characters, which are text, and for what unknown
    characters become. Raises `CheckpointError` where the mask or an end is that unknown token, or a
    single character.
    """

    def __init__(
        self, full: Tokenizer, control: frozenset[int], marks: frozenset[int] = frozenset()
    ) -> None:
        from tokenizers import Tokenizer

        self._plain = Tokenizer(full.model)
        for part in ("normalizer", "decoder"):
            if _max_growth_factor(getattr(full, part)) > MAX_GROWTH_FACTOR:
                raise CheckpointError(
                    f"the tokenizer's {part} makes texts more than {MAX_GROWTH_FACTOR} times as long: "
                    "mend it"
                )
        for part in ("normalizer", "pre_tokenizer"):
            if getattr(full, part) is not None:
                setattr(self._plain, part, getattr(full, part))
        added = {
            token
            for token, item in full.get_added_tokens_decoder().items()
            if item.special or not (item.content.isspace() or len(item.content) == 1)
        }
        unknown = self._find_unknown_id()
        self.meaning = (control | marks | added) - {unknown}
        for token in control:
            piece = self._plain.id_to_token(token)
            if piece is not None and (token == unknown or len(piece) == 1):
                made_of = "unknown characters" if token == unknown else "a single character"
                raise CheckpointError(
                    f"the token '{piece}' is the model's mask or an end, and what the tokenizer makes of "
                    f"{made_of}: no text is safe"
                )

    def encode(self, text: str) -> list[int]:
        ids: list[int] = self._plain.encode(text, add_special_tokens=False).ids
        if not self.meaning.isdisjoint(ids):
            ids = self._without_meaning.encode(text, add_special_tokens=False).ids
        return ids

    @cached_property
    def _without_meaning(self) -> Tokenizer:
        """Built for the first text that needs it: a large vocabulary takes seconds."""
        from tokenizers import Tokenizer

        pieces = {self._plain.id_to_token(token) for token in self.meaning}
        everything = json.loads(self._plain.to_str())
        everything["model"] = _drop_pieces(everything["model"], pieces)
        return Tokenizer.from_str(json.dumps(everything))

    def _find_unknown_id(self) -> int | None:
        model = self._plain.model
        if type(model).__name__ == "Unigram":  # which does not say
            return json.loads(self._plain.to_str())["model"].get("unk_id")
        unknown = getattr(model, "unk_token", None)
        return None if unknown is None else model.token_to_id(unknown)


def _max_growth_factor(rule: Any) -> float:
    """How many times as long a text may become by the replacements of a normalizer or decoder."""
    growth, parts = 1.0, [json.loads(rule.__getstate__()) if rule else {}]
    for part in parts:  # those of a sequence are parts, too
        parts += part.get("normalizers", part.get("decoders", []))
        written = len(part.get("content") or part.get("prepend") or "")
        read = len((part.get("pattern") or {}).get("String", ""))  # an expression may match nothing
        growth *= max(1.0, written / read if read else 1 + written)
    return growth


def _drop_pieces(model: dict[str, Any], pieces: set[str | None]) -> dict[str, Any]:
    """The model of a `tokenizer.json` in which no text has one of these pieces."""
    vocabulary = model["vocab"]
    if isinstance(vocabulary, list):  # Unigram: the place in the list is the id
        hidden = secrets.token_hex(16)  # a name that nobody can type
        names = [f"{hidden}{n}" if piece in pieces else piece for n, (piece, _) in enumerate(vocabulary)]
        return model | {
            "vocab": [[name, score] for name, (_, score) in zip(names, vocabulary, strict=True)]
        }
    model = model | {"vocab": {piece: n for piece, n in vocabulary.items() if piece not in pieces}}
    if "merges" in model:
        start = len(model.get("continuing_subword_prefix") or "")
        merges = model["merges"]
        model["merges"] = [(a, b) for a, b in merges if pieces.isdisjoint({a, b, a + b[start:]})]
    return model
