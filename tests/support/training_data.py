"""Data of one's own for training."""

from tests.support.passages import write_jsonl_file


def write_own_data(folder):
    """Questions with responses, their passages, and documents."""
    passages = [
        {"id": str(n), "title": f"Town {n}", "contents": f"Town {n} lies in land {n % 5}."}
        for n in range(40)
    ]
    questions = [
        {
            "id": str(n), "question": f"In which land does town {n} lie?", "supporting_ids": [str(n)],
            "golden_answers": [f"land {n % 5}"],
            **({"response": f"Town {n} lies in land {n % 5}. ### land {n % 5}"} if n % 2 else {}),
        }
        for n in range(40)
    ]  # fmt: skip
    write_jsonl_file(folder / "corpus.jsonl", passages)
    write_jsonl_file(folder / "questions.jsonl", questions)
    for name in ("web", "quality"):
        write_jsonl_file(folder / f"{name}.jsonl", [{"text": p["contents"] * 3} for p in passages])
    return folder
