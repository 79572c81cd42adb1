"""Published figures; and the table of SARDI's paper (arXiv 2606.06474, table 1): its files, its setting.

data/2wikimultihopqa/test.parquet                       dlm-rag data get 2wiki --split sardi
data/2wikimultihopqa/corpus/index_chunked/corpus.jsonl  a bm25s index is beside it; ours is built again
"""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, NamedTuple

import yaml

from dlm_rag.config import CONFIG_FOLDER, Config, load_config
from dlm_rag.data.hub_datasets import SARDI_SETS
from dlm_rag.errors import ConfigError, suggest_nearest
from dlm_rag.evaluation.metrics import Estimate
from dlm_rag.evaluation.tables import ResultTable, format_metric
from dlm_rag.questions import Question
from dlm_rag.retrieval.corpus import Corpus

PAPER_CHECKPOINT = "pauljngr/sardi-dream-7b"
PAPER_DTYPE = "bfloat16"
# (query, commit_threshold) of each column of the table.
PAPER_COLUMNS = {"tau_c 0.9": ("proxy", 0.9), "tau_c 0.95": ("proxy", 0.95), "static": ("question", 0.9)}
# What answers do not depend on, and what stands for itself below.
UNCOMPARED_SETTINGS = {"corpus", "index_dir", "embedding_batch_size", "query_policy", "commit_threshold"}


class PublishedFigures(NamedTuple):
    """A published table: percent of a metric, by method a figure for each of the data sets.

    under: the questions, model, passages and retriever that they hold for.
    """

    source: str
    metric: str
    under: str
    datasets: list[str]
    rows: dict[str, list[float]]


def read_published_figures() -> list[PublishedFigures]:
    """All that are known, SARDI's first."""
    text = Path(__file__).with_name("published_figures.yaml").read_text(encoding="utf-8")
    return [PublishedFigures(**table) for table in yaml.safe_load(text)]


class PublishedDataset(NamedTuple):
    """A data set: folder in data/, number of questions, exact match in percent by `PAPER_COLUMNS`."""

    folder: str
    questions: int
    exact_match: Sequence[float]


_SARDI = read_published_figures()[0]
PUBLISHED_DATASETS = {
    name: PublishedDataset(*SARDI_SETS[name], figures)
    for name, *figures in zip(_SARDI.datasets, *_SARDI.rows.values(), strict=True)
}


def resolve_dataset_files(dataset: str, settings: Sequence[str]) -> list[str]:
    """`KEY=VALUE` of the files of a data set.

    settings: those of the command line, which may name another model. Raises `ConfigError` for an unknown
    data set, and for files that are not there.
    """
    if dataset not in PUBLISHED_DATASETS:
        known = ", ".join(PUBLISHED_DATASETS)
        raise ConfigError(
            f"--dataset {dataset} is not one of {known}{suggest_nearest(dataset, PUBLISHED_DATASETS)}"
        )
    given = {word.partition("=")[0] for word in settings}
    if both := sorted(given & {"questions", "retrieval.corpus"}):
        raise ConfigError(f"--dataset names questions and corpus: leave {both[0]} out")
    folder = Path("data") / PUBLISHED_DATASETS[dataset].folder
    files = {
        "questions": folder / "test.parquet",
        "retrieval.corpus": folder / "corpus" / "index_chunked" / "corpus.jsonl",
    }
    for path in files.values():
        if not path.exists():
            command = f"dlm-rag data get {dataset} --split sardi"
            raise ConfigError(f"--dataset {dataset}: {path} is not there; `{command}` brings it")
    return [f"{key}={path}" for key, path in files.items()]


def find_paper_column(config: Config) -> str | None:
    """The column of the table that a setting belongs to; None if it is not published."""
    said = (config.decode.query_policy, config.decode.commit_threshold)
    return next((name for name, column in PAPER_COLUMNS.items() if column == said), None)


def list_paper_deviations(config: Config, dtype: str) -> list[str]:
    """In what a resolved setting leaves the paper's, which is `configs/sardi.yaml`, a text each."""
    paper = load_config(str(CONFIG_FOLDER / "sardi.yaml"))
    ours, theirs = _flatten_settings(config, dtype), _flatten_settings(paper, PAPER_DTYPE)
    differing = {key: value for key, value in theirs.items() if value is not None and ours[key] != value}
    found = [f"{key}={ours[key]} (paper: {value})" for key, value in differing.items()]
    if find_paper_column(config) is None:
        columns = ", ".join(f"{query} {tau}" for query, tau in PAPER_COLUMNS.values())
        said = f"{config.decode.query_policy} {config.decode.commit_threshold}"
        found.append(f"decode.query_policy and decode.commit_threshold={said} (paper: {columns})")
    if Path(str(config.model.path)).name != Path(PAPER_CHECKPOINT).name:
        found.append(f"model.path={config.model.path} (paper: {PAPER_CHECKPOINT})")
    return found


def _flatten_settings(config: Config, dtype: str) -> dict[str, Any]:
    found: dict[str, Any] = {"model.evidence_layout": config.model.evidence_layout}
    for section in ("retrieval", "decode"):
        values = asdict(getattr(config, section))
        found |= {
            f"{section}.{key}": value for key, value in values.items() if key not in UNCOMPARED_SETTINGS
        }
    return found | {"model.dtype": dtype}


def drop_incomplete_support(questions: Sequence[Question], corpus: Corpus) -> list[Question]:
    """The questions; supporting ids are dropped if the corpus, chunked again, has not all of them."""
    wanted = {i for question in questions for i in question.supporting_ids}
    there = {passage.id for passage in corpus if passage.id in wanted} if wanted else set()
    return [q if there.issuperset(q.supporting_ids) else replace(q, supporting_ids=()) for q in questions]


def build_paper_table(
    dataset: str, matches: Mapping[str, Estimate | None], columns: Mapping[str, str | None], count: int
) -> ResultTable:
    """Our exact match and the published one; count: of our questions."""
    published = PUBLISHED_DATASETS[dataset]
    figures = dict(zip(PAPER_COLUMNS, published.exact_match, strict=True))
    rows = []
    for name, match in matches.items():
        column, cells = columns[name], ["-", "-"]
        if column is not None and match is not None:
            paper = figures[column] / 100
            less = Estimate(match.mean - paper, match.low - paper, match.high - paper)
            cells = [f"{figures[column]:.1f}", format_metric("exact_match", less, signed=True)]
        rows.append(
            [name, column if match and column else "-", format_metric("exact_match", match), *cells]
        )
    title = f"{dataset}: exact match % of {count} questions, the paper's of {published.questions}"
    return ResultTable(title, ["setting", "the paper's", "here", "published", "here above it"], rows)
