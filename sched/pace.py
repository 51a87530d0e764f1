"""Who decodes in a step, where all at once would make it too slow for the most urgent."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import inf
from typing import Protocol

from jaxspec.sched.plan import Outcome, Plan
from jaxspec.sched.policy import PolicyConfig
from jaxspec.sched.request import Request
from jaxspec.sched.slo import allowance, slack
from jaxspec.sched.steptimes import StepTimes

#: Steps after which a request that was left out takes part again, whatever its target.
_PATIENCE = 16
#: A step that takes so much longer than the shortest is as short as that: where even the shortest is too long, to rest
#: shortens nothing as long as steps are no shorter for it.
_SAME = 1.05
#: Draft nodes for which prompts leave room in a step, for each request that needs drafts.
_ROOM = 4
#: How much longer than its target allows a step may be before a request is given up: times are estimates.
_HOPE = 1.1
#: Weight of a step among those that said what drafts gain.
_WEIGHT = 0.02


@dataclass(frozen=True, slots=True)
class Pacing:
    """Requests that decode and have to rest in this step, and the most prompt tokens it may compute (None: any)."""

    resting: frozenset[str] = frozenset()
    prompt_tokens: int | None = None


class Pace(Protocol):
    def choose(self, running: Sequence[Request], waiting: Request | None, now: float) -> Pacing:
        """For a step that begins now; `waiting` is the next to be let in."""
        ...

    def observe(self, plan: Plan, outcomes: Sequence[Outcome], seconds: float) -> None:
        """What came of a step that took so long, drafting included."""
        ...


class _Turns:
    """Who rested in the last steps: nobody does for long. And when prompts may not wait any more."""

    def __init__(self, times: StepTimes, patience: float) -> None:
        self._times, self._patience = times, patience
        self._rested: dict[str, int] = {}

    def pacing(
        self, order: Sequence[Request], seats: int, fill: int, running: Sequence[Request], waiting: Request | None,
        now: float,
    ) -> Pacing:  # fmt: skip
        """The first `seats` of `order` decode, those before them that have rested for too long; a step holds `fill`."""
        order = sorted(order, key=lambda r: self._rested.get(r.id, 0) < _PATIENCE)
        resting = frozenset(r.id for r in order[max(1, seats) :])
        self._rested = {id: self._rested.get(id, 0) + 1 for id in resting}
        prompts = [r for r in running if not r.decoding] + ([waiting] if waiting else [])
        if any(self._due(r, now) for r in prompts):
            return Pacing(resting)
        return Pacing(resting, max(0, fill - (len(order) - len(resting))))

    def _due(self, request: Request, now: float) -> bool:
        """Whether its prompt may not wait any more."""
        if request.slo.ttft is None:
            return now - request.arrival >= self._patience
        # The step before may be as long: one of others' prompts.
        return now + 2 * self._times.of(request.remaining_known) >= request.arrival + request.slo.ttft


class SmallBatches:
    """While somebody has a target for the time per output token, as many decode as keep a step within the tightest one
    (AdaServe §6.3, its baselines). `first` says who comes first; requests without a target come last.

    Prompts are computed in what the step then has left, but wait no longer than `patience` seconds, or than their
    target for the first token allows.
    """

    def __init__(self, times: StepTimes, patience: float, first: Callable[[Request, float], float]) -> None:
        self._times, self._first, self._turns = times, first, _Turns(times, patience)

    def choose(self, running: Sequence[Request], waiting: Request | None, now: float) -> Pacing:
        decoding = [r for r in running if r.decoding]
        tightest = min((r.slo.tpot or inf for r in decoding), default=inf)
        if tightest == inf:
            return Pacing()
        fill = self._times.within(max(tightest, _SAME * self._times.of(1)))
        order = sorted(decoding, key=lambda r: (r.slo.tpot is None, self._first(r, now), r.number))
        return self._turns.pacing(order, fill, fill, running, waiting, now)

    def observe(self, plan: Plan, outcomes: Sequence[Outcome], seconds: float) -> None:
        pass


class Deadlines:
    """Requests that are ahead of their target rest where that keeps others at theirs.

    Whoever would fall behind by resting decodes. The step may then be as slow as the one of them bears that can bear
    least (`slo.allowance`); within that the others decode too, and prompts are computed. Where the former alone are too
    many for that, those who can bear least are given up: they will miss their target whatever is done, or they would
    make others miss theirs. They go on with what is left over, as requests without a target do. Drafts give more than
    one token in a longer step: by how much that is faster is learned, and may bring somebody back.

    Prompts wait as in `SmallBatches`.
    """

    def __init__(self, times: StepTimes, patience: float) -> None:
        self._times, self._turns = times, _Turns(times, patience)
        self._gain = 1.0

    def choose(self, running: Sequence[Request], waiting: Request | None, now: float) -> Pacing:
        decoding = [r for r in running if r.decoding]
        bears = sorted((allowance(r, now), r.number, r) for r in decoding if r.slo.tpot is not None)
        hope = max(_HOPE, self._gain)
        while bears and self._times.of(self._bound(bears, len(decoding), now)) > hope * bears[0][0]:
            bears.pop(0)
        if not bears:
            return Pacing()
        bearable = max(bears[0][0], _SAME * self._times.of(1))
        fill = max(self._bound(bears, len(decoding), now), self._times.within(bearable))
        kept = {r.id for _, _, r in bears}
        order = sorted(decoding, key=lambda r: (r.id not in kept, slack(r, now), r.number))
        plain = self._times.of(min(fill, len(decoding)))
        needy = sum(seconds < plain for seconds, _, _ in bears) if self._gain > 1 else 0
        return self._turns.pacing(order, fill, fill - _ROOM * needy, running, waiting, now)

    def _bound(self, bears: Sequence[tuple[float, int, Request]], decoding: int, now: float) -> int:
        """How many of them would be late if they rested for a step of all that decode."""
        rest = 2 * self._times.of(decoding)
        return max(1, sum(slack(r, now) < rest for _, _, r in bears))

    def observe(self, plan: Plan, outcomes: Sequence[Outcome], seconds: float) -> None:
        drafted = [len(outcome.tokens) for outcome in outcomes if outcome.proposed]
        if drafted and seconds > 0:
            gain = sum(drafted) / len(drafted) * self._times.of(plan.num_tokens) / seconds
            self._gain += _WEIGHT * (gain - self._gain)


def build(policy: PolicyConfig, times: StepTimes | None) -> Pace | None:
    """The pace that the configuration names; None where all decode in every step."""
    if policy.pace == "none":
        return None
    if times is None:
        raise ValueError(f"pace: {policy.pace} needs to know what steps take")
    patience = policy.prompt_patience_ms / 1000
    match policy.pace:
        case "fcfs":
            return SmallBatches(times, patience, lambda request, now: request.number)
        case "stta":
            return SmallBatches(times, patience, slack)
        case "deadline":
            return Deadlines(times, patience)
