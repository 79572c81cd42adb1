"""The data of a run (worlds, questions, documents) and what it is validated with."""

import json
import random
from pathlib import Path

from dlm_rag.config import Config
from dlm_rag.data.synthetic_world import make_world, make_world_question, write_world
from dlm_rag.errors import ConfigError, CorpusError
from dlm_rag.files.build_once import build_once
from dlm_rag.files.paths import expand_path
from dlm_rag.files.record_readers import list_row_files
from dlm_rag.questions import Question, read_questions
from dlm_rag.retrieval import load_retriever
from dlm_rag.retrieval.base import CorpusRetriever
from dlm_rag.retrieval.corpus import open_corpus
from dlm_rag.training.data.documents import PackedDocuments, open_token_file
from dlm_rag.training.data.question_examples import target_response
from dlm_rag.training.task import Run
from dlm_rag.training.validation import QuestionValidation

VALIDATION_SEED = 1_000_000  # test worlds of reports have small seeds
DOCUMENT_WORLDS = 20


def open_documents(run: Run) -> PackedDocuments:
    """`data.documents`, or documents of worlds; raises `UserError`."""
    config, shape, tokenizer = run.config, run.origin.config, run.origin.tokenizer
    length, longest = config.train.sequence_length, shape.max_position_embeddings
    if length + shape.shifted > longest:
        raise ConfigError(
            f"sequence_length={length} is beyond the model's {longest} positions: set a smaller one"
        )
    if config.data.documents is None:
        paths = [write_world_documents(config, run.folder)]
    else:
        path = expand_path(config.data.documents, CorpusError)
        paths = list_row_files(path, CorpusError) if path.is_dir() else [path]
    files = [open_token_file(path, tokenizer, config.retrieval.index_dir) for path in paths]
    return PackedDocuments(files, tokenizer, config.train, shape.shifted)


def open_questions(run: Run) -> tuple[list[Question], CorpusRetriever, QuestionValidation]:
    """The questions of `data.questions`, of which some are held out for validation."""
    config, train = run.config, run.config.train
    assert config.data.questions is not None and config.data.corpus is not None
    given = read_questions(config.data.questions)
    kept = len(given) - min(train.eval_questions, len(given) // 10)
    corpus = open_corpus(config.data.corpus, config.retrieval.index_dir)
    retriever = load_retriever(config.retrieval, corpus)
    truths = [target_response(question) for question in given[kept:]]
    return given[:kept], retriever, QuestionValidation(given[kept:], truths, retriever, config)


def open_world_validation(run: Run) -> QuestionValidation:
    """A test-split world, whose words training never sees, written once into the run's folder."""
    config, train = run.config, run.config.train

    def write(folder: Path) -> None:
        seed, passages = VALIDATION_SEED + train.seed, train.world_passages
        written = write_world(folder, seed, "test", passages, train.eval_questions, hops=train.max_hops)
        truths = [question.reasoning for question in written]
        (folder / "responses.json").write_text(json.dumps(truths), encoding="utf-8")

    built = build_once(run.folder / "validation", write)
    questions = read_questions(built / "questions.jsonl")
    truths = json.loads((built / "responses.json").read_text(encoding="utf-8"))
    retriever = load_retriever(
        built / "corpus.jsonl", top_k=config.retrieval.top_k, index_dir=str(built / "index")
    )
    return QuestionValidation(questions, truths, retriever, config)


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
