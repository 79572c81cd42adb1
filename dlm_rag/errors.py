"""What a user can get wrong. Command lines print these as one sentence and exit with code 2."""

import difflib
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, ClassVar


class UserError(ValueError):
    """Bad input: a setting, a file or a checkpoint. The message is one sentence with the remedy."""


class ConfigError(UserError):
    """An unknown key, a wrong type, a value out of range, or two settings that contradict."""


class CorpusError(UserError):
    """A corpus or an index that cannot be used; names the file and, where there is one, the line."""


class QuestionError(UserError):
    """A question, or a file of questions, that cannot be answered; names the file and line."""


class CheckpointError(UserError):
    """A checkpoint that cannot be loaded; names the tensor or file."""


class TraceError(UserError):
    """A trace file that cannot be read or gone on with; names the file and, where it can, the line."""


class RunError(RuntimeError):
    """What goes wrong while a program runs, and no input could be blamed for; one sentence, exit code 1."""


def suggest_nearest(word: str, candidates: Iterable[str]) -> str:
    """` (nearest: 'x')` for the candidate most like `word`, or an empty string when none is."""
    known = {str(each).casefold(): each for each in candidates if each != word}
    close = difflib.get_close_matches(word.casefold(), known, n=1, cutoff=0.5)
    return f" (nearest: '{known[close[0]]}')" if close else ""


class NamesRemedy:
    """A class whose missing attributes say what to use instead, for names that other libraries have."""

    _instead: ClassVar[dict[str, str]] = {}

    if not TYPE_CHECKING:  # or every attribute would pass a type checker

        def __getattr__(self, name: str) -> None:
            right = type(self)._instead.get(name)
            said = f"{type(self).__name__} has no '{name}'{f': use {right}' if right else ''}"
            raise AttributeError(said, name=name, obj=self)


def is_failure(error: BaseException) -> bool:
    """Whether something failed, be it in Rust, whose panics are no `Exception`; an interrupt did not."""
    return isinstance(error, Exception) or type(error).__name__ == "PanicException"


def summarize_error(error: BaseException) -> str:
    """The first line of an exception's text, of which no more than is read."""
    lines = str(error).strip().splitlines() or [type(error).__name__]
    mark = getattr(error, "problem_mark", None)
    if mark is not None:
        return f"line {mark.line + 1}: {getattr(error, 'problem', lines[0])}"
    return lines[0][:300].rstrip(".")


@contextmanager
def translate_failures(kind: type[UserError], place: str) -> Iterator[None]:
    """Turns whatever fails inside, in libraries that raise many types, into a `kind` that names `place`."""
    try:
        yield
    except BaseException as error:
        if isinstance(error, UserError) or not is_failure(error):
            raise
        raise kind(f"{place}: {summarize_error(error)}") from None
