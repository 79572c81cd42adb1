"""A few passages, and files of records."""

import json
from pathlib import Path

PASSAGES = [
    ("emma", "Emma", "Emma is a novel by Jane Austen, first published in 1815."),
    ("austen", "Jane Austen", "Jane Austen was born in Steventon."),
    ("steventon", "Steventon", "Steventon is a village in Hampshire, England."),
    ("dune", "Dune", "Dune is a novel by Frank Herbert."),
    ("herbert", "Frank Herbert", "Frank Herbert was born in Tacoma."),
]


def write_jsonl_file(path: Path, records: list[dict]) -> Path:
    path.write_text("".join(json.dumps(record) + "\n" for record in records), encoding="utf-8")
    return path
