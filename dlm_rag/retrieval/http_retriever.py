"""Search over HTTP, in the protocol of Search-R1's retrieval server, which many agents speak.

    POST {"queries": ["Who wrote Emma?"], "topk": 3, "return_scores": true}
    {"result": [[{"document": {"id": "emma", "contents": "Emma\\n..."}, "score": 4.2}, ...]]}

`contents` is the whole text, the title its first line. The server of this project (`dlm-rag
retrieve-server`) says under `dlm_rag` what it searches and which forms of a query it asks by; only it
is sent the parts of a query. Other servers get the text, and are identified by their URL.
"""

import hashlib
import json
from collections.abc import Hashable, Sequence
from dataclasses import replace
from typing import Any, overload

from dlm_rag.config import RetrievalConfig
from dlm_rag.errors import ConfigError, CorpusError, UserError
from dlm_rag.files.checked_json import parse_json
from dlm_rag.files.record_readers import get_field
from dlm_rag.retrieval.base import SearchUnavailableError
from dlm_rag.retrieval.corpus import Passage, parse_passage
from dlm_rag.retrieval.http_client import (
    MAX_ATTEMPT_FRACTION,
    HttpClient,
    RetryableFailure,
    UnusableAnswerError,
    call_with_retries,
)
from dlm_rag.retrieval.query import Query, as_queries

# in the environment: sent with every request, to no other server
RETRIEVAL_TOKEN_VARIABLE = "DLM_RAG_RETRIEVAL_TOKEN"
BUSY_STATUSES = (429, 502, 503, 504)  # what may pass
PROBE_QUERY = Query("Who wrote Emma?", ("Who wrote Emma?",))

# the fingerprint of a service, "" where it gives none, and the fields of `Query` that it reads
ServiceInfo = tuple[str, tuple[str, ...]]


class HttpRetriever:
    """A `Retriever` that asks a service for the `top_k` best passages; any number of threads may search.

    A search that fails raises `SearchUnavailableError`, for all of its queries. Once the service says that
    it searches other passages than at first, that is a `ConfigError`: no answer of the run can be right.
    """

    def __init__(self, config: RetrievalConfig) -> None:
        """A first search, of one attempt, tells what the service at `config.url` is.

        Raises `ConfigError` where that fails, or the environment's token or certificates cannot be used.
        """
        url = self._url = config.url or ""
        self._top_k, self._seconds = config.top_k, config.timeout
        self._client = HttpClient(url, RETRIEVAL_TOKEN_VARIABLE)
        self._service: ServiceInfo = ("", ("text",))
        try:
            _, self._service = self._ask([PROBE_QUERY], self._seconds * MAX_ATTEMPT_FRACTION)
        except (RetryableFailure, SearchUnavailableError) as error:
            reason = str(error).removeprefix(f"{url}: ")
            raise ConfigError(
                f"retrieval.url={url} cannot be searched: {reason}: is the service up, and this its URL?"
            ) from None
        # What the service says that it searches, and how.
        self.fingerprint = self._service[0] or url

    def key(self, query: Query) -> Hashable:
        return tuple(getattr(query, name) for name in self._service[1])

    @overload
    def search(self, queries: str) -> list[Passage]: ...  # type: ignore[overload-overlap]
    @overload
    def search(self, queries: Sequence[Query | str]) -> list[list[Passage]]: ...
    def search(self, queries: str | Sequence[Query | str]) -> list[Passage] | list[list[Passage]]:
        if isinstance(queries, str):
            return self.search([queries])[0]
        asked = as_queries(queries)
        found, service = call_with_retries(self._url, self._seconds, lambda s: self._ask(asked, s))
        if service != self._service:
            raise ConfigError(
                f"{self._url} searches other passages than when this run began, or in another way: answers "
                "so far are of what it was; begin again with what it is"
            )
        return found

    def _ask(self, queries: Sequence[Query], seconds: float) -> tuple[list[list[Passage]], ServiceInfo]:
        """What each query finds, and what the service is. Raises `SearchUnavailableError`, and
        `RetryableFailure` for what may pass."""
        asked: dict[str, Any] = {
            "queries": [query.text for query in queries], "topk": self._top_k, "return_scores": True
        }  # fmt: skip
        if "parts" in self._service[1]:
            asked["parts"] = [query.parts for query in queries]
        content = json.dumps(asked).encode()  # in ASCII, whatever a model has written
        try:
            status, body = self._client.send(self._url, content, seconds)
            if status in BUSY_STATUSES:
                raise RetryableFailure(self._client.describe_refusal(status, body))
            if status != 200:
                raise UnusableAnswerError(self._client.describe_refusal(status, body))
            answer = parse_json(body, "it answers no search", UserError, "answer")
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
