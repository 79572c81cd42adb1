"""A public checkpoint at its full size, 8 B parameters in 16 GB, with random weights."""

import json
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from dlm_rag.model.families import find_family
from dlm_rag.model.layers import list_tensor_shapes
from dlm_rag.training.planning.known_checkpoints import KNOWN_CHECKPOINTS
from tests.support.passages import write_jsonl_file
from tests.support.paths import ROOT
from tests.support.tiny_models import byte_tokenizer

NAME = "GSAI-ML/LLaDA-8B-Instruct"
SIZE = 16.03e9  # bytes of its tensors in bfloat16


def read_sizes(path: str, start: str) -> list[float]:
    """Bytes on the lines of a file of /proc that begin so; none where the file has gone."""
    try:
        lines = Path(path).read_text().splitlines()
    except OSError:
        return []
    return [1024 * float(line.split()[1]) for line in lines if line.startswith(start)]


def write_checkpoint(folder: Path) -> float:
    """The tensors of `NAME` by their public names, a shard for each layer; returns their bytes."""
    raw = KNOWN_CHECKPOINTS[NAME] | {"torch_dtype": "bfloat16"}
    family = find_family(raw["model_type"])
    shape = family.read_config(raw)
    folder.mkdir()
    names = [f"<unused {n}>" for n in range(256, shape.vocab_size)]
    names[shape.mask_token_id - 256], names[0] = "<mask>", "<end>"
    byte_tokenizer(names).save_pretrained(folder)
    (folder / "config.json").write_text(json.dumps(raw))
    shards: dict[str, dict[str, tuple[int, ...]]] = {}
    for ours, sizes in list_tensor_shapes(shape).items():
        (part,) = family.list_sources(ours, shape)
        number = ours.split(".")[1] if ours.startswith("layers.") else ours
        shards.setdefault(f"model-{number}.safetensors", {})[part.name] = sizes
    # Of a length that no row has a multiple of, so that no two rows are alike.
    block = torch.randn(4_194_301, generator=torch.Generator().manual_seed(0)).mul_(0.02).bfloat16()
    written = 0.0
    for shard, tensors in shards.items():
        made = {name: torch.ones(sizes, dtype=torch.bfloat16) for name, sizes in tensors.items()}
        for value in made.values():
            if value.dim() > 1:
                for piece in value.view(-1).split(len(block)):
                    piece.copy_(block[: len(piece)])
        save_file(made, folder / shard, metadata={"format": "pt"})
        written += sum(value.nbytes for value in made.values())
    homes = {name: shard for shard, tensors in shards.items() for name in tensors}
    index = {"metadata": {}, "weight_map": homes}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return written


@pytest.fixture
def checkpoint(tmp_path):
    """Is gone after the test, whatever becomes of it: pytest keeps the folders of three runs."""
    memory, disk = read_sizes("/proc/meminfo", "MemAvailable")[0], shutil.disk_usage(tmp_path).free
    if memory < 22e9 or disk < 20e9:
        there = f"{memory / 1e9:.1f} and {disk / 1e9:.1f} GB"
        pytest.skip(f"needs 22 GB of memory and 20 GB of disk, and there are {there}")
    folder = tmp_path / "checkpoint"
    try:
        assert write_checkpoint(folder) == pytest.approx(SIZE, rel=1e-3)
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="memory is read from /proc")
def test_a_question_is_answered_with_one_copy_of_the_weights(checkpoint, tmp_path):
    """They stay the pages of their files; what a run has beside them is under 1 GB."""
    contents = ("Emma is a novel by Jane Austen.", "Dune is a novel by Frank Herbert.")
    corpus = write_jsonl_file(
        tmp_path / "passages.jsonl", [{"id": str(n), "contents": text} for n, text in enumerate(contents)]
    )
    words = [
        "Who wrote Emma?", "--model", checkpoint, "--corpus", corpus, "model.device=cpu",
        "model.dtype=bfloat16", "model.evidence_layout=independent", "decode.max_new_tokens=16",
        "decode.block_length=0", "decode.commit_threshold=0", "retrieval.top_k=2",
        "engine.prefix_cache_gib=0.25",
    ]  # fmt: skip
    command = [sys.executable, "sample.py", *map(str, words)]
    running = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    highest, deadline = 0.0, time.monotonic() + 400
    while running.poll() is None:
        highest = max(highest, sum(read_sizes(f"/proc/{running.pid}/status", "RssAnon")))
        if time.monotonic() > deadline:
            running.kill()
        time.sleep(0.02)
    out, err = running.communicate()
    assert running.returncode == 0, err
    (answer,) = map(json.loads, out.splitlines())
    assert "error" not in answer and answer["forwards"] == 1
    assert 0 < highest < 1e9
