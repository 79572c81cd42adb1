"""Questions that no chain of hops answers: constraints that must meet, passages that contradict each other.

    python examples/smollm2/constraint_sets.py OUT --seed 0

writes a folder a kind into OUT, each with `corpus.jsonl` and `questions.jsonl` of 200 questions about
invented names, two passages a question:

- `intersections`: the one town that both of two lists have.
- `contradictions`: guides of two years that differ; the question names one, or asks for the newest.
- `comparisons`: which of two was founded first.
- `counts`: how many of one list's towns the other has too.
"""

import argparse
import json
import random
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from dlm_rag.data.synthetic_world import make_word

Record = dict[str, Any]
QUESTIONS = 200
TRADES = ("bakery", "bank", "bookshop", "brewery", "cinema", "hotel", "pharmacy", "theatre")
NUMBERS = ("zero", "one", "two", "three", "four")


def join_names(names: Sequence[str]) -> str:
    return f"{', '.join(names[:-1])} and {names[-1]}"


class ConstraintWriter:
    """Invents names that no other question has, and passages about them."""

    def __init__(self, seed: int, kind: str) -> None:
        self.rng = random.Random(f"{kind}/{seed}")
        self.used: set[str] = set()
        self.kind = kind

    def name(self) -> str:
        """Returns a word of the test split of invented worlds."""
        while (word := make_word(self.rng, "test")) in self.used or len(word) < 5:
            pass
        self.used.add(word)
        return word

    def two_lists(self, shared: int) -> tuple[list[str], list[str], list[str]]:
        """Returns two shuffled lists of four towns and the towns that both have."""
        both = [self.name() for _ in range(shared)]
        lists = [both + [self.name() for _ in range(4 - shared)] for _ in range(2)]
        for towns in lists:
            self.rng.shuffle(towns)
        return lists[0], lists[1], both

    def two_companies(self, shared: int) -> tuple[list[str], list[tuple[str, str]], list[str]]:
        """Returns the names of two companies, their passages (title, text) and the towns of both."""
        one, two, both = self.two_lists(shared)
        trade, other = self.rng.sample(TRADES, 2)
        names = [f"{self.name()} {trade.title()}", f"{self.name()} {other.title()}"]
        passages = [
            (name, f"{name} is a company. It has branches in {join_names(towns)}.")
            for name, towns in zip(names, (one, two), strict=True)
        ]
        return names, passages, both

    def intersection(self) -> tuple[str, str, list[tuple[str, str]]]:
        names, passages, both = self.two_companies(1)
        return f"In which town do both {names[0]} and {names[1]} have a branch?", both[0], passages

    def count(self) -> tuple[str, str, list[tuple[str, str]]]:
        shared = self.rng.randrange(1, 5)
        names, passages, _ = self.two_companies(shared)
        return (
            f"In how many towns do both {names[0]} and {names[1]} have a branch?",
            NUMBERS[shared],
            passages,
        )

    def contradiction(self) -> tuple[str, str, list[tuple[str, str]]]:
        trade = self.rng.choice(TRADES)
        name, towns = f"{self.name()} {trade.title()}", [self.name(), self.name()]
        old = self.rng.randrange(1900, 1980)
        years = [old, old + self.rng.randrange(5, 40)]
        passages = [
            (f"{name} (guide of {year})", f"{name} is a company. Its seat is in {town}, as of {year}.")
            for year, town in zip(years, towns, strict=True)
        ]
        newer = self.rng.random() < 0.5
        which = "the newest guide" if newer else f"the guide of {old}"
        return f"In which town is the seat of {name}, according to {which}?", towns[newer], passages

    def comparison(self) -> tuple[str, str, list[tuple[str, str]]]:
        names = [f"{self.name()} {self.rng.choice(TRADES).title()}" for _ in range(2)]
        years = self.rng.sample(range(1800, 1990), 2)
        passages = [
            (name, f"{name} is a company. It was founded in {year}.")
            for name, year in zip(names, years, strict=True)
        ]
        first = names[years[1] < years[0]]
        return f"Which company was founded first, {names[0]} or {names[1]}?", first, passages

    def write(self, folder: Path, make: Callable[[], tuple[str, str, list[tuple[str, str]]]]) -> None:
        """Writes the questions of `make` and their passages, in another order."""
        corpus: list[Record] = []
        questions: list[Record] = []
        for number in range(QUESTIONS):
            question, answer, passages = make()
            ids = [f"{self.kind}{number}-{place}" for place in range(len(passages))]
            corpus += [
                {"id": name, "title": title, "contents": text}
                for name, (title, text) in zip(ids, passages, strict=True)
            ]
            questions.append({
                "id": f"{self.kind}{number}", "question": question, "golden_answers": [answer],
                "supporting_ids": ids, "type": self.kind,
            })  # fmt: skip
        self.rng.shuffle(corpus)
        folder.mkdir(parents=True, exist_ok=True)
        for name, records in (("corpus", corpus), ("questions", questions)):
            lines = "".join(json.dumps(record) + "\n" for record in records)
            (folder / f"{name}.jsonl").write_text(lines, encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("out", type=Path)
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    for kind in ("intersection", "contradiction", "comparison", "count"):
        writer = ConstraintWriter(given.seed, kind)
        writer.write(given.out / f"{kind}s", getattr(writer, kind))


if __name__ == "__main__":
    main()
