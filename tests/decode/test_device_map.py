"""One model's layers on several devices: the tokens of one device, on a CPU that goes by two names."""

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from dlm_rag import Denoiser
from dlm_rag.commands.prepare_decoder import choose_devices
from dlm_rag.config import load_config
from dlm_rag.errors import ConfigError
from dlm_rag.model.denoiser import assign_devices, list_devices
from dlm_rag.model.packed_batch import Segment, pack_rows
from dlm_rag.training.step_memory import replace_with_empty_weights
from tests.support.decoding import QUESTIONS, rollout_records
from tests.support.setup_matrix import EXPERTS, make_setup_decoder
from tests.support.tiny_models import tiny_denoiser

CPU, ALIAS = torch.device("cpu"), torch.device("cpu", 0)  # which are not equal, and the same memory
ONE, TWO = torch.device("cuda", 0), torch.device("cuda", 1)
META = torch.device("meta")


@pytest.mark.parametrize("way", ["joint", "independent", "experts", "blocks, text", "edited", "pipeline"])
def test_two_devices_give_the_tokens_of_one(corpus_file, monkeypatch, way):
    expected = rollout_records(make_setup_decoder(corpus_file, way).decode(QUESTIONS))
    monkeypatch.setattr(Denoiser, "layer_devices", [CPU, ALIAS])
    decoder = make_setup_decoder(corpus_file, way)
    assert rollout_records(decoder.decode(QUESTIONS)) == expected
    assert [len(part) for part in decoder.model_runner.cache.memory._allocated()] == [1, 1]


def test_every_operator_has_its_operands_on_one_device(monkeypatch):
    """The second device is one of torch without contents; fake tensors refuse operands of two devices."""

    def send(arrays, device):
        return [torch.empty(a.shape, dtype=torch.from_numpy(a).dtype, device=device) for a in arrays]

    monkeypatch.setattr("dlm_rag.model.packed_batch.to_device", send)
    with torch.device("meta"):
        denoiser = tiny_denoiser(num_hidden_layers=4)
    with FakeTensorMode(allow_non_fake_inputs=True), torch.inference_mode():
        with CPU:
            replace_with_empty_weights(denoiser)
            denoiser.inverse_frequencies = torch.empty(denoiser.inverse_frequencies.shape)
        for layer in denoiser.layers[2:]:
            for module in layer.modules():
                for name, value in module.named_parameters(recurse=False):
                    setattr(module, name, torch.nn.Parameter(value.to(META), requires_grad=False))
        assert denoiser.layer_devices == [CPU, CPU, META, META]
        rows = pack_rows([Segment((1, 2, 3), 0)] * 2, CPU, [[1], [0, 2]])
        hidden, kept = denoiser.encode(rows, keep=True)
        assert hidden.shape[0] == 3 and hidden.device == CPU
        assert [k.device for k, _ in kept] == denoiser.layer_devices
        assert denoiser.compute_token_logits(hidden).device == CPU


def test_layers_are_spread_by_their_numbers():
    """Embedding and head count for the first; the dense layer before experts is small."""
    shape = tiny_denoiser(num_hidden_layers=8).config
    homes = assign_devices(shape, [ONE, TWO])
    by_layer = [homes[f"layers.{n}.mlp.up_proj.weight"].index for n in range(8)]
    assert by_layer == sorted(by_layer) and 4 <= by_layer.count(1) <= 6
    assert not {"embed_tokens.weight", "norm.weight", "lm_head.weight"} & homes.keys()
    shape = tiny_denoiser(num_hidden_layers=8, experts=EXPERTS).config
    assert {*assign_devices(shape, [ONE, TWO]).values()} == {ONE, TWO}


def test_weights_are_read_to_their_devices(tmp_path):
    tiny_denoiser(num_hidden_layers=4).save_pretrained(tmp_path)
    found = Denoiser.from_pretrained(tmp_path, device_map=["cpu", "cpu"])
    expected = Denoiser.from_pretrained(tmp_path)
    ids = torch.arange(30)[None]
    assert torch.equal(found(ids), expected(ids))


def test_what_names_no_devices_is_refused():
    if not torch.cuda.is_available():
        with pytest.raises(ConfigError, match="model.device_map=auto finds no CUDA device"):
            list_devices("auto")
    with pytest.raises(ConfigError, match="device=cuda:77 is not available"):
        list_devices("cuda:77,cuda:78")
    for words, said in (
        (["model.device=cuda:0"], "leave model.device out"),
        (["workers=2"], "leave workers out"),
        (["engine.memory_gib=1"], "leave engine.memory_gib out"),
    ):
        with pytest.raises(ConfigError, match=said):
            choose_devices(load_config(None, ["model.device_map=cpu,cpu", *words]))
