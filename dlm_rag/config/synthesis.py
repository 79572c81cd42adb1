"""Settings of `dlm-rag synthesize`: where training rows come from, which are kept, how they are written."""

from dataclasses import dataclass

from dlm_rag.config.checked import Checked, setting
from dlm_rag.errors import ConfigError


@dataclass
class SynthesisConfig(Checked):
    """Rows to train on, from questions, from a corpus, or by another model as writer."""

    kind: str = setting(
        "traces",
        "traces: questions are decoded; corpus: rows from the titles of a corpus alone; writer: another "
        "model rewrites questions or passages",
        choices=("traces", "corpus", "writer"),
    )
    keep: str = setting(
        "answer",
        "traces that are kept: those that end in a known answer, or, where none is known, those that their "
        "evidence bears out",
        choices=("answer", "evidence"),
    )
    known_hops: bool = setting(False, "keep only traces with as many sentences as the question has hops")
    chain: int = setting(3, "corpus: passages that a question needs at most", low=1, high=3)
    held_out: float = setting(
        0.25, "corpus: share of the passages whose rows are none to train on, in held_out/", low=0, high=1
    )
    writer: str | None = setting(
        None, "URL of an OpenAI-style server, as http://localhost:8000/v1; $DLM_RAG_WRITER_KEY is its key"
    )
    writer_model: str = setting("", "the name of the model there")
    template: str = setting(
        "paraphrase",
        "what the writer is asked for: questions in other words; passages as questions and answers, or as "
        "a table",
        choices=("paraphrase", "faq", "table"),
    )
    each: int = setting(1, "texts that the writer makes of each source", low=1, high=1000)
    at_once: int = setting(8, "requests under way to the writer", low=1, high=1024)
    temperature: float = setting(0.7, "of the writer", low=0, high=2)
    most_tokens: int = setting(1024, "that the writer may write; what is cut by it is not kept", low=1)
    timeout: float = setting(120.0, "seconds that an answer of the writer may take", low=0.1)
    tries: int = setting(5, "of each request, where the writer is busy or fails", low=1, high=100)
    prompt_price: float = setting(0.0, "dollars for a million tokens that the writer reads", low=0)
    response_price: float = setting(0.0, "dollars for a million tokens that it writes", low=0)
    near_duplicates: float | None = setting(
        0.8,
        "share of 5-grams (Jaccard, by MinHash) from which a row is left out as nearly an earlier one; "
        "unset: only equal ones are",
        low=0.1,
        high=1,
    )
    against: str | None = setting(
        None,
        "files of evaluation questions, by commas: rows that share 12 words in a row with one are left out",
    )
    form: str = setting("parquet", "of the files", choices=("parquet", "jsonl"))
    shard_rows: int = setting(100_000, "rows of a file", low=1)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.kind == "writer" and not (self.writer and self.writer_model):
            raise ConfigError("kind=writer needs writer=URL and writer_model=NAME")
        if self.writer is not None and not self.writer.startswith(("http://", "https://")):
            raise ConfigError(f"writer={self.writer} is no URL: write http://HOST:PORT/v1")
        if self.writer is not None and self.kind != "writer":
            raise ConfigError(f"writer={self.writer} has no effect with kind={self.kind}: set kind=writer")
