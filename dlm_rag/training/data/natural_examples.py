"""Training examples of natural questions: what `synthesis.natural_questions` draws, with evidence as our
own retriever finds it, names and dates exchanged, and answers that are missing now and then.
"""

import random
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace

from dlm_rag.decode.abstention import UNKNOWN
from dlm_rag.errors import QuestionError
from dlm_rag.retrieval.base import Retriever
from dlm_rag.retrieval.corpus import Passage
from dlm_rag.retrieval.query import build_query
from dlm_rag.synthesis.natural_questions import Asked, NaturalQuestions
from dlm_rag.training.data.examples import CopyIndex, Example, ExampleBuilder, sample_passages

# Of sets, once training is on two hops; of these chains, crossed ones.
CHAIN_SHARE, CROSSED_SHARE = 0.55, 0.75
# Shares of the steps at which chains come in, and have their whole share.
CHAINS_FROM, CHAINS_ALL = 0.05, 0.3
RENAMED_SHARE = 0.6  # of sets
REMOVED_SHARE, DROPPED_SHARE = 0.08, 0.08  # of sets without the answer's sentence, or without its passage
LATER_PASSAGE_SHARE = 0.4  # of the moments before a second hop that have its passage already
# Of rows on a set: what a passage does not tell, what is no question.
MISSING_SHARE, UNCLEAR_SHARE = 0.12, 0.03
GUESS_SHARE, GUESS_WORDS = 0.5, 4  # of queries with words of the next statement
MAX_OPEN_TOKENS = 3  # supervised of what no passage there tells


class NaturalExamples:
    """Rows of sets of passages, each from (key, step, item)."""

    def __init__(
        self, asked: NaturalQuestions, retriever: Retriever, builder: ExampleBuilder, rows: int, steps: int
    ) -> None:
        """rows: of a set. steps: of the phase, over which chains come in."""
        self._asked, self._retriever, self._builder = asked, retriever, builder
        self._rows, self._steps = rows, steps
        self._number = {passage.id: row for row, passage in enumerate(asked.passages)}

    def examples(
        self, moments: Sequence[tuple[random.Random, int]], passages: tuple[int, int]
    ) -> list[list[Example]]:
        """The rows of each moment, given by a generator and the number of its step."""
        drawn = [(rng, *self._draw(rng, step / self._steps)) for rng, step in moments]
        queries = []
        for rng, asked, _ in drawn:
            stands = rng.randrange(len(asked.rows)) if len(asked.rows) > 1 else 0
            said = " ".join(asked.statements[:stands])
            if rng.random() < GUESS_SHARE:
                said = " ".join((said, *asked.statements[stands].split()[:GUESS_WORDS])).strip()
            queries.append((stands, build_query("proxy", asked.question, said)))
        found = self._retriever.search([query for _, query in queries])
        return [
            self._set(rng, asked, own, stands, evidence, rng.randint(*passages))
            for (rng, asked, own), (stands, _), evidence in zip(drawn, queries, found, strict=True)
        ]

    def _draw(self, rng: random.Random, progress: float) -> tuple[Asked, Passage | None]:
        """A question and, where no passage tells its second hop, one that does."""
        share = CHAIN_SHARE * min(1.0, max(0.0, (progress - CHAINS_FROM) / (CHAINS_ALL - CHAINS_FROM)))
        while True:
            if rng.random() >= share:
                single = self._asked.draw_single(rng)
                if single is not None:
                    return single, None
            elif rng.random() < CROSSED_SHARE:
                if (crossed := self._asked.draw_crossed(rng)) is not None:
                    return crossed
            elif (chain := self._asked.draw_chain(rng)) is not None:
                return chain, None

    def _set(
        self, rng: random.Random, asked: Asked, own: Passage | None, stands: int,
        found: Sequence[Passage], count: int,
    ) -> list[Example]:  # fmt: skip
        """The rows of a set of passages, a third of them of its question."""
        needed = [self._asked.passages[row] for row in asked.rows]
        if own is not None:
            needed[1] = own
        names = {passage.title for passage in needed}
        others = [p for p in found if p.title not in names and p.id not in {n.id for n in needed}]
        kept = needed[: stands + 1]
        if stands + 1 < len(needed) and rng.random() < LATER_PASSAGE_SHARE:
            kept = needed
        removed = None
        if rng.random() < DROPPED_SHARE:
            kept = [passage for passage in kept if passage is not needed[stands]]
        elif len(needed) == 1 and rng.random() < REMOVED_SHARE:
            removed, kept = self._without(asked, kept)
        evidence = sample_passages(rng, [*kept, *others], {p.id for p in kept}, max(count, len(kept)))
        there = {passage.id for passage in evidence}
        told = next((n for n, p in enumerate(needed) if p.id not in there or p.id == removed), len(needed))
        plan: list[tuple[Asked, int, int]] = []
        usable = [self._number[p.id] for p in evidence if p.id in self._number and p.id != removed]
        for number in range(self._rows):
            if number < self._rows // 3 or not usable:
                plan.append((asked, told, stands))
            else:
                side = self._side(rng, usable)
                plan.append((side or asked, len(side.statements) if side else told, 0 if side else stands))
        rename = self._renaming(rng, [row[0] for row in plan], evidence)
        return self._examples(rng, plan, evidence, rename)

    def _without(self, asked: Asked, kept: list[Passage]) -> tuple[str | None, list[Passage]]:
        """The passage of a question without the sentences that have its answer."""
        titled = self._asked.titled[asked.rows[0]]
        body = " ".join(sentence for sentence in titled.sentences if asked.answer not in sentence)
        if not body or asked.answer in titled.name or asked.template in ("kind", "who", "clause"):
            return None, kept
        return kept[0].id, [replace(kept[0], contents=f"{kept[0].title}\n{body}")]

    def _side(self, rng: random.Random, rows: Sequence[int]) -> Asked | None:
        """Another question about one of the passages there."""
        lot, row = rng.random(), rng.choice(rows)
        if lot < UNCLEAR_SHARE:
            return self._asked.draw_unclear(rng, rows)
        if lot < UNCLEAR_SHARE + MISSING_SHARE:
            return self._asked.draw_missing(rng, row)
        return self._asked.draw_single(rng, row)

    def _renaming(
        self, rng: random.Random, asked: Iterable[Asked], evidence: Sequence[Passage]
    ) -> Callable[[str], str]:
        if rng.random() >= RENAMED_SHARE:
            return lambda text: text
        renamer, names = self._asked.renamer, []
        for passage in evidence:
            if (row := self._number.get(passage.id)) is None:
                names.append((passage.title, "person"))
            else:
                names.append((self._asked.titled[row].name, self._asked.group_of(row)))
        for each in asked:
            relation = each.template.rpartition("+")[2]
            kind = self._asked.kind_of_answer(relation)
            if kind and " and " not in each.answer and "," not in each.answer:
                names.append((each.answer, kind))
        return renamer.draw(rng, names)

    def _examples(
        self, rng: random.Random, plan: Sequence[tuple[Asked, int, int]], evidence: Sequence[Passage],
        rename: Callable[[str], str],
    ) -> list[Example]:  # fmt: skip
        builder = self._builder
        texts = [rename(passage.text) for passage in evidence]
        facts = builder.build_prompt("", texts).facts
        index, rows = CopyIndex(facts), []
        for asked, told, stands in plan:
            said = [rename(statement) for statement in asked.statements]
            answer = rename(asked.answer)
            try:
                prompt = replace(builder.build_prompt(rename(asked.question), []), facts=facts)
            except QuestionError:  # its names are longer than a prompt holds
                continue
            open_end = stands < told < len(said)  # what comes next has its passage later
            if told < len(said) and not open_end:
                said, answer = said[:told], UNKNOWN
            ids = list(builder.tokenizer.encode(" ".join((*said, f"### {answer}"))))
            if len(ids) >= builder.shape.canvas_length:
                continue
            standing = len(builder.tokenizer.encode(" ".join(said[:stands]))) if stands else 0
            row = builder.build_example(rng, prompt, ids, min(standing, len(ids) - 1), index.find(ids))
            if open_end:
                known = len(builder.tokenizer.encode(" ".join(said[:told]))) + MAX_OPEN_TOKENS
                hidden = tuple(hide or place >= known for place, hide in enumerate(row.masked))
                counted = tuple(hide and place < known for place, hide in enumerate(hidden))
                if not any(counted):  # all that can be known is shown: nothing of it would be learned
                    hidden = tuple(place >= standing for place in range(len(row.masked)))
                    counted = tuple(standing <= place < known for place in range(len(row.masked)))
                row = replace(row, masked=hidden, supervised=counted)
            rows.append(row)
        return rows
