"""Training examples from invented worlds: prompts as they occur while decoding.

A group is one set of passages and several (question, mask) rows on it. The passages are what our own
BM25 finds for a question at a moment of its decoding: some hops written, the next one guessed wrongly
now and then, evidence of later hops missing. Everything follows from (seed, step, group): nothing
has to be saved to go on, and any process can make any group.
"""

import json
import random
import tempfile
from collections.abc import Iterable, Iterator
from functools import lru_cache
from pathlib import Path

from dlm_rag.config import TrainConfig
from dlm_rag.data.synthetic_world import (
    Entity,
    World,
    WorldQuestion,
    build_passage_record,
    make_world,
    make_world_question,
)
from dlm_rag.retrieval import load_retriever
from dlm_rag.retrieval.corpus import Passage
from dlm_rag.retrieval.query import build_query
from dlm_rag.text import overlapping_spans
from dlm_rag.training.data.examples import Example, ExampleBuilder, Pointer, sample_passages

HOPS = (1, 2, 2, 3, 3, 4, 4)  # of the questions that evidence is retrieved for
SIDE_HOPS = (1, 1, 1, 2)  # of questions that start at a passage of that evidence
WORLDS = 6  # that examples are drawn from at a time
WRONG_HOP_SHARE = 0.4  # share of states whose next hop is guessed wrongly in the query


class IndexedWorld:
    """A training world with its passages in our own BM25."""

    def __init__(self, seed: int, passages: int, top_k: int) -> None:
        self.world: World = make_world(seed, "train", passages)
        self.by_id = {entity.id: entity for entity in self.world.entities}
        with tempfile.TemporaryDirectory() as folder:  # mapped files live on after they are unlinked
            path = Path(folder, "corpus.jsonl")
            lines = (json.dumps(build_passage_record(self.world, entity)) for entity in self.world.entities)
            path.write_text("\n".join(lines), encoding="utf-8")
            self.retriever = load_retriever(path, top_k=top_k, index_dir=f"{folder}/index")
        self.passages = {passage.id: passage for passage in self.retriever.corpus}

    def search(self, question: str, response: str) -> list[Passage]:
        """What the decoder would find at that moment."""
        return self.retriever.search([build_query("proxy", question, response)])[0]


def draw_world_question(
    rng: random.Random, indexed: IndexedWorld, hops: int, start: Entity | None = None
) -> WorldQuestion:
    """A question of so many hops, or of fewer where there is no way so long."""
    while True:
        question = make_world_question(rng, indexed.world, hops, training=True, start=start)
        if question is not None:
            return question
        hops = 1 + rng.randrange(hops)  # some starts have no long way to go


class WorldExamples:
    """Batches of examples for every step; the worlds change as training goes on."""

    def __init__(self, builder: ExampleBuilder, train: TrainConfig, top_k: int) -> None:
        self._builder, self._train, self._top_k = builder, train, top_k
        self._hops = [n for n in HOPS if n <= train.max_hops]
        self._side_hops = [n for n in SIDE_HOPS if n <= train.max_hops]
        self._world = lru_cache(WORLDS)(self._make_world)

    def examples(self, step: int, items: Iterable[int], passages: tuple[int, int]) -> list[Example]:
        """Some groups of a step, with between passages[0] and passages[1] passages in each prompt."""
        newest = step // self._train.steps_per_world
        examples: list[Example] = []
        for group in items:
            rng = random.Random(f"examples/{self._train.seed}/{step}/{group}")
            world = self._world(rng.randrange(max(0, newest - WORLDS + 1), newest + 1))
            examples.extend(self._group(rng, world, rng.randint(*passages)))
        return examples

    def _make_world(self, number: int) -> IndexedWorld:
        seed = self._train.seed * 1_000_003 + number
        return IndexedWorld(seed, self._train.world_passages, self._top_k)

    def _group(self, rng: random.Random, indexed: IndexedWorld, count: int) -> Iterator[Example]:
        question = draw_world_question(rng, indexed, rng.choice(self._hops))
        written = rng.randrange(question.hops + 1)
        response = " ".join(question.sentences[:written])
        if written < question.hops and rng.random() < WRONG_HOP_SHARE:
            guess = rng.choice(indexed.world.entities).name
            response = f"{response} {question.sentences[written].partition(' ')[0]} {guess}."
        found = indexed.search(question.question, response)
        needed = {subject.id for subject in question.subjects[: written + 1]}
        if not any(passage.id in needed for passage in found):
            found = [indexed.passages[question.subjects[0].id], *found]
        evidence = sample_passages(rng, found, needed, count)
        for row in range(self._train.rows_per_set):
            if row < self._train.rows_per_set // 2:
                yield self._example(rng, question, evidence, written)
            else:
                start = indexed.by_id[rng.choice(evidence).id]
                side = draw_world_question(rng, indexed, rng.choice(self._side_hops), start)
                yield self._example(rng, side, evidence, rng.randrange(side.hops + 1))

    def _example(
        self, rng: random.Random, question: WorldQuestion, evidence: list[Passage], written: int
    ) -> Example:
        ids = list(self._builder.tokenizer.encode(question.reasoning))
        prompt = self._builder.build_prompt(question.question, [passage.text for passage in evidence])
        mentions = self._mentions(question, ids)
        rows = {passage.id: row for row, passage in enumerate(evidence)}
        pointers: list[Pointer] = []
        for hop, positions in mentions:
            row = rows.get(question.subjects[hop].id)
            at = None if row is None else find_subsequence(prompt.facts[row], [ids[p] for p in positions])
            if row is not None and at is not None:
                pointers += [Pointer(p, row, at + n) for n, p in enumerate(positions)]
        known = [position for hop, where in mentions[:-1] if hop < written for position in where]
        return self._builder.build_example(rng, prompt, ids, max(known, default=-1) + 1, pointers)

    def _mentions(self, question: WorldQuestion, ids: list[int]) -> list[tuple[int, list[int]]]:
        """The token positions of each mention of what a hop found."""
        text, spans = self._builder.tokenizer.decode_with_offsets(ids)
        shift = len(text) - len(question.reasoning)  # a leading blank, where the tokenizer adds one
        return [
            (hop, overlapping_spans(spans, start + shift, stop + shift))
            for hop, start, stop in question.object_mention_spans()
        ]


def find_subsequence(tokens: tuple[int, ...], part: list[int]) -> int | None:
    """Where `part` begins in `tokens` for the first time, or None."""
    last = len(tokens) - len(part)
    return next((n for n in range(last + 1) if list(tokens[n : n + len(part)]) == part), None)
