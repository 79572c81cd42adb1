"""Figures of a running server, in the text form that Prometheus reads."""

from math import fsum
from time import process_time

from dlm_rag.decode.noisy import NoiseProposer
from dlm_rag.decode.proposer import DenoiserProposer
from dlm_rag.energy.meter import Meter
from dlm_rag.serving.station import Station

COUNTED = {
    "steps": "Steps of the engine.",
    "row_steps": "Steps of questions; by steps: how many shared one.",
    "forwards": "Denoising passes of questions.",
    "searches": "Searches; a query that did not change makes none.",
    "tokens": "Tokens committed, of answers.",
}
OUTCOMES = ("answered", "failed", "cancelled", "refused")


def exposition(
    station: Station, proposer: DenoiserProposer | NoiseProposer, meter: Meter, connections: int
) -> str:
    """The figures of a station, its evidence pool and its meter; joules where something counts them."""
    reuse = proposer.reuse
    pool = proposer.pool if isinstance(proposer, DenoiserProposer) else None
    lines: list[str] = []

    def add(name: str, kind: str, words: str, *values: tuple[str, float]) -> None:
        lines.extend([f"# HELP dlm_rag_{name} {words}", f"# TYPE dlm_rag_{name} {kind}"])
        lines.extend(f"dlm_rag_{name}{labels} {value}" for labels, value in values)

    counts = station.counts
    add("waiting", "gauge", "Questions without a place.", ("", station.waiting))
    add("rows", "gauge", "Questions in the batch.", ("", station.rows))
    add("places", "gauge", "Places in the batch.", ("", station.places))
    add("connections", "gauge", "Open connections.", ("", connections))
    outcomes = [(f'{{outcome="{each}"}}', float(counts[each])) for each in OUTCOMES]
    add("answers_total", "counter", "Questions by what became of them.", *outcomes)
    for name, words in COUNTED.items():
        add(f"{name}_total", "counter", words, ("", counts[name]))
    add("pool_wanted_tokens_total", "counter", "Context tokens that rows saw.", ("", reuse.wanted))
    hits = reuse.wanted - reuse.encoded
    add("pool_hit_tokens_total", "counter", "Of these, kept from before.", ("", hits))
    if pool is not None:
        add("pool_bytes", "gauge", "Keys and values kept of evidence, on the device.", ("", pool.bytes[0]))
        add("pool_most_bytes", "gauge", "At most so many (engine.pool_gib).", ("", pool.most_bytes))
    add("processor_seconds_total", "counter", "Processor time of all threads.", ("", process_time()))
    if meter.sensors:
        add("joules_total", "counter", "Drawn since the start.", ("", fsum(meter.read(needed_only=False))))
    return "\n".join(lines) + "\n"
