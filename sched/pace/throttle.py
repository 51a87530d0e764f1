"""Decode throttling: some requests skip a step so that it stays short enough for TPOT SLOs."""

from __future__ import annotations

from collections.abc import Sequence
from math import inf
from typing import Self

from jaxspec.sched.pace.pace import FREE, Pace, Throttle
from jaxspec.sched.request import Request
from jaxspec.sched.slo import slack
from jaxspec.sched.slots import PACES, Need, SlotContext
from jaxspec.sched.timing import StepTimes

#: A request is throttled for at most this many steps in a row.
_PATIENCE = 16
#: While drafting, run overdue prompts only every Nth step, so drafts can catch the others up in between.
_PROMPT_STEPS = 4
#: Steps within this factor of the shortest count as equally short.
_EQUAL = 1.05
#: A request that needs tokens faster than this share of the shortest step will miss its TPOT anyway.
_FASTEST = 0.5


class DecodeThrottle(Pace):
    """Keeps steps short while requests with a TPOT SLO decode.

    A step may take as long as the tightest TPOT (AdaServe §6.3, its baselines), or, with `credit`, as long as the slack
    of the most urgent request. As many requests decode as fit; the others keep slots and pages and skip the step.
    `rank` orders them; requests without an SLO come last, and none skips more than 16 steps in a row. Prompts get the
    time that is left. A prompt that would miss its TTFT, or has waited `patience` seconds without one, runs in any
    case. With `credit`, while drafting, prompts only get slack beyond the shortest step.
    """

    needs = frozenset({Need.STEP_TIMES, Need.SLOS})
    credit: bool = False

    def __init__(self, times: StepTimes, patience: float) -> None:
        self._times, self._patience = times, patience
        self._throttled: dict[str, int] = {}
        self._since_prompts = 0  # steps

    @classmethod
    def build(cls, settings: None, context: SlotContext) -> Self:
        assert context.times is not None
        return cls(context.times, context.config.prompt_patience_ms / 1000)

    def rank(self, request: Request, now: float) -> float:
        """Requests with smaller values decode first."""
        raise NotImplementedError

    def choose(
        self, running: Sequence[Request], waiting: Request | None, now: float, drafting: bool = False
    ) -> Throttle:
        decoding = [r for r in running if r.decoding]
        with_slo = [r for r in decoding if r.slo.tpot is not None and not (self.credit and self._misses_anyway(r, now))]
        if not with_slo:
            self._throttled.clear()
            return FREE
        longest = min(r.slo.tpot or inf for r in with_slo)
        if self.credit:
            longest = max(longest, min(slack(r, now) for r in with_slo))
        # Even if the shortest step is too long for the SLO, as many requests decode as fit in a step that short. Both
        # read the positions of all: to rest some for the time of theirs would delay those more than it helps others.
        read = sum(r.computed for r in decoding)
        fill = self._times.within(max(longest, _EQUAL * self._times.of(1, read)), read)
        urgent = {r.id for r in with_slo}
        order = sorted(
            decoding, key=lambda r: (not self._skipped_enough(r), r.id not in urgent, self.rank(r, now), r.number)
        )
        slots = max(1, fill)
        throttled = frozenset(r.id for r in order[slots:])
        self._throttled = {id: self._throttled.get(id, 0) + 1 for id in throttled}
        prompts = [r for r in running if not r.decoding] + ([waiting] if waiting else [])
        drafting = drafting and self.credit
        self._since_prompts += 1
        if any(self._due(r, now, drafting) for r in prompts):
            self._since_prompts = 0
            return Throttle(throttled)
        if drafting:
            # Prompt tokens take the place of drafts, which would give the urgent requests slack.
            spare = min(slack(r, now) for r in with_slo) - self._times.of(1, read)
            fill = self._times.within(spare, read)
        return Throttle(throttled, max(0, fill - min(slots, len(order))))

    def _skipped_enough(self, request: Request) -> bool:
        return self._throttled.get(request.id, 0) >= _PATIENCE

    def _due(self, request: Request, now: float, drafting: bool) -> bool:
        """Whether its prompt must run now."""
        if request.slo.ttft is not None:
            # Factor 2: the step before it may be as long, with prompts of other requests.
            step = self._times.of(request.remaining_known, request.computed)
            return now + 2 * step >= request.arrival + request.slo.ttft
        return now - request.arrival >= self._patience and (not drafting or self._since_prompts >= _PROMPT_STEPS)

    def _misses_anyway(self, request: Request, now: float) -> bool:
        """Whether it will miss its TPOT in any case, by its predicted length."""
        assert request.slo.tpot is not None
        left = max(1.0, request.expected_len - request.output_len)
        allowed = slack(request, now) + request.slo.tpot * (left - 1)
        return allowed / left < _FASTEST * self._times.of(1, request.computed)


@PACES.register("fcfs")
class FirstComeFirst(DecodeThrottle):
    """AdaServe's baseline FCFS (§6.3): by arrival."""

    def rank(self, request: Request, now: float) -> float:
        return request.number


@PACES.register("stta")
class LeastSlack(DecodeThrottle):
    """AdaServe's baseline STTA (§6.3): by least slack."""

    def rank(self, request: Request, now: float) -> float:
        return slack(request, now)


@PACES.register("deadline")
class Deadline(LeastSlack):
    """As `stta`, but a step may take as long as the least slack."""

    credit = True
