"""Invented worlds: answers are where they should be and nowhere else, splits share no word."""

import json
import random
import time
from collections import Counter

import pytest

from dlm_rag.data.synthetic_world import (
    NAME_PATTERN_WORDS,
    RELATIONS,
    build_passage_record,
    get_object_text,
    is_held_out_path,
    make_world,
    make_world_question,
    make_world_questions,
    write_world,
)
from dlm_rag.questions import read_questions
from dlm_rag.retrieval import load_retriever
from dlm_rag.retrieval.base import build_query
from dlm_rag.retrieval.corpus import open_corpus


@pytest.fixture(scope="module")
def world():
    return make_world(1, "test", 400)


def invented_words(world):
    names = [entity.name for entity in world.entities]
    return {word for name in names for word in name.split() if word not in NAME_PATTERN_WORDS}


def test_test_worlds_share_no_word_with_training_worlds():
    test = set().union(*(invented_words(make_world(seed, "test", 300)) for seed in range(5)))
    train = set().union(*(invented_words(make_world(seed, "train", 300)) for seed in range(20)))
    assert len(test) > 100 and len(train) > 1000
    assert not test & train


@pytest.mark.slow
def test_a_huge_world_takes_time_linear_in_its_size_and_says_how_far_it_is(caplog, monkeypatch):
    monkeypatch.setattr("dlm_rag.progress.LOG_EVERY_SECONDS", 0.0)
    start = time.process_time()
    with caplog.at_level("INFO", "dlm_rag.progress"):
        assert len(make_world(1, "test", 20_000).contents) > 19_000
    assert time.process_time() - start < 20, "seconds; where it was quadratic it took minutes"
    for what in ("inventing words", "inventing names", "inventing passages"):
        assert f"{what}: 10,000 of " in caplog.text


def test_each_hop_is_told_in_the_passage_of_its_subject_and_nowhere_in_the_question(world):
    """The question names its first subject alone; mentions are where the reasoning names what was found."""
    for question in make_world_questions(world, 1, 50):
        hops = zip(question.subjects, question.relations, question.objects, strict=True)
        for subject, relation, found in hops:
            assert found == get_object_text(subject.facts[relation]) and found in world.contents[subject.id]
        assert question.reasoning.endswith(f". ### {question.answer}")
        mentions = question.object_mention_spans()
        assert [hop for hop, _, _ in mentions] == [*range(question.hops), question.hops - 1]
        for hop, start, end in mentions:
            assert question.reasoning[start:end] == question.objects[hop]
        first, *later = question.subjects
        rest = question.question.replace(first.name, "")
        assert rest != question.question and not any(subject.name in rest for subject in later)


def test_names_are_unique_and_share_words(world):
    names = [entity.name for entity in world.entities]
    assert len(set(names)) == len(names)
    assert names != [entity.name for entity in make_world(2, "test", 400).entities], "of another seed"
    invented = [[w for w in name.split() if w not in NAME_PATTERN_WORDS] for name in names]
    uses = Counter(word for words in invented for word in words)
    shared = sum(any(uses[word] > 1 for word in words) for words in invented)
    assert shared > 0.5 * len(names), "a word alone does not tell which entity is meant"


def test_the_next_passage_is_found_once_the_hop_before_it_is_written(tmp_path):
    """What interleaving lives on, and static retrieval does not have: by our BM25, K = 7."""
    write_world(tmp_path, seed=11, split="test", passages=1500, per_hop=1)
    retriever = load_retriever(tmp_path / "corpus.jsonl", top_k=7, index_dir=str(tmp_path / "index"))
    questions = [q for q in make_world_questions(make_world(11, "test", 1500), 1, 40) if q.hops > 1]

    def finds(question, hop, response):
        found = retriever.search([build_query("proxy", question.question, response)])[0]
        return question.subjects[hop].id in {passage.id for passage in found}

    later = [(q, hop) for q in questions for hop in range(1, q.hops)]
    rng, entities = random.Random(0), make_world(11, "test", 1500).entities
    found = 0
    for question, hop in later:
        guess = question.sentences[hop].replace(question.objects[hop], rng.choice(entities).name)
        found += finds(question, hop, " ".join((*question.sentences[:hop], guess)))
    assert found > 0.9 * len(later), "even where the hop itself is guessed wrongly"
    by_chance = sum(finds(question, hop, "") for question, hop in later)
    assert by_chance < 0.1 * len(later)


def longest_piece(template):
    return max(template.split("{s}"), key=len)


def test_training_questions_use_nothing_that_is_held_out(world):
    shown = [w for r in RELATIONS.values() for w in (*r["phrases"][:-1], *r["questions"][:-1])]
    held = [longest_piece(w[-1]) for r in RELATIONS.values() for w in (r["phrases"], r["questions"])]
    held = [piece for piece in held if not any(piece in wording for wording in shown)]
    assert len(held) > len(RELATIONS)
    rng = random.Random(0)
    made = [make_world_question(rng, world, 1 + n % 4, training=True) for n in range(800)]
    for question in filter(None, made):
        assert not is_held_out_path(question.relations)
        assert not any(piece in question.question for piece in held), question.question


def test_files_are_what_the_programs_read(tmp_path, world):
    write_world(tmp_path, seed=5, split="test", passages=200, per_hop=5)
    corpus = open_corpus(tmp_path / "corpus.jsonl")
    questions = read_questions(tmp_path / "questions.jsonl")
    ids = {passage.id for passage in corpus}
    assert len(questions) == 20 and all(set(q.supporting_ids) <= ids for q in questions)
    assert all(len(q.supporting_ids) == q.hops for q in questions)
    line = json.loads((tmp_path / "questions.jsonl").read_text().splitlines()[0])
    assert {"reasoning", "path", "held_out_path", "held_out_wording"} <= set(line)
    assert 1900 <= len(make_world(0).entities) <= 2100, "as many as its default says"
    assert set(build_passage_record(world, world.entities[0])) == {"id", "title", "contents"}
