"""The server's Prometheus metrics, with the prefix `jaxspec:`, and under vLLM's names where vLLM has them too."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from prometheus_client import CollectorRegistry, Counter, PlatformCollector, ProcessCollector, generate_latest
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from jaxspec.outputs import RequestMetrics
from jaxspec.serve.attainment import AttainmentMetrics
from jaxspec.serve.engine_metrics import EngineCollector
from jaxspec.serve.histograms import Histograms

if TYPE_CHECKING:
    from jaxspec.engine.engine import Engine

#: Metrics that mean the same in vLLM. Dashboards, autoscalers and load generators made for it read them as `vllm:…`.
IN_VLLM = {
    "num_requests_running", "num_requests_waiting", "kv_cache_usage_perc", "cache_config_info",
    "prefix_cache_queries", "prefix_cache_hits", "num_preemptions", "prompt_tokens", "prompt_tokens_cached",
    "generation_tokens", "request_success", "iteration_tokens_total", "spec_decode_num_drafts",
    "spec_decode_num_draft_tokens", "spec_decode_num_accepted_tokens", "spec_decode_num_accepted_tokens_per_pos",
    "time_to_first_token_seconds", "inter_token_latency_seconds", "e2e_request_latency_seconds",
    "request_queue_time_seconds", "request_prefill_time_seconds", "request_decode_time_seconds",
    "request_inference_time_seconds", "request_time_per_output_token_seconds", "request_prompt_tokens",
    "request_prefill_kv_computed_tokens", "request_generation_tokens", "request_max_num_generation_tokens",
    "request_params_max_tokens", "request_params_n", "request_num_preemptions",
}  # fmt: skip


class ServerMetrics:
    """The server's metrics registry. Engine counters are read on each scrape; latencies are observed as they occur."""

    def __init__(self, engine: Engine, model_name: str, more: Sequence[Collector] = ()) -> None:
        """`more`: collectors besides the engine's."""
        self._registry = CollectorRegistry()
        for collector in more:
            self._registry.register(collector)
        self._registry.register(EngineCollector(engine, model_name))
        self._histograms = Histograms(self._registry, model_name, engine.max_model_len)
        self._finished = Counter(
            "jaxspec:request_success",
            "Finished requests, by finish reason.",
            ["model_name", "finished_reason"],
            registry=self._registry,
        )
        self.attainment = AttainmentMetrics(self._registry, model_name)
        ProcessCollector(registry=self._registry)
        PlatformCollector(registry=self._registry)
        self._model_name = model_name
        for reason in ("stop", "length", "abort", "error"):
            self._finished.labels(model_name, reason)
        engine.observers.append(self._on_finished)
        engine.first_token_observers.append(self._on_first_token)
        engine.token_observers.append(self._on_tokens)
        engine.step_observers.append(self._on_step)

    def render(self) -> bytes:
        """The metrics in Prometheus' text format."""
        return generate_latest(_Exposed(self._registry))

    def observe_prompt(self, n: int, longest: int) -> None:
        """Add a prompt whose `n` outputs have ended; `longest` is the length of the longest, in tokens."""
        self._histograms.observe("request_params_n", n)
        self._histograms.observe("request_max_num_generation_tokens", longest)

    def _on_finished(self, metrics: RequestMetrics, finish_reason: str) -> None:
        """Called in the engine's thread, as are the methods below."""
        self._finished.labels(self._model_name, finish_reason).inc()
        if metrics.first_scheduled is not None:
            self._histograms.observe("request_queue_time_seconds", metrics.first_scheduled - metrics.arrival)
        if metrics.e2e is not None and finish_reason in ("stop", "length"):
            self._histograms.observe_finished(metrics)
            self.attainment.observe(metrics)

    def _on_first_token(self, metrics: RequestMetrics) -> None:
        self._histograms.observe("time_to_first_token_seconds", metrics.ttft)

    def _on_tokens(self, latency: float, count: int) -> None:
        for _ in range(count):
            self._histograms.observe("inter_token_latency_seconds", latency)

    def _on_step(self, tokens: int) -> None:
        self._histograms.observe("iteration_tokens_total", tokens)


class _Exposed(Collector):
    """Exposes a registry's metrics, without creation times. Metrics in `IN_VLLM` have vLLM's name as well."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._registry = registry

    def collect(self) -> Iterator[Metric]:
        for metric in self._registry.collect():
            metric.samples = [s for s in metric.samples if not s.name.endswith("_created")]
            yield metric
            if metric.name.removeprefix("jaxspec:") in IN_VLLM:
                yield _as_in_vllm(metric)


def _as_in_vllm(metric: Metric) -> Metric:
    """A copy under vLLM's name and with its label `engine`."""
    out = Metric("vllm:" + metric.name.removeprefix("jaxspec:"), metric.documentation, metric.type)
    for sample in metric.samples:
        name = "vllm:" + sample.name.removeprefix("jaxspec:")
        out.samples.append(sample._replace(name=name, labels={**sample.labels, "engine": "0"}))
    return out
