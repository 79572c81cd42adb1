"""Which way to share devices is chosen, against arithmetic by hand.

A weight is 2 bytes in decoding and in frozen layers; in training with AdamW it is 16: itself, its gradient
and two moments in float32. A card has 92 % of its memory for that.
"""

import math
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from dlm_rag.commands.sample import main as sample
from dlm_rag.config import load_config
from dlm_rag.errors import ConfigError
from dlm_rag.training.planning import step_memory
from dlm_rag.training.planning.gpu_specs import GPU_SPECS, choose_planned_dtype
from dlm_rag.training.planning.known_checkpoints import read_known_config
from dlm_rag.training.planning.parallel_choice import (
    Choice,
    compare_decoding,
    compare_training,
    compare_ways,
    explain_choice,
)
from dlm_rag.training.planning.plan import (
    COLLECTIVE_SECONDS,
    plan_phase,
    plan_phases,
    resolve_shape,
)
from tests.support.training import MICRO_SETTINGS

FLASH, LLADA = "inclusionAI/LLaDA2.0-flash", "GSAI-ML/LLaDA-8B-Instruct"
QWEN = "Qwen/Qwen2.5-72B-Instruct"
# Numbers outside of the layers (embedding, head), which every rank has whole, and in them.
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


def test_100_billion_decode_on_one_gb300_and_split_on_h200():
    """205.8 GB: a GB300 has 232, an H200 130; halves are 104 and quarters 53."""
    ways, said = decoding(FLASH, "gb300", 1)
    assert [*ways] == ["whole"] and chosen(said) == "whole"
    assert 205e9 < weights(FLASH, 1) < ways["whole"].memory < 232e9
    ways, said = decoding(FLASH, "h200", 4)
    assert ways["whole"].memory > weights(FLASH, 1) > 130e9 and "whole does not fit" in said
    for name, ranks in (("tensor parallel", 4), ("both", 2)):
        assert weights(FLASH, ranks) < ways[name].memory < 130e9
    # Two halves have each half of the rows: the same work in the layers, half of it in the head, which is
    # whole everywhere, and a third of the sums: (1/2 x 4 rows) / (3/4 x 8 rows).
    waits = {name: ways[name].seconds["network"] - 64 * COLLECTIVE_SECONDS for name in ways}
    assert waits["tensor parallel"] == pytest.approx(3 * waits["both"])
    assert chosen(said) == "both" and "2 programs of engine.tensor_parallel=2" in said


def test_8_billion_decode_whole_on_every_v100():
    """16 GB of 29: nothing is sent, and no head is computed four times."""
    ways, said = decoding(LLADA, "v100", 4)
    assert choose_planned_dtype("auto", GPU_SPECS["v100"]) == torch.float16
    assert weights(LLADA, 1) < ways["whole"].memory < 29.4e9 and ways["whole"].seconds["network"] == 0
    assert chosen(said) == "whole" and "workers=4" in said
    assert all(ways["whole"].step_seconds <= each.step_seconds for each in ways.values())


def test_70_billion_decode_split_on_two_gb10_unless_they_are_quantised():
    """145 GB of 118, or 70 of one byte and 5 outside of the layers."""
    ways, said = decoding(QWEN, "gb10", 2)
    assert ways["whole"].memory > weights(QWEN, 1) > 145e9
    assert weights(QWEN, 2) < ways["tensor parallel"].memory < 118e9
    assert chosen(said) == "tensor parallel"
    small, said = decoding(QWEN, "gb10", 2, "model.quantize=int8")
    saved = ways["whole"].memory - small["whole"].memory  # but for wider products on the way
    assert 0.95 * LAYERS[QWEN] < saved < LAYERS[QWEN] and chosen(said) == "whole"


def test_few_tokens_are_bound_by_reading_weights_and_waiting_for_sums():
    """One row of a whole canvas and no more: 145 GB by 273 GB/s; halves, and two sums in 80 layers."""
    words = ("decode.batch_size=1", "retrieval.top_k=1", "model.evidence_layout=independent", "plan.mfu=1",
             "decode.max_new_tokens=32")  # fmt: skip
    ways, _ = decoding(QWEN, "gb10", 2, *words)
    read = weights(QWEN, 1) - 2 * OUTSIDE[QWEN] / 2  # all but the embedding
    assert ways["whole"].seconds["memory"] == pytest.approx(read / 273e9, rel=0.02)
    half = read - LAYERS[QWEN]
    assert ways["tensor parallel"].seconds["memory"] == pytest.approx(half / 273e9, rel=0.02)
    tokens = 33  # the canvas and the token before it
    sums = 160 * (tokens * 8192 * 2 / 12e9 + COLLECTIVE_SECONDS)
    assert ways["tensor parallel"].seconds["network"] == pytest.approx(sums)
    assert ways["tensor parallel"].step_seconds == pytest.approx(half / 273e9 + sums, rel=0.02)
    assert ways["shards"].seconds["network"] == pytest.approx(weights(QWEN, 1) / 2 / 12e9, rel=0.01)


@pytest.mark.slow
def test_8_billion_train_on_v100_with_adapters_only():
    """16 bytes a weight are 128 GB, a quarter of which is 32 of 29."""
    ways, said = training("v100x4", LLADA, "train.lora_rank=0")
    assert ways["shards"].memory > 4 * weights(LLADA, 1) * 2 / 4 > 29.4e9 and "nothing fits" in said
    assert ways["tensor parallel"].memory > weights(LLADA, 4, 16)
    pytest.importorskip("peft")
    ways, said = training("v100x4", LLADA)
    assert weights(LLADA, 1) < ways["whole"].memory < 29.4e9 and chosen(said) == "whole"
    assert ways["shards"].memory < weights(LLADA, 1)


@pytest.mark.slow
def test_70_billion_train_on_two_gb10_with_adapters_by_tensor_parallel():
    """Shards are gathered forward and backward, for passages and for canvases, in each of four parts: half
    of 141 GB sixteen times, over 12 GB/s. Halves stay, and send two sums a layer and pass."""
    pytest.importorskip("peft")
    ways, said = training("gb10", QWEN, "plan.devices=2", "train.parallel=fsdp")
    gathered = 16 * LAYERS[QWEN] * 2 / 2 / 12e9
    assert ways["shards"].seconds["network"] == pytest.approx(gathered, rel=0.05)
    assert ways["shards"].bound == "network" and "whole does not fit" in said
    assert ways["tensor parallel"].step_seconds < gathered and chosen(said) == "tensor parallel"


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


def test_of_ways_as_fast_the_first_is_taken_and_only_what_can_be():
    seconds = {"compute": 1.0, "memory": 0.5, "network": 0.0, "together": 1.0}
    ways = {"whole": "", "shards": "a=1", "tensor parallel": "b=1", "both": "c=1"}

    def consider(name, ranks):
        if name == "tensor parallel":
            raise ConfigError(f"{ranks} must divide")
        faster = seconds | {"together": 0.5 + ranks / 100}
        return Choice(name, ways[name], 1.0, faster if name == "both" else seconds)

    found = compare_ways(8, consider)
    assert [each.name for each in found] == [*ways]
    assert found[3].step_seconds == 0.52 and found[2].problem == "8 must divide"
    machine = SimpleNamespace(name="card")
    assert chosen(explain_choice("decoding", found, machine, 8)) == "both"
    equal = [Choice("whole", "a=1", 2.0, seconds), Choice("shards", "b=1", 1.0, seconds)]
    assert chosen(explain_choice("training", equal, machine, 2)) == "whole"
    assert math.isinf(found[2].memory)


def test_heads_that_cannot_be_split_are_no_way():
    ways, _ = decoding(FLASH, "h200", 8)
    assert "num_key_value_heads" in ways["tensor parallel"].problem and not ways["both"].problem


def test_a_plan_of_decoding_reads_no_weights_and_its_settings_nobody_else(capsys):
    words = ["--model", LLADA, "plan.machine=v100", "plan.devices=4"]
    with pytest.raises(SystemExit) as ended:
        sample([*words, "--plan"])
    assert ended.value.code == 0
    said = " ".join(capsys.readouterr().out.split())
    assert "tensor parallel" in said and "Decoding on 4 x v100: whole" in said
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
    assert found["tensor parallel"].problem and len(runs) == len(set(runs)) == 2 * alone
    assert found["whole"].memory == sum(planned.device_bytes.values())
    monkeypatch.setattr(step_memory, "_simulated", {})
    (apart,) = plan_phases(replace(config, train=replace(config.train, parallel="fsdp")), shape, dtype)
    assert found["shards"].memory == sum(apart.device_bytes.values())
