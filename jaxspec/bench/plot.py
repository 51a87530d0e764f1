"""Plots of benchmark results, with matplotlib (the extra `bench`)."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from jaxspec.bench import BenchError
from jaxspec.bench.report import Report, Slo

if TYPE_CHECKING:
    from matplotlib.figure import Figure

#: Seconds from which times are not in milliseconds, and how far right of the longest time a target is shown.
_LONG, _FAR = 10.0, 1.5
#: Points of a curve, by x. Keys may be text, as in the files of numbers.
Curve = Mapping[Any, Any]


@dataclass(frozen=True, slots=True)
class Panel:
    """Seconds of a latency by preset; None: a request has none. `target` in milliseconds."""

    label: str
    seconds: Mapping[str, Sequence[float | None]]
    target: float | None = None


def draw(report: Report, path: str | Path) -> None:
    """Cumulative distributions of TTFT and TPOT, with SLOs as dashed lines. Raises `BenchError`."""
    slo, given = report.slo or Slo(), report.options
    panels = [
        Panel("time to first token", {"": [s.ttft for s in report.samples]}, slo.ttft_ms),
        Panel("time per output token after the first", {"": [s.tpot for s in report.samples]}, slo.tpot_ms),
    ]
    preset, cost = given.get("config"), given.get("cost")
    model = report.extra.get("model") or given.get("model")
    what = [model, preset and Path(preset).stem, cost and f"cost {cost}"]
    title = ", ".join(filter(None, [f"{report.kind}: {report.completed} requests", *what]))
    distributions(path, panels, f"{title}, {report.output_tokens_per_s:.0f} output tokens/s")


def distributions(path: str | Path, panels: Sequence[Panel], title: str) -> None:
    """One cumulative distribution per preset in each panel, and targets as dashed lines. Long times are in seconds.

    The axes end with the times: a target far above them is only in the legend. Raises `BenchError`.
    """
    from matplotlib.figure import Figure

    figure = Figure(figsize=(5 * len(panels), 4), layout="constrained")
    for axes, panel in zip(figure.subplots(1, len(panels), squeeze=False)[0], panels, strict=True):
        known = {name: np.sort([s for s in of if s is not None]) for name, of in panel.seconds.items()}
        longest = max((values[-1] for values in known.values() if values.size), default=0.0)
        unit, scale = ("s", 1.0) if longest >= _LONG else ("ms", 1e3)
        for name, values in known.items():
            if values.size:
                shares = np.arange(values.size + 1) / values.size
                axes.step(scale * np.append(values[0], values), shares, where="post", label=name)
        right = None
        if panel.target is not None:
            target, label = scale * panel.target / 1e3, f"target {scale * panel.target / 1e3:g} {unit}"
            if longest and target > _FAR * scale * longest:
                right, label = 1.05 * scale * longest, f"{label}, right of the axis"
            axes.axvline(target, color="tab:red", linestyle="--", label=label)
        if panel.target is not None or len(known) > 1:
            axes.legend(loc="lower right", fontsize="small")
        axes.set(xlabel=f"{panel.label}, {unit}", ylabel="share of requests", xlim=(0, right), ylim=(0, 1.02))
        axes.grid(alpha=0.3)
    figure.suptitle(title, fontsize="medium")
    save(figure, path)


def lines(path: str | Path, series: Mapping[str, Curve], x_label: str, y_label: str, title: str) -> None:
    """One line per series of (x, y), on logarithmic axes. Raises `BenchError`."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(6, 4), layout="constrained")
    axes = figure.subplots()
    for name, curve in series.items():
        axes.plot([float(x) for x in curve], list(curve.values()), marker="o", label=name)
    axes.set(xlabel=x_label, ylabel=y_label, title=title, xscale="log", yscale="log")
    axes.grid(alpha=0.3, which="both")
    axes.legend()
    save(figure, path)


def curves(
    path: str | Path, panels: Mapping[str, Mapping[str, Curve]], x_label: str, y_label: str,
    value: Callable[[Any], Any] = lambda y: y, top: float | None = None, log_x: bool = False, bars: bool = False,
    title: str | None = None,
) -> None:  # fmt: skip
    """One panel per title with one line per name; `value` gives the y of a point, and the y axes range from 0 to `top`.
    `log_x`: the x axes are logarithmic.

    A y of three numbers is a mean and the ends of its interval, drawn as a band, or with `bars` as an error bar. A name
    has the same colour in all panels, and one legend is for all. Raises `BenchError`.
    """
    from matplotlib.figure import Figure

    figure = Figure(figsize=(2 + 2.6 * len(panels), 3), layout="constrained")
    names = list(dict.fromkeys(name for series in panels.values() for name in series))
    for axes, (panel, series) in zip(figure.subplots(1, len(panels), squeeze=False)[0], panels.items(), strict=True):
        for name, curve in series.items():
            found = [(float(x), value(y)) for x, y in curve.items()]
            known = [(x, np.atleast_1d(np.asarray(y, float))) for x, y in found if y is not None]
            x, y = [x for x, _ in known], [y[0] for _, y in known]
            colour = f"C{names.index(name) % 10}"
            axes.plot(x, y, marker="o", markersize=3, label=name, color=colour)
            if known and len(known[0][1]) == 3:
                low, high = ([y[i] for _, y in known] for i in (1, 2))
                if bars:
                    axes.vlines(x, low, high, colors=colour)
                else:
                    axes.fill_between(x, low, high, alpha=0.2, color=colour, linewidth=0)
        axes.set(title=panel, xlabel=x_label, ylim=(0, top), xscale="log" if log_x else "linear")
        axes.grid(alpha=0.3)
    _legend(figure)
    figure.supylabel(y_label)
    if title:
        figure.suptitle(title, fontsize="medium")
    save(figure, path, dpi=80)


def turns(path: str | Path, panels: Mapping[str, Mapping[str, Sequence[float]]], y_label: str) -> None:
    """One panel per title with one column per name: a dot per turn and a line at the median. Raises `BenchError`."""
    from matplotlib.figure import Figure

    max_columns = max(map(len, panels.values()))
    figure = Figure(figsize=(1 + max(4, 0.7 * max_columns) * len(panels), 4), layout="constrained")
    for axes, (title, columns) in zip(figure.subplots(1, len(panels), squeeze=False)[0], panels.items(), strict=True):
        for i, values in enumerate(columns.values()):
            # Dots in order of time, to show a drift of the machine's speed.
            axes.plot(i + np.linspace(-0.2, 0.2, len(values)), values, "o", alpha=0.7)
            axes.hlines(float(np.median(values)), i - 0.3, i + 0.3, colors=f"C{i}")
        axes.set(title=title, ylim=(0, None), xlim=(-0.5, len(columns) - 0.5))
        axes.set_xticks(range(len(columns)), list(columns), rotation=15 if max_columns < 6 else 30, ha="right")
        axes.grid(alpha=0.3, axis="y")
    figure.supylabel(y_label)
    save(figure, path)


def bars(path: str | Path, panels: Mapping[str, Mapping[str, float]], y_label: str) -> None:
    """One panel per title with one bar per name; all panels have the same names. Raises `BenchError`."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(2 + 2.2 * len(panels), 3), layout="constrained")
    for axes, (title, heights) in zip(figure.subplots(1, len(panels), squeeze=False)[0], panels.items(), strict=True):
        for i, (name, height) in enumerate(heights.items()):
            axes.bar(i, height, label=name)
        axes.set(title=title, xticks=[])
        axes.grid(alpha=0.3, axis="y")
    _legend(figure)
    figure.supylabel(y_label)
    save(figure, path, dpi=80)


def _legend(figure: Figure) -> None:
    """One legend for all panels, next to them: within a panel it would hide curves."""
    handles = {
        label: handle for axes in figure.axes for handle, label in zip(*axes.get_legend_handles_labels(), strict=True)
    }
    figure.legend(handles.values(), handles.keys(), loc="outside right center", fontsize="small")


def save(figure: Figure, path: str | Path, dpi: int = 120) -> None:
    """Write the file. Raises `BenchError`."""
    try:
        figure.savefig(path, dpi=dpi)
    except (OSError, ValueError) as error:
        raise BenchError(f"cannot write the plot: {error}") from None
