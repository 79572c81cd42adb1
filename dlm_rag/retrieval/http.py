"""Search over HTTP, in the protocol of Search-R1's retrieval server, which many agents speak.

    POST {"queries": ["Who wrote Emma?"], "topk": 3, "return_scores": true}
    {"result": [[{"document": {"id": "emma", "contents": "Emma\\n..."}, "score": 4.2}, ...]]}

`contents` is the whole text, the title its first line. The server of this project (`dlm-rag
retrieve-server`) says under `dlm_rag` what it searches and which forms of a query it asks by; it alone is
told the parts of one. Others know the text only, and are known by their URL.

Requests run on an event loop in a thread of its own: only there a deadline holds whatever a service does,
name look-ups and answers that trickle included.
"""

import asyncio
import errno
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

from dlm_rag.errors import ConfigError, CorpusError, UserError, fold_message
from dlm_rag.files.jsonl import parse_json
from dlm_rag.files.records import field_of
from dlm_rag.retrieval.corpus import Passage, parse_passage
from dlm_rag.retrieval.link import Link, SearchUnavailableError, Unreachable
from dlm_rag.retrieval.query import Query
from dlm_rag.text import fold

TOKEN = "DLM_RAG_RETRIEVAL_TOKEN"  # in the environment: goes with every request, and nowhere else
IDLE_SECONDS = 60.0  # after which an idle connection is closed
TOO_BUSY = (429, 502, 503, 504)  # what may pass
MOST_BYTES = 2**26  # of an answer
MOST_KEPT = 100_000  # passages that recur
PROBE = Query("Who wrote Emma?", ("Who wrote Emma?",))

Found = list[list[Passage]]


@dataclass(frozen=True)
class Kind:
    """What a service says that it is; one that says nothing asks by the text."""

    fingerprint: str = ""
    asks: tuple[str, ...] = ("text",)  # fields of `Query`


FOREIGN = Kind()


def open_service(url: str, top_k: int, seconds: float) -> "HttpRetriever":
    """The service at a URL, after one search; raises `ConfigError` where it gives no answer to that."""
    service = HttpRetriever(url, top_k, seconds)
    try:
        service.begin()
    except (Unreachable, SearchUnavailableError) as error:
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
        self._link, self._token = Link(url, seconds), read_token()
        headers = {"Content-Type": "application/json"}
        if self._token:
            headers["Authorization"] = f"Bearer {self._token}"
        self._client = httpx2.AsyncClient(
            headers=headers,
            verify=_certificates() if url.startswith("https:") else False,
            timeout=None,
            limits=httpx2.Limits(keepalive_expiry=IDLE_SECONDS),
            trust_env=False,  # neither its proxies nor its .netrc
        )
        self._known: dict[Passage, Passage] = {}
        self._kind = FOREIGN

    @property
    def fingerprint(self) -> str:
        """What the service says that it searches, and how; its URL where it says nothing."""
        return self._kind.fingerprint or self._url

    def begin(self) -> None:
        """One search, to see what the service is; raises `Unreachable` or `SearchUnavailableError`."""
        _, self._kind = self._ask([PROBE], self._link.attempt_seconds)

    def key(self, query: Query) -> Hashable:
        return tuple(getattr(query, name) for name in self._kind.asks)

    def forget(self, asker: str) -> None:
        """Nothing is kept for an asker."""

    def search(self, queries: Sequence[Query]) -> Found:
        """As in `Retriever`."""
        found, kind = self._link.call(lambda seconds: self._ask(queries, seconds))
        if kind != self._kind:
            raise ConfigError(
                f"{self._url} searches other passages than when this run began, or in another way: answers "
                "so far are of what it was; begin again with what it is"
            )
        return found

    def _ask(self, queries: Sequence[Query], seconds: float) -> tuple[Found, Kind]:
        """What each query finds, and what the service says that it is; raises as `Link` wants it."""
        asked: dict[str, Any] = {"queries": [query.text for query in queries], "topk": self._top_k}
        asked["return_scores"] = True
        if "parts" in self._kind.asks:
            asked["parts"] = [query.parts for query in queries]
        status, body = self._post(json.dumps(asked).encode(), seconds)
        if status != 200:
            words = fold(body.decode(errors="replace")[:2000])
            words = (words.replace(self._token, "***") if self._token else words)[:200]
            said = f"HTTP status {status}" + f" ({words})" * bool(words)
            if status in (401, 403):
                said += f": {TOKEN} in the environment is {'not its token' if self._token else 'not set'}"
            raise (Unreachable if status in TOO_BUSY else self._error)(said)
        try:
            answer = parse_json(body, "it answers no search", UserError, "answer")
        except UserError as error:
            raise self._error(str(error)) from None
        found = answer.get("result") if isinstance(answer, dict) else None
        if not isinstance(found, list):
            raise self._error("it answers no search: there is no list 'result'")
        if len(found) != len(queries):
            raise self._error(f"it gives {len(found)} results for {len(queries)} queries")
        return [self._passages(items) for items in found], _kind(answer.get("dlm_rag"))

    def _error(self, reason: str) -> SearchUnavailableError:
        return SearchUnavailableError(f"{self._url}: {reason}")

    def _passages(self, items: Any) -> list[Passage]:
        """The passages of one result, each once, at most `top_k`; those that recur are the same object."""
        ranked: dict[str, Passage] = {}
        if not isinstance(items, list):
            raise self._error("it gives a result that is no list")
        for item in items:
            try:
                passage = parse_document(item)
            except CorpusError as error:
                raise self._error(str(error)) from None
            if len(self._known) >= MOST_KEPT:
                self._known.clear()
            passage = self._known.setdefault(passage, passage)
            if ranked.setdefault(passage.id, passage) != passage:
                raise self._error(f"it gives two passages with the id '{passage.id}'")
        return list(ranked.values())[: self._top_k]

    def _post(self, body: bytes, seconds: float) -> tuple[int, bytes]:
        """Status and body of an answer that is there within the time; raises as `Link` wants it."""
        exchange = asyncio.run_coroutine_threadsafe(self._exchange(body, seconds), _event_loop())
        try:
            return exchange.result()
        except TimeoutError:
            raise Unreachable(f"no answer within {seconds:.2g} s") from None
        except httpx2.HTTPError as error:
            raise Unreachable(_reason(error)) from None
        finally:
            exchange.cancel()  # after an interrupt

    async def _exchange(self, body: bytes, seconds: float) -> tuple[int, bytes]:
        found, sent = bytearray(), self._client.stream("POST", self._url, content=body)
        async with asyncio.timeout(seconds), sent as response:
            async for part in response.aiter_bytes():
                found += part
                if len(found) > MOST_BYTES:
                    raise self._error(f"its answer has more than {MOST_BYTES >> 20} MiB")
        return response.status_code, bytes(found)


@functools.cache
def _event_loop() -> asyncio.AbstractEventLoop:
    """The loop that all requests of this process run on."""
    loop = asyncio.new_event_loop()
    threading.Thread(target=loop.run_forever, name="search by URL", daemon=True).start()
    return loop


def read_token() -> str:
    """The bearer token of the environment, "" where there is none; raises `ConfigError` for a bad one."""
    token = os.environ.get(TOKEN, "").strip()
    if not token.isascii() or not token.isprintable() or " " in token:
        raise ConfigError(f"{TOKEN} in the environment is no bearer token: it holds a blank or the like")
    return token


def _certificates() -> ssl.SSLContext:
    """Whom to trust: the system's authorities, or those that SSL_CERT_FILE or SSL_CERT_DIR name."""
    try:
        return httpx2.create_ssl_context()
    except OSError as error:  # no such file, or no certificates in it
        named = next((n for n in ("SSL_CERT_FILE", "SSL_CERT_DIR") if os.environ.get(n)), "system")
        raise ConfigError(f"the certificates of {named} cannot be read ({fold_message(error)})") from None


def _reason(error: BaseException) -> str:
    """Why there was no answer: what is at the bottom of an error of the client."""
    while below := error.__cause__ or error.__context__:
        error = below
    if isinstance(error, BaseExceptionGroup):  # of each address that the name has
        error = error.exceptions[0]
    if isinstance(error, ssl.SSLCertVerificationError):
        return f"{error.verify_message} (SSL_CERT_FILE names a file of certificates to be trusted)"
    number = getattr(error, "errno", 0)
    if number in errno.errorcode and not isinstance(error, ssl.SSLError):
        return os.strerror(number)  # asyncio has words of its own
    return fold_message(error)


def _kind(said: Any) -> Kind:
    """What a service is, by what it says under `dlm_rag`."""
    told = said if isinstance(said, dict) else {}
    fingerprint, asks = told.get("fingerprint"), told.get("asks")
    if not isinstance(fingerprint, str) or asks not in (["text"], ["parts"], ["text", "parts"]):
        return FOREIGN
    return Kind(fingerprint, tuple(asks))


def parse_document(item: Any) -> Passage:
    """The passage in an item of a result; raises `CorpusError`.

    Without scores an item is the document itself. One without an id is called by a digest of its text.
    What a document calls `contents` is the whole text, whatever it calls its title; `text` is without it.
    """
    document = item.get("document", item) if isinstance(item, dict) else item
    if not isinstance(document, dict):
        raise CorpusError("it gives a document that is no object")
    if field_of(document, "id")[1] is None:
        text = str(field_of(document, "contents")[1])
        document = {**document, "id": f"sha256-{hashlib.sha256(text.encode()).hexdigest()[:16]}"}
    passage = parse_passage(document, "it gives a document that is no passage")
    whole = document.get("contents") is not None and passage.text != passage.contents
    return replace(passage, title="") if whole else passage
