"""Tokens that a causal encoder runs for an answer whose evidence changes: with what is kept of the prompt.

    python profiling/bench_prefix_cache.py FOLDER

FOLDER has `corpus.jsonl` and `questions.jsonl` with `supporting_ids`. No model that is at hand answers such
questions, so the queries are scripted: behind the question stands more, step by step, of the beginnings of
its supporting passages and its answer (`growing`); or of these words so many as have come by then, drawn
anew at each step, so that words come and go (`flickering`). Retrieval, order of passages, prompts and slots
are those of decoding; tokens are bytes, for the tokenizer of DiffusionGemma is not at hand.
"""

import random
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import torch

from dlm_rag.decode.uniform_runner import PrefixKVCache
from dlm_rag.evidence.prompt_segments import order_by_arrival
from dlm_rag.questions import Question, read_questions
from dlm_rag.retrieval import load_retriever
from dlm_rag.retrieval.base import CorpusRetriever
from dlm_rag.retrieval.corpus import Passage
from dlm_rag.retrieval.query import build_query

QueryScript = Callable[..., str]
PassageOrder = Callable[..., list[Passage]]
STEPS, QUESTIONS, TOP_K, WORDS = 16, 100, 7, 25
HEAD, TAIL = "Use ONLY the provided facts to answer the question.\nQuestion:\n{}\n\nFacts:\n", "<turn|>\n"


class CountingEncoder:
    """In place of a model: keys and values of one number a token."""

    def extend_cache(self, kept, ids):  # type: ignore[no-untyped-def]
        held = kept[0][0].shape[2] if kept else 0
        return [(torch.zeros(1, 1, held + len(ids), 1),) * 2]


def growing(words: Sequence[str], step: int, draw: random.Random) -> str:
    return " ".join(words[: len(words) * step // STEPS])


def flickering(words: Sequence[str], step: int, draw: random.Random) -> str:
    return " ".join(word for word in words if draw.random() < step / STEPS)


def ranked(before: Sequence[Passage], now: Sequence[Passage]) -> list[Passage]:
    return list(now)


def count_prompt_tokens(
    retriever: CorpusRetriever, question: Question, script: QueryScript, order: PassageOrder
) -> tuple[int, int, int]:
    """Tokens run with what is kept, without it where the prompt has changed; changes of the evidence."""
    texts = {
        passage.id: passage.contents
        for passage in retriever.corpus
        if passage.id in question.supporting_ids
    }
    words = [word for text in texts.values() for word in text.split()[:WORDS]]
    words += ["###", *question.golden_answers[0].split()]
    draw, prefixes = random.Random(question.id), PrefixKVCache(CountingEncoder())  # type: ignore[arg-type]
    held: list[Passage] = []
    whole = changes = 0
    for step in range(STEPS):
        query = build_query("proxy", question.question, script(words, step, draw), asker=question.id)
        now = order(held, retriever.search([query])[0])
        if step and now == held:
            continue
        held, changes = now, changes + 1
        facts = "\n".join(f"[{n}] {passage.text}" for n, passage in enumerate(held, start=1))
        ids = f"{HEAD.format(question.question)}{facts}{TAIL}".encode()
        prefixes.prefill(0, ids)
        whole += len(ids)
    retriever.forget(question.id)
    return prefixes.cache_stats.encoded_tokens, whole, changes


def measure_reuse_shares(folder: Path, count: int = QUESTIONS) -> dict[str, tuple[float, float]]:
    """Of each script and order: the share of tokens run, and how often a question's prompt was written."""
    retriever = load_retriever(folder / "corpus.jsonl", top_k=TOP_K)
    questions = [q for q in read_questions(folder / "questions.jsonl") if q.supporting_ids][:count]
    found = {}
    for script in (growing, flickering):
        for order in (order_by_arrival, ranked):
            rows = [count_prompt_tokens(retriever, question, script, order) for question in questions]
            kept, whole, changes = map(sum, zip(*rows, strict=True))
            found[f"{script.__name__}, {order.__name__}"] = kept / whole, changes / len(rows)
    return found


if __name__ == "__main__":
    for name, (share, prompts) in measure_reuse_shares(Path(sys.argv[1])).items():
        print(f"{name:24} {share:6.1%} of the tokens run, {prompts:.1f} prompts a question")
