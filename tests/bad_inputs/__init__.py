"""Bad inputs, a line each, and what a program says to them; `test_bad_inputs.py` runs every line.

To add one, write a `BadInputCase` into the table of its room: a name, the command as it is typed behind
`dlm-rag`, words that the error must hold, and the files that make the input bad. The working folder
has `model/` (a tiny checkpoint), `corpus.jsonl` and `questions.jsonl` already. A command may also begin
with a module (`dlm_rag.training.model_card`) or a program of the checkout (`profiling/nsys.py`).
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


@dataclass(frozen=True)
class BadInputCase:
    """One bad input.

    files: what to put into the working folder first, by path: a text or bytes; a dict, whose keys join the
    JSON object that is there; None takes a file away; a function gets the path and does anything else.
    says: words that standard error must hold, in this order (exit 2 or 1), or standard output (exit 0).
    changes: files that the command may change; all others must be what they were.
    env: variables of the environment, None takes one away. These cases, and programs of the checkout, run
    in a process of their own: mark `slow` what takes more than two seconds in it.
    """

    what: str
    command: str
    says: str | tuple[str, ...] = ()
    files: dict[str, str | bytes | dict[str, Any] | Callable[[Path], Any] | None] = field(
        default_factory=dict
    )
    exit: int = 2
    stdin: bytes = b""
    changes: tuple[str, ...] = ()
    env: dict[str, str | None] = field(default_factory=dict)
    slow: bool = False

    @property
    def needs_own_process(self) -> bool:
        """Whether it needs a process of its own."""
        return bool(self.env) or self.command.split()[0].endswith(".py")
