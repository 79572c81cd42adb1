"""The field's data sets by name: where each file is, which split is meant, whether a copy here is whole.

Files keep their names in the repositories, below one folder (`data`), each with a card beside it that says
where it is from. Entries are addresses; nothing of a repository but these files is fetched.
"""

import hashlib
import itertools
import json
import shutil
from collections import Counter
from pathlib import Path
from typing import Any, NamedTuple

from dlm_rag.errors import ConfigError, suggest_nearest
from dlm_rag.files.checked_json import parse_json_object
from dlm_rag.files.paths import open_atomic_file, write_text_atomic
from dlm_rag.files.record_readers import get_field, read_records
from dlm_rag.questions import read_question_records, read_questions

DATA_FOLDER = "data"  # below the working folder
SPLIT_RULES = {
    "search_r1": "the test questions, else those of dev, else of train (Search-R1)",
    "flashrag_1000": "the first 1,000 of these (FlashRAG's table)",
    "sardi": "SARDI's own, with their corpus",
}
FIRST_QUESTIONS = 1000  # of flashrag_1000
UNPACKED_RATIO = 3  # bytes of text to one of gzip, reckoned


class HubFile(NamedTuple):
    """A file of a data set repository; rows and bytes as published, None where nothing says."""

    repository: str
    path: str
    rows: int | None
    size: int | None = None
    layout: str = "FlashRAG"
    licence: str | None = None

    @property
    def is_corpus(self) -> bool:
        """Whether it holds passages."""
        return self.layout == "passages"

    @property
    def is_index_part(self) -> bool:
        """Whether it is joined with others."""
        return self.layout == "part of an index"


FLASHRAG, SARDI = "RUC-NLPIR/FlashRAG_datasets", "pauljngr/sardi-data"
# Of each split: questions (FlashRAG's README) and bytes (the hub's file list).
_SPLITS: dict[str, tuple[str, dict[str, tuple[int, int | None]]]] = {
    "hotpotqa": ("hotpotqa", {"dev": (7405, None), "train": (90447, None)}),
    "2wiki": ("2wikimultihopqa", {"dev": (12576, 54_700_000), "train": (15000, 59_600_000)}),
    "musique": ("musique", {"dev": (2417, 5_620_000), "train": (19938, 40_100_000)}),
    "bamboogle": ("bamboogle", {"test": (125, 17_000)}),
    "nq": ("nq", {"test": (3610, 488_000), "dev": (8757, 1_070_000), "train": (79168, 9_960_000)}),
    "popqa": ("popqa", {"test": (14267, 8_530_000)}),
    "triviaqa": (
        "triviaqa",
        {"test": (11313, 4_800_000), "dev": (8837, 3_710_000), "train": (78785, 33_000_000)},
    ),
}
DATASETS = {
    name: {
        split: HubFile(FLASHRAG, f"{folder}/{split}.jsonl", *counts, licence="cc-by-sa-4.0")
        for split, counts in splits.items()
    }
    for name, (folder, splits) in _SPLITS.items()
}
SARDI_SETS = {  # folder, questions
    "2wiki": ("2wikimultihopqa", 6253),
    "hotpotqa": ("hotpotqa", 3701),
    "cofca": ("cofca", 900),
    "musique": ("musique", 2417),
    "synthworlds": ("synthworlds/sm", 1200),
}
CORPORA = {
    "wiki18": HubFile("PeterJinGo/wiki-18-corpus", "wiki-18.jsonl.gz", 21_015_324, layout="passages"),
}
INDEXES = {  # of a corpus: the file that parts are joined to, in their order, and the parts
    "wiki18_e5": ("e5_Flat.index", [
        HubFile("PeterJinGo/wiki-18-e5-index", part, None, layout="part of an index")
        for part in ("part_aa", "part_ab")
    ]),
}  # fmt: skip


def list_dataset_files(name: str, rule: str) -> list[HubFile]:
    """The files of a data set, corpus or index by a split rule, questions first. Raises `ConfigError`."""
    if rule not in SPLIT_RULES:
        raise ConfigError(
            f"'{rule}' is none of {', '.join(SPLIT_RULES)}{suggest_nearest(rule, SPLIT_RULES)}"
        )
    if name in CORPORA:
        return [CORPORA[name]]
    if name in INDEXES:
        return INDEXES[name][1]
    known: list[str] = [*(SARDI_SETS if rule == "sardi" else DATASETS), *CORPORA, *INDEXES]
    if name not in known:
        raise ConfigError(
            f"'{name}' is no data set by the split rule {rule}, which has {', '.join(known)}"
            f"{suggest_nearest(name, known)}"
        )
    if rule == "sardi":
        folder, count = SARDI_SETS[name]
        corpus = f"{folder}/corpus/index_chunked/corpus.jsonl"
        return [
            HubFile(SARDI, f"{folder}/test.parquet", count, layout="SARDI"),
            HubFile(SARDI, corpus, None, layout="passages"),
        ]
    return [next(DATASETS[name][split] for split in ("test", "dev", "train") if split in DATASETS[name])]


def get_local_path(file: HubFile, rule: str, folder: str | Path) -> Path:
    """Where what a split rule makes of a file is kept."""
    path = Path(folder) / file.path
    first = rule == "flashrag_1000" and not file.is_corpus
    return path.with_name(f"{path.stem}.first_{FIRST_QUESTIONS}{path.suffix}") if first else path


def find_dataset(name: str, rule: str) -> Path:
    """The questions of a data set, or the passages of a corpus, in `data` below the working folder.

    Raises `ConfigError` where they are not there, or are not what their card says.
    """
    file = list_dataset_files(name, rule)[0]
    path = get_local_path(file, rule, DATA_FOLDER)
    command = f"dlm-rag data get {name}{f' --split {rule}' * (rule != 'search_r1')}"
    if not path.exists():
        raise ConfigError(f"{path} is not there; `{command}` brings it")
    card, size = read_card(path) or {}, path.stat().st_size
    digest = "" if file.is_corpus else digest_like(path)  # a corpus is hashed where it is opened
    if card.get("bytes", size) != size or (digest and card.get("sha256", digest) != digest):
        raise ConfigError(
            f"{path} has changed since its card was written: delete both; `{command}` brings it"
        )
    return path


def find_named_corpus(corpus: str | None) -> str | None:
    """The file of a corpus that is named by a word, unless there is a file of that name; else the name."""
    if corpus is None or corpus not in CORPORA or Path(corpus).exists():
        return corpus
    return str(find_dataset(corpus, "search_r1"))


def get_card_path(path: Path) -> Path:
    """The card beside a file."""
    return path.with_name(f"{path.name}.card.json")


def read_card(path: Path) -> dict[str, Any] | None:
    """What the card beside a file says; None without one. Raises `ConfigError` for a broken one."""
    card = get_card_path(path)
    return parse_json_object(card.read_bytes(), str(card), ConfigError) if card.is_file() else None


def write_card(path: Path, source: dict[str, Any], counts: dict[str, Any]) -> None:
    """Writes the card of a file: its source, its size and digest, what is in it."""
    own = {"bytes": path.stat().st_size, "sha256": digest_like(path)}
    write_text_atomic(get_card_path(path), json.dumps(source | own | counts, indent=2) + "\n")


def digest_like(path: Path, digest: str = "") -> str:
    """The digest of a file, of the kind that `digest` is: git's of 40 digits (SHA-1), else SHA-256."""
    found = hashlib.sha256()
    if len(digest) == 40:
        found = hashlib.sha1(b"blob %d\0" % path.stat().st_size, usedforsecurity=False)
    with path.open("rb") as file:
        return hashlib.file_digest(file, lambda: found).hexdigest()


def join_parts(name: str, folder: Path) -> Path:
    """Makes one file of the parts of an index that were fetched, in the room of the largest more."""
    whole, files = folder / INDEXES[name][0], [folder / file.path for file in INDEXES[name][1]]
    first, *others = files
    with first.open("ab") as joined:
        for part in others:
            with part.open("rb") as file:
                shutil.copyfileobj(file, joined, 1 << 24)
    first.replace(whole)
    for part in files:
        part.unlink(missing_ok=True)
    return whole


def count_contents(path: Path, file: HubFile) -> dict[str, Any]:
    """What is in a file, for its card; of a corpus only the first passage is read.

    Raises `UserError` for a file in another layout.
    """
    if file.is_corpus:
        place, row = next(read_records(path, ConfigError), (str(path), {}))
        if get_field(row, "contents")[1] is None:
            raise ConfigError(f"{place}: there is no passage: the file is in another layout")
        return {"published_passages": file.rows}
    questions, rows = read_questions(path), sum(1 for _ in read_question_records(path))
    if not any(question.golden_answers for question in questions):
        raise ConfigError(f"{path} has no answers: the file is in another layout")
    hops = Counter(str(question.hops) for question in questions)
    return {
        "questions": len(questions),
        "published_questions": file.rows,
        "dropped": {"not answerable": rows - len(questions)},
        "with_answers": sum(bool(q.golden_answers) for q in questions),
        "with_support": sum(bool(q.supporting_ids or q.supporting_titles) for q in questions),
        "hops": dict(sorted(hops.items())),
        "labels": dict(Counter(label for q in questions for label in q.labels)),
    }


def take_first_questions(path: Path, target: Path) -> int:
    """Writes the first lines of a file into another; gives how many lines are left out."""
    with path.open("rb") as file, open_atomic_file(target) as scratch:
        scratch.write_bytes(b"".join(itertools.islice(file, FIRST_QUESTIONS)))
        return sum(1 for _ in file)
