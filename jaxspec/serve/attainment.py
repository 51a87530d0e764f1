"""How requests stood against their latency targets: for their clients, and counted for Prometheus."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Histogram

from jaxspec.outputs import RequestMetrics

_TARGETS = ("tpot", "ttft")
#: Shares of the target; negative ones were missed.
_SLACKS = (-4, -2, -1, -0.5, -0.25, -0.1, -0.05, 0, 0.05, 0.1, 0.25, 0.5, 0.75, 0.9, 1)


def attainment(answers: Sequence[RequestMetrics]) -> dict[str, Any]:
    """What the answers to one request, of the same targets, came to: attained if all are, the slack of the worst.

    None where there is no target, or nothing to measure. Times in milliseconds.
    """
    out: dict[str, Any] = {}
    for name in _TARGETS:
        target = getattr(answers[0].slo, name)
        attained = [a for m in answers if (a := getattr(m, f"{name}_attained")) is not None]
        slacks = [s for m in answers if (s := getattr(m, f"{name}_slack")) is not None]
        out[f"{name}_ms"] = None if target is None else _milliseconds(target)
        out[f"{name}_attained"] = all(attained) if attained else None
        out[f"{name}_slack_ms"] = _milliseconds(min(slacks)) if slacks else None
    return out


def _milliseconds(seconds: float) -> float:
    """To a tenth of a microsecond: 0.04 s are 40 ms, without the error of a binary fraction."""
    return round(1000 * seconds, 4)


class AttainmentMetrics:
    """Counts over all requests that ended by themselves."""

    def __init__(self, registry: CollectorRegistry, model_name: str) -> None:
        self._requests = Counter(
            "jaxspec:slo_requests",
            "Requests that had a latency target, by whether they were at it.",
            ["model_name", "target", "attained"],
            registry=registry,
        )
        slack = Histogram(
            "jaxspec:slo_slack_ratio",
            "What was left of a target as a share of it; negative where it was missed.",
            ["model_name", "target"],
            buckets=_SLACKS,
            registry=registry,
        )
        goodput = Counter(
            "jaxspec:slo_goodput_tokens",
            "Output tokens of requests that were at their target for the time per output token.",
            ["model_name"],
            registry=registry,
        )
        self._model_name = model_name
        self._slack = {name: slack.labels(model_name, name) for name in _TARGETS}
        self._goodput = goodput.labels(model_name)
        for name in _TARGETS:
            for attained in ("true", "false"):
                self._requests.labels(model_name, name, attained)

    def observe(self, metrics: RequestMetrics) -> None:
        """A request has ended."""
        for name in _TARGETS:
            if (attained := getattr(metrics, f"{name}_attained")) is not None:
                self._requests.labels(self._model_name, name, str(attained).lower()).inc()
            if (slack := getattr(metrics, f"{name}_slack")) is not None:
                self._slack[name].observe(slack / getattr(metrics.slo, name))
        if metrics.tpot_attained:
            self._goodput.inc(metrics.output_tokens)
