"""Training a model of uniform noise: rows, the class of transformers under gradients, runs that go on."""

import json
import math
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file

from dlm_rag.commands.sample import main as sample
from dlm_rag.commands.train import main as train
from dlm_rag.config import load_config
from dlm_rag.diffusion.noise import sample_antithetic_times, uniform_nelbo
from dlm_rag.model.checkpoint import open_checkpoint
from dlm_rag.tokenizer import Prompt
from dlm_rag.training.data.examples import Example
from dlm_rag.training.losses import LossWeights
from dlm_rag.training.trainer import open_trainer, sum_counts
from dlm_rag.training.uniform_sft import LINEAR, UniformObjective, UniformRow, make_full_canvas
from dlm_rag.training.validation import _uniform_bounds
from tests.support.passages import write_jsonl_file
from tests.support.tiny_diffusion_gemma import END, TEXT, write_tiny_gemma

CPU = torch.device("cpu")
BLOCK = 12
MICRO = [
    "train.passage_sets_per_step=2", "train.rows_per_set=2", "train.world_passages=100",
    "train.max_steps=8", "train.worlds=2",
    "train.steps_per_world=2", "train.eval_questions=1", "train.warmup_steps=0", "retrieval.top_k=1",
    "train.max_hops=1", "decode.max_new_tokens=120",
]  # fmt: skip


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_tiny_gemma(tmp_path_factory.mktemp("gemma") / "model", canvas=BLOCK, sharp=0.3)


@pytest.fixture
def open_run(folder, tmp_path):
    def make(*words, out="run"):
        return open_trainer(load_config(None, [*MICRO, f"model.path={folder}", *words]), tmp_path / out)[0]

    return make


@pytest.fixture(scope="module")
def denoiser(folder):
    from dlm_rag.model.diffusion_gemma import DiffusionGemma

    checkpoint = open_checkpoint(folder)
    made = DiffusionGemma.build_on_meta(checkpoint)
    made.load(checkpoint, CPU, torch.float32)
    return made


def random_rows(count, seed=0, conditioned=False):
    """Prompts shorter and longer than the sliding window of 16, and random canvases."""
    generator = torch.Generator().manual_seed(seed)

    def ids(length):
        return tuple(torch.randint(256, (length,), generator=generator).tolist())

    lengths = [5, 40, 16, 23, 9][:count]
    return [
        UniformRow(ids(n), ids(BLOCK), ids(BLOCK), 0.1 + 0.2 * k, conditioned)
        for k, n in enumerate(lengths)
    ]


def plain_logits(model, prompt, noisy, **more):
    """One row through the class of transformers, without padding."""
    prompt, noisy = torch.tensor([prompt]), torch.tensor([noisy])
    return model(input_ids=prompt, decoder_input_ids=noisy, **more).logits[0]


def test_rows_of_any_lengths_have_the_logits_that_each_has_alone_and_while_decoding(denoiser):
    """Also those that are shown a first pass, beside others that are not; and from keys and values that
    were kept, with the window cut by other code.
    """
    rows, shown = random_rows(4), torch.tensor([True, False, True, False])
    noisy, prompts = torch.tensor([row.noisy for row in rows]), [row.prompt for row in rows]
    with torch.no_grad():
        found, plain = (
            denoiser(prompts, noisy, shown),
            denoiser(prompts, noisy, torch.zeros(4, dtype=torch.bool)),
        )
        for row, twice, logits in zip(rows, shown.tolist(), found, strict=True):
            alone = plain_logits(denoiser.model, row.prompt, row.noisy)
            if twice:
                shown_logits = {"self_conditioning_logits": alone[None]}
                alone = plain_logits(denoiser.model, row.prompt, row.noisy, **shown_logits)
            torch.testing.assert_close(logits, alone, atol=1e-4, rtol=1e-4)
        kept = denoiser.stack_caches([denoiser.extend_cache([], prompt) for prompt in prompts], BLOCK)
        decoded = denoiser.compute_canvas_logits(noisy, kept, [None] * 4)
        torch.testing.assert_close(plain, decoded, atol=1e-4, rtol=1e-4)


def test_gradients_flow_through_the_keys_and_values_of_the_prompt(folder):
    """Along a random direction of all weights, against differences in float64: of the encoder's too."""
    from dlm_rag.model.diffusion_gemma import DiffusionGemma

    checkpoint = open_checkpoint(folder)
    denoiser = DiffusionGemma.build_on_meta(checkpoint)
    denoiser.load(checkpoint, CPU, torch.float32)
    denoiser.double().model.set_experts_implementation("eager")  # which alone has float64
    rows, objective = random_rows(3, seed=1), UniformObjective(denoiser, frozenset(), "cross_entropy")
    trained = [p for p in denoiser.parameters() if p.requires_grad]

    def loss():
        return objective(rows, {"divisor": 36.0}, LossWeights())[0]

    slopes = torch.autograd.grad(loss(), trained)
    only_read = torch.tensor(sorted({*rows[0].prompt} - {t for r in rows for t in (*r.noisy, *r.target)}))
    embeddings = next(g for p, g in zip(trained, slopes, strict=True) if p.shape == (261, 32))
    assert embeddings[only_read].abs().sum() > 0, "tokens of the prompt that no canvas has"
    generator = torch.Generator().manual_seed(0)
    ways = [torch.randn(p.shape, generator=generator, dtype=torch.float64) for p in trained]
    values = []
    for step in (1e-5, -2e-5):
        with torch.no_grad():
            for parameter, way in zip(trained, ways, strict=True):
                parameter += step * way
        values.append(float(loss()))
    measured = (values[0] - values[1]) / 2e-5
    assert sum(float((g * w).sum()) for g, w in zip(slopes, ways, strict=True)) == pytest.approx(
        measured, rel=1e-3
    )


def test_the_first_pass_has_no_gradient_and_images_no_weight_that_learns(denoiser):
    rows = random_rows(2, conditioned=True)
    noisy = torch.tensor([row.noisy for row in rows])
    with torch.no_grad():
        before = denoiser([row.prompt for row in rows], noisy, torch.zeros(2, dtype=torch.bool))
    found = []
    for shown in (None, before):
        denoiser.zero_grad()
        if shown is None:
            logits = denoiser([row.prompt for row in rows], noisy, torch.ones(2, dtype=torch.bool))
            logits.square().mean().backward()
        else:
            parts = [
                plain_logits(denoiser.model, row.prompt, row.noisy, self_conditioning_logits=given[None])
                for row, given in zip(rows, shown, strict=True)
            ]
            torch.stack(parts).square().mean().backward()
        found.append([p.grad.clone() for p in denoiser.parameters() if p.requires_grad])
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one, other, atol=1e-4, rtol=1e-3)
    frozen = [name for name, p in denoiser.named_parameters() if not p.requires_grad]
    assert frozen and all("vision" in name for name in frozen)


@pytest.mark.parametrize("kind", ["cross_entropy", "nelbo"])
def test_the_loss_is_that_of_each_position_by_hand(denoiser, kind):
    """End tokens by their weight; the sum over the divisor of the step."""
    rows = random_rows(3, seed=2)
    rows[1] = UniformRow(
        rows[1].prompt, (*rows[1].target[:4], *[END] * 8), rows[1].noisy, 0.7, False, (1, 3)
    )
    objective = UniformObjective(denoiser, frozenset({END}), kind)
    with torch.no_grad():
        loss, sums = objective(rows, {"divisor": 10.0}, LossWeights(end_token=0.25))
        total, right = 0.0, 0
        for row in rows:
            logits = plain_logits(denoiser.model, row.prompt, row.noisy)
            right += sum(int(logits[at].argmax()) == row.target[at] for at in row.copied_positions)
            for at, (token, noisy) in enumerate(zip(row.target, row.noisy, strict=True)):
                weight = 0.25 if token == END else 1.0
                if kind == "cross_entropy":
                    total += weight * float(F.cross_entropy(logits[at], torch.tensor(token)))
                else:
                    args = (torch.tensor(noisy), torch.tensor(token), torch.tensor(row.time).double())
                    total += weight * float(uniform_nelbo(logits[at], *args, LINEAR))
    assert float(loss) == pytest.approx(total / 10, rel=1e-4)
    assert float(sums["tokens"]) == pytest.approx(total, rel=1e-4) and float(sums["names_right"]) == right


def test_a_canvas_is_whole_and_what_is_finished_belongs_to_the_prompt():
    prompt = Prompt((1, 2), ((3,), (4, 5)), (6,))
    target = tuple(range(100, 120))
    example = Example(prompt, target, (False,) * 20, finished=12)
    assert make_full_canvas(example, 12, END) == (
        (1, 2, 3, 4, 5, 6, *range(100, 112)),
        (*range(112, 120), END, END, END, END),
    )


def test_rows_are_drawn_anew_where_masks_would_be_and_follow_from_step_and_item(open_run):
    task = open_run().task
    examples = task._source.examples(3, [0, 1], (1, 1))
    rows = task.make_microbatch(3, [0, 1], (1, 1))
    assert len(rows) == len(examples) == 4
    stood = drawn = 0
    for example, row in zip(examples, rows, strict=True):
        assert (row.prompt, row.target) == make_full_canvas(example, BLOCK, END)
        hidden = (*example.masked[example.finished :], *[True] * BLOCK)[:BLOCK]
        for hides, token, noisy in zip(hidden, row.target, row.noisy, strict=True):
            assert hides or token == noisy
            stood, drawn = stood + (hides and token == noisy), drawn + hides
        for place in row.copied_positions:
            assert row.target[place] != row.noisy[place]
    assert drawn > 10 and stood < 4, "one token in 261 is drawn again"
    assert task.make_microbatch(3, [1], (1, 1)) == rows[2:]
    assert task.make_microbatch(4, [1], (1, 1)) != rows[2:]


def test_under_the_nelbo_rows_are_drawn_anew_at_their_times(open_run):
    task = open_run(
        "train.uniform_loss=nelbo", "train.rows_per_set=64", "train.self_conditioning=0.25"
    ).task
    rows = task.make_microbatch(0, [0, 1], (1, 1))
    for low in (0.0, 0.5):
        some = [row for row in rows if low <= row.time < low + 0.5]
        changed = sum(a != b for row in some for a, b in zip(row.target, row.noisy, strict=True))
        mean = sum(row.time for row in some) / len(some)
        assert changed / (BLOCK * len(some)) == pytest.approx(mean, abs=0.06)
    assert 0.15 < sum(row.self_conditioned for row in rows) / len(rows) < 0.36


@pytest.mark.parametrize("kind", ["cross_entropy", "nelbo"])
def test_the_loss_falls(open_run, kind):
    words = ["train.max_steps=99", "train.learning_rate=0.003", "train.optimizer=adamw"]
    trainer = open_run(f"train.uniform_loss={kind}", *words)
    part = trainer.task.make_microbatch(0, [0, 1], (1, 1))
    trainer._microbatches = lambda: [part]
    losses = [trainer.step()["loss"] for _ in range(8)]
    assert losses[-1] < 0.5 * losses[0]
    assert trainer.flops > 0


def test_a_step_in_parts_or_with_activations_computed_again_is_the_step(open_run):
    whole = open_run(out="whole")
    one = whole.step()
    for word in ("gradient_accumulation_steps=2", "activation_checkpointing=full"):
        two = open_run(f"train.{word}", out=word).step()
        assert one["loss"] == pytest.approx(two["loss"], rel=1e-5)
        assert one["gradient_norm"] == pytest.approx(
            two["gradient_norm"], rel=1e-5 if "full" in word else 1e-4
        )
        assert one["supervised_tokens"] == two["supervised_tokens"] == 4 * BLOCK
    made = [whole.task.make_microbatch(0, [n], (1, 1)) for n in (0, 1)]
    counted = sum_counts([whole.task.count_microbatch(part, LossWeights()) for part in made])
    assert counted["tokens"] == one["tokens"] and counted["divisor"] == 4 * BLOCK


def test_a_resumed_run_is_the_run_that_nobody_stopped(open_run):
    through = open_run(out="through")
    for _ in range(4):
        last = through.step()
    stopped = open_run()
    for _ in range(2):
        stopped.step()
    stopped.save()
    again = open_run()
    assert again.restore() and again.state.step == 2
    again.step()
    assert again.step() == last
    wanted = dict(through.denoiser.named_parameters())
    for name, value in again.denoiser.named_parameters():
        assert torch.equal(value, wanted[name]), name


def test_the_export_is_read_by_the_class_of_transformers_and_by_ours(open_run, folder, tmp_path):
    from transformers import DiffusionGemmaForBlockDiffusion

    trainer = open_run()
    trainer.step()
    trainer.export(tmp_path / "model", torch.float32)
    theirs = DiffusionGemmaForBlockDiffusion.from_pretrained(tmp_path / "model").eval()
    ours = open_checkpoint(tmp_path / "model")
    assert ours.config == open_checkpoint(folder).config
    row = random_rows(1)[0]
    with torch.no_grad():
        found = plain_logits(theirs, row.prompt, row.noisy)
        torch.testing.assert_close(found, plain_logits(trainer.denoiser.model, row.prompt, row.noisy))
    was, now = (load_file(at / "model.safetensors") for at in (folder, tmp_path / "model"))
    changed = {name for name in was if not torch.equal(was[name], now[name])}
    assert set(was) == set(now)
    assert any("experts" in name for name in changed) and not any("vision" in name for name in changed)
    out = theirs.generate(torch.tensor([row.prompt]), max_new_tokens=BLOCK, max_denoising_steps=2)
    assert out.sequences.shape[1] > len(row.prompt)


def test_validation_bounds_a_response_canvas_by_canvas(denoiser):
    """Logits that are all the same know nothing: log V for each position, those that fill up included."""
    weight = denoiser.model.lm_head.weight
    kept, times = weight.detach().clone(), sample_antithetic_times(600, torch.Generator().manual_seed(0))
    denoiser.from_others = True
    with torch.no_grad():
        weight.zero_()
        found = _uniform_bounds(
            denoiser, Prompt((1, 2), (), ()), (*range(65, 80), END), times, torch.Generator().manual_seed(1)
        )
        weight.copy_(kept)
    denoiser.from_others = False
    assert float(found.mean()) == pytest.approx(2 * BLOCK * math.log(TEXT["vocab_size"]), rel=0.06)


@pytest.mark.slow
def test_from_the_command_line_to_an_answer(folder, tmp_path, monkeypatch, capsys):
    """Trained, validated, exported, gone on with, and asked: rows of questions of one's own."""
    monkeypatch.chdir(tmp_path)
    passages = [{"id": f"p{n}", "contents": f"Book {n} is by Jane {n}."} for n in range(12)]
    asked = [
        {"id": f"q{n}", "question": f"Who wrote book {n}?", "response": f"Jane {n}."} for n in range(12)
    ]
    write_jsonl_file(tmp_path / "corpus.jsonl", passages)
    write_jsonl_file(tmp_path / "questions.jsonl", asked)
    words = [
        "--model", str(folder), "--out", "run", "data.corpus=corpus.jsonl",
        "data.questions=questions.jsonl", "train.passage_sets_per_step=1", "train.rows_per_set=2",
        "retrieval.top_k=1",
        "train.save_steps=1",
    ]  # fmt: skip
    train([*words, "train.max_steps=1"])
    train([*words, "train.max_steps=2", "--resume"])
    lines = [json.loads(line) for line in Path("run/metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == [0, 1] and "nelbo_per_token" in lines[1]
    assert "name_accuracy" in lines[0] and "pointer_loss" not in lines[0]
    capsys.readouterr()
    sample(["Who wrote book 3?", "--model", "run/model", "--corpus", "corpus.jsonl", "--trace", "t.jsonl"])
    assert capsys.readouterr().out and Path("t.jsonl").stat().st_size
