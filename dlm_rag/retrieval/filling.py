"""Building a collection from a corpus: a stream, which goes on where it was stopped; memory stays flat."""

import json
from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from dlm_rag.config import RetrievalConfig
from dlm_rag.errors import ConfigError, CorpusError
from dlm_rag.progress import progress
from dlm_rag.retrieval.corpus import Corpus, Passage
from dlm_rag.retrieval.facts import FIELDS_OF, TEXTS, Facts
from dlm_rag.retrieval.index import build_once, slug
from dlm_rag.retrieval.milvus import MOST_BYTES, Collection
from dlm_rag.retrieval.remote import check_encoder, check_scores
from dlm_rag.retrieval.scores import FORM, Statistics, count_words

if TYPE_CHECKING:
    from dlm_rag.retrieval.dense import TextEncoder

ROWS, BYTES = 1000, 8 << 20  # of a write, at most: passages, and bytes of their texts
COUNTED = "counted.json"

Embed = Callable[[list[str]], Sequence[Any]]  # texts to a vector each


def fill(collection: Collection, corpus: Corpus, config: RetrievalConfig) -> int:
    """Puts a corpus into a collection, or what lacks of it; returns how many passages that were.

    Passages are written in order, and again where it is unsure whether they were: a key stands once. Raises
    `UserError` for a collection that holds other passages or other vectors.
    """
    facts = collection.describe()
    fresh = facts is None
    if facts is not None:
        _check_same(collection, corpus, config)
    encoder, wanted = None, Facts(corpus.fingerprint, config.kind, len(corpus))
    if "dense" in FIELDS_OF[config.kind]:
        from dlm_rag.retrieval.dense import open_encoder

        encoder = open_encoder(config)
        width = encoder.passages(["width"]).shape[1]
        wanted = replace(wanted, model=config.dense_model, encoder=encoder.folder, width=width)
    if fresh:
        collection.create(wanted)
        collection.describe()
        _check_same(collection, corpus, config)  # another process may have been faster
    if encoder is not None:
        check_encoder(collection, config.dense_model, encoder)
    collection.add_indexes()
    if not fresh:  # what is not loaded cannot be counted, and what is takes memory as it grows
        collection.load()
    if collection.facts.finished and collection.count(len(corpus)) == len(corpus):
        return 0
    start = 0 if fresh else complete(collection)
    embeds = _embeds(corpus, encoder, config.kind)
    with progress("writing passages", len(corpus), done=start) as advance:
        for row, passages in batches(corpus, start):
            texts = [passage.text for passage in passages]
            collection.put(row, passages, {field: embed(texts) for field, embed in embeds.items()})
            advance(len(passages))
    collection.finish()
    check_scores(collection, FIELDS_OF[config.kind])
    collection.note_finished()
    return len(corpus) - start


def _check_same(collection: Collection, corpus: Corpus, config: RetrievalConfig) -> None:
    """Raises `UserError` where the collection is of other passages or of another kind."""
    facts = collection.facts
    if facts.fingerprint != corpus.fingerprint:
        raise CorpusError(f"{collection.url} holds other passages than {corpus.path}: give another name")
    if facts.kind != config.kind:
        raise ConfigError(
            f"{collection.url} is built with retrieval.kind={facts.kind}: give that, or another name"
        )


def complete(collection: Collection) -> int:
    """How many of the first rows are there, none of them lacking."""
    rows = range(1, collection.facts.passages + 1)
    return bisect_left(rows, True, key=lambda count: collection.count(count) < count)


def batches(corpus: Corpus, start: int) -> Iterator[tuple[int, list[Passage]]]:
    """Row and passages of each write, from row `start` on; raises `CorpusError` where one is too long."""
    found: list[Passage] = []
    size = 0
    for row in range(start, len(corpus)):
        passage = corpus[row]
        size += _size(corpus, row, passage)
        if found and (len(found) == ROWS or size > BYTES):
            yield row - len(found), found
            found, size = [], _size(corpus, row, passage)
        found.append(passage)
    corpus.check_unchanged()
    if found:
        yield len(corpus) - len(found), found


def _size(corpus: Corpus, row: int, passage: Passage) -> int:
    """The bytes of a passage; raises `CorpusError` where a text has more than a field may."""
    sizes = {field: len(getattr(passage, field).encode()) for field in TEXTS}
    for field, size in sizes.items():
        if size > MOST_BYTES:
            raise CorpusError(
                f"{corpus.path}, row {row}: '{field}' has {size:,} bytes, and Milvus takes {MOST_BYTES:,}: "
                "split the passage"
            )
    return sum(sizes.values())


def _embeds(corpus: Corpus, encoder: "TextEncoder | None", kind: str) -> dict[str, Embed]:
    """How the vectors of each field are made."""
    embeds: dict[str, Embed] = {}
    if "sparse" in FIELDS_OF[kind]:
        vector = counted(corpus).vector
        embeds["sparse"] = lambda texts: [vector(text) for text in texts]
    if encoder is not None:
        embed = encoder.passages
        embeds["dense"] = lambda texts: embed(texts).tolist()
    return embeds


def counted(corpus: Corpus) -> Statistics:
    """The words of a corpus; counted once, and kept beside its indexes."""

    def texts() -> Iterator[str]:
        with progress("counting words", len(corpus)) as advance:
            for row, passage in enumerate(corpus):
                _size(corpus, row, passage)  # what cannot be stored is better known now
                yield passage.text
                advance(1)

    def build(scratch: Path) -> None:
        found = count_words(texts())
        np.save(scratch / "ids.npy", found.ids)
        np.save(scratch / "weights.npy", found.weights)
        (scratch / COUNTED).write_text(json.dumps([found.passages, found.words]))

    folder = build_once(corpus.folder / slug("words", FORM), build)
    passages, words = json.loads((folder / COUNTED).read_text())
    return Statistics(passages, words, np.load(folder / "ids.npy"), np.load(folder / "weights.npy"))
