"""The plan against what is measured: bytes by torch's own profiler, FLOPs by torch's own counter."""

import subprocess
import sys

import pytest
import torch
from conftest import ROOT
from test_training import ALONE, MICRO, make_trainer
from torch.profiler import ProfilerActivity, profile
from torch.utils.flop_counter import FlopCounterMode, sdpa_backward_flop_count, sdpa_flop_count

from dlm_rag.config import load_config
from dlm_rag.errors import ConfigError
from dlm_rag.training.machines import MACHINES
from dlm_rag.training.objective import Counts, Weights
from dlm_rag.training.plan import plan_phases, refuse_unfit, sample_items, step_flops, verdict
from dlm_rag.training.start import begin

SHAPE = [
    *MICRO, "train.hidden_size=128", "train.num_hidden_layers=4", "train.vocabulary=2000", "train.rows=8",
    "train.optimizer=adamw", "train.pointer_weight=0", "train.late_pointer_weight=0", "train.groups=1",
]  # fmt: skip
WAYS = {
    "sft": [],
    "sft, joint": ["model.evidence_layout=joint"],
    "sft, full checkpointing": ["train.checkpointing=full"],
    "sft, selective": ["train.checkpointing=selective"],
    "pretrain": ["train.objective=pretrain", "train.sequence_length=1024", "train.batch_tokens=1024"],
    "pretrain, chunked": [
        "train.objective=pretrain", "train.sequence_length=1024", "train.batch_tokens=1024",
        "train.logit_chunk=64",
    ],
}  # fmt: skip


def peak_of(run):
    """Bytes that the CPU allocator held at most during a call, beyond what it held before."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as recorded:
        run()
    now = peak = 0
    events = [e for e in recorded.profiler.kineto_results.events() if e.name() == "[memory]"]
    for event in sorted(events, key=lambda e: e.start_ns()):
        now += event.nbytes()
        peak = max(peak, now)
    return peak


@pytest.mark.parametrize("way", WAYS)
def test_the_predicted_peak_is_within_a_tenth_of_the_measured(tmp_path, way):
    config = load_config(None, [*SHAPE, *WAYS[way]])
    start = begin(config)
    train = config.train
    (plan,) = plan_phases(config, start.config, torch.float32)
    trainer = make_trainer(tmp_path, *SHAPE, *WAYS[way])
    examples = sample_items(config, train, start.config, 1)
    over = Counts.of(examples, start.tokenizer.end_ids, 1.0)

    def step():
        loss, _ = trainer.root(examples, over, Weights())
        loss.backward()

    step()
    trainer.denoiser.zero_grad(set_to_none=True)
    predicted = plan.memory.gradients + plan.memory.activations
    assert predicted == pytest.approx(peak_of(step), rel=0.1)
    held = sum(p.numel() * 4 for p in trainer.denoiser.parameters())
    assert plan.memory.weights == held and plan.memory.optimizer == 2 * held


@pytest.mark.parametrize("way", ["sft", "sft, joint", "pretrain"])
def test_the_flops_are_those_that_torch_counts(tmp_path, way):
    config = load_config(None, [*SHAPE, *WAYS[way]])
    trainer = make_trainer(tmp_path, *SHAPE, *WAYS[way])
    shape = trainer.start.config
    examples = sample_items(config, config.train, shape, 1)
    over = Counts.of(examples, trainer.start.tokenizer.end_ids, 1.0)
    aten = torch.ops.aten  # torch knows the kernels of GPUs only
    attention = {
        aten._scaled_dot_product_flash_attention_for_cpu: lambda q, k, v, *_, **__: sdpa_flop_count(
            q, k, v
        ),
        aten._scaled_dot_product_flash_attention_for_cpu_backward: (
            lambda slope, q, k, v, *_, **__: sdpa_backward_flop_count(slope, q, k, v)
        ),
    }
    with FlopCounterMode(display=False, custom_mapping=attention) as counter:
        trainer.root(examples, over, Weights())[0].backward()
    layout = "joint" if config.train.objective == "pretrain" else shape.evidence_layout
    counted = step_flops(shape, examples, layout, frozen=False)
    # torch counts the two products of attention twice and a half in backward, for what is recomputed.
    assert counted == pytest.approx(counter.get_total_flops(), rel=0.1)


def test_a_claim_beyond_the_peak_is_named():
    """8 B parameters on 150 B tokens in 18 to 22 days on 20 Sparks: 6 N D is 7.2e21 FLOPs."""
    flops = 6 * 8e9 * 150e9
    for days, share in ((18, "185%"), (22, "152%")):
        said = verdict(MACHINES["gb10"], flops, torch.bfloat16, 20, days)
        assert share in said and "cannot be done" in said and "33.3 days" in said
    assert "ask for 83%" in verdict(MACHINES["gb10"], flops, torch.bfloat16, 20, 40)


def test_what_cannot_fit_is_refused_before_it_is_allocated(monkeypatch):
    monkeypatch.setattr("dlm_rag.training.plan.device_memory", lambda device: 1e6)
    with pytest.raises(ConfigError, match="see what fits with --plan"):
        refuse_unfit(load_config(None, MICRO), ALONE)
    monkeypatch.setattr("dlm_rag.training.plan.device_memory", lambda device: 24e9)
    with pytest.raises(ConfigError, match="alone take 128 GB on each device, and this cpu has 24 GB"):
        refuse_unfit(load_config("gb300"), ALONE)  # without a network


@pytest.mark.parametrize("name", ["gb300", "gb10", "gb10_cluster", "h200", "b200", "v100x4"])
def test_every_machine_has_a_plan_without_network_or_weights(name):
    done = subprocess.run(
        [sys.executable, "train.py", "--config", f"{name}.yaml", "--plan"],
        cwd=ROOT, capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "B parameters" in done.stdout and "electricity" in done.stdout
    assert "-" not in done.stdout.split("largest part")[1].split("days")[0], "it fits its own machine"
