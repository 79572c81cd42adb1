"""A chat as one question that stands on its own, by rule, for evidence is searched for the question alone.

A greeting is no question: it gets a sentence on what can be asked.

"he" after "Who directed Emma?" - "Ann Lee" is Ann Lee; "And when?" gets the names of the turns before it.
"""

import re
from collections.abc import Sequence
from itertools import dropwhile

from dlm_rag.text import FUNCTION_WORDS, split_words, strip_disambiguation

Turn = tuple[str, str]  # role and text
MAX_TURNS_READ = 8  # before the last question
MAX_TURN_CHARS = 500  # of a turn that are read; a longer question stands on its own
MAX_NAME_CHARS = 200  # of all names that a question gets
_PERSON = frozenset("he she him her his hers".split())
_PRONOUNS = _PERSON | frozenset("it its they them their".split())
_POSSESSIVE = frozenset("his its their".split())
_ASKS_PERSON, _ASKS_THING = frozenset("who whom whose".split()), frozenset("what which".split())
MAX_GREETING_WORDS = 10
_GREETINGS = frozenset(
    "hello hi hey hiya howdy greetings welcome morning evening afternoon thanks thank thx cheers bye "
    "goodbye ok okay great cool nice perfect wow test help hallo hola bonjour salut ciao merci danke "
    "gracias servus moin namaste olá obrigado grazie".split()
)
_BESIDE_GREETINGS = frozenset(
    "there you very much so a lot again everyone all good day for the your that was it is of help answer "
    "and my friend bot today to meet see later well done me please just i am m s dear sir madam".split()
)
_ASKS_WHO = re.compile(
    "how (are|do) you( do| doing)?( today)?|what( is| s|s) up|(who|what) are you|what (can|do) you do|"
    "what do you know|what can i ask( you)?|(how )?can you help me|are you there"
)
MAX_SUGGESTIONS, MAX_SUGGESTED_CHARS = 3, 60
_GOES_ON = ("and ", "but ", "what about ", "how about ")


def reply_to_greeting(text: str, passages: int | None) -> str:
    """Returns what a greeting, thanks or "who are you?" is answered by; "" for a question.

    passages: how many are searched; None where nobody knows.
    """
    words = split_words(text[:MAX_TURN_CHARS])
    spoken = _GREETINGS | _BESIDE_GREETINGS
    asked = " ".join(dropwhile(spoken.__contains__, words)) if len(words) <= MAX_GREETING_WORDS else "?"
    greets = not words or _ASKS_WHO.fullmatch(asked) or (not asked and not _GREETINGS.isdisjoint(words))
    if not greets:
        return ""
    found = "passages of a search service" if passages is None else f"these {passages:,} passages"
    found = "this one passage" if passages == 1 else found
    return f"I answer questions about {found}; ask one."


def suggest_questions(titles: Sequence[str]) -> tuple[str, ...]:
    """Returns a few questions about what these titles name; none where they are no names."""
    found = dict[str, None]()
    for title in titles:
        shown = strip_disambiguation(title)
        named = 2 < len(shown) <= MAX_SUGGESTED_CHARS and shown[0].isupper()
        if named and not re.search(r"[.:;!\\/<>|{}\[\]#]", shown):
            found[shown if shown.endswith("?") else f"What is {shown}?"] = None
    return tuple(found)[:MAX_SUGGESTIONS]


def find_names(text: str) -> list[str]:
    """Returns the runs of words with a capital, in order, each once.

    Function words before them are left out, and a first word alone, which has a capital anyway.
    """
    words = text.split()
    runs: list[list[str]] = [[]]
    for word in words:
        bare = word.strip("()[]\"'“”‘’,;:!?").removesuffix("'s").removesuffix("’s")
        bare = bare if len(bare) == 2 else bare.rstrip(".")  # an initial keeps its period
        begins = bare[:1].isupper() and (runs[-1] or bare.casefold() not in FUNCTION_WORDS)
        if word[0] in '(["“':
            runs.append([])
        if begins or (bare[:1].isdigit() and runs[-1]):
            runs[-1].append(bare)
        if not word.endswith(bare) or not bare or runs[-1][-1:] != [bare]:
            runs.append([])
    if len(words) > 1 and runs and runs[0] == [words[0]]:
        del runs[0]
    return list(dict.fromkeys(" ".join(run) for run in runs if run))


def make_question_stand_alone(turns: Sequence[Turn]) -> str:
    """Returns the last turn, with the name that its pronoun stands for, or with the names before it if it
    has no word of its own. A question that names what it is about stays as it is.
    """
    question = turns[-1][1]
    if len(question) > MAX_TURN_CHARS or len(turns) == 1:
        return question
    before = [
        (role, said)
        for role, text in turns[-MAX_TURNS_READ - 1 : -1]
        if len(split_words(said := _strip_sources(text[:MAX_TURN_CHARS]))) > (role == "user")  # no greeting
    ]
    names, words = find_names(question), question.split()
    for n, word in enumerate(words):
        if names and names[0].split()[0] in word:
            return question  # a pronoun after this stands for what the question itself names
        bare = word.strip(".,;:!?\"'“”").casefold()
        if bare in _PRONOUNS and (name := _find_antecedent(before, bare)):
            owns = bare in _POSSESSIVE or (bare == "her" and word.isalpha() and n + 1 < len(words))
            at = word.casefold().index(bare)
            words[n] = word[:at] + name + "'s" * owns + word[at + len(bare) :]
            return " ".join(words)
    bare_question = not any(word not in FUNCTION_WORDS for word in split_words(question))
    if not names and (bare_question or question.casefold().startswith(_GOES_ON)):
        found = dict.fromkeys(name for _, text in reversed(before) for name in find_names(text))
        if added := ", ".join(found)[:MAX_NAME_CHARS]:
            return f"{question} ({added})"
    return question


def _find_antecedent(before: Sequence[Turn], pronoun: str) -> str:
    """Returns the name that a pronoun stands for in the latest exchange that has one, else "".

    The answer, where it is a name and its question asked for one of that kind; else the first name of the
    question.
    """
    asked_by = _ASKS_PERSON if pronoun in _PERSON else _ASKS_THING
    if pronoun.startswith("the"):
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
    """Returns the first paragraph of a turn without its marks: a list of sources follows in our answers."""
    words = text.partition("\n\n")[0].split()
    return " ".join(word for word in words if not (word.startswith("[") and word.strip("[].,").isdigit()))
