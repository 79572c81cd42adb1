"""DiffusionGemma against its own class: tokens and steps of `generate`, batches, evidence that changes."""

import json
from functools import partial
from itertools import count
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from dlm_rag.diffusion_gemma import decoding
from dlm_rag.engine.rules import Proposals
from dlm_rag.model.checkpoint import open_checkpoint
from dlm_rag.questions import Question
from dlm_rag.randomness import make_keyed_generator
from dlm_rag.retrieval.base import NoRetriever
from tests.support.gemma_decoding import QueryHashRetriever, make_gemma_decoder
from tests.support.rollouts import canvases_of
from tests.support.tiny_diffusion_gemma import PAD, write_tiny_gemma


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    """The checkpoint; of its answers most go on to the last step."""
    return write_tiny_gemma(tmp_path_factory.mktemp("gemma"))


def test_a_checkpoint_opens_without_its_weights_and_loads_as_it_was_written(tmp_path):
    from transformers import DiffusionGemmaForBlockDiffusion

    folder = write_tiny_gemma(tmp_path, max_new_tokens=30)
    checkpoint = open_checkpoint(folder)
    shape = checkpoint.config
    assert shape.block_size == 12 and shape.canvas_length == 36 and shape.steps_per_block == 6
    model = decoding.DiffusionGemma(checkpoint, torch.device("cpu"), torch.float32).model
    theirs = DiffusionGemmaForBlockDiffusion.from_pretrained(folder)
    for (name, ours), (_, value) in zip(model.named_parameters(), theirs.named_parameters(), strict=True):
        assert torch.equal(ours, value), name
    seen = sum(value.numel() for name, value in theirs.model.decoder.named_parameters())
    scalars = 2 * len(theirs.model.decoder.layers)  # buffers, also of the encoder
    assert checkpoint.count_weight_bytes(2) == 2 * (seen + scalars)
    raw = json.loads((folder / "config.json").read_text())
    del raw["vision_config"]  # transformers would build a tower of 167 M parameters
    built = DiffusionGemmaForBlockDiffusion(decoding.make_class_config(raw))
    assert sum(value.numel() for value in built.parameters()) < 10**5


class SameNoise:
    """The numbers that a row draws, for the sampler of transformers."""

    def __init__(self, length, seed, name):
        self.generator, self.length = make_keyed_generator(seed, name), length
        self.noise = self.draw(1)[0]
        self.begin, self.steps, self.fresh = -1, 0, True

    def draw(self, count):
        return torch.rand(count, self.length, generator=self.generator, dtype=torch.float64)

    def initialize_canvas(self, sampler, *_, **__):
        if self.fresh:  # the beginning of a canvas
            self.begin = 0 if self.begin < 0 else self.begin + sampler.canvas_length
        self.fresh = False
        return (self.noise[None, self.begin : self.begin + sampler.canvas_length] * 261).long()

    def multinomial(self, probs, num_samples):
        uniform, self.noise = self.draw(2)
        self.steps += 1
        at = uniform[self.begin : self.begin + len(probs)].float().double()[:, None]
        cumulative = probs.double().cumsum(-1)
        return torch.searchsorted(cumulative, at * cumulative[:, -1:])


def theirs(model, ids, noise, monkeypatch, **settings):
    """What `generate` writes after a prompt with these numbers, and how many steps it takes."""
    from transformers.models.diffusion_gemma import generation_diffusion_gemma as generation

    kind, finalize = generation.EntropyBoundSampler, type(model)._finalize_canvas

    def finalized(**given):
        noise.fresh = True
        return finalize(**given)

    with monkeypatch.context() as patch:
        patch.setattr(kind, "initialize_canvas", lambda *given, **more: noise.initialize_canvas(*given))
        patch.setattr(torch, "multinomial", noise.multinomial)
        patch.setattr(type(model), "_finalize_canvas", staticmethod(finalized))
        found = model.generate(torch.tensor([ids]), **settings).sequences[0, len(ids) :].tolist()
    return found, noise.steps


@pytest.mark.parametrize("heat", [(1e-3, 2e-3), (0.4, 0.8), (1.0, 3.0)])
@pytest.mark.parametrize("canvases", [1, pytest.param(3, marks=pytest.mark.slow)])
def test_tokens_and_steps_are_those_of_generate(tiny, corpus, monkeypatch, heat, canvases):
    """Behind a first canvas in float64: a random model that is fed on its own makes more of rounding."""
    low, high = heat
    dtype, steps = torch.float32 if canvases == 1 else torch.float64, 20
    decoder = make_gemma_decoder(
        tiny, NoRetriever(corpus, 1), dtype, max_new_tokens=12 * canvases, heat=(low, high),
        seed=3, steps_per_block=steps,
    )  # fmt: skip
    for name in ("a", "b"):
        question = Question(name, f"Who wrote Emma, {name}?")
        (rollout,) = decoder.decode([question])
        ids = decoder.tokenizer.build_prompt(question.question, []).ids
        noise = SameNoise(12 * canvases, 3, name)
        found, taken = theirs(
            decoder.denoiser.model, ids, noise, monkeypatch, max_new_tokens=12 * canvases, t_max=high,
            t_min=low, max_denoising_steps=steps,
        )  # fmt: skip
        ours = list(canvases_of(rollout, PAD))[-1]
        assert ours[: len(found)] == found and rollout.forwards == taken
        assert set(ours[len(found) :]) <= {PAD}  # canvases behind an end token


QUESTIONS = [
    Question("short", "Who?"),
    Question("long", "In which village was the author born who wrote the novel Emma, published in 1815?"),
    Question("middle", "Where was Frank Herbert born?"),
]


def lines(rollouts):
    """All that a rollout says but how sure it was and how long it took."""

    def told(step):
        written = [(token.position, token.token_id) for token in step.written_tokens]
        return step.query, step.passage_ids, step.retrieved, step.remasked, written

    return [(rollout.response, [*map(told, rollout.steps)]) for rollout in rollouts]


@pytest.mark.slow
@pytest.mark.parametrize("overlap", ["none", "pipeline"])
def test_rows_of_different_lengths_are_what_each_is_alone(tiny, corpus, overlap):
    """Four questions in two places: rows join and leave while others are in the middle of a canvas."""
    asked = [*QUESTIONS, Question("again", "What is Steventon?")]
    settings = {"max_new_tokens": 24, "heat": (1e-3, 0.5), "overlap": overlap}
    retriever = QueryHashRetriever(corpus, 3)
    alone = make_gemma_decoder(tiny, retriever, batch_size=1, **settings)
    together = make_gemma_decoder(tiny, retriever, batch_size=2, **settings)
    one = [alone.decode([question])[0] for question in asked]
    assert lines(together.decode(asked)) == lines(one)
    assert any(step.remasked for rollout in one for step in rollout.steps)
    assert any(step.edited for rollout in one for step in rollout.steps)
    assert len({step.passage_ids for rollout in one for step in rollout.steps}) > len(one)


def test_a_step_that_the_memory_does_not_hold_gives_the_same_tokens_row_by_row(tiny, corpus, monkeypatch):
    """Also where it fails in the middle: no row has seen its own logits yet."""
    make = partial(make_gemma_decoder, tiny, QueryHashRetriever(corpus, 3), batch_size=2, heat=(0.4, 0.8))
    expected = lines(make(max_new_tokens=12).decode(QUESTIONS[:2]))
    read, calls = decoding._read_logits, count()

    def fail_once(*given):
        if next(calls) == 3:  # the second row of the second step
            raise torch.OutOfMemoryError("CUDA out of memory")
        return read(*given)

    monkeypatch.setattr(decoding, "_read_logits", fail_once)
    assert lines(make(max_new_tokens=12).decode(QUESTIONS[:2])) == expected and next(calls) > 5


def test_logits_beside_longer_texts_are_those_of_the_text_alone(tiny):
    checkpoint = open_checkpoint(tiny)
    denoiser = decoding.DiffusionGemma(checkpoint, torch.device("cpu"), torch.float32)
    torch.manual_seed(0)
    texts = [denoiser.extend_cache([], torch.randint(0, 256, (n,)).tolist()) for n in (5, 40, 17)]
    canvas, before = torch.randint(0, 256, (3, 12)), [None, torch.randn(12, 261), torch.randn(12, 261)]
    with torch.inference_mode():
        together = denoiser.compute_canvas_logits(canvas, denoiser.stack_caches(texts, 12), before)
        for row, text in enumerate(texts):
            alone = denoiser.compute_canvas_logits(
                canvas[row][None], denoiser.stack_caches([text], 12), [before[row]]
            )[0]
            assert torch.allclose(together[row], alone, atol=1e-4)  # of logits up to 30


@pytest.mark.parametrize(("cut", "runs"), [((1, 2, 3, 4), 1), ((1, 2, 9), 1), ((1, 2, 3), 0), ((7,), 1)])
def test_a_text_that_changes_runs_from_its_first_change(cut, runs):
    calls = []

    def extend_cache(kept, ids):
        calls.append(ids)
        old = kept[0][0] if kept else torch.zeros(1, 1, 0, 1)
        both = torch.cat([old, torch.tensor(ids, dtype=torch.float).view(1, 1, -1, 1)], dim=2)
        return [(both, both)]

    runner = decoding.GemmaRunner(SimpleNamespace(extend_cache=extend_cache))
    runner.prefill(0, (1, 2, 3))
    slot = runner.prefill(0, cut)
    assert slot.keys_values[0][0].flatten().tolist() == list(cut)
    assert len(calls) == 1 + runs and runner.cache_stats.requested_tokens == 3 + len(cut)
    assert runner.cache_stats.encoded_tokens == sum(map(len, calls))


@pytest.mark.parametrize(("steps", "settled_at"), [(0, 0), (1, 3), (2, 6), (3, None)])
def test_a_canvas_is_settled_once_its_most_probable_tokens_have_stayed(steps, settled_at):
    shape = SimpleNamespace(entropy_bound=0.1, stop_entropy=1.0, convergence_steps=steps)
    canvas = decoding.UniformNoiseCanvas(2, PAD, 0, shape=shape, noise=np.zeros(2, np.int64))
    canvas.next_noise, settled, zero = canvas.noise, [], np.zeros(2)
    for second in (3, 4, 5, 5, 6, 6, 6):
        best = {"token_ids": np.array([1, second]), "confidence": zero, "log_prob": zero}
        extra = {f"best_{name}": value for name, value in best.items()}
        found = Proposals.from_arrays(positions=np.arange(2), **best, entropy=zero, margin=zero, **extra)
        canvas.write(found, None, SimpleNamespace(steps_per_block=99), (0, 2))
        settled.append(canvas.frozen_length == 2)
    assert settled == [settled_at is not None and n >= settled_at for n in range(7)]


def test_the_schedule_and_the_noise():
    assert [decoding.anneal_temperature(n, 4, 0.8, 0.4) for n in range(4)] == pytest.approx(
        [0.8, 0.7, 0.6, 0.5]
    )
    assert decoding.uniform_tokens(np.array([0.0, 0.24, 0.5, 1 - 1e-17]), 4).tolist() == [0, 0, 2, 3]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_a_gpu_gives_the_logits_of_the_cpu(tiny):
    checkpoint, found = open_checkpoint(tiny), []
    for device in ("cpu", "cuda"):
        denoiser = decoding.DiffusionGemma(checkpoint, torch.device(device), torch.float32)
        with torch.inference_mode():
            texts = denoiser.stack_caches([denoiser.extend_cache([], range(n)) for n in (5, 40)], 12)
            canvas = torch.arange(24, device=device).view(2, 12)
            found.append(denoiser.compute_canvas_logits(canvas, texts, [None, None]).cpu())
    assert torch.allclose(*found, atol=1e-2)
