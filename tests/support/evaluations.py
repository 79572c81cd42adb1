"""A folder in which evaluate runs."""

from pathlib import Path

from tests.support.passages import PASSAGES, write_jsonl_file
from tests.support.tiny_models import byte_tokenizer, tiny_denoiser

EVALUATED = ("--model", "model", "--corpus", "corpus.jsonl", "--questions", "q.jsonl")


def make_evaluation_folder(folder: Path, questions: int) -> Path:
    """A model, a corpus, and questions about it with golden answers: `EVALUATED` from within."""
    tiny_denoiser().save_pretrained(folder / "model", eos_token_id=257)
    byte_tokenizer().save_pretrained(folder / "model")
    corpus = [{"id": i, "title": title, "contents": text} for i, title, text in PASSAGES]
    write_jsonl_file(folder / "corpus.jsonl", corpus)
    ids, titles, _ = zip(*PASSAGES, strict=True)
    asked = [
        {"id": str(n), "question": f"What of {titles[n % 5]} in {1800 + n}?", "golden_answers": ["x"],
         "supporting_ids": [ids[n % 5], ids[n % 5 - 1]]}
        for n in range(questions)
    ]  # fmt: skip
    write_jsonl_file(folder / "q.jsonl", asked)
    return folder
