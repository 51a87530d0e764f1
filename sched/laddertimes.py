"""Step times from a cost model: what an engine would have measured before it serves."""

from __future__ import annotations

from jaxspec.sched.cost import Cost, StepLoad
from jaxspec.sched.steptimes import StepTimes


def step_times(cost: Cost, largest: int) -> StepTimes:
    """Seconds of steps of up to `largest` tokens by a ladder of sizes: no context, no drafting."""
    sizes = {1, *range(8, 256, 8), *range(256, largest, 64), largest}
    return StepTimes({n: cost.seconds(StepLoad(n)) for n in sizes if n <= largest})
