"""Training on a CUDA device that is not there; run by tests/fake_cuda/test_fake_cuda.py."""

import traceback
from collections import Counter
from pathlib import Path

import peft  # noqa: F401 - `checked_kernels` forgets what is imported while it is open
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from dlm_rag.training.batches import MaskedObjective
from tests.fake_cuda.checked_kernels import checked_kernels
from tests.fake_cuda.decode import STEP_TRAFFIC
from tests.fake_cuda.device import PACKAGE, fake_cuda
from tests.support import setup_matrix

IN, OUT, WAIT = STEP_TRAFFIC
V100, H200, GB10 = (7, 0), (9, 0), (12, 1)
# of `setup_matrix.TRAINING_SETUPS`: copies in, for each call of the layers; of rollouts for the loss too
WAITS_BY_SETUP = {
    "sft": 2, "sft, joint": 1, "sft, prefix": 2, "sft in parts": 4, "sft in blocks, reread": 2,
    "sft in blocks, text": 2, "sft, checkpointing": 2, "sft, selective, sdpa": 2, "adapters": 2,
    "experts": 2, "pretrain": 1, "pretrain, full": 1, "rl": 3, "rl in parts": 6,
}  # fmt: skip
ON = {  # GPU, settings -> dtype
    "H200": (H200, [], torch.bfloat16),
    "H200, float32": (H200, ["train.dtype=float32"], torch.float32),
    "V100": (V100, [], torch.float16),
    "GB10": (GB10, [], torch.bfloat16),
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return setup_matrix.write_setup_checkpoints(tmp_path_factory.mktemp("checkpoints"))


@pytest.fixture(autouse=True)
def mixed_groups(monkeypatch):
    """Else none is: on this device all rollouts of a question are the same."""
    setup_matrix.force_mixed_rewards(monkeypatch)


def make_fake_cuda_trainer(out, folder, way="sft", *more):
    return setup_matrix.make_setup_trainer(out, folder, way, "model.device=cuda", *more)


def record_step_traffic(trainer, seen):
    """What a step sends, without what rollouts send to make its rows."""
    parts = trainer._take_parts()
    trainer._take_parts = lambda: parts
    seen.clear()
    trainer.step()
    del trainer._take_parts
    return Counter(seen)


@pytest.mark.parametrize(
    ("way", "on"),
    [*((way, "H200") for way in WAITS_BY_SETUP), ("pretrain", "H200, float32"), ("pretrain, full", "GB10")]
    + [(way, "V100") for way in ("sft in parts", "adapters")],
)
def test_a_training_step_waits_for_the_device_once(tmp_path, folder, way, on):
    """Pointers, masks, the norm of the gradients, the scale of the loss and the optimizers included."""
    assert {*WAITS_BY_SETUP} == set(setup_matrix.TRAINING_SETUPS)
    capability, words, dtype = ON[on]
    with fake_cuda(capability) as seen, checked_kernels():
        trainer, _ = make_fake_cuda_trainer(tmp_path, folder, way, *words)
        for _ in range(2 if way == "pretrain" else 1):
            assert record_step_traffic(trainer, seen) == {IN: WAITS_BY_SETUP[way], OUT: 1, WAIT: 1}
        assert trainer.dtype == dtype and trainer._scaler.is_enabled() == (dtype == torch.float16)
        assert {p.device.type for p in trainer.denoiser.parameters()} == {"cuda"}


class ComputedDtypes(TorchDispatchMode):
    """The dtypes of floating-point results."""

    def __init__(self):
        super().__init__()
        self.seen = set()

    def __torch_dispatch__(self, operator, types, args=(), kwargs=None):
        made = operator(*args, **(kwargs or {}))
        if isinstance(made, torch.Tensor) and made.is_floating_point():
            self.seen.add(made.dtype)
        return made


@pytest.mark.parametrize("on", ["V100", "H200"])
def test_nothing_is_computed_in_a_bfloat16_that_a_gpu_only_emulates(tmp_path, folder, on):
    """Muon's steps and the answers of validation included."""
    with fake_cuda(ON[on][0]), checked_kernels():
        words = ["train.optimizer=muon", "decode.max_new_tokens=4"]
        trainer, validation = make_fake_cuda_trainer(tmp_path, folder, "sft", *words)
        with ComputedDtypes() as computed:
            trainer.step()
            assert validation.compute_scores(trainer)
    assert (torch.bfloat16 in computed.seen) == (on == "H200")


@pytest.mark.parametrize("way", ["sft", "rl"])
def test_a_run_validates_saves_goes_on_and_exports(tmp_path, folder, way):
    with fake_cuda(), checked_kernels():
        trainer, validation = make_fake_cuda_trainer(
            tmp_path / "run", folder, way, "decode.max_new_tokens=8"
        )
        trainer.step()
        assert validation.compute_scores(trainer)
        trainer.save()
        again, _ = make_fake_cuda_trainer(tmp_path / "run", folder, way, "decode.max_new_tokens=8")
        assert again.restore() and again.state.step == 1
        again.step()
        again.export(tmp_path / "model")
    assert (tmp_path / "model" / "model.safetensors").is_file()


@pytest.mark.parametrize("kernel", ["varlen, selective", "flash"])
def test_gradients_flow_through_the_kernels(tmp_path, folder, kernel):
    words = ["train.activation_checkpointing=selective"] if "selective" in kernel else []
    with fake_cuda(), checked_kernels(flash=kernel == "flash") as calls:
        trainer, _ = make_fake_cuda_trainer(tmp_path, folder, "sft", *words)
        trainer.step()
    assert set(calls) == {kernel.split(",")[0]}


# Faults that are planted.


def leave_on_host(monkeypatch, denoiser):
    denoiser.inverse_frequencies = torch.zeros(denoiser.inverse_frequencies.shape)


def wait_for_the_loss(monkeypatch, denoiser):
    forward = MaskedObjective.forward

    def waits(self, *part):
        loss, sums = forward(self, *part)
        assert loss.item() == 0
        return loss, sums

    monkeypatch.setattr(MaskedObjective, "forward", waits)


def narrow_a_product(monkeypatch, denoiser):
    denoiser.layers[0].mlp.up_proj.to(torch.bfloat16)


@pytest.mark.parametrize(
    ("plant", "says", "file", "line"),
    [
        (leave_on_host, "two devices, c", "denoiser.py", "places * self.inverse_frequencies"),
        (wait_for_the_loss, "_local_scalar_dense.default waits", "training.py", "loss.item()"),
        (narrow_a_product, "aten.mm.default got numbers of", "layers.py", ""),
    ],
)
def test_a_fault_is_found_where_it_is(tmp_path, folder, monkeypatch, plant, says, file, line):
    """Autocast would hide a product of two dtypes, so in float32 there."""
    words = ["train.dtype=float32"] if plant is narrow_a_product else []
    with fake_cuda():
        trainer, _ = make_fake_cuda_trainer(tmp_path, folder, "sft", *words)
        plant(monkeypatch, trainer.denoiser)
        with pytest.raises(RuntimeError, match=says) as found:
            trainer.step()
    frames = traceback.extract_tb(found.value.__traceback__)
    last = [frame for frame in frames if frame.filename.startswith((PACKAGE, __file__))][-1]
    assert Path(last.filename).name == file and line in last.line
