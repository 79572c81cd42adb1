"""Figures of a running server, in the text form that Prometheus reads."""

from math import fsum
from time import process_time

from dlm_rag.decode.model_runner import MaskedModelRunner
from dlm_rag.decode.uniform_runner import UniformModelRunner
from dlm_rag.energy.meter import EnergyMeter
from dlm_rag.serving.async_engine import AsyncEngine

ENGINE_COUNTERS = {
    "steps": "Steps of the engine.",
    "row_steps": "Steps of questions; by steps: how many shared one.",
    "forwards": "Denoising passes of questions.",
    "searches": "Searches; a query that did not change makes none.",
    "tokens": "Tokens committed, of answers.",
}
ANSWER_OUTCOMES = ("answered", "failed", "cancelled", "refused")


def render_prometheus_metrics(
    engine: AsyncEngine,
    proposer: MaskedModelRunner | UniformModelRunner,
    meter: EnergyMeter,
    connections: int,
) -> str:
    """The figures of an engine, its evidence pool and its meter; joules where something counts them."""
    reuse = proposer.cache_stats
    pool = proposer.pool
    lines: list[str] = []

    def add(name: str, kind: str, words: str, *values: tuple[str, float]) -> None:
        lines.extend([f"# HELP dlm_rag_{name} {words}", f"# TYPE dlm_rag_{name} {kind}"])
        lines.extend(f"dlm_rag_{name}{labels} {value}" for labels, value in values)

    counts = engine.counts
    add("waiting", "gauge", "Questions without a place.", ("", engine.num_waiting))
    add("rows", "gauge", "Questions in the batch.", ("", engine.num_running))
    add("places", "gauge", "Places in the batch.", ("", engine.capacity))
    add("connections", "gauge", "Open connections.", ("", connections))
    outcomes = [(f'{{outcome="{each}"}}', float(counts[each])) for each in ANSWER_OUTCOMES]
    add("answers_total", "counter", "Questions by what became of them.", *outcomes)
    for name, words in ENGINE_COUNTERS.items():
        add(f"{name}_total", "counter", words, ("", counts[name]))
    add(
        "pool_wanted_tokens_total", "counter", "Context tokens that rows saw.", ("", reuse.requested_tokens)
    )
    hits = reuse.requested_tokens - reuse.encoded_tokens
    add("pool_hit_tokens_total", "counter", "Of these, kept from before.", ("", hits))
    if pool is not None:
        add(
            "pool_bytes",
            "gauge",
            "Keys and values kept of evidence, on the device.",
            ("", pool.used_bytes[0]),
        )
        add(
            "pool_most_bytes",
            "gauge",
            "At most so many (engine.prefix_cache_gib).",
            ("", pool.capacity_bytes),
        )
    add("processor_seconds_total", "counter", "Processor time of all threads.", ("", process_time()))
    if meter.counters:
        add("joules_total", "counter", "Drawn since the start.", ("", fsum(meter.count_joules())))
    return "\n".join(lines) + "\n"
