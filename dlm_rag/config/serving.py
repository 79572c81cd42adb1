"""Settings of `dlm-rag serve`: who may ask, and how much."""

from dataclasses import dataclass

from dlm_rag.config.checked import Checked, setting


@dataclass
class ServingConfig(Checked):
    """Limits of the server; what is beyond one is refused, and nothing else suffers."""

    keys: str | None = setting(
        None, "file of API keys, one a line, of which every request needs one; unset: whoever comes may ask"
    )
    waiting: int = setting(
        64, "questions of a key that may wait for a place in the batch; more are answered 429", low=1,
        high=2**20,
    )  # fmt: skip
    seconds: float = setting(300.0, "that a question may take, waiting included", low=0.01, high=2**20)
    tokens: int | None = setting(
        None,
        "response positions that a request may ask for; unset: those of decode.canvas_length",
        low=1,
        high=2**20,
    )
    connections: int = setting(512, "open at once; more are answered 503", low=1, high=2**16)
