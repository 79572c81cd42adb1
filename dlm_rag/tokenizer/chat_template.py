"""The text that a checkpoint's chat template writes around a user's message.

A template is a program by somebody else. Transformers' sandbox keeps it from the machine; a timer ends
endless loops, in the main thread alone (signals arrive nowhere else), and a limit on memory texts that grow
without bound.
"""

import resource
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import datetime
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING

from dlm_rag.errors import CheckpointError, translate_failures
from dlm_rag.files.hub import read_checkpoint_json

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

CHAT_TEMPLATE_FILE = "chat_template.json"  # where neither tokenizer_config.json nor a .jinja has one
RENDER_SECONDS = 5
RENDER_BYTES = 2**30  # beside what the process has already
MAX_TEMPLATE_CHARS = 2**17  # characters of a rendered message; public templates write some hundred
# For `strftime_now`, the date that Llama's templates fall back to: answers must not depend on the day.
TEMPLATE_DATE = datetime(2024, 7, 26)
# What a template changes in this message it would change in any.
_MESSAGE = 'Who said: "Ünder  <b> & 1\\2"?\n\nit\'s {me}.'


def render_chat_affixes(tokenizer: "PreTrainedTokenizerBase") -> tuple[str, str]:
    """What the chat template writes before and after a user's message. Raises `CheckpointError`."""
    if not tokenizer.chat_template:
        return tokenizer.bos_token or "", ""
    from transformers.utils.chat_template_utils import _compile_jinja_template

    failing = translate_failures(CheckpointError, "the chat template cannot be rendered")
    with failing, _limit_time(), _limit_memory():
        text = _compile_jinja_template(tokenizer.get_chat_template()).render(
            **tokenizer.special_tokens_map,
            messages=[{"role": "user", "content": _MESSAGE}],
            tools=None,
            documents=None,
            add_generation_prompt=True,
            strftime_now=TEMPLATE_DATE.strftime,  # `apply_chat_template` takes no functions
        )
    if len(text) > MAX_TEMPLATE_CHARS:
        raise CheckpointError(f"the chat template writes {len(text):,} characters around a message")
    prefix, found, suffix = str(text).partition(_MESSAGE)
    if not found or _MESSAGE in suffix:
        raise CheckpointError("the chat template must show the user's message once, as it is")
    return prefix, suffix


def read_chat_template(path: Path) -> str:
    """The template in a `chat_template.json`, as processors have it. Raises `CheckpointError`."""
    found = read_checkpoint_json(path).get("chat_template")
    if isinstance(found, list):  # of several, by name
        named = {each.get("name"): each.get("template") for each in found if isinstance(each, dict)}
        found = named.get("default")
    if not isinstance(found, str):
        raise CheckpointError(f"{path} has no chat_template that is a text")
    return found


@contextmanager
def _limit_time() -> Iterator[None]:
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def stop(*_: int | FrameType | None) -> None:
        raise TimeoutError(f"it takes more than {RENDER_SECONDS} s")

    before = signal.signal(signal.SIGALRM, stop)
    signal.setitimer(signal.ITIMER_REAL, RENDER_SECONDS)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


@contextmanager
def _limit_memory() -> Iterator[None]:
    """Lets the process take no more than `RENDER_BYTES` besides; does nothing without /proc."""
    held = Path("/proc/self/statm")
    before, most = resource.getrlimit(resource.RLIMIT_AS)
    if not held.is_file() or threading.current_thread() is not threading.main_thread():
        yield
        return
    pages = int(held.read_text().split()[0])
    limit = pages * resource.getpagesize() + RENDER_BYTES
    lower = [value for value in (before, limit) if value != resource.RLIM_INFINITY]
    resource.setrlimit(resource.RLIMIT_AS, (min(lower), most))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (before, most))
