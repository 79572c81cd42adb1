"""Invented worlds: passages about people, places, works and companies, and questions that hop between.

    python -m dlm_rag.data.synthetic_world --seed 1 --out world/

writes `corpus.jsonl` (about 2,000 passages) and `questions.jsonl` (1 to 4 hops, with `supporting_ids`
and the `reasoning` that answers them). One passage tells of one entity, mostly without naming it
again; the answer to a hop stands in the passage of that hop's subject and nowhere in the question, so
later hops can only be found by what was read before.

What is there stays: a world that is there already is not written again, another one is refused. The
wordings are in worlds.yaml.

Words of names belong to a split, training or test, by a hash of the word: a test world shares no
invented word with any training world, whatever the seeds. Question wordings and relation paths that
training never shows are marked `held_out_wording` and `held_out_path`.
"""

from __future__ import annotations

import hashlib
import json
import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from dlm_rag.cli import CommandParser, parse_int
from dlm_rag.errors import ConfigError
from dlm_rag.files.paths import expand_path, write_text_atomic
from dlm_rag.progress import report_progress, track_progress

MAX_PASSAGES = 10**6
MAX_QUESTIONS_PER_PASSAGE = 100  # questions of one hop for each passage: more than its facts have wordings
HELD_OUT_WORDING_SHARE = 0.2
ANSWER_MARKER = "### "
TEXTS: dict[str, Any] = yaml.safe_load(Path(__file__).with_name("worlds.yaml").read_text("utf-8"))
GENRES: dict[str, list[str]] = TEXTS["genres"]
RELATIONS: dict[str, dict[str, Any]] = TEXTS["relations"]  # by name
# The only words that names of all worlds share.
NAME_PATTERN_WORDS = {
    word for names in TEXTS["names"].values() for name in names for word in name.split() if "{" not in word
}


@dataclass(eq=False)
class Entity:
    """One entity: its facts by relation name, the objects being entities or literal texts."""

    id: str
    kind: str
    name: str
    facts: dict[str, Entity | str] = field(default_factory=dict, repr=False)


@dataclass
class World:
    """The entities of a world and the text of each one's passage, by id."""

    entities: list[Entity]
    contents: dict[str, str]


@dataclass(frozen=True)
class WorldQuestion:
    """A question with the way to its answer: subjects[i] relates to the next by relations[i]."""

    question: str
    objects: tuple[str, ...]  # what each hop finds; the last is the answer
    subjects: tuple[Entity, ...]
    relations: tuple[str, ...]
    held_out_wording: bool

    @property
    def hops(self) -> int:
        return len(self.relations)

    @property
    def answer(self) -> str:
        return self.objects[-1]

    @property
    def sentences(self) -> list[str]:
        """The reasoning, one sentence a hop."""
        return [
            RELATIONS[name]["trace"].format(s=subject.name, o=found)
            for name, subject, found in zip(self.relations, self.subjects, self.objects, strict=True)
        ]

    @property
    def reasoning(self) -> str:
        """The response that answers the question: the sentences, the marker, the answer."""
        return f"{' '.join(self.sentences)} {ANSWER_MARKER}{self.answer}"

    def object_mention_spans(self) -> list[tuple[int, int, int]]:
        """Where `reasoning` names what a hop found: (hop, start, end) in characters, in order."""
        found, at = [], 0
        for hop, (name, subject) in enumerate(zip(self.relations, self.subjects, strict=True)):
            before = RELATIONS[name]["trace"].partition("{o}")[0].format(s=subject.name)
            found.append((hop, at + len(before), at + len(before) + len(self.objects[hop])))
            at += len(self.sentences[hop]) + 1
        start = at + len(ANSWER_MARKER)
        return [*found, (self.hops - 1, start, start + len(self.answer))]


def make_world(seed: int, split: str = "test", passages: int = 2000) -> World:
    """A world with `passages` entities; the same for the same arguments."""
    rng = random.Random(f"{split}/{seed}")
    # Few enough words that names share some: what distinguishes a name is the whole of it.
    pool = [make_word(rng, split) for _ in track_progress(range(2 * passages), "inventing words")]
    counts = {kind: max(2, round(share * passages)) for kind, share in TEXTS["shares"].items()}
    kinds = [kind for kind, count in counts.items() for _ in range(count)]
    rng.shuffle(kinds)
    names: dict[str, Entity] = {}
    by_kind: dict[str, list[Entity]] = {}
    for number, kind in enumerate(track_progress(kinds, "inventing names")):
        while (name := make_name(rng, kind, pool, split)) in names:
            pass
        names[name] = Entity(f"e{number}", kind, name)
        by_kind.setdefault(kind, []).append(names[name])
    _assign_facts(rng, by_kind)
    entities = list(names.values())
    contents = {e.id: _describe(rng, e, by_kind) for e in track_progress(entities, "inventing passages")}
    return World(entities, contents)


def _assign_facts(rng: random.Random, by_kind: dict[str, list[Entity]]) -> None:
    for name, relation in RELATIONS.items():
        for place, subject in enumerate(by_kind[relation["subject"]]):
            if name in subject.facts:
                continue
            if relation["object"] == "literal":
                subject.facts[name] = {
                    "occupation": rng.choice(TEXTS["occupations"].split()),
                    "product": rng.choice(TEXTS["products"].split()),
                    "year": str(rng.randrange(1800, 2000)),
                }[name]
                continue
            others = by_kind[relation["object"]]
            if relation["subject"] == relation["object"]:  # any but itself
                drawn = rng.choice(range(len(others) - 1))
                other = others[drawn + (drawn >= place)]
            else:
                other = rng.choice(others)
            subject.facts[name] = other
            if name == "spouse":
                other.facts.setdefault("spouse", subject)
    for country in by_kind["country"]:  # a capital lies in its country
        capital = country.facts["capital"]
        assert isinstance(capital, Entity)
        capital.facts["country"] = country


def get_object_text(value: Entity | str) -> str:
    """The name of an entity, or the literal itself."""
    return value.name if isinstance(value, Entity) else value


def _describe(rng: random.Random, entity: Entity, by_kind: dict[str, list[Entity]]) -> str:
    sentences = []
    for name, value in entity.facts.items():
        told = rng.choice(RELATIONS[name]["sentences"])
        sentences.append(told.format(s="{s}", o=get_object_text(value)))
    rng.shuffle(sentences)
    if rng.random() < 0.7:
        aside = rng.choice(TEXTS["asides"][entity.kind])
        work = rng.choice(by_kind[rng.choice(("book", "film", "album"))])
        aside = aside.format(p=rng.choice(by_kind["person"]).name, w=work.name, n=rng.randrange(20, 9000))
        sentences.insert(rng.randrange(len(sentences) + 1), aside)
    # The text opens with the name, as an encyclopedia does; after that a pronoun stands for it.
    pronoun = rng.choice(("He", "She")) if entity.kind == "person" else "It"
    kind = rng.choice(GENRES.get(entity.kind, [""]))
    opening = TEXTS["openings"][entity.kind].format(s=entity.name, kind=kind)
    return " ".join((opening, *(sentence.format(s=pronoun) for sentence in sentences)))


def make_world_question(
    rng: random.Random, world: World, hops: int, *, training: bool = False, start: Entity | None = None
) -> WorldQuestion | None:
    """A question along a random path of `hops` relations, from `start` where it is given.

    With `training` nothing held out is used; otherwise a share of `HELD_OUT_WORDING_SHARE` has one wording
    that training never shows. None when the path ran into a dead end: try again.
    """
    path = _sample_path(rng, start or rng.choice(world.entities), hops)
    if path is None or (training and is_held_out_path(path[1])):
        return None
    subjects, relations = path
    kind = subjects[0].kind
    phrase = f"the {kind} {subjects[0].name}" if kind in GENRES else subjects[0].name
    wordings = [RELATIONS[name]["phrases"] for name in relations[:-1]]
    wordings.append(RELATIONS[relations[-1]]["questions"])
    held_wording = not training and rng.random() < HELD_OUT_WORDING_SHARE
    held_at = rng.randrange(hops) if held_wording else None
    for hop, known in enumerate(wordings):
        phrase = (known[-1] if hop == held_at else rng.choice(known[:-1])).format(s=phrase)
    objects = [*subjects[1:], subjects[-1].facts[relations[-1]]]
    texts = tuple(map(get_object_text, objects))
    return WorldQuestion(phrase, texts, tuple(subjects), tuple(relations), held_wording)


def _sample_path(rng: random.Random, subject: Entity, hops: int) -> tuple[list[Entity], list[str]] | None:
    """A path that visits no entity twice; literals end a path."""
    subjects, relations = list[Entity](), list[str]()
    value: Entity | str = subject
    for hop in range(hops):
        assert isinstance(value, Entity)
        subjects.append(value)
        last = hop == hops - 1
        names = [name for name, found in value.facts.items() if last or isinstance(found, Entity)]
        if not names:
            return None
        relations.append(rng.choice(names))
        value = value.facts[relations[-1]]
        if isinstance(value, Entity) and value in subjects:
            return None
    return subjects, relations


def make_world_questions(world: World, seed: int, per_hop: int = 100, hops: int = 4) -> list[WorldQuestion]:
    """`per_hop` different questions for each number of hops; raises `ConfigError` for too small a world."""
    rng = random.Random(f"questions/{seed}")
    found: dict[str, WorldQuestion] = {}
    with report_progress("inventing questions", hops * per_hop) as advance:
        for count in range(1, hops + 1):
            wanted = len(found) + per_hop
            for _ in range(50 * min(per_hop, MAX_QUESTIONS_PER_PASSAGE * len(world.entities))):
                if len(found) == wanted:
                    break
                question = make_world_question(rng, world, count)
                if question is not None and question.question not in found:
                    found[question.question] = question
                    advance(1)
            if len(found) < wanted:
                raise ConfigError(
                    f"a world of {len(world.entities)} has no {per_hop} questions of {count} hops"
                )
    return list(found.values())


def build_passage_record(world: World, entity: Entity) -> dict[str, str]:
    """The line of `corpus.jsonl`."""
    return {"id": entity.id, "title": entity.name, "contents": world.contents[entity.id]}


def write_world(
    folder: Path, seed: int, split: str, passages: int, per_hop: int, hops: int = 4
) -> list[WorldQuestion]:
    """Writes `corpus.jsonl` and `questions.jsonl` into `folder`; returns the questions.

    Raises `ConfigError` if one of them exists with other content, which stays.
    """
    world = make_world(seed, split, passages)
    questions = make_world_questions(world, seed, per_hop, hops)
    rows = [
        {
            "id": f"q{number}", "question": asked.question, "golden_answers": [asked.answer],
            "supporting_ids": [subject.id for subject in asked.subjects], "hops": asked.hops,
            "reasoning": asked.reasoning, "path": list(asked.relations),
            "held_out_path": is_held_out_path(asked.relations), "held_out_wording": asked.held_out_wording,
        }
        for number, asked in enumerate(questions)
    ]  # fmt: skip
    corpus = [build_passage_record(world, entity) for entity in world.entities]
    files: dict[str, list[Any]] = {"corpus.jsonl": corpus, "questions.jsonl": rows}
    texts = {folder / name: "".join(json.dumps(row) + "\n" for row in files[name]) for name in files}
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for path, text in texts.items():
            if path.exists() and not (path.is_file() and path.read_bytes() == text.encode()):
                raise ConfigError(f"{path} exists with other content: name another folder")
        for path, text in texts.items():
            if not path.exists():
                write_text_atomic(path, text)
    except OSError as error:
        raise ConfigError(f"{folder} cannot hold a world: {error.strerror}") from None
    return questions


def get_word_split(word: str) -> str:
    """The split that an invented word belongs to: a fifth of all words are for tests."""
    return "test" if hashlib.sha256(word.encode()).digest()[0] % 5 == 0 else "train"


def is_held_out_path(relations: Sequence[str]) -> bool:
    """Whether training never asks along this path; an eighth of the paths of two hops and more."""
    digest = hashlib.sha256("/".join(relations).encode()).digest()
    return len(relations) > 1 and digest[0] % 8 == 0


def make_word(rng: random.Random, split: str) -> str:
    """A pronounceable word of two syllables that belongs to `split`."""
    onsets, vowels = TEXTS["onsets"].split(), TEXTS["vowels"].split()
    while True:
        parts = [rng.choice(onsets) + rng.choice(vowels) for _ in range(2)]
        word = ("".join(parts) + rng.choice(TEXTS["codas"])).capitalize()
        if get_word_split(word) == split:
            return word


def make_name(rng: random.Random, kind: str, pool: list[str], split: str) -> str:
    """A name for an entity of this kind; its words, of which "Mabesland" is one, belong to the split."""
    while True:
        words = rng.sample(pool, 2)
        name: str = rng.choice(TEXTS["names"][kind]).format(*words)
        if all(get_word_split(word) == split for word in {*name.split()} - NAME_PATTERN_WORDS):
            return name


def main(argv: list[str]) -> None:
    parser = CommandParser(__doc__ or "", prog="python -m dlm_rag.data.synthetic_world")
    parser.add_argument("--seed", required=True)
    parser.add_argument("--out", required=True, help="folder")
    parser.add_argument("--split", choices=("test", "train"), default="test", help="whose words")
    parser.add_argument("--passages", default="2000")
    parser.add_argument("--per-hop", default="100", help="questions for each number of hops")
    parser.add_argument("--hops", default="4", help="of the longest questions")
    given = parser.parse_args(argv)
    passages = parse_int(given.passages, 100, "--passages ", MAX_PASSAGES)
    per_hop, hops = parse_int(given.per_hop, 1, "--per-hop "), parse_int(given.hops, 1, "--hops ", 4)
    seed, out = parse_int(given.seed, 0, "--seed "), expand_path(given.out, ConfigError)
    if not given.out.strip("-"):
        raise ConfigError("--out needs the name of a folder")
    write_world(out, seed, given.split, passages, per_hop, hops)


if __name__ == "__main__":
    from dlm_rag.cli import run_program

    run_program(main)
