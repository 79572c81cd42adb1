"""The configuration: one tree of dataclasses, the only home of every default.

Settings arrive in this order, later ones winning: the dataclasses, a YAML file, `key=value` words.
A field's metadata holds its help text and, where it has them, its choices or bounds; both the
command line and the constructors check them. This module knows no other room of the package.
"""

from dataclasses import dataclass, field, fields, is_dataclass, replace
from pathlib import Path
from typing import Any, get_origin

from dlm_rag.errors import ConfigError, nearest

CONFIG_FOLDER = Path(__file__).resolve().parent.parent / "configs"


def setting(
    default: Any,
    help: str,
    *,
    choices: tuple[str, ...] = (),
    low: float | None = None,
    high: float | None = None,
) -> Any:
    """A dataclass field with its help text and its allowed values (bounds are inclusive)."""
    metadata = {"help": help, "choices": choices, "low": low, "high": high}
    if callable(default):
        return field(default_factory=default, metadata=metadata)
    return field(default=default, metadata=metadata)


class Checked:
    """Refuses field values outside the declared choices and bounds, when constructed."""

    def __post_init__(self) -> None:
        for item in fields(self):  # type: ignore[arg-type]
            value, rule = getattr(self, item.name), item.metadata
            if value is None or not rule:
                continue
            if rule["choices"] and value not in rule["choices"]:
                raise ConfigError(
                    f"{item.name}={value!r} is not one of {', '.join(rule['choices'])}"
                    f"{nearest(str(value), rule['choices'])}"
                )
            low, high = rule["low"], rule["high"]
            if (low is not None and not value >= low) or (high is not None and not value <= high):
                bounds = f"at least {low}" if high is None else f"between {low} and {high}"
                raise ConfigError(f"{item.name}={value} is out of range: it must be {bounds}")


@dataclass
class ModelConfig(Checked):
    """Which denoiser, where it runs, and who sees whom."""

    path: str | None = setting(None, "checkpoint: a Hugging Face style folder, or a hub id")
    device: str = setting("auto", "cpu, cuda, cuda:1, mps; auto takes CUDA where there is one")
    dtype: str = setting(
        "auto",
        "auto takes bfloat16 on CUDA and float32 elsewhere",
        choices=("auto", "float32", "bfloat16", "float16"),
    )
    attention: str = setting(
        "auto",
        "flash (flash-attn), varlen (torch's own kernels), sdpa; auto takes the first that works",
        choices=("auto", "flash", "varlen", "sdpa"),
    )
    evidence_layout: str | None = setting(
        None,
        "who sees whom in the prompt; unset takes the checkpoint's own, joint for public ones",
        choices=("joint", "prefix", "independent"),
    )


@dataclass
class RetrievalConfig(Checked):
    """Which passages can become evidence, and how they are found."""

    corpus: str | None = setting(None, "JSON lines of passages, or an index folder built from it")
    kind: str = setting("bm25", "how passages are found", choices=("bm25", "dense", "hybrid", "none"))
    top_k: int = setting(7, "passages in the evidence (K)", low=1)
    oracle: bool = setting(False, "the passages that support a question come first (needs supporting_ids)")
    index_folder: str | None = setting(
        None, "where indexes are kept; unset takes $DLM_RAG_CACHE or ~/.cache/dlm_rag"
    )
    dense_model: str = setting(
        "sentence-transformers/all-MiniLM-L6-v2", "any sentence-transformers model, folder or hub id"
    )
    dense_batch_size: int = setting(64, "texts embedded at once", low=1)
    query_prompt: str = setting("", "put before every dense query ('query: ' for E5)")
    passage_prompt: str = setting("", "put before every dense passage ('passage: ' for E5)")
    fusion_depth: int = setting(50, "ranks of BM25 and dense that hybrid fuses", low=1)


@dataclass
class DecodeConfig(Checked):
    """The denoising loop: what is committed, what is asked, when evidence is refreshed."""

    canvas_length: int | None = setting(
        None, "response positions, all masked at first; unset takes the checkpoint's own, 100", low=1
    )
    block_length: int | None = setting(
        None,
        "commit within the first unfinished block of this many positions, 0: anywhere; unset takes the "
        "checkpoint's own, anywhere",
        low=0,
    )
    commit_rule: str = setting(
        "threshold",
        "which masked positions are written down at a step",
        choices=("threshold", "top_k", "entropy", "margin", "entropy_bound", "grounded"),
    )
    commit_threshold: float = setting(
        0.9, "confidence at which a position is committed (tau_c): threshold, grounded", low=0, high=1
    )
    copied_threshold: float | None = setting(
        None,
        "commit_threshold of tokens that continue a copy which one passage alone holds; unset: the same",
        low=0,
        high=1,
    )
    tokens_per_step: int | None = setting(
        None,
        "positions committed a step: exactly so many for top_k, entropy, margin (unset: 1), at most "
        "so many for the other rules (unset: no bound)",
        low=1,
    )
    entropy_bound: float = setting(0.1, "nats of joint entropy committed a step", low=0)
    revision_threshold: float | None = setting(
        None, "committed tokens below this probability are masked again, once; unset: never",
        low=0, high=1,
    )  # fmt: skip
    query: str = setting(
        "proxy",
        "what becomes the search query",
        choices=("proxy", "committed", "question", "feedback", "response"),
    )
    query_threshold: float = setting(
        0.0, "confidence at which a guess may enter the query (tau_q); 1: committed only", low=0, high=1
    )
    retrieve_every: int = setting(1, "steps between two refreshes of the evidence", low=1)
    retrieve_below: float | None = setting(
        None, "refresh only when the lowest confidence is under this; unset: always", low=0, high=1
    )
    temperature: float = setting(0.0, "0 takes the most probable token, above 0 samples", low=0)
    seed: int = setting(0, "of the sampling; every question has a generator of its own")
    batch_size: int = setting(8, "questions denoised together", low=1)
    canvas_growth: int | None = setting(
        None,
        "the canvas starts with this many positions and grows by as many, up to its length, while its "
        "last one is no end token; unset: all at once",
        low=4,
    )
    trim_canvas: bool = setting(
        False, "positions behind a committed end token leave the canvas; approximate: others saw them"
    )
    prompt_reuse: int = setting(
        0,
        "joint only, approximate: steps for which an unchanged prompt is not run again (0: exact)",
        low=0,
    )
    overlap: str = setting(
        "none",
        "search while the denoiser works: on the other half of the batch (the same tokens), or with "
        "evidence one step late",
        choices=("none", "pipeline", "stale"),
    )
    stop_early: bool = setting(
        True, "stop once an end token and all before it are committed: the text can't change"
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.block_length and self.canvas_length and self.block_length > self.canvas_length:
            raise ConfigError(
                f"block_length={self.block_length} is longer than the canvas: set it to at most "
                f"canvas_length={self.canvas_length}"
            )
        if (self.trim_canvas or self.canvas_growth) and (
            not self.stop_early or self.revision_threshold is not None
        ):
            raise ConfigError(
                "trim_canvas and canvas_growth need stop_early=true and revision_threshold=null: positions "
                "that are not in the canvas are never written"
            )
        if self.copied_threshold is not None and self.copied_threshold > self.commit_threshold:
            raise ConfigError(
                f"copied_threshold={self.copied_threshold} is above commit_threshold="
                f"{self.commit_threshold}: a copy needs less confidence, not more"
            )
        if self.copied_threshold is not None and self.commit_rule not in ("threshold", "grounded"):
            raise ConfigError(
                f"copied_threshold has no effect with commit_rule={self.commit_rule}: set "
                "commit_rule=threshold"
            )
        if self.query == "committed" and self.query_threshold not in (0.0, 1.0):
            raise ConfigError(
                f"query_threshold={self.query_threshold} has no effect with query=committed: "
                "set query=proxy"
            )


@dataclass
class EngineConfig(Checked):
    """How the work of decoding is done; nothing here changes a token, but by the rounding of `compile`."""

    pool_gib: float = setting(
        1.0,
        "keys and values of evidence kept on the device, in GiB, beside those of the rows in the batch; "
        "0: none",
        low=0,
    )
    host_pool_gib: float = setting(0.0, "more of them in host memory, for what leaves the device", low=0)
    search_memory_gib: float = setting(
        1.0, "BM25 scores kept between the queries of a question, in GiB; 0: every search is fresh", low=0
    )
    compile: bool = setting(
        False, "torch.compile around attention: faster, after half a minute; changes rounding"
    )
    keep_tokens: bool = setting(True, "token ids of passages and questions are kept; false: made anew")
    masked_only: bool = setting(
        True, "last layer and head at masked positions only; false: everywhere, as is usual"
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.host_pool_gib and not self.pool_gib:
            raise ConfigError("host_pool_gib has no effect without a pool on the device: set pool_gib too")


@dataclass
class DataConfig(Checked):
    """Data of one's own to train on; where nothing is named, invented worlds take its place."""

    questions: str | None = setting(
        None, "sft: file of questions with a `response`, or at least `golden_answers`; needs data.corpus"
    )
    corpus: str | None = setting(None, "sft: the passages that evidence for them is retrieved from")
    documents: dict[str, str] = setting(  # noqa: RUF009 - a factory
        dict, "pretrain, adapt: files of JSON lines with a `text`, by a name for each"
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if (self.questions is None) != (self.corpus is None):
            given, lacking = ("questions", "corpus") if self.questions else ("corpus", "questions")
            raise ConfigError(f"data.{given} needs data.{lacking} too")


@dataclass
class TrainConfig(Checked):
    """What is trained, on what, and how; each of `phases` may set all but the first group anew."""

    # The run.
    phases: dict[str, Any] = setting(  # noqa: RUF009 - a factory
        dict, "phases by name, one after another; each names what differs"
    )
    seed: int = setting(0, "of weights, worlds, examples")
    wandb: str = setting("off", "metrics to Weights & Biases too", choices=("off", "offline", "online"))
    hidden_size: int = setting(192, "width of a fresh denoiser", low=64)
    head_dim: int = setting(32, "width of its heads", low=8)
    intermediate_size: int = setting(256, "width of its feed-forward layers", low=32)
    num_hidden_layers: int = setting(5, "its depth", low=2)
    vocabulary: int = setting(1024, "tokens of its tokenizer, learned on training worlds", low=300)
    passage_length: int = setting(96, "positions of a passage in the independent layout", low=16)
    lora_rank: int = setting(0, "train low-rank adapters beside frozen weights (needs peft); 0: all", low=0)
    # What a phase trains on.
    objective: str = setting(
        "sft",
        "sft: questions, evidence, responses; pretrain: documents; adapt: documents, from an "
        "autoregressive checkpoint whose attention opens step by step",
        choices=("sft", "pretrain", "adapt"),
    )
    steps: int = setting(2000, "optimizer steps; may be raised on --resume", low=1)
    groups: int = setting(6, "sft: sets of passages a step, over all processes", low=1)
    rows: int = setting(12, "sft: questions and masks on each set", low=1)
    mixture: dict[str, float] = setting(  # noqa: RUF009 - a factory
        dict, "pretrain, adapt: share of each of data.documents; unset: equal shares"
    )
    sequence_length: int = setting(1024, "pretrain, adapt: tokens of a packed sequence", low=8)
    batch_tokens: int = setting(16384, "pretrain, adapt: tokens a step, over all processes", low=8)
    rope_theta: float | None = setting(None, "base of the rotary positions; unset: the model's own", low=1)
    opening_share: float = setting(
        0.3,
        "adapt: share of the steps in which attention opens from causal to bidirectional",
        low=0,
        high=1,
    )
    # How it is optimised.
    optimizer: str = setting(
        "muon", "muon: on the matrices of the layers, adamw on the rest; adamw: on all",
        choices=("muon", "adamw"),
    )  # fmt: skip
    matrix_learning_rate: float = setting(0.02, "of Muon", low=0)
    learning_rate: float = setting(8e-3, "of AdamW; four-fold on QK gains beside Muon", low=0)
    weight_decay: float = setting(0.0, "of the matrices", low=0)
    warmup_steps: int = setting(50, "steps until the full rate", low=0)
    decay_share: float = setting(
        0.25, "share of the steps, at the end, in which the rate falls to 0", low=0, high=1
    )
    # What it takes: none of this changes the loss, but by rounding.
    dtype: str = setting(
        "auto",
        "of the arithmetic; weights under training are float32. auto: bfloat16 on CUDA, else float32",
        choices=("auto", "float32", "bfloat16", "float16"),
    )
    accumulate: int = setting(1, "parts that each process computes its share of a step in", low=1)
    checkpointing: str = setting(
        "none",
        "activations that backward computes again: all of a layer, or all but its matrix products",
        choices=("none", "selective", "full"),
    )
    logit_chunk: int = setting(4096, "supervised positions whose logits are computed at a time", low=1)
    compile: bool = setting(False, "torch.compile around attention")
    parallel: str = setting(
        "ddp",
        "on several processes: whole copies (ddp), or weights, gradients and optimizer in shards (fsdp)",
        choices=("ddp", "fsdp"),
    )
    context_parallel: int = setting(
        1, "pretrain: processes that share each sequence, for very long ones", low=1
    )
    # Training on worlds.
    next_stage_accuracy: float = setting(
        0.62, "running accuracy on names at which prompts get more passages: 2, 2-4, 4 to top_k", low=0
    )
    end_weight: float = setting(0.15, "what an end token counts in the loss", low=0)
    late_end_weight: float = setting(0.4, "the same at the end, reached as the rate falls", low=0)
    pointer_weight: float | None = setting(
        None, "of pointer supervision; unset: 0.3 for a fresh denoiser, 0 for a checkpoint's", low=0
    )
    late_pointer_weight: float | None = setting(
        None, "the same at the end, reached as the rate falls; unset: 0.08 or 0", low=0
    )
    hops: int = setting(4, "of the longest questions, in training and validation", low=1, high=4)
    world_passages: int = setting(700, "passages of a training world", low=100)
    worlds: int = setting(6, "worlds that examples are drawn from at a time", low=1)
    steps_per_world: int = setting(50, "steps after which the oldest world is replaced", low=1)
    # What is kept and reported.
    save_every: int = setting(200, "steps between checkpoints", low=1)
    validate_every: int = setting(500, "steps between validations by the decoder", low=1)
    validation_questions: int = setting(25, "for each number of hops, about a world of its own", low=1)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.hidden_size % self.head_dim:
            raise ConfigError(f"hidden_size={self.hidden_size} must be a multiple of {self.head_dim}")
        if self.batch_tokens % self.sequence_length:
            raise ConfigError(
                f"batch_tokens={self.batch_tokens} must be a multiple of sequence_length="
                f"{self.sequence_length}"
            )
        if self.context_parallel > 1 and self.objective != "pretrain":
            raise ConfigError("context_parallel needs objective=pretrain: whole rows, seen by all")
        self.in_phases()

    def in_phases(self) -> dict[str, "TrainConfig"]:
        """The settings of each phase by its name, in order; one without a name where none are given.

        Raises `ConfigError` for what a phase cannot set.
        """
        if not self.phases:
            return {"": self}
        from omegaconf import OmegaConf
        from omegaconf.errors import OmegaConfBaseException

        known = [item.name for item in fields(self)]
        may = known[known.index("objective") :]
        found: dict[str, Any] = {}
        for name, differences in self.phases.items():
            if not isinstance(differences, dict):
                raise ConfigError(f"train.phases.{name} must name settings, as in {{steps: 100}}")
            for key in differences:
                if key not in may:
                    reason = "belongs to the run, not to a phase" if key in known else "is unknown"
                    raise ConfigError(f"train.phases.{name}.{key} {reason}{nearest(key, may)}")
            alone = replace(self, phases={})
            try:
                tree = OmegaConf.merge(OmegaConf.structured(alone), differences)
                found[name] = OmegaConf.to_object(tree)
            except OmegaConfBaseException as error:
                key = getattr(error, "full_key", None) or ""
                raise ConfigError(f"train.phases.{name}.{key}: {fold_message(error)}") from None
            except ConfigError as error:
                raise ConfigError(f"train.phases.{name}: {error}") from None
        return found


@dataclass
class PlanConfig(Checked):
    """What `train.py --plan` assumes."""

    machine: str | None = setting(
        None,
        "a known machine; unset: all of them",
        choices=("gb300", "gb10", "h100", "h200", "b200", "v100"),
    )
    devices: int = setting(1, "how many of them", low=1)
    mfu: float = setting(0.4, "share of the peak FLOP/s that training reaches", low=0.01, high=1)
    tokens: float | None = setting(None, "tokens of the whole run; unset: what its steps come to", low=1)
    days: float | None = setting(None, "a claim to be checked: that it takes so long", low=0)
    kwh_price: float = setting(0.3, "of a kilowatt hour, in dollars", low=0)


@dataclass
class Config:
    """Everything a program of this project can be told."""

    model: ModelConfig = field(default_factory=ModelConfig)
    retrieval: RetrievalConfig = field(default_factory=RetrievalConfig)
    decode: DecodeConfig = field(default_factory=DecodeConfig)
    engine: EngineConfig = field(default_factory=EngineConfig)
    train: TrainConfig = field(default_factory=TrainConfig)
    data: DataConfig = field(default_factory=DataConfig)
    plan: PlanConfig = field(default_factory=PlanConfig)
    questions: str | None = setting(None, "file of questions: JSON lines or parquet")
    out: str | None = setting(None, "where the results go: a file (sample) or a folder (evaluate, train)")
    compare: str | None = setting(
        None, "settings for evaluate: all, or a list such as interleaved,static,oracle+retrieval.kind=dense"
    )
    trace: str | None = setting(None, "file for the decoding traces, one JSON line per question")


def known_keys(node: type = Config, prefix: str = "") -> dict[str, Any]:
    """Every dotted key of the tree, in order, with its dataclass field."""
    keys: dict[str, Any] = {}
    for item in fields(node):
        if is_dataclass(item.type):
            keys |= known_keys(item.type, f"{prefix}{item.name}.")  # type: ignore[arg-type]
        else:
            keys[prefix + item.name] = item
    return keys


def find_config(name: str) -> Path:
    """The YAML file called `name`: as given, with `.yaml`, or in `configs/`; else `ConfigError`."""
    for folder in (Path(), CONFIG_FOLDER):
        for path in (folder / name, folder / f"{name}.yaml"):
            if path.is_file():
                return path
    there = sorted(path.name for path in CONFIG_FOLDER.glob("*.yaml"))
    raise ConfigError(f"config '{name}' was not found, neither here nor in configs/{nearest(name, there)}")


def load_config(name: str | None = None, overrides: list[str] | None = None) -> Config:
    """The resolved tree: defaults, then the YAML file `name`, then `key=value` words.

    Raises `ConfigError`, naming the key and the nearest valid one, for anything not in the tree.
    """
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException
    from yaml import YAMLError

    tree = OmegaConf.structured(Config)
    sources = []
    if name is not None:
        path = find_config(name)
        try:
            sources.append((str(path), OmegaConf.load(path)))
        except (YAMLError, UnicodeDecodeError) as error:
            raise ConfigError(f"{path} is not valid YAML: {fold_message(error)}") from None
    for word in overrides or []:
        key, _, value = word.partition("=")
        item = _known(key)
        if item is None:
            raise _unknown_key(key, "the command line")
        try:
            if item.type in (str, str | None) and value not in ("null", "None"):
                # Texts are taken as they are typed: no YAML, no interpolation.
                parsed = OmegaConf.create()
                OmegaConf.update(parsed, key, value.replace("${", "\\${"))
            else:
                parsed = OmegaConf.from_dotlist([word])
        except (YAMLError, OmegaConfBaseException):
            raise ConfigError(f"the value of {key}={value} cannot be read") from None
        sources.append((word, parsed))
    for origin, source in sources:
        if not OmegaConf.is_dict(source):
            raise ConfigError(f"{origin} holds no settings: write `section: {{key: value}}`")
        _refuse_unknown(OmegaConf.to_container(source, resolve=False), "", origin)
        try:
            tree = OmegaConf.merge(tree, source)
        except OmegaConfBaseException as error:
            key = getattr(error, "full_key", None) or origin
            raise ConfigError(f"{key} has the wrong type: {fold_message(error)}") from None
    try:
        config = OmegaConf.to_object(tree)
    except OmegaConfBaseException as error:
        raise ConfigError(f"{getattr(error, 'full_key', '')}: {fold_message(error)}") from None
    assert isinstance(config, Config)
    return config


def differing_keys(config: Config) -> dict[str, Any]:
    """The dotted keys whose values are not the defaults, with the values."""

    def value_of(tree: Any, key: str) -> Any:
        for name in key.split("."):
            tree = getattr(tree, name)
        return tree

    plain = Config()
    return {
        key: value_of(config, key) for key in known_keys() if value_of(config, key) != value_of(plain, key)
    }


def dump_config(config: Config) -> str:
    """The resolved tree as YAML."""
    from omegaconf import OmegaConf

    return OmegaConf.to_yaml(OmegaConf.structured(config))


def fold_message(error: BaseException) -> str:
    """The first line of an exception's text."""
    lines = str(error).strip().splitlines() or [type(error).__name__]
    mark = getattr(error, "problem_mark", None)
    if mark is not None:
        return f"line {mark.line + 1}: {getattr(error, 'problem', lines[0])}"
    return lines[0].rstrip(".")


def _refuse_unknown(node: Any, prefix: str, origin: str) -> None:
    keys = known_keys()
    for name, value in node.items():
        key = f"{prefix}{name}"
        if any(known.startswith(f"{key}.") for known in keys):
            if not isinstance(value, dict):
                raise ConfigError(f"{key} is a section: set one of its keys, as in {key}.KEY=VALUE")
            _refuse_unknown(value, f"{key}.", origin)
        elif key not in keys:
            raise _unknown_key(key, origin)


def _known(key: str) -> Any:
    """The field of a dotted key, or the mapping that the key is an entry of; None where there is none."""
    keys = known_keys()
    if key in keys:
        return keys[key]
    mappings = (name for name, item in keys.items() if get_origin(item.type) is dict)
    return next((keys[name] for name in mappings if key.startswith(f"{name}.")), None)


def _unknown_key(key: str, origin: str) -> ConfigError:
    keys = list(known_keys())
    leaf = key.rpartition(".")[2]
    same_leaf = [known for known in keys if known.rpartition(".")[2] == leaf]
    hint = f" (nearest: '{same_leaf[0]}')" if same_leaf else nearest(key, keys)
    return ConfigError(f"unknown key '{key}' in {origin}{hint}")
