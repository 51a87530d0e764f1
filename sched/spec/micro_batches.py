"""Micro-batches: drafters on their own devices draft one while the target verifies another (SPIN §V-B)."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from typing import TYPE_CHECKING

from jaxspec.sched.plan import ScheduledRequest

if TYPE_CHECKING:
    from jaxspec.sched.spec.speculator import Speculator

#: Most micro-batches of a step.
MAX_MICRO_BATCHES = 8
#: A step that takes this many times as long as the shortest found is significantly slower. SPIN gives no number.
_SIGNIFICANT = 1.1


@dataclass(frozen=True, slots=True)
class DrafterLoad:
    """One drafter's share of a step."""

    #: Requests it drafts for.
    requests: int
    #: Number of requests -> seconds of a draft round.
    round: Callable[[int], float]
    #: Draft tokens per request.
    drafts: float
    #: Whether it drafts on its own device, while the target verifies.
    own_device: bool
    #: Committed positions per request that the target's step reads.
    context: float = 0.0


@dataclass(slots=True)
class Timeline:
    """When the micro-batches added so far are drafted and verified, in seconds from the start of the step.

    Drafting a micro-batch starts when the previous one is drafted; drafters on their own devices work in parallel.
    Verifying starts when the micro-batch is drafted and the previous one verified. Drafters on the target's device
    also wait for the previous verification.
    """

    drafted: float = 0.0
    verified: float = 0.0

    def add(self, own_device: Iterable[float], target_device: Iterable[float], verifying: float) -> None:
        """Add a micro-batch.

        `own_device`, `target_device`: seconds of each round on a drafter's own device and on the target's; `verifying`:
        seconds of the target's step, 0 if there is nothing to verify.
        """
        self.drafted += max(own_device, default=0.0)
        if on_target := sum(target_device):
            self.drafted = max(self.drafted, self.verified) + on_target
        if verifying:
            self.verified = max(self.drafted, self.verified) + verifying


def seconds(
    count: int, loads: Sequence[DrafterLoad], others: int, step: Callable[[int, float], float], context: float = 0.0
) -> float:
    """Seconds of a step in `count` micro-batches.

    The requests of drafters on their own devices are spread evenly (`shares`). All others are in the first micro-batch:
    those of drafters on the target's device, and `others` tokens of requests without drafts, which read `context`
    committed positions. `step`: (tokens, committed positions) -> seconds of a step.
    """
    timeline = Timeline()
    for batch, sizes in enumerate(shares([(load.requests, load.own_device) for load in loads], count)):
        present = [(load, n) for load, n in zip(loads, sizes, strict=True) if n]
        tokens = round(sum(n * (1 + load.drafts) for load, n in present)) + (others if batch == 0 else 0)
        read = sum(n * load.context for load, n in present) + (context if batch == 0 else 0.0)
        timeline.add(
            [load.round(n) for load, n in present if load.own_device],
            [load.round(n) for load, n in present if not load.own_device],
            step(tokens, read) if tokens else 0.0,
        )
    return timeline.verified


def shares(groups: Iterable[tuple[int, bool]], count: int) -> list[list[int]]:
    """The requests of each drafter in each of `count` micro-batches, from its (requests, whether on its own device).

    Those on the target's device are all in the first. Of the others each drafter's requests are spread evenly, and so
    are all together: requests left over go to the micro-batches in turn.
    """
    sizes: list[list[int]] = [[] for _ in range(count)]
    turn = 0
    for requests, own_device in groups:
        even, left = divmod(requests, count) if own_device else (0, 0)
        for batch in range(count):
            sizes[batch].append(even + ((batch - turn) % count < left) if own_device else requests * (batch == 0))
        turn += left
    return sizes


def best(loads: Sequence[DrafterLoad], others: int, step: Callable[[int, float], float], context: float = 0.0) -> int:
    """Number of micro-batches by profiled times, with SPIN's heuristic (§V-B).

    Tries 2, 3, … until throughput drops significantly: a step 10 % longer than the shortest so far. Returns the number
    with the shortest step of those tried, fewer at a tie; 1 if splitting does not shorten the step. Arguments: see
    `seconds`.
    """
    found, shortest = 1, seconds(1, loads, others, step, context)
    most = min(MAX_MICRO_BATCHES, max((load.requests for load in loads if load.own_device), default=1))
    for count in range(2, most + 1):
        took = seconds(count, loads, others, step, context)
        if took < shortest:
            found, shortest = count, took
        elif took > _SIGNIFICANT * shortest:
            break
    return found


def split(
    scheduled: Sequence[ScheduledRequest], speculator: Speculator, count: int | None = None
) -> list[list[ScheduledRequest]]:
    """Split a step into at most `count` micro-batches; None: as many as `best` finds.

    The requests of drafters on their own devices are spread evenly (`shares`). There are no more micro-batches than the
    largest of these has requests: one without any, because on one device nothing overlaps. All other requests are in
    the first. No micro-batch is empty, except the only one of an empty step.
    """
    by_drafter, others = _by_drafter(scheduled, speculator)
    spread = {i: group for i, group in by_drafter.items() if speculator.drafters[i].own_device}
    if not spread:
        return [list(scheduled)]
    if count is None:
        loads = [drafter_load(speculator, i, group) for i, group in by_drafter.items()]
        count = best(loads, sum(s.count for s in others), speculator.step_times.of, committed_positions(others))
    count = min(count, max(map(len, spread.values())))
    batches = [others, *([] for _ in range(count - 1))]
    sizes = shares([(len(group), drafter in spread) for drafter, group in by_drafter.items()], count)
    for number, group in enumerate(by_drafter.values()):
        rest = iter(group)
        for batch, own in zip(batches, sizes, strict=True):
            batch += islice(rest, own[number])
    return [batch for batch in batches if batch]


def turns_pay(scheduled: Sequence[ScheduledRequest], speculator: Speculator) -> bool:
    """Whether the requests of these two halves of a step should take turns (SPIN Fig. 6(b)): while one half is
    verified, the other is drafted. By profiled times, against a step with all of them in micro-batches.
    """
    by_drafter, others = _by_drafter(scheduled, speculator)
    loads = [drafter_load(speculator, i, group) for i, group in by_drafter.items()]
    if not any(load.own_device for load in loads) or sum(load.requests for load in loads) < 2:
        return False
    step, known, read = speculator.step_times.of, sum(s.count for s in others), committed_positions(others)
    whole = seconds(best(loads, known, step, read), loads, known, step, read)
    half = [replace(load, requests=-(-load.requests // 2)) for load in loads]
    drafting = max(load.round(load.requests) for load in half if load.own_device)
    tokens = round(sum(load.requests * (1 + load.drafts) for load in half)) + -(-known // 2)
    verifying = step(tokens, sum(load.requests * load.context for load in half) + read / 2)
    verifying += sum(load.round(load.requests) for load in half if not load.own_device)
    return 2 * max(drafting, verifying) < whole


def _by_drafter(
    scheduled: Sequence[ScheduledRequest], speculator: Speculator
) -> tuple[dict[int, list[ScheduledRequest]], list[ScheduledRequest]]:
    """The requests of each drafter, and those without; all are without if no drafter has its own device."""
    groups: dict[int, list[ScheduledRequest]] = {}
    others: list[ScheduledRequest] = []
    if not any(drafter.own_device for drafter in speculator.drafters):
        return groups, list(scheduled)
    for s in scheduled:
        drafter = speculator.proposals.drafter_of(s.request, len(scheduled)) if s.levels else None
        (others if drafter is None else groups.setdefault(drafter, [])).append(s)
    return groups, others


def committed_positions(scheduled: Sequence[ScheduledRequest]) -> int:
    """Committed positions that these requests read."""
    return sum(s.start for s in scheduled)


def drafter_load(speculator: Speculator, drafter: int, group: Sequence[ScheduledRequest]) -> DrafterLoad:
    """The load of these requests, by profiled round times and the recent mean of verified nodes."""
    controller = speculator.controllers[drafter]
    return DrafterLoad(
        len(group), controller.usual_round, controller.usual_nodes, speculator.drafters[drafter].own_device,
        committed_positions(group) / len(group),
    )  # fmt: skip
