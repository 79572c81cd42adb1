"""One collection of a Milvus: connecting, reading, searching, filling; the only file that knows pymilvus.

A passage is an entity: its key, id, title and contents, and its vectors, `sparse` (`sparse_vectors.py`) and
`dense`. A key is `build << 32 | row`: rows in corpus order, `build` a random number of the collection. So
every hit tells whether the collection is still the one that was opened, without another question.
"""

import logging
import os
import re
import secrets
import socket
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any, TypeVar
from urllib.parse import urlsplit

from dlm_rag.errors import ConfigError, CorpusError, RunError, suggest_nearest
from dlm_rag.progress import show_status
from dlm_rag.retrieval.base import Hits
from dlm_rag.retrieval.corpus import Passage
from dlm_rag.retrieval.milvus_collection_info import (
    PROPERTY_PREFIX,
    TEXT_FIELDS,
    VECTOR_FIELDS,
    CollectionInfo,
)
from dlm_rag.retrieval.retry import CircuitBreaker, RetryableFailure, SearchUnavailableError
from dlm_rag.retrieval.sparse_vectors import SPARSE_VECTOR_VERSION, SparseVector

T = TypeVar("T")
# field, vectors, how many hits each
VectorSearchRequest = tuple[str, Sequence[SparseVector] | Sequence[list[float]], int]

MAX_SEARCH_HITS = 16_384  # that a search gives: a limit of the engine
MAX_TEXT_BYTES = 65_535  # of a text, another
VECTOR_TYPES = {"sparse": "SPARSE_FLOAT_VECTOR", "dense": "FLOAT_VECTOR"}
# An exact search each. DAAT_MAXSCORE skips what cannot be among the best, and nothing else.
EXACT_INDEXES = {
    "sparse": ("SPARSE_INVERTED_INDEX", {"inverted_index_algo": "DAAT_MAXSCORE"}),
    "dense": ("FLAT", {}),
}
MAX_CONNECT_SECONDS = 1.0  # a wrong address is reported within two
MAX_BUILD_WAIT_SECONDS = 600.0  # for an index, for loading
# A channel that waits up to 2 minutes, as by default, is still closed when the server is back.
GRPC_CHANNEL_OPTIONS = {f"grpc.{name}_reconnect_backoff_ms": 100 for name in ("initial", "max")} | {
    "grpc.keepalive_time_ms": 600_000,  # some servers hang up on who pings often; calls have deadlines
    "grpc.keepalive_permit_without_calls": 0,
    "grpc.use_local_subchannel_pool": 1,  # or a new channel shares the waits of an old one
}
_MAX_REQUEST_ITEMS = 1000  # vectors of a search, keys of a query
_NO_CONNECTION, _COLLECTION_NOT_FOUND, _NOT_LOADED = 2, 100, 101  # codes of the engine
# it starts, stops, recovers, is too busy; the unexpected
_TRANSIENT_CODES = {*range(1, 13), 103, 106, 65_535}


class MilvusCollection:
    """A collection by its URL, `milvus://HOST:PORT/NAME` or `milvus://HOST:PORT/DATABASE/NAME`.

    Calls have deadlines and are tried again as `CircuitBreaker` has it. They raise
    `SearchUnavailableError` for what may pass, `CorpusError` for a collection that is not what it should
    be, or was.
    """

    def __init__(self, url: str, seconds: float) -> None:
        """seconds: that a call may take. Raises `ConfigError` where no Milvus answers."""
        self.url, self._link = url, CircuitBreaker(url, seconds)
        parts = urlsplit(url)
        *database, self.name = parts.path.strip("/").split("/")
        if not re.fullmatch(r"[A-Za-z_]\w{0,254}", self.name, re.ASCII) or len(database) > 1:
            raise ConfigError(
                f"{url} names no collection: write milvus://HOST:PORT/NAME, NAME of letters, digits, _"
            )
        self.facts = CollectionInfo("", "", 0)
        host, port = parts.hostname or "", parts.port or 19530
        if ":" in host:  # pymilvus takes its brackets away, and gRPC then finds no port
            why = "pymilvus takes no IPv6 address: write a name for it"
            raise ConfigError(f"{url} cannot be searched: {why}")
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
        near = host == "localhost" or host.startswith("127.")
        try:
            self._client = MilvusClient(
                f"http://{host}:{port}",
                token=os.environ.get("MILVUS_TOKEN", ""),
                db_name="".join(database),
                timeout=self._link.attempt_seconds,
                dedicated=True,
                grpc_options=GRPC_CHANNEL_OPTIONS | ({"grpc.enable_http_proxy": 0} if near else {}),
            )
        except Exception as error:
            raise ConfigError(f"{url} cannot be searched: {_explain_no_connection(error)}") from None

    def describe(self) -> CollectionInfo | None:
        """What the collection says of itself, from then on in `facts`; None where there is none.

        Raises `CorpusError` where `dlm-rag index` did not make it, or in another form.
        """
        found = self._call(self._describe_raw)
        if found is None:
            return None
        properties = found.get("properties") or {}
        if not properties.get(f"{PROPERTY_PREFIX}fingerprint"):
            raise CorpusError(f"{self.url} does not say what it holds: build one with `dlm-rag index --to`")
        if (form := properties.get(f"{PROPERTY_PREFIX}form")) != str(SPARSE_VECTOR_VERSION):
            raise CorpusError(
                f"{self.url} has form {form}, and this version knows form {SPARSE_VECTOR_VERSION}: build "
                "one of another "
                "name with `dlm-rag index --to`"
            )
        try:
            info = CollectionInfo.from_properties(properties)
            wanted = {field: VECTOR_TYPES[field] for field in VECTOR_FIELDS[info.kind]}
        except (ValueError, KeyError):
            raise CorpusError(f"{self.url} has damaged properties: drop it, and build it again") from None
        there = {field["name"]: field["type"].name for field in found["fields"]}
        for field, kind in ({"row": "INT64"} | dict.fromkeys(TEXT_FIELDS, "VARCHAR") | wanted).items():
            if there.get(field) != kind:
                raise CorpusError(
                    f"{self.url} has a schema that does not fit: its field '{field}' should be {kind}, and "
                    f"is {there.get(field, 'not there')}: drop it, and build it again"
                )
        self.facts = info
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
        for field, found in self._indexes():
            kind, metric = found.get("index_type"), found.get("metric_type")
            if (kind, metric) != (EXACT_INDEXES[field][0], "IP"):
                raise CorpusError(
                    f"{self.url}: the index of its field '{field}' is {kind} by {metric}, and not exact: "
                    f"drop that index, and make one of {EXACT_INDEXES[field][0]} by IP"
                )

    def _indexes(self) -> list[tuple[str, dict[str, Any]]]:
        """The index of each field of vectors, as the server describes it; empty where there is none."""
        fields = VECTOR_FIELDS[self.facts.kind]
        return [(field, self._call_client("describe_index", field) or {}) for field in fields]

    def load(self) -> None:
        """Has the server load the collection, and waits for that."""
        show_status(f"{self.url}: loading the collection")
        self._call_client("load_collection", timeout=MAX_BUILD_WAIT_SECONDS)
        show_status()

    def _load(self, seconds: float) -> None:
        self._client.load_collection(self.name, timeout=seconds, _async=True)

    def create(self, facts: CollectionInfo) -> None:
        """Makes the collection, empty, unless another process was faster: `describe` tells whose it is."""
        from pymilvus import DataType

        schema = self._client.create_schema(auto_id=False, enable_dynamic_field=False)
        schema.add_field("row", DataType.INT64, is_primary=True)
        for field in TEXT_FIELDS:
            schema.add_field(field, DataType.VARCHAR, max_length=MAX_TEXT_BYTES)
        for field in VECTOR_FIELDS[facts.kind]:
            size = {"dim": facts.width} if field == "dense" else {}
            schema.add_field(field, DataType[VECTOR_TYPES[field]], **size)
        properties = replace(facts, build=secrets.randbits(20)).to_properties()

        def ask(seconds: float) -> None:
            if self._describe_raw(seconds) is None:
                self._client.create_collection(
                    self.name, schema=schema, properties=properties, timeout=seconds
                )

        self._call(ask)

    def create_indexes(self) -> None:
        """The indexes that are not there yet."""
        for field, found in self._indexes():
            if not found:
                params = self._client.prepare_index_params()
                params.add_index(
                    field,
                    index_type=EXACT_INDEXES[field][0],
                    metric_type="IP",
                    params=EXACT_INDEXES[field][1],
                )
                self._call_client("create_index", params, sync=False)

    def finalize_build(self) -> None:
        """Has the server write, index, load and count all of it."""
        self._call_client("flush", timeout=MAX_BUILD_WAIT_SECONDS)
        show_status(f"{self.url}: building its index")
        until = time.monotonic() + MAX_BUILD_WAIT_SECONDS
        while any(int(found.get("pending_index_rows", 0)) for _, found in self._indexes()):
            if time.monotonic() > until:
                minutes = MAX_BUILD_WAIT_SECONDS / 60
                raise RunError(f"{self.url}: its index takes more than {minutes:.0f} min: try again later")
            time.sleep(0.2)
        self.load()
        self.check_row_count()

    def mark_finished(self) -> None:
        """Notes in the collection that it is whole."""
        self.facts = replace(self.facts, finished=1)
        self._call_client("alter_collection_properties", self.facts.to_properties())

    def check_row_count(self) -> None:
        """Raises `SearchUnavailableError` where the collection does not hold its passages."""
        if (there := self.count_rows(self.facts.passages, beyond=True)) != self.facts.passages:
            raise SearchUnavailableError(
                f"{self.url} holds {there:,} of {self.facts.passages:,} passages: run `dlm-rag index --to` "
                "again, which adds the missing ones"
            )

    def count_rows(self, rows: int, beyond: bool = False) -> int:
        """How many of the first `rows` passages are there; with `beyond`, how many entities at all."""
        first = self._key(0)
        asked = "" if beyond else f"row >= {first} and row < {first + rows}"
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

    def search(self, asked: Sequence[VectorSearchRequest]) -> list[list[Hits]]:
        """The hits of all vectors of every `VectorSearchRequest`, asked for together: one round trip."""

        def ask(seconds: float) -> list[list[Hits]]:
            sent = [
                [
                    self._send(field, vectors[n : n + _MAX_REQUEST_ITEMS], limit, seconds)
                    for n in range(0, len(vectors), _MAX_REQUEST_ITEMS)
                ]
                for field, vectors, limit in asked
            ]
            return [
                [self._hits(field, hits) for part in parts for hits in part.result()]
                for (field, _, _), parts in zip(asked, sent, strict=True)
            ]

        return self._call(ask)

    def _send(self, field: str, vectors: Sequence[Any], limit: int, seconds: float) -> Any:
        params = {"drop_ratio_search": 0.0} if field == "sparse" else {}
        return self._client.search(
            self.name, list(vectors), anns_field=field, limit=limit, output_fields=["row"], timeout=seconds,
            search_params={"metric_type": "IP", "params": params},
            consistency_level="Bounded", _async=True,  # nothing is written any more
        )  # fmt: skip

    def _hits(self, field: str, found: Any) -> Hits:
        """Of sparse vectors those that share a word with what was asked, whatever an engine adds."""
        hits = [(hit["distance"], self._row(hit["row"])) for hit in found]
        return [hit for hit in hits if hit[0] > 0] if field == "sparse" else hits

    def fetch_passages(
        self, rows: Sequence[int], also: Sequence[str] = ()
    ) -> dict[int, tuple[Passage, dict[str, Any]]]:
        """The passages of some rows, and the fields `also`.

        Raises `SearchUnavailableError` where some are not there: the engine leaves them out without a word.
        """
        found: dict[int, tuple[Passage, dict[str, Any]]] = {}

        for start in range(0, len(rows), _MAX_REQUEST_ITEMS):
            keys = [self._key(row) for row in rows[start : start + _MAX_REQUEST_ITEMS]]
            fields = ["row", *TEXT_FIELDS, *also]
            for entity in self._call_client(
                "query", filter=f"row in {keys}", output_fields=fields, consistency_level="Bounded"
            ):
                texts = Passage(*(entity[field] for field in TEXT_FIELDS))
                found[self._row(entity["row"])] = texts, {field: entity[field] for field in also}
        if missing := [row for row in rows if row not in found]:
            raise SearchUnavailableError(
                f"{self.url} does not give {len(missing)} of {len(rows)} passages, first row {missing[0]}"
            )
        return found

    def _key(self, row: int) -> int:
        return self.facts.build << 32 | row

    def _row(self, key: int) -> int:
        """The row of a key; raises `CorpusError` where it is of another build."""
        build, row = key >> 32, key & 0xFFFFFFFF
        if build != self.facts.build or row >= self.facts.passages:
            raise self._make_changed_error()
        return row

    def _make_changed_error(self) -> CorpusError:
        return CorpusError(
            f"{self.url} is not the collection any more that was opened: answers so far are of that one; "
            "begin again with the one that is there"
        )

    def _call(self, ask: Callable[[float], T]) -> T:
        """What `ask` returns, which is given the seconds that it may take."""

        def attempt(seconds: float) -> T:
            try:
                return ask(seconds)
            except (CorpusError, RunError):
                raise
            except Exception as error:
                raise self._convert_error(error, seconds) from None

        return self._link.call(attempt)

    def _call_client(self, method: str, *given: Any, **settings: Any) -> Any:
        """What a method of the client says of the collection."""
        ask = getattr(self._client, method)
        return self._call(lambda s: ask(self.name, *given, **{"timeout": s} | settings))

    def _convert_error(self, error: Exception, seconds: float) -> Exception:
        """An error of pymilvus or gRPC as `CircuitBreaker` wants it."""
        status_name, code, message = _parse_error(error)
        if status_name == "DEADLINE_EXCEEDED":
            return RetryableFailure(f"no answer within {seconds:.2g} s")
        if status_name or code == _NO_CONNECTION:
            status = status_name.lower().replace("_", " ") or "it is closed"
            return RetryableFailure(f"no connection ({status})")
        if code == _NOT_LOADED:  # the server was restarted; the next attempt shows whether it has loaded
            with suppress(Exception):
                self._load(seconds)
            return RetryableFailure("the collection is not loaded")
        if code == _COLLECTION_NOT_FOUND:
            return self._make_changed_error()
        if code in _TRANSIENT_CODES or getattr(error, "retriable", False):
            return RetryableFailure(message)
        return error if code is None else SearchUnavailableError(f"{self.url}: {message}")


def _parse_error(error: BaseException) -> tuple[str, int | None, str]:
    """The name of gRPC's status in an error or in what led to it, pymilvus's code, and its message."""
    message = " ".join(str(getattr(error, "message", "")).split())[:300]
    code = getattr(error, "code", None)
    inner: BaseException | None = error
    while inner is not None:
        found: Any = getattr(inner, "code", None)
        found = found() if callable(found) else found
        if type(found).__name__ == "StatusCode":
            return found.name, None, message
        inner = inner.__cause__
    return "", code if isinstance(code, int) else None, message


def _explain_no_connection(error: Exception) -> str:
    """Why there is no connection, as the end of a sentence."""
    name, _, message = _parse_error(error)
    details = f"{message} {error.__cause__}"
    if name == "UNAUTHENTICATED" or "auth check failure" in details:
        return "it needs a login: set MILVUS_TOKEN=USER:PASSWORD in the environment"
    if "http1.x" in details or "UNIMPLEMENTED" in details:
        return "the server there is not a Milvus"
    return f"the server there does not answer as a Milvus does ({name.lower() or message})"
