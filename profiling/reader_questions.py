"""Questions that a reader is scored on, of what training left out: one command, and a digest of them.

    python profiling/reader_questions.py --corpus hotpotqa/corpus.jsonl 2wiki/corpus.jsonl --out sets

passages.jsonl: the first passage of each title, to train on. one_hop, two_hops: wordings and passages
that no training row has (two_hops: half of them about names that no passage has, whose second passage is
added to corpus.jsonl). no_answer: questions that the corpus does
not answer. cloze: chains of names left out of sentences. The same corpus and share give the same bytes.
"""

import argparse
import hashlib
import json
import random
from pathlib import Path
from typing import Any

from dlm_rag.retrieval.corpus import Passage, open_corpus
from dlm_rag.synthesis.cloze_questions import CorpusRowGenerator
from dlm_rag.synthesis.natural_questions import Asked, NaturalQuestions

PER_RELATION = 12  # questions of one hop, at most
COUNTS = {"one_hop": 200, "two_hops": 200, "cloze": 200, "no_answer": 100}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--corpus", required=True, type=Path, nargs="+")
    parser.add_argument("--out", required=True, type=Path)
    parser.add_argument("--held-out", type=float, default=0.1, help="as data.held_out of the training")
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    joined = args.out / "passages.jsonl"
    first: dict[str, str] = {}
    for path in args.corpus:
        for line in path.read_text(encoding="utf-8").splitlines():
            first.setdefault(json.loads(line)["title"], line)
    joined.write_text("".join(f"{line}\n" for line in first.values()), encoding="utf-8")
    corpus, rng = open_corpus(str(joined), None), random.Random("reader questions")
    rows = CorpusRowGenerator(corpus, 2, args.held_out)
    asked = NaturalQuestions([*corpus], rows.is_held_out, "held_out")
    held = sorted(asked.facts)
    added: dict[str, Passage] = {}
    sets = {
        "one_hop": draw_one_hop(rng, asked), "two_hops": draw_two_hops(rng, asked, added),
        "no_answer": draw_no_answer(rng, asked, held), "cloze": draw_cloze(rng, rows, held),
    }  # fmt: skip
    records = [vars(passage) for passage in (*corpus, *added.values())]
    sets["corpus"] = [{key: record[key] for key in ("id", "title", "contents")} for record in records]
    digest = hashlib.sha256()
    for name, lines in sets.items():
        text = "".join(json.dumps(line, ensure_ascii=False) + "\n" for line in lines)
        (args.out / f"{name}.jsonl").write_text(text, encoding="utf-8")
        digest.update(text.encode())
        print(f"{name}: {len(lines):,}")
    print(f"sha256 {digest.hexdigest()}")


def to_record(asked: NaturalQuestions, number: int, one: Asked, ids: list[str]) -> dict[str, Any]:
    """A question as `evaluate` reads it; no answer where there is none."""
    return {
        "id": f"{one.template}#{number}", "question": one.question, "golden_answers": [one.answer],
        "supporting_ids": ids, "hops": max(1, len(one.rows)),
    }  # fmt: skip


def draw_one_hop(rng: random.Random, asked: NaturalQuestions) -> list[dict[str, Any]]:
    """As many of each relation as can be, up to `PER_RELATION`."""
    found: list[Asked] = []
    by_relation: dict[str, int] = {}
    facts = [fact for row in sorted(asked.facts) for fact in asked.facts[row] if fact.relation]
    for fact in rng.sample(facts, len(facts)):
        if by_relation.get(fact.relation, 0) < PER_RELATION:
            by_relation[fact.relation] = by_relation.get(fact.relation, 0) + 1
            found.append(asked.ask(rng, fact))
    rng.shuffle(found)
    chosen = found[: COUNTS["one_hop"]]
    return [
        to_record(asked, n, one, [asked.passages[row].id for row in one.rows])
        for n, one in enumerate(chosen)
    ]


def draw_two_hops(
    rng: random.Random, asked: NaturalQuestions, added: dict[str, Passage]
) -> list[dict[str, Any]]:
    """Chains that the corpus tells, and as many that it does not; `added` gets what these need."""
    found: dict[str, dict[str, Any]] = {}
    taken = {passage.title for passage in asked.passages}
    for attempt in range(20 * COUNTS["two_hops"]):
        if len(found) == COUNTS["two_hops"]:
            break
        if attempt % 2 and (chain := asked.draw_chain(rng)) is not None:
            ids = [asked.passages[row].id for row in chain.rows]
        elif (crossed := asked.draw_crossed(rng)) is not None and crossed[1].title not in taken:
            chain, passage = crossed
            taken.add(passage.title)
            added[passage.id] = passage
            ids = [asked.passages[chain.rows[0]].id, passage.id]
        else:
            continue
        found.setdefault(chain.question, to_record(asked, len(found), chain, ids))
    return [*found.values()]


def draw_no_answer(rng: random.Random, asked: NaturalQuestions, held: list[int]) -> list[dict[str, Any]]:
    """Of passages that do not tell it, of names that nobody has, and what is no question for a fact."""
    found: list[Asked] = []
    while len(found) < COUNTS["no_answer"]:
        row = rng.choice(held)
        kind = len(found) % 5
        if kind < 2:
            one = asked.draw_missing(rng, row)
        elif kind < 4:
            one = asked.draw_single(rng, row)
            if one is not None:
                name = asked.titled[one.rows[0]].name
                other = asked.renamer.draw(rng, [(name, asked.group_of(one.rows[0]))])(name)
                one = None if other == name or name not in one.question else Asked(
                    one.question.replace(name, other), (), "", one.rows, "nobody"
                )  # fmt: skip
        else:
            one = asked.draw_unclear(rng, held)
        if one is not None:
            found.append(one)
    return [to_record(asked, n, one, []) | {"golden_answers": ["(none)"]} for n, one in enumerate(found)]


def draw_cloze(rng: random.Random, rows: CorpusRowGenerator, held: list[int]) -> list[dict[str, Any]]:
    """Chains of two."""
    made = [row for number in held for row in rows.make_rows(number)[0] if row["template"] == "chain2"]
    rng.shuffle(made)
    keys = ("id", "question", "golden_answers", "supporting_ids", "hops")
    return [{key: row[key] for key in keys} for row in made[: COUNTS["cloze"]]]


if __name__ == "__main__":
    main()
