"""Requests over HTTP with a deadline, a bound on bytes and words for what goes wrong; search by them.

Requests run on an event loop in a thread of its own: only there a deadline holds for name look-ups and for
headers and bodies that trickle, too. Answers must not be compressed: a small one could fill the memory.

`HttpRetriever` speaks the protocol of Search-R1's retrieval server:

    POST {"queries": ["Who wrote Emma?"], "topk": 3, "return_scores": true}
    {"result": [[{"document": {"id": "emma", "contents": "Emma\\n..."}, "score": 4.2}, ...]]}

`contents` is the whole text, the title its first line. The server of this project (`dlm-rag
retrieve-server`) says under `dlm_rag` what it searches and which forms of a query it asks by; only it
is sent the parts of a query. Other servers get the text, and are identified by their URL.
"""

import asyncio
import errno
import hashlib
import json
import os
import random
import re
import ssl
import threading
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import replace
from functools import cache
from typing import Any, TypeVar

import httpx2

from dlm_rag.config import RetrievalConfig
from dlm_rag.errors import ConfigError, CorpusError, UserError, summarize_error
from dlm_rag.files.checked_json import parse_json
from dlm_rag.files.record_readers import get_field
from dlm_rag.retrieval.base import Query, SearchUnavailableError, TextRetriever, as_queries
from dlm_rag.retrieval.corpus import Passage, parse_passage
from dlm_rag.text import normalize_whitespace, replace_control_chars

T = TypeVar("T")
IDLE_CONNECTION_SECONDS = 60.0  # after which an idle connection is closed
MAX_RESPONSE_BYTES = 2**26
INITIAL_BACKOFF_SECONDS, MAX_BACKOFF_SECONDS = 0.1, 1.0
MAX_ATTEMPT_FRACTION = 1 / 3  # of a call's seconds: an answer that never comes leaves time for others
RETRIEVAL_TOKEN_VARIABLE = "DLM_RAG_RETRIEVAL_TOKEN"  # whose token goes to no other server
BUSY_STATUSES = (429, 502, 503, 504)  # what may pass

# the fingerprint of a service, "" where it gives none, and the fields of `Query` that it reads
ServiceInfo = tuple[str, tuple[str, ...]]
_draw_jitter = random.Random().random  # of its own: waits change nothing that is drawn elsewhere


class RetryableFailure(Exception):  # noqa: N818 - a state, which an attempt may find changed
    """An attempt failed in a way that another may not: refused, cut off, too late, too busy."""


class UnusableAnswerError(RuntimeError):
    """An answer, or an address, that no other attempt would better; status: of HTTP, where that is why."""

    def __init__(self, message: str, status: int | None = None) -> None:
        super().__init__(message)
        self.status = status


class HttpClient:
    """Sends requests to one service; any number of threads may.

    token_variable: of the environment, whose bearer token goes to no other service. Raises `ConfigError`.
    """

    def __init__(self, url: str, token_variable: str, use_proxy: bool = False) -> None:
        self._variable, self._token = token_variable, os.environ.get(token_variable, "").strip()
        if not re.fullmatch(r"[!-~]*", self._token):
            raise ConfigError(f"{token_variable} must be a bearer token: printable ASCII, no blanks")
        own = {"Authorization": f"Bearer {self._token}"} if self._token else {}
        try:
            self._client = httpx2.AsyncClient(
                headers={"Content-Type": "application/json", "Accept-Encoding": "identity", **own},
                verify=httpx2.create_ssl_context() if url.startswith("https:") else False,
                timeout=None,
                limits=httpx2.Limits(max_connections=None, keepalive_expiry=IDLE_CONNECTION_SECONDS),
                trust_env=use_proxy,  # and the environment's .netrc
            )
        except (httpx2.InvalidURL, ValueError, ImportError, OSError) as error:
            raise ConfigError(
                "the environment's certificates (SSL_CERT_FILE, SSL_CERT_DIR) or its proxy (HTTP_PROXY, "
                f"HTTPS_PROXY, ALL_PROXY) cannot be used: {summarize_error(error)}"
            ) from None

    def send(
        self, url: str, body: dict[str, Any] | None, seconds: float, busy: Collection[int] = BUSY_STATUSES
    ) -> bytes:
        """Returns the answer to a GET, or to a POST of a body as JSON. Raises `RetryableFailure` for what
        may pass, as a status in `busy`, else `UnusableAnswerError`."""
        content = None if body is None else json.dumps(body).encode()
        work = self._exchange(url, content, seconds)
        exchange = asyncio.run_coroutine_threadsafe(work, _get_event_loop())
        try:
            status, answer = exchange.result()
            if 200 <= status < 300:
                return answer
            said = self.describe_refusal(status, answer)
            raise RetryableFailure(said) if status in busy else UnusableAnswerError(said, status)
        except TimeoutError:
            raise RetryableFailure(f"no answer within {seconds:.2g} s") from None
        except httpx2.HTTPError as error:
            raise RetryableFailure(replace_control_chars(_describe_connection_error(error))) from None
        except (UnicodeError, httpx2.InvalidURL):  # by Python's idna codec, before any connection
            raise UnusableAnswerError("this is not the name of a host") from None
        finally:
            exchange.cancel()  # after an interrupt

    async def _exchange(self, url: str, content: bytes | None, seconds: float) -> tuple[int, bytes]:
        method, body = "GET" if content is None else "POST", bytearray()
        stream = self._client.stream(method, url, content=content)
        async with asyncio.timeout(seconds), stream as response:
            if response.headers.get("Content-Encoding", "identity") != "identity":
                raise UnusableAnswerError("its answer is compressed, which was not asked for")
            async for part in response.aiter_raw():
                body += part
                if len(body) > MAX_RESPONSE_BYTES:
                    raise UnusableAnswerError(f"its answer has more than {MAX_RESPONSE_BYTES >> 20} MiB")
        return response.status_code, bytes(body)

    def describe_refusal(self, status: int, body: bytes) -> str:
        """What a service has said of a request that it refuses, without the token."""
        try:
            words = str(parse_json(body, "", UserError)["error"]["message"])
        except (UserError, LookupError, TypeError):
            words = body[:2000].decode(errors="replace")
        if self._token:
            words = words.replace(self._token, "***")
        words = normalize_whitespace(replace_control_chars(words[:2000]))[:200]
        hint = ""
        if status in (401, 403):
            hint = f": {self._variable} in the environment is {'not its key' if self._token else 'not set'}"
        return f"HTTP status {status}" + (f" ({words})" if words else "") + hint


def _describe_connection_error(error: BaseException) -> str:
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
    return summarize_error(error)


@cache
def _get_event_loop() -> asyncio.AbstractEventLoop:
    """The loop that all requests of this process run on."""
    loop = asyncio.new_event_loop()
    threading.Thread(target=loop.run_forever, name="requests over HTTP", daemon=True).start()
    return loop


def iterate_backoff_seconds(initial: float, longest: float) -> Iterator[float]:
    """Endless pauses between attempts, each twice the last up to `longest`, with jitter of half of it."""
    while True:
        yield initial * (0.5 + _draw_jitter())
        initial = min(2 * initial, longest)


def call_with_retries(name: str, seconds: float, ask: Callable[[float], T]) -> T:
    """What `ask` returns, which is given the seconds that it may take: at most a third of all.

    It raises `RetryableFailure` for what is tried again; anything else that it raises goes through at once.
    Raises `SearchUnavailableError`, which begins with `name`, where no answer has come within the seconds.
    """
    longest, deadline = seconds * MAX_ATTEMPT_FRACTION, time.monotonic() + seconds
    pauses = iterate_backoff_seconds(INITIAL_BACKOFF_SECONDS, MAX_BACKOFF_SECONDS)
    while True:
        try:
            return ask(min(longest, max(deadline - time.monotonic(), 0.01)))
        except RetryableFailure as error:
            pause = next(pauses)
            # An attempt without half of its time would only hide why the others failed.
            if time.monotonic() + pause + longest / 2 > deadline:
                raise SearchUnavailableError(f"{name}: {error}") from None
        time.sleep(pause)


class HttpRetriever(TextRetriever):
    """Asks a service for the `top_k` best passages; any number of threads may search.

    A search that fails raises `SearchUnavailableError`, for all of its queries. Once the service says that
    it searches other passages than at first, that is a `ConfigError`: no answer of the run can be right.
    """

    def __init__(self, config: RetrievalConfig) -> None:
        """A first search, of one attempt, tells what the service is; `ConfigError` where that fails."""
        url = self._url = config.url or ""
        self._top_k, self._seconds = config.top_k, config.timeout
        self._client = HttpClient(url, RETRIEVAL_TOKEN_VARIABLE)
        try:
            probe = as_queries(["Who wrote Emma?"])
            _, self._service = self._ask(probe, self._seconds * MAX_ATTEMPT_FRACTION)
        except (RetryableFailure, SearchUnavailableError) as error:
            reason = str(error).removeprefix(f"{url}: ")
            raise ConfigError(
                f"retrieval.url={url} cannot be searched: {reason}: is the service up, and this its URL?"
            ) from None
        self.fingerprint, self.query_fields = self._service[0] or url, self._service[1]

    def search_queries(self, queries: list[Query]) -> list[list[Passage]]:
        found, service = call_with_retries(self._url, self._seconds, lambda s: self._ask(queries, s))
        if service != self._service:
            raise ConfigError(
                f"{self._url} searches other passages than when this run began, or in another way: answers "
                "so far are of what it was; begin again with what it is"
            )
        return found

    def _ask(self, queries: Sequence[Query], seconds: float) -> tuple[list[list[Passage]], ServiceInfo]:
        """What each query finds, and what the service is; may raise `RetryableFailure`."""
        texts = [query.text for query in queries]
        asked: dict[str, Any] = {"queries": texts, "topk": self._top_k, "return_scores": True}
        if "parts" in self.query_fields:
            asked["parts"] = [query.parts for query in queries]
        try:
            data = self._client.send(self._url, asked, seconds)
            answer = parse_json(data, "it answers no search", UserError, "answer")
            results = answer.get("result") if isinstance(answer, dict) else None
            if not isinstance(results, list) or not all(isinstance(items, list) for items in results):
                raise UserError("it answers no search: 'result' is not a list of lists")
            if len(results) != len(queries):
                raise UserError(f"it gives {len(results)} results for {len(queries)} queries")
            return [self._parse_result(items) for items in results], _parse_service(answer.get("dlm_rag"))
        except (UserError, UnusableAnswerError) as error:
            raise SearchUnavailableError(f"{self._url}: {error}") from None

    def _parse_result(self, items: list[Any]) -> list[Passage]:
        """The passages of one result, each once, at most `top_k`."""
        ranked: dict[str, Passage] = {}
        for passage in map(parse_document, items):
            if ranked.setdefault(passage.id, passage) != passage:
                raise CorpusError(f"it gives two passages with the id '{passage.id}'")
        return list(ranked.values())[: self._top_k]


def _parse_service(said: Any) -> ServiceInfo:
    """What a service is by its `dlm_rag`; one that says nothing asks by the text."""
    fields = said.get("asks") if isinstance(said, dict) else None
    if fields in (["text"], ["parts"], ["text", "parts"]) and isinstance(said.get("fingerprint"), str):
        return said["fingerprint"], tuple(fields)
    return "", ("text",)


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
