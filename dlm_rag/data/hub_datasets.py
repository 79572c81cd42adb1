"""The field's data sets by name: where each file is, and which split is meant.

Files keep their names in the repositories, below one folder (`data`). Nothing of a repository but these
files is fetched.
"""

from pathlib import Path
from typing import NamedTuple

from dlm_rag.errors import ConfigError, suggest_nearest

DATA_FOLDER = "data"  # below the working folder
SPLIT_RULES = {
    "search_r1": "the test questions, else those of dev, else of train (Search-R1)",
    "flashrag_1000": "the first 1,000 of these (FlashRAG's table)",
    "sardi": "SARDI's own, with their corpus",
}
FIRST_QUESTIONS = 1000  # of flashrag_1000
FLASHRAG, SARDI = "RUC-NLPIR/FlashRAG_datasets", "pauljngr/sardi-data"


class HubFile(NamedTuple):
    """A file of a data set repository; rows as published, None where nothing says.

    layout: FlashRAG, SARDI, passages or part of an index.
    """

    name: str
    repository: str
    path: str
    rows: int | None
    layout: str
    licence: str = "not said"


FILES = [
    HubFile("hotpotqa", FLASHRAG, "hotpotqa/dev.jsonl", 7405, "FlashRAG", "cc-by-sa-4.0"),
    HubFile("2wiki", FLASHRAG, "2wikimultihopqa/dev.jsonl", 12576, "FlashRAG", "cc-by-sa-4.0"),
    HubFile("musique", FLASHRAG, "musique/dev.jsonl", 2417, "FlashRAG", "cc-by-sa-4.0"),
    HubFile("bamboogle", FLASHRAG, "bamboogle/test.jsonl", 125, "FlashRAG", "cc-by-sa-4.0"),
    HubFile("nq", FLASHRAG, "nq/test.jsonl", 3610, "FlashRAG", "cc-by-sa-4.0"),
    HubFile("popqa", FLASHRAG, "popqa/test.jsonl", 14267, "FlashRAG", "cc-by-sa-4.0"),
    HubFile("triviaqa", FLASHRAG, "triviaqa/test.jsonl", 11313, "FlashRAG", "cc-by-sa-4.0"),
    HubFile("2wiki", SARDI, "2wikimultihopqa/test.parquet", 6253, "SARDI"),
    HubFile("hotpotqa", SARDI, "hotpotqa/test.parquet", 3701, "SARDI"),
    HubFile("cofca", SARDI, "cofca/test.parquet", 900, "SARDI"),
    HubFile("musique", SARDI, "musique/test.parquet", 2417, "SARDI"),
    HubFile("synthworlds", SARDI, "synthworlds/sm/test.parquet", 1200, "SARDI"),
    HubFile("wiki18", "PeterJinGo/wiki-18-corpus", "wiki-18.jsonl.gz", 21_015_324, "passages"),
    HubFile("wiki18_e5", "PeterJinGo/wiki-18-e5-index", "part_aa", None, "part of an index"),
    HubFile("wiki18_e5", "PeterJinGo/wiki-18-e5-index", "part_ab", None, "part of an index"),
]
SARDI_SETS = [file.name for file in FILES if file.layout == "SARDI"]
CORPORA = [file.name for file in FILES if file.layout == "passages"]
INDEXES = {"wiki18_e5": "e5_Flat.index"}  # the file that the parts are joined to, in their order


def list_dataset_files(name: str, rule: str) -> list[HubFile]:
    """Returns the files of a data set, corpus or index, questions first. Raises `ConfigError`."""
    if rule not in SPLIT_RULES:
        raise ConfigError(
            f"'{rule}' is none of {', '.join(SPLIT_RULES)}{suggest_nearest(rule, SPLIT_RULES)}"
        )
    other = "FlashRAG" if rule == "sardi" else "SARDI"
    known = [file for file in FILES if file.layout != other]
    found = [file for file in known if file.name == name]
    if not found:
        names = list(dict.fromkeys(file.name for file in known))
        raise ConfigError(
            f"'{name}' is no data set by the split rule {rule}, which has {', '.join(names)}"
            f"{suggest_nearest(name, names)}"
        )
    if found[0].layout == "SARDI":
        corpus = f"{Path(found[0].path).parent}/corpus/index_chunked/corpus.jsonl"
        found.append(HubFile(name, SARDI, corpus, None, "passages"))
    return found


def get_local_path(file: HubFile, rule: str, folder: str | Path) -> Path:
    """Returns where what a split rule makes of a file is kept."""
    path = Path(folder) / file.path
    first = rule == "flashrag_1000" and file.layout == "FlashRAG"
    return path.with_name(f"{path.stem}.first_{FIRST_QUESTIONS}{path.suffix}") if first else path


def find_dataset(name: str, rule: str) -> Path:
    """Returns the questions of a data set, or the passages of a corpus, in `data` below the working folder.

    Raises `ConfigError` where they are not there.
    """
    path = get_local_path(list_dataset_files(name, rule)[0], rule, DATA_FOLDER)
    if not path.exists():
        command = f"dlm-rag data get {name}{f' --split {rule}' * (rule != 'search_r1')}"
        raise ConfigError(f"{path} is not there; `{command}` brings it")
    return path


def find_named_corpus(corpus: str | None) -> str | None:
    """Returns the file of a corpus named by a word, unless there is a file of that name; else the name."""
    if corpus is None or corpus not in CORPORA or Path(corpus).exists():
        return corpus
    return str(find_dataset(corpus, "search_r1"))
