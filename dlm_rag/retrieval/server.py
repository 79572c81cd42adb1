"""A server that lets others search a corpus, in the protocol that `http.py` describes.

    GET /              what is searched, and how
    POST /retrieve     a search

What is wrong with a request is said in `{"error": "one sentence"}` with the status 400, 404, 411 or 413.
"""

import hashlib
import json
import logging
import re
import socketserver
import sys
import threading
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler
from typing import Any, TypeGuard

from dlm_rag.config import RetrievalConfig
from dlm_rag.errors import UserError, fold_message
from dlm_rag.files.jsonl import parse_json
from dlm_rag.retrieval.base import CorpusRetriever
from dlm_rag.retrieval.query import Query

log = logging.getLogger(__name__)

PATH = "/retrieve"
MOST_TOP_K = 1000
MOST_QUERIES = 4096  # of a request
MOST_BYTES = 2**24  # of a request
IDLE_SECONDS = 30  # after which a connection on which nothing comes is closed
DECIDES = ("kind", "dense_model", "query_prompt", "passage_prompt", "fusion_depth")  # what a search finds

ASKS = {"bm25": ["text"], "dense": ["parts"], "hybrid": ["text", "parts"]}  # what of a query a search reads


class RefusedError(Exception):
    """A request that is not answered: its status, and a sentence."""

    def __init__(self, status: int, reason: str) -> None:
        super().__init__(reason)
        self.status = status


class Searches:
    """What the server does with requests, apart from the network: one search at a time."""

    def __init__(self, retriever: CorpusRetriever, config: RetrievalConfig) -> None:
        self._retriever, self._config, self.lock = retriever, config, threading.Lock()
        settings = {name: getattr(config, name) for name in DECIDES}
        found = json.dumps([retriever.fingerprint, settings])
        self._said = {
            "fingerprint": hashlib.sha256(found.encode()).hexdigest(),
            "asks": ASKS[config.kind],
        }

    def about(self) -> dict[str, Any]:
        """What is searched, and how."""
        config = self._config
        return {
            "dlm_rag": self._said,
            "passages": len(self._retriever.corpus),
            "kind": config.kind,
            "topk": config.top_k,
            "most": {"topk": MOST_TOP_K, "queries": MOST_QUERIES, "bytes": MOST_BYTES},
            "search": f"POST {PATH}",
        }

    def answer(self, body: bytes) -> dict[str, Any]:
        """The answer to a search; raises `RefusedError`, and what the retriever raises."""
        queries, top_k, scored = self._read(body)
        with self.lock:
            found = self._retriever.search_scored(queries, top_k)
        results: list[Any] = []
        for ranked in found:
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
        """The queries of a request, their depth, and whether scores are wanted; raises `RefusedError`."""
        try:
            asked = parse_json(body, "this is no search", UserError, "body")
        except UserError as error:
            raise RefusedError(400, str(error)) from None
        if not isinstance(asked, dict):
            raise RefusedError(400, "the body must be a JSON object with a list 'queries'")
        texts, top_k = asked.get("queries"), asked.get("topk") or self._config.top_k
        parts, scored = asked.get("parts"), asked.get("return_scores") or False
        if not _are_texts(texts):
            raise RefusedError(400, "'queries' must be a list of texts")
        if len(texts) > MOST_QUERIES:
            raise RefusedError(
                400, f"{len(texts)} queries are more than {MOST_QUERIES}: ask for fewer at once"
            )
        if not isinstance(top_k, int) or isinstance(top_k, bool) or not 1 <= top_k <= MOST_TOP_K:
            raise RefusedError(400, f"'topk' must be a whole number between 1 and {MOST_TOP_K}")
        if not isinstance(scored, bool):
            raise RefusedError(400, "'return_scores' must be true or false")
        if parts is None:
            parts = [[text] if text.strip() else [] for text in texts]
        if not isinstance(parts, list) or len(parts) != len(texts) or not all(map(_are_texts, parts)):
            raise RefusedError(400, "'parts' must be a list of texts for each query")
        return [Query(text, tuple(own)) for text, own in zip(texts, parts, strict=True)], top_k, scored


def _are_texts(value: Any) -> TypeGuard[list[str]]:
    return isinstance(value, list) and all(isinstance(text, str) for text in value)


class _Handler(BaseHTTPRequestHandler):
    """The requests of one connection, on a thread of its own."""

    protocol_version = "HTTP/1.1"  # the connection is kept
    timeout = IDLE_SECONDS
    wbufsize = -1  # an answer goes out in one piece,
    disable_nagle_algorithm = True  # at once
    server: "SearchServer"

    def do_GET(self) -> None:
        self._reply("/", lambda _: self.server.searches.about())

    def do_POST(self) -> None:
        self._reply(PATH, self.server.searches.answer)

    def _reply(self, path: str, work: Callable[[bytes], dict[str, Any]]) -> None:
        status = 200
        try:
            body = self._body()
            if self.path.partition("?")[0] != path:
                raise RefusedError(404, f"a search is POST {PATH}; GET / says what is searched")
            said = work(body)
        except RefusedError as error:
            status, said = error.status, {"error": str(error)}
        except _GoneError:
            self.close_connection = True
            return
        except Exception as error:
            log.warning("a search failed", exc_info=error)
            status, said = 500, {"error": f"the search failed: {fold_message(error)}"}
        answer = json.dumps(said, ensure_ascii=False).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(answer)))
        if self.close_connection:
            self.send_header("Connection", "close")
        self.end_headers()
        self.wfile.write(answer)

    def _body(self) -> bytes:
        """What comes behind the head; raises `RefusedError` for what is not read, and closes then."""
        given = self.headers.get("Content-Length", "" if self.command == "POST" else "0")
        keep, self.close_connection = self.close_connection, True
        if not re.fullmatch("[0-9]{1,18}", given):
            raise RefusedError(411, "the request says no Content-Length")
        length = int(given)
        if length > MOST_BYTES:
            raise RefusedError(413, f"the body has {length} bytes, the most is {MOST_BYTES}")
        try:
            body = self.rfile.read(length)
        except OSError:
            raise _GoneError from None
        if len(body) < length:
            raise _GoneError
        self.close_connection = keep
        return body

    def log_message(self, *_: Any) -> None:
        """Requests are not logged: queries are the business of those who ask."""


class _GoneError(Exception):
    """The other side has closed the connection, or sends no more."""


class SearchServer(socketserver.ThreadingTCPServer):
    """Serves `searches` at a host and port; each connection has a thread, which none other waits for.

    The port is taken at once (raises `OSError`), but nobody is let in before `server_activate`.
    """

    allow_reuse_address = True
    daemon_threads = True
    request_queue_size = 128
    searches: Searches

    def __init__(self, host: str, port: int) -> None:
        super().__init__((host, port), _Handler, bind_and_activate=False)
        try:
            self.server_bind()
        except BaseException:
            self.server_close()
            raise

    @property
    def url(self) -> str:
        """Where a search is."""
        host, port = self.socket.getsockname()
        return f"http://{host}:{port}{PATH}"

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A connection that breaks off is the trouble of the other side; the rest is a fault of ours."""
        error = sys.exc_info()[1]
        if not isinstance(error, OSError):
            log.warning("a request failed", exc_info=error)
