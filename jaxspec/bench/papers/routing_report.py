"""The page of routing policies: tables and figure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from jaxspec.bench.estimates import interval
from jaxspec.bench.plot import curves
from jaxspec.bench.table import Column, markdown, share, shown

NAME, TITLE = "routing", "Routing policies, simulated"


def _ms(found: Sequence[float]) -> str:
    """Milliseconds of an estimate in seconds."""
    return shown([1000 * value for value in found], interval("{:,.0f}", least=0.0))


_REPLICAS: Column = ("replicas", "{:,}", "replicas")
_ROUTING: Column = ("routing", "`{}`", "routing")
_LATENCY: tuple[Column, ...] = (
    ("TTFT, ms", _ms, "ttft"), ("p99 TTFT, ms", _ms, "p99"), ("JCT, ms", _ms, "jct"),
    ("SLO attainment", interval(share), "met"),
)  # fmt: skip


def sections(kept: Mapping[str, Any]) -> dict[str, str]:
    """The tables of the page, by name."""
    found = kept["simulated"]
    scaling = found["scaling"]
    counts = list(dict.fromkeys(row["replicas"] for row in scaling))
    return {
        "setting": (
            f"Simulated, {found['seeds']} seeds, load {found['load']:g}; all simulations took {found['minutes']:g} "
            "minutes of one core."
        ),
        "throughput": _by_replicas(scaling, counts, "linear throughput", interval("{:.2f}")),
        "goodput": _by_replicas(scaling, counts, "linear goodput", interval("{:.2f}")),
        "p99": _by_replicas(scaling, counts, "p99", _ms),
        "attainment": _by_replicas(scaling, counts, "met", interval(share)),
        "decisions": _by_replicas(scaling, counts, "decisions", lambda e: f"{e[0]:,.0f}"),
        "latency": markdown(
            scaling, _REPLICAS, ("requests", "{:,}", "requests"), _ROUTING, *_LATENCY,
            ("imbalance", interval("{:.2f}"), "imbalance"),
        ),
        "whole": markdown(found["whole"], _ROUTING, *_LATENCY),
        "prefixes": markdown(found["prefixes"], _ROUTING, ("prefix hits", interval(share), "hits"), *_LATENCY),
        "reports": markdown(found["reports"], ("report every, s", "{:g}", "interval"), _ROUTING, *_LATENCY),
        "slow": markdown(
            found["slow"], _ROUTING, ("taken out", lambda yes: "yes" if yes else "no", "health"), *_LATENCY
        ),
    }  # fmt: skip


def _by_replicas(rows: Sequence[Mapping[str, Any]], counts: Sequence[int], key: str, form: Any) -> str:
    """A row per policy, a column per number of replicas."""
    table: dict[str, dict[int, Any]] = {}
    for row in rows:
        table.setdefault(row["routing"], {})[row["replicas"]] = row[key]
    columns: list[Column] = [(f"{count:,}", form, lambda line, n=count: line[1].get(n)) for count in counts]
    return markdown(table.items(), ("routing", "`{}`", lambda line: line[0]), *columns)


def draw(path: Path, rows: Sequence[Mapping[str, Any]]) -> None:
    """p99 TTFT, SLO attainment and goodput by replicas, one line per policy. Raises `BenchError`."""
    panels: dict[str, dict[str, dict[int, Any]]] = {}
    for title, key, factor in (
        ("p99 TTFT, ms", "p99", 1000.0), ("SLO attainment, %", "met", 100.0),
        ("goodput, relative to linear", "linear goodput", 1.0),
    ):  # fmt: skip
        for row in rows:
            value = None if row[key] is None else [factor * x for x in row[key]]
            panels.setdefault(title, {}).setdefault(row["routing"], {})[row["replicas"]] = value
    curves(path, panels, "replicas", "simulated", log_x=True)
