"""Prometheus metrics of the engine's counters, read on each scrape."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

if TYPE_CHECKING:
    from jaxspec.engine.engine import Engine
    from jaxspec.engine.metrics import EngineStats


class EngineCollector(Collector):
    """Gauges and counters of `EngineStats`."""

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
        info = self._cache_config(stats)
        config = GaugeMetricFamily(
            "jaxspec:cache_config_info", "Settings of the KV cache; always 1.", labels=list(info)
        )
        config.add_metric(list(info.values()), 1)
        yield config

    def describe(self) -> Iterator[Metric]:
        """Empty, so that registering the collector does not read the engine's stats."""
        return iter(())

    def _cache_config(self, stats: EngineStats) -> dict[str, str]:
        """Labels, named as in vLLM: autoscalers and routers compute the tokens that fit from them."""
        config = self._engine.config
        return {
            "block_size": str(config.page_size),
            "num_gpu_blocks": str(stats.kv_pages),
            "num_cpu_blocks": str(stats.host_pages),
            "cache_dtype": config.kv_cache_dtype,
            "enable_prefix_caching": str(config.enable_prefix_caching),
            "gpu_memory_utilization": str(config.gpu_memory_utilization),
        }


def _gauges(s: EngineStats) -> list[tuple[str, str, float]]:
    """Gauges as (name, help, value)."""
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
        ("prompt_tokens", "Prompt tokens, computed or found in the prefix cache.", s.prompt_tokens + s.prefix_hits),
        ("prompt_tokens_cached", "Prompt tokens that were not computed: the prefix cache had them.", s.prefix_hits),
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
        (
            "length_predictions_again",
            "Lengths predicted again, by the length probe.",
            s.predicted_again,
        ),
        (
            "length_prediction_again_seconds",
            "Time of the length probe between steps, in seconds.",
            s.predicted_again_seconds,
        ),
        ("step_seconds", "Time in which a step was running, in seconds.", s.step_seconds),
        ("spec_decode_num_drafts", "Verifications: steps of a request that verified draft tokens.", s.verifications),
        ("spec_decode_num_draft_tokens", "Draft tokens verified.", s.draft_tokens),
        ("spec_decode_num_accepted_tokens", "Draft tokens accepted.", s.accepted_tokens),
        ("spec_decode_steps_off", "Steps without drafts because drafts had lost time.", s.steps_drafts_off),
        ("spec_decode_drafter_switches", "Changes of a request from one drafter to another.", s.drafter_switches),
        (
            "spec_decode_drafter_switch_seconds",
            "Time spent recomputing drafter KV after such changes, in seconds.",
            s.drafter_switch_seconds,
        ),
        ("engine_restarts", "Restarts of the engine in place, after a failed step.", s.restarts),
        (
            "queue_refused",
            "Requests refused because the queue was full, or the expected wait too long.",
            s.queue_refused,
        ),
        ("slo_refused", "Requests refused by strict admission because an SLO could not be met.", s.slo_refused),
    ]
