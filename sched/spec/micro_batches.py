"""Micro-batches: drafters with devices of their own draft one while the target verifies another (SPIN §V-B)."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from math import ceil

from jaxspec.sched.plan import ScheduledRequest
from jaxspec.sched.spec.speculator import Speculator

#: Most micro-batches of a step.
MAX_MICRO_BATCHES = 8


@dataclass(frozen=True, slots=True)
class DrafterLoad:
    """The requests of one drafter in a step: how many, seconds of a round for so many of them, draft tokens of each,
    and whether the round runs beside the target's steps or takes turns with them."""

    requests: int
    round: Callable[[int], float]
    drafts: float
    own_device: bool


@dataclass(slots=True)
class Timeline:
    """When a step's micro-batches are drafted and verified, in seconds from its begin.

    One is drafted when the one before has been, by all drafters apart at once, and verified when it is drafted and the
    one before verified. Drafters beside the target wait for that too.
    """

    drafted: float = 0.0
    verified: float = 0.0

    def add(self, own_device: Iterable[float], beside: Iterable[float], verifying: float) -> None:
        """The next micro-batch: seconds of each drafter's round, and of verifying, 0 if there is nothing to verify."""
        self.drafted += max(own_device, default=0.0)
        if alone := sum(beside):
            self.drafted = max(self.drafted, self.verified) + alone
        if verifying:
            self.verified = max(self.drafted, self.verified) + verifying


def seconds(count: int, loads: Sequence[DrafterLoad], others: int, step: Callable[[int], float]) -> float:
    """What a step in so many micro-batches takes, each with its part of every drafter's requests. `others`: tokens that
    need no draft, in the first; `step`: seconds of verifying so many tokens."""
    line = Timeline()
    left = [drafter_load.requests for drafter_load in loads]
    for batch in range(count):
        sizes = [ceil(n / (count - batch)) for n in left]
        left = [n - size for n, size in zip(left, sizes, strict=True)]
        here = [(drafter_load, n) for drafter_load, n in zip(loads, sizes, strict=True) if n]
        tokens = round(sum(n * (1 + drafter_load.drafts) for drafter_load, n in here)) + (others if batch == 0 else 0)
        line.add(
            [drafter_load.round(n) for drafter_load, n in here if drafter_load.own_device],
            [drafter_load.round(n) for drafter_load, n in here if not drafter_load.own_device],
            step(tokens) if tokens else 0.0,
        )
    return line.verified


def best(loads: Sequence[DrafterLoad], others: int, step: Callable[[int], float]) -> int:
    """How many micro-batches: one more as long as that is faster by the profiled times, the paper's heuristic."""
    count, now = 1, seconds(1, loads, others, step)
    most = min(MAX_MICRO_BATCHES, max((drafter_load.requests for drafter_load in loads), default=1))
    while count < most and (more := seconds(count + 1, loads, others, step)) < now:
        count, now = count + 1, more
    return count


def split(
    scheduled: Sequence[ScheduledRequest], speculator: Speculator, count: int | None = None
) -> list[list[ScheduledRequest]]:
    """The step's work in micro-batches: so many (fewer where there is less to draft for), or as many as pay."""
    groups: dict[int, list[ScheduledRequest]] = {}
    out: list[list[ScheduledRequest]] = [[]]
    for w in scheduled:
        drafter = speculator.drafter_of(w.request, len(scheduled)) if w.levels else None
        (out[0] if drafter is None else groups.setdefault(drafter, [])).append(w)
    if not groups:
        return out
    if count is None:
        loads = [drafter_load(speculator, drafter, len(own)) for drafter, own in groups.items()]
        count = best(loads, sum(w.count for w in out[0]), speculator.step.of)
    else:
        count = min(count, max(map(len, groups.values())))
    out += [[] for _ in range(count - 1)]
    for own in groups.values():
        for i, w in enumerate(own):
            out[i * count // len(own)].append(w)
    return [batch for batch in out if batch]


def drafter_load(speculator: Speculator, drafter: int, requests: int) -> DrafterLoad:
    """By what is profiled, and what was worth verifying of late."""
    spec = speculator.controllers[drafter]
    return DrafterLoad(requests, spec.usual_round, spec.usual_nodes, speculator.drafters[drafter].own_device)
