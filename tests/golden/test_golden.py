"""Step for step what the published systems did on the tiny checkpoints (see the golden README)."""

import json

import pytest
import torch

from dlm_rag import Decoder, Denoiser, Tokenizer, load_retriever
from dlm_rag.config import load_config
from tests.support.golden_traces import TRACES, check_trace


@pytest.fixture
def restore_threads():
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize(
    ("name", "threads"), [*((name, 1) for name in TRACES), pytest.param("sardi", 2, marks=pytest.mark.slow)]
)
def test_trace_is_identical(golden, restore_threads, name, threads):
    torch.set_num_threads(threads)
    check_trace(golden, name)


def test_one_at_a_time_is_the_batch(golden):
    """The published system decodes one question at a time; ours does so with the same tokens."""
    trace = json.loads((golden / "traces" / "sardi.json").read_text())["questions"][1]
    folder = golden / "checkpoints" / "tiny-dream"
    denoiser, tokenizer = Denoiser.from_pretrained(folder), Tokenizer.from_pretrained(folder)
    retriever, config = load_retriever(golden / "corpus.jsonl"), load_config("sardi").decode
    decoder = Decoder(denoiser, retriever, tokenizer, config)
    rollout = decoder.decode([trace["question"]])[0]
    tokens = [[token.token_id for token in step.committed] for step in rollout.steps[1:]]
    assert tokens == [step["tok"] for step in trace["steps"]]
