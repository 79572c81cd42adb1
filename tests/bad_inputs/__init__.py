"""Bad inputs, a row each, and what a program says to them; `test_bad_inputs.py` runs every row.

To add one, write a row into the table of its command: words that the error must hold, then words to add to the
command, then the files that make the input bad. The working folder has `model/` (a tiny checkpoint),
`corpus.jsonl` and `questions.jsonl` already. A command is typed after `dlm-rag`; it may also begin with a module
(`dlm_rag.training.trainer`) or a program of the checkout (`profiling/nsys.py`).
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

SAMPLE_COMMAND = "sample 'Who wrote Emma?' --model model --corpus corpus.jsonl decode.max_new_tokens=8"
# The same without the flag that the case is about.
SAMPLE_WITH_MODEL = "sample 'Who wrote Emma?' --model model decode.max_new_tokens=8"
SAMPLE_WITH_CORPUS = "sample 'Who wrote Emma?' --corpus corpus.jsonl decode.max_new_tokens=8"
SAMPLE_WITHOUT_QUESTION = "sample --model model --corpus corpus.jsonl decode.max_new_tokens=8"
EVALUATE = (
    "evaluate --model model --corpus corpus.jsonl --questions questions.jsonl decode.max_new_tokens=8"
    " retrieval.top_k=1"
)
ABSENT = object()  # in a dict of `files`: the key is taken out


@dataclass(frozen=True)
class BadInputCase:
    """One bad input.

    says: words that standard error must hold, in this order (exit 2 or 1), or standard output (exit 0).
    files: what to put into the working folder first, by path: a text or bytes; a dict, whose keys join the
    JSON object that is there; None takes a file away; a function gets the path and does anything else.
    changes: files that the command may change; all others must be what they were.
    env: variables of the environment; None takes one away.
    alone: whether it runs in a process of its own, as programs of the checkout do: for what is read at the
    start of Python.
    loads: whether weights are read before the error, which are out of reach otherwise.
    """

    command: str
    says: str | tuple[str, ...]
    files: dict[str, str | bytes | dict[str, Any] | Callable[[Path], Any] | None] = field(
        default_factory=dict
    )
    exit: int = 2
    stdin: bytes = b""
    changes: tuple[str, ...] = ()
    env: dict[str, str | None] = field(default_factory=dict)
    alone: bool = False
    loads: bool = False


def table(command: str, *rows: tuple, **options: Any) -> list[BadInputCase]:
    """The cases of a command; rows: what is said, then words for the command (texts), then files (dicts)."""
    found = []
    for says, *given in rows:
        words = " ".join([command, *(part for part in given if isinstance(part, str))])
        files = [part for part in given if isinstance(part, dict)]
        found.append(BadInputCase(words, says, files[0] if files else {}, **options))
    return found
