"""Which way to share devices is chosen, against arithmetic by hand.

A weight is 2 bytes in decoding and in frozen layers; in training with AdamW it is 16: itself, its gradient
and two moments in float32. A card has 92 % of its memory for that.
"""

from dataclasses import replace

import pytest
import torch

from dlm_rag.commands.sample import main as sample
from dlm_rag.config import load_config
from dlm_rag.errors import ConfigError
from dlm_rag.training.planning import step_memory
from dlm_rag.training.planning.gpu_specs import GPU_SPECS, choose_planned_dtype
from dlm_rag.training.planning.known_checkpoints import read_known_config
from dlm_rag.training.planning.parallel_choice import (
    compare_decoding,
    compare_training,
    explain_choice,
)
from dlm_rag.training.planning.plan import (
    plan_phase,
    plan_phases,
    resolve_shape,
)
from tests.support.training import MICRO_SETTINGS

FLASH, LLADA = "inclusionAI/LLaDA2.0-flash", "GSAI-ML/LLaDA-8B-Instruct"
QWEN = "Qwen/Qwen2.5-72B-Instruct"
# Numbers outside of the layers (embedding, head), and in them.
OUTSIDE = {FLASH: 2 * 157_184 * 4096, LLADA: 2 * 126_464 * 4096, QWEN: 2 * 152_064 * 8192}
FLASH_EXPERTS, FLASH_ATTENTION = 31 * 257 * 3 * 4096 * 1024, 32 * (2 * 4096 * 4096 + 2 * 4096 * 512)
LAYERS = {
    FLASH: FLASH_EXPERTS + FLASH_ATTENTION + 3 * 4096 * 9216 + 31 * 256 * 4096,
    LLADA: 32 * (4 * 4096**2 + 3 * 4096 * 12_288),
    QWEN: 80 * (2 * 8192**2 + 2 * 8192 * 1024 + 3 * 8192 * 29_568),
}


def decoding(path, machine, devices, *words):
    """The ways by their names, and the sentence."""
    plan = [f"plan.machine={machine}", f"plan.devices={devices}", f"model.path={path}"]
    config, spec = load_config(None, [*plan, *words]), GPU_SPECS[machine]
    dtype = choose_planned_dtype(config.model.dtype, spec)
    found = compare_decoding(config, read_known_config(path), dtype, spec)
    return {each.name: each for each in found}, explain_choice("decoding", found, spec, devices)


def training(name, path, *words):
    config = load_config(name, [f"model.path={path}", *words])
    spec, shape = GPU_SPECS[config.plan.machine], resolve_shape(config)
    found = compare_training(config, shape, choose_planned_dtype(config.train.dtype, spec), spec)
    return {each.name: each for each in found}, explain_choice("training", found, spec, config.plan.devices)


def chosen(said):
    return said.partition(": ")[2].partition(" (")[0]


def weights(path, ranks, size=2):
    return size * (OUTSIDE[path] + LAYERS[path] / ranks)


def test_8_billion_decode_whole_on_every_v100():
    """16 GB of 29: nothing is sent, and no head is computed four times."""
    ways, said = decoding(LLADA, "v100", 4)
    assert choose_planned_dtype("auto", GPU_SPECS["v100"]) == torch.float16
    assert weights(LLADA, 1) < ways["whole"].memory < 29.4e9 and ways["whole"].seconds["network"] == 0
    assert chosen(said) == "whole" and "workers=4" in said
    assert all(ways["whole"].step_seconds <= each.step_seconds for each in ways.values())


@pytest.mark.slow
def test_8_billion_train_on_v100_with_adapters_only():
    """16 bytes a weight are 128 GB, a quarter of which is 32 of 29."""
    ways, said = training("v100x4", LLADA, "train.lora_rank=0")
    assert ways["shards"].memory > 4 * weights(LLADA, 1) * 2 / 4 > 29.4e9 and "nothing fits" in said
    pytest.importorskip("peft")
    ways, said = training("v100x4", LLADA)
    assert weights(LLADA, 1) < ways["whole"].memory < 29.4e9 and chosen(said) == "whole"
    assert ways["shards"].memory < weights(LLADA, 1)


@pytest.mark.slow
@pytest.mark.parametrize(("name", "devices"), [("gb300", 1), ("h200", 4)])
def test_100_billion_are_not_trained_whole(name, devices):
    """1.6 TB."""
    ways, said = training(name, FLASH, f"plan.devices={devices}")
    assert min(each.memory for each in ways.values()) > 16 * LAYERS[FLASH] / devices > 260e9
    assert "nothing fits" in said


def test_a_way_has_as_many_parts_as_it_needs_to_fit():
    """A card with room for half of the items has two parts, and all items."""
    words = [*MICRO_SETTINGS, "train.passage_sets_per_step=8", "plan.machine=h100", "plan.devices=1"]
    config = load_config(None, words)
    shape, dtype = resolve_shape(config), torch.float32
    whole = plan_phase(config, "", shape, dtype, config.train)
    need = sum(whole.device_bytes.values()) - 3.5 * whole.memory.activations_per_item
    machine = GPU_SPECS["h100"]._replace(memory=need / 0.92)
    (found,) = compare_training(config, shape, dtype, machine)
    assert "train.gradient_accumulation_steps=2" in found.settings and not found.problem
    assert found.memory < need < sum(whole.device_bytes.values())


def test_a_plan_of_decoding_reads_no_weights_and_its_settings_nobody_else(capsys):
    words = ["--model", LLADA, "plan.machine=v100", "plan.devices=4"]
    with pytest.raises(SystemExit) as ended:
        sample([*words, "--plan"])
    assert ended.value.code == 0
    said = " ".join(capsys.readouterr().out.split())
    assert "Decoding on 4 x v100: whole" in said
    for wrong in (words, [*words, "--plan", "plan.days=2"]):
        with pytest.raises(ConfigError, match="has no effect here"):
            sample(wrong)


def test_no_part_of_a_step_is_run_twice(monkeypatch):
    """A step of one item in two parts is as one in many; ways that cannot be are not planned."""
    runs, simulate = [], step_memory._simulate

    def count(task, shape, dtype, items, layers):
        runs.append((task.train.parallel == "fsdp", shape, items, layers))
        return simulate(task, shape, dtype, items, layers)

    monkeypatch.setattr(step_memory, "_simulate", count)
    words = ["train.passage_sets_per_step=64", "train.gradient_accumulation_steps=2", "train.parallel=ddp"]
    config = load_config(None, [*MICRO_SETTINGS, *words, "plan.machine=h100", "plan.devices=3"])
    monkeypatch.setattr(step_memory, "_simulated", {})
    shape, dtype = resolve_shape(config), torch.float32
    (planned,) = plan_phases(config, shape, dtype)
    alone = len(runs)
    found = {c.name: c for c in compare_training(config, shape, dtype, GPU_SPECS["h100"])}
    assert len(runs) == len(set(runs)) == 2 * alone
    assert found["whole"].memory == sum(planned.device_bytes.values())
    monkeypatch.setattr(step_memory, "_simulated", {})
    (apart,) = plan_phases(replace(config, train=replace(config.train, parallel="fsdp")), shape, dtype)
    assert found["shards"].memory == sum(apart.device_bytes.values())
