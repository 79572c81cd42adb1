"""Log-probabilities of an answer's tokens: those of plain forward passes at the last step that could change
them, and of no effect on what is written.
"""

from dataclasses import replace

import numpy as np
import pytest
import torch

from dlm_rag.config import DecodeConfig
from dlm_rag.decode.decoder import Decoder
from dlm_rag.decode.token_logprobs import collect_logprobs
from dlm_rag.decode.trace_file import TraceWriter, build_trace_header, read_trace
from dlm_rag.diffusion_gemma.model import DiffusionGemma
from dlm_rag.questions import Question
from dlm_rag.retrieval.composite import NoRetriever
from dlm_rag.tokenizer.prompts import PromptTemplate
from tests.support.block_attention import MASK, block_denoiser
from tests.support.gemma_decoding import make_gemma_decoder
from tests.support.tiny_diffusion_gemma import write_tiny_gemma
from tests.support.tiny_models import tiny_denoiser, tiny_tokenizer

QUESTION = "who was "  # two blocks of 4
IN_BLOCKS = {"block_grid": "prompt"}
KINDS = {  # a denoiser and settings
    "masked": (tiny_denoiser, {}),
    "sampled": (tiny_denoiser, {"temperature": 2.0}),
    "policy": (tiny_denoiser, {"commit_rule": "sampled", "temperature": 2.0}),
    "shifted": (lambda: tiny_denoiser(shifted=True), {"commit_threshold": 0.3}),
    "blocks": (lambda: block_denoiser(**IN_BLOCKS), {"commit_threshold": 0.3}),
    "edits": (lambda: block_denoiser(**IN_BLOCKS), {"edit_threshold": 0.5, "commit_threshold": 0.1}),
    "autoregressive": (lambda: block_denoiser(causal_context=True), {"mode": "autoregressive"}),
}


def make_decoder(kind, corpus, **more):
    make, settings = KINDS[kind]
    own = DecodeConfig(**({"max_new_tokens": 12, "early_stopping": False} | settings | more))
    tokenizer = tiny_tokenizer(PromptTemplate("{question}", chat=False))
    return Decoder(make(), NoRetriever(corpus, 1), tokenizer, own)


def decode(decoder):
    """Rollouts, and what the model was shown."""
    views, propose = [], decoder.model_runner.propose

    def note(shown):
        views.extend(replace(view, canvas=view.canvas.copy()) for view in shown)
        return propose(shown)

    decoder.model_runner.propose = note
    return decoder.decode([QUESTION]), views


def last_log_probs(denoiser, views, causal):
    """By position, the log-softmax (V,) of the last view that asks for it, by the plain forward pass."""
    found = {}
    for view in views:
        ids = [*view.laid_out_prompt.canvas_prefix.ids, *view.canvas.tolist()]
        first = len(ids) - len(view.canvas)
        with torch.no_grad():
            logits = denoiser(torch.tensor([[*ids, 0] if causal else ids]), block=1 if causal else None)
        for place in view.positions.tolist():
            found[place] = logits[0, first + place].log_softmax(-1)
    return found


@pytest.mark.parametrize("kind", KINDS)
def test_they_are_those_of_the_last_step_that_could_change_a_token(kind, corpus):
    decoder = make_decoder(kind, corpus, top_logprobs=4)
    (rollout,), views = decode(decoder)
    scores = collect_logprobs(rollout)
    expected = last_log_probs(decoder.denoiser, views, kind == "autoregressive")
    final = rollout.final_tokens()
    assert scores.keys() == final.keys() and len(final) == rollout.canvas_length
    for place, (token, top) in scores.items():
        assert token.token_id == final[place].token_id
        assert token.log_prob == pytest.approx(float(expected[place][token.token_id]), abs=1e-4)
        assert token.confidence == pytest.approx(np.exp(token.log_prob), rel=1e-4)
        allowed = expected[place].index_fill(0, torch.tensor([MASK]), -torch.inf)
        values, ids = allowed.topk(4)
        assert [nats for _, _, nats in top] == pytest.approx(values.tolist(), abs=1e-4)
        assert [token for token, _, _ in top] == ids.tolist()
        assert [text for _, text, _ in top] == [decoder.tokenizer.token_text(n) for n in ids.tolist()]
    changed = [t for t, _ in scores.values() if final[t.position].log_prob != t.log_prob]
    assert bool(changed) == ("edit_threshold" in KINDS[kind][1]), "it matters which step"


@pytest.mark.parametrize("kind", KINDS)
def test_asking_for_them_changes_no_token(kind, corpus, tmp_path):
    """Beside rows that ask for more, for less or for none, which have none of it in their traces; read
    back they are the same.
    """
    decoder = make_decoder(kind, corpus)
    (plain,), _ = decode(decoder)
    engine, found, trace = decoder.new_engine(), {}, tmp_path / "trace.jsonl"
    for top in (2, 0, 5, None):
        settings = replace(decoder.config, top_logprobs=top)
        found[engine.submit(Question("q1", QUESTION), settings)] = top
    rollouts = {}
    while engine.busy:
        rollouts |= {event.ticket: event.rollout for event in engine.step()}
    for ticket, top in found.items():
        rollout = rollouts[ticket]
        assert list(rollout.canvases(MASK)) == list(plain.canvases(MASK))
        for one, other in zip(rollout.steps, plain.steps, strict=True):
            assert [t.log_prob for t in one.committed] == pytest.approx(
                [t.log_prob for t in other.committed]
            )
        header = build_trace_header(
            decoder.denoiser.config,
            decoder.tokenizer,
            "joint",
            decoder.config,
            top_k=1,
            model="",
            corpus="",
        )
        trace.unlink(missing_ok=True)
        TraceWriter(trace, header).write(rollout)
        (read,) = read_trace(trace)
        assert collect_logprobs(read) == collect_logprobs(rollout)
        assert {len(others) for _, others in collect_logprobs(read).values()} == {top or 0}
        assert ('"top_logprobs": [' in trace.read_text()) == bool(top)
        has_edits = "edit_threshold" in KINDS[kind][1]
        assert ('"kept":' in trace.read_text()) == (has_edits and top is not None)


def test_of_uniform_noise_they_are_those_of_the_last_step_of_a_block(corpus, tmp_path, monkeypatch):
    """As SGLang has it: of the logits before any temperature, at the place of the token."""
    decoder = make_gemma_decoder(
        write_tiny_gemma(tmp_path / "gemma"), NoRetriever(corpus, 1), max_new_tokens=24, top_logprobs=3,
        heat=(1e-3, 0.5), early_stopping=False,
    )  # fmt: skip
    computed, compute = [], DiffusionGemma.compute_canvas_logits

    def note(*args):
        for logits in compute(*args):
            computed.append(logits.log_softmax(-1))
            yield logits

    monkeypatch.setattr(DiffusionGemma, "compute_canvas_logits", note)
    (rollout,), views = decode(decoder)
    last = {view.finished_length: logits for view, logits in zip(views, computed, strict=True)}
    assert list(last) == [0, 12] and len(views) > 4
    scores, final = collect_logprobs(rollout), rollout.final_tokens()
    assert scores.keys() == final.keys() == set(range(24))
    for place, (token, top) in scores.items():
        expected = last[place // 12 * 12][place % 12]
        assert token.token_id == final[place].token_id
        assert token.log_prob == pytest.approx(float(expected[token.token_id]), abs=1e-5)
        values, ids = expected.topk(3)
        assert [nats for _, _, nats in top] == pytest.approx(values.tolist(), abs=1e-5)
        assert [token for token, _, _ in top] == ids.tolist() and ids[0] == token.token_id
    assert any(score.token.log_prob != final[place].log_prob for place, score in scores.items())
