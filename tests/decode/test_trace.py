"""A trace alone, with the tokenizer, makes every prompt, page and training row again."""

import json
from dataclasses import replace

import pytest

from dlm_rag.decode.trace_file import read_trace, read_trace_header
from dlm_rag.errors import TraceError, UserError
from dlm_rag.evaluation.metrics import score_rollout
from dlm_rag.evidence.prompt_segments import ContextBudget, fit_passages
from dlm_rag.tokenizer.prompts import PromptTemplate
from tests.support import traces
from tests.support.tiny_models import byte_tokenizer, tiny_tokenizer

LAYOUTS = ["joint", "prefix", "independent"]


def restore_evidence_texts(rollout, header, tokenizer):
    """The rollout with what of each passage was in the prompt, as the decoder leaves it."""
    texts = {}
    for prompt in traces.rebuild_evidence(rollout, header, tokenizer):
        texts |= {name: min(texts.get(name, text), text, key=len) for name, text in prompt.texts.items()}
    return replace(rollout, evidence_texts=texts)


@pytest.fixture
def tokenizer_folder(tmp_path):
    byte_tokenizer().save_pretrained(tmp_path / "tokenizer")
    return tmp_path / "tokenizer"


@pytest.mark.parametrize("settings", [{}, {"retrieval_interval": 2}], ids=str)
@pytest.mark.parametrize("shifted", [False, True])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_prompt_and_training_row_is_made_again(
    corpus, tmp_path, tokenizer_folder, layout, shifted, settings
):
    decoder = traces.make_decoder(corpus, layout, shifted=shifted, **settings)
    rollouts, seen = traces.decode_and_spy(decoder, traces.TRACE_QUESTIONS)
    path = traces.write_rollouts(tmp_path / "t.jsonl", traces.make_trace_header(decoder), rollouts)

    header = read_trace_header(path)
    tokenizer, made = traces.rebuild_tokenizer(header, tokenizer_folder), {}
    for rollout in read_trace(path):
        made |= traces.rebuild_inputs(rollout, header, tokenizer)
    assert made == seen
    assert max(rollout.cut.get("passages_shortened", 0) for rollout in rollouts)
    dropped = [step.dropped for rollout in rollouts for step in rollout.steps if step.dropped]
    assert bool(dropped) == (layout != "independent"), "in independent each passage has a place"


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_rollout_read_back_is_the_rollout(corpus, tmp_path, tokenizer_folder, layout):
    decoder = traces.make_decoder(corpus, layout)
    rollouts = decoder.decode(traces.TRACE_QUESTIONS)
    path = traces.write_rollouts(tmp_path / "t.jsonl", traces.make_trace_header(decoder), rollouts)
    header = read_trace_header(path)
    assert header == traces.make_trace_header(decoder)
    for again, rollout, question in zip(read_trace(path), rollouts, traces.TRACE_QUESTIONS, strict=True):
        assert again == replace(rollout, evidence_texts={}), "confidences and log-probabilities bit for bit"
        assert (
            restore_evidence_texts(again, header, traces.rebuild_tokenizer(header, tokenizer_folder))
            == rollout
        )
        assert score_rollout(again, question) == score_rollout(rollout, question)
        assert list(again.replay()) == list(rollout.replay())
        assert again.to_dict() == rollout.to_dict()


def test_what_was_dropped_shapes_the_prompt():
    """ "[1] x" is followed by a line break because a second fact was found, though it has no place."""
    tokenizer = tiny_tokenizer(PromptTemplate(head="{question}\n", fact="[{number}] {passage}"))
    room = ContextBudget("joint", context_length=2 + 5 + 1 + 4, canvas_length=4, passage_length=1)
    both = fit_passages(tokenizer, "?", {"one": "x", "two": "y"}, room)
    alone = fit_passages(tokenizer, "?", {"one": "x"}, room)
    assert bytes(both.prompt.ids) == b"?\n[1] x\n" and bytes(alone.prompt.ids) == b"?\n[1] x"
    assert (both.texts, both.dropped, alone.texts) == ({"one": "x"}, ("two",), {"one": "x"})


def test_a_trace_line_has_the_fields_of_the_contract(tmp_path):
    path = traces.write_rollouts(tmp_path / "t.jsonl", traces.HEADER, [traces.make_rollout_with()])
    first, *passages, line = map(json.loads, path.read_text().splitlines())
    assert first["trace"] == 2 and first["settings"]["commit_threshold"] == 0.9
    assert passages == [{"passage": name, "text": f"text of {name}"} for name in "abc"]
    assert set(line) == {"id", "question", "prompt_layout", "canvas_length", "steps", "response"}
    assert set(line["steps"][0]) == {"step", "query", "passage_ids", "retrieved", "committed", "seconds"}
    assert line["steps"][1]["committed"][0] == {
        "position": 0, "token_id": 5, "token": "x", "confidence": 0.9, "log_prob": -0.105,
    }  # fmt: skip
    assert line["steps"][2]["remasked"] == [1]


def test_rows_differ_in_settings_texts_and_errors(tmp_path):
    """A search engine may say something else under the same id an hour later."""
    first = traces.make_rollout_with()
    own = traces.make_rollout_with(id="q2", settings=first.settings | {"temperature": 0.7, "seed": 5})
    later = traces.make_rollout_with(id="q3", confidence=0.0, passages=first.passages | {"b": "news of b"})
    failed = traces.make_rollout_with(
        id="q4", error="the search failed", response="", steps=[], passages={}
    )
    path = traces.write_rollouts(tmp_path / "t.jsonl", traces.HEADER, [first, own, later, failed])
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    settings = [line.get("settings") for line in lines if "id" in line]
    assert settings == [None, {"temperature": 0.7, "seed": 5}, None, None]
    with path.open("a") as file:
        file.write("not a line\n")
    reading = read_trace(path)
    assert [next(reading) for _ in range(4)] == [first, own, later, failed], "what follows is not read yet"
    with pytest.raises(TraceError):
        next(reading)


def test_a_bad_trace_is_one_sentence(tmp_path):
    path = traces.write_rollouts(tmp_path / "t.jsonl", traces.HEADER, [traces.make_rollout_with()])
    header, *passages, line = path.read_text().splitlines(keepends=True)
    broken = json.loads(line)
    del broken["steps"][1]["query"]
    for text, says in {
        line: "line 1: this is no line of a trace of version 2",  # questions alone
        header.replace('"trace": 2', '"trace": 3') + line: "is a trace of version 3, known is 2",
        header.replace("mask_id", "mask") + line: "line 1: this is no line of a trace",
        header + "".join(passages) + json.dumps(broken) + "\n": "line 5: this is no line of a trace",
        header + '{"passage": 1, "text": "x"}\n': "line 2: this is no line of a trace",
    }.items():
        path.write_text(text)
        with pytest.raises(UserError, match=says) as caught:
            list(read_trace(path))
        assert str(path) in str(caught.value) and "\n" not in str(caught.value)
    with pytest.raises(TraceError, match="nowhere.jsonl' was not found"):
        next(read_trace(tmp_path / "nowhere.jsonl"))


def test_a_last_line_cut_short_is_left_out_wherever_the_cut(tmp_path):
    rollouts = [traces.make_rollout_with(), traces.make_rollout_with(id="q2")]
    whole = traces.write_rollouts(tmp_path / "t.jsonl", traces.HEADER, rollouts).read_bytes()
    start = whole.rindex(b"\n", 0, -1) + 1
    path = tmp_path / "torn.jsonl"
    for end in range(start, len(whole) - 1, 11):
        path.write_bytes(whole[:end])
        assert [rollout.id for rollout in read_trace(path)] == ["q1"]
    path.write_bytes(whole[:-1])
    assert [rollout.id for rollout in read_trace(path)] == ["q1", "q2"], "only the line break is missing"
