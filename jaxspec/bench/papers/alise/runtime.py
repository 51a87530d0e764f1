"""Execution time by prompt length (ALISE, Fig. 5), and how well Eq. 3 to 5 estimate it while requests are served."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from jaxspec.bench.papers.alise.cases import Case, Data, prepare, simulation
from jaxspec.sched.sim.cost import ALISE_MODELS, v100_machine
from jaxspec.sched.sim.workload import Workload

#: Prompt tokens of the requests that are served alone, and their output tokens.
PROMPTS, OUTPUTS = (64, 128, 256, 512, 768, 1024, 1280, 1536, 1792), (16, 64, 256)
#: Seconds between them.
_APART = 1000.0


@dataclass(frozen=True, slots=True)
class Alone:
    """Requests with these output tokens and each of the prompt lengths, one at a time."""

    model: str
    system: str
    outputs: int


def alone(data: Data, task: Alone) -> dict[str, Any]:
    """Seconds of prefill, and of decoding per further token: lists in the order of `PROMPTS`."""
    machine, inputs = v100_machine(*ALISE_MODELS[task.model]), np.array(PROMPTS)
    outputs = np.full(len(inputs), task.outputs)
    work = Workload(_APART * np.arange(len(inputs)), inputs, outputs, outputs.astype(float), max_tokens=outputs)
    served = simulation(data.systems[task.system], machine, work, int((inputs + outputs).max()), 0).run()
    return {"prefill": (served.first_token - work.arrival).tolist(), "decode": served.tpot.tolist()}


def line(seconds: list[float]) -> dict[str, float]:
    """The least squares line over `PROMPTS`: seconds per prompt token, seconds, and its largest error in per cent."""
    slope, offset = (float(x) for x in np.polyfit(PROMPTS, seconds, 1))
    fitted = slope * np.array(PROMPTS) + offset
    return {"slope": slope, "offset": offset, "error": float(100 * np.abs(fitted / np.array(seconds) - 1).max())}


def estimated(data: Data, case: Case) -> dict[str, float]:
    """Eq. 3 with the coefficients that the scheduler has learned by the end of the trace, against the time from first
    service to the end of the requests that were never preempted.

    The output lengths are the true ones. Means over these requests: seconds, and the error in per cent of them; then
    how many per cent of all requests were preempted.
    """
    run = prepare(data, case)
    served, runtime = run.run(), run.scheduler.runtime
    work, whole = served.workload, served.preemptions == 0
    seconds = served.finished - served.first_scheduled
    fitted = runtime.a * work.input + runtime.b + (runtime.c * work.input + runtime.d) * work.output
    errors = (fitted / seconds - 1)[whole]
    return {
        "seconds": float(seconds[whole].mean()), "error": float(100 * np.abs(errors).mean()),
        "preempted": float(100 * (~whole).mean()),
    }  # fmt: skip
