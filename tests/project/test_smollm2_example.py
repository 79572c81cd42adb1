"""What `examples/smollm2/pack.py` packs is what `train_adapter.py` reads."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from tests.support.paths import ROOT

FOLDER = ROOT / "examples" / "smollm2"


@pytest.fixture
def example(monkeypatch):
    monkeypatch.syspath_prepend(str(FOLDER))
    import pack
    import row_sets
    import train_adapter

    return pack, row_sets, train_adapter


@pytest.mark.parametrize("kind", ["Q4_1", "Q8_0", "F32"])
def test_blocks_are_read_as_gguf_reads_them(example, kind):
    gguf = pytest.importorskip("gguf")
    weights = np.random.default_rng(0).standard_normal((6, 64), dtype=np.float32)
    form = gguf.GGMLQuantizationType[kind]
    stored = gguf.quants.quantize(weights, form)
    expected = torch.from_numpy(np.array(gguf.quants.dequantize(stored, form))).bfloat16()
    assert torch.equal(example[2].dequantize(torch.from_numpy(np.array(stored)), kind), expected)


def test_rows_come_back(example, tmp_path):
    _, row_sets, _ = example
    sets = [
        row_sets.RowSet(
            [[1, 2], [3]], [row_sets.Row([4, 5], [6], False), row_sets.Row([7], [49151, 0], True)]
        ),
        row_sets.RowSet([[8]], [row_sets.Row([9], [10, 11], False)]),
    ]
    row_sets.pack_rows(sets, tmp_path / "rows.safetensors")
    assert row_sets.unpack_rows(tmp_path / "rows.safetensors") == sets


def test_an_adapter_is_joined_of_its_halves(example, tmp_path):
    pack, _, train = example
    for number, half in enumerate(train.ADAPTER_HALVES):
        save_file({f"tensor {number}": torch.arange(4.0) + number}, tmp_path / half)
    pack.join_adapter(tmp_path)
    joined = train.load_file(tmp_path / train.ADAPTER_FILE)
    assert {name: value[0].item() for name, value in joined.items()} == {"tensor 0": 0, "tensor 1": 1}


def test_a_resumed_run_knows_how_long_it_has_run(example, tmp_path):
    weight = torch.nn.Parameter(torch.ones(2))
    optimizer = torch.optim.AdamW([weight])
    weight.sum().backward()
    optimizer.step()
    (tmp_path / "config.json").write_text("{}")
    model = SimpleNamespace(a={}, b={}, parameters=[weight], device="cpu")
    example[2].save(tmp_path / "out", model, optimizer, 7, 90.0, tmp_path)
    assert example[2].resume(tmp_path / "out", model, optimizer) == (7, 90.0)
