"""A server in this process or in one of its own, with its requests."""

import asyncio
import json
import os
import re
import socket
import subprocess
import sys
import threading
from contextlib import contextmanager

import httpx
import numpy as np

from dlm_rag.config import DecodeConfig, EngineConfig, RetrievalConfig
from dlm_rag.decode.trace_file import TraceWriter, build_trace_header
from dlm_rag.engine.engine import Decoder
from dlm_rag.page.render import build_page_record, read_trace_runs
from dlm_rag.retrieval import load_retriever
from dlm_rag.serving.app import AnswerService
from dlm_rag.serving.http_server import AccessControl, SearchService
from tests.support.paths import ROOT
from tests.support.tiny_models import tiny_denoiser, tiny_tokenizer

SETTINGS = DecodeConfig(max_new_tokens=16, batch_size=4, commit_threshold=0.1)
# Of a model that denoises from noise: warm enough that most is taken back once, and of some answers a block
# ends the text.
GEMMA_SETTINGS = {"max_new_tokens": 36, "batch_size": 4}
ASKED = "Who wrote Emma?"


def made_decoder(corpus, settings=SETTINGS):
    retriever = load_retriever(RetrievalConfig(top_k=2), corpus)
    return Decoder(
        tiny_denoiser(), retriever, tiny_tokenizer(), settings, engine=EngineConfig(prefix_cache_gib=0.1)
    )


@contextmanager
def serve_decoder(decoder, keys=None, search=None):
    """A service on an event loop of its own thread; `run_in_loop` runs requests there."""
    access = AccessControl(keys_file=keys and str(keys))
    searched = search and SearchService(decoder.retriever, search)
    service = AnswerService(decoder, "tiny", access, searched)
    with loop_thread() as service.loop:
        try:
            yield service
        finally:
            if isinstance(decoder.model_runner, Slow):
                decoder.model_runner.free.set()
            service.close()


@contextmanager
def loop_thread():
    """An event loop that runs on a thread."""
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever, daemon=True)
    thread.start()
    try:
        yield loop
    finally:
        loop.call_soon_threadsafe(loop.stop)
        thread.join()


def run_in_loop(loop, coroutine):
    return asyncio.run_coroutine_threadsafe(asyncio.wait_for(coroutine, 120), loop).result()


@contextmanager
def start_server_process(folder, port, *words, command="serve"):
    """A server in a process of its own, once it is `ready`, as it says. What it says from then on is read
    into `said`, so that it never waits for a reader.
    """
    process = subprocess.Popen(
        [sys.executable, "-m", "dlm_rag", command, "--port", str(port), *words], cwd=folder,
        env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        stderr=subprocess.PIPE, text=True, start_new_session=True,
    )  # fmt: skip
    try:
        process.ready, process.said = "", []
        while not re.search("(answers|searched) at http", process.ready):
            process.ready = process.stderr.readline()
            assert process.ready, "it did not come up"
        process.reading = threading.Thread(target=lambda: process.said.extend(process.stderr), daemon=True)
        process.reading.start()
        yield process
    finally:
        process.kill()
        process.wait()


def find_free_port():
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return sock.getsockname()[1]


def make_client(service, **headers):
    transport = httpx.ASGITransport(service.app, raise_app_exceptions=False)
    return httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1", headers=headers)


def chat_body(question=ASKED, **more):
    return {"messages": [{"role": "user", "content": question}]} | more


def send_request(service, body=None, path="/v1/chat/completions", method="POST", **headers):
    """One request: the response, read whole."""

    async def ask():
        async with make_client(service, **headers) as client:
            content = body if body is None or isinstance(body, bytes) else json.dumps(body).encode()
            return await client.request(method, path, content=content)

    return run_in_loop(service.loop, ask())


def send_requests(service, *bodies):
    """Chat completions asked at once: the responses."""

    async def ask_all():
        async with make_client(service) as client:
            asked = [client.post("/v1/chat/completions", json=body) for body in bodies]
            return await asyncio.gather(*asked)

    return run_in_loop(service.loop, ask_all())


def get_page(service, path):
    return send_request(service, path=path, method="GET")


def parse_events(response):
    """The server-sent events of a stream: name and data."""
    found = []
    for block in response.text.strip().split("\n\n"):
        fields = dict(line.split(": ", 1) for line in block.split("\n"))
        data = fields["data"]
        found.append((fields.get("event"), data if data == "[DONE]" else json.loads(data)))
    return found


def parse_metrics_text(text):
    return {name: float(value) for name, value in re.findall(r"^dlm_rag_(\S+) (\S+)$", text, re.MULTILINE)}


QUESTIONS = [f"Who wrote {name}?" for name in ("Emma", "Dune", "the song", "all of it", "this", "that")]


def decode_with_page(decoder, question, folder):
    """A question decoded, and what the page of its trace is given of it."""
    (rollout,) = decoder.decode([question])
    header = build_trace_header(
        decoder.denoiser.config, decoder.tokenizer, decoder.evidence_layout, decoder.config, top_k=2,
        model="", corpus="",
    )  # fmt: skip
    TraceWriter(folder / "trace.jsonl", header).write(rollout)
    (shown,) = build_page_record(read_trace_runs([folder / "trace.jsonl"]))["questions"]
    (side,) = json.loads(json.dumps(shown["sides"]))
    return rollout, side


class Slow:
    """A proposer whose passes wait until they are let through."""

    def __init__(self, inner):
        self._inner, self.let, self.free = inner, threading.Semaphore(0), threading.Event()

    def __getattr__(self, name):
        return getattr(self._inner, name)

    def propose(self, views):
        while not self.free.is_set() and not self.let.acquire(timeout=0.05):
            pass
        return self._inner.propose(views)


class Broken:
    """A proposer whose confidences of one question are not numbers, or that fails."""

    def __init__(self, inner, error=None, always=True):
        self._inner, self.error, self.always = inner, error, always

    def __getattr__(self, name):
        return getattr(self._inner, name)

    def propose(self, views):
        short = [len(view.canvas) == 7 for view in views]
        if self.error is not None and (self.always or any(short)):
            raise self.error
        wait = self._inner.propose(views)
        return lambda: [
            p.replace(confidence=np.full_like(p.confidence, np.nan)) if bad else p
            for bad, p in zip(short, wait(), strict=True)
        ]
