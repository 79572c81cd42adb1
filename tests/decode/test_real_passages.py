"""Interleaved decoding over real passages runs to the end on every question, whatever they hold."""

import json

import pytest

from dlm_rag import Decoder, Denoiser, Tokenizer, load_retriever
from dlm_rag.config import DecodeConfig
from dlm_rag.questions import read_questions


@pytest.mark.slow
def test_real_questions_are_answered(golden, real):
    """With a low threshold: the toy model writes nonsense either way, and this takes a step or two."""
    folder = golden / "checkpoints" / "tiny-dream"
    questions = read_questions(real / "hotpotqa" / "questions.jsonl")[:16]
    decoder = Decoder(
        Denoiser.from_pretrained(folder),
        load_retriever(real / "hotpotqa" / "corpus.jsonl"),
        Tokenizer.from_pretrained(folder),
        DecodeConfig(max_new_tokens=32, commit_threshold=0.3, batch_size=16),
    )
    rollouts = decoder.decode(questions)
    assert all(rollout.finished and len(rollout.evidence) == 7 for rollout in rollouts)
    assert all(json.loads(json.dumps(r.answer_record()))["response"] == r.response for r in rollouts)
    assert any(step.retrieved for rollout in rollouts for step in rollout.steps[1:])
