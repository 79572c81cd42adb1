"""Training on a CUDA device that is not there; run by tests/test_fake_cuda.py."""

from collections import Counter

import pytest
import torch
from conftest import byte_tokenizer, tiny_denoiser
from fake_cuda.checked_kernels import checked_kernels
from fake_cuda.decode import EXPERTS, STEP, place_of
from fake_cuda.device import fake_cuda
from tiny_gemma import write_gemma

from dlm_rag.config import load_config
from dlm_rag.training.objective import Objective
from dlm_rag.training.phase import open_trainer

IN, OUT, WAIT = STEP
SHAPE = [
    "model.device=cuda", "train.hidden_size=64", "train.num_hidden_layers=2", "train.vocabulary=400",
    "train.groups=2", "train.rows=3", "train.world_passages=100", "train.steps=9", "train.worlds=1",
    "train.validation_questions=1", "train.passage_length=96", "decode.canvas_length=48",
    "retrieval.top_k=3",
]  # fmt: skip
PRETRAIN = ["train.objective=pretrain", "train.sequence_length=96", "train.batch_tokens=192"]
OF_CHECKPOINT = ["model.path={folder}/plain", "decode.canvas_length=24"]
RL = [
    *OF_CHECKPOINT, "train.objective=rl", "train.rows=4", "train.hops=1", "train.optimizer=adamw",
    "train.steps_of_rollout=2", "decode.canvas_length=8",
]  # fmt: skip
DENOISER = [*RL, "train.learn=all", "decode.commit_rule=threshold", "decode.gate_width=2"]
GEMMA = ["model.path={folder}/gemma", "decode.canvas_length=24", "train.self_conditioning=0.5"]
V100, H200, GB10 = (7, 0), (9, 0), (12, 1)
WAYS = {  # capability, copies in (one for each call of the layers, one for the loss), settings
    "sft": (H200, 3, []),
    "sft in float32": (H200, 3, ["train.dtype=float32"]),
    "sft on a V100": (V100, 3, []),
    "sft, joint": (H200, 2, ["model.evidence_layout=joint"]),
    "sft, prefix": (H200, 3, ["model.evidence_layout=prefix"]),
    "sft in two parts, adamw": (H200, 6, ["train.accumulate=2", "train.optimizer=adamw"]),
    "sft in two parts, float16": (V100, 6, ["train.accumulate=2"]),
    "sft in blocks, reread": (H200, 3, ["model.attention_block=8"]),
    "sft in blocks, text": (H200, 3, ["model.attention_block=8", "decode.finished_blocks=text"]),
    "sft, checkpointing": (H200, 3, ["train.checkpointing=full"]),
    "sft, selective, sdpa": (GB10, 3, ["train.checkpointing=selective", "model.attention=sdpa"]),
    "adapters": (H200, 3, [*OF_CHECKPOINT, "train.lora_rank=4"]),
    "adapters on a V100": (V100, 3, [*OF_CHECKPOINT, "train.lora_rank=4", "train.checkpointing=full"]),
    "experts": (H200, 3, ["model.path={folder}/experts", "decode.canvas_length=24"]),
    "pretrain, 16 logits at a time": (H200, 2, [*PRETRAIN, "train.logit_chunk=16"]),
    "pretrain, selective": (H200, 2, [*PRETRAIN, "train.checkpointing=selective"]),
    "adapt, checkpointing": (H200, 2, [*PRETRAIN, "train.objective=adapt", "train.checkpointing=full"]),
    "rl": (H200, 3, DENOISER),
    "rl on a V100": (V100, 3, DENOISER),
    "rl in two parts": (H200, 6, [*DENOISER, "train.accumulate=2", "train.checkpointing=full"]),
    "rl of what was committed": (H200, 3, [*DENOISER, "train.committed_only=true"]),
    "rl with several updates": (H200, 6, [*DENOISER, "train.updates=2"]),
    "rl near the first weights": (H200, 5, [*DENOISER, "train.kl_weight=0.1"]),
    "rl of heads": (H200, 2, [*RL, "train.learn=heads", "decode.commit_rule=head", "decode.search=head"]),
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Checkpoints that training begins with."""
    folder = tmp_path_factory.mktemp("checkpoints")
    for name, experts in (("plain", None), ("experts", EXPERTS)):
        denoiser = tiny_denoiser(max_position_embeddings=512, experts=experts)
        denoiser.save_pretrained(folder / name, eos_token_id=257)
        byte_tokenizer().save_pretrained(folder / name)
    write_gemma(folder / "gemma")
    return folder


@pytest.fixture(autouse=True)
def mixed_groups(monkeypatch):
    """As if of the rollouts of a question every other one were right: on this device all are the same."""
    mixed = lambda rewards, priced: [(-1.0) ** n for n in range(len(rewards))]  # noqa: E731
    monkeypatch.setattr("dlm_rag.training.rollouts.advantages", mixed)


def trainer_of(out, folder, words):
    return open_trainer(load_config(None, [*SHAPE, *(word.format(folder=folder) for word in words)]), out)


def traffic_of_step(trainer, seen):
    """What a step sends, without what rollouts send to make its rows."""
    parts = trainer._parts()
    trainer._parts = lambda: parts
    seen.clear()
    trainer.step()
    del trainer._parts
    return Counter(seen)


@pytest.mark.parametrize("way", WAYS)
def test_a_training_step_waits_for_the_device_once(tmp_path, folder, way):
    """Pointers, masks, the norm of the gradients, the scale of the loss and the optimizers included."""
    capability, copies, words = WAYS[way]
    with fake_cuda(capability) as seen, checked_kernels():
        trainer, _ = trainer_of(tmp_path, folder, words)
        updates = trainer.train.updates
        for _ in range(2 if way == "sft" else 1):
            assert traffic_of_step(trainer, seen) == {IN: copies, OUT: updates, WAIT: updates}
        low = torch.float16 if capability == V100 else torch.bfloat16
        assert trainer.dtype == (torch.float32 if "train.dtype=float32" in words else low)
        assert {p.device.type for p in trainer.denoiser.parameters()} == {"cuda"}
        assert trainer._scaler.is_enabled() == (trainer.dtype == torch.float16)


@pytest.mark.parametrize("loss", ["cross_entropy", "nelbo"])
@pytest.mark.parametrize("checkpointing", ["none", "full"])
def test_a_step_from_uniform_noise_waits_in_the_class_of_transformers_alone(
    tmp_path, folder, loss, checkpointing
):
    """For grouped products, which torch computes in float32 expert by expert, and for its own masks."""
    with fake_cuda() as seen:
        words = [*GEMMA, f"train.uniform_loss={loss}", f"train.checkpointing={checkpointing}"]
        trainer, _ = trainer_of(tmp_path, folder, words)
        found = traffic_of_step(trainer, seen)
    assert {what: found[what] for what in (IN, OUT, WAIT)} == {IN: 2, OUT: 1, WAIT: 1}


@pytest.mark.parametrize("way", ["sft", "rl of heads", "pretrain, selective"])
def test_a_run_validates_saves_goes_on_and_exports(tmp_path, folder, way):
    *_, words = WAYS[way]
    with fake_cuda(), checked_kernels():
        trainer, validation = trainer_of(tmp_path / "run", folder, words)
        trainer.step()
        assert validation.scores(trainer)
        trainer.save()
        again, _ = trainer_of(tmp_path / "run", folder, words)
        assert again.restore() and again.state.step == 1
        again.step()
        again.export(tmp_path / "model")
    assert (tmp_path / "model" / "model.safetensors").is_file()


@pytest.mark.parametrize("kernel", ["varlen", "varlen, selective", "flash"])
def test_gradients_flow_through_the_kernels(tmp_path, folder, kernel):
    words = ["train.checkpointing=selective"] if "selective" in kernel else []
    with fake_cuda(), checked_kernels(flash=kernel == "flash") as calls:
        trainer, _ = trainer_of(tmp_path, folder, words)
        trainer.step()
    assert set(calls) == {kernel.split(",")[0]}


# Faults that are planted.


def test_a_tensor_that_was_left_on_the_host_is_found(tmp_path, folder):
    with fake_cuda():
        trainer, _ = trainer_of(tmp_path, folder, [])
        trainer.denoiser.inverse_frequencies = torch.zeros(trainer.denoiser.inverse_frequencies.shape)
        with pytest.raises(RuntimeError, match="two devices, c") as found:
            trainer.step()
    file, line = place_of(found.value)
    assert file == "denoiser.py" and "self.inverse_frequencies" in line


def test_a_value_that_the_host_waits_for_is_found(tmp_path, folder, monkeypatch):
    forward = Objective.forward

    def waits(self, *part):
        loss, sums = forward(self, *part)
        assert loss.item() == 0
        return loss, sums

    monkeypatch.setattr(Objective, "forward", waits)
    with fake_cuda():
        trainer, _ = trainer_of(tmp_path, folder, [])
        with pytest.raises(RuntimeError, match="_local_scalar_dense.default waits") as found:
            trainer.step()
    assert place_of(found.value, __file__) == ("training.py", "assert loss.item() == 0")


def test_products_of_two_dtypes_are_found(tmp_path, folder):
    """Autocast would hide it, so without."""
    with fake_cuda():
        trainer, _ = trainer_of(tmp_path, folder, ["train.dtype=float32"])
        trainer.denoiser.layers[0].mlp.up_proj.to(torch.bfloat16)
        with pytest.raises(RuntimeError, match="aten.mm.default got numbers of") as found:
            trainer.step()
    assert place_of(found.value)[0] == "feedforward.py"
