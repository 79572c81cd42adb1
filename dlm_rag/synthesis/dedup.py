"""Rows that say what was said: equal ones, nearly equal ones, those that an evaluation set has too."""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dlm_rag.questions import read_questions
from dlm_rag.text import split_words

if TYPE_CHECKING:
    from datasketch import MinHash

# As in datatrove: 5-grams of words, 14 bands of 8 hashes; 12 words for what is in an evaluation set.
SHINGLE_WORDS, LSH_BANDS, LSH_BAND_ROWS = 5, 14, 8
EVALUATION_NGRAM_WORDS = 12
SIGNATURE_BATCH_ROWS = 1000  # rows whose hashes are computed together


class DuplicateFilter:
    """Says of one row after another whether it is to be left out, and why.

    Rows are compared by their question, or their text where they have none, with rows of the same template:
    the same sentence completed and asked about are two tasks. near: see `SynthesisConfig`. What shares a
    band is compared by the whole signature, for rows of one pattern often share a band by chance.
    """

    def __init__(self, near: float | None, against: str | None) -> None:
        """against: files of questions, by commas. Raises `QuestionError`."""
        self._near = near
        self._evaluated, self._lengths = collect_evaluation_ngrams(against)
        self._seen: set[tuple[str, str]] = set()
        self._kept: dict[str, tuple[Any, list[MinHash]]] = {}  # bands and signatures by template

    def filter_rows(self, rows: Sequence[dict[str, Any]]) -> Iterator[tuple[dict[str, Any], str]]:
        """Each row with the reason to leave it out, "" where it is kept; in order."""
        for first in range(0, len(rows), SIGNATURE_BATCH_ROWS):
            block = rows[first : first + SIGNATURE_BATCH_ROWS]
            spoken = [split_words(row.get("question") or row.get("text") or "") for row in block]
            signatures = self._signatures(spoken) if self._near is not None else [None] * len(block)
            for row, said, signature in zip(block, spoken, signatures, strict=True):
                yield row, self._reason(row.get("template", ""), said, signature)

    def _reason(self, template: str, said: list[str], signature: "MinHash | None") -> str:
        if any(gram in self._evaluated for size in self._lengths for gram in _iterate_ngrams(said, size)):
            return "in an evaluation set"
        key = (template, " ".join(said))
        if key in self._seen:
            return "equal to an earlier row"
        self._seen.add(key)
        near = signature is not None and self._is_near(template, signature)
        return "nearly an earlier row" if near else ""

    def _is_near(self, template: str, signature: "MinHash") -> bool:
        from datasketch import MinHashLSH

        if template not in self._kept:
            bands = MinHashLSH(num_perm=LSH_BANDS * LSH_BAND_ROWS, params=(LSH_BANDS, LSH_BAND_ROWS))
            self._kept[template] = bands, []
        bands, kept = self._kept[template]
        if any(signature.jaccard(kept[other]) >= self._near for other in bands.query(signature)):
            return True
        bands.insert(len(kept), signature)
        kept.append(signature)
        return False

    @staticmethod
    def _signatures(spoken: list[list[str]]) -> "list[MinHash]":
        from datasketch import MinHash

        grams = [
            [" ".join(gram).encode() for gram in _iterate_ngrams(said, min(SHINGLE_WORDS, len(said)))]
            for said in spoken
        ]
        return MinHash.bulk(grams, num_perm=LSH_BANDS * LSH_BAND_ROWS)


def collect_evaluation_ngrams(against: str | None) -> tuple[set[tuple[str, ...]], list[int]]:
    """Runs of `EVALUATION_NGRAM_WORDS` words of questions, a shorter question whole; and the lengths of
    all.
    """
    found: set[tuple[str, ...]] = set()
    for path in against.split(",") if against else []:
        for question in read_questions(Path(path.strip())):
            said = split_words(question.question)
            found.update(_iterate_ngrams(said, min(EVALUATION_NGRAM_WORDS, len(said))))
    return found, sorted({len(gram) for gram in found} - {0})


def _iterate_ngrams(said: list[str], size: int) -> Iterator[tuple[str, ...]]:
    return (tuple(said[n : n + size]) for n in range(len(said) - size + 1))
