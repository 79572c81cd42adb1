"""Training with both objectives: masked blocks, and the next token of a response seen causally."""

import random

import pytest
import torch
import torch.nn.functional as F

from dlm_rag import Denoiser
from dlm_rag.config import load_config
from dlm_rag.errors import ConfigError
from dlm_rag.evidence.encode_segments import canvas_starts
from dlm_rag.evidence.prompt_segments import lay_out_prompt
from dlm_rag.model.layers import AttentionProbe
from dlm_rag.training.data.examples import Example, ExampleBuilder, Pointer
from dlm_rag.training.initial_model import open_initial_model
from dlm_rag.training.losses import (
    LossWeights,
    MaskedObjective,
    count_examples,
    encode_batch,
    lay_out_examples,
    locate_pointers,
)
from dlm_rag.training.trainer import open_trainer
from tests.support.attention import run_with_mask
from tests.support.block_attention import BLOCK, block_denoiser
from tests.support.tiny_models import tiny_tokenizer
from tests.support.training import MICRO_SETTINGS, clone_weights, make_trainer

END, BOTH = 257, ["model.block_size=8", "train.causal_loss_weight=0.5"]


def make_rows(denoiser, count=3):
    """Masked rows, and the causal ones that belong to them."""
    builder, rng = ExampleBuilder(tiny_tokenizer(), denoiser.config), random.Random(0)
    rows = []
    for n in range(count):
        prompt = builder.build_prompt("Who?", ["ab", "cdef", "ghi"][: n + 1])
        response = [60 + n, 99, 100, 70, 71, 72][: 4 + n]
        rows.append(builder.build_example(rng, prompt, response, n, [Pointer(2, n, 1)]))
    return rows, [row.make_causal() for row in rows]


def objective_of(denoiser):
    return MaskedObjective(denoiser, denoiser.config.evidence_layout, frozenset({END}), logit_chunk=4)


def compute_loss(denoiser, rows, **weights):
    terms = LossWeights(end_token=0.4, **weights)
    return objective_of(denoiser)(rows, count_examples(rows, {END}, 0.4), terms)


def mean_loss(logits, targets):
    losses = F.cross_entropy(logits, targets, reduction="none")
    weights = torch.where(targets == END, 0.4, 1.0)
    return (losses * weights).sum(), weights.sum()


def test_a_causal_row_is_all_of_the_response_however_short_its_canvas_is():
    for masked, causal in zip(*make_rows(block_denoiser(causal_context=True)), strict=True):
        assert causal.target[-1] == END and causal.target.count(END) == 1
        assert causal.supervised_positions == tuple(range(len(causal.target))) and not any(causal.masked)
        shared = min(len(causal.target), len(masked.target))
        assert causal.target[:shared] == masked.target[:shared] and causal.prompt == masked.prompt


def next_token_loss(denoiser, example):
    """One sequence under one mask: passages and question causal and each alone, then the response."""
    prompt, length = example.prompt, denoiser.config.passage_length
    (*facts, question) = [*prompt.facts, (*prompt.head, *prompt.tail)]
    ids = [token for fact in facts for token in fact] + [*question, *example.target]
    chain = range(length, length + len(question) + len(example.target))
    positions = [n for fact in facts for n in range(len(fact))] + [*chain]
    names = [n for n, fact in enumerate(facts) for _ in fact] + [-1] * (len(question) - 1)
    names += [-2] * (1 + len(example.target))  # from the last token of the question on all is seen
    allowed = [
        [m <= n and (a == -2 or a == names[m]) for m in range(len(ids))] for n, a in enumerate(names)
    ]
    hidden = run_with_mask(denoiser, torch.tensor(ids), torch.tensor(positions), torch.tensor(allowed))
    first = len(ids) - len(example.target) - 1
    return mean_loss(denoiser.compute_token_logits(hidden[first:-1]), torch.tensor(example.target))


def test_the_causal_loss_is_that_of_one_causal_chain():
    denoiser = block_denoiser(causal_context=True, evidence_layout="independent")
    _, causal = make_rows(denoiser)
    losses, weights = zip(*(next_token_loss(denoiser, example) for example in causal), strict=True)
    counts = count_examples(causal, {END}, 0.4)
    assert counts["causal"] == pytest.approx(float(sum(weights))) and counts["divisor"] == 0
    _, sums = objective_of(denoiser)(causal, counts | {"divisor": 1.0}, LossWeights(0.4, causal=1.0))
    torch.testing.assert_close(sums["causal"], sum(losses))


def test_where_all_is_one_chain_it_is_that_of_an_autoregressive_model():
    """`Denoiser(ids, block=1)`, which knows nothing of rows."""
    denoiser = block_denoiser(causal_context=True, evidence_layout="joint")
    _, causal = make_rows(denoiser)
    expected = 0.0
    for example in causal:
        ids = torch.tensor([[*example.prompt.ids, *example.target]])
        logits = denoiser(ids, block=1)[0, -len(example.target) :]
        expected += mean_loss(logits, torch.tensor(example.target))[0]
    counts = count_examples(causal, {END}, 0.4) | {"divisor": 1.0}
    _, sums = objective_of(denoiser)(causal, counts, LossWeights(0.4, causal=1.0))
    torch.testing.assert_close(sums["causal"], expected.detach())


def test_a_row_is_what_decoding_shows():
    """What the pass before a block sees is the beginning of the row."""
    denoiser = block_denoiser(causal_context=True, evidence_layout="independent")
    _, causal = make_rows(denoiser)
    (row,) = lay_out_examples(causal[-1:], denoiser.config)
    finished = len(causal[-1].target) // BLOCK * BLOCK
    laid = lay_out_prompt(causal[-1].prompt, denoiser.config)
    shown = laid.build_canvas_segment(causal[-1].target[:finished], finished)
    ahead = laid.find_states(torch.arange(finished, finished + 1).numpy(), finished, shifted=False)
    assert row.canvas_start + finished == ahead[0]
    assert row.canvas_segment.slice_tokens(0, len(shown.ids)).ids == shown.ids
    assert [*row.canvas_segment.visible_counts[: len(shown.ids)]] == [*shown.visible_counts]
    assert row.context_segments == laid.context_segments


def test_gradients_of_both_objectives_add_up():
    denoiser = block_denoiser(causal_context=True)
    masked, causal = make_rows(denoiser)

    def gradients(*terms):
        denoiser.zero_grad()
        for loss in terms:
            loss.backward()
        return [p.grad.clone() for p in denoiser.parameters()]

    together = gradients(compute_loss(denoiser, [*masked, *causal], causal=0.5)[0])
    counts = count_examples(causal, {END}, 0.4) | {"divisor": 1.0}
    alone = objective_of(denoiser)(causal, counts, LossWeights(0.4, causal=0.5))[0]
    apart = gradients(compute_loss(denoiser, masked)[0], alone)
    for a, b in zip(together, apart, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-6)


def test_pointers_of_causal_rows_are_asked_of_the_state_before():
    denoiser, probe = block_denoiser(causal_context=True), AttentionProbe(0)
    _, causal = make_rows(denoiser)
    seen = encode_batch(denoiser, causal, "independent", probe)
    counts, places = locate_pointers(causal, seen.states)
    assert counts == [1] * len(causal)
    for example, start, at in zip(causal, canvas_starts(seen.states), places.T, strict=True):
        (pointer,) = example.supervised_pointers
        first = sum(map(len, example.prompt.facts[: pointer.fact]))
        query, begin, end, token, *_ = at.tolist()
        assert query == start + pointer.position, "the state that predicts it"
        assert (begin, end - begin) == (first, len(example.prompt.facts[pointer.fact]))
        assert token == first + pointer.token


def test_a_few_steps_lower_both_losses(tmp_path):
    trainer = make_trainer(tmp_path, *BOTH, "train.max_steps=30", "train.warmup_steps=2")
    part = trainer.task.make_microbatch(0, [0, 1], (2, 2))
    assert sum(row.causal for row in part) == len(part) // 2
    trainer._make_microbatches = lambda step, conditions: [part]
    found = [trainer.step() for _ in range(12)]
    for name in ("loss", "causal_loss"):
        assert found[-1][name] < 0.8 * found[0][name], name


def test_a_resumed_run_is_the_run_that_was_not_stopped(tmp_path):
    whole, first = (make_trainer(tmp_path / name, *BOTH) for name in ("whole", "stopped"))
    for trainer, steps in ((whole, 4), (first, 2)):
        for _ in range(steps):
            trainer.step()
    first.save()
    second = make_trainer(tmp_path / "stopped", *BOTH)
    assert second.restore()
    for _ in range(2):
        second.step()
    assert second.state == whole.state
    ours, theirs = clone_weights(second), clone_weights(whole)
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)


def test_a_block_checkpoint_becomes_one_that_predicts_the_next_token_too(tmp_path):
    block_denoiser().save_pretrained(tmp_path / "blocks", eos_token_id=END)
    tiny_tokenizer().inner.save_pretrained(tmp_path / "blocks")
    words = [*MICRO_SETTINGS, f"model.path={tmp_path}/blocks", "train.causal_loss_weight=1"]
    trainer, _ = open_trainer(load_config(None, words), tmp_path / "run")
    trainer.step()
    trainer.export(tmp_path / "model", torch.float32)
    found = Denoiser.from_pretrained(tmp_path / "model").config
    assert found.causal_context and found.block_size == BLOCK and found.block_grid == "canvas"
    again = [*MICRO_SETTINGS, f"model.path={tmp_path}/model"]
    with pytest.raises(ConfigError, match="train.causal_loss_weight above 0"):
        open_initial_model(load_config(None, again))
    assert open_initial_model(load_config(None, [*again, *BOTH])).config.causal_context


def test_a_row_without_a_response_of_its_own_predicts_its_canvas():
    """As the rows of plans."""
    row = Example(make_rows(block_denoiser())[0][0].prompt, (5, 6, 7), (False, True, True))
    assert row.make_causal().target == (5, 6, 7) and row.make_causal().supervised_positions == (0, 1, 2)


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["model.block_size=0"], "set model.block_size"),
        (["decode.finished_block_context=no_evidence"], "decode.finished_block_context=recompute"),
        (
            ["train.phases.a.max_steps=1", "train.phases.b.objective=pretrain"],
            "which a phase would unlearn",
        ),
    ],
)
def test_what_does_not_go_with_it_is_refused(words, says):
    with pytest.raises(ConfigError, match=says):
        open_initial_model(load_config(None, [*MICRO_SETTINGS, *BOTH, *words]))
