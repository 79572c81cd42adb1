"""Recall of BM25, dense and hybrid retrieval on questions with supporting passages.

    python profiling/bench_retrieval.py --questions questions.jsonl --corpus corpus.jsonl \\
        retrieval.embedding_model=DIR_OR_HUB_ID

Rows: the question alone; the question with the best passage of that search
(`decode.query_policy=feedback`), and what the two searches find taking turns (`two_rounds`); then the
question with every line of `chain` (or `sub_questions`) that the file has, as an oracle of what a perfect
response would add: as one long query, and part by part, fused by reciprocal ranks or taking turns.
"""

import re
import sys
import time
from collections.abc import Sequence
from functools import partial

from rich.console import Console
from rich.table import Table

from dlm_rag.cli import run_program
from dlm_rag.commands.cli_args import parse_command_line
from dlm_rag.errors import ConfigError, QuestionError, suggest_nearest
from dlm_rag.evaluation.metrics import compute_evidence_recall
from dlm_rag.questions import Question, read_question_records, read_questions
from dlm_rag.retrieval import load_retriever
from dlm_rag.retrieval.base import CorpusRetriever, Ranking, fuse_rankings, interleave_rankings
from dlm_rag.retrieval.corpus import open_corpus
from dlm_rag.retrieval.query import Query, build_query
from dlm_rag.synthesis.sentences import split_sentences
from dlm_rag.text import find_answer_span, normalize_whitespace

RETRIEVAL_KINDS = ("bm25", "dense", "hybrid")


def format_recalls(
    rankings: Sequence[Ranking], retriever: CorpusRetriever, questions: Sequence[Question]
) -> str:
    """`mean recall / share of questions with all supporting passages`, in percent."""
    found = [
        compute_evidence_recall([retriever.corpus[row].id for row in rows], question.supporting_ids) or 0.0
        for rows, question in zip(rankings, questions, strict=True)
    ]
    whole = sum(value == 1.0 for value in found)
    return f"{100 * sum(found) / len(found):.1f} / {100 * whole / len(found):.1f}"


def search_by_parts(retriever: CorpusRetriever, parts: list[list[str]], turns: bool) -> list[Ranking]:
    """Every part searched alone; the rankings of a question fused or taking turns."""
    combine = interleave_rankings if turns else partial(fuse_rankings, fusion_depth=50)
    flat = [Query(part, (part,)) for question in parts for part in question]
    rankings = iter(retriever.rank(flat, 50))
    return [combine([next(rankings) for _ in question], retriever.top_k) for question in parts]


def search_two_rounds(
    retriever: CorpusRetriever, questions: Sequence[Question], first: Sequence[Ranking]
) -> dict[str, list[Ranking]]:
    """What question and best passage of the search `first` find: alone, and in turn with `first`."""
    best = [retriever.corpus[rows[0]].text if rows else "" for rows in first]
    asked = [
        build_query("two_rounds", q.question, top_passage=b) for q, b in zip(questions, best, strict=True)
    ]
    second = retriever.rank(asked, retriever.top_k)
    merged = [interleave_rankings(both, retriever.top_k) for both in zip(first, second, strict=True)]
    return {"with the best passage, one query": second, "two rounds taking turns": merged}


def oracle_response_parts(question: Question) -> dict[str, list[str]]:
    """What stands of a response when its last sentence is needed, and then with that one begun.

    Begun is what stands before the answer in it, up to a bracket or comma: "Kasthuri Raja" of "Kasthuri
    Raja (born 1960) is an Indian director.", with " is a" behind it, for no more could be guessed.
    """
    response = question.response or ""
    start, stop = find_answer_span(response)
    *said, last = split_sentences(response[:start].removesuffix("### "))
    begun = re.split(r"[(,]", last.partition(response[start:stop])[0])[0].strip()
    begun = begun if begun.endswith((" is", " was", " are", " were")) else f"{begun} is"
    return {"all sentences but the last": said, "the last one begun": [*said, f"{begun} a"]}


def rank_table_rows(
    retriever: CorpusRetriever, questions: Sequence[Question], added: dict[str, list[list[str]]]
) -> dict[str, list[Ranking]]:
    """The rankings of every row of the table; added: by a name, what stands beside each question."""
    alone = [Query(normalize_whitespace(q.question), (q.question,)) for q in questions]
    first = retriever.rank(alone, retriever.top_k)
    rows = {"question alone": first} | search_two_rounds(retriever, questions, first)
    for name, lines in added.items():
        parts = [[q.question, *more] for q, more in zip(questions, lines, strict=True)]
        long = [
            Query(normalize_whitespace(" ".join(p)), (normalize_whitespace(" ".join(p)),)) for p in parts
        ]
        rows |= {f"with {name}, one long query": retriever.rank(long, retriever.top_k)}
        rows |= {f"with {name}, parts fused": search_by_parts(retriever, parts, turns=False)}
        rows |= {f"with {name}, parts taking turns": search_by_parts(retriever, parts, turns=True)}
    return rows


def main(argv: list[str]) -> None:
    options: dict[str, tuple[str | int, str]] = {
        "kinds": ("bm25,dense,hybrid", "ways of retrieval.method, a column each"),
        "hops": (0, "only questions of so many hops; 0: all"),
    }
    words = parse_command_line(__doc__ or "", argv, typed=False, options=options)
    config, hops, kinds = words.config, words.options["hops"], words.options["kinds"].split(",")
    if config.questions is None or config.retrieval.corpus is None:
        raise ConfigError("give --questions and --corpus")
    for kind in kinds:
        if kind not in RETRIEVAL_KINDS:
            raise ConfigError(
                f"--kinds: '{kind}' is none of "
                f"{', '.join(RETRIEVAL_KINDS)}{suggest_nearest(kind, RETRIEVAL_KINDS)}"
            )
    questions, extra = (
        read_questions(config.questions),
        [row for _, row in read_question_records(config.questions)],
    )
    kept = [n for n, question in enumerate(questions) if hops in (0, question.hops)]
    if not kept:
        raise QuestionError(f"{config.questions} has no question of {hops} hops")
    questions, extra = [questions[n] for n in kept], [extra[n] for n in kept]
    added = {
        name: [row.get(name, []) for row in extra]
        for name in ("chain", "sub_questions")
        if any(row.get(name) for row in extra)
    }
    if all(question.response for question in questions):
        responses = [oracle_response_parts(question) for question in questions]
        added |= {name: [each[name] for each in responses] for name in responses[0]}
    top = config.retrieval.top_k
    table = Table("query", *kinds, title=f"recall@{top} of {len(questions):,} questions, in percent")
    corpus = open_corpus(config.retrieval.corpus, config.retrieval.index_dir)
    columns: dict[str, list[str]] = {}
    for kind in kinds:
        start = time.perf_counter()
        config.retrieval.method = kind
        retriever = load_retriever(config.retrieval, corpus)
        print(f"{kind}: ready after {time.perf_counter() - start:.1f} s", file=sys.stderr)
        for label, rankings in rank_table_rows(retriever, questions, added).items():
            columns.setdefault(label, []).append(format_recalls(rankings, retriever, questions))
    for label, cells in columns.items():
        table.add_row(label, *cells)
    Console().print(table)


if __name__ == "__main__":
    run_program(main)
