"""How acceptance rates settle (LAPS-SD Fig. 3), and how well they predict execution times (Fig. 7)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from jaxspec.bench.papers.laps_sd.cases import DRAFTS, Case, Data, policy
from jaxspec.sched.order.laps_sd import LapsSd
from jaxspec.sched.plan import RequestResult
from jaxspec.sched.request import Request
from jaxspec.sched.sim.acceptance import Process, Sampled
from jaxspec.sched.sim.cost import StepLoad
from jaxspec.sched.sim.workload import noisy
from jaxspec.sched.slots import ORDERS

#: Fig. 3: the acceptance rate of all tokens so far, after every ten newly accepted ones.
EVERY = 10


def rate_curve(sampled: Sampled, request: int, tokens: int, drafts: int = DRAFTS) -> dict[int, float]:
    """The request's acceptance rate so far, by output tokens, up to `tokens`."""
    drafted, accepted, produced, curve = 0, 0, 1, dict[int, float]()
    while produced < tokens:
        new, right = sampled.round(request, produced, drafts)
        if (accepted + right) // EVERY > accepted // EVERY:
            curve[produced + right + 1] = (accepted + right) / (drafted + new)
        drafted, accepted, produced = drafted + new, accepted + right, produced + right + 1
    sampled.forget(request)
    return curve


def settling(process: Process, requests: int, points: Sequence[int], seed: int) -> dict[str, float]:
    """Mean distance, over requests, of the acceptance rate after `points` output tokens from that after twice the last
    of them, `{points: distance}`."""
    sampled = Sampled(process, requests, np.random.default_rng(seed))
    distances: dict[str, list[float]] = {str(point): [] for point in points}
    for i in range(requests):
        curve = rate_curve(sampled, i, 2 * points[-1])
        at, rates = np.array(list(curve)), np.array(list(curve.values()))
        for point in points:
            if (at <= point).any():
                distances[str(point)].append(abs(rates[at <= point][-1] - rates[-1]))
    return {point: float(np.mean(found)) for point, found in distances.items() if found}


@dataclass(frozen=True, slots=True)
class Estimation:
    """Requests served alone; `case` gives their number, lengths, acceptance and the settings of the order."""

    case: Case


#: Fig. 7 shows the error by output length: upper ends of the classes of lengths in tokens.
LENGTHS = (100, 200, 300, 500)


def estimation(data: Data, task: Estimation) -> dict[str, Any]:
    """Errors of the first estimate of each request's execution time, relative to the true one.

    `error`: mean absolute error in per cent, None without estimates; `bias`: mean error; `by_length`: error by class of
    output lengths; `perceived`: share of requests that get an estimate; `stable_after`: mean share of their rounds
    after which they get it.
    """
    case, rng = task.case, np.random.default_rng([task.case.seed, task.case.count])
    settings = ORDERS.section_of(policy(data, case))
    outputs: np.ndarray = rng.choice(data.tables[case.data].output, case.count)
    predicted = noisy(outputs, case.sigma or 0.0, rng)
    sampled, order = Sampled(case.process, case.count, rng), LapsSd(settings)
    errors, shares, lengths = [], [], []
    for i, (output, length) in enumerate(zip(outputs.tolist(), predicted.tolist(), strict=True)):
        request = Request(str(i), 32, [0] * 32, output, 0.0)
        request.predicted_len = length
        estimate: float | None = None
        took, rounds, stable, produced = 0.0, 0, 0, 1  # prefill generates the first token
        while produced < output:
            drafted, accepted = sampled.round(i, produced, case.drafts)
            load = StepLoad(1 + drafted, context=request.prompt_len + produced, drafting=1, levels=drafted)
            seconds = case.cost.seconds(load)
            request.proposed += drafted
            request.accepted += accepted
            request.attained += seconds
            produced += accepted + 1
            end = "stop" if produced >= output else None
            order.observe(request, RequestResult((0,) * (accepted + 1), end, drafted, accepted), seconds)
            took += seconds
            rounds += 1
            if estimate is None and (estimate := order.perceived(request)) is not None:
                stable = rounds
        sampled.forget(i)
        if estimate is not None:
            errors.append(100 * (estimate / took - 1))
            shares.append(stable / rounds)
            lengths.append(output)
    if not errors:
        return {"error": None, "bias": None, "by_length": {}, "perceived": 0.0, "stable_after": None}
    return {
        "error": float(np.mean(np.abs(errors))), "bias": float(np.mean(errors)),
        "by_length": _by_length(np.abs(errors), np.array(lengths)),
        "perceived": len(errors) / case.count, "stable_after": float(np.mean(shares)),
    }  # fmt: skip


def _by_length(errors: np.ndarray, lengths: np.ndarray) -> Mapping[str, float]:
    classes = np.searchsorted(LENGTHS, lengths)
    return {
        f"{low} to {high}": float(errors[classes == k].mean())
        for k, (low, high) in enumerate(zip((1, *LENGTHS[:-1]), LENGTHS, strict=True)) if (classes == k).any()
    }  # fmt: skip
