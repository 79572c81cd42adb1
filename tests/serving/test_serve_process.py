"""The server at a real port: clients that people use, slow and hostile ones, many at once, and kill -9."""

import asyncio
import json
import os
import re
import signal
import socket
import subprocess
from contextlib import suppress

import httpx
import openai
import pytest

from dlm_rag.serving import http_server
from tests.support import serving
from tests.support.paths import ROOT
from tests.support.tiny_models import byte_tokenizer, tiny_denoiser


@pytest.fixture
def folder(tmp_path, corpus_file):
    tiny_denoiser().save_pretrained(tmp_path / "model", eos_token_id=257)
    byte_tokenizer().save_pretrained(tmp_path / "model")
    (tmp_path / "model" / "generation_config.json").write_text('{"retrieval": {"top_k": 2}}')
    return tmp_path


TINY = ("--model", "model", "--corpus", "corpus.jsonl", "energy=none")
POST = b"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\n"
ROWS = ("decode.max_new_tokens=16", "decode.batch_size=4", "decode.commit_threshold=0.1")


@pytest.mark.slow
def test_real_clients_at_a_real_server(folder, corpus, monkeypatch):
    """openai-python, curl, raw sockets; SIGTERM answers what was taken, kill -9 leaves nothing behind and
    hinders no new start.
    """
    monkeypatch.setenv("TMPDIR", str(folder / "temporary"))
    (folder / "temporary").mkdir()
    (rollout,) = serving.made_decoder(corpus).decode([serving.ASKED])
    port = serving.find_free_port()
    url = f"http://127.0.0.1:{port}"
    with serving.start_server_process(folder, port, *TINY, *ROWS) as process:
        client = openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)
        assert [model.id for model in client.models.list()] == ["model"]
        messages = serving.chat_body()["messages"]
        answer = client.chat.completions.create(model="model", messages=messages)
        assert answer.choices[0].message.content == rollout.response
        assert answer.dlm_rag["forwards"] == rollout.forwards
        options = {"stream": True, "stream_options": {"include_usage": True}}
        extra = {"commit_threshold": 0.1, "query_policy": "proxy"}
        *chunks, last = client.chat.completions.create(
            model="model", messages=messages, extra_body=extra, **options
        )
        assert "".join(chunk.choices[0].delta.content for chunk in chunks) == rollout.response
        assert not last.choices and last.usage == answer.usage
        assert [chunk.dlm_rag["step"] for chunk in chunks[:-1]] == list(range(len(rollout.steps)))
        with pytest.raises(openai.BadRequestError, match="cannot be honoured"):
            client.chat.completions.create(model="model", messages=messages, top_p=0.5)
        with pytest.raises(openai.NotFoundError, match="the model here is 'model'"):
            client.chat.completions.create(model="other", messages=messages)
        client.close()
        body = json.dumps({"messages": messages})
        curl = ["curl", "-s", f"{url}/v1/chat/completions", "-d", body]
        said = subprocess.run(curl, capture_output=True, check=True).stdout
        assert json.loads(said)["choices"][0]["message"]["content"] == rollout.response
        hostile(port)
        assert httpx.get(f"{url}/health").status_code == 200
        found = httpx.post(f"{url}/retrieve", json={"queries": ["Jane Austen"]}).json()["result"][0]
        assert len(found) == 2, "as many as the model reads"
        process.send_signal(signal.SIGTERM)
        assert process.wait(120) == 0
    with serving.start_server_process(folder, port, *TINY, *ROWS) as process:
        process.kill()
        process.wait()
        with pytest.raises(ProcessLookupError):
            os.killpg(process.pid, 0)
    assert not [*(folder / "temporary").iterdir()]
    with serving.start_server_process(folder, port, *TINY, *ROWS):
        assert httpx.post(f"{url}/v1/chat/completions", json=serving.chat_body()).status_code == 200


def hostile(port):
    """What no client sends: each is answered in a line or dropped, and nothing of the machine is told."""
    for sent in (
        b"GARBAGE\r\n\r\n",
        b"GET / HTTP/1.1\r\nHost: localhost\r\nX: " + b"a" * 70_000,
        b"POST /v1/answers HTTP/1.1\r\nHost: localhost\r\nContent-Length: 99999999\r\n\r\n",
        b"POST /v1/answers HTTP/1.1\r\nHost: localhost\r\nContent-Length: -1\r\n\r\n",
        b"POST /v1/answers HTTP/1.1\r\nHost: localhost\r\nContent-Length: \xb2\r\n\r\n{}",
        b"POST /v1/answers HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\n"
        + b"1" * 70_000,
        b"POST /v1/answers HTTP/1.1\r\nHost: localhost\r\nContent-Length: 5\r\n"
        b"Transfer-Encoding: chunked\r\n\r\n0\r\n\r\nGET /health HTTP/1.1\r\nHost: localhost\r\n\r\n",
        b"POST /v1/answers HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: gzip\r\n\r\n",
        b"GET / HTTP/1.1\r\nHost: localhost\r\nHost: evil.example\r\n\r\n",
        b"GET http://localhost/../../etc/passwd HTTP/1.1\r\nHost: localhost\r\n\r\n",
        b"GET /%2e%2e/%00%ff HTTP/1.1\r\nHost: localhost\r\n\r\n",
        b"CONNECT evil.example:80 HTTP/1.1\r\nHost: localhost\r\n\r\n",
        b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
    ):
        with socket.create_connection(("127.0.0.1", port), timeout=120) as sock:
            sock.sendall(sent)
            said = sock.recv(2**16)
        assert re.match(rb"HTTP/1.1 4\d\d ", said) and said.count(b"HTTP/1.1 ") == 1, said
        assert b"Traceback" not in said and str(ROOT).encode() not in said


async def status_of(port, head, drip=b""):
    """The status line of what is answered, b"" for none; `drip` is sent again and again until it ends."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    said = b""

    async def send():
        while drip:
            writer.write(drip)
            await writer.drain()
            await asyncio.sleep(0.05)

    writer.write(head)
    sending = asyncio.ensure_future(send())
    with suppress(ConnectionError):
        said = await reader.readline()
        while await reader.read(2**16):
            pass
    sending.cancel()
    await asyncio.gather(sending, return_exceptions=True)
    writer.close()
    return said.rstrip()


@pytest.fixture
def served():
    """What `client(port)` returns, run beside a server in this process that SIGTERM ends; signals then do
    what they did before: nothing, for SIGTERM may come once more than the server waits for.
    """
    numbers = (signal.SIGTERM, signal.SIGINT)
    own = {number: signal.signal(number, lambda *_: None) for number in numbers}

    def serve(service, client):
        before = [signal.getsignal(number) for number in numbers]

        async def run(port):
            try:
                return await asyncio.wait_for(client(port), 60)
            finally:
                os.kill(os.getpid(), signal.SIGTERM)

        with socket.create_server(("127.0.0.1", 0)) as sock:
            running = []
            port = sock.getsockname()[1]
            http_server.run_server(service, sock, lambda: running.append(asyncio.ensure_future(run(port))))
        assert [signal.getsignal(number) for number in numbers] == before
        return running[0].result()

    yield serve
    for number, handler in own.items():
        signal.signal(number, handler)


def test_a_signal_lets_what_was_taken_be_answered(corpus, served):
    decoder = serving.made_decoder(corpus)
    decoder.model_runner = serving.Slow(decoder.model_runner)

    async def clients(port):
        async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", timeout=60) as client:
            asked = asyncio.ensure_future(client.post("/v1/chat/completions", json=serving.chat_body()))
            while not service.engine.in_flight:
                await asyncio.sleep(0.01)
            with pytest.raises(httpx.ReadTimeout):  # one that goes away is seen while another is answered
                await client.post(
                    "/v1/chat/completions", json=serving.chat_body(), timeout=httpx.Timeout(60, read=0.1)
                )
            while not service.engine.counts["cancelled"]:
                await asyncio.sleep(0.01)
            os.kill(os.getpid(), signal.SIGTERM)
            await asyncio.sleep(0.5)
            with pytest.raises(httpx.ConnectError):
                await client.get("/health")
            decoder.model_runner.free.set()
            return (await asked).status_code

    with serving.serve_decoder(decoder) as service:
        assert served(service, clients) == 200


@pytest.mark.parametrize("stream", [False, True])
def test_a_second_interrupt_cuts_off_without_a_traceback(corpus, served, caplog, stream):
    decoder = serving.made_decoder(corpus)
    decoder.model_runner = serving.Slow(decoder.model_runner)

    async def client(port):
        body = json.dumps(serving.chat_body(stream=stream, commit_threshold=1.0)).encode()
        head = POST + b"Content-Length: %d\r\n\r\n" % len(body)
        asked = asyncio.ensure_future(status_of(port, head + body))
        while not service.engine.in_flight:
            await asyncio.sleep(0.01)
        for _ in range(2):
            os.kill(os.getpid(), signal.SIGINT)
            await asyncio.sleep(0.2)
        decoder.model_runner.let.release()  # the step that is under way
        return asked

    with serving.serve_decoder(decoder) as service, caplog.at_level("WARNING"):
        served(service, client)
    assert not any(record.exc_info for record in caplog.records), caplog.text


def test_who_asks_or_reads_now_and_then_is_not_dropped(corpus, served, monkeypatch):
    monkeypatch.setattr(http_server, "CLIENT_SECONDS", 0.6)

    async def asks(port):
        answers, requests = await asyncio.open_connection("127.0.0.1", port)
        for _ in range(10):
            requests.write(b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n")
            head = await answers.readuntil(b"\r\n\r\n")
            await answers.readexactly(int(re.search(rb"(?i)content-length: (\d+)", head)[1]))
            await asyncio.sleep(0.15)
        requests.close()

    async def reads(port):
        answers, requests = await asyncio.open_connection("127.0.0.1", port)
        requests.write(b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n" * 1000)
        for _ in range(50):
            assert await answers.read(2**16), "cut off"
            await asyncio.sleep(0.03)
        requests.close()

    async def clients(port):
        await asyncio.gather(asks(port), reads(port))

    with serving.serve_decoder(serving.made_decoder(corpus)) as service:
        served(service, clients)


def test_who_is_slow_is_dropped_and_delays_nobody(corpus, served, monkeypatch):
    """Silence, a head, a body or unread bytes that never end: each has its bound, and is gone after it."""
    monkeypatch.setattr(http_server, "CLIENT_SECONDS", 0.6)

    async def clients(port):
        slow = [
            status_of(port, b""),
            status_of(port, b"GET / HTTP/1.1\r\nX: ", b"a"),
            status_of(port, POST + b"Content-Length: 99\r\n\r\n", b" "),
            status_of(port, POST + b"Transfer-Encoding: chunked\r\n\r\n", b"1\r\n \r\n"),
            status_of(port, b"GET /health HTTP/1.1\r\nHost: localhost\r\nContent-Length: 99\r\n\r\n", b"a"),
        ]
        slow = [asyncio.ensure_future(one) for one in slow]
        _, deaf = await asyncio.open_connection("127.0.0.1", port, limit=1)
        deaf.write(b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n" * 1000)  # whose answers it does not read
        async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}") as client:
            while len(service.connections) < 7:  # all of them, and its own
                assert (await client.get("/health")).status_code == 200
            assert (await client.post("/v1/chat/completions", json=serving.chat_body())).status_code == 200
            found = await asyncio.gather(*slow)
        while service.connections:
            await asyncio.sleep(0.01)
        deaf.close()
        return found

    with serving.serve_decoder(serving.made_decoder(corpus)) as service:
        silent, head, body, chunks, unread = served(service, clients)
    assert (silent, head) == (b"", b"")
    assert body == chunks == b"HTTP/1.1 408 Request Timeout" and unread == b"HTTP/1.1 200 OK"
