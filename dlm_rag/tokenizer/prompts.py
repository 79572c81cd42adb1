"""Prompts: the texts around question and passages, and where the answer stands in a response."""

from __future__ import annotations

import re
import resource
import signal
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields, replace
from datetime import datetime
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any

import yaml

from dlm_rag.answer_forms import ANSWER_FORMS, HTML_TAG
from dlm_rag.errors import CheckpointError, ConfigError, suggest_nearest, translate_failures
from dlm_rag.files.hub import read_checkpoint_json
from dlm_rag.files.paths import expand_path
from dlm_rag.model.denoiser_config import EVIDENCE_LAYOUTS

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

# Quotes, brackets, pictures and tags around names; their emphasis.
_SIGNS = re.compile(rf'["“”„«»‹›`\[\]\u2600-\u27bf\U0001f000-\U0001faff]|{HTML_TAG}')
_EMPHASIS = re.compile(r"(?<![\w*])([*_]{1,3})(?=[^\s*_])([^*_]{1,200})\1(?![\w*])")
_PLACES = re.compile(r"\{(?:number|passage|title|text)\}")


@dataclass(frozen=True)
class PromptTemplate:
    """The texts around question and facts; a checkpoint of ours carries its own under `prompt`.

    The default is SARDI's. head, facts, foot: the user's message; {question} is in head or foot. fact: has
    {passage}, or {title} and {text} of it, and may have {number}, from 1. tail: what the response begins
    with. chat: whether the checkpoint's chat template is around the message. answer: where the answer
    stands in a response, see `text.find_answer`.
    """

    head: str = (
        "Use ONLY the provided facts to answer the question.\n"
        'Think step-by-step, then provide the final answer after the "###" marker.\n\n'
        "Question:\n{question}\n\nFacts:\n"
    )
    fact: str = "[{number}] {passage}"
    foot: str = ""
    tail: str = ""
    chat: bool = True
    answer: str = "marked"

    @property
    def numbers_facts(self) -> bool:
        return "{number}" in self.fact

    @classmethod
    def from_checkpoint(cls, raw: dict[str, Any] | None, layout: str) -> PromptTemplate:
        """The template of a checkpoint, or the default one for its evidence layout.

        In `independent` a passage must not depend on its rank, so its facts carry no number. Raises
        `CheckpointError` for unknown keys, missing places, and numbered facts in `independent`.
        """
        if raw is None:
            return PROMPTS["sardi"].for_layout(layout)
        names = {item.name: str if isinstance(item.default, str) else bool for item in fields(cls)}
        if not isinstance(raw, dict) or any(type(text) is not names.get(key) for key, text in raw.items()):
            raise CheckpointError(
                f"prompt={raw!r:.60} must hold texts by the keys head, fact, foot, tail, answer, and chat "
                "as true or false"
            )
        template = cls(**raw)
        held = [part for part in ("{passage}", "{text}") if part in template.fact]
        if (template.head + template.foot).count("{question}") != 1 or len(held) != 1:
            raise CheckpointError(
                "the prompt template needs {question} once, in head or foot, {passage} or {text} in fact"
            )
        if template.answer not in ANSWER_FORMS:
            raise CheckpointError(f"answer={template.answer!r:.60} is not one of {', '.join(ANSWER_FORMS)}")
        if EVIDENCE_LAYOUTS[layout].separate_passages and template.numbers_facts:
            raise CheckpointError(
                f"the prompt numbers its facts, which evidence_layout={layout} cannot do (a passage must "
                "not depend on its rank): use joint or prefix"
            )
        return template

    def for_layout(self, layout: str) -> PromptTemplate:
        """With facts that have no number, where a passage must not depend on its rank."""
        if not (EVIDENCE_LAYOUTS[layout].separate_passages and self.numbers_facts):
            return self
        return replace(self, fact=self.fact.replace("[{number}] ", "").replace(" {number}", ""))

    def write_fact(self, number: int, passage: str) -> str:
        """The text of a fact, of a passage whose first line is its title."""
        passage = passage.strip()
        title, _, text = passage.partition("\n")
        named = {"{number}": str(number), "{passage}": passage, "{title}": title, "{text}": text or title}
        return _PLACES.sub(lambda place: named[place[0]], self.fact)

    def shorten_passage(self, number: int, passage: str, lost: int) -> str:
        """What is left of a passage in its fact without the last `lost` characters."""
        after = re.split(r"\{(?:passage|text)\}", self.fact)[1]
        lost -= len(replace(self, fact=after).write_fact(number, passage))
        passage = passage.strip()
        return passage[: max(0, len(passage) - max(0, lost))]

    def write_facts(self, passages: Sequence[str]) -> list[str]:
        """The facts of passages in rank order, each with its line break, but for the last numbered one."""
        facts = [f"{self.write_fact(n, passage)}\n" for n, passage in enumerate(passages, start=1)]
        if facts and self.numbers_facts:
            facts[-1] = facts[-1].removesuffix("\n")
        return facts

    def write_question(self, question: str) -> tuple[str, str]:
        """Head and foot. Where titles are named the question is plain, without what SmolLM2 does not know:
        quotes, brackets, emphasis and capitals throughout."""
        asked = question
        if self.answer == "titled":
            asked = _EMPHASIS.sub(r"\2", _SIGNS.sub("", question)).strip()
            asked = asked.lower() if asked.isupper() and " " in asked else asked
        return self.head.replace("{question}", asked), self.foot.replace("{question}", asked)

    def write_message(self, question: str, passages: Sequence[str]) -> str:
        head, foot = self.write_question(question)
        return head + "".join(self.write_facts(passages)) + foot


_TEXTS = yaml.safe_load(Path(__file__).with_name("prompts.yaml").read_text("utf-8"))
PROMPTS = {name: PromptTemplate(**texts) for name, texts in _TEXTS.items()}  # by `prompt`


def load_prompt(name: str | None, layout: str, own: dict[str, Any] | None = None) -> PromptTemplate:
    """The prompt of that name in `PROMPTS`, or in a JSON or YAML file with the fields of `PromptTemplate`.

    Without a name a checkpoint's `own`. Raises `ConfigError`, and `CheckpointError` as `from_checkpoint`.
    """
    if name is None:
        return PromptTemplate.from_checkpoint(own, layout)
    if name in PROMPTS:
        return PROMPTS[name].for_layout(layout)
    path = expand_path(name, ConfigError)
    if not path.is_file():
        known = f"{', '.join(PROMPTS)}{suggest_nearest(name, PROMPTS)}"
        raise ConfigError(f"prompt={name:.60} is neither a file nor one of {known}")
    with translate_failures(ConfigError, f"{path} cannot be read"):
        found = yaml.safe_load(path.read_text(encoding="utf-8"))
    return PromptTemplate.from_checkpoint(found or {}, layout)


CHAT_TEMPLATE_FILE = "chat_template.json"  # where neither tokenizer_config.json nor a .jinja has one
RENDER_SECONDS = 5
RENDER_BYTES = 2**30  # beside what the process has already
MAX_TEMPLATE_CHARS = 2**17  # characters of a rendered message; public templates write some hundred
# For `strftime_now`, the date that Llama's templates fall back to: answers must not depend on the day.
TEMPLATE_DATE = datetime(2024, 7, 26)
# What a template changes in this message it would change in any.
_MESSAGE = 'Who said: "Ünder  <b> & 1\\2"?\n\nit\'s {me}.'


def render_chat_affixes(tokenizer: PreTrainedTokenizerBase, **variables: Any) -> tuple[str, str]:
    """What the chat template writes before and after a user's message. Raises `CheckpointError`."""
    if not tokenizer.chat_template:
        return tokenizer.bos_token or "", ""
    from transformers.utils.chat_template_utils import _compile_jinja_template

    with translate_failures(CheckpointError, "the chat template cannot be rendered"), _limit_rendering():
        text = _compile_jinja_template(tokenizer.get_chat_template()).render(
            **tokenizer.special_tokens_map,
            **variables,
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
        found = {str(each.get("name")): each.get("template") for each in found if isinstance(each, dict)}
    named = found if isinstance(found, dict) else {"default": found}
    if not isinstance(template := named.get("default"), str):
        held = [*named] if named is found else found
        raise CheckpointError(f"{path}: chat_template is no text, and has no 'default': {held!r:.99}")
    return template


@contextmanager
def _limit_rendering() -> Iterator[None]:
    """Bounds time and, where there is /proc, memory; only in the main thread, which signals come to."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def stop(*_: int | FrameType | None) -> None:
        raise TimeoutError(f"it takes more than {RENDER_SECONDS} s")

    held, (soft, hard) = Path("/proc/self/statm"), resource.getrlimit(resource.RLIMIT_AS)
    limit = soft
    if held.is_file():
        most = int(held.read_text().split()[0]) * resource.getpagesize() + RENDER_BYTES
        limit = most if soft == resource.RLIM_INFINITY else min(soft, most)
    handler = signal.signal(signal.SIGALRM, stop)
    signal.setitimer(signal.ITIMER_REAL, RENDER_SECONDS)
    resource.setrlimit(resource.RLIMIT_AS, (limit, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, handler)
