"""The settings, by section: model, retriever, denoising loop, server; training, its data and its plan."""

from collections.abc import Iterable, Mapping
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

from dlm_rag.config.fields import SET, CheckedSettings, check_url, setting, settings_dataclass
from dlm_rag.errors import CheckpointError, ConfigError, suggest_nearest
from dlm_rag.files.hub import read_checkpoint_json

# What settings need, as `only_with` says it. A service at http(s) chooses how it searches.
NO_URL = {"retrieval.url": (None,)}
NO_SERVICE = {"retrieval.url": (None, "milvus://")}
DIFFUSION = {"decode.mode": ("diffusion",)}
IN_BLOCKS = DIFFUSION | {"attention_blocks": (True,)}
BY_THRESHOLD = {"decode.commit_rule": ("threshold",)}
EDITED, DIVIDED = {"decode.edit_threshold": SET}, {"decode.steps_per_block": SET}
ABSTAINING = {"decode.abstain": ("answer", "response")}
RECOMPUTED = {"train.activation_checkpointing": ("selective", "full")}
CACHED = {"engine.prefix_cache_gib": (None, SET)}
SERVED = {"model.path": ("openai://", "openais://")}  # a model behind a server
SFT, RL, PRETRAIN = ({"train.objective": (name,)} for name in ("sft", "rl", "pretrain"))
ANSWERING = {"train.objective": ("sft", "rl")}
NEW_MODEL = {"model.path": (None,)}
WORLDS = {"data.corpus": (None,)}


@settings_dataclass
class ModelConfig(CheckedSettings):
    """Which denoiser, where it runs, and which tokens attend to each other."""

    path: str | None = setting(None)
    """checkpoint to load: a folder or a hub id; for evaluate also a model behind an OpenAI-compatible
    server, openai://HOST:PORT/v1/NAME (openais:// for https)"""
    device: str = setting("auto")
    """device to run on: cpu, cuda, cuda:1 or mps; auto takes CUDA if available"""
    device_map: str | None = setting(None)
    """devices that share the layers of a decoded model: auto (all CUDA devices), or cuda:0,cuda:1"""
    dtype: str = setting("auto", choices=("auto", "float32", "bfloat16", "float16"))
    """dtype of the weights; auto: bfloat16 on CUDA (float16 before Ampere), float32 elsewhere"""
    quantize: str = setting("none", choices=("none", "int8", "nvfp4"))
    """low precision of the layers' weights, by torchao: int8 (a scale a row), nvfp4 (4 bits, 16 a scale)"""
    attn_implementation: str = setting("auto", choices=("auto", "flash", "varlen", "sdpa", "indexed"))
    """attention kernel: flash (flash-attn), varlen (torch's own), sdpa, or indexed (Triton, reads the cache
    in place; not measured yet); auto: the first of flash, varlen, sdpa that works"""
    evidence_layout: str | None = setting(None, choices=("joint", "prefix", "independent", "parallel"))
    """which parts of the prompt attend to each other; unset: the checkpoint's own (public ones: joint, or
    independent when trained with sft or pretrain)"""
    block_size: int | None = setting(None, low=0, high=2**20)
    """block length of block-causal attention, 0 for full attention; for training, and for checkpoints that
    do not say; unset: the checkpoint's own"""


@settings_dataclass
class RetrievalConfig(CheckedSettings):
    """Which passages can become evidence, and how they are found."""

    corpus: str | None = setting(None, only_with=NO_URL)
    """passages to search: a file, a folder of texts and documents, context (the passages that come with
    the questions), or a corpus of `dlm-rag data`"""
    method: str = setting("bm25", table="dlm_rag.retrieval:RETRIEVERS", only_with=NO_SERVICE)
    """search method"""
    top_k: int = setting(7, low=1)
    """number of passages given as evidence (K)"""
    oracle: bool = setting(False, only_with=NO_URL)
    """put the passages that support a question first (needs their ids or titles in the questions)"""
    index_dir: str | None = setting(None, only_with=NO_URL)
    """folder where indexes are kept; unset: $DLM_RAG_CACHE or ~/.cache/dlm_rag"""
    embedding_model: str = setting("sentence-transformers/all-MiniLM-L6-v2", only_with=NO_SERVICE)
    """sentence-transformers model for dense search: a folder or a hub id"""
    query_prompt: str = setting("", only_with=NO_SERVICE)
    """prefix of every dense query ('query: ' for E5)"""
    passage_prompt: str = setting("", only_with=NO_SERVICE)
    """prefix of every dense passage ('passage: ' for E5)"""
    bm25_query: str = setting("whole", choices=("whole", "sentences"), only_with=NO_URL)
    """how BM25, also in hybrid, searches a query: whole, or as dense search does, by the question and each
    sentence or title in turn, for a title first the passage that has it"""
    bm25_stemmer: str = setting("none", choices=("none", "english"), only_with=NO_SERVICE)
    """which words are the same to BM25, also in hybrid: those spelled alike, or of one English stem"""
    bm25_title_weight: int = setting(1, low=1, high=16, only_with=NO_SERVICE)
    """how many times BM25, also in hybrid, counts the words of a passage's title, its first line"""
    min_score_ratio: float = setting(0.0, low=0, high=1, only_with=NO_URL)
    """leave out what scores less than this share of the best passage for the question, unless the question
    has its title; with bm25_query=sentences each further sentence or title of the query adds one passage"""
    url: str | None = setting(None)
    """search a service, not a corpus: http(s)://HOST:PORT/retrieve or milvus://HOST:PORT/COLLECTION"""
    timeout: float = setting(15.0, low=0.01, high=2**20, only_with={"retrieval.url": SET})
    """time limit of a search by URL in seconds; each attempt gets a third, and failed ones are repeated"""

    def __post_init__(self) -> None:
        if self.url is not None:
            token = "MILVUS_TOKEN" if self.url.startswith("milvus") else "DLM_RAG_RETRIEVAL_TOKEN"
            check_url("retrieval.url", self.url, ("http", "https", "milvus"), token)


@settings_dataclass
class DecodeConfig(CheckedSettings):
    """The denoising loop: what is committed, what is searched for, when evidence is refreshed."""

    mode: str | None = setting(None, choices=("diffusion", "autoregressive"))
    """how the response is written: by diffusion, or from left to right (autoregressive); unset: what the
    checkpoint was trained for, of both ways diffusion"""
    max_new_tokens: int | None = setting(None, low=1, high=2**20)
    """length of the response canvas in tokens, all masked at first; unset: the checkpoint's own (100)"""
    block_length: int | None = setting(None, low=0, only_with=DIFFUSION)
    """commit tokens only in the first unfinished block of this length (0: anywhere; unset: as trained)"""
    finished_block_context: str | None = setting(
        None, choices=("recompute", "no_evidence"), only_with={"attention_blocks": (True,)}
    )
    """what finished blocks attend to after new evidence arrives, in checkpoints with block attention:
    recompute (run again with it) or no_evidence (response only); unset: checkpoint's own or recompute"""
    query_window: int = setting(8, low=0, high=2**20, only_with=IN_BLOCKS)
    """number of positions after the first unfinished block, rounded up to whole blocks, that may enter a
    query, with block attention"""
    blocks_at_once: int = setting(1, low=1, high=2**20, only_with=IN_BLOCKS | BY_THRESHOLD)
    """number of attention blocks in which a step may commit: the first unfinished one and those that have
    joined; a block just finished counts until its keys and values are computed"""
    block_add_threshold: float = setting(0.1, low=0, high=1)
    """share of a block that is committed when the next one joins"""
    semi_complete_threshold: float = setting(0.9, low=0, high=1)
    """share of a block that is committed when the next one commits at every step, however unsure"""
    commit_rule: str | None = setting(None, table="dlm_rag.engine.rules:RULES", only_with=DIFFUSION)
    """rule that decides which masked positions a step commits; unset: the checkpoint's own or threshold"""
    commit_threshold: float = setting(0.9, low=0, high=1)
    """confidence from which a position is committed (tau_c); where sampled, with probability 1/2 at it"""
    gate_temperature: float = setting(0.5, low=1e-3, high=100)
    """softness of that threshold for sampling rules, in logits"""
    tokens_per_step: int | None = setting(None, low=1, only_with=DIFFUSION)
    """number of positions committed per step: exactly for top_k, entropy, margin and sequential (unset: 1),
    at most for threshold, left_to_right and entropy_bound (unset: no limit)"""
    steps_per_block: int | None = setting(None, low=1, high=2**20, only_with=DIFFUSION)
    """number of steps per block (or canvas, without blocks): sets what a step commits for top_k, entropy,
    margin and sequential, and the least for threshold, left_to_right and entropy_bound (unset: 1)"""
    schedule: str = setting("even", choices=("even", "rounded"), only_with=DIFFUSION | DIVIDED)
    """how positions are divided over steps_per_block if it does not divide evenly: the first steps take
    more, or each its rounded share of the rest"""
    copy_words: bool = setting(False)
    """write only words of the question and the passages, or yes, no, unknown and unclear; what can go on in
    one way alone does so at once. Models that name titles before an answer begin with one of a passage or
    with words of the question, and commit a token that a text has next from a confidence of 0.5 on (any,
    where all texts go on with it), the sign after a title from 0.3 on, the end after one at any. For
    left_to_right, also sampled, and a token a step autoregressive"""
    edit_threshold: float | None = setting(None, low=0, high=1, only_with=IN_BLOCKS)
    """confidence at which another token replaces a committed one within the current block; unset: never"""
    max_edit_steps: int = setting(16, low=0, high=2**20, only_with=DIFFUSION | EDITED)
    """maximum number of steps that edit a block after its last mask is gone"""
    query_policy: str = setting("proxy", table="dlm_rag.retrieval.base:QUERIES")
    """what becomes the search query"""
    query_threshold: float = setting(0.0, low=0, high=1)
    """confidence at which a prediction may enter the query (tau_q); 1 for committed tokens only"""
    retrieval_interval: int = setting(1, low=1)
    """number of steps between two refreshes of the evidence"""
    temperature: float = setting(0.0, low=0, only_with={"decode.mode": ("diffusion", "autoregressive")})
    """sampling temperature of committed tokens; 0 takes the most probable token"""
    seed: int = setting(0)
    """random seed of sampling; every question has a generator of its own"""
    batch_size: int = setting(8, low=1, high=2**16)
    """number of questions denoised together"""
    overlap: str = setting("none", choices=("none", "pipeline"))
    """commit and search while the model runs: pipeline (on the other half of the batch; the same tokens)"""
    abstain: str | None = setting(None, choices=("never", "answer", "response"))
    """when no answer is given: if it is "unknown" or "unclear", or has a word that neither a passage nor
    the question has; response: also if a name or number before it is in neither; both: also if the model
    names passages first and none has the answer; unset: the checkpoint's own (never for public ones)"""
    answer_threshold: float = setting(0.0, low=0, high=2, only_with=ABSTAINING)
    """how sure an answer must be to be given, where the model may abstain: its `confidence`; of
    models that name passages times w^0.3 exp(0.2 (r - 2)), where these have a share w of the question's
    words, and r is the `relevance`"""
    early_stopping: bool = setting(True)
    """stop once an end token and everything before it is committed"""

    def __post_init__(self) -> None:
        if self.blocks_at_once > 1 and self.edit_threshold is not None:
            raise ConfigError("edit_threshold edits one block at a time: leave it or blocks_at_once out")
        if self.copy_words and self.edit_threshold is not None:
            raise ConfigError("copy_words is for tokens that stay: leave it or edit_threshold out")
        if self.tokens_per_step and self.steps_per_block:
            raise ConfigError("tokens_per_step and steps_per_block say what a step commits: leave one out")
        if self.commit_rule in ("sampled", "sampled_left_to_right") and not 0 < self.commit_threshold < 1:
            raise ConfigError(f"commit_rule={self.commit_rule} needs a commit_threshold between 0 and 1")


@settings_dataclass
class EngineConfig(CheckedSettings):
    """How decoding is run. Only by rounding (`compile`, `cuda_graphs`, `cache_dtype`) do tokens change."""

    memory_gib: float | None = setting(None, low=2**-20, high=2**20)
    """memory limit of decoding or training on the device in GiB, for weights, batch, cache and a step
    together; on CUDA no more is allocated; unset: the machine's limit"""
    prefix_cache_gib: float | None = setting(None, low=0)
    """memory for cached keys and values of evidence on the device in GiB, beside those of the current
    batch; unset: half of what is free or weights leave of memory_gib (a quarter on a CPU); 0: no cache"""
    cache_dtype: str = setting("auto", choices=("auto", "int8"))
    """dtype of cached keys and values: auto (that of the model) or int8 (scales by token and head)"""
    store: str | None = setting(None, only_with=CACHED)
    """folder in which keys and values of evidence are kept for other runs, as long as its disk has room"""
    compile: bool = setting(False)
    """compile around attention with torch.compile: faster after half a minute; changes rounding"""
    cuda_graphs: bool = setting(False)
    """run the layers of a step, and greedy sampling, as CUDA graphs (with compile its kernels), one for
    each size of a step: tokens, keys, tokens that are read, rows, longest row; needs
    model.attn_implementation=indexed, cache_dtype=auto, one device and no experts; not measured yet"""

    @property
    def for_training_rollouts(self) -> "EngineConfig":
        """For decoding in training: `memory_gib` is the training step's, which leaves a named cache."""
        if self.memory_gib is None:
            return self
        return replace(self, memory_gib=None, prefix_cache_gib=self.prefix_cache_gib or 0.0)


@settings_dataclass
class ServingConfig(CheckedSettings):
    """Who may ask the server."""

    api_keys_file: str | None = setting(None)
    """file of API keys, one per line, of which every request then needs one; unset: no key is needed"""


@settings_dataclass
class LikelihoodConfig(CheckedSettings):
    """How the log-likelihood of a text is estimated."""

    samples: int = setting(128, low=2, high=2**20)
    """number of random masks per block (of the whole text without blocks), each a row of a forward pass;
    where a block has fewer ways to be masked, all are taken"""
    seed: int = setting(0)
    """random seed of the masks"""
    batch_size: int = setting(32, low=1, high=2**16)
    """number of rows per forward pass"""
    mode: str | None = setting(None, choices=("diffusion", "autoregressive"))
    """how the model is read, as in decode.mode: by diffusion (a bound) or from left to right (exact)"""


@settings_dataclass
class RemoteConfig(CheckedSettings):
    """Models behind OpenAI-compatible servers: autoregressive ones to compare with."""

    policy: str = setting("static", table="dlm_rag.baselines:POLICIES", only_with=SERVED)
    """when a model behind a server retrieves, and with what"""
    concurrency: int = setting(8, low=1, high=1024, only_with=SERVED)
    """number of concurrent requests"""


@settings_dataclass
class DataConfig(CheckedSettings):
    """Your own training data. Without any, training invents worlds."""

    questions: str | None = setting(None, only_with=ANSWERING)
    """sft: file or folder of questions with a `response`, or at least `golden_answers`, for data.corpus"""
    corpus: str | None = setting(None)
    """sft, rl: passages from which evidence is retrieved; needs data.questions"""
    documents: str | None = setting(None, only_with=PRETRAIN)
    """pretrain: JSON lines file with a `text`, or a folder of such files"""

    def __post_init__(self) -> None:
        if (self.questions is None) != (self.corpus is None):
            raise ConfigError("data.questions and data.corpus go together: set both, or neither")


@settings_dataclass
class TrainConfig(CheckedSettings):
    """What is trained, on what, and how."""

    seed: int = setting(0)
    """random seed of weights, worlds and examples"""
    wandb: str = setting("off", choices=("off", "offline", "online"))
    """also log metrics to Weights & Biases"""
    hidden_size: int = setting(192, low=64, high=2**17, only_with=NEW_MODEL)
    """hidden size of a new model"""
    intermediate_size: int = setting(256, low=32, high=2**20, only_with=NEW_MODEL)
    """feed-forward size of a new model"""
    num_hidden_layers: int = setting(5, low=2, high=2**12, only_with=NEW_MODEL)
    """number of layers of a new model"""
    vocab_size: int = setting(1024, low=300, high=2**20, only_with=NEW_MODEL)
    """vocabulary size of a new model; its tokenizer is trained on worlds, or on data.corpus"""
    passage_length: int | None = setting(None, low=16)
    """maximum length in tokens of a passage that stands alone (default: the checkpoint's own, else 96)"""
    lora_rank: int = setting(0, low=0, only_with={"model.path": SET})
    """rank of low-rank adapters on frozen weights (needs peft); 0 trains all weights"""
    objective: str = setting("sft", table="dlm_rag.training.task:TASKS")
    """training objective: sft (questions, evidence and responses), pretrain (documents; also from an
    autoregressive checkpoint), rl (rewarded rollouts), or a class of your own as module:Class"""
    max_steps: int = setting(2000, low=1)
    """number of optimizer steps; may be raised with --resume"""
    passage_sets_per_step: int = setting(6, low=1, high=2**16, only_with=SFT)
    """sft: number of passage sets in a step, over all processes"""
    rows_per_set: int = setting(12, low=1, high=2**16, only_with=SFT)
    """sft: number of rows (a question and its mask) trained on each passage set"""
    prompts_per_step: int = setting(6, low=1, high=2**16, only_with=RL)
    """rl: number of questions in a step, over all processes"""
    num_generations: int = setting(12, low=1, high=2**16, only_with=RL)
    """rl: number of rollouts per question (the group size of GRPO)"""
    sequence_length: int = setting(1024, low=8, only_with=PRETRAIN)
    """pretrain: length of a packed sequence in tokens"""
    batch_tokens: int = setting(16384, low=8, only_with=PRETRAIN)
    """pretrain: number of tokens in a step, over all processes"""
    optimizer: str = setting("muon", choices=("muon", "adamw"))
    """optimizer: muon (for the matrices of the layers, adamw for the rest) or adamw (for everything)"""
    muon_learning_rate: float = setting(0.02, low=0, only_with={"train.optimizer": ("muon",)})
    """learning rate of Muon"""
    learning_rate: float = setting(8e-3, low=0)
    """learning rate of AdamW; four times this for QK norm gains if Muon is used"""
    warmup_steps: int = setting(50, low=0)
    """number of steps over which the learning rate rises"""
    decay_fraction: float = setting(0.25, low=0, high=1)
    """fraction of the steps, at the end, over which the learning rate falls to 0"""
    # Resources: none of this changes the loss, except by rounding.
    dtype: str = setting("auto", choices=("auto", "float32", "bfloat16", "float16"))
    """dtype of computation, not of the weights; auto: bfloat16, float16 before Ampere, float32 on CPUs"""
    gradient_accumulation_steps: int = setting(1, low=1)
    """number of microbatches in which each process computes its share of a step"""
    activation_checkpointing: str = setting("none", choices=("none", "selective", "full"))
    """recompute activations in the backward pass: full (all of a layer) or selective (all but attention
    and, unless compiled, matrix products)"""
    activation_checkpointing_interval: int = setting(1, low=1, only_with=RECOMPUTED)
    """of how many layers one is recomputed: 2 is every other one"""
    compile: bool = setting(False)
    """compile around attention with torch.compile"""
    parallel: str = setting("ddp", choices=("ddp", "fsdp"))
    """data parallelism: ddp (full copies) or fsdp (weights, gradients and optimizer state sharded)"""
    pointer_loss_weight: float | None = setting(None, low=0, only_with=SFT | WORLDS)
    """weight of the pointer loss, falling to 4/15 with the learning rate; unset: 0.3 if new, else 0"""
    max_hops: int = setting(4, low=1, high=4, only_with=ANSWERING | {"data.questions": (None,)})
    """maximum number of hops of a question, in training and evaluation"""
    min_hops: int = setting(1, low=1, high=4, only_with=RL | WORLDS)
    """rl: minimum number of hops of a question"""
    world_passages: int = setting(700, low=100, high=10**6, only_with=WORLDS | {"data.documents": (None,)})
    """number of passages in a training world"""
    steps_per_world: int = setting(50, low=1, only_with=ANSWERING | WORLDS)
    """number of steps after which the oldest world is replaced"""
    reward: str = setting("exact_match", table="dlm_rag.training.rewards:REWARDS", only_with=RL)
    """rl: reward of a rollout; or a function of your own as module:function"""
    temperature: float = setting(1.0, low=1e-3, high=100, only_with=RL)
    """rl: sampling temperature of rollouts"""
    train_steps_per_rollout: int | None = setting(None, low=1, only_with=RL)
    """rl: number of denoising steps of each rollout, chosen at random, that are trained on; unset: all"""
    save_steps: int = setting(200, low=1)
    """number of steps between checkpoints"""
    eval_steps: int = setting(500, low=1)
    """number of steps between evaluations with the decoder"""
    eval_questions: int = setting(25, low=1, only_with=ANSWERING)
    """number of evaluation questions for each number of hops, about a separate world"""

    def __post_init__(self) -> None:
        if self.hidden_size % 32:
            raise ConfigError(f"hidden_size={self.hidden_size} must be a multiple of 32")
        if self.batch_tokens % self.sequence_length:
            raise ConfigError(f"batch_tokens must be a multiple of sequence_length={self.sequence_length}")


@settings_dataclass
class PlanConfig(CheckedSettings):
    """Assumptions of `--plan`."""

    machine: str | None = setting(None, choices=("gb300", "gb10", "h100", "h200", "b200", "v100"))
    """machine to plan for; unset: all known ones"""
    devices: int = setting(1, low=1)
    """number of devices that share a training step; what they send each other is not counted"""


# What a checkpoint carries in its generation_config.json, beside what the field keeps there:
#     {"eos_token_id": 1, "decode": {"blocks_at_once": 3}, "retrieval": {"top_k": 5}}
# Defaults of the settings of the same names: a YAML file, the command line or a keyword wins.
GENERATION_FILE = "generation_config.json"
OF_A_RUN = {"seed", "batch_size", "overlap"}  # settings that no model asks for
DECODE_NAMES = [item.name for item in fields(DecodeConfig) if item.name not in OF_A_RUN]
_AT_ONCE = ("blocks_at_once", "block_add_threshold", "semi_complete_threshold")
_EXCLUDES = {
    "edit_threshold": (*_AT_ONCE, "copy_words"),
    "copy_words": ("edit_threshold",),
    "blocks_at_once": ("edit_threshold", "tokens_per_step"),
    "tokens_per_step": ("steps_per_block", *_AT_ONCE),
    "steps_per_block": ("tokens_per_step",),
}
CODE_NAMES = [each.name for each in fields(DecodeConfig) if each.metadata["json_schema_extra"]["table"]]
BM25_NAMES = ("bm25_query", "bm25_stemmer", "bm25_title_weight")
RETRIEVAL_NAMES = ["top_k", *BM25_NAMES, "min_score_ratio", "query_prompt", "passage_prompt"]


def list_ruled_out(given: Mapping[str, Any]) -> set[str]:
    """The settings of `decode` that a checkpoint may have and that do not go with those that are given."""
    known = DecodeConfig.__dataclass_fields__
    asked = [name for name, value in given.items() if name in _EXCLUDES and value != known[name].default]
    return {other for name in asked for other in _EXCLUDES[name]}


def read_generation_settings(folder: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """The settings of `decode` and `retrieval` in a checkpoint's folder; raises `CheckpointError`."""
    path, found = folder / GENERATION_FILE, []
    raw = read_checkpoint_json(path) if path.exists() else {}
    sections = ("decode", DecodeConfig, DECODE_NAMES), ("retrieval", RetrievalConfig, RETRIEVAL_NAMES)
    for section, holder, known in sections:
        place, values = f"{path}: {section}", raw.get(section) or {}
        if not isinstance(values, dict):
            raise CheckpointError(f"{place}={values!r:.60} must be an object")
        for name, value in values.items():
            if name not in known:
                nearest = suggest_nearest(name, known)
                raise CheckpointError(f"{place}.{name:.60} is no setting of a checkpoint{nearest}")
            if name in CODE_NAMES and ":" in str(value):
                raise CheckpointError(f"{place}.{name} names code, which is never taken from there")
        try:
            holder(**values)
        except ConfigError as error:
            raise CheckpointError(f"{place}.{error}") from None
        found.append(values)
    return found[0], found[1]


def list_given(settings: DecodeConfig | RetrievalConfig, names: Iterable[str]) -> dict[str, Any]:
    """The values of those of `names` that somebody has set and that a checkpoint can carry."""
    values = {name: getattr(settings, name) for name in names if name in settings.given}
    code = {name for name, value in values.items() if name in CODE_NAMES and ":" in str(value)}
    return {name: value for name, value in values.items() if value is not None and name not in code}
