"""A chat as one question that stands on its own, by rule, for evidence is searched for the question alone.

A greeting is no question: it gets a sentence on what can be asked.

"he" after "Who directed Emma?" - "Ann Lee" is Ann Lee; "And when?" gets the names of the turns before it.
"""

import re
from collections.abc import Sequence
from itertools import dropwhile
from pathlib import Path

import yaml

from dlm_rag.text import FUNCTION_WORDS, split_words

Turn = tuple[str, str]  # role and text
MAX_TURNS_READ = 8  # before the last question
MAX_TURN_CHARS = 500  # of a turn that are read; a longer question stands on its own
MAX_NAME_CHARS = 200  # of all names that a question gets
_WHO, _WHAT = frozenset("who whom whose".split()), frozenset("what which".split())
# What asks for that which a pronoun may stand for.
_PRONOUNS = (
    dict.fromkeys("he she him her his hers".split(), _WHO)
    | dict.fromkeys("it its".split(), _WHAT)
    | dict.fromkeys("they them their".split(), _WHO | _WHAT)
)
_PRONOUN = re.compile(rf"\b(?:{'|'.join(_PRONOUNS)})\b", re.IGNORECASE)
_DOTS = {ord("ı"): "i", 0x307: None}  # of Turkish letters, which `IGNORECASE` takes for i
_GOES_ON = re.compile("and |but |what about |how about ", re.IGNORECASE)
_SOURCE_MARK = re.compile(r" \[\d{1,3}\]")
# Initials, a word, or what ends a name; "'s" only before a word with a capital ("Schindler's List").
_OWNS = r"['’](?!s\b(?![ \t]+[^\W\d_a-z][^\W\d_A-Z]))"
_NAME_PART = re.compile(rf"(?:[^\W\d_]\.)+(?!\w)|[\w\u0300-\u036f]+(?:(?:[-–./&]|{_OWNS})\w+)*|[^\w\s]")
_OWNED = frozenset("most more own other only".split())  # of words of grammar, what may follow an owner
_LINKS = frozenset("of the de van von der den da di du des del la le al bin".split())  # within names
_TEXTS = yaml.safe_load(Path(__file__).with_name("greetings.yaml").read_text("utf-8"))
_GREETINGS, _BESIDE_GREETINGS, _ABOUT_US = (frozenset(text.split()) for text in _TEXTS.values())
_OPENINGS = _GREETINGS | _BESIDE_GREETINGS | {*"well yes no hmm wait actually wow oh sure".split()}


def reply_to_greeting(text: str, passages: int | None) -> str:
    """Returns the reply to a greeting, thanks or "who are you?", else ""; passages: how many, if known."""
    words = split_words(text[:MAX_TURN_CHARS])
    asked = {*dropwhile((_GREETINGS | _BESIDE_GREETINGS).__contains__, words)}
    about_us = asked <= _ABOUT_US and asked & {"you", "up", "ask"}
    if words and not about_us and (asked or _GREETINGS.isdisjoint(words)):
        return ""
    found = "passages of a search service" if passages is None else f"these {passages:,} passages"
    return f"I answer questions about {'this one passage' if passages == 1 else found}; ask one."


def find_names(text: str) -> list[str]:
    """Returns the runs of words with a capital, in order, each once, without function words in front."""
    runs: list[list[str]] = [[]]
    held, parts = list[str](), _NAME_PART.findall(text)  # links that may be within a name
    for word in parts:
        bare = word.casefold().removesuffix("'s").removesuffix("’s")  # "What's Emma about?"
        begins = word[0].isupper() and (runs[-1] or bare not in FUNCTION_WORDS)
        if begins or (word[0].isdigit() and runs[-1]):
            runs[-1] += [*held, word]
            held = []
        elif runs[-1] and word in _LINKS and (held or word != "the"):
            held.append(word)
        else:
            held = []
            runs.append([])
    opens = text.split()[:1] == parts[:1] or {*map(str.casefold, parts[:1])} <= _OPENINGS
    if opens and runs[0] == parts[:1] != parts:
        del runs[0]  # a first word alone, which has a capital anyway, or is none of a name
    return list(dict.fromkeys(" ".join(run) for run in runs if run))


def is_name(text: str) -> bool:
    """Whether a short text is a name: words with a capital, links, numbers, and no others."""
    words = text.split()
    if not words or words[0].casefold() in FUNCTION_WORDS - {"the"} or any(w[-1] == "," for w in words):
        return False
    small = {word for word in words if not (word[0].isupper() or word[0].isdigit())}
    return len(words) < 9 and words[0][0].isupper() and words[-1] not in small and small <= _LINKS


def make_question_stand_alone(turns: Sequence[Turn]) -> str:
    """Returns the last turn, with the name that its pronoun stands for, or with the names before it if it
    has no word of its own. A question that names what it is about stays as it is."""
    question = turns[-1][1]
    if len(question) > MAX_TURN_CHARS:
        return question
    before = [
        (role, said)
        for role, text in turns[-MAX_TURNS_READ - 1 : -1]  # without the list of sources, and greetings
        if len(split_words(said := _SOURCE_MARK.sub("", text[:MAX_TURN_CHARS].partition("\n\n")[0])))
        > (role == "user")
        and not (role == "user" and reply_to_greeting(said, 1))
    ]
    pronouns = (p for p in _PRONOUN.finditer(question) if question.isupper() or not p[0].isupper())  # "IT"
    names, pronoun = find_names(question), next(pronouns, None)
    named_at = question.find(names[0].split()[0]) if names else len(question)
    if pronoun and pronoun.start() < named_at:  # else it stands for what the question itself names
        word, rest = pronoun[0].casefold().translate(_DOTS), question[pronoun.end() :]
        if name := _find_antecedent(before, word):
            owned = rest[1:2].isalpha() and rest.split()[0].casefold() not in FUNCTION_WORDS - _OWNED
            owns = word in ("his", "its", "their") or (word == "her" and owned)
            return question[: pronoun.start()] + name + "'s" * owns + rest
    if not names and (FUNCTION_WORDS.issuperset(split_words(question)) or _GOES_ON.match(question)):
        found = dict.fromkeys(name for _, text in reversed(before) for name in find_names(text))
        if added := ", ".join(found)[:MAX_NAME_CHARS]:
            return f"{question} ({added})"
    return question


def _find_antecedent(before: Sequence[Turn], pronoun: str) -> str:
    """Returns the name that a pronoun stands for in the latest exchange that has one, else "": the answer,
    if its question asked for one of that kind, or the first name of the question."""
    answer = ""
    for role, text in reversed(before):
        if role == "assistant":
            answer = text.strip().removesuffix(".").strip("*_` ")
            continue
        named = answer.replace(",", "") if pronoun.startswith("th") else answer  # of several
        if _PRONOUNS[pronoun] & {*split_words(text)} and is_name(named):
            return answer[:MAX_NAME_CHARS]
        if names := find_names(text):
            name = names[0].partition("'s ")[0] if _PRONOUNS[pronoun] is _WHO else names[0]
            return name[:MAX_NAME_CHARS]
    return ""
