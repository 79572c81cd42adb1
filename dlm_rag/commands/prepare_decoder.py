"""What a job needs, checked in the order of its cost: everything but the weights, which are read last.

Settings, questions, service or corpus, checkpoint headers, lengths, index; for a model on this machine, or
behind a server.
"""

from __future__ import annotations

import datetime
import platform
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from dlm_rag import __version__
from dlm_rag.baselines import POLICIES, READ_DECODE_SETTINGS, is_model_url, is_read_when_served
from dlm_rag.config import Config, EngineConfig, RetrievalConfig
from dlm_rag.config.fields import fill_unset, replace_settings
from dlm_rag.data.hub_datasets import find_named_corpus
from dlm_rag.decode.trace_file import TraceHeader, build_trace_header
from dlm_rag.errors import ConfigError, QuestionError
from dlm_rag.evidence.prompt_segments import ContextBudget, measure_longest_prompt
from dlm_rag.files.hub import SHIPPED_FOLDER, SHIPPED_PREFIX
from dlm_rag.files.paths import digest_file
from dlm_rag.machine import (
    choose_device,
    choose_dtype,
    describe_machine,
    get_code_commit,
    get_device_memory_bytes,
    get_machine_name,
)
from dlm_rag.progress import format_bytes, show_status
from dlm_rag.questions import Question, number_questions, read_questions, select_questions
from dlm_rag.retrieval import load_retriever, read_retrieval_settings
from dlm_rag.retrieval.base import Retriever, wrap_oracle
from dlm_rag.retrieval.corpus import open_corpus
from dlm_rag.tokenizer import Tokenizer
from dlm_rag.tokenizer.prompts import PROMPTS, load_prompt

if TYPE_CHECKING:
    import torch

    from dlm_rag.baselines.run import BaselineContext, BaselineEngine
    from dlm_rag.engine.engine import AnyDenoiser, Decoder
    from dlm_rag.model.checkpoint import Checkpoint

Made = TypeVar("Made")
# Settings of retrieval and decoding that change no answer; of what a URL searches there is a fingerprint.
FREE_SETTINGS = {"batch_size", "corpus", "index_dir", "url", "timeout"}
WORLD_MODELS = [f"{SHIPPED_PREFIX}{name}" for name in ("model", "whole")]  # trained on the world that ships
STAMPED_PACKAGES = ("torch", "transformers", "sentence-transformers", "bm25s", "numpy")


@dataclass(frozen=True)
class PreparedDecoder:
    """Everything that was checked, and how to load the rest."""

    checkpoint: Checkpoint
    tokenizer: Tokenizer
    retriever: Retriever
    device: torch.device
    dtype: torch.dtype
    attention: str
    evidence_layout: str
    config: Config

    @property
    def weight_bytes(self) -> int:
        return self.checkpoint.count_weight_bytes(self.dtype.itemsize, self.config.model.quantize)

    @property
    def end_ids(self) -> Collection[int]:
        """Tokens behind which no text is."""
        return self.tokenizer.end_ids

    def load(self, denoiser: AnyDenoiser | None = None) -> Decoder:
        """Reads the weights, where they are not given."""
        show_status("reading weights")
        from dlm_rag.engine.engine import Decoder
        from dlm_rag.model.denoiser import load_denoiser

        config = self.config
        if denoiser is None:
            how = self.device, self.dtype, self.attention, config.model.quantize, config.model.device_map
            denoiser = load_denoiser(self.checkpoint, *how)
        decoder = Decoder(
            denoiser, self.retriever, self.tokenizer, config.decode, self.evidence_layout, config.engine
        )
        decoder.record_provisional = config.record_provisional or config.html is not None
        return decoder

    def answers_depend_on(self) -> dict[str, Any]:
        """All that can change an answer; batch size, device and names of files and hosts cannot."""
        settings = {
            f"{section}.{key}": value
            for section in ("retrieval", "decode")
            for key, value in asdict(getattr(self.config, section)).items()
            if key not in FREE_SETTINGS
        }
        if settings["decode.overlap"] == "pipeline":  # the same tokens
            settings["decode.overlap"] = "none"
        if self.config.prompt is not None:
            settings["prompt"] = asdict(self.tokenizer.template)
        return settings | {
            "model": self.checkpoint.fingerprint,
            "corpus": self.retriever.fingerprint,
            "dtype": str(self.dtype).removeprefix("torch."),
            "model.quantize": self.config.model.quantize,
            "evidence_layout": self.evidence_layout,
            "block_size": self.checkpoint.config.block_size,
            "engine.compile": self.config.engine.compile,
            "engine.cache_dtype": self.config.engine.cache_dtype,
        }

    def trace_header(self) -> TraceHeader:
        """What the questions of a trace of this job have in common."""
        return build_trace_header(
            self.checkpoint.config, self.tokenizer, self.evidence_layout, self.config.decode,
            top_k=self.config.retrieval.top_k, model=self.checkpoint.fingerprint,
            corpus=self.retriever.fingerprint,
        )  # fmt: skip

    def stamp(self) -> dict[str, Any]:
        """What a result must carry to be understood later: code, settings, versions, machine."""
        import torch

        machine = {
            "device": f"{self.device.type}: {get_machine_name(self.device)}",
            "threads": torch.get_num_threads(),
            "attention": self.attention,
            "machines": [describe_machine(self.device, self.attention)],  # that have answered, in order
        }
        named = (self.config.retrieval.corpus, self.config.questions)
        files = self.checkpoint.read_files | {Path(name) for name in named if name}
        digests = {str(path): digest_file(path) for path in sorted(files) if path.is_file()}
        stamp = stamp_run(self.config, self.answers_depend_on(), machine, STAMPED_PACKAGES)
        return stamp | {"files": digests}


def stamp_run(
    config: Config, depends_on: dict[str, Any], machine: dict[str, Any], packages: Collection[str] = ()
) -> dict[str, Any]:
    """The stamp of a run by what has answered on which machine."""
    versions = {"python": platform.python_version(), "dlm_rag": __version__}
    return {
        "commit": get_code_commit(),
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "versions": versions | {package: version(package) for package in packages},
        **machine,
        "seed": config.decode.seed,
        "energy": None,  # of each part of the run, once it has ended
        "answers_depend_on": depends_on,
        "config": asdict(config),
    }


class ResourceCache:
    """Makes once what several jobs need: corpora, indexes, services, tokenizers."""

    def __init__(self) -> None:
        self._made: dict[str, Any] = {}

    def __call__(self, make: Callable[[], Made], *key: Any) -> Made:
        """What `make` returned for this key, by its representation."""
        if (name := repr(key)) not in self._made:
            self._made[name] = make()
        return self._made[name]


def gather_questions(config: Config, typed: list[str]) -> list[Question]:
    """The questions chosen of the file, and those of the command line; at least one, ids all different.

    Raises `QuestionError`.
    """
    if config.limit and not config.questions:
        raise ConfigError("limit chooses among the questions of a file: name one with --questions")
    questions = select_questions(read_questions(config.questions), config) if config.questions else []
    questions += number_questions(typed)
    if len({question.id for question in questions}) < len(questions):
        raise QuestionError(f"a typed question has an id of {config.questions}: put it into that file")
    if not questions:
        raise ConfigError('no question: type one, as in "Who wrote Emma?", or give --questions')
    return questions


def fill_in_shipped_files(config: Config, typed: list[str]) -> Config:
    """The config with what ships with the package where nothing is named.

    The model by itself, the world for its own models, the world's questions for no other corpus. The
    corpus "context" is the file of the questions, that of a name its file. Raises `ConfigError`.
    """
    model, questions, corpus = config.model, config.questions, config.retrieval.corpus
    if corpus == "context" and not Path("context").exists():
        if questions in (None, "-"):
            raise ConfigError("--corpus context is what comes with the questions of --questions FILE")
        corpus = questions
    corpus = find_named_corpus(corpus)
    if model.path in (None, *WORLD_MODELS) and corpus is None and config.retrieval.url is None:
        corpus = str(SHIPPED_FOLDER / "world" / "corpus.jsonl")
        if questions is None and not typed:
            questions = str(SHIPPED_FOLDER / "world" / "questions.jsonl")
    retrieval = replace_settings(config.retrieval, corpus=corpus)
    if model.path is None:
        model = replace(model, path=str(SHIPPED_FOLDER / "model"))
    return replace(config, model=model, retrieval=retrieval, questions=questions)


def prepare_decoder(
    config: Config, questions: list[Question], once: ResourceCache | None = None
) -> PreparedDecoder:
    """Checks checkpoint, questions, corpus and index, before any weight is read.

    questions: empty where all has been checked before, in another process. once: of the jobs that share
    what they need. Raises `UserError`.
    """
    once = once or ResourceCache()
    weights = (path, _) = config.model.path or "", config.model.block_size
    if not is_model_url(path):  # which is refused below
        own = read_retrieval_settings(path)
        config = replace(config, retrieval=fill_unset(config.retrieval, own))
    find = open_search_source(config.retrieval, once)
    show_status("checking the model")
    from dlm_rag.engine.engine import resolve_settings
    from dlm_rag.engine.step_graphs import check_step_graphs
    from dlm_rag.engine.store import check_store
    from dlm_rag.evidence.prompt_segments import check_finished_blocks, check_kept_evidence
    from dlm_rag.model.attention import choose_backend
    from dlm_rag.model.quantize import check_quantize

    checkpoint = once(lambda: _open_checkpoint(*weights), "checkpoint", *weights)
    decode = resolve_settings(config.decode, checkpoint.config)
    config, devices = replace(config, decode=decode), choose_devices(config)
    device = devices[0]
    dtype = choose_dtype(config.model.dtype, device)
    if (adapter := checkpoint.config.adapter) is None:
        causal_context = checkpoint.config.causal_context
        attention = choose_backend(config.model.attn_implementation, device, dtype, causal_context)
        check_step_graphs(config.engine, checkpoint.config, attention, devices)
    else:
        attention = adapter.check_settings(config.model, config.engine)
    shape = checkpoint.config
    check_quantize(config.model.quantize, shape, dtype)
    check_weights_fit(checkpoint, devices, dtype, config.model.quantize)
    need = checkpoint.count_weight_bytes(dtype.itemsize, config.model.quantize)
    check_memory_limit(config.engine, device, need)
    check_store(config.engine)
    show_status("reading the tokenizer")
    canvas, layout = decode.max_new_tokens, config.model.evidence_layout or shape.evidence_layout
    assert canvas is not None and decode.finished_block_context is not None
    check_finished_blocks(shape, decode.finished_block_context, layout)
    check_kept_evidence(config.engine, shape, layout)
    written = layout, config.prompt
    tokenizer = once(
        lambda: Tokenizer.from_pretrained(checkpoint, *written), "tokenizer", *weights, *written
    )
    room = ContextBudget.from_config(shape, layout, canvas)
    measure_longest_prompt(questions, tokenizer, room)
    show_status("opening the index")
    found = find()
    retriever = wrap_oracle(found, questions, decode.query_policy) if config.retrieval.oracle else found
    return PreparedDecoder(checkpoint, tokenizer, retriever, device, dtype, attention, layout, config)


def _open_checkpoint(path: str, block_size: int | None) -> Checkpoint:
    from dlm_rag.model.checkpoint import open_checkpoint

    if is_model_url(path):
        raise ConfigError("a model behind a server is for evaluate: name a folder or a hub id")
    checkpoint = open_checkpoint(path, block_size)
    if block_size is not None and checkpoint.config.decode_modes == ("autoregressive",):
        raise ConfigError("model.block_size has no effect on an autoregressive model: leave it out")
    return checkpoint


def open_search_source(config: RetrievalConfig, once: ResourceCache) -> Callable[[], Retriever]:
    """Checks what is searched, a service by asking it, without torch, which takes seconds to import.

    Gives what opens it: an index may take time. Raises `UserError`.
    """
    if config.url is not None:
        show_status(f"asking {config.url}")
        service = once(lambda: load_retriever(config), "service", config)
        return lambda: service
    if config.corpus is None:
        raise ConfigError("no corpus: give --corpus a file of JSON lines, or retrieval.url=URL")
    show_status("reading the corpus")
    passages = config.corpus, config.index_dir
    corpus = once(lambda: open_corpus(*passages), "corpus", *passages)
    plain = replace(config, oracle=False)
    return lambda: once(lambda: load_retriever(plain, corpus), "retriever", plain)


def choose_devices(config: Config) -> list[torch.device]:
    """The devices that the layers are on, the first one for all else. Raises `ConfigError`."""
    from dlm_rag.model.denoiser import list_devices

    if config.model.device_map is None:
        return [choose_device(config.model.device)]
    for found, reason in (
        (config.model.device != "auto", "names the devices: leave model.device out"),
        (config.workers is not None, "is for one process: leave workers out"),
        (config.engine.memory_gib is not None, "takes no engine.memory_gib, which is of one device"),
    ):
        if found:
            raise ConfigError(f"model.device_map={config.model.device_map} {reason}")
    return list_devices(config.model.device_map)


def check_weights_fit(
    checkpoint: Checkpoint, devices: Sequence[torch.device], dtype: torch.dtype, quantize: str = "none"
) -> None:
    """Raises `ConfigError` for weights that these devices cannot hold."""
    need = checkpoint.count_weight_bytes(dtype.itemsize, quantize)
    have = sum(map(get_device_memory_bytes, {*devices}))
    if need > have:
        half = "" if dtype.itemsize < 4 else "set model.dtype=bfloat16, or "
        half += "set model.quantize=int8, or " * (quantize == "none" and checkpoint.family.load is None)
        raise ConfigError(
            f"the weights of {checkpoint.folder} take {format_bytes(need)} in {str(dtype)[6:]}, and this "
            f"{devices[0].type} has {format_bytes(have)} of memory: {half}choose a smaller model or a "
            "larger device, or spread the layers over several GPUs (model.device_map=auto)"
        )


def check_memory_limit(engine: EngineConfig, device: torch.device, weight_bytes: int) -> None:
    """Raises `ConfigError` for an `engine.memory_gib` that is not free, or that weights and pool fill."""
    from dlm_rag.machine import measure_free_bytes

    if engine.memory_gib is None:
        return
    limit, free = engine.memory_gib * 2**30, measure_free_bytes(device)
    need = weight_bytes + (engine.prefix_cache_gib or 0.0) * 2**30
    said = f"engine.memory_gib={engine.memory_gib:g}"
    if limit > free:
        raise ConfigError(
            f"{said} is more than the {format_bytes(free)} that are free on this {device.type}: lower it, "
            "or wait until others have ended"
        )
    if need >= limit:
        raise ConfigError(
            f"{said} is too little: weights and engine.prefix_cache_gib alone take {format_bytes(need)}: "
            "raise it, or choose a smaller model"
        )


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
        from dlm_rag.baselines.run import BaselineEngine

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
    from dlm_rag.baselines.chat_client import ChatClient
    from dlm_rag.baselines.run import BaselineContext

    url = config.model.path
    assert url is not None
    if config.workers is not None:
        raise ConfigError("workers= are processes with weights: leave it out with a model behind a server")
    if config.retrieval.oracle and config.remote.policy != "static":
        raise ConfigError("retrieval.oracle=true needs remote.policy=static: its evidence never changes")
    find = open_search_source(config.retrieval, once)
    template = load_prompt(config.prompt, "joint") if config.prompt else PROMPTS["sardi"]
    client = ChatClient("model.path", url, "DLM_RAG_MODEL_KEY")
    show_status("opening the index")
    found = find()
    retriever = wrap_oracle(found, questions, "question") if config.retrieval.oracle else found
    config = replace(config, energy="none")  # it is spent elsewhere
    return PreparedBaseline(BaselineContext(client, retriever, config, template), config)
