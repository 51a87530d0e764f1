"""What AdaServe's systems gain over others: at each load with the same requests, at most over the loads, on average."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from jaxspec.bench.estimates import Estimate, estimate, means, ratio
from jaxspec.bench.papers.adaserve.cases import Case
from jaxspec.bench.papers.runs import Result

#: Loads at which a system's mean time to first token exceeds this do not count for its gains: those that let prompts
#: wait have shorter steps. The paper has no bound, and no numbers; a prompt of 2,600 tokens takes 70b 0.6 s alone.
MAX_TTFT = 2.0
#: The results that are kept of each point.
METRICS = "attainment", "strict", "goodput", "throughput", "ttft", "accepted", "drafted"
GAINS = "attainment", "goodput"

#: Estimates of a system by the varied parameter.
Curves = dict[str, dict[str, dict[str, Estimate | None]]]


def curves(part: Sequence[Case], found: Mapping[Case, Result], by: str) -> Curves:
    """`{system: {x: {metric: estimate over the seeds}}}`; `by`: the case's field x, of `shares` the strict one."""
    values: dict[str, dict[str, list[Result]]] = {}
    for case in part:
        x = case.shares[0] if by == "shares" else getattr(case, by)
        values.setdefault(case.system, {}).setdefault(f"{x:g}", []).append(found[case])
    return {system: {x: means(seeds, METRICS) for x, seeds in points.items()} for system, points in values.items()}


def gains(
    part: Sequence[Case], found: Mapping[Case, Result], bases: Sequence[str], most_ttft: float = MAX_TTFT
) -> dict[str, dict[str, dict[str, Any]]]:
    """`{system: {metric: {best, rate, mean, loads}}}` relative to the best of all `bases` with the same requests.

    best, rate: the largest gain over the loads, and at which one; mean: over those loads. Counted are the loads at
    which the system's mean TTFT is at most `most_ttft` seconds. Raises `ValueError` if one of `bases` was not run.
    """
    by: dict[str, dict[float, dict[int, Result]]] = {}
    for case in part:
        by.setdefault(case.system, {}).setdefault(case.rate, {})[case.seed] = found[case]
    if missing := [base for base in bases if base not in by]:
        raise ValueError(f"no results of {', '.join(missing)}")
    out: dict[str, dict[str, dict[str, Any]]] = {}
    for system in by:
        if system in bases:
            continue
        loads = [rate for rate, of in by[system].items() if np.mean([one["ttft"] for one in of.values()]) <= most_ttft]
        out[system] = {what: _gain(by, system, bases, what, loads) for what in GAINS}
    return out


def _gain(
    by: Mapping[str, Mapping[float, Mapping[int, Result]]], system: str, bases: Sequence[str], what: str,
    loads: Sequence[float],
) -> dict[str, Any]:  # fmt: skip
    own = {rate: [one[what] for one in by[system][rate].values()] for rate in loads}
    best = {rate: [max(by[base][rate][seed][what] for base in bases) for seed in by[system][rate]] for rate in loads}
    at_load = {rate: gain for rate in loads if (gain := ratio(own[rate], best[rate])) is not None}
    if not at_load:
        return {"best": None, "rate": None, "mean": None, "loads": []}
    rate = max(at_load, key=lambda rate: at_load[rate].mean)
    by_seed = np.array([[a / b if b else np.nan for a, b in zip(own[r], best[r], strict=True)] for r in at_load])
    mean = estimate([float(np.nanmean(column)) for column in by_seed.T if not np.isnan(column).all()])
    return {"best": at_load[rate], "rate": rate, "mean": mean, "loads": list(at_load)}
