"""Corpora, questions, indexes."""

from bad_inputs import ASK, Case

CASES = [
    Case("a passage that is not JSON", ASK, "corpus.jsonl, line 1", {"corpus.jsonl": "{oops\n"}),
]
