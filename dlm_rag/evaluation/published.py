"""The table of SARDI's paper (arXiv 2606.06474, table 1): its files, its setting, its figures.

checkpoints/sardi-dream-7b/                             hf download pauljngr/sardi-dream-7b
data/2wikimultihopqa/test.parquet                       hf download pauljngr/sardi-data
data/2wikimultihopqa/corpus/index_chunked/corpus.jsonl  beside a bm25s index; ours is built anew
"""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from dlm_rag.config import CONFIG_FOLDER, Config, load_config
from dlm_rag.errors import ConfigError, nearest
from dlm_rag.evaluation.compare import Estimate
from dlm_rag.evaluation.report import Grid, percent
from dlm_rag.files.jsonl import read_note
from dlm_rag.questions import Question
from dlm_rag.retrieval.corpus import Corpus

CHECKPOINT = "checkpoints/sardi-dream-7b"
WEIGHTS = f"hf download pauljngr/sardi-dream-7b --local-dir {CHECKPOINT}"
DATA = "hf download pauljngr/sardi-data --repo-type dataset --local-dir data"
DTYPE = "bfloat16"
# (query, commit_threshold) of each column of the table.
COLUMNS = {"tau_c 0.9": ("proxy", 0.9), "tau_c 0.95": ("proxy", 0.95), "static": ("question", 0.9)}
INDEX = {"k1": 1.5, "b": 0.75, "method": "lucene"}  # as BM25 scores here, and by bm25s's defaults
# What answers do not depend on, and what stands for itself below.
FREE = {"corpus", "index_folder", "dense_batch_size", "search_memory_gib", "query", "commit_threshold"}


@dataclass(frozen=True)
class Published:
    """A data set: its folder below data/, its questions, exact match in percent as `COLUMNS` has it."""

    folder: str
    questions: int
    exact_match: tuple[float, float, float]


DATASETS = {
    "2wiki": Published("2wikimultihopqa", 6253, (57.8, 59.1, 43.7)),
    "hotpotqa": Published("hotpotqa", 3701, (48.3, 48.7, 39.9)),
    "cofca": Published("cofca", 900, (45.3, 44.9, 43.4)),
    "musique": Published("musique", 2417, (20.5, 20.6, 11.1)),
    "synthworlds": Published("synthworlds/sm", 1200, (21.1, 21.7, 14.4)),
}


def layout(dataset: str, settings: Sequence[str]) -> list[str]:
    """`KEY=VALUE` of the files of a data set.

    settings: those of the command line, which may name another model. Raises `ConfigError` for an unknown
    data set, and for files that are not there.
    """
    if dataset not in DATASETS:
        known = ", ".join(DATASETS)
        raise ConfigError(f"--dataset {dataset} is none of {known}{nearest(dataset, DATASETS)}")
    given = {word.partition("=")[0] for word in settings}
    if both := sorted(given & {"questions", "retrieval.corpus"}):
        raise ConfigError(f"--dataset names questions and corpus: leave {both[0]} out")
    folder = Path("data") / DATASETS[dataset].folder
    files = {
        "questions": folder / "test.parquet",
        "retrieval.corpus": folder / "corpus" / "index_chunked" / "corpus.jsonl",
        "model.path": Path(CHECKPOINT),
    }
    files = {key: path for key, path in files.items() if key not in given}
    for key, path in files.items():
        if not path.exists():
            command = WEIGHTS if key == "model.path" else DATA
            raise ConfigError(f"--dataset {dataset}: {path} is not there; `{command}` brings it")
    return [f"{key}={path}" for key, path in files.items()]


def column_of(config: Config) -> str | None:
    """The column of the table that a setting stands in; None for what is not published."""
    said = (config.decode.query, config.decode.commit_threshold)
    return next((name for name, column in COLUMNS.items() if column == said), None)


def departures(config: Config, dtype: str) -> list[str]:
    """In what a resolved setting leaves the paper's, which is `configs/sardi.yaml`, a text each."""
    paper = load_config(str(CONFIG_FOLDER / "sardi.yaml"))
    ours = _flat(config) | {"model.dtype": dtype}
    found = [
        f"{key}={ours[key]} (paper: {value})"
        for key, value in (_flat(paper) | {"model.dtype": DTYPE}).items()
        if value is not None and ours[key] != value
    ]
    if column_of(config) is None:
        columns = ", ".join(f"{query} {tau}" for query, tau in COLUMNS.values())
        said = f"{config.decode.query} {config.decode.commit_threshold}"
        found.append(f"decode.query and decode.commit_threshold={said} (paper: {columns})")
    if Path(str(config.model.path)).name != Path(CHECKPOINT).name:
        found.append(f"model.path={config.model.path} (paper: {CHECKPOINT})")
    return found


def _flat(config: Config) -> dict[str, Any]:
    return {"model.evidence_layout": config.model.evidence_layout} | {
        f"{section}.{key}": value
        for section in ("retrieval", "decode")
        for key, value in asdict(getattr(config, section)).items()
        if key not in FREE
    }


def check_index(corpus: Corpus) -> list[str]:
    """In what the bm25s index beside a corpus scores otherwise than we do; nothing where there is none.

    Raises `ConfigError` for an index over another number of passages.
    """
    path = corpus.path.with_name("params.index.json")
    said = read_note(path)
    if said.get("num_docs", len(corpus)) != len(corpus):
        raise ConfigError(
            f"{path} is of {said['num_docs']} passages, {corpus.path} has {len(corpus)}: one of them is of "
            "something else"
        )
    return [f"BM25 {key}={value} (paper: {said[key]})" for key, value in INDEX.items()
            if said.get(key, value) != value]  # fmt: skip


def with_known_support(questions: Sequence[Question], corpus: Corpus) -> list[Question]:
    """The questions, without supporting ids of which the corpus, cut anew into passages, lacks some."""
    wanted = {i for question in questions for i in question.supporting_ids}
    there = {passage.id for passage in corpus if passage.id in wanted} if wanted else set()
    return [q if there.issuperset(q.supporting_ids) else replace(q, supporting_ids=()) for q in questions]


def beside(
    dataset: str, matches: Mapping[str, Estimate | None], columns: Mapping[str, str | None], count: int
) -> Grid:
    """Our exact match beside the published one; count: of our questions."""
    published = DATASETS[dataset]
    figures = dict(zip(COLUMNS, published.exact_match, strict=True))
    rows = []
    for name, match in matches.items():
        column = columns[name]
        if column is None or match is None:
            rows.append([name, "-", percent(match), "-", "-"])
            continue
        told = figures[column] / 100
        less = Estimate(match.mean - told, match.low - told, match.high - told)
        rows.append([name, column, percent(match), f"{figures[column]:.1f}", percent(less, signed=True)])
    title = f"{dataset}: exact match % of {count} questions, the paper's of {published.questions}"
    return Grid(title, ["setting", "the paper's", "here", "published", "here above it"], rows)
