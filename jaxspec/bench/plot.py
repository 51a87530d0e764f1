"""Latency distributions as a picture."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from jaxspec.bench.errors import BenchError
from jaxspec.bench.report import Report, Slo


def draw(report: Report, path: str | Path) -> None:
    """Cumulative distributions of TTFT and TPOT over the requests, the targets as dashed lines. Raises `BenchError`."""
    from matplotlib.figure import Figure  # the optional extra `bench`

    slo = report.slo or Slo()
    panels = (
        ("time to first token, ms", [s.ttft for s in report.samples], slo.ttft_ms),
        ("time per output token after the first, ms", [s.tpot for s in report.samples], slo.tpot_ms),
    )
    figure = Figure(figsize=(10, 4), layout="constrained")
    for axes, (label, seconds, target) in zip(figure.subplots(1, 2), panels, strict=True):
        values = np.sort([1e3 * s for s in seconds if s is not None])
        if values.size:
            axes.step(np.append(values[0], values), np.arange(values.size + 1) / values.size, where="post")
        if target is not None:
            axes.axvline(target, color="tab:red", linestyle="--", label=f"target {target:g} ms")
            axes.legend(loc="lower right")
        axes.set(xlabel=label, ylabel="share of requests", xlim=(0, None), ylim=(0, 1.02))
        axes.grid(alpha=0.3)
    figure.suptitle(f"{report.kind}: {report.completed} requests, {report.output_tokens_per_s:.0f} output tokens/s")
    try:
        figure.savefig(path, dpi=120)
    except (OSError, ValueError) as error:
        raise BenchError(f"cannot write the plot: {error}") from None
