"""Train for a few steps on questions and passages of your own, export the model, ask it.

    python examples/train_own.py

The shipped model reads who wrote a book, but nobody ever asked it for "the pen behind" one.
"""

import json
import random
import tempfile
from pathlib import Path

from dlm_rag import Decoder, Denoiser, Tokenizer, load_retriever
from dlm_rag.commands.prepare_decoder import SHIPPED_FOLDER as SHIPPED
from dlm_rag.commands.train import main as train

SYLLABLES = "dro vel kis trai mou hai bre sna lin gor pau teth".split()


def invent(count: int) -> tuple[list[dict], list[dict]]:
    """Passages about books, and a question about each with the response that is to be learned."""
    names = random.Random(0).sample([(a + b).title() for a in SYLLABLES for b in SYLLABLES], count + 3)
    passages, questions = [], []
    for n in range(count):
        book, author = f"{names[n]} under {names[n + 1]}", f"{names[n + 2]} {names[n + 3]}"
        passages.append({"id": book, "contents": f"{book} is a memoir. It was written by {author}."})
        response = f"{book} was written by {author}. ### {author}"
        questions.append({"id": book, "question": f"Name the pen behind {book}.", "response": response})
    return passages, questions


def write(path: Path, records: list[dict]) -> Path:
    path.write_text("".join(json.dumps(record) + "\n" for record in records), encoding="utf-8")
    return path


def ask(model: Path, corpus: Path, questions: list[dict]) -> None:
    """Prints how many responses of a model are right, and the first of them."""
    retriever = load_retriever(corpus, top_k=3)
    decoder = Decoder(Denoiser.from_pretrained(model), retriever, Tokenizer.from_pretrained(model))
    rollouts = decoder.decode([q["question"] for q in questions])
    right = sum(q["response"].endswith(f"### {r.answer}") for r, q in zip(rollouts, questions, strict=True))
    print(f"{right} of {len(questions)} right. {rollouts[0].question} {rollouts[0].response}")


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        passages, questions = invent(140)
        corpus = write(Path(folder, "passages.jsonl"), passages)
        learned = write(Path(folder, "questions.jsonl"), questions[24:])
        ask(SHIPPED / "model", corpus, questions[:24])
        run = f"data.questions={learned} data.corpus={corpus} train.max_steps=50 decode.max_new_tokens=40 "
        run += "train.warmup_steps=5 train.passage_sets_per_step=4 train.rows_per_set=3 retrieval.top_k=3"
        train(["--model", str(SHIPPED / "model"), "--out", f"{folder}/run", *run.split()])
        ask(Path(folder, "run/model"), corpus, questions[:24])


if __name__ == "__main__":
    main()
