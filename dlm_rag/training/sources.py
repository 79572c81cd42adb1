"""What training rows come from: invented worlds, questions of one's own, documents; and the validations.

Prompts are those that occur while decoding: the passages are what our own retriever finds for a question at
a moment of its decoding, some of the response written. Everything follows from (seed, step, item).
"""

import json
import random
import shutil
import tempfile
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from pathlib import Path

import numpy as np

from dlm_rag.answer_forms import find_answer_span
from dlm_rag.cli import print_note
from dlm_rag.config import Config, DecodeConfig, TrainConfig
from dlm_rag.config.fields import replace_settings
from dlm_rag.data import synthetic_world
from dlm_rag.data.synthetic_world import Entity, WorldQuestion, make_world, make_world_question, write_world
from dlm_rag.engine.engine import Decoder
from dlm_rag.errors import ConfigError, CorpusError, QuestionError
from dlm_rag.evaluation.metrics import score_rollout
from dlm_rag.files.build_once import DIGESTS_FILE, build_once
from dlm_rag.files.paths import expand_path
from dlm_rag.files.record_readers import list_row_files
from dlm_rag.model.denoiser import Denoiser
from dlm_rag.model.packed_batch import to_host
from dlm_rag.nvtx_ranges import profile_stage
from dlm_rag.questions import Question, read_questions
from dlm_rag.randomness import pick_shuffled
from dlm_rag.retrieval import load_retriever
from dlm_rag.retrieval.base import CorpusRetriever, Query, Retriever, build_query
from dlm_rag.retrieval.corpus import Passage, get_row_id, open_corpus
from dlm_rag.text import FUNCTION_WORDS, find_sentence_spans, overlapping_spans, split_words
from dlm_rag.tokenizer import Tokenizer
from dlm_rag.training import batches
from dlm_rag.training.batches import Example, ExampleBuilder, MaskedObjective, Pointer
from dlm_rag.training.documents import DOCUMENT_LAYOUT, PackedDocuments, open_token_file
from dlm_rag.training.task import Run
from dlm_rag.training.trainer import Trainer

HOPS = (1, 2, 2, 3, 3, 4, 4)  # of the questions that evidence is retrieved for
SIDE_HOPS = (1, 1, 1, 2)  # of questions that start at a passage of that evidence
WORLDS = 6  # that examples are drawn from at a time
WRONG_HOP_SHARE = 0.4  # share of states whose next hop is guessed wrongly in the query


class IndexedWorld:
    """A training world with its passages in our own BM25."""

    def __init__(self, seed: int, passages: int, top_k: int) -> None:
        world = self.world = make_world(seed, "train", passages)
        self.by_id = {entity.id: entity for entity in world.entities}
        with tempfile.TemporaryDirectory() as folder:  # mapped files live on after they are unlinked
            records = [synthetic_world.build_passage_record(world, entity) for entity in world.entities]
            self.retriever = load_retriever(records, top_k=top_k, index_dir=f"{folder}/index")
        self.passages = {passage.id: passage for passage in self.retriever.corpus}


def draw_world_question(
    rng: random.Random, indexed: IndexedWorld, hops: int, start: Entity | None = None, least: int = 1
) -> WorldQuestion:
    """A question of so many hops, or of fewer, but `least`, where there is no way so long."""
    while True:
        question = make_world_question(rng, indexed.world, hops, training=True, start=start)
        if question is not None:
            return question
        hops = rng.randint(least, hops)  # some starts have no long way to go


class WorldExamples:
    """Batches of examples for every step; the worlds change as training goes on."""

    def __init__(self, builder: ExampleBuilder, train: TrainConfig, top_k: int) -> None:
        self._builder, self._train = builder, train
        self._hops = [n for n in HOPS if n <= train.max_hops]
        self._side_hops = [n for n in SIDE_HOPS if n <= train.max_hops]
        seed, passages = train.seed * 1_000_003, train.world_passages
        self._world = lru_cache(WORLDS)(lambda number: IndexedWorld(seed + number, passages, top_k))

    def examples(self, step: int, items: Iterable[int], passages: tuple[int, int]) -> list[Example]:
        """Some groups of a step, with between passages[0] and passages[1] passages in each prompt."""
        newest = step // self._train.steps_per_world
        examples: list[Example] = []
        for group in items:
            rng = random.Random(f"examples/{self._train.seed}/{step}/{group}")
            world = self._world(rng.randrange(max(0, newest - WORLDS + 1), newest + 1))
            examples.extend(self._group(rng, world, rng.randint(*passages)))
        return examples

    def _group(self, rng: random.Random, indexed: IndexedWorld, count: int) -> Iterator[Example]:
        question = self._draw(rng, indexed, rng.choice(self._hops))
        written = rng.randrange(question.hops + 1)
        response = " ".join(question.sentences[:written])
        if written < question.hops and rng.random() < WRONG_HOP_SHARE:
            guess = rng.choice(indexed.world.entities).name
            response = f"{response} {question.sentences[written].partition(' ')[0]} {guess}."
        (found,) = indexed.retriever.search([build_query("proxy", question.question, response)])
        needed = {subject.id for subject in question.subjects[: written + 1]}
        if not any(passage.id in needed for passage in found):
            found = [indexed.passages[question.subjects[0].id], *found]
        evidence = batches.sample_passages(rng, found, needed, count)
        for row in range(self._train.rows_per_set):
            if row < max(1, self._train.rows_per_set // 2):
                yield self._example(rng, question, evidence, written)
            else:
                start = indexed.by_id[rng.choice(evidence).id]
                side = self._draw(rng, indexed, rng.choice(self._side_hops), start)
                yield self._example(rng, side, evidence, rng.randrange(side.hops + 1))

    def _draw(
        self, rng: random.Random, indexed: IndexedWorld, hops: int, start: Entity | None = None
    ) -> WorldQuestion:
        """A question whose response fits the canvas: of fewer hops, where one of so many does not."""
        encode, longest = self._builder.tokenizer.encode, self._builder.shape.canvas_length
        while True:
            question = draw_world_question(rng, indexed, hops, start)
            if hops == 1 or len(encode(question.reasoning)) < longest:
                return question
            hops -= 1

    def _example(
        self, rng: random.Random, question: WorldQuestion, evidence: list[Passage], written: int
    ) -> Example:
        ids = list(self._builder.tokenizer.encode(question.reasoning))
        prompt = self._builder.build_prompt(question.question, [passage.text for passage in evidence])
        text, spans = self._builder.tokenizer.decode_with_offsets(ids)
        shift = len(text) - len(question.reasoning)  # a leading blank, where the tokenizer adds one
        mentions = [  # the token positions of each mention of what a hop found
            (hop, overlapping_spans(spans, start + shift, stop + shift))
            for hop, start, stop in question.object_mention_spans()
        ]
        rows = {passage.id: row for row, passage in enumerate(evidence)}
        pointers: list[Pointer] = []
        for hop, positions in mentions:
            if (row := rows.get(question.subjects[hop].id)) is None:
                continue
            fact, part = prompt.facts[row], tuple(ids[p] for p in positions)
            starts = (n for n in range(len(fact)) if fact[n : n + len(part)] == part)
            if (at := next(starts, None)) is not None:
                pointers += [Pointer(p, row, at + n) for n, p in enumerate(positions)]
        known = [position for hop, where in mentions[:-1] if hop < written for position in where]
        return self._builder.build_example(rng, prompt, ids, max(known, default=-1) + 1, pointers)


class QuestionExamples:
    """The batches of fine-tuning on questions with known responses."""

    def __init__(
        self, questions: Sequence[Question], retriever: Retriever, builder: ExampleBuilder,
        train: TrainConfig,
    ) -> None:  # fmt: skip
        self._questions, self._retriever, self._builder = questions, retriever, builder
        self._train = train

    def examples(self, step: int, items: Iterable[int]) -> list[Example]:
        """The rows of some sets of passages of a step."""
        seed, first = self._train.seed, step * self._train.passage_sets_per_step
        drawn, queries, examples = [], list[Query](), list[Example]()
        for item in items:
            rng = random.Random(f"answered/{seed}/{step}/{item}")
            question = pick_shuffled(self._questions, first + item, seed, "questions")
            response = target_response(question)
            stands = rng.choice([0, *(end for _, end in find_sentence_spans(response))])  # characters
            queries.append(build_query("proxy", question.question, response[:stands]))
            drawn.append((rng, question.question, response, stands))
        encode, found = self._builder.tokenizer.encode, self._retriever.search(queries)
        for (rng, asked, response, stands), passages in zip(drawn, found, strict=True):
            prompt = self._builder.build_prompt(asked, [passage.text for passage in passages])
            ids, standing = list(encode(response)), len(encode(response[:stands])) if stands else 0
            for _ in range(self._train.rows_per_set):
                examples.append(self._builder.build_example(rng, prompt, ids, standing, ()))
        return examples


def check_questions(questions: Sequence[Question], builder: ExampleBuilder, rewards: bool = False) -> None:
    """Raises `QuestionError`, with their number, for questions that do not fit the context, and whose
    response is missing or does not fit the canvas; rewards: that have no answers, in place of the latter.
    """

    def refuse(names: list[str], reason: str) -> None:
        if names:
            others = f" and {len(names) - 1:,} others of {len(questions):,}" if names[1:] else ""
            raise QuestionError(f"question '{names[0]}'{others}: {reason}, or drop such rows")

    lengths, misfits = dict[str, int](), dict[str, str]()
    for question in questions:
        text = target_response(question)
        lengths[question.id] = len(builder.tokenizer.encode(text)) + 1 if text else 0
        try:
            builder.build_prompt(question.question, [])
        except QuestionError as error:
            misfits[question.id] = str(error)
    if rewards:
        lacking = [question.id for question in questions if not question.golden_answers]
        refuse(lacking, "it has no 'golden_answers' to reward")
    else:
        most, longest = max(lengths.values(), default=0), builder.shape.canvas_length
        refuse([name for name, n in lengths.items() if not n], "neither 'response' nor 'golden_answers'")
        refuse(
            [name for name, length in lengths.items() if length > longest],
            f"response and end token are more than the canvas of {longest} tokens (longest {most}): set "
            f"decode.max_new_tokens={most}",
        )
    refuse([*misfits], next(iter(misfits.values()), ""))


def target_response(question: Question) -> str:
    """What the denoiser is to write: the question's `response`, else `### ` and its first answer."""
    if question.response:
        return question.response
    return f"### {question.golden_answers[0]}" if question.golden_answers else ""


def name_answers(question: Question, form: str) -> tuple[str, ...]:
    """The answers of a question; where none are named, what its response says, if it has the form."""
    response = question.response or ""
    told = response[slice(*find_answer_span(response, form))]
    return question.golden_answers or ((told,) if told else ())


NELBO_TIMES = 4  # of each question, in equal parts of the interval


class QuestionValidation:
    """Held-out questions with their true responses."""

    def __init__(self, questions: list[Question], retriever: CorpusRetriever, config: Config) -> None:
        self.questions, self._seed = questions, config.train.seed
        soft = DecodeConfig() if config.train.objective == "rl" else config.decode  # rollouts alone read it
        own = replace_settings(config.decode, gate_temperature=soft.gate_temperature)
        self._retriever, self._config = retriever, own
        self._engine = config.engine.for_training_rollouts

    def compute_scores(self, trainer: Trainer) -> dict[str, float]:
        """Exact match, also by hops, forwards, and the NELBO; each process answers its share."""
        if not self.questions:
            return {}
        denoiser, tokenizer, processes = trainer.denoiser, trainer.origin.tokenizer, trainer.processes
        mine, whole = processes.local_items(len(self.questions)), len(self.questions)
        asked = [self.questions[number] for number in mine]
        by_hops = Counter(q.hops for q in self.questions if q.hops and q.golden_answers)
        counts = {"exact_match": sum(bool(question.golden_answers) for question in self.questions)}
        counts |= {"forwards_per_answer": whole}
        counts |= {f"exact_match_{hops}_hops": by_hops[hops] for hops in sorted(by_hops)}
        sums = dict.fromkeys(counts, 0.0)
        with profile_stage("evaluate"), trainer.evaluation_mode():
            decoder = Decoder(denoiser, self._retriever, tokenizer, self._config, engine=self._engine)
            for rollout, question in zip(decoder.decode(asked), asked, strict=True):
                scored = score_rollout(rollout, question)
                sums["exact_match"] += scored.exact_match
                sums["forwards_per_answer"] += scored.forwards
                if question.hops and question.golden_answers:
                    sums[f"exact_match_{question.hops}_hops"] += scored.exact_match
            own = [*sums.values(), *self.nelbo(denoiser, tokenizer, mine)]
        *found, nats, tokens = processes.all_reduce_sum(own)
        totals = zip(counts.items(), found, strict=True)
        return {name: total / n for (name, n), total in totals if n} | {"nelbo_per_token": nats / tokens}

    def nelbo(self, denoiser: Denoiser, tokenizer: Tokenizer, which: Sequence[int]) -> tuple[float, float]:
        """The NELBO in nats of the true responses to some questions, with an end token; and their tokens.

        Given the passages that hold the answer (of a row that was cut, the one with most of the words;
        where none are named, those found for question and response); one sample of masks at each of
        `NELBO_TIMES`, which one random offset shifts (VDM, arXiv 2107.00630, appendix I.1).
        """
        total = tokens = 0.0
        builder = ExampleBuilder(tokenizer, denoiser.config)
        for number in which:
            question, truth = self.questions[number], target_response(self.questions[number])
            rng = np.random.default_rng([*map(ord, f"nelbo/{self._seed}"), number])
            times = (rng.random() + np.arange(NELBO_TIMES) / NELBO_TIMES) % 1
            assert tokenizer.end_id is not None
            target = (*tokenizer.encode(truth), tokenizer.end_id)
            prompt = builder.build_prompt(question.question, self._evidence(question))
            shape, rows = denoiser.config, list[Example]()
            for time in times.tolist():
                rows += batches.mask_blocks_at_time(prompt, target, time, rng, shape)
            tokens += len(target)
            for n in range(0, len(rows), NELBO_TIMES):
                part = rows[n : n + NELBO_TIMES]
                total += sum_losses(denoiser, part, shape.evidence_layout) / NELBO_TIMES
        return total, tokens

    def _evidence(self, question: Question) -> list[str]:
        truth = target_response(question)
        if not question.supporting_ids:
            (found,) = self._retriever.search([build_query("proxy", question.question, truth)])
            return [passage.text for passage in found]
        wanted = {*split_words(f"{question.question} {truth}")} - FUNCTION_WORDS
        parts = (self._support.get(name) for name in question.supporting_ids)
        return [max(texts, key=lambda text: len(wanted & {*split_words(text)})) for texts in parts if texts]

    @cached_property
    def _support(self) -> dict[str, list[str]]:
        """The texts that support the questions, by the ids of passages and of rows that were cut."""
        wanted = {name for question in self.questions for name in question.supporting_ids}
        found: dict[str, list[str]] = {}
        for passage in self._retriever.corpus:
            for name in wanted.intersection((passage.id, get_row_id(passage.id))):
                found.setdefault(name, []).append(passage.text)
        return found


@dataclass(frozen=True)
class DocumentValidation:
    """The last sequences of every file, which no step trains on."""

    documents: PackedDocuments

    def compute_scores(self, trainer: Trainer) -> dict[str, float]:
        """The NELBO per token in nats, of all files together."""
        held, processes = self.documents.held_out_examples(), trainer.processes
        if not held:
            return {}
        with profile_stage("evaluate"), trainer.evaluation_mode():
            mine = processes.local_items(len(held))
            own = sum(sum_losses(trainer.denoiser, held[n], DOCUMENT_LAYOUT) for n in mine)
        tokens = sum(len(row.target) for rows in held for row in rows)
        return {"nelbo_per_token": processes.all_reduce_sum([own])[0] / tokens}


def sum_losses(denoiser: Denoiser, rows: Sequence[Example], layout: str) -> float:
    """The losses of the masked tokens of some rows in nats, by the weights of the rows."""
    batch = batches.make_masked_batch(rows, denoiser.config, layout)
    return float(to_host(MaskedObjective(denoiser)(batch, batch.counts)[1]["tokens"]))


VALIDATION_SEED = 1_000_000  # test worlds of reports have small seeds
DOCUMENT_WORLDS = 20


def open_documents(run: Run) -> PackedDocuments:
    """`data.documents`, or documents of worlds; raises `UserError`."""
    config, shape, tokenizer = run.config, run.origin.config, run.origin.tokenizer
    length, longest = config.train.sequence_length, shape.max_position_embeddings
    if length + shape.shifted > longest:
        raise ConfigError(f"sequence_length={length} is beyond the model's {longest} positions: lower it")
    if config.data.documents is None:
        paths = [write_world_documents(config, run.folder)]
    else:
        path = expand_path(config.data.documents, CorpusError)
        paths = list_row_files(path, CorpusError) if path.is_dir() else [path]
    files = [open_token_file(path, tokenizer, config.retrieval.index_dir) for path in paths]
    return PackedDocuments(files, tokenizer, config.train, shape.shifted)


def open_questions(
    run: Run, rewards: bool = False
) -> tuple[list[Question], CorpusRetriever, QuestionValidation]:
    """The questions of `data.questions`, some of them held out; rewards: as `check_questions` has it."""
    config, train = run.config, run.config.train
    assert config.data.questions is not None and config.data.corpus is not None
    given = read_questions(config.data.questions)
    builder = ExampleBuilder(run.origin.tokenizer, run.origin.config)
    check_questions(given, builder, rewards)
    kept = len(given) - min(train.eval_questions, len(given) // 10)
    form = builder.tokenizer.template.answer
    held = [replace(each, golden_answers=name_answers(each, form)) for each in given[kept:]]
    corpus = open_corpus(config.data.corpus, config.retrieval.index_dir)
    retriever = load_retriever(config.retrieval, corpus, config.model.path)  # whose own settings count
    return given[:kept], retriever, QuestionValidation(held, retriever, config)


def open_world_validation(run: Run) -> QuestionValidation:
    """A test-split world, whose words training never sees, written once into the run's folder."""
    config, train = run.config, run.config.train

    def write(folder: Path) -> None:
        seed, passages = VALIDATION_SEED + train.seed, train.world_passages
        asked = write_world(folder, seed, "test", passages, train.eval_questions, hops=train.max_hops)
        room, encode = run.origin.config.canvas_length, run.origin.tokenizer.encode
        if cut := sum(len(encode(question.reasoning)) >= room for question in asked):
            print_note(
                f"{cut} of {len(asked)} questions for validation need more than the canvas of {room} "
                "tokens, and count as wrong: raise decode.max_new_tokens, or lower train.max_hops"
            )

    built = build_once(run.folder / "validation", write)
    lines = (built / "questions.jsonl").read_text(encoding="utf-8").splitlines()
    pairs = zip(read_questions(built / "questions.jsonl"), map(json.loads, lines), strict=True)
    questions = [replace(question, response=row["reasoning"]) for question, row in pairs]
    index, top_k = str(built / "index"), run.top_k
    retriever = load_retriever(built / "corpus.jsonl", top_k=top_k, index_dir=index)
    return QuestionValidation(questions, retriever, config)


def remove_stale_worlds(folder: Path, questions: int, begins: bool) -> None:
    """Removes a world for validation of another number of questions from a run's folder; where the run
    begins, all worlds of an attempt before. What is not marked as written by a run stays."""
    written = folder / "validation" / "questions.jsonl"
    fits = written.is_file() and written.read_text("utf-8").count("\n") == questions
    for name in ("validation", "documents") if begins else ("validation",) * (not fits):
        if (folder / name / DIGESTS_FILE).is_file():
            shutil.rmtree(folder / name)


def write_world_documents(config: Config, folder: Path) -> Path:
    """Passages and answered questions of training worlds as documents, written once into `folder`."""

    def write(scratch: Path) -> None:
        with (scratch / "documents.jsonl").open("w", encoding="utf-8") as file:
            for number in range(DOCUMENT_WORLDS):
                seed = config.train.seed * 1_000_003 + number
                world = make_world(seed, "train", config.train.world_passages)
                rng = random.Random(f"documents/{seed}")
                lines = [f"{entity.name}\n{world.contents[entity.id]}" for entity in world.entities]
                asked = (make_world_question(rng, world, rng.randint(1, 4), training=True) for _ in lines)
                lines += [f"{q.question}\n{q.reasoning}" for q in asked if q is not None]
                rng.shuffle(lines)
                file.writelines(json.dumps({"text": line}) + "\n" for line in lines)

    return build_once(folder / "documents", write) / "documents.jsonl"
