"""The results page: runs of the fuzzer and of the fault harness, summed up."""

from __future__ import annotations

import json
import subprocess
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from jaxspec.bench.sections import write

#: The runs, and the page with their sums, in the folder of results.
RUNS, PAGE = "reliability.json", "reliability.md"
_ROOT = Path(__file__).parents[2]
_MEANINGS = {
    "0": "the client left before an answer", "200": "served", "400": "refused: the request is wrong",
    "404": "refused: no such model", "408": "refused: too slow", "413": "refused: too large", "429": "refused: load",
}  # fmt: skip


def commit() -> str:
    """The commit that is checked out, with "+" if files differ from it; empty outside of a checkout."""
    try:
        told = subprocess.run(
            ["git", "describe", "--always", "--dirty=+"], cwd=_ROOT, capture_output=True, text=True, check=True
        )
    except (OSError, subprocess.CalledProcessError):
        return ""
    return told.stdout.strip()


def record(found: Mapping[str, Sequence[Mapping[str, Any]]], folder: Path) -> None:
    """Add runs to the file of runs, and write the page's tables again. Other entries of the file stay. Raises
    OSError."""
    path = folder / RUNS
    known: dict[str, Any] = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    for kind, runs in found.items():
        known[kind] = [*known.get(kind, []), *runs]
    tables = sections(known)
    folder.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(known, indent=1) + "\n", encoding="utf-8")
    write(folder / PAGE, "Reliability", tables)


def sections(runs: Mapping[str, Sequence[Mapping[str, Any]]]) -> dict[str, str]:
    """The tables `bodies`, `files`, `faults`, `live`, `replicas` and `overload`, of those that have runs."""
    made = {
        "bodies": _bodies, "files": _files, "faults": _faults, "live": _live, "replicas": _live, "overload": _overload,
    }  # fmt: skip
    return {kind: table(runs[kind]) for kind, table in made.items() if runs.get(kind)}


def _bodies(runs: Sequence[Mapping[str, Any]]) -> str:
    sums = _sums(runs, "statuses")
    rows = [f"| {status} | {_MEANINGS.get(status, '')} | {sums[status]:,} |" for status in sorted(sums)]
    return "\n".join([
        f"{sum(sums.values()):,} bodies in {len(runs)} runs, {_failed(runs)}. Seeds and numbers: {_seeds(runs)}.", "",
        "| status | meaning | answers |", "|---|---|---:|", *rows,
    ])  # fmt: skip


def _files(runs: Sequence[Mapping[str, Any]]) -> str:
    files = sum(run["count"] for run in runs)
    return "\n".join([
        f"{files:,} files in {len(runs)} runs, {_failed(runs)}. Seeds and numbers: {_seeds(runs)}.", "",
        "| kind of file | loaded or refused |", "|---|---:|", *_counted(runs, "kinds"),
    ])  # fmt: skip


def _faults(runs: Sequence[Mapping[str, Any]]) -> str:
    requests, tokens, restarts = (sum(run[name] for run in runs) for name in ("requests", "tokens", "restarts"))
    seeds = "; ".join(f"{run['seed']}: {run['first']}–{run['first'] + run['scenarios'] - 1}" for run in runs)
    told = f"{requests:,} requests, {tokens:,} tokens and {restarts:,} restarts in {len(runs)} runs, {_failed(runs)}."
    return f"{told} Seeds and scenarios: {seeds}.\n\n{_outcomes(runs)}"


def _live(runs: Sequence[Mapping[str, Any]]) -> str:
    requests, seconds = sum(run["requests"] for run in runs), sum(run["seconds"] for run in runs)
    told = f"{requests:,} requests in {len(runs)} runs of {seconds / 60:.0f} minutes together, {_failed(runs)}."
    if gone := sum(sum(run.get("ended_servers", {}).values()) for run in runs):
        told += f" {gone} servers with little memory ended by themselves."
    if resumed := sum(run.get("resumed", 0) for run in runs):
        told += f" {resumed:,} times a request went on at another replica with the output so far."
    return f"{told}\n\n{_outcomes(runs)}"


def _overload(runs: Sequence[Mapping[str, Any]]) -> str:
    """A row for each measure, a column for each run."""
    other, streams = [run["other_key"] for run in runs], [run["streams"] for run in runs]
    rows: dict[str, list[str]] = {
        "server": [run["server"] for run in runs],
        "load, minutes": [f"{r['options']['factor']:g} × {r['options']['seconds'] / 60:g}" for r in runs],
        "capacity, requests/s": [f"{run['capacity_requests_per_s']:.2f}" for run in runs],
        "sent; served": [f"{run['sent']:,}; {run['served']:,}" for run in runs],
        "peak goodput below capacity, tokens/s": [f"{run['goodput_peak']:.0f}" for run in runs],
        "goodput, tokens/s": [f"{run['goodput']:.0f}" for run in runs],
        "share of the peak": [_number(run["share_of_peak"], "{:.2f}") for run in runs],
        "least and most goodput of a minute": [
            ", ".join(f"{ends(run['minutes'], default=0):.0f}" for ends in (min, max)) for run in runs
        ],
        "TTFT of served: p50, p99, longest, s": [", ".join(f"{t:.1f}" for t in run["ttft_s"]) for run in runs],
        "`Retry-After` of 429, s": ["–".join(dict.fromkeys(f"{t:.0f}" for t in run["retry_after_s"])) for run in runs],
        "second key: sent, served, met the SLO": [f"{o['sent']}, {o['served']}, {o['attainment']:.0%}" for o in other],
        "seconds until requests meet the SLO again": [_number(run["recovery_s"], "{:.1f}") for run in runs],
        "streams at once: opened, served, refused, seconds": [
            f"{s['opened']:,}, {s['served']:,}, {s['refused']:,}, {s['longest_s']:.0f}" for s in streams
        ],
        "other failures": [str(sum(run["failures"].values())) for run in runs],
    }
    head = ["| |" + "".join(f" run {i} |" for i in range(1, len(runs) + 1)), "|---|" + "---:|" * len(runs)]
    return "\n".join([*head, *(f"| {name} | {' | '.join(cells)} |" for name, cells in rows.items())])


def _number(value: float | None, form: str) -> str:
    return "–" if value is None else form.format(value)


def _outcomes(runs: Sequence[Mapping[str, Any]]) -> str:
    """The tables of faults and of how requests ended."""
    return "\n".join([
        "| fault | times |", "|---|---:|", *_counted(runs, "faults"), "",
        "| requests ended with | |", "|---|---:|", *_counted(runs, "ended"),
    ])  # fmt: skip


def _sums(runs: Sequence[Mapping[str, Any]], column: str) -> Counter[str]:
    """A column of counts by name, over all runs."""
    sums: Counter[str] = Counter()
    for run in runs:
        sums.update(run[column])
    return sums


def _counted(runs: Sequence[Mapping[str, Any]], column: str) -> list[str]:
    """The rows of a table of counts."""
    sums = _sums(runs, column)
    return [f"| {name.replace('_', ' ')} | {sums[name]:,} |" for name in sorted(sums)]


def _failed(runs: Sequence[Mapping[str, Any]]) -> str:
    count = sum(len(run["failures"]) for run in runs)
    return "no failure" if not count else "1 failure" if count == 1 else f"{count} failures"


def _seeds(runs: Sequence[Mapping[str, Any]]) -> str:
    """Each seed with its numbers, for `--seed` and `--first`."""
    socket = " over a socket"
    told = [
        f"{run['seed']}: {run['first']:,}–{run['first'] + run['count'] - 1:,}{socket if run.get('socket') else ''}"
        for run in runs
    ]
    return "; ".join(dict.fromkeys(told))
