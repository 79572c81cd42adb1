"""A query policy of your own, compared with built-in ones on the world that comes with the package.

python examples/own_query_policy.py
python evaluate.py --out runs/names --compare \\
    static,interleaved,decode.query_policy=examples.own_query_policy:ask_names
"""

from statistics import fmean

from dlm_rag import Decoder, Denoiser, Tokenizer, load_retriever
from dlm_rag.commands.prepare_decoder import SHIPPED_FOLDER
from dlm_rag.config import DecodeConfig
from dlm_rag.evaluation.metrics import score_rollout
from dlm_rag.questions import read_questions


def ask_names(question: str, response: str, top_passage: str) -> str:
    """The policy: the words of question and response that begin with a capital."""
    return " ".join(word for word in f"{question} {response}".split() if word[0].isupper())


def main() -> None:
    model, world = SHIPPED_FOLDER / "model", SHIPPED_FOLDER / "world"
    asked = [q for q in read_questions(world / "questions.jsonl") if q.hops == 3 and not q.labels][:24]
    denoiser, tokenizer = Denoiser.from_pretrained(model), Tokenizer.from_pretrained(model)
    retriever = load_retriever(world / "corpus.jsonl")
    for policy in ("question", "proxy", f"{__name__}:ask_names"):
        decoder = Decoder(
            denoiser, retriever, tokenizer, DecodeConfig(query_policy=policy, batch_size=len(asked))
        )
        rollouts = decoder.decode(asked)
        scores = [score_rollout(r, q) for r, q in zip(rollouts, asked, strict=True)]
        right, found = fmean(s.exact_match for s in scores), fmean(s.recall_last or 0.0 for s in scores)
        print(f"{policy.split(':')[-1]:10}  exact match {right:4.0%}  evidence found {found:4.0%}")


if __name__ == "__main__":
    main()
