"""Figures of a running server for Prometheus, collected when they are asked for."""

from collections.abc import Callable, Iterator
from time import process_time

from prometheus_client import CollectorRegistry, Histogram, disable_created_metrics, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from dlm_rag.energy.meter import EnergyMeter
from dlm_rag.engine.engine import Decoder
from dlm_rag.serving.async_engine import AsyncEngine

BUCKET_SECONDS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 25.0, 60.0, 120.0, 300.0)
ANSWER_OUTCOMES = ("answered", "failed", "cancelled", "refused")


class ServerMetrics(Collector):
    """The figures of an engine, its evidence pool and its meter; joules where something counts them.

    connections: the number of open connections, set by the server.
    """

    def __init__(self, engine: AsyncEngine, decoder: Decoder) -> None:
        self._engine, self._decoder, self._registry = engine, decoder, CollectorRegistry()
        self.meter = EnergyMeter()
        self.connections: Callable[[], int] = lambda: 0
        disable_created_metrics()
        times = (
            ("dlm_rag_answer_seconds", "From a question to its answer."),
            ("dlm_rag_first_token_seconds", "From a question to the first token that is committed."),
        )
        engine.observe_answer, engine.observe_first_token = (
            Histogram(name, words, registry=self._registry, buckets=BUCKET_SECONDS).observe
            for name, words in times
        )
        self._registry.register(self)

    def render(self) -> bytes:
        """Returns the figures in Prometheus's text form."""
        return generate_latest(self._registry)

    def collect(self) -> Iterator[Metric]:
        """Yields each figure but the histograms."""
        engine, counts, runner = self._engine, self._engine.counts, self._decoder.model_runner
        reuse, pool = runner.cache_stats, runner.cache
        gauges = [
            ("waiting", "Questions without a place.", engine.num_waiting),
            ("rows", "Questions in the batch.", engine.num_running),
            ("places", "Places in the batch.", engine.capacity),
            ("connections", "Open connections.", self.connections()),
        ]
        if pool is not None:
            gauges += [
                ("pool_bytes", "Keys and values kept of evidence, on the device.", pool.used_bytes),
                ("pool_most_bytes", "Their limit (engine.prefix_cache_gib).", pool.budget_bytes),
            ]
        hits = reuse.requested_tokens - reuse.encoded_tokens
        counters = [
            ("steps", "Steps of the engine.", counts["steps"]),
            ("row_steps", "Steps of questions; by steps: how many shared one.", counts["row_steps"]),
            ("forwards", "Denoising passes of questions.", counts["forwards"]),
            ("searches", "Searches; a query that did not change makes none.", counts["searches"]),
            ("tokens", "Committed tokens of answers.", counts["tokens"]),
            ("pool_wanted_tokens", "Context tokens that rows saw.", reuse.requested_tokens),
            ("pool_hit_tokens", "Context tokens that were kept from before.", hits),
            ("processor_seconds", "Processor time of all threads.", process_time()),
        ]
        if self.meter.counters:
            counters.append(("joules", "Energy since the start.", self.meter.count_joules()))
        yield from (GaugeMetricFamily(f"dlm_rag_{name}", words, value) for name, words, value in gauges)
        yield from (CounterMetricFamily(f"dlm_rag_{name}", words, value) for name, words, value in counters)
        answers = CounterMetricFamily("dlm_rag_answers", "Questions by outcome.", labels=("outcome",))
        for name in ANSWER_OUTCOMES:
            answers.add_metric((name,), counts[name])
        yield answers
