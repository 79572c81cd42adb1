"""Facts that sentences about a titled passage tell: who, which relation, what; by patterns, without labels.

`relations.yaml` has the relations with their wordings. Beside these, any verb will do: "X was VERBed in
1990", "X VERBed Y" and the like.
"""

import re
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from typing import Any

import yaml

from dlm_rag.synthesis.cloze_questions import contains_answer
from dlm_rag.synthesis.passage_links import TitledPassage, is_within_length_limits
from dlm_rag.text import normalize_answer

UPPER = "A-ZÀ-ÖØ-ÞĀĂĄĆČĎĐĒĘĚĞĢĪĮİĶŁŃŅŇŌŐŒŘŚŞŠŢŤŪŮŰŲŹŻŽ"
_WORD = rf"(?:(?:[{UPPER}]\.)+|(?:Jr|Sr|St|Dr|Mt)\.|[{UPPER}][\w'’]*(?:[-–]\w[\w'’]*)*)"
_PART = r"(?:of|the|de|van|von|der|den|la|le|du|di|da|dos|del|al|bin|ibn|ben|zu|y|e|af|av|ter|and the)"
NAME = rf"{_WORD}(?: (?:{_PART} ){{0,3}}(?:{_WORD}|[IVX]+\b))*"
_PERSON = (
    rf"{_WORD}(?: (?:(?:de|van|von|der|la|le|du|di|da|del|al|bin|ibn|of) ){{0,3}}(?:{_WORD}|[IVX]+\b))*"
)
_MONTH = "(?:January|February|March|April|May|June|July|August|September|October|November|December)"
DATE = (
    rf"(?:\d{{1,2}} {_MONTH},? \d{{4}}|{_MONTH} \d{{1,2}}, ?\d{{4}}|{_MONTH},? \d{{4}}|[12]\d{{3}}(?!\d))"
)
_NUMBER_WORDS = "two|three|four|five|six|seven|eight|nine|ten|eleven|twelve|twenty|thirty|hundreds"
NUMBER = rf"(?:\d[\d,.]*\d|\d|{_NUMBER_WORDS})(?: (?:million|billion|thousand))?"
_NP = r"(?:the |an? |his |her |its )?[\w'’\"-]+(?: [\w'’\"&-]+){0,7}?"
MAX_SENTENCE_CHARS = 600
MAX_FACT_WORDS = 14  # of an object
DEFINING = ("country", "occupation", "kind", "who")  # relations right after the verb of a definition
_PRONOUN = re.compile(r"(?:He|She|It|They)\b|(?:His|Her|Its|Their)\b")
_BRACKETS = re.compile(r"\s*\([^()]*\)")
MAX_REST_WORDS = 8  # between the verb and the date of a clause
_KIND_SUBJECT = re.compile(r"(?:The|This) (\w+)\b")


@cache
def load_relations() -> dict[str, Any]:
    """The table of `relations.yaml`, its patterns compiled."""
    text = (files("dlm_rag.synthesis") / "relations.yaml").read_text(encoding="utf-8")
    table: dict[str, Any] = yaml.safe_load(text)
    nation = "|".join(sorted(map(re.escape, table["nations"]), key=len, reverse=True))
    own = rf"(?!(?:{nation})(?:-\w+)* [a-z])"  # "the Irish band": no name
    subject = r"(?:He|She|It|They|The \w+|This \w+)"
    slots = {
        "PERSON": rf"(?P<o>{own}{_PERSON}(?: and {_PERSON})?)", "AGENT": rf"(?P<o>{own}{_PERSON})",
        "PEOPLE": rf"(?P<o>{own}{_PERSON}(?:, {_PERSON}){{0,3}}(?:,? and {_PERSON})?)",
        "PLACE": rf"(?P<o>{NAME}(?:, {NAME}){{0,2}})", "ORG": rf"(?P<o>{NAME})",
        "DATE": rf"(?P<o>{DATE})", "YEAR": r"(?P<o>[12]\d{3})(?!\d)", "NUMBER": rf"(?P<o>{NUMBER})",
        "NATION": rf"(?:{nation})", "NAME": NAME, "NP": _NP, "SUBJECT": subject,
        "ANY": rf"{NAME}(?:, {NAME})*|(?:a|an|the) [a-z-]+(?: [a-z-]+){{0,2}}",
        "BEGINS": rf"(?:^{subject}|\band|,|\bwho|\bthen|\blater|\balso)",
    }  # fmt: skip

    def compiled(pattern: str) -> re.Pattern[str]:
        return re.compile(re.sub(r"(?<!\?P)<([A-Z]+)>", lambda slot: slots[slot[1]], pattern))

    for relation in table["relations"].values():
        relation["find"] = [*map(compiled, relation["find"])]
    for clause in table["clauses"]:
        clause["find"] = compiled(clause["find"])
    return table


@dataclass(frozen=True)
class Fact:
    """What a passage tells: {s} and {o} stand for subject and object in the templates of a clause.

    relation: of the table, "" for a clause, which has its own `say` and `ask`. kind: type of the object.
    """

    row: int
    relation: str
    subject: str
    object: str
    kind: str
    sentence: int
    say: str
    ask: tuple[str, ...]
    back: tuple[str, ...]

    @property
    def statement(self) -> str:
        """The sentence that a response has for it."""
        say = self.say
        if self.kind == "date":
            exact = re.match(r"\d{1,2} |\w+ \d{1,2},", self.object)
            say = re.sub(r" (?:on|in) \{o\}", " on {o}" if exact else " in {o}", say)
        if self.object[0] in "aeiou":
            say = say.replace(" a {o}", " an {o}")
        said = say.format(s=self.subject, o=self.object)
        return said if said.endswith((".", "!", "?")) else f"{said}."


def is_relation_of(relation: dict[str, Any], person: bool) -> bool:
    """Whether a relation of the table may be that of a person, or of anything else."""
    if not person:
        return relation.get("of") != "person"
    return relation.get("of") != "work" and relation.get("not_of") != "person"


class FactFinder:
    """Reads facts out of passages; what it knows of verbs comes from the passages themselves."""

    def __init__(self, passages: Sequence[TitledPassage]) -> None:
        self._passages, table = passages, load_relations()
        self._relations, self._kinds = table["relations"], {*table["kinds"]}
        self._clauses = table["clauses"]
        self._things = {*table["things"]}
        words = (w for p in passages for s in p.sentences for w in re.findall(r"\b[a-z]+\b", s))
        self._often = Counter(words)
        self._base_of_past: dict[str, str] = {}
        self._past_of_participle: dict[str, str] = {}
        for base, forms in table["irregular"].items():
            past, participle = forms if isinstance(forms, list) else (forms, forms)
            self._base_of_past[past] = base
            self._past_of_participle.setdefault(participle, past)

    def find(self, row: int) -> list[Fact]:
        """The facts of a passage, each relation once: the first it tells, of dates the most exact."""
        passage = self._passages[row]
        found: dict[str, Fact] = {}
        if not passage.name or not is_within_length_limits(passage.name):
            return []
        person, gender = self.is_person(passage), _gender(passage)
        for number, sentence in enumerate(passage.sentences):
            if (
                len(sentence) > MAX_SENTENCE_CHARS
                or "{" in sentence
                or not self._is_about(passage, sentence, number)
            ):
                continue
            for fact in [
                *self._find_relations(row, number, sentence, person, gender),
                *self._find_clauses(row, number, sentence, person),
            ]:
                name = fact.relation or fact.say
                if self._is_usable(fact) and (
                    name not in found
                    or (fact.kind == "date" and len(fact.object) > len(found[name].object))
                ):
                    found[name] = fact
        return list(found.values())

    def is_person(self, passage: TitledPassage) -> bool:
        """Whether a passage seems to be about one person."""
        first = passage.sentences[0] if passage.sentences else ""
        if re.search(rf"\(\s*(?:[^()]*?[;,] ?)?(?:born|died|d\.|b\.|[^()]*{DATE}[^()]*[–-])", first):
            return True
        if self.kind_of(passage) in self._things:
            return False
        return any(s.startswith(("He ", "She ", "His ", "Her ")) for s in passage.sentences)

    def kind_of(self, passage: TitledPassage) -> str:
        """ "film", "village" and the like, where the definition has such a word; else ""."""
        words = re.findall(r"[a-z]+", _definition(passage))
        return next((word for word in words if word in self._kinds), "")

    def _is_about(self, passage: TitledPassage, sentence: str, number: int) -> bool:
        """Whether the subject of a sentence is that of its passage."""
        words = re.findall(r"\w+", passage.name)
        if number == 0:
            begins = re.split(r" (?:is|was|are|were|\() ?", sentence, maxsplit=1)[0]
            return bool(words) and (words[-1] in begins or words[0] in begins)
        if _PRONOUN.match(sentence) or sentence.startswith((passage.name, f'"{passage.name}"')):
            return True
        if len(words) > 1 and re.match(rf"{re.escape(words[-1])}\b", sentence):
            return True
        kind = _KIND_SUBJECT.match(sentence)
        return kind is not None and kind[1] in _definition(passage)

    def _find_relations(
        self, row: int, number: int, sentence: str, person: bool, gender: str
    ) -> Iterator[Fact]:
        passage = self._passages[row]
        for name, relation in self._relations.items():
            defines = name in DEFINING
            if not is_relation_of(relation, person) or (defines and number):
                continue
            bare = _BRACKETS.sub("", sentence) if defines or name == "located" else sentence
            if defines:
                verb = re.search(r" (?:is|was|are|were) ", bare)
                bare = bare[verb.start() + 1 :] if verb else ""
            hit = next(filter(None, (pattern.search(bare) for pattern in relation["find"])), None)
            if hit is None or (defines and hit.start()):
                continue
            people = relation["type"] in ("person", "people")
            if people and _NOT_THE_NAME.match(bare, hit.end("o")):
                continue
            own = relation.get("person_ask" if person else "ask", relation["ask"])
            ask = (*own, *relation.get(gender, ()))
            found = hit["o"].strip(' ,"')
            found = re.sub("['’]s$", "", found) if people else found
            yield Fact(
                row, name, passage.name, found, relation["type"], number, relation["say"], ask,
                tuple(relation.get("back", ())),
            )  # fmt: skip

    def _find_clauses(self, row: int, number: int, sentence: str, person: bool) -> Iterator[Fact]:
        """Facts with any verb. The templates keep the words of the sentence."""
        name, bare = self._passages[row].name, _BRACKETS.sub("", sentence)
        for own in (name, f'"{name}"', name.split()[-1]):  # patterns are compiled once: they have no names
            if bare.startswith(f"{own} "):
                bare = f"It{bare[len(own) :]}"
                break
        for clause in self._clauses:
            for hit in clause["find"].finditer(bare):
                found = {part: text for part, text in hit.groupdict().items() if part != "o"}
                if not self._complete(found) or not _is_object(hit["o"], clause["kind"]):
                    continue
                found |= {"Prep": found.get("prep", "").capitalize(), "who": "Who" if person else "What"}

                def fill(template: str, found: dict[str, str] = found) -> str:
                    return re.sub(r"<(\w+)>", lambda slot: found[slot[1]], template)

                ask, back = (tuple(map(fill, clause.get(key, ()))) for key in ("ask", "back"))
                kind, say = clause["kind"], fill(clause["say"])
                yield Fact(row, "", name, hit["o"].strip(' ,"'), kind, number, say, ask, back)

    def _complete(self, found: dict[str, str]) -> bool:
        """Adds the other forms of the verb of a clause; False where it is none."""
        if "pp" in found:
            word = found["pp"]
            found["past"] = self._past_of_participle.get(word, word)
            regular = word.endswith("ed") and self._often[word] > 1 and len(word) > 4
            return regular or word in self._past_of_participle
        if "v" in found:
            found["base"] = self._base_of(found["v"])
            return bool(found["base"])
        return len(found.get("rest", "").split()) <= MAX_REST_WORDS

    def _base_of(self, past: str) -> str:
        """The infinitive of a past tense; "" where the word seems to be none."""
        if past in self._base_of_past:
            return self._base_of_past[past]
        if not past.endswith("ed") or self._often[past] < 2 or len(past) < 5:
            return ""
        stems = [
            past[:-1],
            past[:-2],
            f"{past[:-3]}y" if past.endswith("ied") else "",
            past[:-3] if past[-3] == past[-4] else "",
        ]
        best = max((stem for stem in stems if stem), key=lambda stem: self._often[stem])
        return best if self._often[best] else past[:-2]

    def _is_usable(self, fact: Fact) -> bool:
        words = fact.object.split()
        if not words or len(words) > MAX_FACT_WORDS or words[-1] in _DANGLING:
            return False
        if fact.kind in ("person", "people") and (_NO_PERSON.search(fact.object) or fact.object in _TITLES):
            return False
        if fact.relation in ("alias", "occupation") and words[0] in _NO_THING:
            return False
        if fact.kind in ("person", "place", "org", "agent", "people") and (
            words[0] in _NO_NAME or normalize_answer(fact.object) in _NO_NAMES
        ):
            return False
        return not contains_answer(fact.subject, fact.object)


def _definition(passage: TitledPassage) -> str:
    """The beginning of what a first sentence says that its subject is."""
    first = passage.sentences[0] if passage.sentences else ""
    return (
        passage.what
        or re.sub(r"\([^()]*\)", "", first).partition(" is " if " is " in first else " was ")[2][:80]
    )


_NO_OBJECT = frozenset(
    """it him them himself herself itself there that which who up out off down over through away around
    together in on at for with from to as by into under and was were not""".split()
)
_DANGLING = frozenset("the a an of in on at by and or to for with from his her its as".split())
_NO_NAME = frozenset("The He She It They In On At His Her Its This That These A An".split())
_NO_PERSON = re.compile(
    r"\b(?:House|Castle|College|University|Church|School|Hollywood|Kingdom|Empire|Academy|Court|BBC)\b"
)
_NOT_THE_NAME = re.compile(r"-based|, [A-Z][\w.]+(?:-based)? (?:[a-z-]+ )*(?:band|group|singer|artist)\b")
_TITLES = frozenset("President King Queen Emperor Empress Prince Princess Duke Duchess Sir Saint".split())
_NO_THING = frozenset("of by in at on for from with born".split())
_NO_NAMES = frozenset(
    """january february march april may june july august september october november december american
    british english""".split()
) | {""}


def _is_object(text: str, kind: str) -> bool:
    """Whether what a clause found can be asked for."""
    if kind == "date":
        return True
    begins = text.split()[0].lower() if text.split() else ""
    verb = kind == "phrase" and re.search(r"\b(?:was|were|is|had)\b", text)
    return begins not in _NO_OBJECT and not verb and not re.fullmatch(DATE, text)


def _gender(passage: TitledPassage) -> str:
    """ "male" or "female" by the pronouns of a passage; "" where it has none or both alike."""
    text = f" {' '.join(passage.sentences)} "
    he, she = (
        len(re.findall(rf"\b(?:{w})\b", text)) for w in ("[Hh]e|[Hh]is|actor", "[Ss]he|[Hh]er|actress")
    )
    return "male" if he > she else "female" if she > he else ""
