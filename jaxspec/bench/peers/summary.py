"""What the turns say: medians, ranges, ratios to the baseline, agreement of greedy answers, and the tables."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from statistics import mean, median
from typing import Any

from rich.console import Console

from jaxspec.bench.disturbance import Disturbance
from jaxspec.bench.peers.scenarios import Scenario, Turn
from jaxspec.bench.peers.turns import DISTURBED, Measured
from jaxspec.bench.table import each, terminal
from jaxspec.models.load.tokenizer import Tokenizer

#: The engine whose greedy answers the others are compared with.
REFERENCE = "jaxspec"


@dataclass(frozen=True, slots=True)
class Range:
    """A value with the lowest and the highest of the turns."""

    value: float
    lowest: float
    highest: float


@dataclass(frozen=True, slots=True)
class Row:
    """One measure of one engine: the median of its turns, and the ratio of medians to the baseline's, with the range of
    the ratios of single rounds; None without a baseline."""

    scenario: str
    measure: str
    engine: str
    median: Range
    ratio: Range | None


def rows(name: str, measures: Sequence[str], measured: Measured, baseline: str) -> list[Row]:
    """The rows of one scenario, by measure and engine."""
    found = []
    for measure in measures:
        values = {engine: [t.measures[measure] for t in turns] for engine, turns in measured.turns.items()}
        base = values.get(baseline)
        for engine, own in values.items():
            ratio = None
            if base:
                pairs = [a / b for a, b in zip(own, base, strict=True)]
                ratio = Range(median(own) / median(base), min(pairs), max(pairs))
            found.append(Row(name, measure, engine, Range(median(own), min(own), max(own)), ratio))
    return found


def agreement(turns: Mapping[str, Sequence[Turn]], tokenizer: Tokenizer) -> dict[str, float]:
    """By engine, the mean number of leading tokens of an answer that are those of the reference; texts are compared as
    tokens of this tokenizer. Empty without a reference or without texts."""
    reference = [text for turn in turns.get(REFERENCE, ()) for text in turn.texts]
    if not reference:
        return {}
    ids = {name: [tokenizer.encode(x, False) for turn in its for x in turn.texts] for name, its in turns.items()}
    return {
        name: mean(leading_agreement(a, b) for a, b in zip(own, ids[REFERENCE], strict=True))
        for name, own in ids.items()
    }


def leading_agreement(a: Sequence[int], b: Sequence[int]) -> int:
    """Number of leading tokens that are the same in both outputs."""
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


def summarise(
    scenarios: Mapping[str, Scenario], measured: Mapping[str, Measured], baseline: str, tokenizer: Tokenizer
) -> dict[str, Any]:
    """Rows and turns of every scenario as plain values, and how many turns were disturbed."""
    results = {}
    for name, found in measured.items():
        greedy = scenarios[name].temperature == 0
        results[name] = {
            "rows": [asdict(row) for row in rows(name, scenarios[name].measures, found, baseline)],
            "agreeing_tokens": agreement(found.turns, tokenizer) if greedy else {},
            **found.to_json(),
        }
    turns = [d for found in measured.values() for its in found.disturbances.values() for d in its]
    return {"scenarios": results, "turns": len(turns), "disturbed": _disturbed(turns)}


def _disturbed(turns: Sequence[Disturbance]) -> dict[str, float]:
    """Number of disturbed turns, and the largest shares."""
    return {
        "turns": sum(turn.worst > DISTURBED for turn in turns),
        "steal": max((turn.steal for turn in turns), default=0.0),
        "foreign": max((turn.foreign for turn in turns), default=0.0),
    }


def show(summary: Mapping[str, Any], servers: Mapping[str, Mapping[str, Any]], left_out: Mapping[str, str]) -> None:
    """Print the tables, what is missing, and whether the machine was disturbed."""
    console = Console()
    memory = [[name, s["version"], s["ready_s"], s["loaded_bytes"], s["final_bytes"]] for name, s in servers.items()]
    size = lambda size: f"{size / 2**20:,.0f}"  # noqa: E731
    console.print(
        terminal(memory, "server", "version", ("ready, s", "{:.1f}"), ("RSS loaded, MiB", size),
                 ("RSS at the end, MiB", size), left=2)
    )  # fmt: skip
    for name, found in summary["scenarios"].items():
        for number, measure in enumerate(dict.fromkeys(row["measure"] for row in found["rows"])):
            agreeing = found["agreeing_tokens"] if number == 0 else {}
            lines = []
            for row in (row for row in found["rows"] if row["measure"] == measure):
                ratio = row["ratio"] or dict.fromkeys(row["median"])
                values = *row["median"].values(), *ratio.values()
                lines.append([row["engine"], *values, *([agreeing.get(row["engine"])] if agreeing else [])])
            speeds = each(("median", "lowest", "highest"), "{:,.1f}")
            ratios = each(("ratio", "lowest", "highest"), "{:.2f}")
            agreed = each(("agreeing tokens",), "{:.1f}") if agreeing else ()
            console.print(terminal(lines, "server", *speeds, *ratios, *agreed, title=f"{name}: {measure}"))
        for engine, reason in found["failed"].items():
            console.print(f"{name}: without {engine}: {reason}", style="yellow", markup=False)
    for name, reason in left_out.items():
        console.print(f"left out: {name}: {reason}", style="yellow", markup=False)
    disturbed = summary["disturbed"]
    console.print(
        f"{disturbed['turns']} of {summary['turns']} turns disturbed; at most {disturbed['steal']:.1%} steal, "
        f"{disturbed['foreign']:.1%} load of other processes",
        style="red" if disturbed["turns"] else None,
    )
