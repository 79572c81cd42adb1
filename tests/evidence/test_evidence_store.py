"""The evidence store: what it returns is what was put in, whatever happens to processes and disks."""

import multiprocessing
import os
import random
import resource
import signal
import time

import pytest
import torch

from dlm_rag.evidence.evidence_store import EvidenceStore
from dlm_rag.model.packed_batch import Segment

GENEROUS = 2**30
SPAWN = multiprocessing.get_context("spawn")


def segment(number, **changes):
    return Segment(tuple(range(number, number + 10)), **{"start": 0, **changes})


def kept(number, dtype=torch.float32):
    return torch.randn(2, 2, 10, 2, 8, generator=torch.Generator().manual_seed(number)).to(dtype)


def fill(folder, numbers, budget=GENEROUS):
    store = EvidenceStore(folder, "tiny", budget)
    for number in numbers:
        store.add(segment(number), kept(number))
    store.flush()
    return store


def count_right(folder, numbers):
    """How many of the entries are there; what is there must be right."""
    store = EvidenceStore(folder, "tiny", GENEROUS)
    found = {number: store.get(segment(number)) for number in numbers}
    assert all(tensor is None or torch.equal(tensor, kept(number)) for number, tensor in found.items())
    assert not store.stats.damaged_entries
    return sum(tensor is not None for tensor in found.values())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.int8])
def test_an_entry_is_returned_bit_for_bit_by_another_process(tmp_path, dtype):
    store = EvidenceStore(tmp_path, "tiny", GENEROUS)
    store.add(segment(1), kept(1, dtype))
    store.flush()
    found = EvidenceStore(tmp_path, "tiny", GENEROUS).get(segment(1))
    assert found is not None and found.dtype == dtype and torch.equal(found, kept(1, dtype))


def test_whatever_the_numbers_depend_on_is_part_of_the_key(tmp_path):
    store = fill(tmp_path, [1])
    others = [segment(2), segment(1, start=1), segment(1, first=4, block=4), segment(1, block=5)]
    assert all(store.get(other) is None for other in others)
    assert EvidenceStore(tmp_path, "other weights", GENEROUS).get(segment(1)) is None


def test_flipped_bits_are_found(tmp_path, caplog):
    rng = random.Random(0)
    fill(tmp_path, [1])
    (path,) = tmp_path.glob("*/*.safetensors")
    whole = path.read_bytes()
    for _ in range(50):
        flipped = bytearray(whole)
        flipped[rng.randrange(len(whole))] ^= 1 << rng.randrange(8)
        path.write_bytes(flipped)
        store = EvidenceStore(tmp_path, "tiny", GENEROUS)
        found = store.get(segment(1))
        # A bit that says nothing (of the header's padding) may pass.
        assert (found is None and store.stats.damaged_entries == 1) or torch.equal(found, kept(1))
        assert found is not None or "damaged" in caplog.text
        fill(tmp_path, [1])
    assert path.read_bytes() == whole


def test_what_was_used_longest_ago_leaves(tmp_path):
    fill(tmp_path, range(8))
    size = next(tmp_path.glob("*/*.safetensors")).stat().st_size
    for number in range(8):
        key = EvidenceStore(tmp_path, "tiny", GENEROUS).path(segment(number))
        os.utime(key, (number + 10.0, number + 10.0))
    store = EvidenceStore(tmp_path, "tiny", 8 * size)
    assert store.get(segment(0)) is not None  # used just now
    store.add(segment(8), kept(8))
    store.flush()
    there = {number for number in range(9) if segment(number) in store}
    assert {0, 8} <= there and 1 not in there and len(there) * size <= 8 * size
    assert store.stats.evicted_entries == 9 - len(there)


def _fill_until_the_disk_is_full(folder, pipe):
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    store = fill(folder, range(3))
    resource.setrlimit(resource.RLIMIT_FSIZE, (500, 500))  # bytes of a file: writing more fails
    for number in range(3, 9):
        store.add(segment(number), kept(number))
    store.flush()
    pipe.send(store.stats.written_entries)


def test_a_full_disk_leaves_what_was_written(tmp_path):
    here, there = SPAWN.Pipe()
    process = SPAWN.Process(target=_fill_until_the_disk_is_full, args=(tmp_path, there))
    process.start()
    process.join(120)
    assert process.exitcode == 0 and here.recv() == 3
    assert count_right(tmp_path, range(9)) == 3 and not list(tmp_path.glob("*/.part-*"))


def _fill_forever(folder, seed):
    numbers = list(range(200))
    random.Random(seed).shuffle(numbers)
    while True:
        fill(folder, numbers, budget=100 * 3000)  # entries leave and come back


@pytest.mark.slow
def test_two_writers_that_are_killed_leave_a_store_that_is_right(tmp_path):
    fork = multiprocessing.get_context("fork")
    for round_number in range(100):  # two kills each
        writers = [
            fork.Process(target=_fill_forever, args=(tmp_path, 2 * round_number + n)) for n in (0, 1)
        ]
        for writer in writers:
            writer.start()
        time.sleep(random.Random(round_number).uniform(0.02, 0.3))
        for writer in writers:
            writer.kill()
            writer.join()
        count_right(tmp_path, range(200))
    assert count_right(tmp_path, range(200)) > 0
    fill(tmp_path, range(200))
    assert count_right(tmp_path, range(200)) == 200
