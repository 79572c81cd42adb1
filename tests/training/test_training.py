"""Training: examples that follow from (seed, step), the objective by hand, steps, validations."""

import json
import math
import random
import shlex
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F

from dlm_rag import Denoiser, Tokenizer
from dlm_rag.commands.train import StopSignal
from dlm_rag.config import TrainConfig, load_config
from dlm_rag.errors import ConfigError, RunError
from dlm_rag.evidence.encode_segments import encode_canvases
from dlm_rag.evidence.prompt_segments import lay_out_prompt
from dlm_rag.model.denoiser_config import DenoiserConfig
from dlm_rag.model.layers import AttentionProbe
from dlm_rag.questions import Question
from dlm_rag.retrieval.corpus import Passage
from dlm_rag.training import batches, sources
from dlm_rag.training.checkpoints import find_latest_checkpoint
from dlm_rag.training.distributed import DistributedContext
from dlm_rag.training.initial_model import (
    DEFAULT_PROMPT_TEMPLATE,
    iterate_world_texts,
    make_training_shape,
    open_initial_model,
    train_tokenizer,
)
from dlm_rag.training.sources import QuestionValidation, WorldExamples
from dlm_rag.training.task import Run
from dlm_rag.training.trainer import make_optimizers, make_train_command, open_trainer, run_training
from tests.support import training
from tests.support.tiny_models import tiny_denoiser

EXAMPLE_SHAPE = DenoiserConfig(1024, canvas_length=120, mask_token_id=0)
SEQUENCES = ["train.sequence_length=64", "train.batch_tokens=256"]


@pytest.fixture(scope="module")
def tokenizer():
    return Tokenizer(train_tokenizer(iterate_world_texts(0, 20), 1024), 0, DEFAULT_PROMPT_TEMPLATE, (1,))


@pytest.fixture(scope="module")
def examples(tokenizer):
    return make_stream(tokenizer).examples(7, range(6), (3, 5))


def make_stream(tokenizer, seed=0, rows_per_set=6, **shape):
    train = TrainConfig(
        seed=seed, passage_sets_per_step=6, rows_per_set=rows_per_set, world_passages=150, steps_per_world=3
    )
    builder = batches.ExampleBuilder(tokenizer, replace(EXAMPLE_SHAPE, **shape))
    return WorldExamples(builder, train, top_k=5)


def test_examples_follow_from_seed_and_step_alone(tokenizer, examples):
    fresh, used = make_stream(tokenizer), make_stream(tokenizer)
    for step in (0, 3, 6):
        used.examples(step, range(6), (2, 2))
    assert fresh.examples(7, range(6), (3, 5)) == used.examples(7, range(6), (3, 5)) == examples
    assert fresh.examples(8, range(6), (3, 5)) != examples
    assert make_stream(tokenizer, 1).examples(7, range(6), (3, 5)) != examples


def test_examples_are_what_they_say(tokenizer, examples):
    assert len(examples) == 36
    for example in examples:
        assert 3 <= len(example.prompt.facts) <= 5 and any(example.masked)
        assert len(example.masked) == len(example.target) <= 120
        text, _ = tokenizer.decode_with_offsets(list(example.target))
        assert " ### " in text or len(example.target) == 120
        for pointer in example.pointers:
            assert example.prompt.facts[pointer.fact][pointer.token] == example.target[pointer.position]
    pointed = sum(bool(example.pointers) for example in examples) / len(examples)
    assert pointed > 0.8, "nearly every row has something to copy"
    missing = sum(
        "### " in tokenizer.decode_with_offsets(list(e.target))[0] and not e.pointers for e in examples
    )
    assert missing < len(examples) / 3


def test_a_set_of_one_row_asks_what_its_evidence_was_searched_for(tokenizer):
    rows = make_stream(tokenizer, rows_per_set=1).examples(7, range(40), (3, 5))
    sentences = [tokenizer.decode_with_offsets(list(row.target))[0].count(".") for row in rows]
    assert max(sentences) > 2, "side questions have two hops at most"


def test_a_response_that_the_canvas_does_not_hold_is_not_drawn(tokenizer):
    for row in make_stream(tokenizer, canvas_length=40).examples(7, range(20), (3, 5)):
        text, _ = tokenizer.decode_with_offsets(list(row.target))
        assert " ### " in text


@pytest.mark.parametrize("least", [1, 3])
def test_questions_have_the_least_number_of_hops(least):
    world, rng = sources.IndexedWorld(0, 60, 3), random.Random(0)
    drawn = [sources.draw_world_question(rng, world, 4, least=least).hops for _ in range(60)]
    assert min(drawn) == least and max(drawn) == 4


def micro_denoiser(*words):
    config = load_config(None, [*training.MICRO_SETTINGS, "train.vocab_size=1024", *words])
    return training.build_denoiser(open_initial_model(config))


PLAIN = batches.LossWeights()


def count(rows):
    return batches.make_masked_batch(
        rows, EXAMPLE_SHAPE, "independent", {1}, batches.LossWeights(end_token=0.15)
    ).counts


def loss_of(denoiser, rows, counts, weights=PLAIN):
    """The loss of rows and its sums, seven logits at a time."""
    objective = batches.MaskedObjective(denoiser)
    objective.logit_chunk = 7
    return objective(batches.make_masked_batch(rows, denoiser.config, "independent", {1}, weights), counts)


def test_the_loss_is_the_textbook_one_at_supervised_positions(examples):
    """Full logits, cross-entropy, the mean by weight; nothing else goes through the last layer."""
    denoiser, rows, passed = micro_denoiser(), examples[:5], []
    total = weight = 0.0
    for row in rows:
        states = [lay_out_prompt(row.prompt, denoiser.config).build_row(row.canvas(0), 0, shifted=False)]
        read = [range(len(row.target))]
        hidden, _ = encode_canvases(denoiser, states, read)
        logits = denoiser.lm_head(denoiser.norm(hidden))
        losses = F.cross_entropy(logits, torch.tensor(row.target), reduction="none")
        weights = torch.tensor([0.15 if t == 1 else 1.0 for t in row.target])
        weights = weights * torch.tensor(row.masked)
        total, weight = total + float((losses * weights).sum().detach()), weight + float(weights.sum())
    mlp = denoiser.layers[-1].mlp
    mlp.register_forward_pre_hook(lambda _, inputs: passed.append(len(inputs[0])))
    counts = count(rows)
    found, sums = loss_of(denoiser, rows, counts, batches.LossWeights(end_token=0.15))
    assert float(found.detach()) == pytest.approx(total / weight, rel=1e-4)
    assert float(sums["tokens"]) == pytest.approx(total, rel=1e-4)
    assert passed[-1] == counts["supervised"] == sum(sum(row.masked) for row in rows)


def test_the_chunked_loss_is_the_cross_entropy_with_its_gradients():
    generator = torch.Generator().manual_seed(0)
    x, head = (torch.randn(n, 8, generator=generator, requires_grad=True) for n in (23, 50))
    targets, weights = torch.arange(23) % 50, torch.rand(23, generator=generator)
    expected = (F.cross_entropy(x @ head.t(), targets, reduction="none") * weights).sum()
    slopes = torch.autograd.grad(expected * 0.3, (x, head))
    for chunk in (1, 5, 23, 100):
        found, right = batches.ChunkedCrossEntropy.apply(x, head, targets, weights, chunk)
        torch.testing.assert_close(found, expected)
        torch.testing.assert_close(torch.autograd.grad(found * 0.3, (x, head)), slopes)
        assert torch.equal(right, (x @ head.t()).argmax(-1) == targets)


def pointer_loss_of(examples, states, probe):
    counts, places = batches.locate_pointers(examples, states)
    return batches.compute_pointer_loss(counts, torch.from_numpy(places), probe)


@pytest.mark.parametrize(
    ("layout", "block"), [("joint", 0), ("prefix", 0), ("independent", 0), ("independent", 8)]
)
def test_pointer_loss_is_the_mass_where_it_belongs(tokenizer, examples, layout, block):
    """Against the softmax over all keys that a token sees, written out for each pointer."""
    denoiser = micro_denoiser(f"model.evidence_layout={layout}", f"model.block_size={block}")
    example = next(e for e in examples if e.supervised_pointers)
    states, probe = batches.lay_out_examples([example], denoiser.config, layout), AttentionProbe(0)
    encode_canvases(denoiser, states, [[0]], probe=probe)
    start = states[0].canvas_start
    loss, mass = pointer_loss_of([example], states, probe)
    expected, masses = [], []
    for p in example.supervised_pointers:
        first = sum(map(len, example.prompt.facts[: p.fact]))
        first += 0 if layout == "independent" else len(example.prompt.head)
        inside = slice(first, first + len(example.prompt.facts[p.fact]))
        seen = len(probe.keys)
        if block:
            seen -= max(0, len(example.target) - (p.position // block + 1) * block)
        attention = [
            ((probe.keys[:seen, head] @ probe.queries[start + p.position, head]) / 32**0.5).softmax(0)
            for head in (0, 1)
        ]
        masses.append(attention[0][inside].sum())
        expected.append(-(masses[-1].log() + attention[1][first + p.token].log()))
    torch.testing.assert_close(loss, torch.stack(expected).sum())
    assert mass == pytest.approx(float(torch.stack(masses).sum()), rel=1e-5)


def test_the_pointer_loss_is_float32_under_autocast(examples):
    """Of the same queries and keys the same number: what bfloat16 rounds is not rounded again."""
    denoiser, few = micro_denoiser(), [e for e in examples if e.supervised_pointers][:4]
    probe = AttentionProbe(0)
    with torch.autocast("cpu", torch.bfloat16):
        states = batches.lay_out_examples(few, denoiser.config, "independent")
        read = [example.supervised_positions for example in few]
        encode_canvases(denoiser, states, read, probe=probe)
        found = pointer_loss_of(few, states, probe)
    torch.testing.assert_close(found, pointer_loss_of(few, states, probe), rtol=0, atol=0)
    assert probe.keys.dtype == torch.bfloat16 and found[0].dtype == torch.float32


def test_the_parts_of_a_step_add_up_to_the_whole(tokenizer):
    """Losses are divided by the counts of all: the gradients of two halves sum to the whole's."""
    stream, denoiser = make_stream(tokenizer), micro_denoiser()
    terms = batches.LossWeights(0.15, 0.3)
    halves = [
        stream.examples(1, DistributedContext(rank, 2, rank).local_items(6), (2, 3)) for rank in (0, 1)
    ]
    whole = stream.examples(1, range(6), (2, 3))
    assert halves[0][:6] + halves[1][:6] == whole[:12] and len(halves[1]) == 18
    counts = count(whole)
    parts = [count(half) for half in halves]
    assert counts == pytest.approx({name: sum(part[name] for part in parts) for name in counts})
    loss_of(denoiser, whole, counts, terms)[0].backward()
    expected = [p.grad.clone() for p in denoiser.parameters()]
    denoiser.zero_grad()
    for half in halves:
        loss_of(denoiser, half, counts, terms)[0].backward()
    for parameter, gradient in zip(denoiser.parameters(), expected, strict=True):
        torch.testing.assert_close(parameter.grad, gradient, rtol=1e-3, atol=1e-5)


def test_a_part_that_hides_nothing_still_has_gradients_for_all(examples):
    """Zeros: processes sum the gradients of all weights, whatever the masks of one of them."""
    denoiser = micro_denoiser()
    bare = [replace(example, masked=(False,) * len(example.target)) for example in examples[:3]]
    counts = count(examples)
    loss_of(denoiser, bare, counts)[0].backward()
    assert all(p.grad is not None and not p.grad.any() for p in denoiser.parameters())


@pytest.mark.parametrize(
    ("kind", "interval", "compiled"),
    [("selective", 1, 0), ("full", 2, 0), pytest.param("selective", 1, 1, marks=pytest.mark.slow)],
)
def test_checkpointing_changes_no_gradient(examples, kind, interval, compiled):
    denoiser = micro_denoiser()
    counts = count(examples)
    loss_of(denoiser, examples, counts, batches.LossWeights(0.15, 0.3))[0].backward()
    expected = [p.grad.clone() for p in denoiser.parameters()]
    denoiser.zero_grad()
    denoiser.activation_checkpointing, denoiser.activation_checkpointing_interval = kind, interval
    if compiled:
        denoiser.compile_layers()
    loss_of(denoiser, examples, counts, batches.LossWeights(0.15, 0.3))[0].backward()
    for parameter, gradient in zip(denoiser.parameters(), expected, strict=True):
        torch.testing.assert_close(parameter.grad, gradient, rtol=1e-4, atol=1e-6)


def test_the_passages_that_hold_the_answer_are_the_evidence_of_its_bound():
    texts = {"a": "Emma is a novel.", "b": "A town.", "c": "Rest."}
    corpus = [Passage(name, "", text) for name, text in texts.items()]
    truth = {"response": "Jane Austen wrote it."}
    asked = [Question("q", "Who is the author?", ("Jane Austen",), ("c", "a", "gone"), **truth)]
    validation = QuestionValidation(asked, SimpleNamespace(corpus=corpus), load_config(None, []))
    found = validation._evidence(asked[0])
    assert found == ["Rest.", "Emma is a novel."]


def test_a_fresh_denoiser_has_a_nelbo_of_about_log_v_per_token(tmp_path):
    """Weights near zero predict all tokens alike: the bound is then log V, whatever was drawn."""
    config = load_config(None, training.MICRO_SETTINGS)
    origin = open_initial_model(config)
    _, validation = open_trainer(config, tmp_path, origin=origin)
    denoiser = training.build_denoiser(origin)
    with torch.no_grad():
        denoiser.lm_head.weight.mul_(1e-4)
    nats, tokens = validation.nelbo(denoiser, origin.tokenizer, range(4))
    assert nats / tokens == pytest.approx(math.log(400), rel=0.25), "four questions: the times vary"


def test_a_null_in_the_config_of_a_checkpoint_is_no_setting():
    raw = {"evidence_layout": None, "passage_length": None}
    shape = make_training_shape(load_config(None, []), EXAMPLE_SHAPE, raw)
    assert (shape.evidence_layout, shape.passage_length) == ("independent", 96)
    by_reward = make_training_shape(load_config(None, ["train.objective=rl"]), EXAMPLE_SHAPE, raw)
    assert by_reward.evidence_layout == EXAMPLE_SHAPE.evidence_layout == "joint", "what it decodes with"


def test_parts_longer_than_the_canvas_are_refused_before_training():
    with pytest.raises(ConfigError, match="block_length=64 is longer than max_new_tokens=32"):
        words = ["decode.block_length=64", "decode.max_new_tokens=32"]
        make_training_shape(load_config(None, words), EXAMPLE_SHAPE)


def test_a_search_in_a_world_finds_what_the_checkpoint_asks_for():
    origin = SimpleNamespace(config=EXAMPLE_SHAPE.add_settings({}, top_k=3))
    assert Run(load_config(None, []), origin, None).top_k == 3
    given = load_config(None, ["retrieval.top_k=5"])
    shape = make_training_shape(given, origin.config)
    assert Run(given, SimpleNamespace(config=shape), None).top_k == 5


def test_the_masks_of_a_bound_spread_over_the_interval_and_depend_on_the_question_alone(
    tmp_path, monkeypatch
):
    trainer, validation = open_trainer(load_config(None, training.MICRO_SETTINGS), tmp_path)
    seen = []
    monkeypatch.setattr(sources, "sum_losses", lambda _, rows, layout: seen.append(rows) or 0.0)
    for which in (range(4), [2]):
        validation.nelbo(trainer.denoiser, trainer.origin.tokenizer, which)
    assert seen[4] == seen[2] and seen[0] != seen[1]
    assert [sorted(int(4 / row.weight) for row in rows) for rows in seen] == [[0, 1, 2, 3]] * 5
    assert len({rows[0].weight for rows in seen}) == 4, "each at times of its own"


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
@pytest.mark.parametrize("objective", ["sft", "pretrain"])
def test_nothing_else_in_a_step_waits_for_a_gpu(tmp_path, objective):
    trainer = training.make_trainer(
        tmp_path, "model.device=cuda", f"train.objective={objective}", *SEQUENCES
    )
    trainer.step()
    torch.cuda.set_sync_debug_mode("error")
    try:
        assert math.isfinite(trainer.step()["loss"])
    finally:
        torch.cuda.set_sync_debug_mode("default")


def spoil(trainer, name):
    """One weight has a gradient that is not a number in the next step."""
    return trainer.denoiser.get_parameter(name).register_hook(lambda slope: slope * math.nan)


def test_a_gradient_that_is_not_a_number_changes_no_weight(tmp_path):
    trainer = training.make_trainer(tmp_path)
    before = training.clone_weights(trainer)
    spoil(trainer, "layers.0.self_attn.q_proj.weight")
    with pytest.raises(RunError, match="the gradient of step 0 is not a number"):
        trainer.step()
    assert all(torch.equal(value, before[name]) for name, value in training.clone_weights(trainer).items())


def test_muon_on_a_cpu_is_that_of_float32():
    """Against the iteration in float64 (Jordan et al. 2024); torch's own, in bfloat16, is far from it."""
    gradient = torch.randn(6, 10, generator=torch.Generator().manual_seed(0))
    true = gradient.double() / gradient.double().norm()
    for _ in range(5):
        gram = true @ true.T
        true = 3.4445 * true + (-4.7750 * gram + 2.0315 * gram @ gram) @ true
    found = {}
    (ours, _) = make_optimizers(tiny_denoiser(), TrainConfig())
    for kind in (type(ours), torch.optim.Muon):
        weight = torch.nn.Parameter(torch.zeros(6, 10))
        weight.grad = gradient.clone()
        kind([weight], lr=1.0, weight_decay=0.0).step()
        found[kind] = (weight.detach() + true).abs().max().item()
    assert found[type(ours)] < 1e-5 and found[torch.optim.Muon] > 1e-3


def test_what_float16_cannot_hold_is_skipped_by_all_optimizers_and_the_scale_is_kept(tmp_path):
    """The matrices are Muon's, the rest AdamW's: neither may move on gradients clipped by a NaN."""
    words = ["train.dtype=float16", "train.save_steps=1"]
    trainer = training.make_trainer(tmp_path, *words)
    before, scale = training.clone_weights(trainer), trainer._scaler.get_scale()
    spoiled = spoil(trainer, "layers.0.self_attn.q_proj.weight")
    trainer.step()
    assert all(torch.equal(value, before[name]) for name, value in training.clone_weights(trainer).items())
    assert trainer._scaler.get_scale() == scale / 2
    spoiled.remove()
    trainer.step()
    assert not torch.equal(training.clone_weights(trainer)["lm_head.weight"], before["lm_head.weight"])
    trainer.save()
    again = training.make_trainer(tmp_path, *words)
    assert again.restore() and again._scaler.get_scale() == scale / 2


def test_a_validation_that_fails_costs_no_step_and_is_made_up_for(tmp_path, monkeypatch):
    words = [*training.MICRO_SETTINGS, "train.max_steps=2", "train.eval_steps=1", "train.save_steps=100"]
    config, scores = load_config(None, words), QuestionValidation.compute_scores

    def fails(self, trainer):
        if trainer.state.step == 2:
            raise ConnectionError("no route to host")
        return scores(self, trainer)

    def go_on():
        run_training(config, open_initial_model(config), tmp_path, training.SINGLE_PROCESS, StopSignal())
        return [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]

    with monkeypatch.context() as patched:
        patched.setattr(QuestionValidation, "compute_scores", fails)
        with pytest.raises(ConnectionError):
            go_on()
    assert find_latest_checkpoint(tmp_path)[1].state.step == 2, "the step is saved"
    first, last = go_on()
    assert "exact_match" in first and "exact_match" in last and last["step"] == 1
    assert (tmp_path / "model").exists() and go_on() == [first, last], "and not made up for again"


@pytest.mark.parametrize("objective", ["sft", "pretrain"])
def test_bfloat16_trains_validates_saves_resumes_and_exports(tmp_path, objective):
    words = ["train.dtype=bfloat16", f"train.objective={objective}", *SEQUENCES, "decode.max_new_tokens=64"]
    trainer, validation = open_trainer(load_config(None, [*training.MICRO_SETTINGS, *words]), tmp_path)
    trainer.step()
    trainer.save()
    assert 0 < validation.compute_scores(trainer)["nelbo_per_token"] < 10
    again = training.make_trainer(tmp_path, *words)
    assert again.restore() and again.step() == trainer.step()
    assert all(value.dtype == torch.float32 for value in training.clone_weights(again).values())
    again.export(tmp_path / "model")
    assert Denoiser.from_pretrained(tmp_path / "model").config == trainer.denoiser.config


def test_the_curriculum_moves_on_when_names_are_read(tmp_path):
    task = training.make_trainer(tmp_path, "retrieval.top_k=7").task
    states, sums = [{"stage": 0}], {"tokens": 1.0, "names_right": 5.0, "pointers": 0.0, "passage_mass": 0.0}
    for _ in range(200):
        _, same = task.finish_step(sums, {"divisor": 1.0, "pointed": 0.0}, states[-1])
        assert same["stage"] == states[-1]["stage"]
        states.append(task.finish_step(sums, {"divisor": 1.0, "pointed": 5.0}, states[-1])[1])
    second = next(state for state in states if state["stage"] == 1)
    assert task.count_passages({}) == (2, 2) and task.count_passages(second) == (2, 4)
    assert second["name_accuracy"] == 0.3
    assert task.count_passages(states[-1]) == (4, 7), "and stays there"


def test_the_command_of_a_card_can_be_pasted(monkeypatch):
    words = ["--out", "my run", "--resume", "data.corpus=it's.jsonl"]
    monkeypatch.setattr("sys.argv", ["/x/train.py", *words])
    words.remove("--resume")
    assert shlex.split(make_train_command())[1:] == ["train.py", *words]


@pytest.mark.parametrize(
    "words",
    [
        ["model.evidence_layout=joint"], ["model.evidence_layout=independent"],
        ["train.objective=rl", "train.prompts_per_step=2", "train.num_generations=2",
         "train.reward=forwards", "decode.max_new_tokens=24", "decode.commit_threshold=0.05"],
    ],
    ids=["joint", "independent", "rl"],
)  # fmt: skip
def test_tokens_of_a_step_are_those_that_went_through_the_layers(tmp_path, words):
    trainer = training.make_trainer(tmp_path, *words)
    parts, before = trainer._take_parts(), trainer.denoiser.flop_count.tokens
    trainer._run_backward(
        parts, {name: sum(part.counts[name] for part in parts) for name in parts[0].counts}
    )
    run = trainer.denoiser.flop_count.tokens - before
    assert sum(part.counts["tokens"] for part in parts) == run > 0
