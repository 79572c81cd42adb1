"""A phase put together: its data (worlds, own questions, documents), its validation, its trainer."""

import json
import random
from pathlib import Path
from typing import Any

from dlm_rag.config import Config, TrainConfig
from dlm_rag.data.world import make_question, make_world, passage_record, write_world
from dlm_rag.errors import ConfigError, QuestionError
from dlm_rag.questions import Question, read_questions
from dlm_rag.retrieval import load_retriever
from dlm_rag.retrieval.corpus import open_corpus
from dlm_rag.retrieval.index import build_once
from dlm_rag.training.origin import Origin, begin
from dlm_rag.training.processes import Processes
from dlm_rag.training.redrawn import RedrawnSft
from dlm_rag.training.rl import Rl
from dlm_rag.training.rollouts import FileQuestions, WorldQuestions
from dlm_rag.training.rows.answered import AnsweredQuestions, response_of
from dlm_rag.training.rows.documents import Documents, open_documents
from dlm_rag.training.rows.made import make_questions
from dlm_rag.training.rows.worlds import WorldExamples
from dlm_rag.training.task import Task
from dlm_rag.training.tasks import Adapt, Pretrain, Sft
from dlm_rag.training.trainer import Trainer
from dlm_rag.training.validation import DocumentValidation, QuestionValidation, Validation

VALIDATION_SEED = 1_000_000  # test worlds of reports have small seeds
WORLDS_OF_DOCUMENTS = 20


def open_trainer(
    config: Config,
    folder: Path,
    processes: Processes | None = None,
    phase: str | None = None,
    origin: Origin | None = None,
) -> tuple[Trainer, Validation]:
    """The trainer of a phase (the first where none is named) and its validation; weights are read.

    Raises `UserError`.
    """
    processes, origin = processes or Processes(0, 1, 0), origin or begin(config)
    phase = next(iter(config.train.in_phases())) if phase is None else phase
    task, validation = open_phase(config, phase, origin, folder)
    return Trainer(config, origin, task, folder, processes, phase), validation


def open_phase(config: Config, phase: str, origin: Origin, folder: Path) -> tuple[Task, Validation]:
    """The task of a phase, and what it is validated with; raises `UserError` for data that cannot do."""
    train, tokenizer = config.train.in_phases()[phase], origin.tokenizer
    if train.objective in ("pretrain", "adapt"):
        files = config.data.documents or {"worlds": str(world_documents(config, folder))}
        where = config.retrieval.index_folder
        sources = {name: open_documents(path, tokenizer, where) for name, path in files.items()}
        longest = origin.config.max_position_embeddings
        if train.sequence_length + origin.config.shifted > longest and train.rope_theta is None:
            raise ConfigError(
                f"sequence_length={train.sequence_length} is beyond the model's {longest} positions: set "
                "rope_theta too"
            )
        documents = Documents(sources, tokenizer, train, phase, origin.config.shifted)
        return task_of(documents, config, train, origin), DocumentValidation(documents)
    if config.data.corpus is None:
        validation, top_k = world_validation(config, phase, folder / "validation"), config.retrieval.top_k
        if train.objective == "rl":
            return task_of(WorldQuestions(train, top_k), config, train, origin), validation
        worlds = WorldExamples(tokenizer, train, origin.config, top_k)
        return task_of(worlds, config, train, origin), validation
    retrieval, corpus = config.retrieval, open_corpus(config.data.corpus, config.retrieval.index_folder)
    beside: list[Question] = []
    crossed = None
    if config.data.questions is None:
        made = make_questions(corpus, tokenizer, origin.config, train.hops, config.data.held_out)
        kept, beside, crossed = made.chains, made.beside, made.crossed
        asked = some(made.held_out, train.validation_questions, train.seed)
    else:
        questions = read_questions(config.data.questions)
        held = min(train.validation_questions, len(questions) // 10)
        kept, asked = questions[: len(questions) - held], questions[len(questions) - held :]
    unanswered = [question.id for question in (*kept, *asked) if not question.golden_answers]
    if train.objective == "rl" and unanswered:
        raise QuestionError(f"question '{unanswered[0]}' has no 'golden_answers' to be rewarded by")
    retriever = load_retriever(retrieval, corpus)
    truths = [response_of(question) for question in asked]
    engine = config.engine.beside_training
    validation = QuestionValidation(asked, truths, retriever, config.decode, train.seed, engine)
    if train.objective == "rl":
        return task_of(FileQuestions(kept, retriever, train, phase), config, train, origin), validation
    answers = AnsweredQuestions(kept, retriever, tokenizer, origin.config, train, phase)
    answers.beside(beside, crossed)
    return task_of(answers, config, train, origin), validation


def some(questions: list[Question], count: int, seed: int) -> list[Question]:
    """As many of the questions as are wanted, by lot."""
    return random.Random(f"validation/{seed}").sample(questions, min(count, len(questions)))


def task_of(source: Any, config: Config, train: TrainConfig, origin: Origin) -> Task:
    """The task of a phase; source: what its documents, rows or questions come from."""
    if train.objective == "rl":
        return Rl(source, config, train, origin.tokenizer)
    if train.objective == "sft":  # with the model's own kind of noise
        return (Sft if origin.config.noise is None else RedrawnSft)(source, config, train, origin)
    kind = Adapt if train.objective == "adapt" else Pretrain
    return kind(source, train, origin.tokenizer.end_ids)


def world_validation(config: Config, phase: str, folder: Path) -> QuestionValidation:
    """A test-split world, whose words training never sees, written once into `folder`."""
    train = config.train.in_phases()[phase]
    seed, passages = VALIDATION_SEED + train.seed, train.world_passages
    number, hops = train.validation_questions, train.hops
    built = build_once(folder, lambda scratch: write_validation(scratch, seed, passages, number, hops))
    questions = read_questions(built / "questions.jsonl")
    truths = json.loads((built / "responses.json").read_text(encoding="utf-8"))
    retriever = load_retriever(
        built / "corpus.jsonl", top_k=config.retrieval.top_k, index_folder=str(built / "index")
    )
    engine = config.engine.beside_training
    return QuestionValidation(questions, truths, retriever, config.decode, train.seed, engine)


def write_validation(folder: Path, seed: int, passages: int, questions: int, hops: int) -> None:
    """Corpus, questions and true responses of a test world."""
    written = write_world(folder, seed, "test", passages, questions, hops=hops)
    truths = [question.reasoning for question in written]
    (folder / "responses.json").write_text(json.dumps(truths), encoding="utf-8")


def world_documents(config: Config, folder: Path) -> Path:
    """Passages and answered questions of training worlds as documents, written once into `folder`."""

    def write(scratch: Path) -> None:
        with (scratch / "documents.jsonl").open("w", encoding="utf-8") as file:
            for number in range(WORLDS_OF_DOCUMENTS):
                seed = config.train.seed * 1_000_003 + number
                world = make_world(seed, "train", config.train.world_passages)
                rng = random.Random(f"documents/{seed}")
                texts = [passage_record(world, entity) for entity in world.entities]
                lines = [f"{record['title']}\n{record['contents']}" for record in texts]
                asked = (make_question(rng, world, rng.randint(1, 4), training=True) for _ in lines)
                lines += [f"{q.question}\n{q.reasoning}" for q in asked if q is not None]
                rng.shuffle(lines)
                file.writelines(json.dumps({"text": line}) + "\n" for line in lines)

    return build_once(folder / "documents", write) / "documents.jsonl"
