"""What a job needs, checked in the order of its cost: everything but the weights, which are read last."""

from __future__ import annotations

import datetime
import platform
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dlm_rag import __version__, machine
from dlm_rag.baselines import POLICIES, READ_DECODE_SETTINGS, is_model_url
from dlm_rag.cli import print_note
from dlm_rag.config import Config, EngineConfig, RetrievalConfig
from dlm_rag.config.fields import fill_unset, find_idle_settings, flatten_settings, replace_settings
from dlm_rag.data.hub_datasets import find_named_corpus
from dlm_rag.decode.trace_file import TraceHeader, build_trace_header
from dlm_rag.errors import ConfigError, QuestionError
from dlm_rag.files.hub import SHIPPED_FOLDER, is_world_model
from dlm_rag.files.paths import digest_file
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

# Settings that change no answer; of what is searched there is a fingerprint.
FREE_SETTINGS = {
    "decode.batch_size", "retrieval.corpus", "retrieval.index_dir", "retrieval.url", "retrieval.timeout",
    "remote.concurrency",
}  # fmt: skip
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
    weight_bytes: int
    config: Config
    given: tuple[Config, list[Question]]  # what `prepare_decoder` got

    @property
    def devices(self) -> list[torch.device]:
        """All that the layers are on."""
        return [*dict.fromkeys(choose_devices(self.config))]

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
        settings = list_answer_settings(self.config, "retrieval", "decode")
        settings["decode.overlap"] = "none"  # another gives the same tokens
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

        found = {
            "device": f"{self.device.type}: {machine.get_machine_name(self.device)}",
            "threads": torch.get_num_threads(),
            "attention": self.attention,
            "machines": [machine.describe_machine(self.device, self.attention)],  # others come behind it
        }
        named = (self.config.retrieval.corpus, self.config.questions)
        files = self.checkpoint.read_files | {Path(name) for name in named if name}
        digests = {str(path): digest_file(path) for path in sorted(files) if path.is_file()}
        return stamp_run(self.config, self.answers_depend_on(), found) | {"files": digests}


def list_answer_settings(config: Config, *sections: str) -> dict[str, Any]:
    """The settings of these sections that can change an answer, by their dotted keys."""
    known = flatten_settings(config).items()
    return {k: v for k, v in known if k.partition(".")[0] in sections and k not in FREE_SETTINGS}


def stamp_run(config: Config, depends_on: dict[str, Any], found: dict[str, Any]) -> dict[str, Any]:
    """The stamp of a run by what has answered on which machine."""
    versions = {"python": platform.python_version(), "dlm_rag": __version__}
    return {
        "commit": machine.get_code_commit(),
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "versions": versions | {package: version(package) for package in STAMPED_PACKAGES},
        **found,
        "seed": config.decode.seed,
        "energy": None,  # of each part of the run, once it has ended
        "answers_depend_on": depends_on,
        "config": asdict(config),
    }


class ResourceCache(dict[str, Any]):
    """What several jobs need, made once: corpora, indexes, services, tokenizers, checkpoints."""

    def __call__(self, make: Callable[[], Any], *key: Any) -> Any:
        """What `make` returned for this key, by its representation."""
        if (name := repr(key)) not in self:
            self[name] = make()
        return self[name]


def gather_questions(config: Config, typed: list[str], scored: bool = False) -> list[Question]:
    """The questions of file and command line; scored: of a file, with answers. Raises `UserError`."""
    if scored and not config.questions:
        raise ConfigError("a model or corpus of your own needs --questions FILE, with golden_answers")
    if config.limit and not config.questions:
        raise ConfigError("limit chooses among the questions of a file: name one with --questions")
    questions = select_questions(read_questions(config.questions), config) if config.questions else []
    questions += number_questions(typed)
    if len({question.id for question in questions}) < len(questions):
        raise QuestionError(f"a typed question has an id of {config.questions}: put it into that file")
    if not questions:
        raise ConfigError('no question: type one, as in "Who wrote Emma?", or give --questions')
    if scored and (without := [each.id for each in questions if not each.golden_answers]):
        count = f"{len(without):,} of {len(questions):,} questions have no golden_answers ('{without[0]}')"
        raise ConfigError(f"{config.questions}: {count}: which answer is right is not known")
    return questions


def fill_in_shipped_files(config: Config, typed: list[str]) -> Config:
    """The config with what ships where nothing is named: the model by itself, the world for its own models,
    the world's questions for no other corpus. Raises `ConfigError`."""
    model, questions, corpus = config.model, config.questions, config.retrieval.corpus
    if corpus == "context" and not Path("context").exists():
        if questions in (None, "-") or Path(questions).is_dir():
            raise ConfigError("--corpus context is what comes with the questions of --questions FILE")
        corpus = questions
    corpus = find_named_corpus(corpus)
    own = model.path is None or is_world_model(model.path)
    if own and corpus is None and config.retrieval.url is None:
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
    """Checks all that is needed, before any weight is read; once: shared by jobs. Raises `UserError`."""
    once, given = ResourceCache() if once is None else once, (config, questions)
    weights = (path, _) = config.model.path or "", config.model.block_size
    if is_model_url(path):
        raise ConfigError("a model behind a server is for evaluate: name a folder or a hub id")
    wanted = fill_unset(config.retrieval, read_retrieval_settings(path))
    idle = find_idle_settings("retrieval", wanted, flatten_settings(wanted, "retrieval."))
    unread = {name: getattr(RetrievalConfig(), name) for name in idle if name not in wanted.given}
    if unread and wanted.url:  # else `retrieval.method` says why
        once(lambda: print_note(f"{wanted.url} does not read the model's {', '.join(unread)}"), *unread)
    config = replace(config, retrieval=fill_unset(wanted, unread))
    find = open_search_source(config.retrieval, once)
    show_status("checking the model")
    from dlm_rag.engine.engine import resolve_settings
    from dlm_rag.engine.runner import check_step_graphs, check_unread_settings
    from dlm_rag.engine.store import check_store
    from dlm_rag.evidence.prompt_segments import ContextBudget, check_prompt_room
    from dlm_rag.model.checkpoint import open_checkpoint
    from dlm_rag.model.layers import choose_backend
    from dlm_rag.model.quantize import check_quantize

    checkpoint = once(lambda: open_checkpoint(*weights), "checkpoint", *weights)
    shape, model, engine = checkpoint.config, config.model, config.engine
    check_unread_settings(model, engine, shape)
    layout = model.evidence_layout or shape.evidence_layout
    decode = resolve_settings(config.decode, shape, layout)
    config, devices = replace(config, decode=decode), choose_devices(config)
    dtype = machine.choose_dtype(model.dtype, devices[0])
    if shape.adapter is None:
        attention = choose_backend(model.attn_implementation, devices[0], dtype, shape.causal_context)
        check_step_graphs(engine, shape, attention, devices)
    else:
        attention = shape.adapter.DiffusionGemma.backend
    check_quantize(model.quantize, shape, dtype)
    need = check_weights_fit(checkpoint, devices, dtype, model.quantize)
    check_memory_limit(engine, devices[0], need)
    check_store(engine)
    show_status("reading the tokenizer")
    read = layout, config.prompt
    tokenizer = once(lambda: Tokenizer.from_pretrained(checkpoint, *read), "tokenizer", *weights, *read)
    room = ContextBudget.from_config(shape, layout, decode.max_new_tokens)
    check_prompt_room(questions, tokenizer, room)
    retriever = find(questions, decode.query_policy)
    return PreparedDecoder(
        checkpoint, tokenizer, retriever, devices[0], dtype, attention, layout, need, config, given
    )


def open_search_source(
    config: RetrievalConfig, once: ResourceCache
) -> Callable[[list[Question], str], Retriever]:
    """Checks what is searched, before torch is imported; gives what opens it. Raises `UserError`."""
    if config.url is not None:
        show_status(f"asking {config.url}")
        service = once(lambda: load_retriever(config), "service", config)
        return lambda asked, policy: wrap_oracle(service, asked, policy) if config.oracle else service
    if config.corpus is None:
        raise ConfigError("no corpus: give --corpus a file of JSON lines, or retrieval.url=URL")
    show_status("reading the corpus")
    passages, plain = (config.corpus, config.index_dir), replace(config, oracle=False)
    corpus = once(lambda: open_corpus(*passages), "corpus", *passages)

    def find(questions: list[Question], policy: str) -> Retriever:
        show_status("opening the index")
        found = once(lambda: load_retriever(plain, corpus), "retriever", plain)
        return wrap_oracle(found, questions, policy) if config.oracle else found

    return find


def choose_devices(config: Config) -> list[torch.device]:
    """The devices that the layers are on, the first one for all else. Raises `ConfigError`."""
    from dlm_rag.model.denoiser import list_devices

    model = config.model
    if model.device_map is None:
        return [machine.choose_device(model.device)]
    others = {
        "model.device": model.device != "auto",
        "workers": config.workers is not None,
        "engine.memory_gib": config.engine.memory_gib is not None,
    }
    if taken := [key for key, is_set in others.items() if is_set]:
        raise ConfigError(f"model.device_map={model.device_map} is for one process: leave {taken[0]} out")
    return list_devices(model.device_map)


def check_weights_fit(
    checkpoint: Checkpoint, devices: Sequence[torch.device], dtype: torch.dtype, quantize: str = "none"
) -> int:
    """The bytes that the weights take. Raises `ConfigError` where these devices cannot hold them."""
    need = checkpoint.count_weight_bytes(dtype.itemsize, quantize)
    have = sum(map(machine.get_device_memory_bytes, {*devices}))
    if need > have:
        half = "" if dtype.itemsize < 4 else "set model.dtype=bfloat16, or "
        plain = quantize == "none" and checkpoint.config.adapter is None and str(dtype) != "torch.float16"
        half += "set model.quantize=int8, or " * plain
        raise ConfigError(
            f"the weights of {checkpoint.folder} take {format_bytes(need)} in {str(dtype)[6:]}, and this "
            f"{devices[0].type} has {format_bytes(have)} of memory: {half}choose a smaller model or a "
            "larger device, or spread the layers over several GPUs (model.device_map=auto)"
        )
    return need


def check_memory_limit(engine: EngineConfig, device: torch.device, weight_bytes: int) -> None:
    """Raises `ConfigError` for an `engine.memory_gib` that is not free, or that weights and pool fill."""
    if engine.memory_gib is None:
        return
    limit, free = engine.memory_gib * 2**30, machine.measure_free_bytes(device)
    need = weight_bytes + (engine.prefix_cache_gib or 0.0) * 2**30
    if limit > free:
        wrong = f"more than the {format_bytes(free)} that are free on this {device.type}: lower it"
    elif need >= limit:
        wrong = f"too little: weights and engine.prefix_cache_gib alone take {format_bytes(need)}: raise it"
    else:
        return
    raise ConfigError(f"engine.memory_gib={engine.memory_gib:g} is {wrong}")


@dataclass(frozen=True)
class PreparedBaseline:
    """Everything that was checked, used as a `PreparedDecoder` is."""

    context: BaselineContext
    config: Config
    devices: Any = ()  # they are elsewhere

    def load(self, denoiser: Any = None) -> BaselineEngine:
        """The engine; there are no weights to read."""
        from dlm_rag.baselines.run import BaselineEngine

        return BaselineEngine(self.context, self.answers_depend_on())

    def answers_depend_on(self) -> dict[str, Any]:
        """All that can change an answer, as far as a client can know."""
        settings = list_answer_settings(self.config, "retrieval", "remote")
        settings |= {f"decode.{key}": getattr(self.config.decode, key) for key in READ_DECODE_SETTINGS}
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
        found = {
            "device": f"server: {client.model} at {client.url}",
            "threads": self.config.remote.concurrency,
            "attention": "that of the server",
            "machines": [{"server": client.url}],
        }
        return stamp_run(self.config, self.answers_depend_on(), found)


def prepare_baseline(config: Config, questions: list[Question], once: ResourceCache) -> PreparedBaseline:
    """Checks all but the server, see `BaselineEngine.check`. Raises `UserError`."""
    from dlm_rag.baselines.run import BaselineContext, ChatClient

    url = config.model.path
    assert url is not None
    if config.workers is not None:
        raise ConfigError("workers= are processes with weights: leave it out with a model behind a server")
    if config.retrieval.oracle and config.remote.policy != "static":
        raise ConfigError("retrieval.oracle=true needs remote.policy=static: its evidence never changes")
    find = open_search_source(config.retrieval, once)
    template = load_prompt(config.prompt, "joint") if config.prompt else PROMPTS["sardi"]
    client = ChatClient("model.path", url, "DLM_RAG_MODEL_KEY")
    retriever = find(questions, "question")
    config = replace(config, energy="none")  # it is spent elsewhere
    return PreparedBaseline(BaselineContext(client, retriever, config, template), config)
