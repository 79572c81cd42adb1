"""Dense search in a collection of a Milvus, and how one is built; all that knows pymilvus.

A passage is an entity: its row in the corpus, which is its key, its id, title and contents, and its vector
(`dense`). Rankings are the same on any shards: of equal scores more are asked for, and put in corpus order.
"""

import logging
import os
import re
import socket
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from pydantic import TypeAdapter

from dlm_rag.config import RetrievalConfig
from dlm_rag.errors import ConfigError, CorpusError
from dlm_rag.nvtx_ranges import profile_stage
from dlm_rag.progress import report_progress
from dlm_rag.retrieval import base
from dlm_rag.retrieval.corpus import Corpus, Passage

if TYPE_CHECKING:
    from dlm_rag.retrieval.dense import TextEncoder

COLLECTION_VERSION = 2  # raise it when collections get another form
TEXT_FIELDS, VECTOR_FIELD = ("id", "title", "contents"), "dense"
EXACT_INDEX = ("FLAT", "IP")  # its type, and the metric
MAX_SEARCH_HITS, MAX_TEXT_BYTES = 16_384, 65_535  # limits of the engine: hits of a search, bytes of a text
MAX_REQUEST_ITEMS = 1000  # vectors of a search, keys of a query
MAX_REQUEST_HITS = 1_000_000  # of a search: less than the 64 MiB that gRPC takes
WRITE_BATCH_PASSAGES = 128  # of a write: with texts of any size less than the 64 MiB that gRPC takes
MAX_CONNECT_SECONDS = 1.0  # a wrong address is reported within two
MAX_BUILD_SECONDS = 600.0  # for an index, for loading
EXTRA_HITS = 100  # hits beyond those wanted: if even more are equal to the last, the engine chooses
# A channel that waits up to 2 minutes, as by default, is still closed when the server is back.
GRPC_CHANNEL_OPTIONS = {f"grpc.{name}_reconnect_backoff_ms": 100 for name in ("initial", "max")} | {
    "grpc.keepalive_time_ms": 600_000,  # some servers hang up on who pings often; calls have deadlines
    "grpc.keepalive_permit_without_calls": 0,
    "grpc.use_local_subchannel_pool": 1,  # or a new channel shares the waits of an old one
}
_COLLECTION_NOT_FOUND, _NOT_LOADED = 100, 101  # codes of the engine
_WRITTEN = {"consistency_level": "Bounded"}  # of reads where nothing is written any more


@dataclass(frozen=True)
class CollectionInfo:
    """What a collection says about itself, in its properties: some servers drop descriptions."""

    fingerprint: str  # of the corpus
    passages: int
    model: str  # that made the vectors
    encoder: str  # digest of its weights and of the passage prompt
    width: int  # of a vector
    form: int = COLLECTION_VERSION
    finished: int = 0

    def to_properties(self) -> dict[str, str]:
        return {f"dlm_rag.{name}": str(value) for name, value in asdict(self).items()}


class MilvusCollection:
    """A collection by its URL, `milvus://HOST:PORT/NAME` or `milvus://HOST:PORT/DATABASE/NAME`.

    Calls have deadlines, until which pymilvus tries again. They raise `SearchUnavailableError` for what may
    pass, `CorpusError` for a collection that is not what it should be, or was.
    """

    info: CollectionInfo  # once `describe` has found it

    def __init__(self, url: str, seconds: float) -> None:
        """seconds: that a call may take. Raises `ConfigError` where no Milvus answers."""
        self.url, self._seconds = url, seconds
        self.read_passages = base.MemoizedBatchFunction[int, Passage](self._fetch_rows)
        parts = urlsplit(url)
        *database, self.name = parts.path.strip("/").split("/")
        if not re.fullmatch(r"[A-Za-z_]\w{0,254}", self.name, re.ASCII) or len(database) > 1:
            raise ConfigError(f"{url} names no collection: milvus://HOST:PORT/NAME (letters, digits, _)")
        host, port = parts.hostname or "", parts.port or 19530
        os.environ.setdefault("GRPC_VERBOSITY", "NONE")  # read by the import
        logging.getLogger("pymilvus").setLevel(logging.CRITICAL + 1)  # a traceback for every failure
        local = host == "localhost" or host.startswith("127.")
        try:
            socket.create_connection((host, port), min(MAX_CONNECT_SECONDS, seconds)).close()
            from pymilvus import MilvusClient  # takes a second to import

            self._client = MilvusClient(
                f"http://{host}:{port}", token=os.environ.get("MILVUS_TOKEN", ""),
                db_name="".join(database), timeout=seconds, dedicated=True,
                grpc_options=GRPC_CHANNEL_OPTIONS | ({"grpc.enable_http_proxy": 0} if local else {}),
            )  # fmt: skip
        except ImportError:
            raise ConfigError(f"{url} needs pymilvus: pip install 'dlm_rag[milvus]'") from None
        except OSError as error:
            raise ConfigError(f"{url} cannot be searched: {error.strerror or 'no answer'}") from None
        except Exception as error:
            raise ConfigError(
                f"{url} cannot be searched: the server there does not answer as a Milvus does, or needs "
                f"MILVUS_TOKEN=USER:PASSWORD in the environment ({_summarize_failure(error)})"
            ) from None

    def describe(self) -> CollectionInfo | None:
        """What the collection says of itself, from then on in `info`; None where there is none. Raises
        `CorpusError` where `dlm-rag index` did not make it, or in another form."""
        if not self._call("has_collection"):
            return None
        found = self._call("describe_collection").get("properties") or {}
        said = {name.removeprefix("dlm_rag."): value for name, value in found.items()}
        try:
            if not said.get("fingerprint") or said.get("form") != str(COLLECTION_VERSION):
                raise ValueError
            self.info = TypeAdapter(CollectionInfo).validate_python(said)
        except ValueError:
            raise CorpusError(
                f"{self.url} was not built by this version of `dlm-rag index --to` (form "
                f"{said.get('form')}): build one of another name"
            ) from None
        return self.info

    def create(self, info: CollectionInfo) -> None:
        """Makes the collection, empty."""
        from pymilvus import DataType

        schema = self._client.create_schema(auto_id=False, enable_dynamic_field=False)
        schema.add_field("row", DataType.INT64, is_primary=True)
        for field in TEXT_FIELDS:
            schema.add_field(field, DataType.VARCHAR, max_length=MAX_TEXT_BYTES)
        schema.add_field(VECTOR_FIELD, DataType.FLOAT_VECTOR, dim=info.width)
        self._call("create_collection", schema=schema, properties=info.to_properties())

    def check_index(self, create: bool = False) -> None:
        """Raises `CorpusError` for an index that may miss the best hits. create: one that is not there."""
        index = self._call("describe_index", VECTOR_FIELD) or {}
        kind = (index.get("index_type"), index.get("metric_type"))
        if create and not index:
            params = self._client.prepare_index_params()
            params.add_index(VECTOR_FIELD, EXACT_INDEX[0], metric_type=EXACT_INDEX[1])
            self._call("create_index", params, sync=False)
        elif kind != EXACT_INDEX:
            raise CorpusError(
                f"{self.url}: its index is {kind[0]} by {kind[1]}, and not exact: make one of "
                f"{EXACT_INDEX[0]} by {EXACT_INDEX[1]}"
            )

    def load(self) -> None:
        """Has the server load the collection, and waits for that."""
        self._call("load_collection", timeout=MAX_BUILD_SECONDS)

    def finish_build(self) -> None:
        """Has the server write, index, load and count all passages, and notes that it is whole."""
        self._call("flush", timeout=MAX_BUILD_SECONDS)
        self.load()  # which waits for the index
        self.check_row_count()
        self.info = replace(self.info, finished=1)
        self._call("alter_collection_properties", self.info.to_properties())

    def check_row_count(self) -> None:
        """Raises `SearchUnavailableError` where the collection does not hold its passages."""
        if (there := self._count_rows()) != self.info.passages:
            raise base.SearchUnavailableError(
                f"{self.url} holds {there:,} of {self.info.passages:,} passages: run `dlm-rag index --to` "
                "again, which adds the missing ones"
            )

    def count_complete_rows(self) -> int:
        """How many rows are there without a gap, counted from the first."""
        rows = range(1, self.info.passages + 1)
        return bisect_left(rows, True, key=lambda count: self._count_rows(count) < count)

    def _count_rows(self, rows: int = 2**32) -> int:
        """How many of the first `rows` passages are there."""
        key = "count(*)"
        found = self._call("query", filter=f"row < {rows}", output_fields=[key], consistency_level="Strong")
        return int(found[0][key])

    def upsert_passages(
        self, start: int, passages: Sequence[Passage], vectors: Sequence[Sequence[float]]
    ) -> None:
        """Writes passages from row `start` on, with a vector each; may be repeated."""
        entities = [
            {"row": start + n, **asdict(passage), VECTOR_FIELD: vector}
            for n, (passage, vector) in enumerate(zip(passages, vectors, strict=True))
        ]
        self._call("upsert", entities)

    def search(self, vectors: list[list[float]], limit: int) -> list[base.Hits]:
        """The best `limit` hits of each vector; raises `SearchUnavailableError` for fewer."""
        size, found = max(1, min(MAX_REQUEST_ITEMS, MAX_REQUEST_HITS // limit)), []
        wanted = {"anns_field": VECTOR_FIELD, "search_params": {"metric_type": EXACT_INDEX[1]}, **_WRITTEN}
        for n in range(0, len(vectors), size):
            batch = vectors[n : n + size]
            found += self._call("search", batch, limit=limit, output_fields=["row"], **wanted)
        if any(len(hits) != min(limit, len(self)) for hits in found):
            raise base.SearchUnavailableError(f"{self.url} gives too few hits: a part may be down")
        return [[(hit["distance"], hit["row"]) for hit in hits] for hits in found]

    def _fetch_rows(self, rows: Sequence[int]) -> list[Passage]:
        """Some passages; raises `SearchUnavailableError` for one that the engine leaves out."""
        found: dict[int, Passage] = {}
        fields = ["row", *TEXT_FIELDS]
        for start in range(0, len(rows), MAX_REQUEST_ITEMS):
            keys = [*rows[start : start + MAX_REQUEST_ITEMS]]
            for entity in self._call("get", keys, output_fields=fields, **_WRITTEN):
                found[entity["row"]] = Passage(*(entity[field] for field in TEXT_FIELDS))
        if missing := [row for row in rows if row not in found]:
            raise base.SearchUnavailableError(
                f"{self.url} does not give {len(missing)} of {len(rows)} passages, first row {missing[0]}"
            )
        return [found[row] for row in rows]

    def __len__(self) -> int:
        return self.info.passages

    @property
    def fingerprint(self) -> str:
        """The corpus and the order of equals: the same wherever the collection is."""
        return f"milvus-{self.info.form}-{self.info.fingerprint}-{self.info.encoder}"

    def _call(self, method: str, *given: Any, **settings: Any) -> Any:
        """What a method of the client says of the collection; raises as the class says."""
        settings = {"timeout": self._seconds} | settings
        try:
            try:
                return getattr(self._client, method)(self.name, *given, **settings)
            except Exception as error:
                if getattr(error, "code", None) != _NOT_LOADED:
                    raise
                self._client.load_collection(self.name, timeout=self._seconds)  # the server was restarted
                return getattr(self._client, method)(self.name, *given, **settings)
        except Exception as error:
            if getattr(error, "code", None) == _COLLECTION_NOT_FOUND:
                raise CorpusError(f"{self.url} is no longer there: build it again") from None
            raise base.SearchUnavailableError(f"{self.url}: {_summarize_failure(error)}") from None

    def check_encoder(self, encoder: "TextEncoder") -> None:
        """Raises `ConfigError` where its vectors are of another model or prompt."""
        if encoder.index_folder_name != self.info.encoder:
            raise ConfigError(
                f"{self.url} holds vectors of embedding_model '{self.info.model}', not of "
                f"'{encoder.model}' as it is here, with this passage_prompt"
            )


def _summarize_failure(error: Exception) -> str:
    return " ".join(str(getattr(error, "message", error)).split())[:300]


class MilvusRetriever(base.CorpusRetriever):
    """The best passages of a collection, equal ones in corpus order; any number of threads may search."""

    def __init__(self, collection: MilvusCollection, top_k: int, encoder: "TextEncoder") -> None:
        super().__init__(collection, top_k)  # type: ignore[arg-type]  # what is read of a corpus, it has
        self._collection, self._encoder = collection, encoder

    def rank(self, queries: Sequence[base.Query], depth: int) -> list[base.Ranking]:
        limit = min(depth + EXTRA_HITS, MAX_SEARCH_HITS)
        with profile_stage("retrieve/search"):
            vectors = self._encoder.encode_queries([query.text for query in queries]).tolist()
            answers = self._collection.search(vectors, limit)
        return [[row for _, row in base.select_top_hits(hits, depth)] for hits in answers]


def check_method(url: str, method: str) -> None:
    """Raises `ConfigError` for another `retrieval.method` than dense, the one of collections."""
    if method != "dense":
        raise ConfigError(
            f"{url}: a collection is searched by vectors: set retrieval.method=dense, not {method}; for "
            "others offer the corpus by `dlm-rag retrieve-server`"
        )


def open_milvus_retriever(config: RetrievalConfig) -> base.CorpusRetriever:
    """Opens the collection of `config.url`, which it loads where it has to. Raises `UserError`."""
    url = config.url or ""
    check_method(url, config.method)
    try:
        collection = MilvusCollection(url, config.timeout)
        info = collection.describe()
        build = f"`dlm-rag index --corpus FILE --to {url} retrieval.method=dense`"
        if info is None:
            raise ConfigError(f"{url}: there is no such collection: build it with {build}")
        if not info.finished:
            raise ConfigError(f"{url} is half-built: finish it with {build}")
        if config.top_k > MAX_SEARCH_HITS - EXTRA_HITS:
            raise ConfigError(f"Milvus gives at most {MAX_SEARCH_HITS:,} passages: set top_k lower")
        collection.check_index()
        collection.load()
        collection.check_row_count()
    except base.SearchUnavailableError as error:
        reason = str(error).removeprefix(f"{url}: ")
        raise ConfigError(f"{url} cannot be searched: {reason}") from None
    from dlm_rag.retrieval.dense import TextEncoder  # after what is wrong with the collection is known

    encoder = TextEncoder(config)
    collection.check_encoder(encoder)
    return base.MultiQueryRetriever(MilvusRetriever(collection, config.top_k, encoder))


def ingest_corpus(collection: MilvusCollection, corpus: Corpus, config: RetrievalConfig) -> int:
    """Writes the passages that a collection does not have yet, in the order of rows; returns how many.

    A passage that may have been written is written again: its key stands once. Raises `UserError` for a
    collection that holds other passages or other vectors.
    """
    from dlm_rag.retrieval.dense import TextEncoder

    there, encoder = collection.describe(), TextEncoder(config)
    if there is None:
        width = encoder.encode_passages(["width"]).shape[1]
        collection.create(
            CollectionInfo(corpus.fingerprint, len(corpus), encoder.model, encoder.index_folder_name, width)
        )
        there = collection.describe()  # another may be faster
    if there is None or there.fingerprint != corpus.fingerprint:
        raise CorpusError(f"{collection.url} holds other passages than {corpus.path}: give another name")
    collection.check_encoder(encoder)
    collection.check_index(create=True)
    collection.load()  # what is not loaded cannot be counted
    start = collection.count_complete_rows()
    if there.finished and start == len(corpus):
        return 0
    with report_progress("writing passages", len(corpus), done=start) as advance:
        for row in range(start, len(corpus), WRITE_BATCH_PASSAGES):
            passages = corpus[row : row + WRITE_BATCH_PASSAGES]
            vectors = encoder.encode_passages([passage.text for passage in passages])
            collection.upsert_passages(row, passages, vectors.tolist())
            advance(len(passages))
    collection.finish_build()
    return len(corpus) - start
