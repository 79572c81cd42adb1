"""Figures of a running server, in the text form that Prometheus reads."""

from math import fsum
from time import process_time

from dlm_rag.decode.decoder import Decoder
from dlm_rag.energy.meter import EnergyMeter
from dlm_rag.serving.async_engine import AsyncEngine

ANSWER_OUTCOMES = ("answered", "failed", "cancelled", "refused")


def render_prometheus_metrics(
    engine: AsyncEngine, decoder: Decoder, meter: EnergyMeter, connections: int
) -> str:
    """The figures of an engine, its evidence pool and its meter; joules where something counts them."""
    counts, reuse, pool = engine.counts, decoder.model_runner.cache_stats, decoder.model_runner.pool
    hits = reuse.requested_tokens - reuse.encoded_tokens
    rows: list[tuple[str, str, float]] = [
        ("waiting", "Questions without a place.", engine.num_waiting),
        ("rows", "Questions in the batch.", engine.num_running),
        ("places", "Places in the batch.", engine.capacity),
        ("connections", "Open connections.", connections),
        *((f'answers_total{{outcome="{name}"}}', "Questions by what became of them.", counts[name])
          for name in ANSWER_OUTCOMES),
        ("steps_total", "Steps of the engine.", counts["steps"]),
        ("row_steps_total", "Steps of questions; by steps: how many shared one.", counts["row_steps"]),
        ("forwards_total", "Denoising passes of questions.", counts["forwards"]),
        ("searches_total", "Searches; a query that did not change makes none.", counts["searches"]),
        ("tokens_total", "Tokens committed, of answers.", counts["tokens"]),
        ("pool_wanted_tokens_total", "Context tokens that rows saw.", reuse.requested_tokens),
        ("pool_hit_tokens_total", "Of these, kept from before.", hits),
        ("processor_seconds_total", "Processor time of all threads.", process_time()),
    ]  # fmt: skip
    if pool is not None:
        rows.append(("pool_bytes", "Keys and values kept of evidence, on the device.", pool.used_bytes[0]))
        rows.append(("pool_most_bytes", "At most (engine.prefix_cache_gib).", pool.capacity_bytes))
    if meter.counters:
        rows.append(("joules_total", "Drawn since the start.", fsum(meter.count_joules())))
    lines: dict[str, None] = {}  # the head of a family once
    for labelled, words, value in rows:
        name = f"dlm_rag_{labelled.partition('{')[0]}"
        lines[f"# HELP {name} {words}"] = None
        lines[f"# TYPE {name} {'counter' if name.endswith('_total') else 'gauge'}"] = None
        lines[f"dlm_rag_{labelled} {value}"] = None
    seconds = (
        *engine.answer_seconds.render("dlm_rag_answer_seconds", "From a question to its answer."),
        *engine.first_token_seconds.render(
            "dlm_rag_first_token_seconds", "From a question to the first token that is committed."
        ),
    )
    return "\n".join((*lines, *seconds)) + "\n"
