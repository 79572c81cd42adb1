"""Natural questions by construction: facts of passages, asked in many wordings, in one hop and in two.

A response states the facts and then the answer, or that it is not known:

    Where was the director of Inception born?
    Inception was directed by Christopher Nolan. Christopher Nolan was born in London. ### London
"""

import random
import re
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace

from dlm_rag.decode.abstention import UNCLEAR, UNKNOWN
from dlm_rag.errors import CorpusError
from dlm_rag.retrieval.corpus import Passage
from dlm_rag.retrieval.forked_workers import map_ranges
from dlm_rag.synthesis.cloze_questions import contains_answer
from dlm_rag.synthesis.facts import DATE, UPPER, Fact, FactFinder, is_relation_of, load_relations
from dlm_rag.synthesis.passage_links import TitledPassage
from dlm_rag.text import FUNCTION_WORDS, normalize_answer, split_words

# Of questions; the last: "the film Inception".
LOWER_CASE_SHARE, NO_MARK_SHARE, KIND_SHARE = 0.04, 0.12, 0.12
CLAUSE_SHARE = 0.35  # of questions of one hop: any verb, against relations of the table
# Of questions: "Give the author of Emma.", "Tell me who wrote Emma."
ORDER_SHARE, WRAPPED_SHARE = 0.15, 0.06
ORDERS = ("Name", "Please name", "Give", "Give me", "State", "Tell me", "Find", "I am looking for", "")
_WRAPPABLE = re.compile(r"(?:Who|What|Which \w+) (?!is|are|was|were|has|did|does|do|can|could|would|might)")
WRAPPINGS = ("Tell me", "Can you tell me", "Please say", "Do you know", "I want to know")
NEVER_MISSING = ("kind", "who", "country", "located")  # relations never asked for where they are not told
RELATION_POWER = 0.5  # a relation is drawn as often as this power of how many facts it has
_MONTHS = "January February March April May June July August September October November December".split()
_DATE = re.compile(rf"(?<![\d,.]){DATE}(?![\d,])")
_CLASSES = {"person": "person", "people": "person", "agent": "person", "place": "place", "org": "org"}
_PLACE_KINDS = frozenset(
    "village town city county island district municipality suburb commune river".split()
)
_ORG_KINDS = frozenset(
    "band school university company club airline college group duo newspaper label".split()
)


@dataclass(frozen=True)
class Asked:
    """A question with its response. rows: of the passages that tell its statements, in their order."""

    question: str
    statements: tuple[str, ...]
    answer: str
    rows: tuple[int, ...]
    template: str

    @property
    def response(self) -> str:
        return " ".join((*self.statements, f"### {self.answer}"))


class NaturalQuestions:
    """Draws questions about the passages that may be asked about."""

    def __init__(
        self, passages: Sequence[Passage], usable: Callable[[int], bool], wordings: str = "ask"
    ) -> None:
        """usable: whether a passage, by its number, may be asked about. wordings: `ask`, to train with, or
        `held_out`."""
        self.passages, self._wordings = passages, wordings
        self.titled = [TitledPassage.from_passage(passage) for passage in passages]
        self._finder = FactFinder(self.titled)
        table = load_relations()
        self._relations, self._stems = table["relations"], table["stems"]
        often = Counter(passage.name for passage in self.titled)
        self.row_of = {
            passage.name: row for row, passage in enumerate(self.titled) if often[passage.name] == 1
        }
        rows = [row for row in self.row_of.values() if usable(row)]
        told = map_ranges(lambda numbers: [self._finder.find(rows[n]) for n in numbers], len(rows))
        self.facts = dict(zip(rows, told, strict=True))
        every = [fact for found in told for fact in found]
        if not every:
            raise CorpusError("no sentence of these passages tells a fact: set train.natural_share=0")
        self._told = Counter((f.relation or f.say, normalize_answer(f.object)) for f in every)
        self._by_relation = defaultdict[str, list[Fact]](list)
        for fact in every:
            self._by_relation[fact.relation].append(fact)
        self._weights = {n: len(f) ** RELATION_POWER for n, f in self._by_relation.items() if n}
        linkable = [f for f in every if self._relations.get(f.relation, {}).get("noun")]
        self._links = [
            f
            for f in linkable
            if self.row_of.get(f.object) in self.facts and self.row_of[f.object] != f.row
        ]
        self._openers = defaultdict[str, list[Fact]](list)
        for fact in linkable:
            if " and " not in fact.object:
                self._openers[_CLASSES[fact.kind]].append(fact)
        self._seconds = defaultdict[str, list[int]](list)
        for row, found in self.facts.items():
            if (group := self.group_of(row)) and any(self._is_second(fact) for fact in found):
                self._seconds[group].append(row)
        self.renamer = Renamer(self.titled, every, self._finder)

    def group_of(self, row: int) -> str:
        """What kind of thing a passage is about, as far as second hops are concerned; "" for others."""
        passage = self.titled[row]
        kind = self._finder.kind_of(passage)
        if self._finder.is_person(passage):
            return "person"
        return "place" if kind in _PLACE_KINDS else "org" if kind in _ORG_KINDS else ""

    def kind_of_answer(self, relation: str) -> str:
        """The class of what a relation finds, where it is a name; else ""."""
        return _CLASSES.get(self._relations.get(relation, {}).get("type", ""), "")

    def _is_second(self, fact: Fact) -> bool:
        return fact.relation not in ("country", "who", "kind", "alias", "") and bool(self._asks(fact))

    def _asks(self, fact: Fact) -> Sequence[str]:
        if self._wordings == "ask" or not fact.relation:
            return fact.ask
        return self._relations[fact.relation]["held_out"]

    def _wording(self, rng: random.Random, fact: Fact) -> str:
        """A template of a question for the object of a fact; in training an order now and then."""
        if self._wordings == "ask" and fact.relation and rng.random() < ORDER_SHARE:
            relation = self._relations[fact.relation]
            named = rng.choice([*relation.get("order", ()), *relation.get("noun", ())])
            order = f"{rng.choice(ORDERS)} {named}.".strip()
            if not order.lower().endswith(tuple(form.lower() for form in relation["held_out"])):
                return order[0].upper() + order[1:] if order[0] != "{" else order
        return rng.choice(self._asks(fact))

    def draw_single(self, rng: random.Random, row: int | None = None) -> Asked | None:
        """A question of one hop, about a passage if one is given; None where it tells nothing."""
        if row is not None:
            found = self.facts.get(row, [])
            fact = rng.choice(found) if found else None
        elif self._by_relation[""] and (not self._weights or rng.random() < CLAUSE_SHARE):
            fact = rng.choice(self._by_relation[""])
        else:
            name = rng.choices([*self._weights], [*self._weights.values()])[0]
            fact = rng.choice(self._by_relation[name])
        return None if fact is None else self.ask(rng, fact)

    def ask(self, rng: random.Random, fact: Fact) -> Asked:
        """A question for the object of a fact, or for its subject where nothing else has that object."""
        alone = self._told[fact.relation or fact.say, normalize_answer(fact.object)] == 1
        if fact.back and alone and self._wordings == "ask" and rng.random() < 0.3:
            question, answer = rng.choice(fact.back).format(o=fact.object), fact.subject
        else:
            template = self._wording(rng, fact)
            answer, name = _fit(template, fact), self._name(rng, fact)
            if contains_answer(name, answer):  # "the village Marwick" says what Marwick is
                name = fact.subject
            question = template.format(s=name, o=fact.object)
        return Asked(
            _vary(rng, question), (fact.statement,), answer, (fact.row,), fact.relation or "clause"
        )

    def _name(self, rng: random.Random, fact: Fact) -> str:
        kind = self._finder.kind_of(self.titled[fact.row])
        return f"the {kind} {fact.subject}" if kind and rng.random() < KIND_SHARE else fact.subject

    def draw_chain(self, rng: random.Random) -> Asked | None:
        """A question of two hops that the passages tell."""
        if not self._links:
            return None
        first = rng.choice(self._links)
        seconds = [f for f in self.facts[self.row_of[first.object]] if self._is_second(f)]
        seconds = [f for f in seconds if f.object != first.subject]
        return self._chain(rng, first, rng.choice(seconds)) if seconds else None

    def _chain(self, rng: random.Random, first: Fact, second: Fact) -> Asked:
        noun = rng.choice(self._relations[first.relation]["noun"]).format(s=self._name(rng, first))
        template = self._wording(rng, second)
        question = template.format(s=noun, o=second.object)
        statements = (first.statement, replace(second, subject=first.object).statement)
        return Asked(
            _vary(rng, question[0].upper() + question[1:]), statements, _fit(template, second),
            (first.row, second.row), f"{first.relation}+{second.relation}",
        )  # fmt: skip

    def draw_crossed(self, rng: random.Random) -> tuple[Asked, Passage] | None:
        """A question of two hops that no passage tells, and its second passage: another's, renamed."""
        group = rng.choices(("person", "place", "org"), (0.7, 0.15, 0.15))[0]
        if not self._openers[group] or not self._seconds[group]:
            return None
        first, row = rng.choice(self._openers[group]), rng.choice(self._seconds[group])
        seconds = [fact for fact in self.facts[row] if self._is_second(fact)]
        name, own = first.object, self.titled[row]
        if row == first.row or any(f" {w} " in f" {name} " for w in own.name.split()):
            return None
        asked = self._chain(rng, first, rng.choice(seconds))
        text = " ".join(own.sentences)
        begins = re.search(r" (?:\(|is|was|are|were)", text)
        body = name + text[begins.start() :] if begins and begins.start() < 90 else text
        body = _replacer({own.name: name, own.name.split()[-1]: name.split()[-1]})(body)
        if not contains_answer(body, asked.answer):
            return None
        passage = Passage(f"{self.passages[row].id}/{name}", name, f"{name}\n{body}")
        return asked, passage

    def draw_unclear(self, rng: random.Random, rows: Sequence[int]) -> Asked:
        """What is no question for a fact."""
        names = [self.titled[row].name for row in rng.choices(rows, k=2)]
        text = rng.choice(load_relations()["unclear"]).format(s=names[0], o=names[1])
        return Asked(_vary(rng, text), (), UNCLEAR, (), "unclear")

    def draw_missing(self, rng: random.Random, row: int) -> Asked | None:
        """A question about a passage that has no answer to it: of a relation of which it has no word."""
        passage = self.titled[row]
        told = {fact.relation for fact in self.facts.get(row, ())}
        person, text = self._finder.is_person(passage), " ".join(passage.sentences).lower()
        for _ in range(8):
            name = rng.choice([*self._weights])
            relation = self._relations[name]
            if name in (*told, *NEVER_MISSING) or not is_relation_of(relation, person):
                continue
            if any(stem in text for stem in self._stems.get(name, " ")):
                continue
            question = rng.choice(relation.get("ask")).format(s=passage.name, o="")
            return Asked(_vary(rng, question), (), UNKNOWN, (row,), "missing")
        return None


def _fit(template: str, fact: Fact) -> str:
    """The part of an object that a question wants: the year of a date, the country of a place."""
    answer = fact.object
    if fact.kind == "date" and re.search(r"\byear\b", template):
        return (re.findall(r"\d{4}", answer) or [answer])[-1]
    if fact.kind == "place" and "," in answer and re.search(r"\b(?:country|nation)\b", template):
        return answer.rpartition(", ")[2]
    if fact.kind == "place" and "," in answer and re.search(r"\b(?:city|town)\b", template):
        return answer.partition(",")[0]
    return answer


def _vary(rng: random.Random, question: str) -> str:
    """A question as people write it: now and then wrapped, without its mark, or in small letters."""
    if _WRAPPABLE.match(question) and rng.random() < WRAPPED_SHARE:
        question = f"{rng.choice(WRAPPINGS)} {question[0].lower()}{question[1:]}"
    if rng.random() < NO_MARK_SHARE:
        question = question.rstrip("?.")
    return question.lower() if rng.random() < LOWER_CASE_SHARE else question


def _replacer(names: dict[str, str]) -> Callable[[str], str]:
    if not names:
        return lambda text: text
    ordered = sorted(names, key=len, reverse=True)
    found = re.compile(rf"(?<!\w)(?:{'|'.join(map(re.escape, ordered))})(?!\w)")
    return lambda text: found.sub(lambda hit: names[hit[0]], text)


class Renamer:
    """Other names and dates for those of some texts, the same in all of them: nothing is known by heart."""

    def __init__(self, titled: Sequence[TitledPassage], facts: Sequence[Fact], finder: FactFinder) -> None:
        people = [
            p.name
            for p in titled
            if finder.is_person(p) and re.fullmatch(rf"(?:[{UPPER}]\S+ ?){{2,3}}", p.name)
        ]
        self._given = [name.split()[0] for name in people]
        self._family = [name.split()[-1] for name in people]
        self._others = [
            p.name
            for p in titled
            if p.name and not finder.is_person(p) and len(p.name.split()) < 5 and "," not in p.name
        ]
        self._places = [fact.object for fact in facts if fact.kind == "place"] or self._others
        self._words = finder._often

    def draw(self, rng: random.Random, names: Iterable[tuple[str, str]]) -> Callable[[str], str]:
        """The renaming of some names, each with its class, and of all dates."""
        given: dict[str, str] = {}
        taken = set[str]()
        for name, group in names:
            if len(name) < 4 or name in given or (" " not in name and self._words[name.lower()]):
                continue
            if re.fullmatch(DATE, name) or name.split()[0].lower() in FUNCTION_WORDS - {"the", "a"}:
                continue
            pool = {"person": self._given, "place": self._places}.get(group, self._others)
            if not pool:  # no passage is about such a thing
                continue
            other = rng.choice(pool)
            if group == "person":
                other = f"{other} {rng.choice(self._family)}"
            if other in taken or {*split_words(other)} & {w for n in given for w in split_words(n)}:
                continue
            taken.add(other)
            given[name] = other
            last = name.split()[-1]
            if group == "person" and " " in name and len(last) > 3 and not self._words[last.lower()]:
                given.setdefault(last, other.split()[-1])
        rename = _replacer(given)
        years, days, months = rng.randint(-40, 25), rng.randrange(28), rng.sample(_MONTHS, 12)

        def move(hit: re.Match[str]) -> str:
            text = re.sub(r"\d{4}", lambda y: str(int(y[0]) + years), hit[0])
            text = re.sub(r"[A-Z]\w+", lambda m: months[_MONTHS.index(m[0])], text)
            return re.sub(r"(?<!\d)\d{1,2}(?!\d)", lambda d: str((int(d[0]) + days) % 28 + 1), text)

        return lambda text: _DATE.sub(move, rename(text))
