"""A query policy of your own, compared with the built-in ones on the world that comes with the package.

python examples/own_query_policy.py
"""

from collections.abc import Hashable, Sequence

from dlm_rag import Decoder, Denoiser, Tokenizer, load_retriever
from dlm_rag.commands.startup import SHIPPED_FOLDER
from dlm_rag.config import DecodeConfig
from dlm_rag.evaluation.metrics import compute_mean_score, score_rollout
from dlm_rag.questions import read_questions
from dlm_rag.retrieval.base import Retriever
from dlm_rag.retrieval.corpus import Passage
from dlm_rag.retrieval.query import Query


def names_only(query: Query) -> Query:
    """The policy: of the question and of what the canvas says, the words that begin with a capital."""
    names = " ".join(word for word in query.text.split() if word[0].isupper())
    return Query(names, (names,), query.asker)


class Asking:
    """A retriever (`dlm_rag.retrieval.base.Retriever`) that asks another, and asks something else."""

    def __init__(self, inner: Retriever) -> None:
        self.inner, self.fingerprint, self.forget = inner, inner.fingerprint, inner.forget

    def key(self, query: Query) -> Hashable:
        return self.inner.key(names_only(query))

    def search(self, queries: Sequence[Query]) -> list[list[Passage]]:
        return self.inner.search([names_only(query) for query in queries])


def main() -> None:
    model, world = SHIPPED_FOLDER / "model", SHIPPED_FOLDER / "world"
    asked = [q for q in read_questions(world / "questions.jsonl") if q.hops == 3 and not q.labels][:24]
    denoiser, tokenizer = Denoiser.from_pretrained(model), Tokenizer.from_pretrained(model)
    retriever = load_retriever(world / "corpus.jsonl")
    ways: list[tuple[str, Retriever, str]] = [
        ("question", retriever, "question"), ("proxy", retriever, "proxy"),
        ("names only", Asking(retriever), "proxy"),
    ]  # fmt: skip
    for name, found_by, query in ways:
        config = DecodeConfig(query_policy=query, batch_size=len(asked))
        rollouts = Decoder(denoiser, found_by, tokenizer, config).decode(asked)
        mean = compute_mean_score([score_rollout(r, q) for r, q in zip(rollouts, asked, strict=True)])
        print(f"{name:10}  exact match {mean.exact_match:4.0%}  evidence found {mean.recall_last:4.0%}")


if __name__ == "__main__":
    main()
