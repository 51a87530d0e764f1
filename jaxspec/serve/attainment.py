"""Times and SLO attainment of finished requests: in the response's `metrics`, and as Prometheus metrics."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Histogram

from jaxspec.outputs import RequestMetrics

_LATENCIES = ("tpot", "ttft")
#: Slack / target; negative: missed.
_SLACK_BUCKETS = (-4, -2, -1, -0.5, -0.25, -0.1, -0.05, 0, 0.05, 0.1, 0.25, 0.5, 0.75, 0.9, 1)


def attainment(outputs: Sequence[RequestMetrics]) -> dict[str, Any]:
    """The `slo` object over all outputs of one HTTP request, which have the same targets. Times in milliseconds.

    A target is attained if every output attained it; the slack is the smallest. None without a target or a measurement.
    """
    out: dict[str, Any] = {}
    for name in _LATENCIES:
        target = getattr(outputs[0].slo, name)
        attained = [a for m in outputs if (a := getattr(m, f"{name}_attained")) is not None]
        slacks = [s for m in outputs if (s := getattr(m, f"{name}_slack")) is not None]
        out[f"{name}_ms"] = None if target is None else _milliseconds(target)
        out[f"{name}_attained"] = all(attained) if attained else None
        out[f"{name}_slack_ms"] = _milliseconds(min(slacks)) if slacks else None
    return out


def timings(outputs: Sequence[RequestMetrics]) -> dict[str, Any]:
    """Times of one HTTP request: of its slowest output, the speed of all together. None if it was not measured."""

    def longest(seconds: Iterable[float | None]) -> float | None:
        known = [s for s in seconds if s is not None]
        return _milliseconds(max(known)) if known else None

    ended = max((m.finished for m in outputs if m.finished is not None), default=None)
    took = None if ended is None else ended - min(m.arrival for m in outputs)
    return {
        "queue_ms": longest(None if m.first_scheduled is None else m.first_scheduled - m.arrival for m in outputs),
        "ttft_ms": longest(m.ttft for m in outputs),
        "tpot_ms": longest(m.tpot for m in outputs),
        "tokens_per_second": round(sum(m.output_tokens for m in outputs) / took, 2) if took else None,
        "preemptions": sum(m.preemptions for m in outputs),
    }


def _milliseconds(seconds: float) -> float:
    """Rounded to 0.1 µs, so that 0.04 s is exactly 40 ms despite binary fractions."""
    return round(1000 * seconds, 4)


class AttainmentMetrics:
    """Prometheus metrics over all requests that finished with `stop` or `length`."""

    def __init__(self, registry: CollectorRegistry, model_name: str) -> None:
        self._requests = Counter(
            "jaxspec:slo_requests",
            "Finished requests with a latency target, by target (ttft, tpot) and whether it was met.",
            ["model_name", "target", "attained"],
            registry=registry,
        )
        slack = Histogram(
            "jaxspec:slo_slack_ratio",
            "(target - measured latency) / target of finished requests; negative if the target was missed.",
            ["model_name", "target"],
            buckets=_SLACK_BUCKETS,
            registry=registry,
        )
        goodput = Counter(
            "jaxspec:slo_goodput_tokens",
            "Output tokens of requests that met their target for the time per output token (TPOT).",
            ["model_name"],
            registry=registry,
        )
        #: Requests with any target that met all of theirs, and that missed one.
        self.met = self.missed = 0
        self._model_name = model_name
        self._slack = {name: slack.labels(model_name, name) for name in _LATENCIES}
        self._goodput = goodput.labels(model_name)
        for name in _LATENCIES:
            for attained in ("true", "false"):
                self._requests.labels(model_name, name, attained)

    def observe(self, metrics: RequestMetrics) -> None:
        """Count a finished request."""
        self.met += metrics.slo_attained is True
        self.missed += metrics.slo_attained is False
        for name in _LATENCIES:
            if (attained := getattr(metrics, f"{name}_attained")) is not None:
                self._requests.labels(self._model_name, name, str(attained).lower()).inc()
            if (slack := getattr(metrics, f"{name}_slack")) is not None:
                self._slack[name].observe(slack / getattr(metrics.slo, name))
        if metrics.tpot_attained:
            self._goodput.inc(metrics.output_tokens)
