"""A chat as one question that stands on its own, and what chat programs ask a model besides.

Evidence is searched for the question alone, so what it leaves to the turns before must be in it. That is
done by rule: "he" after "Who directed Emma?" - "Ann Lee" is Ann Lee, "And when?" gets the names.
"""

import json
import re
from collections.abc import Iterable, Sequence
from textwrap import shorten

from dlm_rag.text import FUNCTION_WORDS, extract_sentences, split_words

Turn = tuple[str, str]  # role and text
MAX_TURNS_READ = 8  # before the last question
MAX_TURN_CHARS = 2000
MAX_NAME_CHARS = 200  # of all names that a question gets
_WORD = re.compile(r"\w[\w'’.-]*\w|[^\W\d_]\.(?= \w)|\w")
_MARK = re.compile(r"\s*\[\d+\]")
_OPENING = re.compile(r"\s*(and|but|what about|how about)\b", re.IGNORECASE)
_PERSON = frozenset("he she him her his hers".split())
_THING = frozenset("it its".split())
_PLURAL = frozenset("they them their".split())
_POSSESSIVE = frozenset("his its their".split())
_ASKS_PERSON, _ASKS_THING = frozenset("who whom whose".split()), frozenset("what which".split())
_TASK = re.compile(r'\{\s*"(title|tags|follow_ups|queries)"\s*:')
_HISTORY = re.compile(r"<chat_history>(.*)</chat_history>", re.DOTALL)


def find_names(text: str) -> list[str]:
    """Runs of words with a capital, in order, each once.

    Left out are function words before them, and a first word alone, which has a capital whatever it is.
    """
    runs: list[list[re.Match[str]]] = []
    words = [*_WORD.finditer(text)]
    for word in words:
        capital = word[0][0].isupper()
        follows = runs and runs[-1] and text[runs[-1][-1].end() : word.start()] == " "
        if follows and (capital or word[0].isdigit()):
            runs[-1].append(word)
        elif capital:
            runs.append([word])
    names = []
    for run in runs:
        while run and run[0][0].casefold() in FUNCTION_WORDS:
            run = run[1:]
        if run and (run != words[:1] or run == words):
            names.append(text[run[0].start() : run[-1].end()])
    return list(dict.fromkeys(names))


def make_question_stand_alone(turns: Sequence[Turn]) -> str:
    """The last turn, with the name that its pronoun stands for; with the names before it if it has no word
    of its own. As it is where it names what it is about.
    """
    question = turns[-1][1]
    before = [
        (role, said)
        for role, text in turns[-MAX_TURNS_READ - 1 : -1]
        if len(split_words(said := _strip_sources(text[:MAX_TURN_CHARS]))) > (role == "user")  # no greeting
    ]
    own = find_names(question)
    for word in _WORD.finditer(question):
        pronoun = word[0].casefold()
        if any(word.start() > question.find(name) for name in own):
            break  # what it stands for is in the question itself
        if pronoun in _PERSON | _THING | _PLURAL and (name := _find_antecedent(before, pronoun)):
            after = question[word.end() :]
            if pronoun in _POSSESSIVE or (pronoun == "her" and re.match(r"\s+\w", after)):
                name += "'s"
            return question[: word.start()] + name + after
    bare = not any(word not in FUNCTION_WORDS for word in split_words(question))
    if not own and (bare or _OPENING.match(question)):
        names = [name for _, text in reversed(before) for name in find_names(text)]
        if kept := _fit(dict.fromkeys(names)):
            return f"{question} ({', '.join(kept)})"
    return question


def _find_antecedent(before: Sequence[Turn], pronoun: str) -> str:
    """What a pronoun stands for in the latest exchange that names anything; "" where none does.

    The answer, where it is a name and its question asked for one of that kind; else the first name of the
    question.
    """
    asked_by = _ASKS_PERSON if pronoun in _PERSON else _ASKS_THING
    if pronoun in _PLURAL:
        asked_by = _ASKS_PERSON | _ASKS_THING
    answer = ""
    for role, text in reversed(before):
        if role == "assistant":
            answer = text.strip().removesuffix(".")
            continue
        if find_names(answer) == [answer] and asked_by & set(split_words(text)):
            return answer[:MAX_NAME_CHARS]
        if names := find_names(text):
            return names[0][:MAX_NAME_CHARS]
    return ""


def _strip_sources(text: str) -> str:
    """The first paragraph of a turn without its marks: what follows in ours is the list of sources."""
    return _MARK.sub("", text.partition("\n\n")[0])


def _fit(names: Iterable[str]) -> list[str]:
    kept: list[str] = []
    for name in names:
        if sum(map(len, kept)) + len(name) <= MAX_NAME_CHARS:
            kept.append(name)
    return kept


def answer_chat_task(text: str) -> str | None:
    """The JSON that Open WebUI asks its model for beside a chat: title, tags, follow-ups, queries.

    It is made of what the user has asked, by rule; None for any other text.
    """
    task, history = _TASK.search(text), _HISTORY.search(text)
    if not text.startswith("### Task:") or task is None or history is None:
        return None
    turns = re.findall(r"^(USER|ASSISTANT): (.*)$", history[1], re.MULTILINE)
    asked = [turn for role, turn in turns if role == "USER"] or [""]
    sentences = extract_sentences(asked[0]) or ["Chat"]
    found = {
        "title": shorten(sentences[0].rstrip("?!. "), 60, placeholder=" ..."),
        "tags": [name for question in asked for name in find_names(question)][:3] or ["General"],
        "follow_ups": [],
        "queries": [asked[-1]],
    }
    return json.dumps({task[1]: found[task[1]]}, ensure_ascii=False)
