"""Estimates over the seeds of LAPS-SD's simulated cases."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from jaxspec.bench.estimates import estimate, ratio, reduction
from jaxspec.bench.papers.laps_sd.cases import Case
from jaxspec.bench.papers.laps_sd.report import LAS, LP_SJF
from jaxspec.bench.papers.runs import Result


def _by_system(part: Sequence[Case], found: Mapping[Case, Result], metric: str) -> dict[str, list[float]]:
    """Values of each system, by seed."""
    values: dict[str, list[float]] = {}
    for case in part:
        values.setdefault(case.system, []).append(found[case][metric])
    return values


def summary(
    part: Sequence[Case], found: Mapping[Case, Result], brief: bool = False,
    metrics: Sequence[str] = ("jct", "ttft", "throughput"),
) -> dict[str, Any]:  # fmt: skip
    """`{system: {jct, ttft, switching: mean; LP-SJF, LAS: {jct: reduction in per cent, ttft, throughput: ratio}}}`.

    switching: in per cent of the time of all else. brief: only the comparisons with LP-SJF and LAS, in these `metrics`.
    """
    values = {name: _by_system(part, found, name) for name in ("jct", "ttft", "throughput", "switching")}
    out: dict[str, Any] = {}
    for system in values["jct"]:
        out[system] = own = {}
        if not brief:
            own |= {name: estimate(values[name][system]) for name in ("jct", "ttft")}
            own |= {"switching": estimate([100 * share for share in values["switching"][system]])}
        for base in (LP_SJF, LAS):
            if base in values["jct"] and base != system and not (brief and system in (LP_SJF, LAS)):
                own[base] = {
                    name: (reduction if name == "jct" else ratio)(values[name][system], values[name][base])
                    for name in metrics
                }
    return out


def overall(parts: Sequence[Sequence[Case]], found: Mapping[Case, Result]) -> dict[str, dict[str, Any]]:
    """`{system: {LP-SJF, LAS: reduction of the mean latency in per cent, slower: by how many per cent LP-SJF is slower,
    both: mean of slower and the reduction against LAS}}` over all points of Fig. 5."""
    points = [_by_system(part, found, "jct") for part in parts]
    out: dict[str, dict[str, Any]] = {}
    for system in points[0]:
        lp, las = (
            np.mean([1 - np.divide(point[system], point[base]) for point in points], axis=0) for base in (LP_SJF, LAS)
        )
        slower = np.mean([np.divide(point[LP_SJF], point[system]) - 1 for point in points], axis=0)
        values = {LP_SJF: lp, LAS: las, "slower": slower, "both": (slower + las) / 2}
        out[system] = {name: estimate((100 * v).tolist()) for name, v in values.items()}
    return out


def best_queues(parts: Mapping[str, Sequence[Case]], found: Mapping[Case, Result]) -> dict[str, dict[str, Any]]:
    """`{data | requests: {latency: {K: mean}, best: K, fewest, most: the best's reduction in per cent}}`."""
    values: dict[str, dict[str, list[float]]] = {}
    for key, part in parts.items():
        point, _, k = key.rpartition(" | ")
        values.setdefault(point, {})[k] = [found[case]["jct"] for case in part]
    out: dict[str, dict[str, Any]] = {}
    for point, by_k in values.items():
        best, ends = min(by_k, key=lambda k, by_k=by_k: float(np.mean(by_k[k]))), list(by_k)
        out[point] = {
            "latency": {k: estimate(v) for k, v in by_k.items()}, "best": best,
            "fewest": reduction(by_k[best], by_k[ends[0]]), "most": reduction(by_k[best], by_k[ends[-1]]),
        }  # fmt: skip
    return out
