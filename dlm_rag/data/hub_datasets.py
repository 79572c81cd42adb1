"""The field's data sets by name: where each file is, which split is meant, whether a copy here is whole.

Files keep their names in the repositories, below one folder (`data`), each with a card beside it that says
where it is from. Entries are addresses; nothing of a repository but these files is fetched.
"""

import hashlib
import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import NamedTuple

from dlm_rag.errors import ConfigError, suggest_nearest
from dlm_rag.files.checked_json import MAX_SIDECAR_BYTES, parse_json_object, validate_json_value
from dlm_rag.files.paths import read_regular_file, write_text_atomic

DATA_FOLDER = "data"  # below the working folder
SPLIT_RULES = {
    "search_r1": "the test questions, else those of dev, else of train (Search-R1)",
    "flashrag_1000": "the first 1,000 of these (FlashRAG's table)",
    "sardi": "SARDI's own, with their corpus",
}
FIRST_QUESTIONS = 1000  # of flashrag_1000


class HubFile(NamedTuple):
    """A file of a data set repository; rows and bytes as published, None where nothing says."""

    repository: str
    path: str
    rows: int | None
    size: int | None = None
    layout: str = "FlashRAG"  # or SARDI, passages, part of an index
    licence: str = "not said"
    repo_type: str = "dataset"


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
    """Returns the files of a data set, corpus or index, questions first. Raises `ConfigError`."""
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


@dataclass
class Card:
    """The note beside a file: where it is from, and its size and digest."""

    repository: str
    path: str
    revision: str
    licence: str
    bytes: int
    sha256: str
    rule: str | None = None
    questions: int | None = None
    published_questions: int | None = None


def get_local_path(file: HubFile, rule: str, folder: str | Path) -> Path:
    """Returns where what a split rule makes of a file is kept."""
    path = Path(folder) / file.path
    first = rule == "flashrag_1000" and file.layout == "FlashRAG"
    return path.with_name(f"{path.stem}.first_{FIRST_QUESTIONS}{path.suffix}") if first else path


def find_dataset(name: str, rule: str) -> Path:
    """Returns the questions of a data set, or the passages of a corpus, in `data` below the working folder.

    Raises `ConfigError` where they are not there, or are not what their card says.
    """
    file = list_dataset_files(name, rule)[0]
    path = get_local_path(file, rule, DATA_FOLDER)
    command = f"dlm-rag data get {name}{f' --split {rule}' * (rule != 'search_r1')}"
    if not path.exists():
        raise ConfigError(f"{path} is not there; `{command}` brings it")
    if (card := read_card(path)) is not None:
        same = card.bytes == path.stat().st_size  # a corpus is hashed where it is opened
        if not same or (file.layout != "passages" and card.sha256 != digest_like(path)):
            raise ConfigError(
                f"{path} has changed since its card was written: delete both; `{command}` brings it"
            )
    return path


def find_named_corpus(corpus: str | None) -> str | None:
    """Returns the file of a corpus named by a word, unless there is a file of that name; else the name."""
    if corpus is None or corpus not in CORPORA or Path(corpus).exists():
        return corpus
    return str(find_dataset(corpus, "search_r1"))


def get_card_path(path: Path) -> Path:
    """Returns the path of the card beside a file."""
    return path.with_name(f"{path.name}.card.json")


def read_card(path: Path) -> Card | None:
    """Returns the card beside a file; None without one. Raises `ConfigError` for a broken one."""
    card = get_card_path(path)
    if not card.is_symlink() and not card.exists():
        return None
    try:
        said = parse_json_object(read_regular_file(card, MAX_SIDECAR_BYTES), str(card), ConfigError)
    except OSError as error:
        raise ConfigError(f"{card} cannot be read ({error.strerror}): delete it") from None
    return validate_json_value(Card, said, str(card), ConfigError)


def digest_like(path: Path, digest: str = "") -> str:
    """Returns the digest of a file, of the kind that `digest` is: git's of 40 digits, else SHA-256."""
    found = hashlib.sha256()
    if len(digest) == 40:
        found = hashlib.sha1(b"blob %d\0" % path.stat().st_size, usedforsecurity=False)
    with path.open("rb") as file:
        return hashlib.file_digest(file, lambda: found).hexdigest()


def write_card(path: Path, card: Card) -> None:
    """Writes the card of a file."""
    get_card_path(path).unlink(missing_ok=True)  # a link is not written through
    write_text_atomic(get_card_path(path), json.dumps(asdict(card), indent=2) + "\n")
