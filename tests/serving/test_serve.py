"""Serving: what clients get is what the decoder says, whatever others do at the same time."""

import asyncio
import json
import os
import threading
import time
from contextlib import suppress
from dataclasses import replace
from unittest.mock import patch

import httpx
import numpy as np
import pytest

from dlm_rag.config import RetrievalConfig, ServingConfig
from dlm_rag.decode.decoder import Decoder
from dlm_rag.decode.provisional_log import ProvisionalRecorder
from dlm_rag.errors import CorpusError, RunError
from dlm_rag.questions import Question
from dlm_rag.retrieval.corpus import open_corpus
from dlm_rag.serving.app import AnswerService
from dlm_rag.serving.async_engine import AsyncEngine, EngineRequest
from dlm_rag.serving.middleware import AccessControl, ApiKeys
from dlm_rag.serving.responses import find_stop
from dlm_rag.serving.search_app import SearchService
from tests.support.passages import PASSAGES, write_jsonl_file
from tests.support.processes import wait_until
from tests.support.serving import (
    ASKED,
    QUESTIONS,
    SETTINGS,
    Slow,
    chat_body,
    decode_with_page,
    get_page,
    made_decoder,
    make_client,
    parse_events,
    parse_metrics_text,
    send_request,
    send_requests,
    serve_decoder,
)

KEYS = ["a-key-of-the-first-one", "a-key-of-another-one"]


@pytest.fixture
def decoder(corpus):
    return made_decoder(corpus)


def test_answers_are_those_of_the_decoder(decoder):
    """Asked at once by many, with more questions than places."""
    known = {rollout.question: rollout for rollout in decoder.decode(QUESTIONS)}
    with serve_decoder(decoder) as service:
        for question, answer in zip(
            QUESTIONS, send_requests(service, *map(chat_body, QUESTIONS)), strict=True
        ):
            rollout, body = known[question], answer.json()
            choice, outcome = body["choices"][0], body["dlm_rag"]
            assert choice["message"]["content"] == rollout.response
            assert outcome["citations"] == json.loads(json.dumps(rollout.citations))
            assert (outcome["tokens"], outcome["forwards"]) == (rollout.tokens_committed, rollout.forwards)
            ends = {token.token_id for step in rollout.steps for token in step.written_tokens} & {257}
            assert choice["finish_reason"] == ("stop" if ends else "length")
            assert body["usage"]["completion_tokens"] == rollout.tokens_before_end({257})


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"temperature": 1.0, "seed": 3},
        {"block_length": 4},
        {"max_tokens": 5},
    ],
    ids=str,
)
def test_the_streamed_text_only_grows_to_the_final_one(decoder, settings):
    with serve_decoder(decoder) as service:
        for question in QUESTIONS:
            whole = send_request(service, chat_body(question, **settings)).json()
            streamed = send_request(service, chat_body(question, stream=True, **settings))
            *chunks, (_, done) = parse_events(streamed)
            assert done == "[DONE]"
            bodies = [body for _, body in chunks]
            texts = [body["choices"][0]["delta"]["content"] for body in bodies]
            assert "".join(texts) == whole["choices"][0]["message"]["content"]
            assert bodies[-1]["choices"][0]["finish_reason"] == whole["choices"][0]["finish_reason"]
            assert bodies[-1]["usage"] == whole["usage"]
            assert all(body["choices"][0]["finish_reason"] is None for body in bodies[:-1])
            steps = [body["dlm_rag"] for body in bodies[:-1]]
            assert [step["step"] for step in steps] == list(range(len(steps)))
            assert None not in steps[-1]["canvas"] or whole["choices"][0]["finish_reason"] == "stop"


def test_a_stream_shows_the_canvas_of_every_step(decoder):
    (rollout,) = decoder.decode([ASKED])
    with serve_decoder(decoder) as service:
        *chunks, _, _ = parse_events(send_request(service, chat_body(stream=True)))
    states = list(rollout.replay())
    for (_, chunk), state, step in zip(chunks, states, rollout.steps, strict=True):
        shown = chunk["dlm_rag"]
        assert shown["canvas"] == [state[n].token if n in state else None for n in range(16)]
        assert (shown["query"], shown["passages"]) == (step.query, list(step.passage_ids))


def test_stop_texts_cut_the_stream_and_the_whole_alike(decoder):
    with serve_decoder(decoder) as service:
        text = send_request(service, chat_body()).json()["choices"][0]["message"]["content"]
        for stops in ([text[5:7]], [text[3:6], text[4:5]], text[1:3], [text[-1] + "never"]):
            whole = send_request(service, chat_body(stop=stops)).json()["choices"][0]
            at = find_stop(text, [stops] if isinstance(stops, str) else stops)
            assert whole["message"]["content"] == (text if at is None else text[:at])
            assert at is None or whole["finish_reason"] == "stop"
            chunks = parse_events(send_request(service, chat_body(stop=stops, stream=True)))[:-1]
            parts = [body["choices"][0]["delta"]["content"] for _, body in chunks]
            assert "".join(parts) == whole["message"]["content"]


def test_the_page_gets_the_records_of_a_trace(corpus, tmp_path):
    """Guesses with them, which nobody else's rows record."""
    decoder = made_decoder(corpus, replace(SETTINGS, commit_threshold=0.9))
    decoder.record_provisional = True
    rollout, side = decode_with_page(decoder, ASKED, tmp_path)
    assert any(step.guesses and step.guesses.confidence for step in rollout.steps)
    with serve_decoder(decoder) as service:
        (first, start), *steps, (last, end) = parse_events(
            send_request(service, {"question": ASKED}, "/v1/answers")
        )
        with patch.object(ProvisionalRecorder, "record_step", side_effect=AssertionError("nobody looks")):
            assert (
                send_request(service, chat_body()).json()["choices"][0]["message"]["content"]
                == rollout.response
            )
    assert (first, last) == ("start", "end") and {name for name, _ in steps} == {"step"}
    assert all(start[key] == side[key] for key in ("settings", "canvas", "guesses", "ghosts"))
    assert [{k: v for k, v in body.items() if k != "step"} for _, body in steps] == side["steps"]
    record = end.pop("record")
    assert end == side["end"] and record["response"] == rollout.response


REFUSED = {
    "several answers": (chat_body(n=2), "'n' cannot be honoured"),
    "tools": (chat_body(tools=[{"type": "function"}]), "'tools' cannot be honoured"),
    "log-probabilities": (chat_body(logprobs=True), "'logprobs' cannot"),
    "JSON mode": (chat_body(response_format={"type": "json_object"}), "'response_format' cannot"),
    "nucleus": (chat_body(top_p=0.5), "'top_p' cannot"),
    "an unknown field": (chat_body(comit_threshold=0.5), "nearest: 'commit_threshold'"),
    "a number as text": (chat_body(commit_threshold="0.5"), "'commit_threshold'"),
    "an interpolation": (chat_body(commit_rule="${oc.env:HOME}"), "is not one of"),
    "out of bounds": (chat_body(commit_threshold=2), "commit_threshold=2"),
    "true as a number": (chat_body(seed=True), "'seed'"),
    "not a number": (b'{"messages": [{"role": "user", "content": "a"}], "seed": NaN}', ""),
    "the server's own": (chat_body(batch_size=2), "'batch_size' cannot be honoured here: leave it out"),
    "a canvas too long": (chat_body(max_new_tokens=17), "more than the 16"),
    "no token": (chat_body(max_tokens=0), "'max_tokens'"),
    "a rule without heads": (chat_body(commit_rule="policy_head"), "needs heads"),
    "edits without blocks": (chat_body(edit_threshold=0.9), "attention has no blocks"),
    "blocks that are not there": (chat_body(finished_block_context="no_evidence"), "no effect"),
    "options without a stream": (chat_body(stream_options={"include_usage": True}), "without stream=true"),
    "earlier turns": ({"messages": [*chat_body()["messages"], *chat_body()["messages"]]}, "single message"),
    "another role": ({"messages": [{"role": "assistant", "content": "a"}]}, "single message"),
    "an image": (chat_body([{"type": "image_url", "image_url": {"url": "file:///etc/passwd"}}]),
    "messages.0.content"),
    "no messages": ({}, "'messages'"),
    "a blank question": (chat_body(" \n"), "blank"),
    "a list": ([], "must be a JSON object"),
    "no JSON": (b"{", "is not JSON"),
    "no UTF-8": (b"\xff", "is not UTF-8"),
    "half a character": (b'{"messages": "\\ud800"}', "half of a character"),
    "endless nesting": (b"[" * 500_000, "nesting that is too"),
    "a key twice": (b'{"n": 1, "n": 1}', "a second time"),
    "code to import": (chat_body("x", commit_rule="antigravity:x"), "is not one of"),
    "too long for the context": (chat_body("word " * 1000), "context"),
    "too long to be counted": (chat_body("word " * 50_000), "characters that are read"),
}  # fmt: skip


@pytest.mark.parametrize("what", REFUSED)
def test_what_cannot_be_honoured_is_refused(refusing, what):
    body, words = REFUSED[what]
    response = send_request(refusing, body)
    assert response.status_code == 400, response.text
    error = response.json()["error"]
    assert set(error) == {"message", "type", "param", "code"} and words in error["message"]
    assert error["type"] == "invalid_request_error" and len(error["message"]) < 400
    assert not refusing.engine.num_running and not refusing.engine.num_waiting


@pytest.fixture(scope="module")
def refusing(tmp_path_factory):
    path = tmp_path_factory.mktemp("refusing") / "corpus.jsonl"
    write_jsonl_file(path, [{"id": i, "title": t, "contents": c} for i, t, c in PASSAGES])
    with serve_decoder(made_decoder(open_corpus(path))) as service:
        yield service


def test_what_asks_for_nothing_is_taken(refusing):
    """As clients send it by themselves."""
    more = {"n": 1, "tools": [], "logprobs": False, "top_p": 1.0, "frequency_penalty": 0, "stop": None}
    more |= {"user": "me", "stream": False, "seed": None, "response_format": {"type": "text"}}
    plain = send_request(refusing, chat_body()).json()["choices"]
    assert send_request(refusing, chat_body(**more)).json()["choices"] == plain
    parts = [{"type": "text", "text": ASKED}]
    assert send_request(refusing, chat_body(parts)).json()["choices"] == plain


def test_settings_hold_for_one_request(decoder):
    """Rows of one batch have settings of their own, and are what each of them is alone."""
    one = {"commit_threshold": 0.99, "query_policy": "question"}
    alone = Decoder(
        decoder.denoiser, decoder.retriever, decoder.tokenizer, replace(SETTINGS, **one)
    ).decode([ASKED])[0]
    with serve_decoder(decoder) as service:
        answers = send_requests(service, chat_body(**one), chat_body(), chat_body(**one))
        first, other, again = (answer.json() for answer in answers)
        assert first["choices"] == again["choices"]
        assert first["choices"][0]["message"]["content"] == alone.response
        assert first["dlm_rag"]["forwards"] == alone.forwards > other["dlm_rag"]["forwards"]


def test_a_long_body_is_not_read_to_its_end(decoder):
    sent = 0

    async def endless():
        nonlocal sent
        while True:
            sent += 2**16
            yield b" " * 2**16

    async def asked(service):
        async with make_client(service) as client:
            return await client.post("/v1/chat/completions", content=endless())

    with serve_decoder(decoder) as service:
        response = asyncio.run(asked(service))
        assert response.status_code == 413 and sent <= 2**20 + 2**17
        assert send_request(service, b" " * (2**20 + 1)).status_code == 413


@pytest.mark.parametrize(
    "method, path, status",
    [
        ("GET", "/v1/chat/completions", 405),
        ("POST", "/", 405),
        ("GET", "/v1/models/", 404),
        ("GET", "/v1/models/another", 404),
        ("GET", "/..%2f..%2fetc%2fpasswd", 404),
        ("GET", "/v1/models/..%2f..%2fetc%2fpasswd", 404),
        ("GET", "//etc/passwd", 404),
        ("GET", "/page.js%00", 404),
    ],
)
def test_what_is_not_there(refusing, method, path, status):
    async def asked():
        async with make_client(refusing) as client:
            return await client.request(method, f"http://127.0.0.1{path}")

    response = asyncio.run(asked())
    assert response.status_code == status
    assert response.json()["error"]["message"] and "passwd" not in response.text


def test_the_corpus_is_searched_at_the_same_server(decoder, tmp_path):
    keys = tmp_path / "keys.txt"
    keys.write_text(KEYS[0])
    access = AccessControl(keys=ApiKeys.from_file(str(keys)))
    service = AnswerService(decoder, "tiny", ServingConfig(), access=access)
    service.offer_search(SearchService(decoder.retriever, RetrievalConfig(), access=access))
    key, body = {"Authorization": f"Bearer {KEYS[0]}"}, {"queries": ["Who wrote Dune?"], "topk": 1}
    try:
        assert send_request(service, body, "/retrieve").status_code == 401
        found = send_request(service, body, "/retrieve", **key).json()["result"]
        assert [[document["id"] for document in each] for each in found] == [["dune"]]
        assert send_request(service, chat_body(), **key).status_code == 200 and service.idle
    finally:
        service.close()


def test_pages_of_other_sites_may_not_ask(refusing):
    for headers in ({"Host": "evil.example"}, {"Origin": "http://evil.example"}, {"Origin": "null"}):
        assert send_request(refusing, chat_body(), **headers).status_code == 403
    for host in ("127.0.0.1.evil.example", "localhost.evil.example", "127.0.0.1@evil.example", "0.0.0.0"):
        assert send_request(refusing, chat_body(), Host=host).status_code == 403
    for host in ("localhost:8000", "127.0.0.2:8000", "[::1]:8000"):
        assert send_request(refusing, chat_body(), Host=host, Origin=f"http://{host}").status_code == 200


def test_keys(decoder, tmp_path):
    file = tmp_path / "keys.txt"
    file.write_text("# ours\n\n" + "\n".join(KEYS) + "\n")
    with serve_decoder(decoder, keys=file) as service:
        for given in ("", "Bearer", "Bearer a-key-of-nobody-here", KEYS[0], f"Basic {KEYS[0]}"):
            response = send_request(service, chat_body(), **({"Authorization": given} if given else {}))
            assert response.status_code == 401 and response.json()["error"]["code"] == "invalid_api_key"
        assert send_request(service, chat_body(), Authorization=f"Bearer {KEYS[1]}").status_code == 200
        page = get_page(service, "/")
        assert page.status_code == 200 and not any(key in page.text for key in KEYS)


def test_a_key_file_that_everybody_can_read_is_warned_of(tmp_path, caplog):
    file = tmp_path / "keys.txt"
    file.write_text(KEYS[0])
    for mode, said in ((0o640, 0), (0o600, 0), (0o644, 1)):
        file.chmod(mode)
        ApiKeys.from_file(str(file))
        assert len(caplog.messages) == said
    assert f"chmod o= {file}" in caplog.messages[0]


@pytest.fixture
def slow(decoder):
    decoder.model_runner = Slow(decoder.model_runner)
    yield decoder
    decoder.model_runner.free.set()


def job(name, key="", **settings):
    return EngineRequest(Question(name, ASKED), replace(SETTINGS, **settings), key)


def test_keys_take_turns(slow):
    """One place: who comes with one question does not wait behind all of another's."""
    slow.config = replace(slow.config, batch_size=1)
    order = []
    station = AsyncEngine(slow, ServingConfig(), lambda jobs: order.extend(one.question.id for one in jobs))
    first = station.submit(job("first"))
    wait_until(lambda: station.num_running)
    for n in range(3):
        station.submit(job(f"a{n}", "a"))
    station.submit(job("b0", "b"))
    slow.model_runner.free.set()
    wait_until(lambda: len(order) == 5)
    station.close()
    assert first.done and order == ["first", "a0", "b0", "a1", "a2"]


def test_a_full_line_is_refused_for_its_key_alone(slow, tmp_path):
    slow.config = replace(slow.config, batch_size=1)
    file = tmp_path / "keys.txt"
    file.write_text("\n".join(KEYS))

    async def many(service):
        async with make_client(service) as client:

            def post(key):
                headers = {"Authorization": f"Bearer {key}"}
                return asyncio.ensure_future(
                    client.post("/v1/chat/completions", json=chat_body(), headers=headers)
                )

            held = [post(KEYS[0])]
            while not service.engine.num_running:
                await asyncio.sleep(0.01)
            held += [post(KEYS[0]) for _ in range(2)]
            while service.engine.num_waiting < 2:
                await asyncio.sleep(0.01)
            refused = await post(KEYS[0])
            held.append(post(KEYS[1]))
            while service.engine.num_waiting < 3:
                await asyncio.sleep(0.01)
            slow.model_runner.free.set()
            return refused, await asyncio.gather(*held)

    with serve_decoder(slow, keys=file, max_queue_per_key=2) as service:
        refused, others = asyncio.run(many(service))
    assert refused.status_code == 429 and int(refused.headers["Retry-After"]) >= 1
    assert refused.json()["error"]["type"] == "rate_limit_error"
    assert [response.status_code for response in others] == [200] * 4


@pytest.mark.parametrize("stream", [False, True])
def test_who_goes_away_frees_the_row_within_a_step(slow, stream):
    async def leave(service):
        async with make_client(service) as client:
            task = asyncio.ensure_future(
                client.post("/v1/chat/completions", json=chat_body(stream=stream, commit_threshold=1.0))
            )
            while service.engine.num_running < 2:
                slow.model_runner.let.release()
                await asyncio.sleep(0.02)
            task.cancel()
            with suppress(asyncio.CancelledError):
                await task

    with serve_decoder(slow) as service:
        other = service.engine.submit(job("other", commit_threshold=1.0))
        wait_until(lambda: service.engine.num_running == 1)
        asyncio.run(leave(service))
        slow.model_runner.let.release()  # the step that is under way
        wait_until(lambda: service.engine.counts["cancelled"])
        assert service.engine.num_running == 1 and not other.done
        slow.model_runner.free.set()
        wait_until(lambda: other.done)
        assert other.rollout.response == response_of("other", slow, commit_threshold=1.0)


def response_of(name, decoder, **settings):
    parts = decoder.denoiser, decoder.retriever, decoder.tokenizer, replace(SETTINGS, **settings)
    return Decoder(*parts).decode([Question(name, ASKED)])[0].response


def test_time_is_bounded(slow):
    with serve_decoder(slow, timeout=0.05) as service:
        threading.Timer(0.2, slow.model_runner.free.set).start()
        response = send_request(service, chat_body(commit_threshold=1.0))
    assert response.status_code == 504 and "longer than 0.05 seconds" in response.json()["error"]["message"]


class Broken:
    """A proposer whose confidences of one question are not numbers, or that fails as a whole."""

    def __init__(self, inner, error=None):
        self._inner, self.error = inner, error

    def __getattr__(self, name):
        return getattr(self._inner, name)

    def propose(self, views):
        if self.error is not None:
            raise self.error
        proposed = list(self._inner.propose(views))
        return [
            replace(p, confidence=np.full_like(p.confidence, np.nan)) if len(view.canvas) == 7 else p
            for view, p in zip(views, proposed, strict=True)
        ]


def test_a_row_whose_logits_are_no_numbers_fails_alone(decoder):
    known = {r.question: r.response for r in decoder.decode(QUESTIONS)}
    decoder.model_runner = Broken(decoder.model_runner)
    with serve_decoder(decoder) as service:
        bodies = chat_body("Who is this?", max_tokens=7), *map(chat_body, QUESTIONS)
        bad, *others = send_requests(service, *bodies)
        streamed = send_request(service, chat_body(max_tokens=7, stream=True))
    assert bad.status_code == 500 and "not a number" in bad.json()["error"]["message"]
    # A row that fails before its first step was looked at has a status of its own.
    early = streamed.status_code == 500
    error = streamed.json() if early else dict(parse_events(streamed))["error"]
    assert "not a number" in error["error"]["message"]
    for question, response in zip(QUESTIONS, others, strict=True):
        assert response.json()["choices"][0]["message"]["content"] == known[question]


def test_a_failed_step_is_not_the_end(decoder):
    """Nothing of the machine is told, and the next question is answered."""
    decoder.model_runner = Broken(decoder.model_runner, RuntimeError("no memory at /home/somebody/model"))
    with serve_decoder(decoder) as service:
        failed = send_request(service, chat_body())
        assert failed.status_code == 500 and "/home" not in failed.text
        decoder.model_runner.error = None
        assert send_request(service, chat_body()).status_code == 200
        assert send_request(service, chat_body()).json()["dlm_rag"]["forwards"]


def health(service):
    """Status, and what it is called."""
    response = get_page(service, "/health")
    return response.status_code, response.json()["status"]


@pytest.fixture
def brief(monkeypatch):
    """Little time between a server's own questions."""
    monkeypatch.setattr("dlm_rag.serving.async_engine.PROBE_INTERVAL_SECONDS", 0.01)


def test_a_server_whose_steps_all_fail_says_so_and_ends(decoder):
    decoder.model_runner = Broken(decoder.model_runner, RuntimeError("the device is lost"))
    with serve_decoder(decoder) as service:
        assert health(service) == (200, "ok")
        assert send_request(service, chat_body()).status_code == 500
        assert health(service) == (503, "failing")
        later = send_request(service, chat_body())
        wait_until(lambda: not service.engine.is_alive)
        assert later.status_code == 503, "it waited for whether a step of the server's own would do"
        assert health(service) == (503, "going down")
        assert isinstance(service.engine.error, RunError)
        assert "the device is lost" in str(service.engine.error)


def test_a_question_that_fails_every_step_costs_no_other_and_ends_nothing(decoder, brief):
    inner = decoder.model_runner

    class Poisoned(Broken):
        def propose(self, views):
            self.error = RuntimeError("too long") if any(len(v.canvas) == 7 for v in views) else None
            return super().propose(views)

    decoder.model_runner = Poisoned(inner)
    with serve_decoder(decoder) as service:
        for _ in range(4):
            assert send_request(service, chat_body(max_tokens=7)).status_code == 500
        assert send_request(service, chat_body()).status_code == 200 and health(service) == (200, "ok")


@pytest.mark.parametrize("part", ["proposer", "retriever"])
def test_what_passes_is_found_to_have_passed_though_nobody_asks(decoder, brief, part):
    """As behind a balancer, which sends nobody while the answer is 503."""
    if part == "proposer":
        decoder.model_runner = Broken(decoder.model_runner, RuntimeError("no memory"))
    search = decoder.retriever.search
    with serve_decoder(decoder) as service:
        if part == "retriever":
            decoder.retriever.search = lambda queries: 1 / 0
        while health(service)[0] == 200:
            assert send_request(service, chat_body()).status_code == 500
        decoder.model_runner.error, decoder.retriever.search = None, search
        wait_until(lambda: health(service) == (200, "ok"))
        assert service.engine.is_alive


def test_a_changed_corpus_ends_the_server(decoder, corpus_file):
    """No answer from it can be right any more."""
    with serve_decoder(decoder) as service:
        assert send_request(service, chat_body()).status_code == 200
        os.utime(corpus_file, ns=(0, 1))
        assert send_request(service, chat_body("Where is Dune?")).status_code == 200, "the same bytes"
        corpus_file.write_text(corpus_file.read_text() + "\n")
        assert send_request(service, chat_body("Where is Tacoma?")).status_code == 503
        wait_until(lambda: not service.engine.is_alive)
    assert isinstance(service.engine.error, CorpusError)


@pytest.mark.parametrize("part", ["_handle_events", "_submit_admitted", "_drop_expired"])
def test_a_fault_of_the_station_itself_hangs_nobody(decoder, brief, part, monkeypatch):
    def fail(*_):
        raise ZeroDivisionError

    with serve_decoder(decoder) as service:
        monkeypatch.setattr(service.engine, part, fail)
        assert send_request(service, chat_body()).status_code in (500, 503)
        wait_until(lambda: not service.engine.is_alive)
        assert send_request(service, chat_body()).status_code == 503
    assert isinstance(service.engine.error, RunError | ZeroDivisionError)


def test_a_failed_search_tells_nothing_of_the_machine(decoder):
    def search(queries):
        raise OSError("/home/somebody/index is gone")

    decoder.retriever.search = search
    with serve_decoder(decoder) as service:
        failed = send_request(service, chat_body()), send_request(service, chat_body(stream=True))
        failed += (send_request(service, {"question": ASKED}, "/v1/answers"),)
    for response in failed:
        assert response.status_code == 500 and response.json()["error"]["message"] == "the search failed"


def test_a_fault_of_our_own_tells_nothing_of_the_machine(decoder, monkeypatch):
    def fail(body):
        raise RuntimeError("/home/somebody/dlm_rag")

    async def asked(service):
        transport = httpx.ASGITransport(service.app, raise_app_exceptions=False)
        async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
            return await client.post("/v1/chat/completions", json=chat_body())

    with serve_decoder(decoder) as service:
        monkeypatch.setattr(service._parser, "parse_chat", fail)
        response = asyncio.run(asked(service))
    assert response.status_code == 500 and "/home" not in response.text
    assert response.json()["error"]["message"] == "the request failed: the server's log says why"


def test_the_end_answers_what_was_taken_and_refuses_the_rest(slow):
    async def ended(service):
        async with make_client(service) as client:
            running = asyncio.ensure_future(client.post("/v1/chat/completions", json=chat_body()))
            while not service.engine.num_running:
                await asyncio.sleep(0.01)
            service.engine.drain()
            refused = await client.post("/v1/chat/completions", json=chat_body())
            health = await client.get("/health")
            slow.model_runner.free.set()
            return await running, refused, health

    with serve_decoder(slow) as service:
        running, refused, health = asyncio.run(ended(service))
    assert (running.status_code, refused.status_code, health.status_code) == (200, 503, 503)


def test_figures_for_machines(decoder):
    with serve_decoder(decoder) as service:
        bodies = [send_request(service, chat_body(question)).json()["dlm_rag"] for question in QUESTIONS]
        found = parse_metrics_text(get_page(service, "/metrics").text)
        health = get_page(service, "/health").json()
    assert health == {"status": "ok", "model": "tiny"}
    assert found['answers_total{outcome="answered"}'] == len(QUESTIONS)
    assert found["forwards_total"] == sum(body["forwards"] for body in bodies)
    assert found["searches_total"] == sum(body["retrievals"] for body in bodies)
    assert found["tokens_total"] == sum(body["tokens"] for body in bodies)
    assert 0 < found["processor_seconds_total"] <= time.process_time()
    assert found["pool_hit_tokens_total"] <= found["pool_wanted_tokens_total"]
    assert "joules_total" not in found and (found["rows"], found["places"]) == (0, 4)
