"""The plot of `bench simulate --timeline`: a lane for each request, coloured by what it does or waits for."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from jaxspec.bench.plot import save
from jaxspec.sched.sim.timeline import Phase, Span
from jaxspec.sched.waiting_reason import Obstacle

#: What computes is blue and green, what waits is yellow to red, what was interrupted is violet to black.
PHASE_COLOURS: Mapping[Phase, str] = {
    Phase.ARRIVED: "#b0b0b0", Phase.WAITING: "#fdbe6f", Phase.PREFILL: "#1f78b4", Phase.DECODE: "#7fc97f",
    Phase.THROTTLED: "#d9f0d3", Phase.PAUSED: "#9a7fc7", Phase.PREEMPTED: "#6a3d9a", Phase.RECOMPUTE: "#17becf",
    Phase.SWAPPED: "#404040",
}  # fmt: skip
WAITING_COLOURS: Mapping[Obstacle, str] = {
    Obstacle.SLOT: "#fdbe6f", Obstacle.PAGES: "#e31a1c", Obstacle.KEPT: "#fb9a99", Obstacle.STEP: "#ffff99",
    Obstacle.PACE: "#b15928", Obstacle.BATCH: "#ff7f00", Obstacle.MORE: "#d9a441",
}  # fmt: skip


def draw(path: str | Path, panels: Mapping[str, Mapping[str, Sequence[Span]]], title: str) -> None:
    """One panel per entry, with its title, below each other on one time axis; in each, the lanes of the same requests
    by their names, the first one at the top. Raises `BenchError`."""
    from matplotlib.figure import Figure
    from matplotlib.patches import Patch

    lanes = max(map(len, panels.values()))
    figure = Figure(figsize=(13, 1.2 + len(panels) * (0.6 + 0.13 * lanes)), layout="constrained")
    shown: dict[str, str] = {}
    plots = figure.subplots(len(panels), 1, sharex=True, squeeze=False)[:, 0]
    for axes, (preset, requests) in zip(plots, panels.items(), strict=True):
        for lane, spans in enumerate(requests.values()):
            for colour in dict.fromkeys(map(_colour, spans)):
                own = [span for span in spans if _colour(span) == colour]
                shown.update((span.label, colour) for span in own)
                axes.broken_barh([(s.begin, s.end - s.begin) for s in own], (lane - 0.4, 0.8), facecolors=colour)
        axes.set_yticks(range(len(requests)), list(requests), fontsize=6)
        axes.set_ylim(len(requests) - 0.4, -0.6)
        axes.set_ylabel("request: prompt + output tokens", fontsize=7)
        axes.set_title(preset, loc="left", fontsize=10)
        axes.grid(axis="x", alpha=0.3)
        axes.set_axisbelow(True)
    plots[-1].set_xlabel("seconds")
    figure.suptitle(title, fontsize=10)
    order = [*PHASE_COLOURS.values(), *WAITING_COLOURS.values()]
    legend = sorted(shown.items(), key=lambda item: order.index(item[1]))
    handles = [Patch(color=colour, label=label) for label, colour in legend]
    figure.legend(handles=handles, loc="outside lower center", ncols=3, fontsize=8)
    save(figure, path, dpi=110)


def _colour(span: Span) -> str:
    return WAITING_COLOURS[span.obstacle] if span.obstacle else PHASE_COLOURS[span.phase]
