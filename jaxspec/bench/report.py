"""Summarises samples of requests: percentiles, SLO attainment and goodput, as a JSON file and a table."""

from __future__ import annotations

import json
import os
import platform
import re
import time
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console

from jaxspec.bench.table import each, terminal
from jaxspec.version import __version__


@dataclass(slots=True)
class Sample:
    """One request as measured by its client. Times in seconds; None if the request failed, and `error` says why."""

    start: float
    ttft: float | None = None
    tpot: float | None = None
    e2e: float | None = None
    itl: list[float] = field(default_factory=list)
    input_tokens: int = 0
    output_tokens: int = 0
    finish_reason: str | None = None
    error: str | None = None
    #: The answer, with `--json-format vllm`.
    text: str | None = None
    #: Request category, with `--slo-mix`.
    category: str | None = None


@dataclass(frozen=True, slots=True)
class Distribution:
    """Mean and percentiles of a latency, in milliseconds."""

    mean: float
    p50: float
    p95: float
    p99: float

    @classmethod
    def of(cls, seconds: Iterable[float | None]) -> Distribution | None:
        """The distribution of the values that are not None; None if there are none.

        Percentiles are interpolated linearly (numpy's default).
        """
        values = 1e3 * np.array([s for s in seconds if s is not None], dtype=float)
        if values.size == 0:
            return None
        p50, p95, p99 = np.percentile(values, [50, 95, 99])
        return cls(float(values.mean()), float(p50), float(p95), float(p99))


@dataclass(frozen=True, slots=True)
class Slo:
    """Latency targets in milliseconds; None: no target."""

    ttft_ms: float | None = None
    tpot_ms: float | None = None

    def __bool__(self) -> bool:
        return self.ttft_ms is not None or self.tpot_ms is not None

    def met_by(self, sample: Sample) -> bool:
        """Whether TTFT and mean TPOT are within the targets.

        A failed request never meets its SLO; a request with one output token meets any TPOT target.
        """
        if sample.error is not None or sample.ttft is None:
            return False
        if self.ttft_ms is not None and sample.ttft * 1e3 > self.ttft_ms:
            return False
        return self.tpot_ms is None or sample.tpot is None or sample.tpot * 1e3 <= self.tpot_ms


@dataclass(slots=True)
class Report:
    """The result of a benchmark. None: not measurable in this run, such as the padding of another engine's server."""

    kind: str
    options: dict[str, Any]
    duration_s: float
    completed: int
    failed: int
    errors: dict[str, int]
    input_tokens: int
    output_tokens: int
    output_tokens_per_s: float
    requests_per_s: float
    ttft_ms: Distribution | None
    tpot_ms: Distribution | None
    itl_ms: Distribution | None
    e2e_ms: Distribution | None
    #: From arrival to the first step, in the simulator.
    queue_ms: Distribution | None = None
    slo: Slo | None = None
    #: Share of all requests, failed ones included, that met every target of the SLO.
    slo_attainment: float | None = None
    #: Output tokens per second of the requests that met their SLO (AdaServe's definition).
    goodput_tokens_per_s: float | None = None
    acceptance_rate: float | None = None
    mean_accepted_length: float | None = None
    padding_fraction: float | None = None
    token_padding_fraction: float | None = None
    host_overhead_fraction: float | None = None
    compilations_after_warmup: int | None = None
    peak_memory_bytes: int | None = None
    #: Further results of the benchmark, such as the server's metrics and the load generator's lag.
    extra: dict[str, Any] = field(default_factory=dict)
    samples: list[Sample] = field(default_factory=list)

    def to_json(self) -> dict[str, Any]:
        """The report as plain values, with jaxspec's version, the time and the machine."""
        return {
            "jaxspec": __version__,
            "time": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
            "machine": machine(),
            **asdict(self),
        }


def summarise(
    kind: str, samples: Sequence[Sample], duration_s: float, *, options: dict[str, Any], slo: Slo | None = None
) -> Report:
    """The report of a run that took `duration_s` seconds from the start of the first request to the end of the last."""
    done = [s for s in samples if s.error is None]
    output_tokens = sum(s.output_tokens for s in done)
    per_second = 1 / duration_s if duration_s > 0 else 0.0
    report = Report(
        kind=kind,
        options=options,
        duration_s=duration_s,
        completed=len(done),
        failed=len(samples) - len(done),
        errors=dict(Counter(s.error for s in samples if s.error is not None).most_common()),
        input_tokens=sum(s.input_tokens for s in done),
        output_tokens=output_tokens,
        output_tokens_per_s=output_tokens * per_second,
        requests_per_s=len(done) * per_second,
        ttft_ms=Distribution.of(s.ttft for s in done),
        tpot_ms=Distribution.of(s.tpot for s in done),
        itl_ms=Distribution.of(gap for s in done for gap in s.itl),
        e2e_ms=Distribution.of(s.e2e for s in done),
        samples=list(samples),
    )
    if slo:
        met = [s for s in samples if slo.met_by(s)]
        report.slo = slo
        report.slo_attainment = len(met) / len(samples) if samples else None
        report.goodput_tokens_per_s = sum(s.output_tokens for s in met) * per_second
    return report


def machine() -> dict[str, Any]:
    """The machine, for comparing results: system, processor, available cores, Python version."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return {"system": platform.system(), "processor": _processor(), "cores": cores, "python": platform.python_version()}


#: A list of numbers, which is written on one line.
_NUMBERS = re.compile(r"\[[-+\d.eE,\s]+\]")


def write_json(path: str | Path, content: dict[str, Any]) -> None:
    """Write `content` as one indented JSON document; creates the folder. Raises OSError."""
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    text = json.dumps(content, indent=1, allow_nan=False)
    path.write_text(_NUMBERS.sub(lambda found: " ".join(found[0].split()), text) + "\n", encoding="utf-8")


def print_table(report: Report, console: Console | None = None) -> None:
    """Print counts and rates, then the latencies, then the errors."""
    console = console or Console()
    console.print(terminal(_rows(report), "", "", title=f"jaxspec.bench {report.kind}", show_header=False))
    latencies = {
        "queue": report.queue_ms, "TTFT": report.ttft_ms, "TPOT": report.tpot_ms, "ITL": report.itl_ms,
        "E2E (JCT)": report.e2e_ms,
    }  # fmt: skip
    rows = [[name, d.mean, d.p50, d.p95, d.p99] for name, d in latencies.items() if d is not None]
    if rows:
        console.print(terminal(rows, "latency, ms", *each(("mean", "p50", "p95", "p99"), "{:,.1f}")))
    for message, count in report.errors.items():
        console.print(f"failed × {count}: {message}", style="red", markup=False)


def _rows(report: Report) -> Iterable[tuple[str, str]]:
    yield "requests", f"{report.completed} completed, {report.failed} failed"
    yield "duration", f"{report.duration_s:.2f} s"
    yield "tokens in, out", f"{report.input_tokens:,}, {report.output_tokens:,}"
    yield "output tokens/s", f"{report.output_tokens_per_s:.1f}"
    yield "requests/s", f"{report.requests_per_s:.2f}"
    optional = (
        ("SLO attainment", report.slo_attainment, "{:.1%}"),
        ("goodput, tokens/s", report.goodput_tokens_per_s, "{:.1f}"),
        ("acceptance rate", report.acceptance_rate, "{:.1%}"),
        ("mean accepted length", report.mean_accepted_length, "{:.2f}"),
        ("padding, KV positions", report.padding_fraction, "{:.1%}"),
        ("padding, step tokens", report.token_padding_fraction, "{:.1%}"),
        ("host overhead", report.host_overhead_fraction, "{:.1%}"),
        ("preemptions", report.extra.get("preemptions"), "{:,}"),
        ("recomputed tokens", report.extra.get("recomputed_tokens"), "{:,}"),
        ("utilisation", report.extra.get("busy_fraction"), "{:.1%}"),
        ("compilations after warm-up", report.compilations_after_warmup, "{}"),
        ("peak memory, MiB", report.peak_memory_bytes and report.peak_memory_bytes / 2**20, "{:,.0f}"),
    )
    for name, value, form in optional:
        if value is not None:
            yield name, form.format(value)


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), platform.machine())
