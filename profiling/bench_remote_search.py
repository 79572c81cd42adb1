"""What search by URL costs: the shipped model's questions, searched here and over the network.

    python profiling/bench_remote_search.py    # 400 questions, here and by a server of ours
    python profiling/bench_remote_search.py --limit 40 --rounds 1     # a quick look
    python profiling/bench_remote_search.py http://HOST:8000/retrieve milvus://HOST:19530/world  # and these

The server is a process of its own on this machine (`dlm-rag retrieve-server`); URLs must lead to the
passages of the shipped world (dlm_rag/shipped/world/corpus.jsonl). Every way answers all questions once a
round, in an order that turns; seconds are medians over the rounds. `searching` is the share of the time of
all stages that rows wait for evidence: with overlap=none all of a search, with pipeline what of it the
denoising of the other half does not cover. `equal` counts the answers with the same queries, passages and
tokens at every step as by a local search without overlap.
Expectation: a batch of searches costs a round trip and what JSON of some 100 passages takes.
"""

import socket
import subprocess
import sys
import time
from collections.abc import Hashable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from statistics import median
from typing import Any

from rich.console import Console
from rich.table import Table

from dlm_rag.cli import CommandParser, parse_int, print_note, run_program
from dlm_rag.commands.startup import SHIPPED_FOLDER
from dlm_rag.decode.rollout import Rollout
from dlm_rag.decode.terminal import RunTotals
from dlm_rag.errors import RunError
from dlm_rag.questions import Question, read_questions
from dlm_rag.retrieval.base import Retriever
from dlm_rag.retrieval.corpus import Passage
from dlm_rag.retrieval.query import Query

CORPUS, TOP_K = SHIPPED_FOLDER / "world" / "corpus.jsonl", 7
OVERLAPS = ("none", "pipeline")


class TimedRetriever:
    """A retriever, with what its searches took."""

    def __init__(self, inner: Retriever) -> None:
        self.inner, self.seconds, self.queries = inner, list[float](), 0

    @property
    def fingerprint(self) -> str:
        return self.inner.fingerprint

    def key(self, query: Query) -> Hashable:
        return self.inner.key(query)

    def forget(self, asker: str) -> None:
        self.inner.forget(asker)

    def search(self, queries: Sequence[Query]) -> list[list[Passage]]:
        start = time.perf_counter()
        found = self.inner.search(queries)
        self.seconds.append(time.perf_counter() - start)
        self.queries += len(queries)
        return found


@dataclass
class SearchSetup:
    """Where to search and with which overlap, and what was measured of that."""

    name: str
    overlap: str
    retriever: TimedRetriever
    wall: list[float] = field(default_factory=list)
    share: list[float] = field(default_factory=list)
    answers: list[Any] = field(default_factory=list)

    def measure_round(self, questions: list[Question], batch: int, parts: tuple[Any, Any]) -> None:
        """Answers all questions; raises `RunError` where one fails."""
        from dlm_rag import Decoder
        from dlm_rag.config import DecodeConfig

        denoiser, tokenizer = parts
        settings = DecodeConfig(batch_size=batch, overlap=self.overlap)
        decoder, tally = Decoder(denoiser, self.retriever, tokenizer, settings), RunTotals()
        start, self.answers = time.perf_counter(), []
        for rollout in decoder.stream(questions):
            if rollout.error:
                raise RunError(f"{self.name}: question '{rollout.id}' failed: {rollout.error}")
            tally.add(rollout)
            self.answers.append(comparable_answer(rollout))
        self.wall.append(time.perf_counter() - start)
        self.share.append(tally.seconds["retrieve"] / sum(tally.seconds.values()))
        self.answers.sort(key=lambda answer: answer[0])

    def format_cells(self, first: "SearchSetup") -> list[str]:
        equal = sum(mine == theirs for mine, theirs in zip(self.answers, first.answers, strict=True))
        searches, seconds = len(self.retriever.seconds), median(self.wall)
        return [
            self.name, self.overlap, f"{seconds:.1f}", f"{seconds / median(first.wall) - 1:+.1%}",
            f"{median(self.share):.1%}", f"{1e3 * median(self.retriever.seconds):.1f}",
            f"{self.retriever.queries / searches:.1f}", f"{equal} of {len(self.answers)}",
        ]  # fmt: skip


def comparable_answer(rollout: Rollout) -> tuple[Any, ...]:
    """What must be equal of two answers; not confidences, whose last digit the size of a batch decides."""
    steps = [
        (step.query, step.passage_ids, [(token.position, token.token_id) for token in step.committed])
        for step in rollout.steps
    ]
    return rollout.id, rollout.response, steps, rollout.passages


@contextmanager
def run_local_server() -> Iterator[str]:
    """A process that serves the shipped world; gives its URL."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = str(free.getsockname()[1])
    words = ["retrieve-server", "--corpus", str(CORPUS), "--port", port]
    process = subprocess.Popen([sys.executable, "-m", "dlm_rag", *words], stderr=subprocess.PIPE, text=True)
    assert process.stderr is not None
    try:
        for line in process.stderr:
            if "are searched at " in line:
                yield f"http://127.0.0.1:{port}/retrieve"
                return
        raise RunError("the server ended before it served")
    finally:
        process.terminate()
        process.wait()


def main(argv: list[str]) -> None:
    parser = CommandParser(__doc__ or "")
    parser.add_argument("urls", nargs="*", metavar="URL", help="services that search the shipped world")
    for name, default in {"limit": 400, "rounds": 3, "batch": 16}.items():
        parser.add_argument(f"--{name}", default=str(default), help=f"default {default}")
    given = parser.parse_args(argv)
    limit, rounds, batch = (
        parse_int(getattr(given, name), 1, f"--{name} ") for name in ("limit", "rounds", "batch")
    )
    from dlm_rag import Denoiser, Tokenizer, load_retriever

    questions = read_questions(str(SHIPPED_FOLDER / "world" / "questions.jsonl"))[:limit]
    with run_local_server() as url:
        retrievers: dict[str, Retriever] = {"here": load_retriever(CORPUS, top_k=TOP_K)}
        for name in (url, *given.urls):
            retrievers[name] = load_retriever(url=name, top_k=TOP_K)
        parts = (
            Denoiser.from_pretrained(SHIPPED_FOLDER / "model"),
            Tokenizer.from_pretrained(SHIPPED_FOLDER / "model"),
        )
        ways = [
            SearchSetup(name, overlap, TimedRetriever(retriever))
            for name, retriever in retrievers.items()
            for overlap in OVERLAPS
        ]
        for way in ways:  # what is compiled and cached at first use
            SearchSetup(way.name, way.overlap, TimedRetriever(way.retriever.inner)).measure_round(
                questions[:batch], batch, parts
            )
        for number in range(rounds):
            for way in ways[number % len(ways) :] + ways[: number % len(ways)]:
                way.measure_round(questions, batch, parts)
                print_note(f"{way.name}, overlap={way.overlap}: {way.wall[-1]:.1f} s")
    table = Table(
        "searched", "overlap", "seconds", "more than here", "searching", "ms a batch", "queries a batch",
        "equal",
        title=f"{len(questions)} questions, batch {batch}, rounds: {rounds}",
    )  # fmt: skip
    for way in ways:
        table.add_row(*way.format_cells(ways[0]))
    Console(file=sys.stdout, width=140).print(table)


if __name__ == "__main__":
    run_program(main)
