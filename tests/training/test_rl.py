"""Learning by reward: rollouts that can be computed again, gradients by them, runs that can be stopped."""

import json
import shutil
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from dlm_rag.config import EngineConfig, TrainConfig, load_config
from dlm_rag.decode.rollout import Action, Rollout, RolloutStep
from dlm_rag.engine.policy import SoftThreshold
from dlm_rag.engine.runner import MaskedModelRunner
from dlm_rag.errors import ConfigError, QuestionError
from dlm_rag.questions import Question
from dlm_rag.training.initial_model import open_initial_model
from dlm_rag.training.rewards import compute_advantages, compute_reward_parts
from dlm_rag.training.rl import (
    PolicyObjective,
    RlTask,
    fill_rollout_buffer,
    make_idle_row,
    sample_rollout_steps,
)
from dlm_rag.training.task import Run, check_task_settings
from dlm_rag.training.trainer import open_trainer
from tests.support.decoding import LAYOUTS, QUESTIONS, make_decoder
from tests.support.passages import write_jsonl_file
from tests.support.tiny_models import tiny_denoiser
from tests.support.training import MICRO_SETTINGS, SINGLE_PROCESS, clone_weights

RL = [*MICRO_SETTINGS, "train.objective=rl", "train.prompts_per_step=2", "train.num_generations=4",
      "train.optimizer=adamw", "train.learning_rate=0.01",
      "train.warmup_steps=0",
      "train.reward=forwards", "train.max_hops=1",
      "decode.max_new_tokens=48", "decode.batch_size=16", "decode.commit_threshold=0.05",
      "decode.gate_temperature=2"]  # fmt: skip


def learned(rollouts):
    """All sampled steps, each with a weight of its own."""
    rows = [row for rollout in rollouts for row in sample_rollout_steps(rollout, 1.0, TrainConfig())]
    return [row._replace(weight=1.0 + n % 7) for n, row in enumerate(rows)]


SAMPLED = {"commit_rule": "sampled", "temperature": 0.7, "commit_threshold": 0.5, "gate_temperature": 1.0}
BLOCKS = {"block_size": 4, "evidence_layout": "independent"}


WHOLE = [
    (layout, {"shifted": shifted}, batch, pool)
    for layout in LAYOUTS
    for shifted in (False, True)
    for batch, pool in ((1, 0), (1, 1), (64, 1))
]
IN_BLOCKS = [
    ("independent", {**BLOCKS, "block_grid": grid, "finished_block_context": context}, 8, None)
    for grid in ("canvas", "prompt")
    for context in ("recompute", "no_evidence")
] + [
    (layout, {**BLOCKS, "evidence_layout": layout, "causal_context": True, "shifted": shifted}, 8, None)
    for layout in ("independent", "parallel")
    for shifted in (False, True)
]


@pytest.mark.parametrize(("layout", "shape", "batch", "pool"), WHOLE + IN_BLOCKS)
def test_recorded_log_probabilities_are_those_computed_again(corpus_file, layout, shape, batch, pool):
    context = shape.get("finished_block_context", "recompute")
    shifted = bool(shape.get("shifted"))
    decoder = make_decoder(corpus_file, layout, shifted=shifted, batch_size=batch, **SAMPLED)
    if "block_size" in shape:
        decoder.denoiser = tiny_denoiser(**shape)
        decoder.config = replace(decoder.config, finished_block_context=context)
    decoder.model_runner = MaskedModelRunner(decoder.denoiser, 256, EngineConfig(prefix_cache_gib=pool))
    rows = learned(decoder.decode([Question(f"{n}", text) for n, text in enumerate(QUESTIONS * 4)]))
    assert any(row.forced for row in rows) and any(not row.forced for row in rows)
    objective = PolicyObjective(decoder.denoiser, decoder.config, 256)
    objective.logit_chunk = 7
    whole = objective(SimpleNamespace(rows=rows), {"divisor": 1.0})
    expected = sum(row.weight * row.old_log_prob for row in rows)
    assert float(whole[1]["policy"].detach()) == pytest.approx(expected, rel=1e-5)
    assert float(whole[1]["ratio_error"]) / len(rows) < 1e-5
    parts = [objective(SimpleNamespace(rows=rows[n::3]), {"divisor": 1.0})[0] for n in range(3)]
    assert sum(part.item() for part in parts) == pytest.approx(whole[0].item(), rel=1e-5)


@pytest.mark.parametrize(
    "blocks",
    [
        {},
        {"block_size": 4, "finished_block_context": "no_evidence"},
        {"block_size": 4, "causal_context": True},
    ],
)
@pytest.mark.parametrize("shifted", [False, True])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_row_of_no_step_runs_as_many_layers_and_adds_no_gradient(corpus_file, layout, shifted, blocks):
    """Layers in shards are gathered by all processes together, in each call of them."""
    if "finished_block_context" in blocks and (shifted or layout != "independent"):
        return
    decoder = make_decoder(corpus_file, layout, shifted=shifted, **SAMPLED)
    decoder.denoiser = tiny_denoiser(shifted=shifted, evidence_layout=layout, **blocks)
    decoder.model_runner = MaskedModelRunner(decoder.denoiser, 256, EngineConfig())
    taken = learned(decoder.decode([Question("0", QUESTIONS[0])]))
    denoiser = decoder.denoiser.train()
    objective = PolicyObjective(denoiser, decoder.config, 256)
    calls = []
    for rows in (taken, [make_idle_row(decoder)]):
        before = denoiser.flop_count.calls
        loss, sums = objective(SimpleNamespace(rows=rows), {"divisor": 1.0})
        calls.append(denoiser.flop_count.calls - before)
    assert calls[0] == calls[1]
    gradients = torch.autograd.grad(loss, list(denoiser.parameters()))
    assert loss == 0 and not any(value.any() for value in (*gradients, *sums.values()))


# Rewards.


def test_the_reward_by_hand():
    question = Question("q", "Who?", ("Jane Austen",), ("a", "b"))
    steps = [
        RolloutStep(0, "q", ("a", "c"), True),
        RolloutStep(1, "r", ("a", "c"), False),
        RolloutStep(2, "s", ("b", "x"), True),
    ]
    rollout = Rollout("q", "Who?", "joint", 8, steps, response="It was her. ### Jane Bennet")
    found = compute_reward_parts(rollout, question, "exact_match")
    assert list(found.values()) == [0.0, 0.5, 0.5, 2.0, 2.0, 0.0, 0.0]
    assert compute_reward_parts(replace(rollout, response="It was her."), question, "f1")["unanswered"] == 1


def test_a_reward_of_ones_own_is_named_on_the_command_line(tmp_path, monkeypatch):
    """One file, its two lines each."""
    own = "def score(rollout, question):\n    return -len(rollout.response)\n"
    (tmp_path / "brief.py").write_text(f"{own}def nothing(rollout, question): return float('nan')\n")
    monkeypatch.chdir(tmp_path)
    rollout = Rollout("q", "Who?", "joint", 8, [], response="### Jane")
    found = compute_reward_parts(rollout, Question("q", "Who?", ("Jane",)), "brief:score")
    assert found["reward"] == -8
    with pytest.raises(ConfigError, match="reward=brief:nothing returned nan, not a finite number"):
        compute_reward_parts(rollout, Question("q", "Who?"), "brief:nothing")


@pytest.mark.parametrize("shape", [{}, BLOCKS | {"causal_context": True, "shifted": True}])
def test_tokens_drawn_from_left_to_right_have_their_probability_with_copied_words(corpus_file, shape):
    """What `copy_words` writes instead belongs to the world; tokens that it bars could not be drawn."""
    own = SAMPLED | {"commit_rule": "sampled_left_to_right", "copy_words": True, "commit_threshold": 0.1}
    decoder = make_decoder(corpus_file, "independent", shifted=bool(shape), **own)
    if shape:
        decoder.denoiser = tiny_denoiser(**shape)
        decoder.model_runner = MaskedModelRunner(decoder.denoiser, 256, EngineConfig())
    letters = torch.zeros(decoder.denoiser.config.vocab_size)
    letters[[32, *range(97, 123)]] = 20  # and a blank
    decoder.denoiser.lm_head.register_forward_hook(lambda head, hidden, logits: logits / 3 + letters)
    rollouts = decoder.decode([Question(f"{n}", text) for n, text in enumerate(QUESTIONS * 3)])
    rows, objective = learned(rollouts), PolicyObjective(decoder.denoiser, decoder.config, 256)
    for row in rows:
        first = row.candidates[0]
        assert row.candidates == (*range(first, first + len(row.candidates)),)
        stayed = [token < 0 for token in row.committed_tokens]
        assert not any(stayed[:-1]) and not row.barred[row.committed_tokens[0]]
    counts = {len(row.candidates) for row in rows}
    assert len(counts) > 1 and any(row.forced for row in rows) and any(not row.forced for row in rows)
    steps = [step for rollout in rollouts for step in rollout.steps if step.action is not None]
    drawn = [[token for token in step.action.tokens if token >= 0] for step in steps]
    assert any(len(step.committed) < len(tokens) for step, tokens in zip(steps, drawn, strict=True))
    objective.logit_chunk = 7
    errors = [
        float(objective(SimpleNamespace(rows=some), {"divisor": 1.0})[1]["ratio_error"]) / len(rows)
        for some in (rows, [row._replace(barred=None) for row in rows])
    ]
    assert errors[0] < 1e-5 < 0.01 < errors[1]


def test_advantages_by_hand():
    assert compute_advantages([1, 0, 0, 1]).tolist() == [1, -1, -1, 1]
    assert compute_advantages([1, 1, 1]).tolist() == [0, 0, 0]
    assert compute_advantages([]).tolist() == []


def made_rollout(question):
    """Right as often as the id of the question says, in 2 to 5 steps."""
    _, right, member = (int(word) for word in question.id.split("."))
    steps = [RolloutStep(n, None, (), False, action=Action()) for n in range(2 + member)]
    answer = "yes" if member < right else "no"
    states = dict.fromkeys(range(6), SimpleNamespace(training_row=question.id, barred=None))
    shape = "joint", 8, steps
    return Rollout(question.id, question.question, *shape, response=f"So. ### {answer}", states=states)


MADE = SimpleNamespace(decode=lambda questions: [*map(made_rollout, questions)])


@pytest.mark.parametrize("train_steps_per_rollout", [None, 2])
def test_groups_without_differences_are_not_learned_from(train_steps_per_rollout):
    right = (2, 0, 4)
    asked = [Question(f"{n}.{times}", "Is it?", ("yes",)) for n, times in enumerate(right)]
    train = TrainConfig(num_generations=4, train_steps_per_rollout=train_steps_per_rollout)
    taken = fill_rollout_buffer(MADE, asked, train).rows
    assert {part.state for part in taken} == {f"0.2.{member}" for member in range(4)}
    if train_steps_per_rollout:
        assert sum(abs(part.weight) for part in taken) == pytest.approx(2 + 3 + 4 + 5)


def test_rollouts_with_an_error_leave_their_group_and_are_counted(corpus_file, monkeypatch):
    decoder = make_decoder(corpus_file, batch_size=1, **SAMPLED)
    search = decoder.retriever.search

    def fail(queries):
        if any("Dune" in query.text for query in queries):
            raise RuntimeError("gone")
        return search(queries)

    monkeypatch.setattr(decoder.retriever, "search", fail)
    asked = [Question("a", QUESTIONS[0], ("x",)), Question("b", QUESTIONS[2], ("x",))]
    buffer = fill_rollout_buffer(decoder, asked, TrainConfig(num_generations=3, reward="f1"))
    assert buffer.sums["failed"] == 3 and buffer.sums["rollouts"] == 3 and buffer.sums["groups"] == 2
    assert buffer.sums["groups_right"] + buffer.sums["groups_wrong"] == 2


def test_groups_are_mixed_by_the_reward_that_is_trained():
    """Exact match may differ in no group where another reward does."""
    asked = [Question("0.0", "Is it?", ("maybe",)), Question("1.2", "Is it?", ("yes",))]
    for changes, mixed in (({}, 1), ({"reward": "forwards"}, 2)):
        sums = fill_rollout_buffer(MADE, asked, TrainConfig(num_generations=4, **changes)).sums
        assert sums["groups_mixed"] == mixed and sums["groups_wrong"] == 1 and sums["groups_right"] == 0


@pytest.mark.parametrize(
    "word",
    [
        "decode.edit_threshold=0.6", "decode.blocks_at_once=2", "decode.seed=3",
        "decode.mode=autoregressive", "decode.commit_rule=top_k", "decode.commit_rule=mine:rule",
        "decode.tokens_per_step=2", "decode.steps_per_block=4",
        "decode.temperature=0.5", "decode.commit_threshold=1", "engine.cache_dtype=int8",
    ],
)  # fmt: skip
def test_what_rollouts_override_or_do_not_learn_is_refused_before_a_model_is_read(word, monkeypatch):
    monkeypatch.setattr("dlm_rag.config.fields.list_choices", lambda item: ())
    words = [word for word in RL if not word.startswith("decode.commit_threshold")]
    check_task_settings(load_config(None, [*words, "model.path=nowhere"]))
    with pytest.raises(ConfigError, match=word.split("=")[0].split(".")[1]):
        check_task_settings(load_config(None, [*words, "model.path=nowhere", word]))


# Runs.


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """A model that was trained for a few steps: it answers nothing, in the right form."""
    folder = tmp_path_factory.mktemp("rl")
    trainer, _ = open_trainer(
        load_config(None, [*MICRO_SETTINGS, "train.max_hops=1", "decode.max_new_tokens=48"]), folder / "run"
    )
    for _ in range(2):
        trainer.step()
    trainer.export(folder / "model")
    return folder / "model"


def open_rl(folder, model, *words):
    return open_trainer(load_config(None, [*RL, f"model.path={model}", *words]), folder, SINGLE_PROCESS)


def test_rollouts_follow_the_checkpoint_and_what_ran_is_learned(tmp_path, model):
    """Its threshold decides what commits, in rollouts and in the gradient, unless the config names one."""
    own = {"commit_threshold": 0.2, "gate_temperature": 1.5, "commit_rule": "top_k", "temperature": 0.5}
    folder = shutil.copytree(model, tmp_path / "model")
    raw = json.loads((folder / "generation_config.json").read_text())
    (folder / "generation_config.json").write_text(json.dumps(raw | {"decode": own}))
    bare = [word for word in RL if not word.startswith(("decode.commit_", "decode.gate_"))]
    more = ["decode.commit_threshold=0.9", "decode.gate_temperature=1.5"]
    in_order = ["decode.commit_rule=left_to_right", "train.temperature=0.7"]
    for words, threshold, temperature in (([], 0.2, 1.0), (more, 0.9, 1.0), (in_order, 0.2, 0.7)):
        config = load_config(None, [*bare, f"model.path={folder}", *words])
        run = tmp_path / f"run{threshold}{temperature}"
        trainer, validation = open_trainer(config, run, SINGLE_PROCESS)
        assert trainer.root.soft == SoftThreshold(temperature, threshold, 1.5)
        found = trainer.step()
        assert found["gradient_norm"] > 0 and found["ratio_error"] < 1e-5
    assert validation.compute_scores(trainer)["forwards_per_answer"] > 0, "by the rule of the config"


LEARN = {
    "all": ["train.learning_rate=0.001", "train.train_steps_per_rollout=2"],
    "adapters": ["train.lora_rank=4"],
}  # fmt: skip


@pytest.mark.parametrize("learn", LEARN)
def test_a_resumed_run_is_the_run_that_was_not_stopped_bit_for_bit(tmp_path, model, learn):
    whole, _ = open_rl(tmp_path / "whole", model, *LEARN[learn])
    told = [whole.step() for _ in range(4)]
    assert all(metrics["ratio_error"] < 1e-5 for metrics in told)
    assert any(metrics["gradient_norm"] > 0 for metrics in told)
    stopped, _ = open_rl(tmp_path / "stopped", model, *LEARN[learn])
    for _ in range(3):
        stopped.step()
        if stopped.state.step == 2:
            stopped.save()
    second, _ = open_rl(tmp_path / "stopped", model, *LEARN[learn])
    assert second.restore() and second.state.step == 2
    again = [second.step() for _ in range(2)]
    for ours, theirs in zip(again, told[2:], strict=True):
        assert ours == theirs
    assert set(whole.stage_seconds) >= {"rollout", "reward", "forward", "backward", "optimizer"}
    ours, theirs = clone_weights(second), clone_weights(whole)
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)


def test_parts_of_a_step_add_up_to_the_step(tmp_path, model):
    words = [*LEARN["all"], "train.prompts_per_step=4", "train.num_generations=3"]
    found = []
    for parts in (1, 2):
        more = f"train.gradient_accumulation_steps={parts}"
        found.append(open_rl(tmp_path / str(parts), model, *words, more)[0].step())
    one, two = found
    for name in ("rollout_reward", "rollout_forwards", "groups_mixed", "forced_share"):
        assert one[name] == pytest.approx(two[name])
    assert one["gradient_norm"] == pytest.approx(two["gradient_norm"], rel=1e-3)


def test_questions_of_ones_own_are_learned_from(tmp_path, model, corpus_file):
    file = tmp_path / "questions.jsonl"
    golden = {"golden_answers": ["x"]}
    write_jsonl_file(file, [{"id": str(n), "question": f"Who wrote {n}?"} | golden for n in range(20)])
    own = [f"data.questions={file}", f"data.corpus={corpus_file}", *LEARN["all"]]
    trainer, _ = open_rl(tmp_path / "run", model, *own)
    assert trainer.step()["rows"] == 8


def test_an_objective_of_ones_own_that_rewards_needs_answers_too(tmp_path):
    """The task says that it rewards, not the name of its objective."""
    rows = [{"id": str(n), "question": "Who?", "response": "It was her. ### Ann"} for n in range(20)]
    questions = write_jsonl_file(tmp_path / "questions.jsonl", rows)
    corpus = write_jsonl_file(tmp_path / "corpus.jsonl", [{"id": "a", "contents": "Ann wrote it."}])
    words = [*MICRO_SETTINGS, f"data.questions={questions}", f"data.corpus={corpus}"]
    config = load_config(None, words)
    with pytest.raises(QuestionError, match="'0' and 19 others of 20: it has no 'golden_answers'"):
        RlTask(Run(config, open_initial_model(config), tmp_path)).open_data()
