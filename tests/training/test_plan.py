"""The plan against what is measured: bytes by torch's own profiler, FLOPs by torch's own counter."""

from types import SimpleNamespace

import pytest
import torch

from dlm_rag.commands.sample import main as sample
from dlm_rag.commands.train import main as train
from dlm_rag.config import load_config
from dlm_rag.errors import ConfigError
from dlm_rag.training.initial_model import add_lora_adapters, open_initial_model
from dlm_rag.training.plan import (
    _make_machine_table,
    check_run_fits,
    make_planned_task,
    plan_decode_step,
    plan_training,
    resolve_shape,
)
from dlm_rag.training.specs import GPU_SPECS, choose_planned_dtype, find_gpu_spec, read_known_config
from dlm_rag.training.step_memory import estimate_step_memory
from tests.support import planned_step
from tests.support.cases import first_is_fast
from tests.support.training import CPU, MICRO_SETTINGS, build_denoiser, make_trainer

FLOAT32 = torch.float32


@pytest.mark.parametrize("way", first_is_fast(planned_step.PLAN_CASES))
def test_the_predicted_peak_is_within_a_hundredth_and_flops_within_a_tenth_of_what_torch_finds(way):
    found = planned_step.measure_planned_step([*planned_step.BASE_SETTINGS, *planned_step.PLAN_CASES[way]])
    assert found.predicted_bytes == pytest.approx(found.measured_bytes, rel=0.01)
    if "checkpointing" not in way and "rl" not in way:  # the plan counts nothing twice
        assert found.predicted_flops == pytest.approx(found.measured_flops, rel=0.1)


def test_frozen_weights_spare_their_own_half_of_backward_and_attention_spares_nothing():
    """Long rows of a narrow denoiser, where attention is a third of the FLOPs; adapters of rank 2."""
    pytest.importorskip("peft")
    words = [*planned_step.BASE_SETTINGS, *planned_step.PRETRAIN_SETTINGS]
    config = load_config(None, words)
    denoiser = build_denoiser(open_initial_model(config))
    add_lora_adapters(denoiser, 2)
    task = make_planned_task(config, denoiser.config)
    found = estimate_step_memory(task, FLOAT32, 1)
    objective = task.objective(denoiser)
    batch = task.sample_batch(1)
    flops = planned_step.measure_flops(lambda: objective(batch, batch.counts)[0].backward())
    assert found.forward.flops_with_backward(frozen=True) == pytest.approx(flops, rel=0.1)


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_weights_and_optimizer_are_what_a_run_holds(tmp_path, optimizer):
    words = [*MICRO_SETTINGS, f"train.optimizer={optimizer}"]
    trainer = make_trainer(tmp_path, *words)
    plan = plan_training(load_config(None, words), trainer.origin.config, torch.float32)
    trainer.step()
    kept = [x for o in trainer.optimizers for state in o.state.values() for x in state.values()]
    assert plan.memory.weights == sum(p.nbytes for p in trainer.denoiser.parameters())
    assert plan.memory.optimizer == sum(x.nbytes for x in kept if x.dim()), "step counts are left out"


def test_what_cannot_fit_is_refused_before_it_is_allocated(monkeypatch):
    monkeypatch.setattr("dlm_rag.training.plan.measure_free_bytes", lambda device: 1e6)
    with pytest.raises(ConfigError, match="see what fits with --plan"):
        check_run_fits(load_config(None, MICRO_SETTINGS), 1, CPU)
    monkeypatch.setattr("dlm_rag.training.plan.measure_free_bytes", lambda device: 24e9)
    with pytest.raises(ConfigError, match="alone take 128 GB on each device, and this cpu has 24 GB"):
        check_run_fits(load_config("gb300"), 1, CPU)  # without a network


@pytest.mark.slow
@pytest.mark.parametrize("name", ["gb300_rl", "v100x4"])
def test_the_config_of_a_machine_fits_it_without_network_or_weights(name):
    config = load_config(name)
    dtype = torch.float16 if config.train.dtype == "float16" else torch.bfloat16
    plan = plan_training(config, resolve_shape(config), dtype)
    assert sum(plan.device_bytes.values()) <= GPU_SPECS[config.plan.machine].usable_memory


def test_rollouts_count_where_they_take_more_than_the_update():
    """They come before it, when there are neither gradients nor activations."""
    words = (
        "train.passage_sets_per_step=1 train.prompts_per_step=1 train.rows_per_set=64 "
        "train.num_generations=64 train.activation_checkpointing=full "
        "train.train_steps_per_rollout=1"
    )
    found = []
    for places in (64, 2):
        config = load_config("search_rl", [*words.split(), f"decode.batch_size={places}"])
        plan = plan_training(config, resolve_shape(config), torch.float32)
        memory = plan.memory
        always = memory.weights + memory.optimizer
        update = memory.gradients + memory.activations
        assert sum(plan.device_bytes.values()) == pytest.approx(always + max(update, plan.decode_bytes))
        found.append((plan.decode_bytes, update))
    (many, update), (few, same) = found
    assert few < update == same < many


def test_electricity_and_rent_are_apart():
    """An hour on two devices: a machine with a public price, and one without."""
    plan = SimpleNamespace(
        device_bytes={"weights": 200e9}, train=SimpleNamespace(max_steps=3600), devices=2,
        step_seconds=lambda *_: 1.0,
    )  # fmt: skip
    table = _make_machine_table([GPU_SPECS["gb300"], GPU_SPECS["gb10"]], plan, torch.bfloat16)
    fits, time, _, power, rent = [list(column.cells) for column in table.columns][3:]
    assert fits == ["yes", "no"] and time == ["1 h", "1 h"]
    assert power == ["$0.84", "$0.084"] and rent == ["$14.80", "?"]


LLADA = "GSAI-ML/LLaDA-8B-Instruct"


def test_8_billion_decode_on_one_card():
    """Weights of 16 GB, and keys, values and a step on top; a step cannot be faster than reading them."""
    spec, config = GPU_SPECS["v100"], load_config(None, [f"model.path={LLADA}", "decode.batch_size=8"])
    step = plan_decode_step(config, read_known_config(LLADA), choose_planned_dtype("auto", spec), spec)
    assert 16e9 < step.memory < spec.usable_memory
    assert step.seconds >= step.traffic > 0.9 * 16e9 / spec.bandwidth


def test_a_plan_of_decoding_reads_no_weights_and_its_settings_nobody_else(capsys):
    words = ["--model", LLADA, "plan.machine=v100"]
    with pytest.raises(SystemExit) as ended:
        sample([*words, "--plan"])
    assert ended.value.code == 0
    assert "v100" in capsys.readouterr().out
    for wrong in (words, [*words, "--plan", "plan.devices=2"]):
        with pytest.raises(ConfigError, match="has no effect here"):
            sample(wrong)


@pytest.mark.slow
def test_a_plan_of_training_says_what_it_takes_without_network_or_weights(capsys):
    train(["--plan", "--config", "b200.yaml"])
    said = " ".join(capsys.readouterr().out.split())
    for text in ("parameters", "optimizer", "electricity", "kWh"):
        assert text in said, text


@pytest.mark.parametrize(
    ("name", "spec"),
    [
        ("NVIDIA H200", "h200"), ("NVIDIA H100 80GB HBM3", "h100"), ("Tesla V100-DGXS-32GB", "v100"),
        ("NVIDIA GB10", "gb10"), ("NVIDIA GH200 480GB", None), ("NVIDIA H100 PCIe", None),
        ("NVIDIA H200 NVL", None),
    ],
)  # fmt: skip
def test_a_machine_is_known_by_its_whole_name(monkeypatch, name, spec):
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: name)
    assert find_gpu_spec(torch.device("cuda")) == (GPU_SPECS[spec] if spec else None)
