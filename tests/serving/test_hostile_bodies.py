"""No body under 1 MiB stops the server for others, and one above it gets its refusal."""

import asyncio
import json
import time
from http.client import HTTPConnection

import pytest

from dlm_rag.config import RetrievalConfig
from dlm_rag.retrieval import load_retriever
from dlm_rag.serving.http_server import SearchService
from tests.support.search_server import serve_search
from tests.support.serving import chat_body, make_client, run_in_loop

SIZE = 2**20 - 2**12


def filled(text):
    return chat_body((text * (SIZE // len(text)))[: SIZE // 2])


def chat_of(*texts):
    roles = ("user", "assistant")
    turns = [{"role": roles[n % 2], "content": text} for n, text in enumerate(texts)]
    return {"messages": [*turns, {"role": "user", "content": "And when was it?"}]}


BODIES = {
    "blanks": filled(" ") | {"stream": True},
    "blanks and a word": chat_body(" " * (SIZE // 2) + "x"),
    "names": filled("Ann Lee. "),
    "capitals": filled("A"),
    "a name in every turn": chat_of(*["Who saw Ann Lee?" + " Ann" * 80] * 1001),
    "long turns": chat_of("Ann Lee " * 30_000, "Ann " * 60_000),
    "messages": {"messages": [{}] * 250_000},
    "empty messages": {"messages": [{"role": "user"}] * 50_000},
    "parts": chat_body([{"type": "text", "text": "a"}] * 25_000),
    "wrong parts": chat_body([{}] * 250_000),
    "unknown fields": chat_body() | {f"field{n}": 1 for n in range(60_000)},
    "unknown fields of a message": {"messages": [{f"field{n}": 1 for n in range(60_000)}]},
    "options of a stream": chat_body() | {"stream_options": {f"{n}": 5 for n in range(80_000)}},
    "a long field": chat_body() | {"x" * (SIZE // 2): 1},
    "a field twice": '{"messages": 1, ' + ", ".join(f'"f{n}": 1' for n in range(80_000)) + ', "f79999": 1}',
    "stop texts": chat_body(stop=["a" * 256] * 3000),
    "a number": '{"seed": ' + "9" * (SIZE // 2) + "}",
    "nesting": "[" * SIZE,
    "labels": chat_body(metadata=[[1]] * 100_000, tools=[{}] * 100_000),
    "a system prompt": {
        "messages": [{"role": "system", "content": "#" * (SIZE // 2)}, *chat_body()["messages"]]
    },
}  # fmt: skip


@pytest.mark.parametrize("name", BODIES)
def test_no_body_keeps_others_waiting(shared, name):
    body = BODIES[name]
    body = body.encode() if isinstance(body, str) else json.dumps(body).encode()
    assert len(body) < 2**20

    async def ask():
        longest = 0.0
        async with make_client(shared) as client:
            asked = asyncio.ensure_future(client.post("/v1/chat/completions", content=body))
            while not asked.done():
                begin = time.monotonic()
                assert (await client.get("/health")).status_code == 200
                longest = max(longest, time.monotonic() - begin)
                await asyncio.sleep(0.01)
            return (await asked), longest

    begin = time.process_time()
    response, longest = run_in_loop(shared.loop, ask())
    assert response.status_code in (200, 400) and len(response.text) < 2**16, response.text[:200]
    assert longest < 1 and time.process_time() - begin < 5


@pytest.mark.parametrize("size", [2**24 + 1, 2**26], ids=["a byte more", "four times as much"])
def test_a_body_that_is_too_large_gets_its_refusal_whole(corpus_file, size):
    """In place of a reset while it is still being sent."""
    with serve_search(SearchService(load_retriever(corpus_file, top_k=1), RetrievalConfig())) as url:
        connection = HTTPConnection(url.split("/")[2], timeout=60)
        connection.request("POST", "/retrieve", b" " * size)
        response = connection.getresponse()
        assert response.status == 413 and "16 MiB" in json.loads(response.read())["error"]["message"]
        connection.close()
        connection = HTTPConnection(url.split("/")[2], timeout=60)
        connection.putrequest("POST", "/retrieve")
        connection.putheader("Content-Length", str(size))
        connection.endheaders()  # and nothing comes: the refusal does not wait for it
        begin = time.monotonic()
        assert connection.getresponse().status == 413 and time.monotonic() - begin < 10
        connection.close()
