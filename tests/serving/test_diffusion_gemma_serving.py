"""DiffusionGemma behind all that is in front of a decoder: server, page, files that go on, workers."""

import asyncio
import json
import subprocess
import sys
from importlib.util import find_spec
from itertools import pairwise, takewhile
from unittest.mock import patch

import httpx
import pytest

from dlm_rag.cli import run_program
from dlm_rag.commands import evaluate, sample
from dlm_rag.config import DecodeConfig
from dlm_rag.decode.decoder import Decoder
from dlm_rag.decode.trace_file import build_trace_header, make_step_examples, read_trace
from dlm_rag.errors import TraceError
from tests.support.gemma_decoding import QueryHashRetriever, make_gemma_decoder
from tests.support.passages import write_jsonl_file
from tests.support.paths import ROOT
from tests.support.rollouts import strip_times_and_confidences
from tests.support.serving import (
    QUESTIONS,
    chat_body,
    decode_with_page,
    find_free_port,
    get_page,
    parse_events,
    parse_metrics_text,
    send_request,
    send_requests,
    serve_decoder,
    start_server_process,
)
from tests.support.tiny_diffusion_gemma import END, TURN_END, write_tiny_gemma

ENDS = {END, TURN_END}
# Warm enough that most is taken back once, and of some answers a block ends the text.
SETTINGS = {"max_new_tokens": 36, "batch_size": 4, "temperature_low": 1e-3, "temperature_high": 0.5}
WORDS = ["--model", "gemma", "--corpus", "corpus.jsonl", "retrieval.top_k=2", "energy=none"]
WORDS += [f"decode.{name}={value}" for name, value in SETTINGS.items()]


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    return write_tiny_gemma(tmp_path_factory.mktemp("served") / "gemma")


@pytest.fixture
def decoder(tiny, corpus):
    return make_gemma_decoder(tiny, QueryHashRetriever(corpus, 2), **SETTINGS)


def test_answers_of_a_server_are_those_of_the_decoder(decoder):
    """Asked at once by many: rows join while others are in the middle of a block, and leave. Every question
    of a server has the id, and so the noise, of one that is typed alone.
    """
    known = {question: decoder.decode([question])[0] for question in QUESTIONS}
    with serve_decoder(decoder) as service:
        answers = [answer.json() for answer in send_requests(service, *map(chat_body, QUESTIONS))]
        found = parse_metrics_text(get_page(service, "/metrics").text)
    for question, body in zip(QUESTIONS, answers, strict=True):
        rollout, choice, outcome = known[question], body["choices"][0], body["dlm_rag"]
        assert choice["message"]["content"] == rollout.response
        assert outcome["citations"] == json.loads(json.dumps(rollout.citations))
        assert (outcome["tokens"], outcome["forwards"]) == (rollout.tokens_committed, rollout.forwards)
        assert body["usage"]["completion_tokens"] == rollout.tokens_before_end(ENDS)
    assert found["row_steps_total"] / found["steps_total"] > 1.5, "of 4 rows"
    assert found["tokens_total"] == sum(rollout.tokens_committed for rollout in known.values())


@pytest.mark.slow
def test_what_is_streamed_is_never_taken_back(decoder):
    """Text comes block after block: nothing of it stands where a later step writes or takes back."""
    taken_back = 0
    with serve_decoder(decoder) as service:
        for question in QUESTIONS:
            whole = send_request(service, chat_body(question)).json()
            *chunks, (_, done) = parse_events(send_request(service, chat_body(question, stream=True)))
            assert done == "[DONE]"
            bodies = [body for _, body in chunks]
            texts = [body["choices"][0]["delta"]["content"] for body in bodies]
            assert "".join(texts) == whole["choices"][0]["message"]["content"]
            assert bodies[-1]["choices"][0]["finish_reason"] == whole["choices"][0]["finish_reason"]
            canvases = [body["dlm_rag"]["canvas"] for body in bodies[:-1]]
            assert any(texts[:-1]), "some of it comes before the end"
            for step in range(len(canvases)):
                kept = list(
                    takewhile(lambda tokens: len({*tokens}) == 1, zip(*canvases[step:], strict=True))
                )
                text = "".join(tokens[0] or "" for tokens in kept)
                assert len("".join(texts[: step + 1])) <= len(text)
            for one, two in pairwise(canvases):
                taken_back += sum(a is not None is b for a, b in zip(one, two, strict=True))
    assert taken_back > 10, "else nothing of it was tested"


def test_the_page_gets_the_records_of_a_trace(decoder, tmp_path):
    """The page of a trace and the live one, with tokens that are taken back and guesses where they were."""
    decoder.record_provisional = True
    rollout, side = decode_with_page(decoder, QUESTIONS[0], tmp_path)
    with serve_decoder(decoder) as service:
        (first, start), *steps, (last, end) = parse_events(
            send_request(service, {"question": QUESTIONS[0]}, "/v1/answers")
        )
    assert (first, last) == ("start", "end")
    assert all(start[key] == side[key] for key in ("settings", "canvas", "guesses", "ghosts"))
    assert [{k: v for k, v in body.items() if k != "step"} for _, body in steps] == side["steps"]
    assert end.pop("record")["response"] == rollout.response and end == side["end"]
    assert any(step.remasked for step in rollout.steps) and any(step.edited for step in rollout.steps)
    for state, guessed in zip(rollout.replay(), rollout.provisional_tokens(), strict=True):
        assert not {*state} & {*guessed}, "a guess stands where nothing is accepted"


def test_no_masked_rows_are_made_of_its_trace(decoder):
    """Where nothing is accepted a record holds the pad token, which may be accepted too."""
    (rollout,) = decoder.decode(QUESTIONS[:1])
    shape = decoder.denoiser.config
    made = (shape, decoder.tokenizer, decoder.evidence_layout)
    header = build_trace_header(*made, decoder.config, top_k=2, model="", corpus="")
    with pytest.raises(TraceError, match="denoises from uniform noise, which is not in it: no rows"):
        next(make_step_examples(rollout, header, decoder.tokenizer))
    assert not build_trace_header(*made, DecodeConfig(), top_k=2, model="", corpus="").has_uniform_noise


@pytest.mark.parametrize(
    ("body", "says"),
    [
        (chat_body(temperature=0.7), "temperature=0.7 has no effect on a model that denoises"),
        (chat_body(max_tokens=5), "max_tokens=5 is under the 36 that this model fills"),
        (
            chat_body(block_length=4),
            "block_length=4 has no effect on a model that denoises from uniform noise",
        ),
        (chat_body(max_new_tokens=37), "max_new_tokens=48 is more than the 36"),
        (chat_body([{"type": "image_url", "image_url": {"url": "a.png"}}]), "messages.0.content"),
    ],
    ids=str,
)
def test_what_it_cannot_honour_is_refused(decoder, body, says):
    with serve_decoder(decoder) as service:
        answer = send_request(service, body)
    assert answer.status_code == 400 and says in answer.json()["error"]["message"]


def test_the_stop_text_and_the_settings_of_a_request_hold(decoder):
    """One block of the three, hotter, with a stop text: what the decoder gives for it, cut."""
    own = {"max_new_tokens": 12, "temperature_high": 0.8, "seed": 4}
    other = decoder_of_settings(decoder, own)
    (rollout,) = other.decode(QUESTIONS[:1])
    stop = rollout.response[4:6]
    with serve_decoder(decoder) as service:
        body = send_request(service, chat_body(QUESTIONS[0], stop=stop, **own)).json()
    assert body["choices"][0]["message"]["content"] == rollout.response[: rollout.response.find(stop)]
    assert body["dlm_rag"]["forwards"] == rollout.forwards <= 6


def decoder_of_settings(decoder, settings):
    return Decoder(
        decoder.denoiser, decoder.retriever, decoder.tokenizer, DecodeConfig(**(SETTINGS | settings))
    )


@pytest.fixture
def folder(tmp_path, tiny, corpus_file, monkeypatch):
    """Where the programs run."""
    (tmp_path / "gemma").symlink_to(tiny)
    rows = [
        {"id": f"n{n}", "question": f"Who wrote book number {n}?", "golden_answers": ["Jane Austen"]}
        for n in range(6)
    ]
    write_jsonl_file(tmp_path / "q.jsonl", rows)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def called(program, *words):
    """Runs a program here with the tiny model: its exit code."""
    with (
        patch.object(sys, "argv", ["dlm-rag", *WORDS, "--questions", "q.jsonl", *words]),
        pytest.raises(SystemExit) as stop,
    ):
        run_program(program.main)
    return stop.value.code


def timeless(path):
    return [
        {k: v for k, v in json.loads(line).items() if k not in ("seconds", "steps")}
        for line in path.read_text().splitlines()
    ]


@pytest.mark.slow
def test_a_run_that_was_cut_short_goes_on(folder, capsys):
    """Killed in the middle of the third line: the page is then that of all, and the files are the same."""
    words = ("--out", "a.jsonl", "--trace", "t.jsonl", "--html", "page.html")
    assert called(sample, *words) == 0
    out, trace = folder / "a.jsonl", folder / "t.jsonl"
    whole, traced = timeless(out), [*map(strip_times_and_confidences, read_trace(trace))]
    assert any(step.remasked for rollout in traced for step in rollout.steps)
    lines, text = out.read_text().splitlines(keepends=True), trace.read_text()
    out.write_text("".join(lines[:2]) + lines[2][:40])
    trace.write_text(text[: text.index('{"id": "n3"') + 9])
    (folder / "page.html").unlink()
    capsys.readouterr()
    assert called(sample, *words) == 0
    assert "2 of 6 questions are answered already" in capsys.readouterr().err
    assert timeless(out) == whole and [*map(strip_times_and_confidences, read_trace(trace))] == traced
    page = (folder / "page.html").read_text()
    assert all(f"book number {n}?" in page for n in range(6)) and '"ghosts":true' in page


@pytest.mark.slow
def test_interleaved_and_static_are_compared(folder):
    assert called(evaluate, "--out", "runs", "--compare", "interleaved,static") == 0
    settings = json.loads((folder / "runs" / "scores.json").read_text())["settings"]
    searches = {name: found["groups"]["all"]["searches"]["mean"] for name, found in settings.items()}
    assert searches["static"] == 1 < searches["interleaved"]


@pytest.mark.slow
@pytest.mark.skipif(find_spec("ray") is None, reason="pip install 'dlm_rag[workers]'")
def test_workers_answer_as_one_process_does(folder, ray_token, capsys):
    words = ("--out", "a.jsonl", "--trace", "t.jsonl")
    assert called(sample, *words) == 0
    others = tuple(word.replace(".jsonl", "-w.jsonl") for word in words)
    assert called(sample, *others, "workers=2") == 0
    one, other = (
        {rollout.id: strip_times_and_confidences(rollout) for rollout in read_trace(folder / name)}
        for name in ("t.jsonl", "t-w.jsonl")
    )
    assert other == one and len(one) == 6
    assert "2 workers" in capsys.readouterr().err
    assert called(evaluate, "--out", "runs", "--compare", "interleaved,static", "workers=2") == 0
    record = {line["id"]: line for line in timeless(folder / "runs" / "interleaved" / "answers.jsonl")}
    assert {name: line["response"] for name, line in record.items()} == {
        name: rollout.response for name, rollout in one.items()
    }


@pytest.mark.slow
def test_a_server_process_says_what_sample_says(folder):
    """`dlm-rag serve` and `dlm-rag sample`, each in its own process, with streams among other questions."""
    said = {}
    for question in QUESTIONS[:2]:
        command = [sys.executable, str(ROOT / "sample.py"), question, *WORDS]
        done = subprocess.run(command, capture_output=True, text=True, check=True)
        said[question] = json.loads(done.stdout)
    port = find_free_port()

    async def asked():
        base = f"http://127.0.0.1:{port}"
        async with httpx.AsyncClient(base_url=base, timeout=120) as client:
            assert 'id="ask"' in (await client.get("/")).text
            bodies = [chat_body(question, stream=question in said) for question in QUESTIONS]
            posts = [client.post("/v1/chat/completions", json=body) for body in bodies]
            answers = await asyncio.gather(*posts)
            return dict(zip(QUESTIONS, answers, strict=True))

    with start_server_process(folder, port, *WORDS):
        answers = asyncio.run(asked())
    assert {answer.status_code for answer in answers.values()} == {200}
    for question, record in said.items():
        *chunks, (_, last), (_, done) = parse_events(answers[question])
        texts = [body["choices"][0]["delta"]["content"] for _, body in [*chunks, (None, last)]]
        assert done == "[DONE]" and "".join(texts) == record["response"]
        for key in ("answer", "citations", "forwards", "retrievals", "tokens"):
            assert last["dlm_rag"][key] == record[key], key
