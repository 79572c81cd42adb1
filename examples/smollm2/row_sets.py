"""Training rows as token ids: read from the file of `make_rows.py`, packed into one file and unpacked."""

import json
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import load_file, save_file

BEGIN = 1
PASSAGE_LENGTH, MAX_HEAD, MAX_RESPONSE = 224, 60, 46
HEAD, FACT = "Question: {question}\nAnswer:", "{passage}\n"
ROWS_FILE = "rows.safetensors"


@dataclass(frozen=True)
class Row:
    head: list[int]
    response: list[int]
    is_open: bool  # whether it goes on in a way that the passages do not tell


@dataclass(frozen=True)
class RowSet:
    passages: list[list[int]]
    rows: list[Row]


def read_sets(path: Path, folder: Path) -> list[RowSet]:
    """Returns the sets of a file of `make_rows.py` as token ids; rows that do not fit are left out."""
    from transformers import AutoTokenizer

    backend = AutoTokenizer.from_pretrained(folder).backend_tokenizer

    def encode(texts: list[str]) -> list[list[int]]:
        return [item.ids for item in backend.encode_batch(texts, add_special_tokens=False)]

    found = []
    for line in path.open(encoding="utf-8"):
        record = json.loads(line)
        texts = [FACT.format(passage=text.strip()) for text in record["passages"]]
        whole = encode(texts)
        passages = [ids[:PASSAGE_LENGTH] for ids in whole]
        shown = " ".join(backend.decode_batch(passages)).lower()
        asked = [HEAD.format(question=row["question"]) for row in record["rows"]]
        rows = []
        for row, head, response in zip(
            record["rows"], encode(asked), encode([row["response"] for row in record["rows"]]), strict=True
        ):
            answer = row["response"].partition("### ")[2].lower()
            cut_away = whole != passages and answer not in ("unknown", "yes", "no") and answer not in shown
            if len(head) < MAX_HEAD and len(response) <= MAX_RESPONSE and not cut_away:
                rows.append(Row([BEGIN, *head], response, bool(row.get("open"))))
        if rows:
            found.append(RowSet(passages, rows))
    return found


def unpack_rows(path: Path) -> list[RowSet]:
    """Returns the sets of a file of `pack.py`."""
    found = load_file(path)
    tokens = iter(found.pop("tokens").int().tolist())
    counts = {name: values.tolist() for name, values in found.items()}

    passages = [list(islice(tokens, length)) for length in counts["passages"]]
    texts, sets = iter(passages), list[RowSet]()
    rows = zip(counts["heads"], counts["responses"], counts["is_open"], strict=True)
    for passages_of_set, rows_of_set in zip(counts["passages_of_set"], counts["rows_of_set"], strict=True):
        read = [
            Row(list(islice(tokens, head)), list(islice(tokens, response)), bool(is_open))
            for head, response, is_open in islice(rows, rows_of_set)
        ]
        sets.append(RowSet(list(islice(texts, passages_of_set)), read))
    return sets


def pack_rows(sets: list[RowSet], path: Path) -> None:
    """Writes sets of rows as one run of tokens, with how many of them each text has."""
    texts = [ids for item in sets for ids in item.passages]
    rows = [row for item in sets for row in item.rows]
    tokens = [token for ids in texts for token in ids]
    tokens += [token for row in rows for ids in (row.head, row.response) for token in ids]
    lengths = {
        "passages_of_set": [len(item.passages) for item in sets],
        "rows_of_set": [len(item.rows) for item in sets],
        "passages": [len(ids) for ids in texts],
        "heads": [len(row.head) for row in rows],
        "responses": [len(row.response) for row in rows],
        "is_open": [row.is_open for row in rows],
    }
    counts = {name: torch.tensor(values, dtype=torch.int32) for name, values in lengths.items()}
    save_file(counts | {"tokens": torch.from_numpy(np.array(tokens, np.uint16))}, path)
