"""Seconds to have the evidence of a passage where rows read it, by tier and size of the model.

    python profiling/bench_store.py --out runs/store model.dtype=bfloat16
    python profiling/bench_store.py --out runs/store --shapes 7b model.device=cuda
    python profiling/bench_store.py --out runs/store --entries 100000    # of 40 KB: lookups, memory, scan

For passages of 100 tokens, in `engine.cache_dtype`: computed (eight in one call, a passage's share), read
from a file that the disk has to give, read from one that the system still holds, copied from host memory
and, on a GPU, from the device. Medians over eight passages. Writes table.md, scores.json and picture.png
into --out.
"""

import os
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median

import torch
from bench_tools import (
    TableRow,
    format_markdown_table,
    parse_bench_args,
    print_table,
    save_figure,
    synchronize_device,
    write_json,
)
from decode_replay import PASSAGE_LENGTH, RANDOM_MODEL_SHAPES, make_random_denoiser

from dlm_rag.cli import run_program
from dlm_rag.errors import ConfigError
from dlm_rag.evidence.encode_segments import encode_segments
from dlm_rag.evidence.evidence_store import EvidenceStore, list_entries
from dlm_rag.evidence.store_speed import drop_cached_pages
from dlm_rag.files.hub import SHIPPED_FOLDER
from dlm_rag.files.paths import write_text_atomic
from dlm_rag.machine import choose_device, choose_dtype, get_code_commit, get_machine_name
from dlm_rag.model.denoiser import Denoiser
from dlm_rag.model.kv_format import KVFormat
from dlm_rag.model.packed_batch import Segment

PASSAGES = 8
ENTRY_BYTES, LOOKUPS = 40_000, 2000
OPTIONS: dict[str, tuple[str | int, str]] = {
    "entries": (0, "fill a store with so many, and look them up"),
    "shapes": ("shipped,100m,1b", f"shipped, or random weights: {', '.join(RANDOM_MODEL_SHAPES)}"),
}
TIERS = ("computed", "file, from the disk", "file, in the page cache", "host memory", "device")


def main(argv: list[str]) -> None:
    words, out = parse_bench_args(__doc__ or "", argv, OPTIONS)
    config, rows = words.config, list[TableRow]()
    if words.options["entries"]:
        print_table([measure_lookups(out / "store", int(words.options["entries"]))])
        return
    device = choose_device(config.model.device)
    dtype = choose_dtype(config.model.dtype, device)
    for shape in str(words.options["shapes"]).split(","):
        if shape not in ("shipped", *RANDOM_MODEL_SHAPES):
            raise ConfigError(f"--shapes {shape} is not shipped or one of {', '.join(RANDOM_MODEL_SHAPES)}")
        if shape == "shipped":
            denoiser = Denoiser.from_pretrained(SHIPPED_FOLDER / "model", device, dtype)
        else:
            denoiser = make_random_denoiser(shape, device, dtype)
        form = KVFormat(denoiser, config.engine.cache_dtype)
        with torch.inference_mode():
            seconds = measure_tiers(denoiser, form, EvidenceStore(out / "store", shape, 2.0**40))
        rows.append({"model": shape, "MB a passage": form.token_bytes * PASSAGE_LENGTH / 1e6} | seconds)
    print_table(rows)
    stamp = {
        "commit": get_code_commit(),
        "date": time.strftime("%Y-%m-%d"),
        "machine": get_machine_name(device),
        "dtype": str(form.kept_dtype),
        "threads": str(torch.get_num_threads()),
    }
    write_json(out / "scores.json", {"stamp": stamp, "rows": rows})
    origin = ", ".join(f"{name} {value}" for name, value in stamp.items())
    write_text_atomic(out / "table.md", f"Milliseconds.\n\n{format_markdown_table(rows)}\n\n{origin}\n")
    plot_tiers(out / "picture.png", rows)


def measure_lookups(folder: Path, entries: int) -> TableRow:
    """Fills a store, then looks entries up at random, and as many that are not there."""
    store, kept = EvidenceStore(folder, "lookups", 2.0**40), torch.zeros(1, 2, 10, 1, ENTRY_BYTES // 80)
    begin = time.perf_counter()
    for number in range(entries):
        store.add(Segment((number,) * 10, 0), kept)
    store.flush()
    row: TableRow = {"entries": entries, "filled in s": time.perf_counter() - begin}
    begin = time.perf_counter()
    found = sum(1 for _ in list_entries(folder))
    row |= {"found": found, "looked through in s": time.perf_counter() - begin}
    generator, before = torch.Generator().manual_seed(0), get_resident_bytes()
    for what, first in (("hit", 0), ("miss", entries)):
        numbers = torch.randint(first, first + entries, (LOOKUPS,), generator=generator).tolist()
        begin = time.perf_counter()
        hits = sum(store.get(Segment((number,) * 10, 0)) is not None for number in numbers)
        row[f"{what}, ms"] = 1e3 * (time.perf_counter() - begin) / LOOKUPS
        assert hits == (LOOKUPS if what == "hit" else 0)
    return row | {"more memory, MB": (get_resident_bytes() - before) / 1e6}


def get_resident_bytes() -> int:
    """What this process has in memory now."""
    pages = Path("/proc/self/statm").read_text().split()[1]
    return int(pages) * os.sysconf("SC_PAGE_SIZE")


def measure_tiers(denoiser: Denoiser, form: KVFormat, store: EvidenceStore) -> TableRow:
    """Milliseconds a passage in every tier."""
    rng = torch.Generator().manual_seed(0)
    ids = torch.randint(denoiser.config.vocab_size, (PASSAGES, PASSAGE_LENGTH), generator=rng).tolist()
    segments, device = [Segment(tuple(row), 0) for row in ids], denoiser.device
    kept = [form.pack(x, 0).contiguous() for x in encode_segments(denoiser, segments)]
    aside = [x.cpu() for x in kept]
    if device.type == "cuda":
        aside = [x.pin_memory() for x in aside]
    target = form.empty(PASSAGE_LENGTH)
    for segment, tensor in zip(segments, aside, strict=True):
        store.add(segment, tensor)
    store.flush()
    for segment in segments:
        drop_cached_pages(store.path(segment))

    def time_each(act: Callable[[int], object], times: int = PASSAGES) -> float:
        found = []
        for number in range(times):
            synchronize_device(device)
            begin = time.perf_counter()
            act(number)
            synchronize_device(device)
            found.append(time.perf_counter() - begin)
        return 1e3 * median(found)

    def read(number: int) -> None:
        found = store.get(segments[number])
        assert found is not None
        target.copy_(found)

    computed = time_each(lambda _: encode_segments(denoiser, segments), 2) / PASSAGES
    reads = [time_each(read) for _ in range(2)]  # from the disk, then from the page cache
    copies = [time_each(lambda n: target.copy_(aside[n])), time_each(lambda n: target.copy_(kept[n]))]
    for segment in segments:
        store.path(segment).unlink()
    here = len(TIERS) - (device.type == "cpu")  # where host memory is the device's
    return dict(list(zip(TIERS, (computed, *reads, *copies), strict=True))[:here])


def plot_tiers(path: Path, rows: list[TableRow]) -> None:
    """A line for each tier over the models, by the size of a passage."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 4.2), layout="constrained")
    axis, places = figure.subplots(), range(len(rows))
    for tier in TIERS:
        if tier in rows[0]:
            times = [row[tier] for row in rows]
            (line,) = axis.plot(places, times, "o-" if tier == "computed" else "o--")
            axis.annotate(tier, (places[-1], times[-1]), (8, 0), textcoords="offset points", va="center",
                          color=line.get_color(), fontsize=9)  # fmt: skip
    axis.set_xticks(places, [f"{row['model']}\n{row['MB a passage']:.2g} MB" for row in rows])
    axis.set(
        yscale="log", ylabel="milliseconds until rows can read a passage", xlim=(-0.3, len(rows) - 0.3)
    )
    axis.grid(axis="y", alpha=0.3)
    save_figure(path, figure)


if __name__ == "__main__":
    run_program(main)
