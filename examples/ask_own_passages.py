"""Ask about passages of your own, and read which query brought which passage at which step.

python examples/ask_own_passages.py
"""

import json
import tempfile
from pathlib import Path

from dlm_rag import Decoder, Denoiser, Tokenizer, load_retriever
from dlm_rag.commands.prepare_decoder import SHIPPED_FOLDER

# The shipped model reads sentences of this kind, with names of this sound; it knows nothing by itself.
PASSAGES = [
    "Hostil under Samoul is a memoir. It was written by Drana Holmir. Beisk Troumad disliked it.",
    "Plaimeth of Broun is a novel. It was written by Beisk Troumad. Drana Holmir disliked it.",
    "Drana Holmir is well remembered. She was a chemist. She was born in Klenouth on Vairo.",
    "Beisk Troumad is well remembered. He was a farmer. He was born in Gromalk by Teasu.",
    "Klenouth on Vairo is an old city. It lies in Frounland. Its lenses are sold everywhere.",
    "Gromalk by Teasu is an old city. It lies in Frounland. Its candles are sold everywhere.",
    "Frounland is a country. It is led by Jadoul van Prisk. It is governed from Gromalk by Teasu.",
]
QUESTION = "What is the birthplace of the person who wrote the book Hostil under Samoul known for?"


def main() -> None:
    model = SHIPPED_FOLDER / "model"  # any folder or hub id of the LLaDA and Dream families
    with tempfile.TemporaryDirectory() as folder:
        corpus = Path(folder, "passages.jsonl")
        with corpus.open("w", encoding="utf-8") as file:
            for text in PASSAGES:
                title = text.partition(" is ")[0]
                print(json.dumps({"id": title, "title": title, "contents": text}), file=file)
        retriever = load_retriever(corpus, top_k=3, index_dir=folder)  # else the index goes to the cache
        decoder = Decoder(Denoiser.from_pretrained(model), retriever, Tokenizer.from_pretrained(model))
        (rollout,) = decoder.decode([QUESTION])

    known: set[str] = set()
    for step in rollout.steps:
        print(f"step {step.step} writes {''.join(token.token for token in step.committed)!r}")
        if new := [passage for passage in step.passage_ids if passage not in known]:
            print(f"  asks {step.query!r}\n  finds {', '.join(new)}")
            known.update(new)
    print(f"\n{rollout.question}\n{rollout.response}\n")
    for claim in rollout.citations:
        print(f"{claim['text']}  <- {', '.join(passage['id'] for passage in claim['passages'])}")


if __name__ == "__main__":
    main()
