"""Autoregressive models behind OpenAI-style servers, under the published policies of when to retrieve.

`POLICIES` names what `remote.policy` selects; a function of one's own, `remote.policy=module:function`,
takes a `run.BaselineRun` as those of the table do.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class BaselinePolicy:
    """A way to answer a question.

    answer: a function, or `module:function`, imported once it is needed. needs: what is tried at the server
    beforehand, see `run.PROBES`. own_prompt: whether it has its own prompt and ignores `prompt`.
    """

    answer: str | Callable[[Any], None]
    needs: str = "template"
    own_prompt: bool = False


_RUN = "dlm_rag.baselines.run"
POLICIES = {
    "no_retrieval": BaselinePolicy(f"{_RUN}:answer_directly"),
    "static": BaselinePolicy(f"{_RUN}:answer_static"),
    "ircot": BaselinePolicy(f"{_RUN}:answer_ircot", "text", True),
    "search_r1": BaselinePolicy(f"{_RUN}:answer_search_r1", "continued_chat", True),
}
READ_DECODE_SETTINGS = ("max_new_tokens", "temperature", "seed")  # of `decode`, by a model behind a server


def is_model_url(path: str | None) -> bool:
    """Whether a model is behind a server: `openai://`, or `openais://` for TLS."""
    return (path or "").startswith(("openai://", "openais://"))


def is_read_when_served(key: str, policies: Iterable[str] = ("static",)) -> bool:
    """Whether a setting, by its dotted key, has an effect on a model behind a server under a policy."""
    if key in ("prompt", "decode.max_new_tokens"):
        return not all(name in POLICIES and POLICIES[name].own_prompt for name in policies)
    read = {"model.path", *(f"decode.{name}" for name in READ_DECODE_SETTINGS)}
    unread = ("model.", "decode.", "engine.", "workers", "record_provisional")
    return key in read or not key.startswith(unread)
