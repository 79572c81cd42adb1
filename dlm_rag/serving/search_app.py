"""A corpus that others search, in the protocol that `retrieval/http_retriever.py` describes.

    GET /              what is searched, and how
    POST /retrieve     a search

What is refused, and how, is in `middleware.py`.
"""

import asyncio
import hashlib
import json
import logging
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeGuard

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from dlm_rag.config import RetrievalConfig, ServingConfig
from dlm_rag.errors import UserError, summarize_error
from dlm_rag.files.jsonl import parse_json
from dlm_rag.retrieval.base import CorpusRetriever
from dlm_rag.retrieval.query import Query
from dlm_rag.serving.middleware import AccessControl, ApiError, read_body, run_unless_disconnected

log = logging.getLogger(__name__)

SEARCH_PATH = "/retrieve"
MAX_TOP_K = 1000
MAX_QUERIES = 4096  # of a request
MAX_SEARCH_REQUEST_BYTES = 2**24  # of a request
# what a search finds
RESULT_SETTINGS = ("method", "embedding_model", "query_prompt", "passage_prompt", "fusion_depth")

# what of a query a search reads
QUERY_FIELDS_BY_KIND = {"bm25": ["text"], "dense": ["parts"], "hybrid": ["text", "parts"]}


class SearchService:
    """One retriever behind addresses; `app` is what a server runs. One search at a time, on its own thread.

    A search that no other can follow, for the corpus has changed, is the `error` that ends the server.
    """

    def __init__(
        self,
        retriever: CorpusRetriever,
        config: RetrievalConfig,
        limits: ServingConfig | None = None,
        access: AccessControl | None = None,
    ) -> None:
        """limits: of connections. access: for this machine alone where None."""
        self._retriever, self._config = retriever, config
        self.limits = limits or ServingConfig()
        settings = {name: getattr(config, name) for name in RESULT_SETTINGS}
        found = json.dumps([retriever.fingerprint, settings])
        self._said = {
            "fingerprint": hashlib.sha256(found.encode()).hexdigest(),
            "asks": QUERY_FIELDS_BY_KIND[config.method],
        }
        self.error: BaseException | None = None
        self.connections: Callable[[], int] = lambda: 0
        self._asked, self._draining = 0, False
        self._thread = ThreadPoolExecutor(1, "search")
        routes = [("GET", "/", self._about, False), ("POST", SEARCH_PATH, self._search, False)]
        self.app = (access or AccessControl()).create_app(routes)

    @property
    def idle(self) -> bool:
        """Whether nobody waits for what a search finds."""
        return not self._asked

    def drain(self) -> None:
        """Takes no more searches."""
        self._draining = True

    def close(self) -> None:
        """Ends the thread, after the search under way."""
        self._thread.shutdown(cancel_futures=True)

    async def _about(self, request: Request) -> Response:
        return JSONResponse(self.describe_service())

    async def _search(self, request: Request) -> Response:
        body = await read_body(request, MAX_SEARCH_REQUEST_BYTES)
        if self._draining or self.error is not None:
            raise ApiError(503, "the server is going down and searches no more")
        self._asked += 1
        try:
            work = asyncio.get_running_loop().run_in_executor(self._thread, self._reply, body)
            return await run_unless_disconnected(request, work)
        finally:
            self._asked -= 1

    def _reply(self, body: bytes) -> Response:
        """Called on the thread, so that what is large delays no other connection."""
        try:
            return JSONResponse(self.answer(body))
        except ApiError:
            raise
        except Exception as error:
            if isinstance(error, UserError):
                self.error = error
            else:
                log.warning("a search failed", exc_info=error)
            raise ApiError(500, f"the search failed: {summarize_error(error)}") from None

    def describe_service(self) -> dict[str, Any]:
        """What is searched, and how."""
        config = self._config
        return {
            "dlm_rag": self._said,
            "passages": len(self._retriever.corpus),
            "kind": config.method,
            "topk": config.top_k,
            "most": {"topk": MAX_TOP_K, "queries": MAX_QUERIES, "bytes": MAX_SEARCH_REQUEST_BYTES},
            "search": f"POST {SEARCH_PATH}",
        }

    def answer(self, body: bytes) -> dict[str, Any]:
        """The answer to a search; raises `ApiError`, and what the retriever raises."""
        queries, top_k, scored = self._read(body)
        results: list[Any] = []
        for ranked in self._retriever.search_scored(queries, top_k):
            documents = [
                ({"id": passage.id, "title": passage.title, "contents": passage.text}, score)
                for passage, score in ranked
            ]
            if scored:
                results.append([{"document": document, "score": score} for document, score in documents])
            else:
                results.append([document for document, _ in documents])
        return {"result": results, "dlm_rag": self._said}

    def _read(self, body: bytes) -> tuple[list[Query], int, bool]:
        """The queries of a request, their depth, and whether scores are wanted; raises `ApiError`."""
        try:
            asked = parse_json(body, "this is no search", UserError, "body")
        except UserError as error:
            raise ApiError(400, str(error)) from None
        if not isinstance(asked, dict):
            raise ApiError(400, "the body must be a JSON object with a list 'queries'")
        texts, top_k = asked.get("queries"), asked.get("topk") or self._config.top_k
        parts, scored = asked.get("parts"), asked.get("return_scores") or False
        if not _are_texts(texts):
            raise ApiError(400, "'queries' must be a list of texts")
        if len(texts) > MAX_QUERIES:
            raise ApiError(400, f"{len(texts)} queries are more than {MAX_QUERIES}: ask for fewer at once")
        if not isinstance(top_k, int) or isinstance(top_k, bool) or not 1 <= top_k <= MAX_TOP_K:
            raise ApiError(400, f"'topk' must be a whole number between 1 and {MAX_TOP_K}")
        if not isinstance(scored, bool):
            raise ApiError(400, "'return_scores' must be true or false")
        if parts is None:
            parts = [[text] if text.strip() else [] for text in texts]
        if not isinstance(parts, list) or len(parts) != len(texts) or not all(map(_are_texts, parts)):
            raise ApiError(400, "'parts' must be a list of texts for each query")
        return [Query(text, tuple(own)) for text, own in zip(texts, parts, strict=True)], top_k, scored


def _are_texts(value: Any) -> TypeGuard[list[str]]:
    return isinstance(value, list) and all(isinstance(text, str) for text in value)
