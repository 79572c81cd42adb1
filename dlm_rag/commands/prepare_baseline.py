"""What a job of a model behind a server needs, as `prepare_decoder.py` is for one on this machine."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any

from dlm_rag.baselines import POLICIES, READ_DECODE_SETTINGS, is_read_when_served
from dlm_rag.baselines.chat_client import ChatClient
from dlm_rag.baselines.run import BaselineContext, BaselineEngine
from dlm_rag.commands.prepare_decoder import FREE_SETTINGS, ResourceCache, open_search_source, stamp_run
from dlm_rag.config import Config
from dlm_rag.decode.trace_file import TraceHeader
from dlm_rag.errors import ConfigError
from dlm_rag.progress import show_status
from dlm_rag.questions import Question
from dlm_rag.retrieval.composite import wrap_oracle
from dlm_rag.tokenizer.prompts import PROMPTS, load_prompt

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class PreparedBaseline:
    """Everything that was checked, used as a `PreparedDecoder` is."""

    context: BaselineContext
    config: Config
    end_ids: frozenset[int] = frozenset()
    dtype: str = "that of the server"
    weight_bytes: int = 0

    @property
    def device(self) -> torch.device:
        import torch

        return torch.device("cpu")

    def load(self, denoiser: Any = None) -> BaselineEngine:
        """The engine; there are no weights to read."""
        return BaselineEngine(self.context, self.answers_depend_on())

    def answers_depend_on(self) -> dict[str, Any]:
        """All that can change an answer, as far as a client can know."""
        settings = {
            f"{section}.{key}": value
            for section in ("retrieval", "remote")
            for key, value in asdict(getattr(self.config, section)).items()
            if key not in (*FREE_SETTINGS, "concurrency")
        } | {f"decode.{key}": getattr(self.config.decode, key) for key in READ_DECODE_SETTINGS}
        policy = POLICIES.get(self.config.remote.policy)
        if policy is None or not policy.own_prompt:
            settings["prompt"] = asdict(self.context.template)
        model = f"{self.context.client.model} behind a server"
        return settings | {"model": model, "corpus": self.context.retriever.fingerprint}

    def trace_header(self) -> TraceHeader:
        """What the questions of a trace have in common; no prompt can be made from one of these."""
        depends = self.answers_depend_on()
        return TraceHeader(
            "joint", 0, 0, False, self.context.template, -1, (), self.config.retrieval.top_k,
            depends["model"], depends["corpus"], depends,
        )  # fmt: skip

    def stamp(self) -> dict[str, Any]:
        """As `PreparedDecoder.stamp`."""
        client = self.context.client
        machine = {
            "device": f"server: {client.model} at {client.url}",
            "threads": self.config.remote.concurrency,
            "attention": self.dtype,
            "machines": [{"server": client.url}],
        }
        return stamp_run(self.config, self.answers_depend_on(), machine)


def check_served_keys(keys: Iterable[str]) -> None:
    """Raises `ConfigError` for a setting, by its dotted key, without effect on a model behind a server."""
    for key in keys:
        if not is_read_when_served(key):
            raise ConfigError(f"{key} has no effect on a model behind a server: leave it out")


def prepare_baseline(config: Config, questions: list[Question], once: ResourceCache) -> PreparedBaseline:
    """Checks all but the server, see `BaselineEngine.check`. Raises `UserError`."""
    assert config.model.path is not None
    if config.workers is not None:
        raise ConfigError("workers= are processes with weights: leave it out with a model behind a server")
    if config.retrieval.oracle and config.remote.policy != "static":
        raise ConfigError("retrieval.oracle=true needs remote.policy=static: its evidence never changes")
    find = open_search_source(config.retrieval, once)
    template = load_prompt(config.prompt, "joint") if config.prompt else PROMPTS["sardi"]
    client = ChatClient("model.path", config.model.path, "DLM_RAG_MODEL_KEY")
    show_status("opening the index")
    found = find()
    retriever = wrap_oracle(found, questions, "question") if config.retrieval.oracle else found
    config = replace(config, energy="none")  # it is spent elsewhere
    return PreparedBaseline(BaselineContext(client, retriever, config, template), config)
