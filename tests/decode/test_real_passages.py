"""Interleaved decoding over real passages runs to the end on every question, whatever they hold."""

import json

import pytest

from dlm_rag import Decoder, Denoiser, Tokenizer, load_retriever
from dlm_rag.config import DecodeConfig
from dlm_rag.decode.terminal import render_answer
from dlm_rag.questions import Question, read_questions
from dlm_rag.retrieval.corpus import open_corpus
from tests.support.cases import first_is_fast
from tests.support.passages import write_jsonl_file


def make_decoder(golden, corpus_file, layout="joint", **settings):
    folder = golden / "checkpoints" / "tiny-dream"
    return Decoder(
        Denoiser.from_pretrained(folder),
        load_retriever(corpus_file),
        Tokenizer.from_pretrained(folder, layout),
        # A low threshold: the toy model writes nonsense either way, and this takes a step or two.
        DecodeConfig(**({"max_new_tokens": 32, "commit_threshold": 0.3} | settings)),
        layout,
    )


@pytest.mark.slow
def test_real_questions_are_answered(golden, real):
    questions = read_questions(real / "hotpotqa" / "questions.jsonl")[:32]
    decoder = make_decoder(golden, real / "hotpotqa" / "corpus.jsonl", batch_size=16)
    rollouts = decoder.decode(questions)
    assert all(rollout.finished and len(rollout.evidence) == 7 for rollout in rollouts)
    assert all(json.loads(json.dumps(r.answer_record()))["response"] == r.response for r in rollouts)
    assert any(step.retrieved for rollout in rollouts for step in rollout.steps[1:])


@pytest.mark.parametrize("layout", first_is_fast(["independent", "joint", "prefix"]))
def test_passages_of_two_thousand_tokens_are_cut_counted_and_shown(
    golden, real, tmp_path, layout, monkeypatch
):
    """Twenty real passages in one, with unicode and quotes: seven of them exceed the 4,096 positions.

    Rows are as long only in a corpus that is too large to be read for documents.
    """
    monkeypatch.setattr("dlm_rag.retrieval.corpus.MAX_CUT_CORPUS_BYTES", 0)
    passages = open_corpus(real / "2wikimultihopqa" / "corpus.jsonl")
    texts = [
        " ".join(p.text for p in passages[n : n + 20]) + ' “Zoë” "said" 東京' for n in range(0, 200, 20)
    ]
    path = write_jsonl_file(
        tmp_path / "long.jsonl", [{"id": str(n), "text": t} for n, t in enumerate(texts)]
    )
    decoder = make_decoder(golden, path, layout)
    lengths = [len(decoder.tokenizer.encode(text)) for text in texts]
    assert min(lengths) > 2000
    rollout = decoder.decode([Question("q", "Who said “Zoë” in 東京, and what is said of the film?")])[0]
    assert rollout.finished and rollout.cut["tokens"] > 5000
    if layout == "independent":
        assert rollout.cut["passages_dropped"] == 0 and rollout.cut["passages_shortened"] == 7
    else:
        assert rollout.cut["passages_dropped"] >= 2 and rollout.cut["passages_shortened"] <= 1
    assert rollout.answer_record()["cut"] == rollout.cut
    shown = "".join(segment.text for segment in _segments(render_answer(rollout)))
    assert f"{rollout.cut['tokens']} tokens of evidence" in shown


def _segments(renderable):
    from rich.console import Console

    return Console(width=120).render(renderable)
