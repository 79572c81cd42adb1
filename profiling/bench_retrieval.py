"""Retrieval: recall by method, what search by URL costs, what an index of many passages takes.

    python profiling/bench_retrieval.py recall --questions questions.jsonl --corpus corpus.jsonl \\
        retrieval.embedding_model=DIR_OR_HUB_ID
    python profiling/bench_retrieval.py remote [URL ...] [--limit 40] [--rounds 1]
    python profiling/bench_retrieval.py index FOLDER [--passages 1000000] [--seed 0] [--reference]

recall: `recall@k / questions with all supporting passages`, in percent, of BM25, dense and hybrid search:
for the question alone; the question with the best passage found (`feedback`), and both searches taking
turns (`two_rounds`); the question with every line of `chain` or `sub_questions` that the file has (what a
perfect response would add), as one long query, and part by part.
remote: the shipped model's questions, searched here, over `dlm-rag retrieve-server` on this machine, and at
each URL, which must serve dlm_rag/shipped/world/corpus.jsonl. `searching` is the share of all stages that
rows wait for evidence; `equal` counts answers with the queries, passages and tokens of a local search.
index: BM25 over invented passages of 100 words, kept in FOLDER: `dlm-rag index` from outside (memory is the
sum of PSS of all its processes, and what of it is no file), then queries of 20 words of a passage, warm.
--reference: how many of 500 rankings and their scores are those of bm25s's own index, built in memory.
"""

import resource
import shutil
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
from bench_tools import TableRow, print_table, rotate, run_server, run_subcommand
from bm25s.stopwords import STOPWORDS_EN

from dlm_rag.cli import CommandParser, parse_int, print_note, run_program
from dlm_rag.commands.arguments import parse_command_line
from dlm_rag.commands.prepare_decoder import SHIPPED_FOLDER
from dlm_rag.config import RetrievalConfig
from dlm_rag.decode.rollout import Rollout
from dlm_rag.decode.terminal import RunTotals
from dlm_rag.errors import ConfigError, QuestionError, RunError, suggest_nearest
from dlm_rag.evaluation.metrics import compute_support_recall
from dlm_rag.questions import Question, read_question_records, read_questions
from dlm_rag.retrieval import load_retriever
from dlm_rag.retrieval.base import (
    CorpusRetriever,
    Query,
    Ranking,
    build_query,
    fuse_rankings,
    interleave_rankings,
)
from dlm_rag.retrieval.bm25 import extract_terms
from dlm_rag.retrieval.corpus import open_corpus
from dlm_rag.text import normalize_whitespace

VOCABULARY, PASSAGE_WORDS, QUERY_WORDS = 5_000_000, 100, 20  # of invented passages
SYLLABLES = [consonant + vowel for consonant in "bdfgklmnprstvz" for vowel in "aeiou"]
METHODS = ("bm25", "dense", "hybrid")
CORPUS, TOP_K = SHIPPED_FOLDER / "world" / "corpus.jsonl", 7


def measure_recall(argv: list[str]) -> None:
    options: dict[str, tuple[str | int, str]] = {
        "kinds": (",".join(METHODS), "values of retrieval.method, a column each"),
        "hops": (0, "only questions of so many hops; 0: all"),
    }
    words = parse_command_line(__doc__ or "", argv, typed=False, options=options)
    config, hops, kinds = words.config, words.options["hops"], words.options["kinds"].split(",")
    if config.questions is None or config.retrieval.corpus is None:
        raise ConfigError("give --questions and --corpus")
    for kind in kinds:
        if kind not in METHODS:
            known = ", ".join(METHODS)
            raise ConfigError(f"--kinds: '{kind}' is none of {known}{suggest_nearest(kind, METHODS)}")
    records = dict(read_question_records(config.questions))  # also of questions that have no answer
    asked = [
        (question, records[question.place])
        for question in read_questions(config.questions)
        if hops in (0, question.hops) and (question.supporting_ids or question.supporting_titles)
    ]
    if not asked:
        kind = f"of {hops} hops " if hops else ""
        raise QuestionError(f"{config.questions} has no question {kind}that names its passages")
    questions = [question for question, _ in asked]
    added = {
        name: [row.get(name, []) for _, row in asked]
        for name in ("chain", "sub_questions")
        if any(row.get(name) for _, row in asked)
    }
    corpus = open_corpus(config.retrieval.corpus, config.retrieval.index_dir)
    rows: dict[str, TableRow] = {}
    for kind in kinds:
        start = time.perf_counter()
        config.retrieval.method = kind
        retriever = load_retriever(config.retrieval, corpus)
        print_note(f"{kind}: ready after {time.perf_counter() - start:.1f} s")
        for label, rankings in rank_queries(retriever, questions, added).items():
            row = rows.setdefault(label, {"query": label})
            row[kind] = format_recalls(rankings, retriever, questions)
    title = f"recall@{config.retrieval.top_k} of {len(questions):,} questions, in percent"
    print_table([*rows.values()], title)


def rank_queries(
    retriever: CorpusRetriever, questions: Sequence[Question], added: dict[str, list[list[str]]]
) -> dict[str, list[Ranking]]:
    """The rankings of every row of the table; added: by name, the lines that each question also gets."""
    take_turns, k = interleave_rankings, retriever.top_k
    first = retriever.rank([Query(normalize_whitespace(q.question), (q.question,)) for q in questions], k)
    best = [retriever.corpus[rows[0]].text if rows else "" for rows in first]
    pairs = zip(questions, best, strict=True)
    second = retriever.rank([build_query("two_rounds", q.question, top_passage=b) for q, b in pairs], k)
    rows = {
        "question alone": first,
        "with the best passage, one query": second,
        "two rounds taking turns": [take_turns(both, k) for both in zip(first, second, strict=True)],
    }
    for name, lines in added.items():
        parts = [[q.question, *more] for q, more in zip(questions, lines, strict=True)]
        long = [normalize_whitespace(" ".join(texts)) for texts in parts]
        rows[f"with {name}, one long query"] = retriever.rank([Query(t, (t,)) for t in long], k)
        found = iter(retriever.rank([Query(p, (p,)) for texts in parts for p in texts], 50))
        ranked = [[next(found) for _ in texts] for texts in parts]
        rows[f"with {name}, parts fused"] = [fuse_rankings(r, k, fusion_depth=50) for r in ranked]
        rows[f"with {name}, parts taking turns"] = [take_turns(r, k) for r in ranked]
    return rows


def format_recalls(
    rankings: Sequence[Ranking], retriever: CorpusRetriever, questions: Sequence[Question]
) -> str:
    """`mean recall / share of questions with all supporting passages`, in percent."""
    found = [
        compute_support_recall([p.id for p in passages], {p.id: p.text for p in passages}, question) or 0.0
        for passages, question in zip(map(retriever.corpus.read_passages, rankings), questions, strict=True)
    ]
    return f"{100 * np.mean(found):.1f} / {100 * np.mean([value == 1 for value in found]):.1f}"


def measure_remote_search(argv: list[str]) -> None:
    parser = CommandParser(__doc__ or "")
    parser.add_argument("urls", nargs="*", metavar="URL", help="services that search the shipped world")
    for name, default in {"limit": 400, "rounds": 3, "batch": 16}.items():
        parser.add_argument(f"--{name}", default=str(default), help=f"default {default}")
    given = parser.parse_args(argv)
    limit, rounds, batch = (
        parse_int(getattr(given, name), 1, f"--{name} ") for name in ("limit", "rounds", "batch")
    )
    from dlm_rag import Decoder, Denoiser, Tokenizer
    from dlm_rag.config import DecodeConfig

    questions = read_questions(str(SHIPPED_FOLDER / "world" / "questions.jsonl"))[:limit]
    model = Denoiser.from_pretrained(SHIPPED_FOLDER / "model")
    tokenizer = Tokenizer.from_pretrained(SHIPPED_FOLDER / "model")
    found: dict[tuple[str, str], list[tuple[float, float, Any]]] = {}
    words = ["retrieve-server", "--corpus", str(CORPUS)]
    with run_server(words, "are searched at ") as (address, _):
        url = f"http://{address}/retrieve"
        retrievers: dict[str, Any] = {"here": load_retriever(CORPUS, top_k=TOP_K)}
        retrievers |= {name: load_retriever(url=name, top_k=TOP_K) for name in (url, *given.urls)}
        ways = [(name, overlap) for name in retrievers for overlap in ("none", "pipeline")]
        for number in range(-1, rounds):  # the first round warms up
            for name, overlap in rotate(ways, max(0, number)):
                settings = DecodeConfig(batch_size=batch, overlap=overlap)
                decoder = Decoder(model, retrievers[name], tokenizer, settings)
                line = answer_questions(decoder, questions if number >= 0 else questions[:batch])
                if number >= 0:
                    found.setdefault((name, overlap), []).append(line)
                    print_note(f"{name}, overlap={overlap}: {line[0]:.1f} s")
    rows, plain, first = [], median(line[0] for line in found[ways[0]]), found[ways[0]][-1][2]
    for way in ways:
        seconds, share = (median(line[n] for line in found[way]) for n in (0, 1))
        equal = sum(mine == theirs for mine, theirs in zip(found[way][-1][2], first, strict=True))
        rows.append({
            "searched": way[0], "overlap": way[1], "seconds": seconds,
            "more than here": f"{seconds / plain - 1:+.1%}", "searching": f"{share:.1%}",
            "equal": f"{equal} of {len(first)}",
        })  # fmt: skip
    print_table(rows, f"{len(questions)} questions, batch {batch}, rounds: {rounds}")


def answer_questions(decoder: Any, questions: list[Question]) -> tuple[float, float, list[Any]]:
    """Seconds, the share of searching, the answers to compare; raises `RunError` where one fails."""
    totals, answers, start = RunTotals(), [], time.perf_counter()
    for rollout in decoder.stream(questions):
        if rollout.error:
            raise RunError(f"question '{rollout.id}' failed: {rollout.error}")
        totals.add(rollout)
        answers.append(comparable_answer(rollout))
    seconds = time.perf_counter() - start
    share = totals.seconds["retrieve"] / sum(totals.seconds.values())
    return seconds, share, sorted(answers, key=lambda answer: str(answer[0]))


def comparable_answer(rollout: Rollout) -> tuple[Any, ...]:
    """Without confidences, whose last digit depends on the size of a batch."""
    steps = [
        (step.query, step.passage_ids, [(token.position, token.token_id) for token in step.committed])
        for step in rollout.steps
    ]
    return rollout.id, rollout.response, steps, rollout.passages


def invent_word(rank: int) -> str:
    """The word of a frequency rank: a stop word, then words of two or more syllables."""
    if rank < len(STOPWORDS_EN):
        return STOPWORDS_EN[rank]
    rank, word = rank + len(SYLLABLES), ""
    while rank:
        rank, last = divmod(rank, len(SYLLABLES))
        word = SYLLABLES[last] + word
    return word


def invent_corpus(path: Path, passages: int, seed: int) -> None:
    """Passages of `PASSAGE_WORDS` words whose frequency falls with the power 1.1 of their rank."""
    rng = np.random.default_rng(seed)
    words = np.array([f" {invent_word(rank)}".encode() for rank in range(VOCABULARY)])
    with path.with_suffix(".part").open("wb") as file:
        for start in range(0, passages, 10_000):
            shape = (min(10_000, passages - start), PASSAGE_WORDS)
            ranks = (1 - rng.random(shape) * (1 - (VOCABULARY + 1) ** -0.1)) ** -10
            for n, row in enumerate(words[ranks.astype(int) - 1], start):
                text = row.tobytes().translate(None, b"\0")[1:]
                file.write(b'{"id": "%d", "contents": "%b"}\n' % (n, text))
    path.with_suffix(".part").rename(path)


def watch_build(words: list[str], folder: Path) -> TableRow:
    """Seconds of a command and the most memory and disk that it has, in GB."""
    start, peaks = time.perf_counter(), np.zeros(4)
    process = subprocess.Popen([sys.executable, "-m", "dlm_rag", *words])
    while process.poll() is None:
        pss, anonymous, most = 0, 0, 0
        children = Path(f"/proc/{process.pid}/task/{process.pid}/children")
        with suppress(OSError):  # it has ended
            for pid in (process.pid, *children.read_text().split()):
                lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()[1:]
                sizes = {name: int(size.split()[0]) << 10 for name, size in (x.split(":") for x in lines)}
                pss, anonymous = pss + sizes["Pss"], anonymous + sizes["Pss_Anon"]
                most = max(most, sizes["Rss"])
            disk = sum(path.stat().st_blocks * 512 for path in folder.rglob("*"))
            peaks = np.maximum(peaks, (pss, anonymous, most, disk))
        time.sleep(0.25)
    if process.returncode:
        raise RunError(f"{' '.join(words)} failed")
    names = ("peak PSS", "of it no file", "largest RSS", "peak disk")
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    row: TableRow = {"seconds": f"{time.perf_counter() - start:.0f}"}
    row["of a core"] = f"{used.ru_utime + used.ru_stime:.0f}"
    return row | {name: f"{peak / 1e9:.2f} GB" for name, peak in zip(names, peaks, strict=True)}


def measure_index(argv: list[str]) -> None:
    parser = CommandParser(__doc__ or "")
    parser.add_argument("folder", type=Path)
    for name, default in {"passages": 1_000_000, "seed": 0}.items():
        parser.add_argument(f"--{name}", default=str(default), help=f"default {default}")
    parser.add_argument("--reference", action="store_true")
    given = parser.parse_args(argv)
    passages, seed = (
        parse_int(getattr(given, n), at, f"--{n} ") for n, at in (("passages", 1), ("seed", 0))
    )
    path, kept = (given.folder / f"{passages}-{seed}{end}" for end in (".jsonl", "-index"))
    given.folder.mkdir(parents=True, exist_ok=True)
    if not path.exists():
        invent_corpus(path, passages, seed)
    row: TableRow = {"passages": f"{passages:,}", "corpus": f"{path.stat().st_size / 1e9:.2f} GB"}
    shutil.rmtree(kept, ignore_errors=True)  # an index that is there would cost nothing
    row |= watch_build(["index", "--corpus", str(path), f"retrieval.index_dir={kept}"], kept)
    row["index"] = f"{sum(file.stat().st_size for file in kept.rglob('*') if file.is_file()) / 1e9:.2f} GB"
    corpus, start = open_corpus(path, kept), time.perf_counter()
    retriever = load_retriever(RetrievalConfig(top_k=TOP_K), corpus)
    row["open"], rng = f"{time.perf_counter() - start:.2f} s", np.random.default_rng(seed + 1)
    texts = [corpus[int(n)].contents.split() for n in rng.integers(len(corpus), size=500)]
    asked = [Query(" ".join(rng.permutation(words)[:QUERY_WORDS]), ()) for words in texts]
    found, seconds = retriever.rank_scored(asked, TOP_K), []
    for query in asked:
        clocks = (time.perf_counter(), time.process_time())
        retriever.rank([query], TOP_K)
        seconds.append((time.perf_counter() - clocks[0], time.process_time() - clocks[1]))
    wall, used = (1000 * median(values) for values in zip(*seconds, strict=True))
    row["query"] = f"{wall:.1f} ms, {used:.1f} of a core"
    print_table([row], f"BM25 over passages of {PASSAGE_WORDS} words, seed {seed}")
    if given.reference:
        import bm25s

        reference = bm25s.BM25(backend="numba")
        reference.index([extract_terms(passage.text) for passage in corpus], show_progress=False)
        terms = [[t for t in extract_terms(q.text) if t in reference.vocab_dict] for q in asked]
        ids, scores = reference.retrieve(terms, k=TOP_K, n_threads=1, show_progress=False)
        expected = [
            [pair for pair in zip(*both, strict=True) if pair[1] > 0]
            for both in zip(ids.tolist(), scores.tolist(), strict=True)
        ]
        equal = sum(list(a.items()) == b for a, b in zip(found, expected, strict=True))
        print_note(f"{equal} of {len(asked)} rankings and their scores are those of bm25s")


def main(argv: list[str]) -> None:
    run_subcommand(
        __doc__ or "",
        argv,
        {"recall": measure_recall, "remote": measure_remote_search, "index": measure_index},
    )


if __name__ == "__main__":
    run_program(main)
