"""A report of `bench serve` under the keys of `vllm bench serve --save-result --save-detailed`."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from typing import Any

import numpy as np

from jaxspec.bench.report import Report

_BACKENDS = {"chat": "openai-chat", "completions": "openai"}


def as_vllm(report: Report) -> dict[str, Any]:
    """The results as vLLM writes them: `…_ms` in milliseconds, other times in seconds, lists with one entry a request.
    Failed requests have zeros and their error. Statistics of no values are 0."""
    done = [s for s in report.samples if s.error is None]
    itl = [gap for s in done for gap in s.itl]
    return {
        **_run(report),
        "duration": report.duration_s,
        "completed": report.completed,
        "failed": report.failed,
        "total_input_tokens": report.input_tokens,
        "total_output_tokens": report.output_tokens,
        "request_throughput": report.requests_per_s,
        "request_goodput": None if report.slo_attainment is None else _goodput(report),
        "output_throughput": report.output_tokens_per_s,
        "total_token_throughput": _rate(report.input_tokens + report.output_tokens, report),
        "input_lens": [s.input_tokens for s in report.samples],
        "output_lens": [s.output_tokens for s in report.samples],
        "ttfts": [s.ttft or 0.0 for s in report.samples],
        "itls": [s.itl for s in report.samples],
        "latencies": [s.e2e or 0.0 for s in report.samples],
        "start_times": [s.start for s in report.samples],
        "generated_texts": [s.text or "" for s in report.samples],
        "errors": [s.error or "" for s in report.samples],
        **_speculation(report),
        **_statistics("ttft", [s.ttft for s in done]),
        **_statistics("tpot", [s.tpot for s in done]),
        **_statistics("itl", itl),
        **_statistics("e2el", [s.e2e for s in done]),
    }


def _run(report: Report) -> dict[str, Any]:
    """Options of the run, under the names of vLLM's benchmark."""
    asked, model = report.options, report.extra.get("model")
    # vLLM's burstiness is the shape of the gamma distribution of gaps, ours their coefficient of variation.
    cv = asked.get("burstiness", 1.0)
    backend = _BACKENDS[asked.get("endpoint", "chat")]
    return {
        "date": time.strftime("%Y%m%d-%H%M%S"),
        "endpoint_type": backend,
        "backend": backend,
        "label": None,
        "model_id": model,
        "tokenizer_id": model,
        "num_prompts": len(report.samples),
        "request_rate": _finite(asked.get("request_rate") or math.inf),
        "burstiness": _finite(1 / cv**2 if cv else math.inf),
        "max_concurrency": asked.get("concurrency"),
    }


def _finite(value: float) -> float | str:
    return value if math.isfinite(value) else "inf"


def _rate(count: float, report: Report) -> float:
    return count / report.duration_s if report.duration_s > 0 else 0.0


def _goodput(report: Report) -> float:
    """Requests per second that met every target."""
    return _rate((report.slo_attainment or 0.0) * len(report.samples), report)


def _speculation(report: Report) -> dict[str, Any]:
    """From the server's counters, if it drafted in the run. vLLM's rate is in percent."""
    counters = report.extra.get("server", {}).get("counters", {})
    found = {name.partition(":")[2]: value for name, value in counters.items()}
    drafts = found.get("spec_decode_num_drafts_total")
    if not drafts or report.acceptance_rate is None:
        return {}
    levels = {int(n.split('position="')[1].rstrip('"}')): v for n, v in found.items() if "_tokens_per_pos_total{" in n}
    return {
        "spec_decode_acceptance_rate": 100 * report.acceptance_rate,
        "spec_decode_acceptance_length": report.mean_accepted_length,
        "spec_decode_num_drafts": int(drafts),
        "spec_decode_draft_tokens": int(found["spec_decode_num_draft_tokens_total"]),
        "spec_decode_accepted_tokens": int(found["spec_decode_num_accepted_tokens_total"]),
        "spec_decode_per_position_acceptance_rates": [levels[level] / drafts for level in sorted(levels)],
    }


def _statistics(name: str, seconds: Sequence[float | None]) -> dict[str, float]:
    ms = 1e3 * np.array([s for s in seconds if s is not None] or [0.0])
    return {
        f"mean_{name}_ms": float(ms.mean()),
        f"median_{name}_ms": float(np.median(ms)),
        f"std_{name}_ms": float(ms.std()),
        f"p99_{name}_ms": float(np.percentile(ms, 99)),
    }
