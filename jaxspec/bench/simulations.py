"""`bench simulate` with several presets, rates or seeds: the same requests for each preset, compared."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import floor, isfinite, log10
from typing import Any

import numpy as np
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.measure import Measurement
from rich.table import Table

from jaxspec.bench import options
from jaxspec.bench.estimates import Estimate, differs, estimate
from jaxspec.bench.report import Report, machine, write_json
from jaxspec.bench.scenario import Scenario, settings
from jaxspec.bench.table import UNKNOWN, Column, terminal
from jaxspec.progress import progress
from jaxspec.sched.sim.simulator import Served
from jaxspec.sched.sim.timeline import Span
from jaxspec.sched.slots import ORDERS
from jaxspec.version import __version__

#: Most requests of a timeline; of several presets together, but each has at least the second number.
LANES, LEAST_LANES = 60, 24

Form = Callable[[float], str]
COUNT, PERCENT = "{:,.0f}".format, "{:.0%}".format


def digits(count: int) -> Form:
    """A form: `count` significant digits, at most three decimals."""

    def form(value: float) -> str:
        decimals = count - 1 - floor(log10(abs(value))) if value and isfinite(value) else 0
        return f"{value:,.{min(3, max(0, decimals))}f}"

    return form


TWO, THREE = digits(2), digits(3)


@dataclass(frozen=True, slots=True)
class Metric:
    """A column of the table, and a value of each run; None: not known. `half`: the form of half an interval."""

    label: str
    of: Callable[[Report], float | None]
    form: Form = THREE
    half: Form = TWO


METRICS: Mapping[str, Metric] = {
    "mean_jct_s": Metric("JCT\nmean", lambda r: r.e2e_ms and r.e2e_ms.mean / 1e3),
    "p99_jct_s": Metric("JCT\np99", lambda r: r.e2e_ms and r.e2e_ms.p99 / 1e3),
    "mean_queue_s": Metric("queue\nmean", lambda r: r.queue_ms and r.queue_ms.mean / 1e3),
    "p99_ttft_s": Metric("TTFT\np99", lambda r: r.ttft_ms and r.ttft_ms.p99 / 1e3),
    "p99_tpot_ms": Metric("TPOT\np99", lambda r: r.tpot_ms and r.tpot_ms.p99),
    "slo_attainment": Metric("SLOs\nmet", lambda r: r.slo_attainment, "{:.1%}".format, "{:.2%}".format),
    "preemptions": Metric("pre-\nempted", lambda r: r.extra["preemptions"], COUNT),
    "recomputed_tokens": Metric("recom-\nputed", lambda r: r.extra["recomputed_tokens"], COUNT),
    "utilisation": Metric("busy", lambda r: r.extra["busy_fraction"], PERCENT, "{:.1%}".format),
}


@dataclass(slots=True)
class Row:
    """A preset at a rate; None: the arrivals have no rate. `values`: of each metric, by seed."""

    preset: str
    rate: float | None
    values: dict[str, list[float | None]]
    #: Of the first seed.
    report: Report
    #: Metrics that differ by more than noise from those of the first preset at the same rate and seeds.
    differing: frozenset[str] = frozenset()

    def estimate(self, metric: str) -> Estimate | None:
        return estimate(self.values[metric], digits=12)  # else the interval of large counts would be rounded away


def several(args: argparse.Namespace) -> bool:
    """Whether the options ask for more than one simulation. Raises ValueError for options that exclude each other."""
    many = {
        "--config": len(args.config or ()) > 1, "--request-rate": len(args.request_rate or ()) > 1,
        "--seeds": args.seeds > 1,
    }  # fmt: skip
    found = [option for option, more in many.items() if more]
    if found and args.replicas is not None:
        raise ValueError(f"--replicas compares routing policies: give {found[0]} one value")
    if found and args.routing:
        raise ValueError("--routing needs --replicas")
    return bool(found)


def single(
    args: argparse.Namespace, preset: str | None = None, rate: float | None = None, seed: int | None = None
) -> argparse.Namespace:
    """The options with one preset, one rate and one seed; by default the first of each."""
    one = {
        "config": preset or (args.config or [None])[0], "request_rate": rate or (args.request_rate or [None])[0],
        "seed": args.seed if seed is None else seed,
    }  # fmt: skip
    return argparse.Namespace(**vars(args) | one)


def run(args: argparse.Namespace) -> int:
    """Simulate, print one table, and write the files. Returns the exit code.

    Raises OSError, or ValueError for bad input.
    """
    presets = args.config or [None]
    names = options.preset_names([preset or "no preset" for preset in presets])
    rates = list(dict.fromkeys(args.request_rate or [None]))
    seeds = range(args.seed, args.seed + args.seeds)
    for preset in presets:  # before the first simulation, which may take long
        settings(single(args, preset))
    said: dict[str, list[str]] = {}
    if args.seeds > 1:
        _note_seeds(args, dict(zip(names, presets, strict=True)), said)
    rows: list[Row] = []
    first: Served | None = None  # the first preset at the last rate
    with progress("percent of simulations", 100 * len(rates) * len(presets) * len(seeds)) as advance:
        for rate in rates:
            for preset, name in zip(presets, names, strict=True):
                reports: list[Report] = []
                for seed in seeds:
                    scenario = Scenario(single(args, preset, rate, seed))
                    simulation, notes = scenario.simulation()
                    for note in [*scenario.notes, *notes]:
                        said.setdefault(note, [])
                        if name not in said[note]:
                            said[note].append(name)
                    served = simulation.run(advance)
                    if seed == args.seed and preset == presets[0]:
                        first = served
                    reports.append(scenario.report(served))
                    if len(rates) > 1 or seed != args.seed:
                        reports[-1].samples = []  # only a single rate's are drawn
                values = {key: [metric.of(report) for report in reports] for key, metric in METRICS.items()}
                rows.append(Row(name, rate, values, reports[0]))
    _compare(rows)
    notes = [note if len(by) == len(names) else f"{', '.join(by)}: {note}" for note, by in said.items()]
    notes += [f"first seed: {note}" if args.seeds > 1 else note for note in _remarks(rows)]
    for note in notes:
        print(note)
    console = Console()
    for part in tables(rows, args.seeds, console):
        console.print(part)
    if args.json:
        write_json(args.json, _content(args, rows, notes))
    if args.plot:
        _plot(args, rows)
    if args.timeline:
        assert first is not None
        scenarios = {n: Scenario(single(args, p, rates[-1])) for n, p in zip(names, presets, strict=True)}
        draw_timeline(args.timeline, scenarios, first)
    return 0


def _note_seeds(args: argparse.Namespace, presets: Mapping[str, str | None], said: dict[str, list[str]]) -> None:
    """If other seeds give the same arrivals and lengths, add notes to `said` on what they change, by preset. Raises
    ValueError if it is nothing."""
    by_preset = {name: Scenario(single(args, preset)) for name, preset in presets.items()}
    one, other = next(iter(by_preset.values())).workload, Scenario(single(args, seed=args.seed + 1)).workload
    if any(not np.array_equal(getattr(one, name), getattr(other, name)) for name in ("arrival", "input", "output")):
        return
    for name, scenario in by_preset.items():
        for part in scenario.drawn:
            said.setdefault(
                f"seeds: arrivals and lengths are the same with every seed; what varies: {part}", []
            ).append(name)
    if not said:
        raise ValueError(
            "--seeds: every seed gives the same results here; draw --lengths or arrivals, draft, or use one seed"
        )


def _compare(rows: Sequence[Row]) -> None:
    """Set what differs from the first preset. Values are paired by seed: requests of a seed are the same."""
    base: dict[float | None, Row] = {}
    for row in rows:
        first = base.setdefault(row.rate, row)
        row.differing = frozenset(key for key in METRICS if differs(row.values[key], first.values[key]))


def remarks(report: Report) -> list[str]:
    """What the results of a run depend on."""
    extra, found = report.extra, []
    if not extra["queued_steps"]:
        found.append(
            "queue: no request waited longer than for the end of the step in which it came, so orders cannot differ: "
            "raise --request-rate, or lower --set max_num_seqs=N"
        )
    lost = extra["preemptions"] - extra["swaps"]
    if lost and (tokens := extra["recomputed_tokens"]):
        all_tokens = tokens + report.input_tokens + report.output_tokens
        found.append(
            f"memory: requests that had begun lost their KV {lost:,} times, because the pool was full: {tokens:,} "
            f"tokens were computed again, {tokens / all_tokens:.0%} of all (a larger pool: --set kv_cache_tokens=N; "
            "host memory to swap to: --host-pages N)"
        )
    return found


def _remarks(rows: Sequence[Row]) -> Iterator[str]:
    """What the results of all runs depend on, by rate and preset. Of the first seed."""
    for rate in dict.fromkeys(row.rate for row in rows):
        at = [row for row in rows if row.rate == rate]
        found = {row.preset: remarks(row.report) for row in at}
        where = f"{rate:g} requests/s: " if len(rows) > len(at) else ""
        for note in dict.fromkeys(note for notes in found.values() for note in notes):
            by = [preset for preset, notes in found.items() if note in notes]
            yield where + (note if len(by) == len(at) else f"{', '.join(by)}: {note}")


def tables(rows: Sequence[Row], seeds: int, console: Console) -> list[Table]:
    """One row per rate and preset. Where not all columns fit the console, they are in several tables."""
    known = [key for key in METRICS if any(v is not None for row in rows for v in row.values[key])]
    unlimited = console.options.update(width=10_000)
    parts: list[Table] = []
    for count in range(1, len(known) + 1):
        parts = [_table(rows, seeds, part.tolist(), console.width) for part in np.array_split(known, count)]
        if all(Measurement.get(console, unlimited, part).maximum <= console.width for part in parts):
            break
    parts[0].title = "presets, simulated"
    caption = "rate: requests/s; " if _sweep(rows) else ""
    caption += "times in s, TPOT in ms; recomputed: tokens; busy: share of the time in which a step runs"
    if seeds > 1:
        caption += (
            f"; ±: half the 95 % interval of the mean over {seeds} seeds; ≈: no more than noise apart from "
            f"{rows[0].preset}, seed by seed"
        )
    parts[-1].caption = caption
    return parts


def _sweep(rows: Sequence[Row]) -> bool:
    return len({row.rate for row in rows}) > 1


def _table(rows: Sequence[Row], seeds: int, metrics: Sequence[str], width: int) -> Table:
    """A table of these metrics. Names of presets that take more than a third of the `width` are folded."""

    def cell(key: str) -> Callable[[Row], str]:
        metric = METRICS[key]

        def text(row: Row) -> str:
            found = row.estimate(key)
            if found is None:
                return UNKNOWN
            if seeds == 1:
                return metric.form(row.values[key][0] or 0.0)
            mark = "" if row.preset == rows[0].preset or key in row.differing else "≈"
            half = found.high - found.mean
            return f"{mark}{metric.form(found.mean)}" + (f"\n±{metric.half(half)}" if half else "")

        return text

    columns: list[Column] = [("preset", "{}", lambda row: row.preset)]
    if sweep := _sweep(rows):
        columns.insert(0, ("rate", "{:g}", lambda row: row.rate))
    columns += [(METRICS[key].label, "{}", cell(key)) for key in metrics]
    # Without column separators most tables fit into 80 characters.
    style = {"box": SIMPLE_HEAD, "padding": (0, 1, 0, 0), "pad_edge": False, "caption_justify": "left"}
    made = terminal(rows, *columns, left=1 + sweep, **style)
    for i, column in enumerate(made.columns):
        column.no_wrap = i != sweep
    names = made.columns[sweep]
    names.overflow, names.width = "fold", min(max(len(row.preset) for row in rows), width // 3)
    names.width = max(names.width, len("preset"))
    return made


def _content(args: argparse.Namespace, rows: Sequence[Row], notes: Sequence[str]) -> dict[str, Any]:
    """The JSON file."""
    results = [
        {
            "preset": row.preset, "request_rate": row.rate, "by_seed": row.values,
            "estimates": {key: row.estimate(key) for key in METRICS}, "differing": sorted(row.differing),
            "report": row.report.to_json(),
        }
        for row in rows
    ]  # fmt: skip
    about = {"jaxspec": __version__, "kind": "simulate", "machine": machine(), "options": options.plain(args)}
    return {**about, "notes": [*notes], "results": results}


def _plot(args: argparse.Namespace, rows: Sequence[Row]) -> None:
    """Distributions of JCT and TTFT; with several rates means by rate."""
    from jaxspec.bench import plot

    presets = list(dict.fromkeys(row.preset for row in rows))
    title = f"{', '.join(presets)}; cost {args.cost}, {rows[0].report.completed:,} requests"
    if len({row.rate for row in rows}) == 1:
        target = None if (slo := rows[0].report.slo) is None else slo.ttft_ms
        panels = [
            plot.Panel("JCT", {row.preset: [s.e2e for s in row.report.samples] for row in rows}),
            plot.Panel("TTFT", {row.preset: [s.ttft for s in row.report.samples] for row in rows}, target),
        ]
        plot.distributions(args.plot, panels, title)
        return
    drawn = {"mean JCT, s": "mean_jct_s", "p99 TTFT, s": "p99_ttft_s"}
    curves = {
        label: {preset: {row.rate: row.estimate(key) for row in rows if row.preset == preset} for preset in presets}
        for label, key in drawn.items()
    }
    if args.seeds > 1:
        title += f", 95 % intervals over {args.seeds} seeds"
    plot.curves(args.plot, curves, "requests per second", "", bars=True, title=title)


def name_of(scenario: Scenario) -> str:
    """The short name of its preset."""
    return options.preset_names([scenario.args.config or "no preset"])[0]


def draw_timeline(path: str, scenarios: Mapping[str, Scenario], served: Served) -> None:
    """Draw what each of the same requests does with each preset. Those are shown that lose most time with the first
    one, whose results are `served`. Raises `BenchError`."""
    from jaxspec.bench import timeline_plot

    work, total = served.workload, len(served.workload)
    count = min(total, LANES, max(LEAST_LANES, 90 // len(scenarios)))
    lost = served.jct - work.output * (served.jct / work.output).min()
    begin = int(np.argmax(np.convolve(lost, np.ones(count), "valid")))
    names = {str(i): f"{i}: {work.input[i]}+{work.output[i]}" for i in range(begin, begin + count)}
    preset, scenario = next(iter(scenarios.items()))
    title = f"requests {begin} to {begin + count - 1} of {total:,}"
    title += ", which lose most time" + (f" with {preset}" if len(scenarios) > 1 else "") if count < total else ""
    title += f"; cost model {scenario.args.cost}"
    if rate := scenario.args.request_rate:
        title += f"; {rate:g} requests/s"
    panels: dict[str, dict[str, list[Span]]] = {}
    with progress("timelines", len(scenarios)) as advance:
        for preset, scenario in scenarios.items():
            about = f"{preset}: {scenario.config.max_num_seqs} slots; {ORDERS[scenario.config.order].rule}"
            panels[about] = {names[i]: spans for i, spans in scenario.timeline(names).items()}
            advance()
    timeline_plot.draw(path, panels, title)
