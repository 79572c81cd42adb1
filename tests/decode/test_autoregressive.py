"""Autoregressive decoding: the tokens of plain greedy decoding.

The reference is a plain loop under the same evidence: one dense mask, nothing kept.
"""

import random

import pytest
import torch

from dlm_rag import Decoder, Denoiser, Tokenizer
from dlm_rag.config import DecodeConfig, EngineConfig
from dlm_rag.engine import engine
from dlm_rag.errors import ConfigError
from dlm_rag.questions import Question
from dlm_rag.retrieval.base import NoRetriever
from dlm_rag.tokenizer.prompts import PromptTemplate
from tests.support.attention import run_with_mask
from tests.support.block_attention import MASK, block_denoiser
from tests.support.cases import first_is_fast
from tests.support.tiny_models import tiny_tokenizer, write_autoregressive_checkpoint
from tests.support.traces import RotatingRetriever

ASKED = [Question(f"{n}", text) for n, text in enumerate(("who", "what is it", "where was it", "why not?"))]
TWO_MODES = {"causal_context": True, "passage_length": 96}
LENGTH = 20


def two_mode_denoiser(seed, **shape):
    """Which knows few tokens."""
    denoiser = block_denoiser(seed=seed, **TWO_MODES, **shape)
    known = [*b"ab cd", 257]
    with torch.no_grad():
        others = torch.ones(258, dtype=torch.bool)
        others[known] = False
        denoiser.lm_head.weight[others] = 0
        denoiser.lm_head.weight[257] *= 0.3
    return denoiser


def make_decoder(corpus, denoiser, layout="joint", prefix_cache_gib=1.0, **settings):
    fact = PromptTemplate.from_checkpoint(None, layout).fact
    return Decoder(
        denoiser, RotatingRetriever(corpus, 2), tiny_tokenizer(PromptTemplate("{question}\n", fact)),
        DecodeConfig(**({"max_new_tokens": LENGTH} | settings)), layout,
        EngineConfig(prefix_cache_gib=prefix_cache_gib),
    )  # fmt: skip


def decode(decoder):
    """Rollouts, and the prompts that the model was shown, by question and step."""
    shown, run = {}, engine.launch_step

    def spy(runner, rows):
        shown.update({(row.question.id, row.step): row.laid_out_prompt for row in rows})
        return run(runner, rows)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(engine, "launch_step", spy)
        rollouts = decoder.decode(ASKED)
    assert not any(rollout.error for rollout in rollouts)
    return rollouts, shown


def predict_causally(denoiser, laid, text, begin):
    """The most probable token for each position of `text` (n,) from `begin` on, by one dense mask.

    Segments see themselves, up to each token. The chain of prompt and text sees what precedes it; what
    stands after finished text is seen from the last token before `begin` on.
    """
    chain = laid.build_canvas_segment(text, len(text))
    held, at = len(laid.context_segments) - laid.unseen_segments, len(laid.canvas_prefix.ids) + begin - 1
    front, late = laid.context_segments[:held], laid.context_segments[held:]
    names = [n for n, segment in enumerate((*front, *late)) for _ in segment.ids]
    ids = [token for segment in (*front, *late, chain) for token in segment.ids]
    places = [segment.start + n for segment in (*front, *late, chain) for n in range(len(segment.ids))]
    ahead, size = len(names), len(ids)
    allowed = torch.ones(size, size).tril().bool()
    for n in range(ahead):
        allowed[n, :ahead] &= torch.tensor([name == names[n] for name in names])
    seen = torch.tensor([name < len(front) for name in names], dtype=torch.bool)
    allowed[ahead : ahead + at, :ahead] &= seen
    hidden = run_with_mask(denoiser, torch.tensor(ids), torch.tensor(places), allowed)
    first = ahead + at
    with torch.no_grad():
        logits = denoiser.compute_token_logits(hidden[first : first + len(text) - begin])
    logits[:, MASK] = -torch.inf
    return logits.argmax(-1).tolist()


def text_of(rollout):
    tokens = sorted((t.position, t.token_id) for step in rollout.steps for t in step.committed)
    assert [position for position, _ in tokens] == list(range(len(tokens)))
    return [token for _, token in tokens]


def check_by_plain_decoding(decoder, rollouts, shown):
    """What a step writes is what is most probable after the text, under the evidence of that step."""
    for rollout in rollouts:
        text = text_of(rollout)
        assert 257 not in text[:-1] and (len(text) == LENGTH or text[-1] == 257)
        for step in rollout.steps:
            if written := [token.token_id for token in step.committed]:
                begin, laid = step.committed[0].position, shown[rollout.id, step.step]
                upto = text[: begin + len(written)]
                assert predict_causally(decoder.denoiser, laid, upto, begin) == written


MODELS = [3, pytest.param(6, marks=pytest.mark.slow)]
LAYOUTS = [("joint", "recompute"), ("independent", "recompute"), ("independent", "no_evidence")]


def draw_settings(seed):
    rng = random.Random(seed)
    ways = {"batch_size": rng.choice((1, 3, 4)), "overlap": rng.choice(("none", "pipeline"))}
    asks = {"query_policy": rng.choice(("proxy", "committed")), "retrieval_interval": rng.choice((1, 2))}
    return ways | asks, rng.choice((0, 4e-6, 1.0))


@pytest.mark.parametrize("models", MODELS)
@pytest.mark.parametrize(("layout", "order"), first_is_fast(LAYOUTS))
def test_tokens_are_those_of_plain_decoding_under_the_same_evidence(corpus, layout, order, models):
    """Evidence that changes, batches and pools: with 6 models 72 questions of the three layouts."""
    changed = 0
    for seed in range(models):
        settings, pool = draw_settings(seed)
        given = settings | {"finished_block_context": order, "mode": "autoregressive"}
        decoder = make_decoder(corpus, two_mode_denoiser(seed), layout, pool, **given)
        rollouts, shown = decode(decoder)
        changed += sum(len({step.passage_ids for step in rollout.steps}) > 1 for rollout in rollouts)
        check_by_plain_decoding(decoder, rollouts, shown)
        assert all(rollout.forwards == len(text_of(rollout)) for rollout in rollouts)
    assert changed > models // 4, "else nothing was tested"


def test_a_denoiser_whose_finished_tokens_predict_the_next_shows_them_evidence(corpus):
    with pytest.raises(ConfigError, match="without evidence"):
        make_decoder(corpus, two_mode_denoiser(0), "independent", finished_block_context="no_evidence")


@pytest.mark.parametrize(
    ("mode", "others"), [("autoregressive", "diffusion"), ("diffusion", "autoregressive")]
)
def test_a_request_chooses_its_mode_and_others_do_not_notice(corpus, mode, others):
    decoder, other = (make_decoder(corpus, two_mode_denoiser(3), mode=name) for name in (others, mode))
    expected = {rollout.id: written_by(rollout) for rollout in decode(decoder)[0]}
    expected["0"] = written_by(decode(other)[0][0])
    found = {}
    with decoder.new_engine() as engine:
        for question in ASKED:
            engine.submit(question, other.config if question.id == "0" else None)
        while engine.busy:
            found |= {event.rollout.id: event.rollout for event in engine.step() if event.finished}
    assert {n: written_by(rollout) for n, rollout in found.items()} == expected


def written_by(rollout):
    return [token.token_id for step in rollout.steps for token in step.committed]


def test_sampled_tokens_are_the_same_alone_and_in_a_batch(corpus):
    given = {"mode": "autoregressive", "temperature": 1.0}
    found = [
        [text_of(r) for r in decode(make_decoder(corpus, two_mode_denoiser(1), batch_size=n, **given))[0]]
        for n in (1, 4)
    ]
    greedy = decode(make_decoder(corpus, two_mode_denoiser(1), mode="autoregressive"))[0]
    assert found[0] == found[1] != [text_of(rollout) for rollout in greedy]


@pytest.mark.parametrize("family", first_is_fast(["Qwen2", "Qwen3", "Llama"]))
def test_an_autoregressive_checkpoint_writes_what_transformers_generates(tmp_path, corpus, family):
    import transformers

    kinds = (getattr(transformers, f"{family}{part}") for part in ("Config", "ForCausalLM"))
    folder, public = write_autoregressive_checkpoint(tmp_path, *kinds)
    tokenizer = Tokenizer.from_pretrained(folder)
    config = DecodeConfig(max_new_tokens=24)
    decoder = Decoder(Denoiser.from_pretrained(folder), NoRetriever(corpus, 1), tokenizer, config)
    for question, rollout in zip(ASKED, decoder.decode(ASKED), strict=True):
        prompt = torch.tensor([tokenizer.build_prompt(question.question, []).ids])
        with torch.no_grad():
            ids = public.generate(prompt, max_new_tokens=24, do_sample=False, pad_token_id=0)[0]
        assert text_of(rollout) == ids[prompt.shape[1] :].tolist()


@pytest.mark.parametrize(
    ("shape", "settings"),
    [
        ({}, {"mode": "autoregressive"}),
        (TWO_MODES, {"mode": "autoregressive", "commit_rule": "top_k"}),
        (TWO_MODES, {"mode": "autoregressive", "query_window": 4}),
        (TWO_MODES | {"block_size": 1}, {"mode": "diffusion"}),
    ],
    ids=str,
)
def test_what_a_model_was_not_trained_for_is_refused(corpus, shape, settings):
    with pytest.raises(ConfigError):
        make_decoder(corpus, block_denoiser(**({"passage_length": 96} | shape)), **settings)
