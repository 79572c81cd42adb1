"""Questions of two pages, made of what one page says of a person and what that person's own page says.

"Burma Convoy is a 1941 film directed by Noel M. Smith", and "Noel M. Smith was born in Rutherford,
California" make "Where was the director of Burma Convoy born?". The sets of two hops have few questions to
train on; these pages are in the corpora of all sets.
"""

import re
from collections.abc import Iterator
from typing import Any

Record = dict[str, Any]
_WORD = r"[A-Z][\w.'’-]+"
_NAME = rf"({_WORD}(?: (?:{_WORD}|of|de|von|van|der|the|al|da|di))*)"
_DATE = r"(?:\d{1,2} [A-Z][a-z]+ \d{4}|[A-Z][a-z]+ \d{1,2}, \d{4})"
_MONTH = r"(?:(?:Jan|Febr)uary|March|April|May|June|July|August|(?:Septem|Octo|Novem|Decem)ber)\b"
# Another stop ends the sentence.
_PART = rf"(?!{_MONTH})(?:U\.S\.|(?:Ste?|Mt|Ft|Pt)\.|[A-Z]\.|[A-Z][\w'’-]+)"
_PLACE = rf"({_PART}(?: {_PART})*(?:, (?:D\.C\.|{_PART}(?: {_PART})*))?)"
_NATION = (
    r"((?:(?:South|North|East|West|Northern|New|Hong|Sri|Costa|Puerto) )?+[A-Z][a-z]+(?:-[A-Z][a-z]+)?)"
)
_NO_NATION = (
    r"(?!(?:National|Native|Roman|Honorary|Old|Conservative|Olympic|Member)\b"
    r"|(?:South|North|East|West|Northern|New|Hong|Sri|Costa|Puerto)\b(?! [A-Z]))"
)
MAX_TITLE_WORDS = 8
# Where a page names a person, and what a question calls this person; {s}: the title of the page.
RELATIONS = (
    (r"directed by ", ("the director of {s}", "the director of film {s}", "the person who directed {s}")),
    (r"(?:written|novel|book|play|story) by ", ("the writer of {s}", "the author of {s}")),
    (
        r"(?:recorded|performed|sung|song|album|single) by (?:[\w-]+ ){0,5}?",
        ("the performer of {s}", "the performer of song {s}"),
    ),
    (r"(?:composed|music|score) by ", ("the composer of {s}", "the composer of film {s}")),
    (r"produced by ", ("the producer of {s}", "the person who produced {s}")),
    (r"founded by ", ("the founder of {s}", "the person who founded {s}")),
    (r"(?:son|daughter|child) of ", ("the father of {s}", "{s}'s father")),
    (r"(?:married|wife of|husband of|married to) ", ("the spouse of {s}", "{s}'s spouse")),
)
# What the person's page says, and questions for it; {p}: what the person is called.
FACTS = (
    (
        rf"\((?:[^()]{{0,60}}?[;,] )?(?:born )?({_DATE})",
        ("When was {p} born?", "What is the date of birth of {p}?", "When is {p}'s birthday?"),
    ),
    (
        rf"\([^()]{{0,60}}\d [–-] ({_DATE})\)",
        ("When did {p} die?", "What is the date of death of {p}?"),
    ),
    (
        rf"\bborn (?:[^.;()]{{0,40}} )?(?:in|at) {_PLACE}",
        ("Where was {p} born?", "What is the place of birth of {p}?", "In which town was {p} born?"),
    ),
    (
        rf"\bdied (?:[^.;()]{{0,40}} )?(?:in|at) {_PLACE}",
        ("Where did {p} die?", "Where was the place of death of {p}?"),
    ),
    (rf"\b(?:is|was) an? {_NO_NATION}{_NATION} ", ("What is the nationality of {p}?",)),
)


def compose_questions(passages: dict[str, Record]) -> Iterator[Record]:
    """Yields records of questions about two of the `passages`, which have `title` and `contents`, by id."""
    pages: dict[str, list[str]] = {}
    for key, passage in passages.items():
        pages.setdefault(passage["title"].lower(), []).append(key)
    known = set[str]()
    for key, passage in passages.items():
        title, body = passage["title"], passage["contents"]
        if not 0 < len(title.split()) <= MAX_TITLE_WORDS:
            continue
        for relation, (pattern, phrases) in enumerate(RELATIONS):
            for match in re.finditer(pattern + _NAME, body):
                person = next(filter(None, (pages.get(name.lower()) for name in shorten(match[1]))), None)
                if person and title.lower() != passages[person[0]]["title"].lower():
                    for record in ask_about(f"{key}-{relation}", key, title, person, passages, phrases):
                        if record["id"] not in known:
                            known.add(record["id"])
                            yield record


def shorten(name: str) -> Iterator[str]:
    """Yields a name and what begins it, the longest first, of at least two words."""
    words = name.split()
    for count in range(len(words), 1, -1):
        yield " ".join(words[:count]).rstrip(".,")


def ask_about(
    name: str, key: str, title: str, person: list[str], passages: dict[str, Record],
    phrases: tuple[str, ...],
) -> Iterator[Record]:  # fmt: skip
    """Yields a question in two wordings for each fact that the person's passages have; name: in ids."""
    plain = re.sub(r" \(.*\)$", "", title)
    for number, (pattern, questions) in enumerate(FACTS):
        found = ((other, re.search(pattern, passages[other]["contents"])) for other in person)
        other, match = next(((other, match) for other, match in found if match), ("", None))
        for wording in range(2 if match else 0):
            described = phrases[(number + len(title) + wording) % len(phrases)].format(s=plain)
            assert match
            yield {
                "id": f"composed-{name}-{other}-{number}-{wording}", "set": "composed", "hops": 2,
                "question": questions[(number + len(title) + wording) % len(questions)].format(p=described),
                "golden_answers": [match[1]], "supporting_ids": [key, other],
                "answer_kind": "span", "answer_in_passage": True,
            }  # fmt: skip
