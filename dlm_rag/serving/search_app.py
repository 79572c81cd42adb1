"""A corpus that others search, in the protocol that `retrieval/http.py` describes."""

import hashlib
import json
import logging
from typing import Annotated, Any

from pydantic import ConfigDict, Field
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from dlm_rag.config import RetrievalConfig
from dlm_rag.errors import UserError, summarize_error
from dlm_rag.retrieval.base import CorpusRetriever, Query
from dlm_rag.serving.http_server import (
    AccessControl,
    ApiError,
    HttpService,
    RequestBody,
    parse_body,
)

log = logging.getLogger(__name__)

SEARCH_PATH = "/retrieve"
MAX_TOP_K = 1000
MAX_QUERIES = 4096  # of a request
MAX_SEARCH_REQUEST_BYTES = 2**24  # of a request
# what a search finds
RESULT_SETTINGS = ("method", "embedding_model", "query_prompt", "passage_prompt")


class SearchBody(RequestBody):
    """A search in the protocol of Search-R1, and the parts of each query if the client sends them."""

    model_config = ConfigDict(extra="ignore")

    queries: Annotated[list[str], Field(max_length=MAX_QUERIES)]
    topk: Annotated[int, Field(ge=1, le=MAX_TOP_K)] | None = None
    return_scores: bool | None = None
    parts: list[list[str]] | None = None


class SearchService(HttpService):
    """One retriever over HTTP, one search at a time; `route` is for another service to offer.

    access: for this machine alone where None. A search that no other can follow, for the corpus has
    changed, is the `error` that ends the server.
    """

    def __init__(
        self, retriever: CorpusRetriever, config: RetrievalConfig, access: AccessControl | None = None
    ) -> None:
        super().__init__()
        self._retriever, self._config = retriever, config
        settings = {name: getattr(config, name) for name in RESULT_SETTINGS}
        if config.bm25_query != "whole":
            settings["bm25_query"] = config.bm25_query
        digest = hashlib.sha256(json.dumps([retriever.fingerprint, settings]).encode()).hexdigest()
        self._note = {"fingerprint": digest, "asks": list(retriever.query_fields)}
        self.route = Route(SEARCH_PATH, self._search, methods=["POST"])
        self.app = (access or AccessControl()).create_app([Route("/", self._about), self.route])

    async def _about(self, request: Request) -> Response:
        limits = {"topk": MAX_TOP_K, "queries": MAX_QUERIES, "bytes": MAX_SEARCH_REQUEST_BYTES}
        used = {"kind": self._config.method, "topk": self._config.top_k, "most": limits}
        size = {"passages": len(self._retriever.corpus), "search": f"POST {SEARCH_PATH}"}
        return JSONResponse({"dlm_rag": self._note} | used | size)

    async def _search(self, request: Request) -> Response:
        return await self.read(request, self._reply, MAX_SEARCH_REQUEST_BYTES)

    def _reply(self, body: bytes) -> Response:
        if self.error is not None:
            raise ApiError(503, "the server is going down and searches no more")
        try:
            return JSONResponse(self.answer(body))
        except ApiError:
            raise
        except Exception as error:
            if isinstance(error, UserError):
                self._failure = error
            else:
                log.warning("a search failed", exc_info=error)
            raise ApiError(500, f"the search failed: {summarize_error(error)}") from None

    def answer(self, body: bytes) -> dict[str, Any]:
        """The answer to a search; raises `ApiError`, and what the retriever raises."""
        asked = parse_body(SearchBody, body)
        parts = asked.parts
        if parts is None:
            parts = [[text] if text.strip() else [] for text in asked.queries]
        if len(parts) != len(asked.queries):
            raise ApiError(400, "'parts' must be a list of texts for each query")
        queries = [Query(text, tuple(own)) for text, own in zip(asked.queries, parts, strict=True)]
        results = []
        for found in self._retriever.search_scored(queries, asked.topk or self._config.top_k):
            documents = [{"id": p.id, "title": p.title, "contents": p.text} for p, _ in found]
            scored = [{"document": d, "score": s} for d, (_, s) in zip(documents, found, strict=True)]
            results.append(scored if asked.return_scores else documents)
        return {"result": results, "dlm_rag": self._note}
