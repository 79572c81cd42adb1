"""Settings of `dlm-rag synthesize`: where training rows come from, which are kept, how they are written."""

from dataclasses import dataclass

from dlm_rag.config.checked import CheckedSettings, setting
from dlm_rag.errors import ConfigError


@dataclass
class SynthesisConfig(CheckedSettings):
    """Rows to train on, from questions, from a corpus, or by another model as writer."""

    method: str = setting(
        "traces",
        "where rows come from: traces (decoded questions), corpus (cloze questions from the titles of a "
        "corpus) or writer (another model rewrites questions or passages)",
        choices=("traces", "corpus", "writer"),
    )
    filter: str = setting(
        "answer",
        "which traces are kept: those that end in a known answer (where none is known, those supported by "
        "their evidence), or those supported by their evidence",
        choices=("answer", "evidence"),
    )
    known_hops: bool = setting(
        False, "keep only traces that have as many sentences as the question has hops"
    )
    max_hops: int = setting(3, "corpus: maximum number of passages that a question needs", low=1, high=3)
    held_out: float = setting(
        0.25,
        "corpus: share of the passages whose rows are written to held_out/ and not for training",
        low=0,
        high=1,
    )
    writer_url: str | None = setting(
        None,
        "URL of an OpenAI-compatible server, such as http://localhost:8000/v1; $DLM_RAG_WRITER_KEY is its "
        "key",
    )
    writer_model: str = setting("", "name of the model on that server")
    template: str = setting(
        "paraphrase",
        "what the writer is asked for: a paraphrase of each question; questions and answers (faq) or a "
        "table about each passage",
        choices=("paraphrase", "faq", "table"),
    )
    n: int = setting(1, "number of texts that the writer generates for each source", low=1, high=1000)
    concurrency: int = setting(8, "number of concurrent requests to the writer", low=1, high=1024)
    temperature: float = setting(0.7, "sampling temperature of the writer", low=0, high=2)
    max_tokens: int = setting(
        1024, "maximum number of tokens that the writer may generate; truncated texts are dropped", low=1
    )
    timeout: float = setting(120.0, "time limit of a request to the writer in seconds", low=0.1)
    max_retries: int = setting(
        5, "number of attempts for each request if the writer is busy or fails", low=1, high=100
    )
    prompt_price: float = setting(0.0, "price of a million prompt tokens in dollars", low=0)
    response_price: float = setting(0.0, "price of a million generated tokens in dollars", low=0)
    dedup_threshold: float | None = setting(
        0.8,
        "similarity (Jaccard of 5-grams, by MinHash) from which a row counts as a duplicate of an earlier "
        "one and is dropped; unset drops exact duplicates only",
        low=0.1,
        high=1,
    )
    decontaminate_against: str | None = setting(
        None,
        "files of evaluation questions, separated by commas; rows that share 12 consecutive words with "
        "one are dropped",
    )
    format: str = setting("parquet", "file format of the rows", choices=("parquet", "jsonl"))
    shard_rows: int = setting(100_000, "number of rows in a file", low=1)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.method == "writer" and not (self.writer_url and self.writer_model):
            raise ConfigError("kind=writer needs writer=URL and writer_model=NAME")
        if self.writer_url is not None and not self.writer_url.startswith(("http://", "https://")):
            raise ConfigError(f"writer={self.writer_url} is no URL: write http://HOST:PORT/v1")
        if self.writer_url is not None and self.method != "writer":
            raise ConfigError(
                f"writer={self.writer_url} has no effect with kind={self.method}: set kind=writer"
            )
