"""Training rows for SmolLM2 from public question sets: passages, and questions that they answer or do not.

    python examples/smollm2/make_rows.py FOLDER rows.jsonl
    python examples/smollm2/make_rows.py FOLDER held_out --held-out
    python examples/smollm2/make_rows.py FOLDER train --questions

FOLDER holds a folder a set, each with `corpus.jsonl(.gz)` and `questions.jsonl(.gz)` as `dlm-rag` reads
them. A line of the result is a set of two to four passages (gold ones, and what BM25 or the same page puts
beside them) with up to eight questions. A response is short: the titles that the answer needs, then the
answer as it stands in its passage: " Dillon Francis ### October 5, 1987". Where no passage holds the answer
it is " ### unknown"; where the second page of two is missing, the names so far, and nothing after them.

One question in HELD_OUT_OF is in no row, nor is one in the same words. `--held-out` writes those with a
short answer, and the passages of their sets, in the folders `natural` (asked without the passage in view),
`squad` and `shifts` (other articles, asked as SQuAD's are); `unanswered` has 200 of SQuAD's without the
passages that answer them.
"""

import argparse
import gzip
import hashlib
import json
import random
import re
from collections import Counter, defaultdict
from pathlib import Path
from typing import Any

from compose import compose_questions

Record = dict[str, Any]

# How often each passage of a set is used; questions asked without the passage in view count more.
SET_WEIGHTS = {
    "squad": 1.0, "squadshifts_wiki": 1.0, "tydiqa_en": 2.0, "natural_questions": 3.0,
    "natural_silver": 3.0, "popqa": 2.0, "hotpotqa_more": 4.0, "2wiki_more": 4.0, "nq_swap": 1.0,
    "boolq": 0.3, "qamr": 1.0, "composed": 2.0,
}  # fmt: skip
TWO_HOP_SETS = ("hotpotqa_more", "2wiki_more", "composed")
ONE_HOP_SHARE = 0.1  # of the other sets with `--two-hops`
ALTERED_SET = "nq_swap"  # its passages are false on purpose: they are read, never found
PASSAGE_COUNTS = (2, 3, 3, 4)
MAX_ROWS, MAX_ROWS_OF_A_PASSAGE, MAX_ROWS_OF_OTHERS = 8, 4, 3
MAX_ANSWER_WORDS, MAX_TITLE_WORDS, MAX_QUESTION_WORDS = 8, 8, 40
SAME_PAGE_SHARE = 0.5  # share of the sets with another passage of the gold one's page
# share of the questions of two pages whose second page is not there yet; the other with `--two-hops`
MISSING_PAGE_SHARE, MORE_MISSING_PAGE_SHARE = 0.35, 0.5
UNKNOWN_PER_ANSWER = 0.25
REMOVED_SHARE = 0.25  # share of the sets of one page with what BM25 finds for a question but its passage
NO_QUESTION_MARK_SHARE, SMALL_LETTERS_SHARE, QUOTED_SHARE = 0.15, 0.12, 0.3
SEARCH_BATCH, SEARCH_DEPTH = 2000, 8
HELD_OUT_OF = 50
HELD_OUT_SETS = {
    "natural": ("tydiqa_en", "natural_questions", "natural_silver"), "squad": ("squad",),
    "shifts": ("squadshifts_wiki",),
}  # fmt: skip
REWARD_SETS = {"two_hops": ("hotpotqa_more", "2wiki_more")}  # with `--questions`, beside those
MAX_HELD_OUT_ANSWER_WORDS = 5
UNANSWERED = 200


def read_lines(path: Path) -> list[Record]:
    """Returns the records of a file of JSON lines, gzipped or not; none where there is no file."""
    packed = path.with_name(f"{path.name}.gz")
    if packed.is_file():
        with gzip.open(packed, "rt", encoding="utf-8") as file:
            return [json.loads(line) for line in file]
    return [json.loads(line) for line in path.open(encoding="utf-8")] if path.is_file() else []


def digest_id(row: Record) -> int:
    return int(hashlib.sha1(row["id"].encode()).hexdigest(), 16)


def is_held_out(row: Record) -> bool:
    return digest_id(row) % HELD_OUT_OF == 0


def fold_wording(question: str) -> str:
    return re.sub(r"\W+", " ", question.lower()).strip()


def list_titles(row: Record, passages: dict[str, Record]) -> set[str]:
    return {passages[key]["title"] for key in row["supporting_ids"] if key in passages}


def write_questions(folder: Path, out: Path, held_out: bool) -> None:
    """Writes questions with short answers, held out or not, in an order that their digests fix; of those
    that are not, none about a page that one which is asks about."""
    read = dict[str, tuple[list[Record], dict[str, Record]]]()
    for name, sets in (HELD_OUT_SETS if held_out else HELD_OUT_SETS | REWARD_SETS).items():
        rows = [row for part in sets for row in read_lines(folder / part / "questions.jsonl")]
        passages = {row["id"]: row for part in sets for row in read_lines(folder / part / "corpus.jsonl")}
        read[name] = rows, passages
    pages = (list_titles(row, own) for rows, own in read.values() for row in rows if is_held_out(row))
    unseen = set[str]().union(*pages)  # a page may be in several sets
    for name, (rows, passages) in read.items():
        asked = [
            row
            for row in rows
            if is_held_out(row) == held_out
            and row["answer_kind"] == "span"
            and min(len(answer.split()) for answer in row["golden_answers"]) <= MAX_HELD_OUT_ANSWER_WORDS
            and (held_out or not list_titles(row, passages) & unseen)
        ]
        asked.sort(key=digest_id)
        write_set(out / name, asked, list(passages.values()))
        if held_out and name == "squad":
            some = asked[:UNANSWERED]
            known = {key for row in some for key in row["supporting_ids"]}
            kept = [row for key, row in passages.items() if key not in known]
            write_set(out / "unanswered", some, kept)


def write_set(folder: Path, questions: list[Record], passages: list[Record]) -> None:
    """Writes `questions.jsonl` and `corpus.jsonl`."""
    folder.mkdir(parents=True, exist_ok=True)
    for path, records in (("questions.jsonl", questions), ("corpus.jsonl", passages)):
        lines = (json.dumps(record, ensure_ascii=False) + "\n" for record in records)
        (folder / path).write_text("".join(lines), encoding="utf-8")
    print(f"{folder.name}: {len(questions):,} questions, {len(passages):,} passages")


class QuestionSets:
    """Passages and answerable questions of all sets, with what BM25 finds for each question."""

    def __init__(self, folder: Path, two_hops: bool) -> None:
        """two_hops: adds questions that are composed of two pages, and more of those without the second."""
        self.missing_share = MORE_MISSING_PAGE_SHARE if two_hops else MISSING_PAGE_SHARE
        self.passages: dict[str, Record] = {}
        questions = []
        for name in (*SET_WEIGHTS, "wiki_passages"):
            for passage in read_lines(folder / name / "corpus.jsonl"):
                self.passages.setdefault(passage["id"], {**passage, "set": name})
            questions += [{**row, "set": name} for row in read_lines(folder / name / "questions.jsonl")]
        if two_hops:
            told = {key: page for key, page in self.passages.items() if page["set"] != ALTERED_SET}
            questions += compose_questions(told)
        held_out = {fold_wording(row["question"]) for row in questions if is_held_out(row)}
        self.true_pages: dict[str, set[str]] = defaultdict(set)  # by the wording of what they answer
        for row in questions:
            if row["set"] != ALTERED_SET:
                self.true_pages[fold_wording(row["question"])].update(row["supporting_ids"] or ())
        asked = (row for row in questions if fold_wording(row["question"]) not in held_out)
        self.questions = [row for row in asked if self._can_be_asked(row)]
        for row in self.questions:
            row["answer"] = self._find_answer(row)
        self.questions = [row for row in self.questions if row["answer"]]
        self._search()
        self.by_passage: dict[str, list[Record]] = defaultdict(list)
        for row in self.questions:
            self.by_passage[row["supporting_ids"][0]].append(row)
        self.by_title: dict[str, list[str]] = defaultdict(list)
        for key, passage in self.passages.items():
            self.by_title[passage["title"]].append(key)

    def _can_be_asked(self, row: Record) -> bool:
        found = row["supporting_ids"] and all(key in self.passages for key in row["supporting_ids"])
        spans = row["answer_kind"] == "yesno" or (row["answer_kind"] == "span" and row["answer_in_passage"])
        return bool(found and spans and len(row["question"].split()) <= MAX_QUESTION_WORDS)

    def _find_answer(self, row: Record) -> str | None:
        """Returns the shortest golden answer as it stands in its passage, None where none is short."""
        if row["answer_kind"] == "yesno":
            return str(row["golden_answers"][0])
        text = "\n".join(self.passages[key]["contents"] for key in row["supporting_ids"])
        found = [re.search(re.escape(answer), text, re.IGNORECASE) for answer in row["golden_answers"]]
        held = [" ".join(match[0].split()) for match in found if match]
        held = [answer for answer in held if len(answer.split()) <= MAX_ANSWER_WORDS]
        if row["set"] == "natural_questions":
            return held[0] if held else None
        return min(held, key=len, default=None)

    def _search(self) -> None:
        import bm25s

        keys = [key for key, passage in self.passages.items() if passage["set"] != ALTERED_SET]
        index = bm25s.BM25()
        texts = [self.passages[key]["contents"] for key in keys]
        index.index(bm25s.tokenize(texts, stopwords="en", show_progress=False), show_progress=False)
        for first in range(0, len(self.questions), SEARCH_BATCH):
            part = self.questions[first : first + SEARCH_BATCH]
            words = bm25s.tokenize([row["question"] for row in part], stopwords="en", show_progress=False)
            found, _ = index.retrieve(words, k=min(SEARCH_DEPTH, len(keys)), show_progress=False)
            for row, places in zip(part, found.tolist(), strict=True):
                row["found"] = [keys[place] for place in places]

    def title(self, key: str) -> str:
        return " ".join(self.passages[key]["title"].split()[:MAX_TITLE_WORDS])

    def order_pages(self, row: Record) -> list[str]:
        """Returns the supporting passages as the question leads to them: the last holds the answer."""
        pages = list(row["supporting_ids"])
        if len(pages) != 2 or row["answer_kind"] != "span":
            return pages
        holds = [row["answer"].lower() in self.passages[key]["contents"].lower() for key in pages]
        named = [self.title(key).lower() in row["question"].lower() for key in pages]
        return pages[::-1] if (holds[0] and not holds[1]) or (named[1] and not named[0]) else pages

    def tells(self, chosen: list[str], row: Record) -> bool:
        """Says whether the passages contain the answer; "yes" and "no" count as never contained."""
        text = " ".join(self.passages[key]["contents"] for key in chosen).lower()
        return row["answer_kind"] != "yesno" and row["answer"].lower() in text

    def write_response(self, row: Record) -> str:
        names = dict.fromkeys(map(self.title, self.order_pages(row)))
        return f" {'; '.join(names)} ### {row['answer']}"


def choose_passages(
    rng: random.Random, sets: QuestionSets, row: Record, missing: bool, removed: bool
) -> list[str]:
    """Returns the gold passages of a question among others, in any order; of two the first if `missing`.

    removed: none of them.
    """
    gold = list(row["supporting_ids"])[:4]
    others = [key for key in row["found"] if key not in gold]
    if row["set"] == ALTERED_SET:  # the true passage would say something else
        answer = row["answer"].lower()
        true = sets.true_pages.get(fold_wording(row["question"]), ())
        others = [
            key
            for key in row["found"]
            if key not in true and answer not in sets.passages[key]["contents"].lower()
        ]
    page = sets.by_title[sets.passages[gold[0]]["title"]]
    same = [key for key in page if key not in gold and sets.passages[key]["set"] != ALTERED_SET]
    if row["set"] != ALTERED_SET and same and rng.random() < SAME_PAGE_SHARE:
        others.insert(0, rng.choice(same))
    chosen = [sets.order_pages(row)[0]] if missing else [] if removed else gold
    count = max(rng.choice(PASSAGE_COUNTS), len(chosen) + (rng.random() < 0.7))
    for key in dict.fromkeys(others):
        if len(chosen) < count and key not in gold:
            chosen.append(key)
    rng.shuffle(chosen)
    return chosen


def vary_wording(rng: random.Random, question: str, titles: list[str]) -> str:
    """Returns the question as people also type it: a title quoted, no question mark, small letters."""
    patterns = [rf'(?<![\w"\u201c]){re.escape(title)}(?![\w"\u201d])' for title in titles if title]
    named = next((found for each in patterns if (found := re.search(each, question))), None)
    if named and rng.random() < QUOTED_SHARE:
        quoted = rng.choice(('"{}"', "\u201c{}\u201d")).format(named[0])
        question = named.re.sub(lambda _: quoted, question)
    if rng.random() < NO_QUESTION_MARK_SHARE:
        question = question.rstrip("?").rstrip()
    return question.lower() if rng.random() < SMALL_LETTERS_SHARE else question


def make_set(rng: random.Random, sets: QuestionSets, passage: str) -> Record:
    """Returns a set of passages around one, with the questions asked of it."""
    own = list(sets.by_passage[passage])
    rng.shuffle(own)
    first = own[0]
    drawn, two_pages = rng.random(), len(first["supporting_ids"]) > 1
    missing = two_pages and drawn < sets.missing_share
    removed = not two_pages and first["set"] != ALTERED_SET and drawn < REMOVED_SHARE
    chosen = choose_passages(rng, sets, first, missing, removed)
    there, rows, worded = set(chosen), [], set[str]()

    def ask(row: Record, response: str, **more: Any) -> None:
        if (wording := fold_wording(row["question"])) in worded:
            return  # sets share questions, and NQ-Swap has them with other answers
        worded.add(wording)
        titles = [sets.passages[key]["title"].partition(" (")[0] for key in row["supporting_ids"]]
        question = vary_wording(rng, row["question"], titles)
        rows.append({"id": row["id"], "question": question, "response": response, **more})

    if missing:
        names = [sets.title(key) for key in sets.order_pages(first)][:2]
        ask(first, f" {'; '.join(names)}", open=True)
    if removed and not sets.tells(chosen, first):
        ask(first, " ### unknown")
    others = [row for key in chosen if key != passage for row in sets.by_passage.get(key, ())]
    rng.shuffle(others)
    own = [] if missing or removed else own[:MAX_ROWS_OF_A_PASSAGE]
    for more in [*own, *others[:MAX_ROWS_OF_OTHERS]]:
        if there.issuperset(more["supporting_ids"]):
            ask(more, sets.write_response(more))
    if rng.random() < UNKNOWN_PER_ANSWER * len(rows):
        asked = {row["id"] for row in rows}
        unanswered = find_unanswered(rng, sets, passage, chosen, asked)
        if unanswered is not None:
            ask(unanswered, " ### unknown")
    return {
        "set": first["set"], "rows": rows[:MAX_ROWS],
        "passages": [sets.passages[key]["contents"] for key in chosen],
    }  # fmt: skip


def find_unanswered(
    rng: random.Random, sets: QuestionSets, passage: str, chosen: list[str], asked: set[str]
) -> Record | None:
    """Returns a question, none of those asked, whose passage is not there; of the same page, if any is."""
    page = sets.by_title[sets.passages[passage]["title"]]
    near = [row for key in page if key not in chosen for row in sets.by_passage.get(key, ())]
    if not near:
        drawn = rng.sample(sets.questions, min(60, len(sets.questions)))
        near = [row for row in drawn if row["set"] != ALTERED_SET]
    rng.shuffle(near)
    return next((r for r in near if r["id"] not in asked and not sets.tells(chosen, r)), None)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--two-hops", action="store_true", help="more of two pages, a tenth of the others")
    parser.add_argument("--held-out", action="store_true", help="write to the folder OUT what is held out")
    parser.add_argument("--questions", action="store_true", help="the same of what is not, for a reward")
    given = parser.parse_args()
    if given.held_out or given.questions:
        write_questions(given.folder, given.out, given.held_out)
        return
    sets, rng = QuestionSets(given.folder, given.two_hops), random.Random(given.seed)
    plan = []
    for passage, rows in sets.by_passage.items():
        weight = SET_WEIGHTS[rows[0]["set"]]
        if given.two_hops:
            weight = max(SET_WEIGHTS[row["set"]] for row in rows)
            weight *= 1.0 if rows[0]["set"] in TWO_HOP_SETS else ONE_HOP_SHARE
        plan += [passage] * (int(weight) + (rng.random() < weight % 1))
    rng.shuffle(plan)
    counts: Counter[str] = Counter()
    with given.out.open("w", encoding="utf-8") as file:
        for number, passage in enumerate(plan):
            made = make_set(random.Random(f"{given.seed}/{number}/{passage}"), sets, passage)
            if made["rows"]:
                file.write(json.dumps(made, ensure_ascii=False) + "\n")
                counts[made["set"]] += len(made["rows"])
                counts["unknown"] += sum(row["response"].endswith("unknown") for row in made["rows"])
    digest = hashlib.sha256(given.out.read_bytes()).hexdigest()
    print(json.dumps({"rows": dict(counts), "sha256": digest}, indent=2))


if __name__ == "__main__":
    main()
