"""Settings of the model, the retriever and the denoising loop."""

from dataclasses import dataclass, fields, replace
from urllib.parse import urlsplit

from dlm_rag.config.checked import CheckedSettings, setting, shorten_repr
from dlm_rag.errors import ConfigError, suggest_nearest

# What can be searched by URL, and which settings of retrieval the service decides, or has no use for.
_UNUSED_BY_SERVICE = (
    "method", "oracle", "embedding_model", "embedding_batch_size", "query_prompt", "passage_prompt",
    "fusion_depth", "bm25_cache_gib", "index_dir",
)  # fmt: skip
UNUSED_SETTINGS_BY_SCHEME = {
    "http": _UNUSED_BY_SERVICE,
    "https": _UNUSED_BY_SERVICE,
    "milvus": ("oracle", "bm25_cache_gib", "index_dir"),
}


@dataclass
class ModelConfig(CheckedSettings):
    """Which denoiser, where it runs, and who sees whom."""

    path: str | None = setting(None, "checkpoint to load: a Hugging Face style folder or a hub id")
    device: str = setting(
        "auto", "device to run on: cpu, cuda, cuda:1 or mps; auto takes CUDA if available"
    )
    dtype: str = setting(
        "auto",
        "dtype of the weights; auto takes bfloat16 on CUDA (float16 before Ampere) and float32 elsewhere",
        choices=("auto", "float32", "bfloat16", "float16"),
    )
    attn_implementation: str = setting(
        "auto",
        "attention kernel: flash (flash-attn), varlen (torch's own) or sdpa; auto takes the first that "
        "works",
        choices=("auto", "flash", "varlen", "sdpa"),
    )
    evidence_layout: str | None = setting(
        None,
        "which parts of the prompt attend to each other; unset takes the checkpoint's own (public ones: "
        "joint)",
        choices=("joint", "prefix", "independent"),
    )
    block_size: int | None = setting(
        None,
        "block length of block-causal attention, 0 for full attention; for training, and for checkpoints "
        "that do not say; unset takes the checkpoint's own",
        low=0,
        high=2**20,
    )


@dataclass
class RetrievalConfig(CheckedSettings):
    """Which passages can become evidence, and how they are found."""

    corpus: str | None = setting(
        None, "passages to search: a file, a folder of texts, or an index folder built from one"
    )
    method: str = setting("bm25", "search method", choices=("bm25", "dense", "hybrid", "none"))
    top_k: int = setting(7, "number of passages given as evidence (K)", low=1)
    oracle: bool = setting(False, "put the passages that support a question first (needs supporting_ids)")
    index_dir: str | None = setting(
        None, "folder where indexes are kept; unset takes $DLM_RAG_CACHE or ~/.cache/dlm_rag"
    )
    embedding_model: str = setting(
        "sentence-transformers/all-MiniLM-L6-v2",
        "sentence-transformers model for dense search: a folder or a hub id",
    )
    embedding_batch_size: int = setting(64, "number of texts embedded at once", low=1)
    query_prompt: str = setting("", "prefix of every dense query ('query: ' for E5)")
    passage_prompt: str = setting("", "prefix of every dense passage ('passage: ' for E5)")
    bm25_query: str = setting(
        "whole",
        "how BM25, also in hybrid, searches a query: as a whole, or the question and each sentence in "
        "turn, as dense search does",
        choices=("whole", "sentences"),
    )
    fusion_depth: int = setting(50, "number of BM25 and dense results that hybrid search fuses", low=1)
    bm25_cache_gib: float = setting(
        1.0,
        "memory for BM25 scores kept between the queries of one question, in GiB; 0 searches from scratch "
        "every time",
        low=0,
        high=2**20,
    )
    url: str | None = setting(
        None,
        "search a service instead of a corpus: http://HOST:PORT/retrieve, https:// or "
        "milvus://HOST:PORT/COLLECTION",
    )
    timeout: float = setting(
        15.0,
        "time limit of a search by URL in seconds; failed attempts are retried until then, and each "
        "attempt gets a third",
        low=0.01,
        high=2**20,
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        changed = [item.name for item in fields(self) if getattr(self, item.name) != item.default]
        if self.url is None:
            if "timeout" in changed:
                raise ConfigError("retrieval.timeout has no effect without retrieval.url: leave it out")
            return
        unused = UNUSED_SETTINGS_BY_SCHEME[_parse_url_scheme(self.url)]
        for name in changed:
            if name == "corpus":
                raise ConfigError(
                    f"retrieval.url={self.url} is searched instead of a corpus: leave one of the two out"
                )
            if name == "oracle" and name in unused:
                raise ConfigError(
                    f"retrieval.oracle=true needs passages by their ids, which {self.url} does not give: "
                    "give a corpus"
                )
            if name in unused:
                raise ConfigError(
                    f"retrieval.{name} has no effect on the service at {self.url}, which decides that "
                    "itself: leave it out"
                )


def _parse_url_scheme(url: str) -> str:
    """How a service is spoken to; raises `ConfigError` for what is no URL of one."""
    scheme, begun, _ = url.partition("://")
    known = ", ".join(f"{name}://" for name in UNUSED_SETTINGS_BY_SCHEME)
    said = f"retrieval.url={shorten_repr(url)}"
    if not begun:
        raise ConfigError(f"{said} has no scheme: begin it with one of {known}")
    if scheme not in UNUSED_SETTINGS_BY_SCHEME:
        raise ConfigError(
            f"{said} begins with none of {known}{suggest_nearest(scheme, UNUSED_SETTINGS_BY_SCHEME)}"
        )
    if not url.isascii() or not url.isprintable() or " " in url:
        raise ConfigError(f"{said} holds a character that no URL has: write it as %20 or the like")
    try:
        parts = urlsplit(url)
        port = parts.port
        (parts.hostname or "").encode("idna")  # as it is looked up: no part is empty or too long
    except ValueError as error:
        raise ConfigError(f"{said} is no URL: {error}") from None
    if not parts.hostname or port == 0:
        raise ConfigError(f"{said} names no host and port: write {scheme}://HOST:PORT{parts.path}")
    if parts.username is not None or parts.password is not None or parts.fragment:
        raise ConfigError(  # not what it is: a password is not to be shown
            "retrieval.url names a user or a fragment, which are not sent: leave them out"
            f" (a token is ${'MILVUS_TOKEN' if scheme == 'milvus' else 'DLM_RAG_RETRIEVAL_TOKEN'})"
        )
    return scheme


DEFAULT_ENTROPY_BOUND_NATS = 0.1  # nats, where neither settings nor checkpoint say one


@dataclass
class DecodeConfig(CheckedSettings):
    """The denoising loop: what is committed, what is asked, when evidence is refreshed."""

    max_new_tokens: int | None = setting(
        None,
        "length of the response canvas in tokens, all masked at first; unset takes the checkpoint's own "
        "(100)",
        low=1,
        high=2**20,
    )
    block_length: int | None = setting(
        None,
        "commit tokens only within the first unfinished block of this length, 0 for anywhere; unset takes "
        "the checkpoint's own",
        low=0,
    )
    finished_block_context: str | None = setting(
        None,
        "what finished blocks attend to after new evidence arrives, in checkpoints with block attention: "
        "recompute (they are run again with the new evidence), no_evidence (response text only), append "
        "(what they saw, then the new passages) or frozen (what they saw); unset takes the checkpoint's "
        "own, else recompute",
        choices=("recompute", "no_evidence", "append", "frozen"),
    )
    query_window: int = setting(
        8,
        "number of positions after the current block whose predictions may enter a query, in checkpoints "
        "with block attention",
        low=0,
        high=2**20,
    )
    commit_rule: str | None = setting(
        None,

        "rule that decides which masked positions are committed at a step; unset takes the checkpoint's "
        "own, else threshold",
        choices=(
            "threshold", "top_k", "entropy", "margin", "entropy_bound", "grounded", "sequential", "sampled",
            "policy_head",
        ),
    )  # fmt: skip
    commit_threshold: float = setting(
        0.9,
        "confidence at which a position is committed (tau_c), for the rules threshold and grounded; for "
        "sampled and policy_head the confidence at which a gate opens with probability 1/2",
        low=0,
        high=1,
    )
    gate_temperature: float = setting(
        0.5, "softness of that threshold for sampled and policy_head, in logits", low=1e-3, high=100
    )
    head_threshold: float | None = setting(
        0.5, "probability at which a policy head says yes; unset (null) samples its decision", low=0, high=1
    )
    tokens_per_step: int | None = setting(
        None,
        "number of positions committed per step: exactly this many for top_k, entropy, margin and "
        "sequential (unset: 1), at most this many for the other rules (unset: no limit)",
        low=1,
    )
    steps_per_block: int | None = setting(
        None,
        "number of steps per block (or per canvas, without blocks): sets what a step commits for top_k, "
        "entropy, margin and sequential, and the minimum for the other rules (unset: 1 position)",
        low=1,
        high=2**20,
    )
    schedule: str = setting(
        "even",
        "how the positions of a block are divided over steps_per_block if it does not divide evenly: the "
        "first steps take more, or each step takes its rounded share of the rest",
        choices=("even", "rounded"),
    )
    entropy_bound: float | None = setting(
        None,
        "joint entropy in nats that may be committed per step; unset takes the checkpoint's own, else 0.1",
        low=0,
    )
    remask_threshold: float | None = setting(
        None, "committed tokens that fall below this probability are masked again, once; unset: never",
        low=0, high=1,
    )  # fmt: skip
    edit_threshold: float | None = setting(
        None,
        "confidence at which another token replaces a committed one within the current attention block; "
        "unset: never",
        low=0,
        high=1,
    )
    max_edit_steps: int = setting(
        16, "maximum number of steps that edit a block after its last mask is gone", low=0, high=2**20
    )
    copy_penalty: float | None = setting(
        None,

        "cost in nats of a token that is in neither question nor evidence, and of each jump between "
        "places in them; unset: no cost",
        low=0, high=50,
    )  # fmt: skip
    temperature_high: float | None = setting(
        None,
        "uniform noise only: temperature of a block's first step, which then falls linearly; unset takes "
        "the checkpoint's own",
        low=1e-6,
        high=2**20,
    )
    temperature_low: float | None = setting(
        None,
        "uniform noise only: temperature that the last step approaches; unset takes the checkpoint's own",
        low=0,
        high=2**20,
    )
    convergence_steps: int | None = setting(
        None,
        "uniform noise only: a block is finished if its most probable tokens have not changed for this "
        "many steps and stop_entropy holds; unset takes the checkpoint's own",
        low=0,
        high=2**10,
    )
    stop_entropy: float | None = setting(
        None,
        "uniform noise only: mean entropy in nats below which a block that has converged is finished, 0 "
        "for never; unset takes the checkpoint's own",
        low=0,
        high=2**20,
    )
    query_policy: str = setting(
        "proxy",
        "what becomes the search query",
        choices=("proxy", "committed", "question", "two_rounds", "feedback", "response"),
    )
    query_threshold: float = setting(
        0.0,
        "confidence at which a prediction may enter the query (tau_q); 1 for committed tokens only",
        low=0,
        high=1,
    )
    retrieval_interval: int = setting(1, "number of steps between two refreshes of the evidence", low=1)
    retrieval_threshold: float | None = setting(
        None,
        "refresh the evidence only if the lowest confidence is below this; unset: always",
        low=0,
        high=1,
    )
    retrieval_gate: str | None = setting(
        None,
        "whether to search with a query that has changed: always, or if the policy head says so; unset "
        "takes the checkpoint's own, else always",
        choices=("always", "policy_head"),
    )
    temperature: float = setting(
        0.0, "sampling temperature of committed tokens; 0 takes the most probable token", low=0
    )
    seed: int = setting(0, "random seed of sampling; every question has a generator of its own")
    batch_size: int = setting(8, "number of questions denoised together", low=1, high=2**16)
    overlap: str = setting(
        "none",
        "search while the model runs: pipeline (on the other half of the batch; the same tokens) or "
        "stale_evidence (evidence arrives one step late)",
        choices=("none", "pipeline", "stale_evidence"),
    )
    early_stopping: bool = setting(
        True,
        "stop once an end token and everything before it is committed, since the text can no longer change",
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.block_length and self.max_new_tokens and self.block_length > self.max_new_tokens:
            raise ConfigError(
                f"block_length={self.block_length} is longer than the canvas: set it to at most "
                f"canvas_length={self.max_new_tokens}"
            )
        if self.tokens_per_step and self.steps_per_block:
            raise ConfigError(
                "tokens_per_step and steps_per_block both say how much a step commits: leave one out"
            )
        if self.commit_rule == "sampled" and not 0 < self.commit_threshold < 1:
            raise ConfigError(
                f"commit_threshold={self.commit_threshold} has no logit, which commit_rule=sampled needs: "
                "set it between 0 and 1"
            )
        if self.query_policy == "committed" and self.query_threshold not in (0.0, 1.0):
            raise ConfigError(
                f"query_threshold={self.query_threshold} has no effect with query=committed: "
                "set query=proxy, or query_threshold=0"
            )

    @property
    def samples_actions(self) -> bool:
        """Whether a policy draws what is committed, or whether to search."""
        headed = self.commit_rule == "policy_head" or self.retrieval_gate == "policy_head"
        return self.commit_rule == "sampled" or (headed and self.head_threshold is None)


@dataclass
class EngineConfig(CheckedSettings):
    """How the work of decoding is done; nothing here changes a token.

    But for the rounding of `compile`, and `decode.finished_block_context=frozen`: without a pool nothing
    is kept.
    """

    memory_gib: float | None = setting(
        None,
        "memory limit for decoding or training on the device in GiB, for weights, batch, cache and a step "
        "together; the cache gets what is left; unset: the machine's limit",
        low=2**-20,
        high=2**20,
    )
    prefix_cache_gib: float | None = setting(
        None,
        "memory for cached keys and values of evidence on the device in GiB, in addition to those of the "
        "current batch; unset: what memory_gib leaves, or half of the free memory (on a CPU a quarter); "
        "0: no cache",
        low=0,
    )
    cpu_offload_gib: float = setting(
        0.0, "host memory in GiB for cached evidence that leaves the device", low=0
    )
    compile: bool = setting(
        False, "compile around attention with torch.compile: faster after half a minute; changes rounding"
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.cpu_offload_gib and self.prefix_cache_gib == 0:
            raise ConfigError(
                "cpu_offload_gib has no effect without a pool on the device: set prefix_cache_gib too"
            )

    @property
    def for_training_rollouts(self) -> "EngineConfig":
        """Of what decodes in training: a budget is the step's, and leaves no pool but one that is named."""
        if self.memory_gib is None:
            return self
        return replace(self, memory_gib=None, prefix_cache_gib=self.prefix_cache_gib or 0.0)
