"""Prometheus metrics, named as in vLLM with the prefix `jaxspec:`."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from jaxspec.outputs import RequestMetrics
from jaxspec.serve.attainment import AttainmentMetrics

if TYPE_CHECKING:
    from jaxspec.engine.engine import Engine
    from jaxspec.engine.metrics import EngineStats

# Upper bounds of histogram buckets, in seconds.
_TTFT_BUCKETS = (0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80, 160)
_ITL_BUCKETS = (0.005, 0.01, 0.015, 0.02, 0.025, 0.03, 0.04, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1, 2.5)
_E2E_BUCKETS = (0.1, 0.2, 0.3, 0.5, 0.8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 50, 60, 120, 240, 480, 960)
# Length prediction error in tokens, and relative to the true length.
_TOKEN_BUCKETS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000)
_RELATIVE_BUCKETS = (0.01, 0.02, 0.05, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.8, 1, 1.5, 2, 3, 5, 10)
# Seconds.
_QUEUE_BUCKETS = (0.001, 0.005, 0.01, 0.05, 0.1, 0.3, 0.5, 0.8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 50, 60, 120, 240)


class ServerMetrics:
    """The server's metrics registry. Engine counters are read on each scrape; latencies are observed as they occur."""

    def __init__(self, engine: Engine, model_name: str) -> None:
        self._registry = CollectorRegistry()
        self._registry.register(_EngineCollector(engine, model_name))

        def histogram(name: str, help: str, buckets: tuple[float, ...]) -> Histogram:
            parent = Histogram(f"jaxspec:{name}", help, ["model_name"], buckets=buckets, registry=self._registry)
            return parent.labels(model_name)

        self._ttft = histogram("time_to_first_token_seconds", "Time from arrival to the first token.", _TTFT_BUCKETS)
        self._itl = histogram(
            "inter_token_latency_seconds", "Time between consecutive tokens of a request.", _ITL_BUCKETS
        )
        self._e2e = histogram("e2e_request_latency_seconds", "Time from arrival to the last token.", _E2E_BUCKETS)
        self._queued = histogram(
            "request_queue_time_seconds", "Time from arrival to the request's first step.", _QUEUE_BUCKETS
        )
        self._length_error = histogram(
            "length_prediction_error_tokens",
            "Absolute difference between first predicted and actual output tokens of a request.",
            _TOKEN_BUCKETS,
        )
        self._relative_length_error = histogram(
            "length_prediction_relative_error",
            "Length prediction error divided by the actual output tokens.",
            _RELATIVE_BUCKETS,
        )
        self._finished = Counter(
            "jaxspec:request_success",
            "Finished requests, by finish reason.",
            ["model_name", "finished_reason"],
            registry=self._registry,
        )
        self._attainment = AttainmentMetrics(self._registry, model_name)
        self._model_name = model_name
        for reason in ("stop", "length", "abort"):
            self._finished.labels(model_name, reason)
        engine.observers.append(self._on_finished)
        engine.first_token_observers.append(self._on_first_token)
        engine.token_observers.append(self._on_tokens)

    def render(self) -> bytes:
        """The metrics in Prometheus' text format."""
        return generate_latest(self._registry)

    def _on_finished(self, metrics: RequestMetrics, finish_reason: str) -> None:
        """Called in the engine's thread, as are the two methods below."""
        self._finished.labels(self._model_name, finish_reason).inc()
        if metrics.first_scheduled is not None:
            self._queued.observe(metrics.first_scheduled - metrics.arrival)
        if metrics.e2e is not None and finish_reason in ("stop", "length"):
            self._e2e.observe(metrics.e2e)
            self._attainment.observe(metrics)
            if metrics.predicted_tokens is not None and metrics.output_tokens:
                error = abs(metrics.predicted_tokens - metrics.output_tokens)
                self._length_error.observe(error)
                self._relative_length_error.observe(error / metrics.output_tokens)

    def _on_first_token(self, metrics: RequestMetrics) -> None:
        if metrics.ttft is not None:
            self._ttft.observe(metrics.ttft)

    def _on_tokens(self, latency: float, count: int) -> None:
        for _ in range(count):
            self._itl.observe(latency)


class _EngineCollector(Collector):
    def __init__(self, engine: Engine, model_name: str) -> None:
        self._engine = engine
        self._labels = [model_name]

    def collect(self) -> Iterator[Metric]:
        stats = self._engine.stats()
        for name, help, value in _gauges(stats):
            gauge = GaugeMetricFamily(f"jaxspec:{name}", help, labels=["model_name"])
            gauge.add_metric(self._labels, value)
            yield gauge
        for name, help, value in _counters(stats):
            counter = CounterMetricFamily(f"jaxspec:{name}", help, labels=["model_name"])
            counter.add_metric(self._labels, value)
            yield counter
        by_level = CounterMetricFamily(
            "jaxspec:spec_decode_num_accepted_tokens_per_pos",
            "Accepted draft tokens, by level in the draft tree; 0 is the first level.",
            labels=["model_name", "position"],
        )
        for level, count in enumerate(stats.accepted_by_level):
            by_level.add_metric([*self._labels, str(level)], count)
        yield by_level

    def describe(self) -> Iterator[Metric]:
        """Empty, so that registering the collector does not read the engine's stats."""
        return iter(())


def _gauges(s: EngineStats) -> list[tuple[str, str, float]]:
    """(name, help, value)."""
    host = s.host_seconds / s.step_seconds if s.step_seconds else 0.0
    return [
        ("num_requests_running", "Running requests.", s.running),
        ("num_requests_waiting", "Waiting requests.", s.waiting),
        ("num_requests_swapped", "Waiting requests whose KV is in host memory.", s.swapped),
        ("kv_cache_usage_perc", "Fraction of the KV pages in use; 1 means all.", s.kv_usage),
        ("cpu_cache_usage_perc", "Fraction of the host's KV pages in use; 1 means all.", s.host_usage),
        ("num_host_pages", "KV pages that fit into host memory.", s.host_pages),
        ("kv_positions_padded_ratio", "Fraction of the KV positions read that are padding.", s.padded_fraction),
        ("step_tokens_padded_ratio", "Fraction of the step tokens that are padding.", s.token_padded_fraction),
        (
            "num_programs_ready",
            "Compiled programs; the others are pending or failed to compile.",
            s.programs_ready,
        ),
        ("num_programs", "Programs that the engine uses, compiled or not.", s.programs_total),
        ("host_overhead_ratio", "Fraction of the step time in which the device waits for the host.", host),
    ]


def _counters(s: EngineStats) -> list[tuple[str, str, float]]:
    """(name, help, value); names without the suffix `_total`, which the text format adds."""
    return [
        ("prefix_cache_queries", "Prompt tokens looked up in the prefix cache.", s.prefix_queries),
        ("prefix_cache_hits", "Prompt tokens found in the prefix cache.", s.prefix_hits),
        ("num_preemptions", "Preemptions: a request lost its KV pages to other requests.", s.preemptions),
        ("num_swaps", "Preemptions in which the KV was swapped to the host.", s.swaps),
        ("num_pauses", "Pauses: a running request lost its slot but kept its KV pages.", s.pauses),
        ("recomputed_tokens", "Tokens recomputed after a preemption.", s.recomputed_tokens),
        ("recompute_seconds", "Step time spent on recomputed tokens, in seconds.", s.recompute_seconds),
        ("num_pages_swapped_out", "KV pages moved from the device to the host.", s.pages_swapped_out),
        ("num_pages_swapped_in", "KV pages moved from the host to the device.", s.pages_swapped_in),
        ("prompt_tokens", "Prompt tokens computed.", s.prompt_tokens),
        ("generation_tokens", "Tokens generated.", s.generation_tokens),
        (
            "compilations_after_warmup",
            "Compilations that may have delayed a request; should stay 0.",
            s.compilations_after_warmup,
        ),
        ("length_predictions", "Output lengths predicted.", s.predictions.made),
        ("length_predictions_late", "Length predictions made after the request had finished.", s.predictions.late),
        (
            "length_predictions_missing",
            "Requests without a prediction, because too many were queued or the predictor failed.",
            s.predictions.without,
        ),
        (
            "length_prediction_seconds",
            "Time spent in the length predictor, learning included, in seconds.",
            s.predictions.seconds,
        ),
        ("step_seconds", "Time in which a step was running, in seconds.", s.step_seconds),
        ("spec_decode_num_drafts", "Verifications: steps of a request that verified draft tokens.", s.verifications),
        ("spec_decode_num_draft_tokens", "Draft tokens verified.", s.draft_tokens),
        ("spec_decode_num_accepted_tokens", "Draft tokens accepted.", s.accepted_tokens),
        ("spec_decode_drafter_switches", "Changes of a request from one drafter to another.", s.drafter_switches),
        (
            "spec_decode_drafter_switch_seconds",
            "Time spent recomputing drafter KV after such changes, in seconds.",
            s.drafter_switch_seconds,
        ),
        ("slo_refused", "Requests refused by strict admission because an SLO could not be met.", s.slo_refused),
    ]
