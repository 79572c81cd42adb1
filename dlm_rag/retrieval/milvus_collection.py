"""One collection of a Milvus: connecting, reading, searching, filling; the only file that knows pymilvus.

A passage is an entity: its key, id, title and contents, and its vectors, `sparse` (`sparse_vectors.py`) and
`dense`. A key is `build << 32 | row`: rows in corpus order, `build` a random number of the collection. So
every hit shows whether the collection is still the one that was opened.
"""

import logging
import os
import re
import secrets
import socket
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal
from urllib.parse import urlsplit

from pydantic import TypeAdapter, ValidationError

from dlm_rag.errors import ConfigError, CorpusError
from dlm_rag.nvtx_ranges import profile_stage
from dlm_rag.retrieval.base import Hits, MemoizedBatchFunction
from dlm_rag.retrieval.corpus import Passage
from dlm_rag.retrieval.retry import (
    MAX_ATTEMPT_FRACTION,
    RetryableFailure,
    SearchUnavailableError,
    call_with_retries,
)
from dlm_rag.retrieval.sparse_vectors import SPARSE_VECTOR_VERSION

TEXT_FIELDS = ("id", "title", "contents")
# of vectors, by kind
VECTOR_FIELDS = {"bm25": ("sparse",), "dense": ("dense",), "hybrid": ("sparse", "dense")}
EXACT_INDEXES = {"sparse": "SPARSE_INVERTED_INDEX", "dense": "FLAT"}
# DAAT_MAXSCORE skips what cannot be among the best, and nothing else.
INDEX_PARAMS: dict[str, dict[str, Any]] = {"sparse": {"inverted_index_algo": "DAAT_MAXSCORE"}, "dense": {}}
SEARCH_PARAMS: dict[str, dict[str, Any]] = {"sparse": {"drop_ratio_search": 0.0}, "dense": {}}
# Limits of the engine: hits of a search, bytes of a text.
MAX_SEARCH_HITS, MAX_TEXT_BYTES = 16_384, 65_535
MAX_REQUEST_ITEMS = 1000  # vectors of a search, keys of a query
MAX_REQUEST_HITS = 1_000_000  # of a search: less than the 64 MiB that gRPC takes
MAX_CONNECT_SECONDS = 1.0  # a wrong address is reported within two
MAX_BUILD_SECONDS = 600.0  # for an index, for loading
# A channel that waits up to 2 minutes, as by default, is still closed when the server is back.
GRPC_CHANNEL_OPTIONS = {f"grpc.{name}_reconnect_backoff_ms": 100 for name in ("initial", "max")} | {
    "grpc.keepalive_time_ms": 600_000,  # some servers hang up on who pings often; calls have deadlines
    "grpc.keepalive_permit_without_calls": 0,
    "grpc.use_local_subchannel_pool": 1,  # or a new channel shares the waits of an old one
}
_COLLECTION_NOT_FOUND, _NOT_LOADED = 100, 101  # codes of the engine


@dataclass(frozen=True)
class CollectionInfo:
    """What a collection says about itself, in its properties: some servers drop descriptions."""

    fingerprint: str  # of the corpus
    kind: Literal["bm25", "dense", "hybrid"]  # which vectors it has
    passages: int
    form: int = SPARSE_VECTOR_VERSION
    build: int = 0  # of 20 bits: a key is then exact in JavaScript too
    finished: int = 0
    model: str = ""  # that made the dense vectors
    encoder: str = ""  # digest of its weights and of the passage prompt
    width: int = 0  # of a dense vector

    def to_properties(self) -> dict[str, str]:
        return {f"dlm_rag.{name}": str(value) for name, value in asdict(self).items() if value}


class MilvusCollection:
    """A collection by its URL, `milvus://HOST:PORT/NAME` or `milvus://HOST:PORT/DATABASE/NAME`.

    Calls have deadlines and are tried again as `call_with_retries` has it. They raise
    `SearchUnavailableError` for what may pass, `CorpusError` for a collection that is not what it should
    be, or was.
    """

    info: CollectionInfo  # once `describe` has found it

    def __init__(self, url: str, seconds: float) -> None:
        """seconds: that a call may take. Raises `ConfigError` where no Milvus answers."""
        self.url, self._seconds = url, seconds
        self._read: MemoizedBatchFunction[int, Passage] = MemoizedBatchFunction(
            lambda rows: [entity["passage"] for entity in self.fetch_rows(rows)]
        )
        parts = urlsplit(url)
        *database, self.name = parts.path.strip("/").split("/")
        if not re.fullmatch(r"[A-Za-z_]\w{0,254}", self.name, re.ASCII) or len(database) > 1:
            raise ConfigError(
                f"{url} names no collection: write milvus://HOST:PORT/NAME, NAME of letters, digits, _"
            )
        host, port = parts.hostname or "", parts.port or 19530
        os.environ.setdefault("GRPC_VERBOSITY", "NONE")  # read by the import
        logging.getLogger("pymilvus").setLevel(logging.CRITICAL + 1)  # a traceback for every failure
        local = host == "localhost" or host.startswith("127.")
        try:
            socket.create_connection((host, port), min(MAX_CONNECT_SECONDS, seconds)).close()
            from pymilvus import MilvusClient  # takes a second to import

            self._client = MilvusClient(
                f"http://{host}:{port}", token=os.environ.get("MILVUS_TOKEN", ""),
                db_name="".join(database), timeout=seconds * MAX_ATTEMPT_FRACTION, dedicated=True,
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
        """What the collection says of itself, from then on in `info`; None where there is none.

        Raises `CorpusError` where `dlm-rag index` did not make it, or in another form.
        """
        if not self._call("has_collection"):
            return None
        found = self._call("describe_collection").get("properties") or {}
        said = {name.removeprefix("dlm_rag."): value for name, value in found.items()}
        if not said.get("fingerprint") or said.get("form") != str(SPARSE_VECTOR_VERSION):
            raise CorpusError(
                f"{self.url} was not built by this version of `dlm-rag index --to` (form "
                f"{said.get('form')}): build one of another name"
            )
        try:
            self.info = TypeAdapter(CollectionInfo).validate_python(said)
        except ValidationError:
            raise CorpusError(f"{self.url} has damaged properties: drop it, and build it again") from None
        return self.info

    def create(self, info: CollectionInfo) -> None:
        """Makes the collection, empty, with a `build` of its own."""
        from pymilvus import DataType

        schema = self._client.create_schema(auto_id=False, enable_dynamic_field=False)
        schema.add_field("row", DataType.INT64, is_primary=True)
        for field in TEXT_FIELDS:
            schema.add_field(field, DataType.VARCHAR, max_length=MAX_TEXT_BYTES)
        if info.kind != "dense":
            schema.add_field("sparse", DataType.SPARSE_FLOAT_VECTOR)
        if info.kind != "bm25":
            schema.add_field("dense", DataType.FLOAT_VECTOR, dim=info.width)
        properties = replace(info, build=secrets.randbits(20)).to_properties()
        self._call("create_collection", schema=schema, properties=properties)

    def check_indexes(self, create: bool = False) -> None:
        """Raises `CorpusError` for an index that is not exact: it may miss the best hits.

        create: those that are not there yet.
        """
        fields = VECTOR_FIELDS[self.info.kind]
        # All are described first: where a single index exists, a server may give it for any name.
        found = {field: self._call("describe_index", field) or {} for field in fields}
        for field, index in found.items():
            kind = (index.get("index_type"), index.get("metric_type"))
            if create and not index:
                params = self._client.prepare_index_params()
                params.add_index(field, EXACT_INDEXES[field], metric_type="IP", params=INDEX_PARAMS[field])
                self._call("create_index", params, sync=False)
            elif kind != (EXACT_INDEXES[field], "IP"):
                raise CorpusError(
                    f"{self.url}: the index of its field '{field}' is {kind[0]} by {kind[1]}, and not "
                    f"exact: make one of {EXACT_INDEXES[field]} by IP"
                )

    def load(self) -> None:
        """Has the server load the collection, and waits for that."""
        self._call("load_collection", timeout=MAX_BUILD_SECONDS)

    def finish_build(self) -> None:
        """Has the server write, index, load and count all passages, and notes that it is whole."""
        self._call("flush", timeout=MAX_BUILD_SECONDS)
        self.load()  # which waits for the indexes
        self.check_row_count()
        self.info = replace(self.info, finished=1)
        self._call("alter_collection_properties", self.info.to_properties())

    def check_row_count(self) -> None:
        """Raises `SearchUnavailableError` where the collection does not hold its passages."""
        if (there := self.count_rows()) != self.info.passages:
            raise SearchUnavailableError(
                f"{self.url} holds {there:,} of {self.info.passages:,} passages: run `dlm-rag index --to` "
                "again, which adds the missing ones"
            )

    def count_rows(self, rows: int = 2**32) -> int:
        """How many of the first `rows` passages are there."""
        asked = f"row >= {self._key(0)} and row < {self._key(0) + rows}"
        found = self._call("query", filter=asked, output_fields=["count(*)"], consistency_level="Strong")
        return int(found[0]["count(*)"])

    def upsert_passages(
        self, start: int, passages: Sequence[Passage], vectors: dict[str, Sequence[Any]]
    ) -> None:
        """Writes passages from row `start` on, with a vector each for every field; may be repeated."""
        entities = [{"row": self._key(start + n), **asdict(passage)} for n, passage in enumerate(passages)]
        for n, entity in enumerate(entities):
            entity |= {field: column[n] for field, column in vectors.items()}
        self._call("upsert", entities)

    def search(self, field: str, vectors: list[Any], limit: int) -> list[Hits]:
        """The best `limit` hits of each vector; of sparse ones those that share a word."""
        size = max(1, min(MAX_REQUEST_ITEMS, MAX_REQUEST_HITS // limit))

        def search(seconds: float) -> list[Any]:
            sent = [
                self._client.search(
                    self.name, vectors[n : n + size], anns_field=field, limit=limit, output_fields=["row"],
                    search_params={"metric_type": "IP", "params": SEARCH_PARAMS[field]}, timeout=seconds,
                    consistency_level="Bounded", _async=True,  # nothing is written any more
                )
                for n in range(0, len(vectors), size)
            ]  # fmt: skip
            return [hits for part in sent for hits in part.result()]

        return [
            [
                (hit["distance"], self._row(hit["row"]))
                for hit in hits
                if field == "dense" or hit["distance"] > 0
            ]
            for hits in self._call(search)
        ]

    def fetch_rows(self, rows: Sequence[int], fields: Sequence[str] = ()) -> list[dict[str, Any]]:
        """Of each row "passage", a `Passage`, and its vectors `fields`.

        Raises `SearchUnavailableError` for missing rows: the engine leaves them out silently.
        """
        found: dict[int, dict[str, Any]] = {}
        for start in range(0, len(rows), MAX_REQUEST_ITEMS):
            keys = [self._key(row) for row in rows[start : start + MAX_REQUEST_ITEMS]]
            names = ["row", *TEXT_FIELDS, *fields]
            asked = {"filter": f"row in {keys}", "output_fields": names, "consistency_level": "Bounded"}
            for entity in self._call("query", **asked):
                entity["passage"] = Passage(*(entity[field] for field in TEXT_FIELDS))
                found[self._row(entity["row"])] = entity
        if missing := [row for row in rows if row not in found]:
            raise SearchUnavailableError(
                f"{self.url} does not give {len(missing)} of {len(rows)} passages, first row {missing[0]}"
            )
        return [found[row] for row in rows]

    # What a `CorpusRetriever` needs of a corpus.

    def __len__(self) -> int:
        return self.info.passages

    @property
    def fingerprint(self) -> str:
        """The corpus and the order of equals: the same wherever the collection is."""
        return f"milvus-{self.info.form}-{self.info.fingerprint}"

    def read_passages(self, rows: Sequence[int]) -> list[Passage]:
        """The passages of some rows, each fetched once; raises as `fetch_rows` does."""
        with profile_stage("retrieve/search"):
            return self._read(rows)

    def _key(self, row: int) -> int:
        return self.info.build << 32 | row

    def _row(self, key: int) -> int:
        """The row of a key; raises `CorpusError` where it is of another build."""
        build, row = key >> 32, key & 0xFFFFFFFF
        if build != self.info.build or row >= self.info.passages:
            raise self._make_changed_error()
        return row

    def _make_changed_error(self) -> CorpusError:
        return CorpusError(
            f"{self.url} is no longer the collection that was opened: answers so far are of that one; "
            "begin again with the one that is there"
        )

    def _call(self, method: str | Callable[[float], Any], *given: Any, **settings: Any) -> Any:
        """What a method of the client says of the collection; raises as the class says.

        method: its name, or what is called with the seconds that it may take.
        """

        def attempt(seconds: float) -> Any:
            try:
                if not isinstance(method, str):
                    return method(seconds)
                return getattr(self._client, method)(self.name, *given, **{"timeout": seconds} | settings)
            except Exception as error:
                code = getattr(error, "code", None)
                if code == _COLLECTION_NOT_FOUND:
                    raise self._make_changed_error() from None
                if code == _NOT_LOADED:  # the server was restarted; the next attempt shows whether it has
                    self._client.load_collection(self.name, timeout=seconds, _async=True)
                raise RetryableFailure(_summarize_failure(error)) from None

        return call_with_retries(self.url, self._seconds, attempt)


def _summarize_failure(error: Exception) -> str:
    return " ".join(str(getattr(error, "message", error)).split())[:300]
