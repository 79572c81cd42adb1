"""Search over HTTP, in the protocol of Search-R1's retrieval server, which many agents speak.

    POST {"queries": ["Who wrote Emma?"], "topk": 3, "return_scores": true}
    {"result": [[{"document": {"id": "emma", "contents": "Emma\\n..."}, "score": 4.2}, ...]]}

`contents` is the whole text, the title its first line. The server of this project (`dlm-rag
retrieve-server`) says under `dlm_rag` what it searches and which forms of a query it asks by; only it
is sent the parts of a query. Other servers get the text, and are identified by their URL.

Requests run on an event loop in a thread of its own: only there a deadline holds whatever a service does,
name look-ups and answers that trickle included.
"""

import asyncio
import functools
import hashlib
import json
import os
import ssl
import threading
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import httpx2

from dlm_rag.errors import ConfigError, CorpusError, UserError, summarize_error
from dlm_rag.files.checked_json import parse_json
from dlm_rag.files.record_readers import get_field
from dlm_rag.retrieval.corpus import Passage, parse_passage
from dlm_rag.retrieval.query import Query
from dlm_rag.retrieval.retry import (
    CircuitBreaker,
    RetryableFailure,
    SearchUnavailableError,
    describe_connection_error,
)
from dlm_rag.text import normalize_whitespace

RETRIEVAL_TOKEN_VARIABLE = (
    "DLM_RAG_RETRIEVAL_TOKEN"  # in the environment: goes with every request, and nowhere else
)
IDLE_CONNECTION_SECONDS = 60.0  # after which an idle connection is closed
BUSY_STATUSES = (429, 502, 503, 504)  # what may pass
MAX_RESPONSE_BYTES = 2**26  # of an answer
MAX_CACHED_RESPONSE_PASSAGES = 100_000  # passages that recur
PROBE_QUERY = Query("Who wrote Emma?", ("Who wrote Emma?",))

SearchResults = list[list[Passage]]


@dataclass(frozen=True)
class ServiceInfo:
    """What a service says that it is; one that says nothing asks by the text."""

    fingerprint: str = ""
    query_fields: tuple[str, ...] = ("text",)  # fields of `Query`


UNKNOWN_SERVICE = ServiceInfo()


def open_http_retriever(url: str, top_k: int, seconds: float) -> "HttpRetriever":
    """The service at a URL, after one search; raises `ConfigError` where it gives no answer to that."""
    service = HttpRetriever(url, top_k, seconds)
    try:
        service.connect()
    except (RetryableFailure, SearchUnavailableError) as error:
        reason = str(error).removeprefix(f"{url}: ")
        raise ConfigError(
            f"retrieval.url={url} cannot be searched: {reason}: is the service up, and this its URL?"
        ) from None
    return service


class HttpRetriever:
    """A `Retriever` that asks a service for the `top_k` best passages; any number of threads may search.

    A search that fails raises `SearchUnavailableError`, for all of its queries. Once the service says that
    it searches other passages than at first, that is a `ConfigError`: no answer of the run can be right.
    """

    def __init__(self, url: str, top_k: int, seconds: float) -> None:
        """seconds: that a search may take, all attempts together. Nothing is sent before `begin`.

        Raises `ConfigError` for a token or for certificates of the environment that cannot be used.
        """
        self._url, self._top_k = url, top_k
        self._link, self._token = CircuitBreaker(url, seconds), read_retrieval_token()
        headers = {"Content-Type": "application/json"}
        if self._token:
            headers["Authorization"] = f"Bearer {self._token}"
        self._client = httpx2.AsyncClient(
            headers=headers,
            verify=_create_ssl_context() if url.startswith("https:") else False,
            timeout=None,
            limits=httpx2.Limits(keepalive_expiry=IDLE_CONNECTION_SECONDS),
            trust_env=False,  # neither its proxies nor its .netrc
        )
        self._known: dict[Passage, Passage] = {}
        self._kind = UNKNOWN_SERVICE

    @property
    def fingerprint(self) -> str:
        """What the service says that it searches, and how; its URL where it says nothing."""
        return self._kind.fingerprint or self._url

    def connect(self) -> None:
        """One search, to see what the service is; raises `RetryableFailure` or `SearchUnavailableError`."""
        _, self._kind = self._ask([PROBE_QUERY], self._link.attempt_seconds)

    def key(self, query: Query) -> Hashable:
        return tuple(getattr(query, name) for name in self._kind.query_fields)

    def forget(self, asker: str) -> None:
        """Nothing is kept for an asker."""

    def search(self, queries: Sequence[Query]) -> SearchResults:
        """As in `Retriever`."""
        found, kind = self._link.call(lambda seconds: self._ask(queries, seconds))
        if kind != self._kind:
            raise ConfigError(
                f"{self._url} searches other passages than when this run began, or in another way: answers "
                "so far are of what it was; begin again with what it is"
            )
        return found

    def _ask(self, queries: Sequence[Query], seconds: float) -> tuple[SearchResults, ServiceInfo]:
        """What each query finds, and what the service says that it is; raises as `CircuitBreaker` wants
        it.
        """
        asked: dict[str, Any] = {"queries": [query.text for query in queries], "topk": self._top_k}
        asked["return_scores"] = True
        if "parts" in self._kind.query_fields:
            asked["parts"] = [query.parts for query in queries]
        status, body = self._post(json.dumps(asked).encode(), seconds)
        if status != 200:
            words = normalize_whitespace(body.decode(errors="replace")[:2000])
            words = (words.replace(self._token, "***") if self._token else words)[:200]
            said = f"HTTP status {status}" + f" ({words})" * bool(words)
            if status in (401, 403):
                state = "not its token" if self._token else "not set"
                said += f": {RETRIEVAL_TOKEN_VARIABLE} in the environment is {state}"
            raise (RetryableFailure if status in BUSY_STATUSES else self._error)(said)
        try:
            answer = parse_json(body, "it answers no search", UserError, "answer")
        except UserError as error:
            raise self._error(str(error)) from None
        found = answer.get("result") if isinstance(answer, dict) else None
        if not isinstance(found, list):
            raise self._error("it answers no search: there is no list 'result'")
        if len(found) != len(queries):
            raise self._error(f"it gives {len(found)} results for {len(queries)} queries")
        return [self._passages(items) for items in found], _parse_service_info(answer.get("dlm_rag"))

    def _error(self, reason: str) -> SearchUnavailableError:
        return SearchUnavailableError(f"{self._url}: {reason}")

    def _passages(self, items: Any) -> list[Passage]:
        """The passages of one result, each once, at most `top_k`; those that recur are the same object."""
        ranked: dict[str, Passage] = {}
        if not isinstance(items, list):
            raise self._error("it gives a result that is not a list")
        for item in items:
            try:
                passage = parse_document(item)
            except CorpusError as error:
                raise self._error(str(error)) from None
            if len(self._known) >= MAX_CACHED_RESPONSE_PASSAGES:
                self._known.clear()
            passage = self._known.setdefault(passage, passage)
            if ranked.setdefault(passage.id, passage) != passage:
                raise self._error(f"it gives two passages with the id '{passage.id}'")
        return list(ranked.values())[: self._top_k]

    def _post(self, body: bytes, seconds: float) -> tuple[int, bytes]:
        """Status and body of an answer that is there within the time; raises as `CircuitBreaker` wants
        it.
        """
        exchange = asyncio.run_coroutine_threadsafe(self._exchange(body, seconds), _event_loop())
        try:
            return exchange.result()
        except TimeoutError:
            raise RetryableFailure(f"no answer within {seconds:.2g} s") from None
        except httpx2.HTTPError as error:
            raise RetryableFailure(describe_connection_error(error)) from None
        finally:
            exchange.cancel()  # after an interrupt

    async def _exchange(self, body: bytes, seconds: float) -> tuple[int, bytes]:
        found, sent = bytearray(), self._client.stream("POST", self._url, content=body)
        async with asyncio.timeout(seconds), sent as response:
            async for part in response.aiter_bytes():
                found += part
                if len(found) > MAX_RESPONSE_BYTES:
                    raise self._error(f"its answer has more than {MAX_RESPONSE_BYTES >> 20} MiB")
        return response.status_code, bytes(found)


@functools.cache
def _event_loop() -> asyncio.AbstractEventLoop:
    """The loop that all requests of this process run on."""
    loop = asyncio.new_event_loop()
    threading.Thread(target=loop.run_forever, name="search by URL", daemon=True).start()
    return loop


def read_retrieval_token() -> str:
    """The bearer token of the environment, "" where there is none; raises `ConfigError` for a bad one."""
    token = os.environ.get(RETRIEVAL_TOKEN_VARIABLE, "").strip()
    if not token.isascii() or not token.isprintable() or " " in token:
        raise ConfigError(
            f"{RETRIEVAL_TOKEN_VARIABLE} in the environment is not a bearer token: it must be "
            "printable ASCII without blanks"
        )
    return token


def _create_ssl_context() -> ssl.SSLContext:
    """Whom to trust: the system's authorities, or those that SSL_CERT_FILE or SSL_CERT_DIR name."""
    try:
        return httpx2.create_ssl_context()
    except OSError as error:  # no such file, or no certificates in it
        named = next((n for n in ("SSL_CERT_FILE", "SSL_CERT_DIR") if os.environ.get(n)), "system")
        raise ConfigError(
            f"the certificates of {named} cannot be read ({summarize_error(error)})"
        ) from None


def _parse_service_info(said: Any) -> ServiceInfo:
    """What a service is, by what it says under `dlm_rag`."""
    stated = said if isinstance(said, dict) else {}
    fingerprint, asks = stated.get("fingerprint"), stated.get("asks")
    if not isinstance(fingerprint, str) or asks not in (["text"], ["parts"], ["text", "parts"]):
        return UNKNOWN_SERVICE
    return ServiceInfo(fingerprint, tuple(asks))


def parse_document(item: Any) -> Passage:
    """The passage in an item of a result; raises `CorpusError`.

    Without scores an item is the document itself. One without an id is called by a digest of its text.
    What a document calls `contents` is the whole text, whatever it calls its title; `text` is without it.
    """
    document = item.get("document", item) if isinstance(item, dict) else item
    if not isinstance(document, dict):
        raise CorpusError("it gives a document that is not an object")
    if get_field(document, "id")[1] is None:
        text = str(get_field(document, "contents")[1])
        document = {**document, "id": f"sha256-{hashlib.sha256(text.encode()).hexdigest()[:16]}"}
    passage = parse_passage(document, "it gives a document that is not a passage")
    whole = document.get("contents") is not None and passage.text != passage.contents
    return replace(passage, title="") if whole else passage
