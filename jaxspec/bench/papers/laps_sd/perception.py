"""Accuracy of LAPS-SD's execution time estimates (the paper's Fig. 7)."""

from __future__ import annotations

import numpy as np

from jaxspec.sched.order.laps_sd import LapsSd, LapsSdSettings
from jaxspec.sched.plan import RequestResult
from jaxspec.sched.request import Request
from jaxspec.sched.sim.acceptance import Process, Sampled
from jaxspec.sched.sim.cost import Linear, StepLoad
from jaxspec.sched.sim.workload import Lengths


def estimation_error(
    table: Lengths, process: Process, cost: Linear, settings: LapsSdSettings, count: int, seed: int
) -> dict[str, float | None]:
    """Serves `count` requests alone, with known lengths.

    Returns `mean`: mean absolute error of the first estimate in per cent, None without estimates; `perceived`: share of
    requests that get an estimate; `stable_after`: mean share of their rounds after which they get it.
    """
    rng, drafts = np.random.default_rng(seed), round(settings.draft_tokens or 0)
    outputs, sampled = rng.choice(table.output, count).tolist(), Sampled(process, count, rng)
    errors, shares = [], []
    for i, output in enumerate(outputs):
        order, request = LapsSd(settings), Request(str(i), 32, [0] * 32, output, 0.0)
        request.predicted_len = output
        estimate: float | None = None
        took, rounds, stable, produced = 0.0, 0, 0, 1  # prefill generates the first token
        while produced < output:
            drafted, accepted = sampled.round(i, produced, drafts)
            load = StepLoad(1 + drafted, context=request.prompt_len + produced, drafting=1, levels=drafted)
            seconds = cost.seconds(load)
            request.proposed += drafted
            request.accepted += accepted
            request.attained += seconds
            order.observe(request, RequestResult((0,) * (accepted + 1), proposed=drafted, accepted=accepted), seconds)
            produced += accepted + 1
            took += seconds
            rounds += 1
            if estimate is None and (estimate := order.perceived(request)) is not None:
                stable = rounds
        sampled.forget(i)
        if estimate is not None:
            errors.append(abs(estimate / took - 1))
            shares.append(stable / rounds)
    if not errors:
        return {"mean": None, "perceived": 0.0, "stable_after": 1.0}
    return {
        "mean": 100 * float(np.mean(errors)), "perceived": len(errors) / count, "stable_after": float(np.mean(shares)),
    }  # fmt: skip
