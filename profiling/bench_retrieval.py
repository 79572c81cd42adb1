"""Recall of BM25, dense and hybrid retrieval on questions with supporting passages.

    python profiling/bench_retrieval.py --questions questions.jsonl --corpus corpus.jsonl \\
        retrieval.dense_model=DIR_OR_HUB_ID

Rows: the question alone; the question with the best passage of that search (`decode.query=feedback`),
and what the two searches find taking turns (`two_rounds`); then the question with every line of `chain`
(or `sub_questions`) that the file has, as an oracle of what a perfect response would add: as one long
query, and part by part, fused by reciprocal ranks or taking turns.
"""

import sys
import time
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.table import Table

from dlm_rag.commands.words import parse
from dlm_rag.errors import ConfigError, QuestionError
from dlm_rag.evaluation.metrics import evidence_recall
from dlm_rag.files.records import read_records
from dlm_rag.program import run
from dlm_rag.questions import Question, read_questions
from dlm_rag.retrieval import load_retriever
from dlm_rag.retrieval.base import CorpusRetriever, Ranking, fuse, take_turns
from dlm_rag.retrieval.query import Query, build_query
from dlm_rag.text import fold


def recalls(rankings: Sequence[Ranking], retriever: CorpusRetriever, questions: Sequence[Question]) -> str:
    """`mean recall / share of questions with all supporting passages`, in percent."""
    found = [
        evidence_recall([retriever.corpus[row].id for row in rows], question.supporting_ids) or 0.0
        for rows, question in zip(rankings, questions, strict=True)
    ]
    whole = sum(value == 1.0 for value in found)
    return f"{100 * sum(found) / len(found):.1f} / {100 * whole / len(found):.1f}"


def by_parts(retriever: CorpusRetriever, parts: list[list[str]], turns: bool) -> list[Ranking]:
    """Every part searched alone; the rankings of a question fused or taking turns."""
    combine = take_turns if turns else fuse
    flat = [Query(part, (part,)) for question in parts for part in question]
    rankings = iter(retriever.rank(flat, 50))
    return [combine([next(rankings) for _ in question], retriever.top_k) for question in parts]


def two_rounds(
    retriever: CorpusRetriever, questions: Sequence[Question], first: Sequence[Ranking]
) -> dict[str, list[Ranking]]:
    """What question and best passage of the search `first` find: alone, and in turn with `first`."""
    best = [retriever.corpus[rows[0]].text if rows else "" for rows in first]
    asked = [
        build_query("two_rounds", q.question, top_passage=b) for q, b in zip(questions, best, strict=True)
    ]
    second = retriever.rank(asked, retriever.top_k)
    merged = [take_turns(both, retriever.top_k) for both in zip(first, second, strict=True)]
    return {"with the best passage, one query": second, "two rounds taking turns": merged}


def main(argv: list[str]) -> None:
    config = parse(__doc__ or "", argv, typed=False).config
    if config.questions is None or config.retrieval.corpus is None:
        raise ConfigError("give --questions and --corpus")
    questions = read_questions(config.questions)
    extra = [row for _, row in read_records(Path(config.questions), QuestionError)]
    table = Table("query", "BM25", "dense", "hybrid", title=f"recall@{config.retrieval.top_k}, in percent")
    columns: dict[str, list[str]] = {}
    for kind in ("bm25", "dense", "hybrid"):
        start = time.perf_counter()
        config.retrieval.kind = kind
        retriever = load_retriever(config.retrieval)
        print(f"{kind}: ready after {time.perf_counter() - start:.1f} s", file=sys.stderr)
        alone = [Query(fold(q.question), (q.question,)) for q in questions]
        first = retriever.rank(alone, retriever.top_k)
        rows = {"question alone": first} | two_rounds(retriever, questions, first)
        for name in ("chain", "sub_questions"):
            parts = [[q.question, *row.get(name, [])] for q, row in zip(questions, extra, strict=True)]
            if not any(len(question) > 1 for question in parts):
                continue
            long = [Query(fold(" ".join(p)), (fold(" ".join(p)),)) for p in parts]
            found = retriever.rank(long, retriever.top_k)
            rows |= {f"with {name}, one long query": found}
            rows |= {f"with {name}, parts fused": by_parts(retriever, parts, turns=False)}
            rows |= {f"with {name}, parts taking turns": by_parts(retriever, parts, turns=True)}
        for label, rankings in rows.items():
            columns.setdefault(label, []).append(recalls(rankings, retriever, questions))
    for label, cells in columns.items():
        table.add_row(label, *cells)
    Console().print(table)


if __name__ == "__main__":
    run(main)
