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
from dataclasses import asdict, dataclass, fields, replace
from typing import Any, TypeVar
from urllib.parse import urlsplit

from dlm_rag.errors import ConfigError, CorpusError, suggest_nearest
from dlm_rag.progress import show_status
from dlm_rag.retrieval.base import Hits
from dlm_rag.retrieval.corpus import Passage
from dlm_rag.retrieval.retry import CircuitBreaker, RetryableFailure, SearchUnavailableError
from dlm_rag.retrieval.sparse_vectors import SPARSE_VECTOR_VERSION

T = TypeVar("T")

TEXT_FIELDS = ("id", "title", "contents")
# of vectors, by kind
VECTOR_FIELDS = {"bm25": ("sparse",), "dense": ("dense",), "hybrid": ("sparse", "dense")}
MAX_SEARCH_HITS = 16_384  # that a search gives: a limit of the engine
MAX_TEXT_BYTES = 65_535  # of a text, another
MAX_REQUEST_ITEMS = 1000  # vectors of a search, keys of a query
VECTOR_TYPES = {"sparse": "SPARSE_FLOAT_VECTOR", "dense": "FLOAT_VECTOR"}
EXACT_INDEXES = {"sparse": "SPARSE_INVERTED_INDEX", "dense": "FLAT"}
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
    kind: str  # bm25, dense, hybrid: which vectors it has
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

    Calls have deadlines and are tried again as `CircuitBreaker` has it. They raise
    `SearchUnavailableError` for what may pass, `CorpusError` for a collection that is not what it should
    be, or was.
    """

    info: CollectionInfo  # once `describe` has found it

    def __init__(self, url: str, seconds: float) -> None:
        """seconds: that a call may take. Raises `ConfigError` where no Milvus answers."""
        self.url, self._breaker = url, CircuitBreaker(url, seconds)
        parts = urlsplit(url)
        *database, self.name = parts.path.strip("/").split("/")
        if not re.fullmatch(r"[A-Za-z_]\w{0,254}", self.name, re.ASCII) or len(database) > 1:
            raise ConfigError(
                f"{url} names no collection: write milvus://HOST:PORT/NAME, NAME of letters, digits, _"
            )
        host, port = parts.hostname or "", parts.port or 19530
        if ":" in host:  # pymilvus takes its brackets away, and gRPC then finds no port
            raise ConfigError(
                f"{url} cannot be searched: pymilvus takes no IPv6 address: write a name for it"
            )
        try:  # before a second of imports
            socket.create_connection((host, port), min(MAX_CONNECT_SECONDS, seconds)).close()
        except OSError as error:
            raise ConfigError(f"{url} cannot be searched: {error.strerror or 'no answer'}") from None
        os.environ.setdefault("GRPC_VERBOSITY", "NONE")  # read by the import
        try:
            from pymilvus import MilvusClient
        except ImportError:
            raise ConfigError(f"{url} needs pymilvus: pip install 'dlm_rag[milvus]'") from None
        logging.getLogger("pymilvus").setLevel(logging.CRITICAL + 1)  # a traceback for every failure
        local = host == "localhost" or host.startswith("127.")
        try:
            self._client = MilvusClient(
                f"http://{host}:{port}", token=os.environ.get("MILVUS_TOKEN", ""),
                db_name="".join(database), timeout=self._breaker.attempt_seconds, dedicated=True,
                grpc_options=GRPC_CHANNEL_OPTIONS | ({"grpc.enable_http_proxy": 0} if local else {}),
            )  # fmt: skip
        except Exception as error:
            raise ConfigError(
                f"{url} cannot be searched: the server there does not answer as a Milvus does, or needs "
                f"MILVUS_TOKEN=USER:PASSWORD in the environment ({_summarize_failure(error)})"
            ) from None

    def describe(self) -> CollectionInfo | None:
        """What the collection says of itself, from then on in `info`; None where there is none.

        Raises `CorpusError` where `dlm-rag index` did not make it, or in another form.
        """
        found = self._call(self._describe_raw)
        if found is None:
            return None
        said = found.get("properties") or {}
        if not said.get("dlm_rag.fingerprint") or said.get("dlm_rag.form") != str(SPARSE_VECTOR_VERSION):
            raise CorpusError(
                f"{self.url} was not built by this version of `dlm-rag index --to` (form "
                f"{said.get('dlm_rag.form')}): build one of another name"
            )
        try:
            types: Any = {field.name: field.type for field in fields(CollectionInfo)}
            info = CollectionInfo(
                **{name: kind(said.get(f"dlm_rag.{name}", kind())) for name, kind in types.items()}
            )
            wanted = {field: VECTOR_TYPES[field] for field in VECTOR_FIELDS[info.kind]}
        except (ValueError, KeyError):
            raise CorpusError(f"{self.url} has damaged properties: drop it, and build it again") from None
        there = {field["name"]: field["type"].name for field in found["fields"]}
        for field, kind in ({"row": "INT64"} | dict.fromkeys(TEXT_FIELDS, "VARCHAR") | wanted).items():
            if there.get(field) != kind:
                raise CorpusError(
                    f"{self.url}: its field '{field}' should be {kind}, and is "
                    f"{there.get(field, 'not there')}: drop the collection, and build it again"
                )
        self.info = info
        return info

    def _describe_raw(self, seconds: float) -> Any:
        try:
            return self._client.describe_collection(self.name, timeout=seconds)
        except Exception as error:
            if getattr(error, "code", None) == _COLLECTION_NOT_FOUND:
                return None
            raise

    def suggest_name(self) -> str:
        """The most similar name of a collection that is there, in words, or nothing."""
        names = self._call(lambda seconds: self._client.list_collections(timeout=seconds))
        return suggest_nearest(self.name, names)

    def check_indexes(self) -> None:
        """Raises `CorpusError` for an index that is not in `EXACT_INDEXES`: it may miss the best hits."""
        for field in VECTOR_FIELDS[self.info.kind]:
            found = self._call_client("describe_index", field) or {}
            if (found.get("index_type"), found.get("metric_type")) != (EXACT_INDEXES[field], "IP"):
                raise CorpusError(
                    f"{self.url}: the index of its field '{field}' is {found.get('index_type')} by "
                    f"{found.get('metric_type')}, and not exact: make one of {EXACT_INDEXES[field]} by IP"
                )

    def load(self) -> None:
        """Has the server load the collection, and waits for that."""
        show_status(f"{self.url}: loading the collection")
        self._call_client("load_collection", timeout=MAX_BUILD_SECONDS)
        show_status()

    def create(self, info: CollectionInfo) -> None:
        """Makes the collection, empty, unless another process was faster: `describe` tells whose it is."""
        from pymilvus import DataType

        schema = self._client.create_schema(auto_id=False, enable_dynamic_field=False)
        schema.add_field("row", DataType.INT64, is_primary=True)
        for field in TEXT_FIELDS:
            schema.add_field(field, DataType.VARCHAR, max_length=MAX_TEXT_BYTES)
        for field in VECTOR_FIELDS[info.kind]:
            size = {"dim": info.width} if field == "dense" else {}
            schema.add_field(field, DataType[VECTOR_TYPES[field]], **size)
        settings = {
            "schema": schema,
            "properties": replace(info, build=secrets.randbits(20)).to_properties(),
        }

        def create(seconds: float) -> None:
            if self._describe_raw(seconds) is None:
                self._client.create_collection(self.name, timeout=seconds, **settings)

        self._call(create)

    def create_indexes(self) -> None:
        """The indexes that are not there yet."""
        # All are described first: where a single index exists, a server may give it for any name.
        found = {
            field: self._call_client("describe_index", field) for field in VECTOR_FIELDS[self.info.kind]
        }
        for field, index in found.items():
            if not index:
                params = self._client.prepare_index_params()
                # An exact search: DAAT_MAXSCORE skips what cannot be among the best, and nothing else.
                options = {"inverted_index_algo": "DAAT_MAXSCORE"} if field == "sparse" else {}
                params.add_index(field, index_type=EXACT_INDEXES[field], metric_type="IP", params=options)
                self._call_client("create_index", params, sync=False)

    def finish_build(self) -> None:
        """Has the server write, index, load and count all passages, and notes that it is whole."""
        self._call_client("flush", timeout=MAX_BUILD_SECONDS)
        self.load()  # which waits for the indexes
        self.check_row_count()
        self.info = replace(self.info, finished=1)
        self._call_client("alter_collection_properties", self.info.to_properties())

    def check_row_count(self) -> None:
        """Raises `SearchUnavailableError` where the collection does not hold its passages."""
        if (there := self.count_rows()) != self.info.passages:
            raise SearchUnavailableError(
                f"{self.url} holds {there:,} of {self.info.passages:,} passages: run `dlm-rag index --to` "
                "again, which adds the missing ones"
            )

    def count_rows(self, rows: int | None = None) -> int:
        """How many of the first `rows` passages are there; None: how many entities at all."""
        first = self._key(0)
        asked = "" if rows is None else f"row >= {first} and row < {first + rows}"
        found = self._call_client(
            "query", filter=asked, output_fields=["count(*)"], consistency_level="Strong"
        )
        return int(found[0]["count(*)"])

    def upsert_passages(
        self, start: int, passages: Sequence[Passage], vectors: dict[str, Sequence[Any]]
    ) -> None:
        """Writes passages from row `start` on, with a vector each for every field; may be repeated."""
        entities: list[dict[str, Any]] = [
            {"row": self._key(start + n), "id": p.id, "title": p.title, "contents": p.contents}
            | {field: column[n] for field, column in vectors.items()}
            for n, p in enumerate(passages)
        ]
        self._call_client("upsert", entities)

    def search(self, asked: dict[str, Sequence[Any]], limit: int) -> dict[str, list[Hits]]:
        """Field -> the best `limit` hits of each of its vectors, all asked for together: one round trip."""

        def send(field: str, vectors: Sequence[Any], seconds: float) -> Any:
            return self._client.search(
                self.name, list(vectors), anns_field=field, limit=limit, output_fields=["row"],
                search_params={"metric_type": "IP", "params": _SEARCH_PARAMS[field]}, timeout=seconds,
                consistency_level="Bounded", _async=True,  # nothing is written any more
            )  # fmt: skip

        def search(seconds: float) -> dict[str, list[Hits]]:
            sent = {
                field: [send(field, batch, seconds) for batch in _split(vectors)]
                for field, vectors in asked.items()
            }
            return {
                field: [self._read_hits(field, hits) for request in requests for hits in request.result()]
                for field, requests in sent.items()
            }

        return self._call(search)

    def _read_hits(self, field: str, found: Any) -> Hits:
        """Of sparse vectors those that share a word with what was asked, whatever an engine adds."""
        hits = [(hit["distance"], self._row(hit["row"])) for hit in found]
        return [hit for hit in hits if hit[0] > 0] if field == "sparse" else hits

    def fetch_passages(self, rows: Sequence[int], extra: Sequence[str] = ()) -> dict[int, dict[str, Any]]:
        """The `Passage` of each row under "passage", and its fields `extra`.

        Raises `SearchUnavailableError` where some are not there: the engine leaves them out silently.
        """
        found: dict[int, dict[str, Any]] = {}
        for batch in _split(rows):
            for entity in self._call_client(
                "query", filter=f"row in {[self._key(row) for row in batch]}",
                output_fields=["row", *TEXT_FIELDS, *extra], consistency_level="Bounded",
            ):  # fmt: skip
                passage = Passage(*(entity[field] for field in TEXT_FIELDS))
                found[self._row(entity["row"])] = {"passage": passage} | {f: entity[f] for f in extra}
        if missing := [row for row in rows if row not in found]:
            raise SearchUnavailableError(
                f"{self.url} does not give {len(missing)} of {len(rows)} passages, first row {missing[0]}"
            )
        return found

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

    def _call(self, ask: Callable[[float], T]) -> T:
        """What `ask` returns, which is given the seconds that it may take; raises as the class says."""

        def attempt(seconds: float) -> T:
            try:
                return ask(seconds)
            except CorpusError:
                raise
            except Exception as error:
                code = getattr(error, "code", None)
                if code == _COLLECTION_NOT_FOUND:
                    raise self._make_changed_error() from None
                if code == _NOT_LOADED:  # the server was restarted; the next attempt shows whether it has
                    self._client.load_collection(self.name, timeout=seconds, _async=True)
                raise RetryableFailure(_summarize_failure(error)) from None

        return self._breaker.call(attempt)

    def _call_client(self, method: str, *given: Any, **settings: Any) -> Any:
        """What a method of the client says of the collection."""
        ask = getattr(self._client, method)
        return self._call(lambda seconds: ask(self.name, *given, **{"timeout": seconds} | settings))


_SEARCH_PARAMS: dict[str, dict[str, Any]] = {"sparse": {"drop_ratio_search": 0.0}, "dense": {}}


def _split(items: Sequence[T]) -> list[Sequence[T]]:
    return [items[n : n + MAX_REQUEST_ITEMS] for n in range(0, len(items), MAX_REQUEST_ITEMS)]


def _summarize_failure(error: BaseException) -> str:
    """gRPC's status, in words, in an error of pymilvus or in what led to it; otherwise its message."""
    inner: BaseException | None = error
    while inner is not None:
        code: Any = getattr(inner, "code", None)
        code = code() if callable(code) else code
        if type(code).__name__ == "StatusCode":
            return (
                "no answer in time"
                if code.name == "DEADLINE_EXCEEDED"
                else f"no connection ({code.value[1]})"
            )
        inner = inner.__cause__
    return " ".join(str(getattr(error, "message", error)).split())[:300]
