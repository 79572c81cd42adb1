"""What retrieval can find in an invented world: the ceiling of any model that answers about it.

    python profiling/bench_synthetic_world.py 7 retrieval.top_k=7

For questions of every length, in percent: the questions all of whose passages are found with the
question alone; and those where each passage is found at its turn, once all hops before it are written
right and the hop itself is guessed wrongly, as a proxy response would have it.
"""

import random
import sys
import tempfile
from dataclasses import replace
from pathlib import Path

from rich.console import Console
from rich.table import Table

from dlm_rag.cli import run_program
from dlm_rag.commands.cli_args import parse_command_line, parse_int
from dlm_rag.data.synthetic_world import World, WorldQuestion, make_world, make_world_questions, write_world
from dlm_rag.errors import ConfigError
from dlm_rag.retrieval import load_retriever
from dlm_rag.retrieval.base import Retriever
from dlm_rag.retrieval.query import build_query

QUESTIONS_PER_HOPS = 150  # of each number of hops


def find_hop_by_hop(retriever: Retriever, world: World, questions: list[WorldQuestion]) -> list[list[bool]]:
    """For each question, whether the passage of each hop is found at its turn."""
    rng = random.Random(0)
    queries = []
    for question in questions:
        for hop, found in enumerate(question.objects):
            guess = question.sentences[hop].replace(found, rng.choice(world.entities).name)
            response = " ".join((*question.sentences[:hop], guess))
            queries.append(build_query("proxy", question.question, response))
    evidence = iter(retriever.search(queries))
    return [
        [subject.id in {p.id for p in next(evidence)} for subject in question.subjects]
        for question in questions
    ]


def find_from_question_alone(retriever: Retriever, questions: list[WorldQuestion]) -> list[bool]:
    """For each question, whether the question alone finds all its passages."""
    found = retriever.search([build_query("question", question.question) for question in questions])
    return [
        {subject.id for subject in question.subjects} <= {passage.id for passage in passages}
        for question, passages in zip(questions, found, strict=True)
    ]


def main(argv: list[str]) -> None:
    words = parse_command_line(__doc__ or "", argv)
    if len(words.questions) != 1:
        raise ConfigError("the one word beside the settings is the seed of the world")
    config, seed = words.config, parse_int(words.questions[0], low=0)
    table = Table("hops", "by the question alone %", "each at its turn %", "of that, hop by hop %")
    with tempfile.TemporaryDirectory() as folder:
        write_world(Path(folder), seed, "test", 2000, 1)
        world = make_world(seed)
        retriever = load_retriever(
            replace(config.retrieval, corpus=str(Path(folder, "corpus.jsonl")), index_dir=f"{folder}/index")
        )
        asked = make_world_questions(world, seed, QUESTIONS_PER_HOPS)
        for hops in (1, 2, 3, 4):
            questions = [q for q in asked if q.hops == hops]
            found = find_hop_by_hop(retriever, world, questions)
            table.add_row(
                str(hops),
                f"{100 * sum(find_from_question_alone(retriever, questions)) / len(questions):.0f}",
                f"{100 * sum(map(all, found)) / len(questions):.0f}",
                " ".join(
                    f"{100 * sum(column) / len(questions):.0f}" for column in zip(*found, strict=True)
                ),
            )
    Console(file=sys.stdout).print(table)


if __name__ == "__main__":
    run_program(main)
