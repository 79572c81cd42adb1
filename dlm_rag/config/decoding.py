"""Settings of the model, the retriever and the denoising loop."""

from dataclasses import dataclass, fields, replace
from urllib.parse import urlsplit

from dlm_rag.config.checked import Checked, brief, setting
from dlm_rag.errors import ConfigError, nearest

# What can be searched by URL, and which settings of retrieval the service decides, or has no use for.
_OF_SERVICES = (
    "kind", "oracle", "dense_model", "dense_batch_size", "query_prompt", "passage_prompt",
    "fusion_depth", "search_memory_gib", "index_folder",
)  # fmt: skip
UNUSED_BY_URL = {
    "http": _OF_SERVICES,
    "https": _OF_SERVICES,
    "milvus": ("oracle", "search_memory_gib", "index_folder"),
}


@dataclass
class ModelConfig(Checked):
    """Which denoiser, where it runs, and who sees whom."""

    path: str | None = setting(None, "checkpoint: a Hugging Face style folder, or a hub id")
    device: str = setting("auto", "cpu, cuda, cuda:1, mps; auto takes CUDA where there is one")
    dtype: str = setting(
        "auto",
        "auto takes bfloat16 on CUDA (float16 before Ampere) and float32 elsewhere",
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
    attention_block: int | None = setting(
        None,
        "attention in blocks of so many tokens, 0: whole; for training, and for checkpoints that do not "
        "say; unset takes the checkpoint's own",
        low=0,
        high=2**20,
    )


@dataclass
class RetrievalConfig(Checked):
    """Which passages can become evidence, and how they are found."""

    corpus: str | None = setting(
        None, "file of passages, folder of texts, or an index folder built from one"
    )
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
    words_of: str = setting(
        "query",
        "what BM25, also in hybrid, takes as one search: the whole query; or each of its parts, question "
        "and the sentences, which take turns as in dense search",
        choices=("query", "parts"),
    )
    fusion_depth: int = setting(50, "ranks of BM25 and dense that hybrid fuses", low=1)
    search_memory_gib: float = setting(
        1.0,
        "BM25 scores kept between the queries of a question, in GiB; 0: every search is fresh",
        low=0,
        high=2**20,
    )
    url: str | None = setting(
        None,
        "search by URL instead of a file of passages: http://HOST:PORT/retrieve or https://, "
        "milvus://HOST:PORT/COLLECTION",
    )
    url_seconds: float = setting(
        15.0,
        "seconds that a search by URL may take: until then it is tried again, and an attempt has a third",
        low=0.01,
        high=2**20,
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        changed = [item.name for item in fields(self) if getattr(self, item.name) != item.default]
        if self.url is None:
            if "url_seconds" in changed:
                raise ConfigError("retrieval.url_seconds has no effect without retrieval.url: leave it out")
            return
        unused = UNUSED_BY_URL[_scheme(self.url)]
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


def _scheme(url: str) -> str:
    """How a service is spoken to; raises `ConfigError` for what is no URL of one."""
    scheme, begun, _ = url.partition("://")
    known = ", ".join(f"{name}://" for name in UNUSED_BY_URL)
    said = f"retrieval.url={brief(url)}"
    if not begun:
        raise ConfigError(f"{said} has no scheme: begin it with one of {known}")
    if scheme not in UNUSED_BY_URL:
        raise ConfigError(f"{said} begins with none of {known}{nearest(scheme, UNUSED_BY_URL)}")
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


ENTROPY_BOUND = 0.1  # nats, where neither settings nor checkpoint say one


@dataclass
class DecodeConfig(Checked):
    """The denoising loop: what is committed, what is asked, when evidence is refreshed."""

    canvas_length: int | None = setting(
        None,
        "response positions, all masked at first; unset takes the checkpoint's own, 100",
        low=1,
        high=2**20,
    )
    block_length: int | None = setting(
        None,
        "commit within the first unfinished block of this many positions, 0: anywhere; unset takes the "
        "checkpoint's own, anywhere",
        low=0,
    )
    finished_blocks: str | None = setting(
        None,
        "what finished blocks see when the evidence changes, where attention has blocks: the new evidence "
        "(they run again); text alone; what they saw, new passages behind them; what they saw; unset takes "
        "the checkpoint's own, reread",
        choices=("reread", "text", "append", "kept"),
    )
    lookahead: int = setting(
        8,
        "positions behind the block under work that queries may guess at, where attention has blocks",
        low=0,
        high=2**20,
    )
    commit_rule: str | None = setting(
        None,
        "which masked positions are written down at a step; unset: the checkpoint's own, else threshold",
        choices=(
            "threshold", "top_k", "entropy", "margin", "entropy_bound", "grounded", "sequential", "sampled",
            "head",
        ),
    )  # fmt: skip
    commit_threshold: float = setting(
        0.9,
        "confidence at which a position is committed (tau_c): threshold, grounded; where the gates of "
        "sampled and head are half open",
        low=0,
        high=1,
    )
    gate_width: float = setting(
        0.5, "how soft that threshold is for sampled and head, in units of the logit", low=1e-3, high=100
    )
    head_cut: float | None = setting(
        0.5, "probability from which what a head says counts; unset (null): by lot", low=0, high=1
    )
    tokens_per_step: int | None = setting(
        None,
        "positions committed a step: exactly so many for top_k, entropy, margin, sequential (unset: 1), at "
        "most so many for the other rules (unset: no bound)",
        low=1,
    )
    steps_per_block: int | None = setting(
        None,
        "steps in which a block (without blocks, the canvas) is written: what each commits by top_k, "
        "entropy, margin, sequential, and at least by the other rules; unset: 1 position",
        low=1,
        high=2**20,
    )
    schedule: str = setting(
        "even",
        "what a step commits where steps_per_block does not divide the block: the first steps more, or "
        "each its share of what is left, rounded",
        choices=("even", "rounded"),
    )
    entropy_bound: float | None = setting(
        None, "nats of joint entropy committed a step; unset: the checkpoint's own, else 0.1", low=0
    )
    revision_threshold: float | None = setting(
        None, "committed tokens below this probability are masked again, once; unset: never",
        low=0, high=1,
    )  # fmt: skip
    edit_threshold: float | None = setting(
        None,
        "confidence at which another token replaces a committed one, within the block of attention under "
        "work; unset: never",
        low=0,
        high=1,
    )
    edit_rounds: int = setting(
        16, "steps a block is edited for at most once nothing in it is masked", low=0, high=2**20
    )
    copy_price: float | None = setting(
        None,
        "nats that a token costs which is in neither question nor evidence, and every jump from one place "
        "of theirs to another; unset: nothing does",
        low=0, high=50,
    )  # fmt: skip
    temperature_high: float | None = setting(
        None,
        "of uniform noise: temperature of a block's first step, from which it falls in even steps; unset: "
        "the checkpoint's own",
        low=1e-6,
        high=2**20,
    )
    temperature_low: float | None = setting(
        None,
        "of uniform noise: temperature that the last step comes near to; unset: the checkpoint's own",
        low=0,
        high=2**20,
    )
    stable_steps: int | None = setting(
        None,
        "of uniform noise: a block is finished once its most probable tokens are those of so many steps "
        "before, and sure; unset: the checkpoint's own",
        low=0,
        high=2**10,
    )
    confident_below: float | None = setting(
        None,
        "of uniform noise: nats of mean entropy under which these tokens are sure, 0: never; unset: the "
        "checkpoint's own",
        low=0,
        high=2**20,
    )
    query: str = setting(
        "proxy",
        "what becomes the search query",
        choices=("proxy", "committed", "question", "two_rounds", "feedback", "response"),
    )
    query_threshold: float = setting(
        0.0, "confidence at which a guess may enter the query (tau_q); 1: committed only", low=0, high=1
    )
    retrieve_every: int = setting(1, "steps between two refreshes of the evidence", low=1)
    retrieve_below: float | None = setting(
        None, "refresh only when the lowest confidence is under this; unset: always", low=0, high=1
    )
    search: str | None = setting(
        None,
        "whether a query that has changed is searched for: always, or as the head beside the model says; "
        "unset: the checkpoint's own, else always",
        choices=("always", "head"),
    )
    temperature: float = setting(0.0, "0 takes the most probable token, above 0 samples", low=0)
    seed: int = setting(0, "of the sampling; every question has a generator of its own")
    batch_size: int = setting(8, "questions denoised together", low=1, high=2**16)
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
        if self.tokens_per_step and self.steps_per_block:
            raise ConfigError(
                "tokens_per_step and steps_per_block both say how much a step commits: leave one out"
            )
        if self.commit_rule == "sampled" and not 0 < self.commit_threshold < 1:
            raise ConfigError(
                f"commit_threshold={self.commit_threshold} has no logit, which commit_rule=sampled needs: "
                "set it between 0 and 1"
            )
        if self.query == "committed" and self.query_threshold not in (0.0, 1.0):
            raise ConfigError(
                f"query_threshold={self.query_threshold} has no effect with query=committed: "
                "set query=proxy, or query_threshold=0"
            )

    @property
    def by_lot(self) -> bool:
        """Whether a policy draws what is committed, or whether to search."""
        headed = self.commit_rule == "head" or self.search == "head"
        return self.commit_rule == "sampled" or (headed and self.head_cut is None)


@dataclass
class EngineConfig(Checked):
    """How the work of decoding is done; nothing here changes a token.

    But for the rounding of `compile`, and `decode.finished_blocks=kept`: without a pool nothing is kept.
    """

    memory_gib: float | None = setting(
        None,
        "all that decoding or training may take of its device's memory, in GiB: weights, batch, pool, a "
        "step; the pool gets what is left; unset: no limit but the machine's",
        low=2**-20,
        high=2**20,
    )
    pool_gib: float | None = setting(
        None,
        "keys and values of evidence kept on the device, in GiB, beside those of the rows in the batch; "
        "unset: what memory_gib leaves, or half of the memory that is free (of a CPU's a quarter); 0: none",
        low=0,
    )
    host_pool_gib: float = setting(0.0, "more of them in host memory, for what leaves the device", low=0)
    compile: bool = setting(
        False, "torch.compile around attention: faster, after half a minute; changes rounding"
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.host_pool_gib and self.pool_gib == 0:
            raise ConfigError("host_pool_gib has no effect without a pool on the device: set pool_gib too")

    @property
    def beside_training(self) -> "EngineConfig":
        """Of what decodes in training: a budget is the step's, and leaves no pool but one that is named."""
        if self.memory_gib is None:
            return self
        return replace(self, memory_gib=None, pool_gib=self.pool_gib or 0.0)
