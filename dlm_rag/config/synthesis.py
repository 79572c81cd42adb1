"""Settings of `dlm-rag synthesize`: where training rows come from, which are kept, how they are written."""

from dataclasses import dataclass

from dlm_rag.config.checked import CheckedSettings, setting
from dlm_rag.errors import ConfigError

# What settings need, as `only_with` says it.
TRACES, CORPUS, WRITER = ({"synthesis.method": (name,)} for name in ("traces", "corpus", "writer"))


@dataclass
class SynthesisConfig(CheckedSettings):
    """Rows to train on, from questions, from a corpus, or by another model as writer."""

    method: str = setting("traces", choices=("traces", "corpus", "writer"))
    """where rows come from: traces (decoded questions), corpus (cloze questions from the titles of a
    corpus) or writer (another model rewrites questions or passages)"""
    filter: str = setting("answer", choices=("answer", "evidence"), only_with=TRACES)
    """which traces are kept: those that end in a known answer (where none is known, those supported by
    their evidence), or those supported by their evidence"""
    known_hops: bool = setting(False, only_with=TRACES)
    """keep only traces that have as many sentences as the question has hops"""
    max_hops: int = setting(3, low=1, high=3, only_with=CORPUS)
    """corpus: maximum number of passages that a question needs"""
    held_out: float = setting(0.25, low=0, high=1, only_with=CORPUS)
    """corpus: share of the passages whose rows are written to held_out/ and not for training"""
    writer_url: str | None = setting(None, only_with=WRITER)
    """URL of an OpenAI-compatible server, such as http://localhost:8000/v1; $DLM_RAG_WRITER_KEY is its
    key"""
    writer_model: str = setting("", only_with=WRITER)
    """name of the model on that server"""
    template: str = setting("paraphrase", choices=("paraphrase", "faq", "table"), only_with=WRITER)
    """what the writer is asked for: a paraphrase of each question; questions and answers (faq) or a
    table about each passage"""
    n: int = setting(1, low=1, high=1000, only_with=WRITER)
    """number of texts that the writer generates for each source"""
    concurrency: int = setting(8, low=1, high=1024, only_with=WRITER)
    """number of concurrent requests to the writer"""
    temperature: float = setting(0.7, low=0, high=2, only_with=WRITER)
    """sampling temperature of the writer"""
    max_tokens: int = setting(1024, low=1, only_with=WRITER)
    """maximum number of tokens that the writer may generate; truncated texts are dropped"""
    timeout: float = setting(120.0, low=0.1, only_with=WRITER)
    """time limit of a request to the writer in seconds"""
    max_retries: int = setting(5, low=1, high=100, only_with=WRITER)
    """number of attempts for each request if the writer is busy or fails"""
    prompt_price: float = setting(0.0, low=0, only_with=WRITER)
    """price of a million prompt tokens in dollars"""
    response_price: float = setting(0.0, low=0, only_with=WRITER)
    """price of a million generated tokens in dollars"""
    dedup_threshold: float | None = setting(0.8, low=0.1, high=1)
    """similarity (Jaccard of 5-grams, by MinHash) from which a row counts as a duplicate of an earlier
    one and is dropped; unset drops exact duplicates only"""
    decontaminate_against: str | None = setting(None)
    """files of evaluation questions, separated by commas; rows that share 12 consecutive words with one
    are dropped"""
    format: str = setting("parquet", choices=("parquet", "jsonl"))
    """file format of the rows"""
    shard_rows: int = setting(100_000, low=1)
    """number of rows in a file"""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.method == "writer" and not (self.writer_url and self.writer_model):
            raise ConfigError(
                "synthesis.method=writer needs synthesis.writer_url=URL and synthesis.writer_model=NAME"
            )
        if self.writer_url is not None and not self.writer_url.startswith(("http://", "https://")):
            raise ConfigError(f"writer_url={self.writer_url} is not a URL: write http://HOST:PORT/v1")
