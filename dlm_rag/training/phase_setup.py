"""A phase put together: its data (worlds, own questions, documents), its validation, its trainer."""

import json
import random
from pathlib import Path
from typing import Any

from dlm_rag.config import Config, TrainConfig
from dlm_rag.data.synthetic_world import build_passage_record, make_world, make_world_question, write_world
from dlm_rag.errors import ConfigError, QuestionError
from dlm_rag.questions import Question, read_questions
from dlm_rag.retrieval import load_retriever
from dlm_rag.retrieval.build_once import build_once
from dlm_rag.retrieval.corpus import open_corpus
from dlm_rag.training.data.corpus_questions import generate_corpus_questions
from dlm_rag.training.data.documents import PackedDocuments, open_token_file
from dlm_rag.training.data.question_examples import QuestionExamples, target_response
from dlm_rag.training.data.world_examples import WorldExamples
from dlm_rag.training.distributed import DistributedContext
from dlm_rag.training.model_init import InitialModel, open_initial_model
from dlm_rag.training.rl.rollouts import FileQuestionSource, WorldQuestionSource
from dlm_rag.training.rl.task import RlTask
from dlm_rag.training.supervised_tasks import AdaptTask, PretrainTask, SftTask
from dlm_rag.training.task import Task
from dlm_rag.training.trainer import Trainer
from dlm_rag.training.uniform_sft import UniformSftTask
from dlm_rag.training.validation import DocumentValidation, QuestionValidation, Validation

VALIDATION_SEED = 1_000_000  # test worlds of reports have small seeds
DOCUMENT_WORLDS = 20


def open_trainer(
    config: Config,
    folder: Path,
    processes: DistributedContext | None = None,
    phase: str | None = None,
    origin: InitialModel | None = None,
) -> tuple[Trainer, Validation]:
    """The trainer of a phase (the first where none is named) and its validation; weights are read.

    Raises `UserError`.
    """
    processes, origin = processes or DistributedContext(0, 1, 0), origin or open_initial_model(config)
    phase = next(iter(config.train.get_phase_configs())) if phase is None else phase
    task, validation = open_phase(config, phase, origin, folder)
    return Trainer(config, origin, task, folder, processes, phase), validation


def open_phase(config: Config, phase: str, origin: InitialModel, folder: Path) -> tuple[Task, Validation]:
    """The task of a phase, and what it is validated with; raises `UserError` for data that cannot do."""
    train, tokenizer = config.train.get_phase_configs()[phase], origin.tokenizer
    if train.objective in ("pretrain", "adapt"):
        files = config.data.documents or {"worlds": str(write_world_documents(config, folder))}
        where = config.retrieval.index_dir
        sources = {name: open_token_file(path, tokenizer, where) for name, path in files.items()}
        longest = origin.config.max_position_embeddings
        if train.sequence_length + origin.config.shifted > longest and train.rope_theta is None:
            raise ConfigError(
                f"sequence_length={train.sequence_length} is beyond the model's {longest} positions: set "
                "rope_theta too"
            )
        documents = PackedDocuments(sources, tokenizer, train, phase, origin.config.shifted)
        return make_task(documents, config, train, origin), DocumentValidation(documents)
    if config.data.corpus is None:
        validation, top_k = (
            open_world_validation(config, phase, folder / "validation"),
            config.retrieval.top_k,
        )
        if train.objective == "rl":
            return make_task(WorldQuestionSource(train, top_k), config, train, origin), validation
        worlds = WorldExamples(tokenizer, train, origin.config, top_k)
        return make_task(worlds, config, train, origin), validation
    retrieval, corpus = config.retrieval, open_corpus(config.data.corpus, config.retrieval.index_dir)
    beside: list[Question] = []
    crossed = None
    if config.data.questions is None:
        made = generate_corpus_questions(
            corpus, tokenizer, origin.config, train.max_hops, config.data.held_out
        )
        kept, beside, crossed = made.chains, made.single_passage, made.draw_counterfactual
        asked = sample_validation_questions(made.held_out, train.eval_questions, train.seed)
    else:
        questions = read_questions(config.data.questions)
        held = min(train.eval_questions, len(questions) // 10)
        kept, asked = questions[: len(questions) - held], questions[len(questions) - held :]
    unanswered = [question.id for question in (*kept, *asked) if not question.golden_answers]
    if train.objective == "rl" and unanswered:
        raise QuestionError(f"question '{unanswered[0]}' has no 'golden_answers' to be rewarded by")
    retriever = load_retriever(retrieval, corpus)
    truths = [target_response(question) for question in asked]
    engine = config.engine.for_training_rollouts
    validation = QuestionValidation(asked, truths, retriever, config.decode, train.seed, engine)
    if train.objective == "rl":
        return make_task(
            FileQuestionSource(kept, retriever, train, phase), config, train, origin
        ), validation
    answers = QuestionExamples(kept, retriever, tokenizer, origin.config, train, phase)
    answers.add_single_passage_questions(beside, crossed)
    return make_task(answers, config, train, origin), validation


def sample_validation_questions(questions: list[Question], count: int, seed: int) -> list[Question]:
    """As many of the questions as are wanted, by lot."""
    return random.Random(f"validation/{seed}").sample(questions, min(count, len(questions)))


def make_task(source: Any, config: Config, train: TrainConfig, origin: InitialModel) -> Task:
    """The task of a phase; source: what its documents, rows or questions come from."""
    if train.objective == "rl":
        return RlTask(source, config, train, origin.tokenizer)
    if train.objective == "sft":  # with the model's own kind of noise
        return (SftTask if origin.config.noise is None else UniformSftTask)(source, config, train, origin)
    kind = AdaptTask if train.objective == "adapt" else PretrainTask
    return kind(source, train, origin.tokenizer.end_ids)


def open_world_validation(config: Config, phase: str, folder: Path) -> QuestionValidation:
    """A test-split world, whose words training never sees, written once into `folder`."""
    train = config.train.get_phase_configs()[phase]
    seed, passages = VALIDATION_SEED + train.seed, train.world_passages
    number, hops = train.eval_questions, train.max_hops
    built = build_once(
        folder, lambda scratch: write_validation_world(scratch, seed, passages, number, hops)
    )
    questions = read_questions(built / "questions.jsonl")
    truths = json.loads((built / "responses.json").read_text(encoding="utf-8"))
    retriever = load_retriever(
        built / "corpus.jsonl", top_k=config.retrieval.top_k, index_dir=str(built / "index")
    )
    engine = config.engine.for_training_rollouts
    return QuestionValidation(questions, truths, retriever, config.decode, train.seed, engine)


def write_validation_world(folder: Path, seed: int, passages: int, questions: int, hops: int) -> None:
    """Corpus, questions and true responses of a test world."""
    written = write_world(folder, seed, "test", passages, questions, hops=hops)
    truths = [question.reasoning for question in written]
    (folder / "responses.json").write_text(json.dumps(truths), encoding="utf-8")


def write_world_documents(config: Config, folder: Path) -> Path:
    """Passages and answered questions of training worlds as documents, written once into `folder`."""

    def write(scratch: Path) -> None:
        with (scratch / "documents.jsonl").open("w", encoding="utf-8") as file:
            for number in range(DOCUMENT_WORLDS):
                seed = config.train.seed * 1_000_003 + number
                world = make_world(seed, "train", config.train.world_passages)
                rng = random.Random(f"documents/{seed}")
                texts = [build_passage_record(world, entity) for entity in world.entities]
                lines = [f"{record['title']}\n{record['contents']}" for record in texts]
                asked = (make_world_question(rng, world, rng.randint(1, 4), training=True) for _ in lines)
                lines += [f"{q.question}\n{q.reasoning}" for q in asked if q is not None]
                rng.shuffle(lines)
                file.writelines(json.dumps({"text": line}) + "\n" for line in lines)

    return build_once(folder / "documents", write) / "documents.jsonl"
