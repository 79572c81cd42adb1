"""Serving: what clients get is what the decoder says, whatever others do at the same time."""

import asyncio
import json
import time
from contextlib import suppress
from dataclasses import replace
from itertools import takewhile
from unittest.mock import patch

import pytest

from dlm_rag.config import DecodeConfig, RetrievalConfig
from dlm_rag.decode.provisional_log import ProvisionalRecorder
from dlm_rag.engine.engine import Decoder
from dlm_rag.errors import RunError
from dlm_rag.questions import Question
from dlm_rag.retrieval import load_retriever
from dlm_rag.serving.app import EngineRequest
from dlm_rag.serving.chat_completions import ChatParser
from tests.support.block_attention import block_denoiser
from tests.support.cases import first_is_fast
from tests.support.gemma_decoding import QueryHashRetriever, make_gemma_decoder
from tests.support.processes import wait_until
from tests.support.serving import (
    ASKED,
    GEMMA_SETTINGS,
    QUESTIONS,
    SETTINGS,
    Broken,
    Slow,
    chat_body,
    decode_with_page,
    get_page,
    made_decoder,
    make_client,
    parse_events,
    parse_metrics_text,
    run_in_loop,
    send_request,
    send_requests,
    serve_decoder,
)
from tests.support.tiny_diffusion_gemma import write_tiny_gemma
from tests.support.tiny_models import tiny_tokenizer

KEYS = ["a-key-of-the-first-one", "a-key-of-another-one"]


@pytest.fixture(scope="module")
def gemma_folder(tmp_path_factory):
    return write_tiny_gemma(tmp_path_factory.mktemp("served") / "gemma", t_min=1e-3, t_max=0.5)


@pytest.fixture
def decoder(corpus):
    return made_decoder(corpus)


@pytest.fixture
def make_decoder_of(corpus, gemma_folder):
    """A decoder of a model of this kind, with own settings; `whole` writes its answer alone."""

    def make(kind, **settings):
        if kind == "masked":
            return made_decoder(corpus, replace(SETTINGS, **settings))
        if kind == "uniform":
            settings = GEMMA_SETTINGS | settings
            return make_gemma_decoder(gemma_folder, QueryHashRetriever(corpus, 2), **settings)
        retriever, tokenizer = load_retriever(RetrievalConfig(top_k=2), corpus), tiny_tokenizer()
        if kind == "edits":
            own = replace(SETTINGS, edit_threshold=0.1, **settings)
            return Decoder(block_denoiser(), retriever, tokenizer, own)
        own = DecodeConfig(**({"max_new_tokens": 16, "batch_size": 4} | settings))
        tokenizer.template = replace(tokenizer.template, answer="whole" if kind == "whole" else "marked")
        return Decoder(block_denoiser(causal_context=True), retriever, tokenizer, own)

    return make


def content_of(answer):
    """The text of a chat completion."""
    return answer.json()["choices"][0]["message"]["content"]


@pytest.mark.parametrize("kind", first_is_fast(["masked", "uniform"]))
def test_answers_and_figures_are_those_of_the_decoder(make_decoder_of, kind):
    """Asked at once by many, with more questions than places: rows join and leave. Every question of a
    server has the id, and so the noise, of one that is typed alone.
    """
    decoder = make_decoder_of(kind)
    known = {question: decoder.decode([question])[0] for question in QUESTIONS}
    with serve_decoder(decoder) as service:
        answers = [answer.json() for answer in send_requests(service, *map(chat_body, QUESTIONS))]
        found = parse_metrics_text(get_page(service, "/metrics").text)
        assert get_page(service, "/health").json() == {"status": "ok", "model": "tiny"}
    ends = decoder.tokenizer.end_ids
    for rollout, body in zip(known.values(), answers, strict=True):
        choice, outcome = body["choices"][0], body["dlm_rag"]
        assert choice["message"]["content"] == rollout.response
        assert outcome["citations"] == json.loads(json.dumps(rollout.citations))
        assert (outcome["tokens"], outcome["forwards"]) == (rollout.tokens_committed, rollout.forwards)
        ended = any(token.token_id in ends for token in [*rollout.replay()][-1].values())
        assert choice["finish_reason"] == ("stop" if ended else "length")
        assert body["usage"]["completion_tokens"] == rollout.tokens_before_end(ends)
    assert found["row_steps_total"] / found["steps_total"] > 1.5, "of 4 rows"
    assert found['answers_total{outcome="answered"}'] == len(QUESTIONS)
    for name in ("forwards", "retrievals", "tokens"):
        total = f"{name.replace('retrievals', 'searches')}_total"
        assert found[total] == sum(body["dlm_rag"][name] for body in answers)
    assert found["answer_seconds_count"] == found["first_token_seconds_count"] == len(QUESTIONS)
    assert 0 < found["first_token_seconds_sum"] <= found["answer_seconds_sum"]
    assert 0 < found["processor_seconds_total"] <= time.process_time()
    assert found["pool_hit_tokens_total"] <= found["pool_wanted_tokens_total"]
    assert "joules_total" not in found and (found["rows"], found["places"]) == (0, 4)


STREAMED = [
    ("masked", {"temperature": 1.0, "seed": 3}), ("masked", {}), ("masked", {"block_length": 4}),
    ("edits", {}), *((kind, {"mode": "autoregressive"}) for kind in ("causal", "whole")), ("uniform", {}),
]  # fmt: skip


@pytest.mark.parametrize(("kind", "settings"), first_is_fast(STREAMED), ids=str)
def test_a_stream_shows_every_step_and_text_that_is_never_taken_back(make_decoder_of, kind, settings):
    decoder, taken_back, early = make_decoder_of(kind), 0, 0
    with serve_decoder(decoder) as service:
        for question in QUESTIONS:
            (rollout,) = make_decoder_of(kind, **settings).decode([question])
            whole = send_request(service, chat_body(question, **settings)).json()
            streamed = send_request(service, chat_body(question, stream=True, **settings))
            *chunks, (_, last), (_, done) = parse_events(streamed)
            assert done == "[DONE]"
            deltas = [body["choices"][0]["delta"] for _, body in [*chunks, (None, last)]]
            texts = [delta.get("reasoning_content", "") for delta in deltas]
            message = whole["choices"][0]["message"]
            assert "".join(texts) == message.get("reasoning_content", "")
            assert "".join(delta["content"] for delta in deltas) == message["content"]
            assert whole["dlm_rag"]["response"] == rollout.response
            assert last["choices"][0]["finish_reason"] == whole["choices"][0]["finish_reason"]
            assert last["usage"] == whole["usage"] and last["dlm_rag"] == whole["dlm_rag"]
            canvases = []
            for (_, chunk), state, step in zip(chunks, rollout.replay(), rollout.steps, strict=True):
                shown = chunk["dlm_rag"]
                canvases.append(shown["canvas"])
                length = rollout.canvas_length
                assert shown["canvas"] == [state[n].token if n in state else None for n in range(length)]
                assert (shown["step"], shown["query"]) == (step.step, step.query)
                assert shown["passages"] == list(step.passage_ids)
                assert chunk["choices"][0]["finish_reason"] is None
            for step in range(len(canvases)):
                later = zip(*canvases[step:], strict=True)
                kept = "".join(tokens[0] or "" for tokens in takewhile(lambda t: len({*t}) == 1, later))
                assert len("".join(texts[: step + 1])) <= len(kept)
            taken_back += sum(len(step.remasked) + len(step.edited) for step in rollout.steps)
            early += any(texts[:-1])
    if kind == "uniform":
        assert early and taken_back > 10, "else nothing of it was tested"
    if kind == "edits":
        assert not early and taken_back, "what may be edited is not shown as text"


def test_the_end_of_a_stream_reaches_a_reader_who_was_late(decoder):
    """The question is done before its reader has taken the first step."""

    async def read_late(service):
        follow = service._follow(service._parser.parse_chat(json.dumps(chat_body()).encode()))
        first = await anext(follow)
        while service.engine.in_flight:
            await asyncio.sleep(0.01)
        return [first, *[step async for step in follow]]

    with serve_decoder(decoder) as service:
        steps = run_in_loop(service.loop, read_late(service))
    assert [step.step for _, step in steps] == [*range(len(steps))] and steps[-1][0].finished


def test_stop_texts_cut_the_stream_and_the_whole_alike(decoder):
    with serve_decoder(decoder) as service:
        text = content_of(send_request(service, chat_body()))
        for stops in ([text[5:7]], [text[3:6], text[4:5]], text[1:3], [text[-1] + "never"]):
            whole = send_request(service, chat_body(stop=stops)).json()["choices"][0]
            given = [stops] if isinstance(stops, str) else stops
            at = min((text.index(stop) for stop in given if stop in text), default=None)
            assert whole["message"]["content"] == text[:at]
            assert at is None or whole["finish_reason"] == "stop"
            chunks = parse_events(send_request(service, chat_body(stop=stops, stream=True)))[:-1]
            parts = [body["choices"][0]["delta"]["content"] for _, body in chunks]
            assert "".join(parts) == whole["message"]["content"]


def test_null_is_a_setting_that_is_not_sent(make_decoder_of):
    with serve_decoder(make_decoder_of("masked", temperature=1.0, seed=5, max_new_tokens=12)) as service:
        names = ("temperature", "seed", "max_new_tokens", "commit_threshold")
        bodies = chat_body(), chat_body(**dict.fromkeys(names)), chat_body(seed=6)
        texts = [send_request(service, body).json()["choices"][0]["message"]["content"] for body in bodies]
    assert texts[0] == texts[1] != texts[2]


@pytest.mark.parametrize(
    ("kind", "settings"),
    first_is_fast([("masked", {"commit_threshold": 0.9}), ("causal", {}), ("uniform", {})]),
    ids=["masked", "causal", "uniform"],
)
def test_the_page_gets_the_records_of_a_trace(make_decoder_of, tmp_path, kind, settings):
    """Guesses with them, which nobody else's rows record."""
    decoder = make_decoder_of(kind, **settings)
    decoder.record_provisional = True
    rollout, side = decode_with_page(decoder, ASKED, tmp_path)
    assert any(step.guesses and step.guesses.confidence for step in rollout.steps)
    with serve_decoder(decoder) as service:
        asked = send_request(service, chat_body(), "/v1/answers")
        (first, start), *steps, (last, end) = parse_events(asked)
        with patch.object(ProvisionalRecorder, "record_step", side_effect=AssertionError("nobody looks")):
            assert content_of(send_request(service, chat_body())) == rollout.response
    assert (first, last) == ("start", "end") and {name for name, _ in steps} == {"step"}
    assert all(start[key] == side[key] for key in ("settings", "canvas", "guesses", "ghosts"))
    assert [{k: v for k, v in body.items() if k != "step"} for _, body in steps] == side["steps"]
    record = end.pop("record")
    assert end == side["end"] and record["response"] == rollout.response
    if kind == "uniform":
        assert any(step.remasked for step in rollout.steps) and any(step.edited for step in rollout.steps)


REFUSED = {
    "several answers": (chat_body(n=2), "'n' cannot be honoured here: leave it out"),
    "out of bounds": (chat_body(commit_threshold=2), "commit_threshold=2"),
    "the server's own": (chat_body(batch_size=2), "'batch_size' cannot be honoured here: leave it out"),
    "a canvas too long": (chat_body(max_new_tokens=17), "more than the 16"),
    "edits without blocks": (chat_body(edit_threshold=0.9), "attention has no blocks"),
    "a result of a tool": ({"messages": [{"role": "tool", "content": "a"}]}, "messages.0.role"),
    "an image": (chat_body([{"type": "image_url", "image_url": {"url": "file:///etc/passwd"}}]),
    "messages.0.content"),
    "an option of streams": (chat_body(stream=True, stream_options={"usage": True}), "no field 'usage'"),
    "a blank question": (chat_body(" \n"), "blank"),
    "a hidden question": (chat_body("\u200b\x02"), "blank"),
    "no JSON": (b"{", "is not JSON"),
    "code to import": (chat_body("x", commit_rule="antigravity:x"), "is not one of"),
    "too long for the context": (chat_body("word " * 1000), "context"),
}  # fmt: skip


@pytest.mark.parametrize("what", REFUSED)
def test_what_cannot_be_honoured_is_refused(shared, what):
    body, words = REFUSED[what]
    response = send_request(shared, body)
    assert send_request(shared, body, **{"Content-Encoding": "GZIP"}).status_code == 415
    assert response.status_code == 400, response.text
    error = response.json()["error"]
    assert set(error) == {"message", "type", "param", "code"} and words in error["message"]
    assert error["type"] == "invalid_request_error" and len(error["message"]) < 400
    assert not shared.engine.in_flight and not shared.engine.waiting


OWN = [
    ("masked", {"commit_threshold": 0.99, "query_policy": "question"}),
    ("uniform", {"max_new_tokens": 12, "steps_per_block": 3, "seed": 4}),
    ("causal", {"mode": "autoregressive", "max_new_tokens": 12}),
]


@pytest.mark.parametrize(("kind", "own"), first_is_fast(OWN))
def test_settings_hold_for_one_request(make_decoder_of, kind, own):
    """Rows of one batch have settings of their own, and are what each of them is alone."""
    alone, plain = (make_decoder_of(kind, **settings).decode([ASKED])[0] for settings in (own, {}))
    with serve_decoder(make_decoder_of(kind)) as service:
        first, other, again = send_requests(service, chat_body(**own), chat_body(), chat_body(**own))
    assert content_of(first) == content_of(again) == alone.response
    assert content_of(other) == plain.response
    assert first.json()["dlm_rag"]["forwards"] == alone.forwards != plain.forwards


def test_a_request_of_another_mode_keeps_what_the_server_was_told(corpus):
    denoiser = block_denoiser(causal_context=True, decode_settings={"query_threshold": 0.9})
    for told, kept in (({"query_threshold": 0.0}, 0.0), ({}, 0.9)):
        decoder = Decoder(denoiser, QueryHashRetriever(corpus, 2), tiny_tokenizer(), DecodeConfig(**told))
        asked = {"messages": [{"role": "user", "content": "who"}], "mode": "autoregressive"}
        settings = ChatParser(decoder).parse_answer(json.dumps(asked).encode()).settings
        assert (settings.mode, settings.query_threshold) == ("autoregressive", kept)


@pytest.mark.parametrize("path", ["/..%2f..", "/v1/models/another", "/v1/models/..%2f..", "/"])
def test_what_is_not_there(shared, path):
    response = send_request(shared, None, f"http://127.0.0.1{path}/etc/passwd", "GET")
    assert response.status_code == 404
    assert response.json()["error"]["message"] and "passwd" not in response.text


def test_pages_of_other_sites_may_not_ask(shared):
    names = ("127.0.0.1.evil.example", "localhost.evil.example", "127.0.0.1@evil.example", "0.0.0.0")
    others = [{"Host": name} for name in ("evil.example", *names)]
    for headers in (*others, {"Origin": "http://evil.example"}, {"Origin": "null"}):
        assert send_request(shared, chat_body(), **headers).status_code == 403
    for host in ("localhost:8000", "127.0.0.2:8000", "[::1]:8000"):
        assert send_request(shared, chat_body(), Host=host, Origin=f"http://{host}").status_code == 200


def test_keys_are_asked_for_and_the_corpus_is_searched_at_the_same_server(decoder, tmp_path):
    file = tmp_path / "keys.txt"
    file.write_text("# ours\n\n" + "\n".join(KEYS) + "\n")
    search = {"queries": ["Who wrote Dune?"], "topk": 1}
    with serve_decoder(decoder, keys=file, search=RetrievalConfig()) as service:
        for given in ("", "Bearer", "Bearer a-key-of-nobody-here", KEYS[0], f"Basic {KEYS[0]}"):
            own = {"Authorization": given} if given else {}
            response = send_request(service, chat_body(), **own)
            assert response.status_code == 401 and response.json()["error"]["code"] == "invalid_api_key"
            assert send_request(service, search, "/retrieve", **own).status_code == 401
        own = {"Authorization": f"Bearer {KEYS[1]}"}
        assert send_request(service, chat_body(), **own).status_code == 200
        found = send_request(service, search, "/retrieve", **own).json()["result"]
        assert [[document["id"] for document in each] for each in found] == [["dune"]]
        page = get_page(service, "/")
        assert page.status_code == 200 and not any(key in page.text for key in KEYS)


@pytest.fixture
def slow(decoder):
    decoder.model_runner = Slow(decoder.model_runner)
    yield decoder
    decoder.model_runner.free.set()


def start_request(service, name="other", **settings):
    """A question that is handed to the engine itself."""
    job = EngineRequest(Question(name, ASKED), replace(SETTINGS, **settings))
    service.loop.call_soon_threadsafe(service.engine.submit, job)
    return job


@pytest.mark.parametrize("stream", [False, True])
def test_who_goes_away_frees_the_row_within_a_step(slow, stream):
    async def leave(service):
        async with make_client(service) as client:
            task = asyncio.ensure_future(
                client.post("/v1/chat/completions", json=chat_body(stream=stream, commit_threshold=1.0))
            )
            while len(service.engine.in_flight) < 2:
                slow.model_runner.let.release()
                await asyncio.sleep(0.02)
            task.cancel()
            with suppress(asyncio.CancelledError):
                await task

    parts = slow.denoiser, slow.retriever, slow.tokenizer, replace(SETTINGS, commit_threshold=1.0)
    (alone,) = Decoder(*parts).decode([Question("other", ASKED)])
    with serve_decoder(slow) as service:
        other = start_request(service, commit_threshold=1.0)
        wait_until(lambda: len(service.engine.in_flight) == 1)
        run_in_loop(service.loop, leave(service))
        slow.model_runner.let.release()  # the step that is under way
        wait_until(lambda: service.engine.counts["cancelled"] and len(service.engine.in_flight) == 1)
        assert not other.done
        slow.model_runner.free.set()
        wait_until(lambda: other.done)
        assert other.rollout.response == alone.response


def test_the_first_to_come_is_served_first_and_a_full_queue_is_refused(slow, monkeypatch):
    slow.config, order = replace(slow.config, batch_size=1), []
    monkeypatch.setattr("dlm_rag.serving.app.MAX_WAITING", 2)
    with serve_decoder(slow) as service:
        jobs = []
        for number in range(3):
            jobs.append(start_request(service, str(number)))
            places = service.engine.in_flight, service.engine.waiting
            wait_until(lambda places=places, n=number: sum(map(len, places)) == n + 1)
            jobs[-1].news.set = lambda number=number: jobs[number].done and order.append(number)
        refused = send_request(service, chat_body())
        slow.model_runner.free.set()
        wait_until(lambda: len(order) == 3)
        assert send_request(service, chat_body()).status_code == 200
    assert refused.status_code == 429 and int(refused.headers["Retry-After"]) >= 1
    assert refused.json()["error"]["type"] == "rate_limit_error" and order == [0, 1, 2]


def test_time_is_bounded(slow, monkeypatch):
    monkeypatch.setattr("dlm_rag.serving.app.ANSWER_TIMEOUT_SECONDS", 0.05)
    with serve_decoder(slow) as service:
        response = send_request(service, chat_body(commit_threshold=1.0))
        assert response.status_code == 504 and "0.05 seconds" in response.json()["error"]["message"]
        assert service.engine.counts["failed"] == 1 and not service.engine.counts["cancelled"]
        slow.model_runner.free.set()
        wait_until(lambda: not service.engine.in_flight)


@pytest.mark.parametrize("kind", ["masked", "causal", "uniform"])
@pytest.mark.parametrize("most", [3, 1000])
def test_max_tokens_cuts_the_answer_and_changes_nothing_else(make_decoder_of, kind, most):
    decoder = make_decoder_of(kind)
    with serve_decoder(decoder) as service:
        whole = send_request(service, chat_body(QUESTIONS[1])).json()
        cut = send_request(service, chat_body(QUESTIONS[1], max_tokens=most)).json()
        streamed = send_request(service, chat_body(QUESTIONS[1], max_tokens=most, stream=True))
    (choice,), (full,) = cut["choices"], whole["choices"]
    written = whole["usage"]["completion_tokens"]
    assert cut["dlm_rag"]["response"] == whole["dlm_rag"]["response"], "the canvas stays"
    assert cut["usage"]["completion_tokens"] == min(most, written)
    if most >= written:
        assert choice["finish_reason"] == full["finish_reason"]
    else:
        assert choice["finish_reason"] == "length"
        assert len(choice["message"]["content"]) < len(full["message"]["content"])
    *_, (_, last), _ = events = parse_events(streamed)
    assert last["choices"][0]["finish_reason"] == choice["finish_reason"]
    for name in ("content", "reasoning_content"):
        deltas = (body["choices"][0]["delta"].get(name, "") for _, body in events[:-1])
        assert "".join(deltas) == choice["message"].get(name, "")


def test_a_row_whose_logits_are_no_numbers_fails_alone(decoder):
    known = {r.question: r.response for r in decoder.decode(QUESTIONS)}
    decoder.model_runner = Broken(decoder.model_runner)
    with serve_decoder(decoder) as service:
        bodies = chat_body("Who is this?", max_new_tokens=7), *map(chat_body, QUESTIONS)
        bad, *others = send_requests(service, *bodies)
        streamed = send_request(service, chat_body(max_new_tokens=7, stream=True))
    assert bad.status_code == 500 and "not a number" in bad.json()["error"]["message"]
    # A row that fails before its first step was looked at has a status of its own.
    early = streamed.status_code == 500
    error = streamed.json() if early else dict(parse_events(streamed))["error"]
    assert "not a number" in error["error"]["message"]
    for question, response in zip(QUESTIONS, others, strict=True):
        assert content_of(response) == known[question]


def health(service):
    """Status, and what it is called."""
    response = get_page(service, "/health")
    return response.status_code, response.json()["status"]


@pytest.fixture
def brief(monkeypatch):
    """Little time after a failed step, and until it is tried again."""
    monkeypatch.setattr("dlm_rag.serving.app.RETRY_SECONDS", 0.01)
    monkeypatch.setattr("dlm_rag.serving.app.UNHEALTHY_SECONDS", 0.3)


def test_a_server_whose_steps_all_fail_says_so_and_ends(decoder, brief):
    decoder.model_runner = Broken(decoder.model_runner, RuntimeError("lost: /home/somebody/model"))
    with serve_decoder(decoder) as service:
        assert health(service) == (200, "ok")
        for _ in range(3):
            failed = send_request(service, chat_body())
            assert failed.status_code == 500 and "/home" not in failed.text
            assert health(service) in ((503, "failing"), (503, "going down"))
        assert send_request(service, chat_body()).status_code == 503
        assert health(service) == (503, "going down")
        assert isinstance(service.error, RunError) and "lost: /home" in str(service.error)


def test_a_question_that_always_fails_ends_the_server_for_nobody(decoder, brief):
    """Clients ask again by themselves where the status is 500."""
    decoder.model_runner = Broken(decoder.model_runner, RuntimeError("odd"), always=False)
    with serve_decoder(decoder) as service:
        for _ in range(5):
            assert send_request(service, chat_body(max_new_tokens=7)).status_code == 500
        assert send_request(service, chat_body()).status_code == 200 and service.error is None


@pytest.mark.parametrize("part", ["proposer", "retriever"])
def test_what_passes_is_found_to_have_passed_though_nobody_asks(decoder, brief, part):
    """As behind a balancer, which sends nobody while the answer is 503; nothing of the machine is said."""
    search = decoder.retriever.search
    decoder.model_runner = Broken(decoder.model_runner)
    with serve_decoder(decoder) as service:
        if part == "proposer":
            decoder.model_runner.error = RuntimeError("no memory at /home/somebody")
        else:
            decoder.retriever.search = lambda queries: 1 / 0
        while health(service)[0] == 200:
            asked = send_request(service, chat_body())
            assert asked.status_code == 500 and "/home" not in asked.text
        decoder.model_runner.error, decoder.retriever.search = None, search
        wait_until(lambda: health(service) == (200, "ok"))
        assert send_request(service, chat_body()).status_code == 200 and service.error is None


def test_a_fault_of_the_engine_itself_hangs_nobody(decoder, brief, monkeypatch):
    with serve_decoder(decoder) as service:
        monkeypatch.setattr(service.engine, "_admit", lambda *_: 1 / 0)
        assert send_request(service, chat_body()).status_code in (500, 503)
        wait_until(lambda: service.error is not None)
        assert send_request(service, chat_body()).status_code == 503
    assert isinstance(service.error, RunError | ZeroDivisionError)


def test_a_fault_of_our_own_and_a_failed_search_tell_nothing_of_the_machine(decoder, monkeypatch):
    def fail(_):
        raise OSError("/home/somebody/index is gone")

    decoder.retriever.search = fail
    with serve_decoder(decoder) as service:
        failed = send_request(service, chat_body()), send_request(service, chat_body(stream=True))
        failed += (send_request(service, chat_body(), "/v1/answers"),)
        monkeypatch.setattr("dlm_rag.serving.chat_completions.ChatParser.parse_chat", fail)
        ours = send_request(service, chat_body())
    for response in failed:
        assert response.status_code == 500 and response.json()["error"]["message"] == "the search failed"
    assert ours.status_code == 500 and "/home" not in ours.text
