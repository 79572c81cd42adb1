"""The evidence store: what it returns is what was put in, whatever happens to processes and disks."""

import multiprocessing
import os
import random
import shutil
import time
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch
from safetensors.torch import save

from dlm_rag.config import EngineConfig
from dlm_rag.config.sections import GENERATION_FILE
from dlm_rag.engine import store as evidence_store
from dlm_rag.engine.engine import Decoder
from dlm_rag.engine.store import EvidenceStore, open_evidence_store
from dlm_rag.errors import ConfigError
from dlm_rag.model.denoiser import Denoiser
from dlm_rag.model.packed_batch import Segment
from dlm_rag.retrieval import load_retriever
from dlm_rag.tokenizer import Tokenizer
from tests.support.attention import ragged_kernel
from tests.support.decoding import rollout_records
from tests.support.processes import wait_until
from tests.support.tiny_models import byte_tokenizer, tiny_denoiser

TOKEN = torch.empty(2, 2, 1, 2, 8)


def segment(number, **changes):
    return Segment(tuple(range(number, number + 10)), **{"start": 0, **changes})


def kept(number, dtype=torch.float32):
    return torch.randn(2, 2, 10, 2, 8, generator=torch.Generator().manual_seed(number)).to(dtype)


def fill(folder, numbers):
    store = EvidenceStore(folder, "tiny", TOKEN)
    for number in numbers:
        store.add(segment(number), kept(number))
    store.flush()
    return store


def count_right(folder, numbers):
    """How many of the entries are there; what is there must be right."""
    store = EvidenceStore(folder, "tiny", TOKEN)
    found = {number: store.get(segment(number)) for number in numbers}
    assert all(tensor is None or torch.equal(tensor, kept(number)) for number, tensor in found.items())
    assert not store.damaged_entries
    return sum(tensor is not None for tensor in found.values())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int8])
def test_an_entry_is_returned_bit_for_bit_by_another_process(tmp_path, dtype):
    store = EvidenceStore(tmp_path, "tiny", TOKEN.to(dtype))
    store.add(segment(1), kept(1, dtype))
    store.flush()
    found = EvidenceStore(tmp_path, "tiny", TOKEN.to(dtype)).get(segment(1))
    assert found is not None and found.dtype == dtype and torch.equal(found, kept(1, dtype))


def test_whatever_the_numbers_depend_on_is_part_of_the_key(tmp_path):
    store = fill(tmp_path, [1])
    others = [segment(2), segment(1, start=1), segment(1, first=4, block=4), segment(1, block=5)]
    assert all(store.get(other) is None for other in others)
    assert EvidenceStore(tmp_path, "other weights", TOKEN).get(segment(1)) is None


def test_flipped_bits_are_found(tmp_path, caplog):
    rng = random.Random(0)
    fill(tmp_path, [1])
    (path,) = tmp_path.glob("*/*.safetensors")
    whole = path.read_bytes()
    for _ in range(20):
        flipped = bytearray(whole)
        flipped[rng.randrange(len(whole))] ^= 1 << rng.randrange(8)
        path.write_bytes(flipped)
        store = EvidenceStore(tmp_path, "tiny", TOKEN)
        found = store.get(segment(1))
        # A bit that says nothing (of the header's padding) may pass.
        assert (found is None and store.damaged_entries == 1) or torch.equal(found, kept(1))
        assert found is not None or "damaged" in caplog.text
        fill(tmp_path, [1])
    assert path.read_bytes() == whole


def entry_path(folder, number):
    return EvidenceStore(folder, "tiny", TOKEN).path(segment(number))


def test_an_entry_knows_whose_it_is(tmp_path):
    """Entries under one another's name are computed again."""
    fill(tmp_path, [1, 2])
    one, two = entry_path(tmp_path, 1), entry_path(tmp_path, 2)
    first, second = one.read_bytes(), two.read_bytes()
    one.write_bytes(second)
    two.write_bytes(first)
    three = entry_path(tmp_path, 3)
    three.parent.mkdir(exist_ok=True)
    three.write_bytes(first)
    store = EvidenceStore(tmp_path, "tiny", TOKEN)
    assert [store.get(segment(n)) for n in (1, 2, 3)] == [None] * 3 and store.damaged_entries == 3
    assert not one.exists(), "a damaged entry is removed, and written again"
    fill(tmp_path, [1, 2])
    assert count_right(tmp_path, [1, 2]) == 2


@pytest.mark.parametrize(
    "change",
    [
        lambda x: x[:, :, :5],
        lambda x: x.bfloat16(),
        lambda x: x.reshape(2, 2, 10, 8, 2),
        lambda x: x.to(torch.complex64),
    ],
)
def test_shape_and_dtype_of_an_entry_are_checked(tmp_path, change):
    """Of an entry whose checksum is right."""
    path, other = entry_path(tmp_path, 1), change(kept(1)).contiguous()
    path.parent.mkdir(parents=True)
    checksum = torch.tensor(evidence_store._checksum(path, other), dtype=torch.uint8)
    path.write_bytes(save({"keys_values": other, "blake3": checksum}))
    store = EvidenceStore(tmp_path, "tiny", TOKEN)
    assert store.get(segment(1)) is None and store.damaged_entries == 1 and not path.exists()


def make_sparse(path):
    with path.open("wb") as file:
        file.truncate(40 * 2**30)


@pytest.mark.parametrize(
    "make",
    [
        os.mkfifo, lambda path: path.symlink_to("/dev/zero"), make_sparse, Path.mkdir,
        lambda path: path.write_bytes(b""), lambda path: path.write_bytes(b"\xff" * 64),
        lambda path: path.write_bytes((3000).to_bytes(8, "little") + b'{"a":' * 600),
        lambda path: path.write_bytes(save({"keys_values": kept(1)})),
    ],
    ids=["fifo", "zero", "sparse", "folder", "empty", "noise", "deep", "no checksum"],
)  # fmt: skip
def test_what_is_no_entry_is_not_read(tmp_path, make):
    path = entry_path(tmp_path, 1)
    path.parent.mkdir(parents=True)
    make(path)
    store = EvidenceStore(tmp_path, "tiny", TOKEN)
    begin, opened = time.monotonic(), len([*Path("/proc/self/fd").iterdir()])
    assert store.get_all([segment(1)]) == [None] and store.damaged_entries == 1
    assert time.monotonic() - begin < 2 and len([*Path("/proc/self/fd").iterdir()]) == opened
    fill(tmp_path, [1])  # what could not be removed stays, and costs only time
    if not path.is_dir():
        assert count_right(tmp_path, [1]) == 1


def test_a_file_in_the_place_of_a_folder_costs_its_entries_alone(tmp_path):
    entry_path(tmp_path, 0).parent.write_text("a note")
    store = fill(tmp_path, range(6))
    own = sum(entry_path(tmp_path, n).parent == entry_path(tmp_path, 0).parent for n in range(6))
    assert not store.is_full and count_right(tmp_path, range(6)) == 6 - own


def test_a_store_leaves_room_on_its_disk(tmp_path, monkeypatch, caplog):
    store = fill(tmp_path, [0])
    monkeypatch.setattr(evidence_store, "MIN_FREE_BYTES", 2**62)
    for number in (1, 2):
        store.add(segment(number), kept(number))
        store.flush()
    assert store.is_full and "takes no more entries: its disk has less than" in caplog.text
    assert "the disk takes no more" in store.describe() and count_right(tmp_path, range(3)) == 1


def _fill_forever(folder, seed):
    numbers = list(range(200))
    random.Random(seed).shuffle(numbers)
    while True:
        fill(folder, numbers)
        for number in numbers[::2]:  # and come back
            entry_path(folder, number).unlink(missing_ok=True)


@pytest.mark.slow
def test_two_writers_that_are_killed_leave_a_store_that_is_right(tmp_path):
    fork = multiprocessing.get_context("fork")
    for turn in range(8):  # two kills each
        writers = [fork.Process(target=_fill_forever, args=(tmp_path, 2 * turn + n)) for n in (0, 1)]
        for writer in writers:
            writer.start()
        time.sleep(random.Random(turn).uniform(0.02, 0.3))
        for writer in writers:
            writer.kill()
            writer.join()
        count_right(tmp_path, range(200))
    assert count_right(tmp_path, range(200)) > 0
    fill(tmp_path, range(200))
    assert count_right(tmp_path, range(200)) == 200


@pytest.fixture
def checkpoint(tmp_path):
    tiny_denoiser(evidence_layout="independent").save_pretrained(tmp_path / "model", eos_token_id=257)
    byte_tokenizer().save_pretrained(tmp_path / "model")
    return tmp_path / "model"


def open_store(tmp_path, denoiser, **settings):
    return open_evidence_store(EngineConfig(store=str(tmp_path / "store"), **settings), denoiser, TOKEN)


def test_entries_are_read_together(tmp_path):
    fill(tmp_path, range(100))
    *found, missing = EvidenceStore(tmp_path, "tiny", TOKEN).get_all([*map(segment, range(101))])
    assert all(torch.equal(each, kept(n)) for n, each in enumerate(found)) and missing is None


def test_entries_belong_to_weights_and_not_to_settings_of_decoding(tmp_path, checkpoint):
    denoiser = Denoiser.from_pretrained(checkpoint)
    open_store(tmp_path, denoiser).add(segment(1), kept(1))

    def is_there(path, **changes):
        other = Denoiser.from_pretrained(path, **changes)
        return open_store(tmp_path, other).path(segment(1)).exists()

    abstaining = tmp_path / "abstaining"
    tiny_denoiser(evidence_layout="independent", abstain="answer").save_pretrained(abstaining)
    tiny_denoiser(1).save_pretrained(tmp_path / "other")
    wait_until(lambda: is_there(checkpoint), seconds=10)
    tuned = tmp_path / "tuned"
    shutil.copytree(checkpoint, tuned)
    (tuned / GENERATION_FILE).write_text('{"decode": {"commit_threshold": 0.8}, "retrieval": {"top_k": 2}}')
    assert is_there(abstaining) and is_there(tuned) and not is_there(tmp_path / "other")
    assert not is_there(checkpoint, dtype=torch.bfloat16)


def step(denoiser):
    for parameter in denoiser.parameters():
        parameter.grad = torch.ones_like(parameter)
    torch.optim.SGD(denoiser.parameters(), lr=1e-3).step()


def take_a_layer(denoiser):
    other = denoiser._origin[0].folder.with_name("other")
    tiny_denoiser(1).save_pretrained(other)
    denoiser.layers[0] = Denoiser.from_pretrained(other).layers[0]


@pytest.mark.parametrize(
    "change",
    [
        step,
        lambda denoiser: denoiser.load_state_dict(tiny_denoiser(1).state_dict()),
        lambda denoiser: denoiser.load_state_dict(tiny_denoiser(1).state_dict(), assign=True),
        lambda denoiser: denoiser.bfloat16().float(),
        take_a_layer,
        lambda denoiser: setattr(denoiser, "layers", denoiser.layers[::-1]),
    ],
    ids=["an optimizer step", "copied", "assigned", "rounded", "of another checkpoint", "moved"],
)
def test_weights_that_changed_are_refused(tmp_path, checkpoint, change):
    denoiser = Denoiser.from_pretrained(checkpoint)
    denoiser.requires_grad_(True)
    assert open_store(tmp_path, denoiser) is not None
    change(denoiser)
    with pytest.raises(ConfigError, match="have changed since"):
        open_store(tmp_path, denoiser)
    with pytest.raises(ConfigError, match="of no checkpoint"):
        open_store(tmp_path, tiny_denoiser())


@pytest.mark.parametrize("cache_dtype", ["auto", "int8"])
@pytest.mark.parametrize("memory", [nullcontext, ragged_kernel], ids=["by row", "gathered"])
def test_a_second_decoder_encodes_nothing_and_gives_the_same_tokens(
    tmp_path, checkpoint, corpus_file, memory, cache_dtype
):
    store = tmp_path / "store"
    tokenizer = Tokenizer.from_pretrained(checkpoint, "independent")
    retriever = load_retriever(corpus_file, top_k=3)

    def decode(**settings):
        engine = EngineConfig(cache_dtype=cache_dtype, **settings)
        denoiser = Denoiser.from_pretrained(checkpoint)
        decoder = Decoder(denoiser, retriever, tokenizer, None, "independent", engine)
        found = rollout_records(decoder.decode(["Who wrote Emma?", "Who was born in Tacoma?"]))
        if decoder.model_runner.cache.store is not None:
            decoder.model_runner.cache.store.flush()
        return found, decoder

    with memory():
        plain, _ = decode()
        first, writer = decode(store=str(store))
        second, reader = decode(store=str(store))
    assert plain == first == second
    written, read = writer.model_runner.cache_stats, reader.model_runner.cache_stats
    assert written.encoded_segments == read.store_segments == len([*store.glob("??/*.safetensors")]) > 3
    assert not written.store_segments and not read.encoded_segments and not read.encoded_tokens
    assert f"{read.store_segments} from files" in reader.describe()
    step(reader.denoiser)
    with pytest.raises(ConfigError, match="have changed since"):
        reader.model_runner.reset_cache()
