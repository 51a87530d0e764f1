"""Prometheus metrics, under vLLM's names with the prefix `jaxspec:`."""

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

# Upper bounds in seconds.
_TO_FIRST = (0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80, 160)
_BETWEEN = (0.005, 0.01, 0.015, 0.02, 0.025, 0.03, 0.04, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1, 2.5)
_WHOLE = (0.1, 0.2, 0.3, 0.5, 0.8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 50, 60, 120, 240, 480, 960)
#: Tokens, and the error's share of the true length.
_TOKENS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000)
_SHARES = (0.01, 0.02, 0.05, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.8, 1, 1.5, 2, 3, 5, 10)
_QUEUED = (0.001, 0.005, 0.01, 0.05, 0.1, 0.3, 0.5, 0.8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 50, 60, 120, 240)


class ServerMetrics:
    """A registry of its own: the engine's counters are read when asked for, latencies are observed as they happen."""

    def __init__(self, engine: Engine, model_name: str) -> None:
        self._registry = CollectorRegistry()
        self._registry.register(_EngineCollector(engine, model_name))

        def histogram(name: str, help: str, buckets: tuple[float, ...]) -> Histogram:
            whole = Histogram(f"jaxspec:{name}", help, ["model_name"], buckets=buckets, registry=self._registry)
            return whole.labels(model_name)

        self._ttft = histogram("time_to_first_token_seconds", "From arrival to the first token.", _TO_FIRST)
        self._between = histogram("inter_token_latency_seconds", "Between neighbouring tokens of a request.", _BETWEEN)
        self._e2e = histogram("e2e_request_latency_seconds", "From arrival to the last token.", _WHOLE)
        self._queued = histogram("request_queue_time_seconds", "From arrival to the first step.", _QUEUED)
        self._off = histogram("length_prediction_error_tokens", "Between first prediction and output.", _TOKENS)
        self._off_by = histogram(
            "length_prediction_relative_error", "The same as a share of the output's length.", _SHARES
        )
        self._finished = Counter(
            "jaxspec:request_success",
            "Requests that have ended, by reason.",
            ["model_name", "finished_reason"],
            registry=self._registry,
        )
        self._attainment = AttainmentMetrics(self._registry, model_name)
        self._model_name = model_name
        for reason in ("stop", "length", "abort"):
            self._finished.labels(model_name, reason)
        engine.observers.append(self._request)
        engine.first_token_observers.append(self._first_token)
        engine.token_observers.append(self._token)

    def render(self) -> bytes:
        """Prometheus' text format."""
        return generate_latest(self._registry)

    def _request(self, metrics: RequestMetrics, finish_reason: str) -> None:
        """Called in the engine's thread, as the two below are."""
        self._finished.labels(self._model_name, finish_reason).inc()
        if metrics.first_scheduled is not None:
            self._queued.observe(metrics.first_scheduled - metrics.arrival)
        if metrics.e2e is not None and finish_reason in ("stop", "length"):
            self._e2e.observe(metrics.e2e)
            self._attainment.observe(metrics)
            if metrics.predicted_tokens is not None and metrics.output_tokens:
                error = abs(metrics.predicted_tokens - metrics.output_tokens)
                self._off.observe(error)
                self._off_by.observe(error / metrics.output_tokens)

    def _first_token(self, metrics: RequestMetrics) -> None:
        if metrics.ttft is not None:
            self._ttft.observe(metrics.ttft)

    def _token(self, latency: float, count: int) -> None:
        for _ in range(count):
            self._between.observe(latency)


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
            "Draft tokens accepted, by their level in the draft tree; 0 is the first.",
            labels=["model_name", "position"],
        )
        for level, count in enumerate(stats.accepted_by_level):
            by_level.add_metric([*self._labels, str(level)], count)
        yield by_level

    def describe(self) -> Iterator[Metric]:
        """Nothing: registering must not ask the engine."""
        return iter(())


def _gauges(s: EngineStats) -> list[tuple[str, str, float]]:
    host = s.host_seconds / s.step_seconds if s.step_seconds else 0.0
    return [
        ("num_requests_running", "Requests that are being computed.", s.running),
        ("num_requests_waiting", "Requests in the queue.", s.waiting),
        ("num_requests_swapped", "Those of them whose KV is on the host.", s.swapped),
        ("kv_cache_usage_perc", "Share of the KV pages in use; 1 is all.", s.kv_usage),
        ("cpu_cache_usage_perc", "Share of the host's KV pages in use; 1 is all.", s.host_usage),
        ("num_host_pages", "KV pages that the host has room for.", s.host_pages),
        ("kv_positions_padded_ratio", "Share of padding in the KV positions read.", s.padded_fraction),
        ("step_tokens_padded_ratio", "Share of padding in the tokens of the steps.", s.token_padded_fraction),
        (
            "num_programs_ready",
            "Programs that are compiled; the others are to come, or failed.",
            s.programs_ready,
        ),
        ("num_programs", "Programs that the engine uses when all are compiled.", s.programs_total),
        ("host_overhead_ratio", "Share of the step time in which the device waits for the host.", host),
    ]


def _counters(s: EngineStats) -> list[tuple[str, str, float]]:
    """Without the `_total` that the text format adds."""
    return [
        ("prefix_cache_queries", "Prompt tokens looked up in the prefix cache.", s.prefix_queries),
        ("prefix_cache_hits", "Prompt tokens found in the prefix cache.", s.prefix_hits),
        ("num_preemptions", "Times that a request lost its KV pages to others.", s.preemptions),
        ("num_swaps", "Times that they went to the host.", s.swaps),
        ("num_switches", "Times that a running request was paused for others, with its KV pages kept.", s.switches),
        ("recomputed_tokens", "Tokens computed again after their KV pages were lost.", s.recomputed_tokens),
        ("recompute_seconds", "Share of the steps' time that went into those.", s.recompute_seconds),
        ("num_pages_swapped_out", "KV pages moved from the device to the host.", s.pages_swapped_out),
        ("num_pages_swapped_in", "KV pages moved from the host to the device.", s.pages_swapped_in),
        ("prompt_tokens", "Prompt tokens computed.", s.prompt_tokens),
        ("generation_tokens", "Tokens generated.", s.generation_tokens),
        (
            "compilations_after_warmup",
            "Compilations in a request's way; should stay 0.",
            s.compilations_after_warmup,
        ),
        ("length_predictions", "Output lengths predicted from prompts.", s.predictions.made),
        ("length_predictions_late", "Those that came after their request had ended.", s.predictions.late),
        ("length_predictions_missing", "Requests that the predictor left without one.", s.predictions.without),
        ("length_prediction_seconds", "Time the predictor took, what it learned included.", s.predictions.seconds),
        ("step_seconds", "Time in which a step ran.", s.step_seconds),
        ("spec_decode_num_drafts", "Verifications: steps of a request in which it had a draft.", s.verifications),
        ("spec_decode_num_draft_tokens", "Draft tokens verified.", s.draft_tokens),
        ("spec_decode_num_accepted_tokens", "Draft tokens accepted.", s.accepted_tokens),
        ("spec_decode_drafter_switches", "Changes of a request's drafter.", s.drafter_switches),
        ("spec_decode_drafter_switch_seconds", "Time for computing their KV anew.", s.drafter_switch_seconds),
        ("slo_refused", "Requests refused because their latency target could not be kept.", s.slo_refused),
    ]
