"""What a collection of passages in an engine consists of, and says of itself."""

from dataclasses import asdict, dataclass, fields
from typing import Any

from dlm_rag.retrieval.sparse_vectors import SPARSE_VECTOR_VERSION

TEXT_FIELDS = ("id", "title", "contents")
# of vectors, by kind
VECTOR_FIELDS = {"bm25": ("sparse",), "dense": ("dense",), "hybrid": ("sparse", "dense")}
PROPERTY_PREFIX = "dlm_rag."


@dataclass(frozen=True)
class CollectionInfo:
    """What a collection says about itself, in its properties: some servers drop descriptions."""

    fingerprint: str  # of the corpus
    kind: str  # bm25, dense, hybrid: which vectors it has
    passages: int
    form: int = SPARSE_VECTOR_VERSION
    build: int = 0  # of 20 bits: a key is then exact in JavaScript too
    finished: int = 0
    model: str = ""  # that made the dense vectors
    encoder: str = ""  # digest of its weights and of the passage prompt
    width: int = 0  # of a dense vector

    def to_properties(self) -> dict[str, str]:
        return {PROPERTY_PREFIX + name: str(value) for name, value in asdict(self).items() if value}

    @classmethod
    def from_properties(cls, said: dict[str, Any]) -> "CollectionInfo":
        """Those that `properties` wrote; raises `ValueError` where they cannot be."""
        return cls(**{i.name: i.type(said.get(PROPERTY_PREFIX + i.name, i.type())) for i in fields(cls)})  # type: ignore[operator]
