"""Prometheus histograms of finished requests, tokens and steps, named as in vLLM."""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client import CollectorRegistry, Histogram

from jaxspec.outputs import RequestMetrics

# Upper bounds of histogram buckets. Seconds:
_TTFT = (0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80, 160)
_ITL = (0.005, 0.01, 0.015, 0.02, 0.025, 0.03, 0.04, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1, 2.5)
_E2E = (0.1, 0.2, 0.3, 0.5, 0.8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 50, 60, 120, 240, 480, 960)
_QUEUE = (0.001, 0.005, 0.01, 0.05, 0.1, 0.3, 0.5, 0.8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 50, 60, 120, 240)
# Tokens, requests:
_STEP = (1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)
_LENGTH_ERROR = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000)
_RELATIVE = (0.01, 0.02, 0.05, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.8, 1, 1.5, 2, 3, 5, 10)
_OUTPUTS = (1, 2, 5, 10, 20)
_PREEMPTIONS = (0, 1, 2, 3, 4, 5, 10, 20)

#: Name -> (help, buckets); None: 1, 2, 5, 10, … tokens up to the longest request.
_HISTOGRAMS: dict[str, tuple[str, tuple[float, ...] | None]] = {
    "time_to_first_token_seconds": ("Time from arrival to the first token.", _TTFT),
    "inter_token_latency_seconds": ("Time between consecutive tokens of a request.", _ITL),
    "request_time_per_output_token_seconds": ("Mean time per output token of a request after the first.", _ITL),
    "e2e_request_latency_seconds": ("Time from arrival to the last token.", _E2E),
    "request_queue_time_seconds": ("Time from arrival to the request's first step.", _QUEUE),
    "request_prefill_time_seconds": ("Time from the request's first step to its first token.", _QUEUE),
    "request_decode_time_seconds": ("Time from the first token to the last.", _E2E),
    "request_inference_time_seconds": ("Time from the request's first step to its last token.", _E2E),
    "request_prompt_tokens": ("Prompt tokens of a request.", None),
    "request_prefill_kv_computed_tokens": ("Prompt tokens of a request that were not in the prefix cache.", None),
    "request_generation_tokens": ("Output tokens of a request.", None),
    "request_max_num_generation_tokens": ("Output tokens of the longest of a prompt's n outputs.", None),
    "request_params_max_tokens": ("Limit on the output tokens of a request.", None),
    "request_params_n": ("Outputs requested of a prompt: n.", _OUTPUTS),
    "request_num_preemptions": ("Preemptions of a request.", _PREEMPTIONS),
    "iteration_tokens_total": ("Prompt tokens computed and output tokens generated in a step.", _STEP),
    "length_prediction_error_tokens": (
        "Absolute difference between first predicted and actual output tokens of a request.",
        _LENGTH_ERROR,
    ),
    "length_prediction_relative_error": ("Length prediction error divided by the actual output tokens.", _RELATIVE),
}


class Histograms:
    """All of `_HISTOGRAMS`, by name. `longest` is the maximum length of prompt plus output, in tokens."""

    def __init__(self, registry: CollectorRegistry, model_name: str, longest: int) -> None:
        lengths = tuple(_one_two_five(longest))
        self._by_name = {
            name: Histogram(
                f"jaxspec:{name}", help, ["model_name"], buckets=buckets or lengths, registry=registry
            ).labels(model_name)
            for name, (help, buckets) in _HISTOGRAMS.items()
        }

    def observe(self, name: str, value: float | None) -> None:
        """Add a value; None, which was not measured, is left out."""
        if value is not None:
            self._by_name[name].observe(value)

    def observe_finished(self, m: RequestMetrics) -> None:
        """Add an output that ended with `stop` or `length`."""
        self.observe("e2e_request_latency_seconds", m.e2e)
        self.observe("request_time_per_output_token_seconds", m.tpot)
        self.observe("request_prefill_time_seconds", between(m.first_scheduled, m.first_token))
        self.observe("request_decode_time_seconds", between(m.first_token, m.finished))
        self.observe("request_inference_time_seconds", between(m.first_scheduled, m.finished))
        self.observe("request_prompt_tokens", m.prompt_tokens)
        self.observe("request_prefill_kv_computed_tokens", m.prompt_tokens - m.cached_tokens)
        self.observe("request_generation_tokens", m.output_tokens)
        self.observe("request_params_max_tokens", m.max_tokens)
        self.observe("request_num_preemptions", m.preemptions)
        if m.predicted_tokens is not None and m.output_tokens:
            error = abs(m.predicted_tokens - m.output_tokens)
            self.observe("length_prediction_error_tokens", error)
            self.observe("length_prediction_relative_error", error / m.output_tokens)


def between(begin: float | None, end: float | None) -> float | None:
    """Seconds between two times; None unless both are known."""
    return None if begin is None or end is None else end - begin


def _one_two_five(limit: int) -> Iterator[int]:
    """1, 2, 5, 10, … up to `limit`."""
    power = 1
    while power <= limit:
        yield from (power * m for m in (1, 2, 5) if power * m <= limit)
        power *= 10
