"""Who decodes in a step, where all at once would make it too slow for the most urgent."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import inf

from jaxspec.sched.config import PolicyConfig
from jaxspec.sched.request import Request
from jaxspec.sched.slo import slack
from jaxspec.sched.timing import StepTimes

#: Steps after which a request that was left out takes part again, whatever its target.
_PATIENCE = 16
#: In every which step prompts that have waited for long go on, where drafts can bring the others back to their targets
#: in between.
_PROMPT_STEPS = 4
#: A step that takes so much longer than the shortest is as short as that.
_EQUAL = 1.05
#: A request whose target asks for less than this share of the shortest step a token cannot be brought back to it.
_FASTEST = 0.5


@dataclass(frozen=True, slots=True)
class Throttle:
    """Requests that decode and have to rest in this step, and the most prompt tokens it may compute (None: any)."""

    throttled: frozenset[str] = frozenset()
    prompt_tokens: int | None = None


class DecodeThrottle:
    """Keeps steps short while there are requests with a target for the time per output token (TPOT).

    A step may take as long as the tightest target (AdaServe §6.3, its baselines), or with `credit` as long as the most
    urgent request has got ahead of its own. As many requests decode as fit; the others keep their seats and pages and
    rest. `first` says who comes first; requests without a target come last, and nobody rests for long. Prompts are
    computed in what time is left, and in any case before they have waited for longer than they may: `patience` seconds
    where no target says how long. With `credit`, in steps that draft, only time is left that the most urgent has got
    ahead by more than a shortest step.
    """

    def __init__(
        self, times: StepTimes, patience: float, first: Callable[[Request, float], float], credit: bool
    ) -> None:
        self._times, self._patience, self._first, self._credit = times, patience, first, credit
        self._throttled: dict[str, int] = {}
        self._since_prompts = 0  # steps

    def choose(
        self, running: Sequence[Request], waiting: Request | None, now: float, drafting: bool = False
    ) -> Throttle:
        """For a step that begins now; `waiting` is the next to be let in, `drafting` whether the step may draft."""
        decoding = [r for r in running if r.decoding]
        promised = [
            r for r in decoding if r.slo.tpot is not None and not (self._credit and self._misses_anyway(r, now))
        ]
        if not promised:
            self._throttled.clear()
            return Throttle()
        longest = min(r.slo.tpot or inf for r in promised)
        if self._credit:
            longest = max(longest, min(slack(r, now) for r in promised))
        # Where even the shortest step is too long, to rest shortens nothing as long as steps are no shorter for it.
        fill = self._times.within(max(longest, _EQUAL * self._times.of(1)))
        kept = {r.id for r in promised}
        order = sorted(decoding, key=lambda r: (not self._tired(r), r.id not in kept, self._first(r, now), r.number))
        slots = max(1, fill)
        throttled = frozenset(r.id for r in order[slots:])
        self._throttled = {id: self._throttled.get(id, 0) + 1 for id in throttled}
        prompts = [r for r in running if not r.decoding] + ([waiting] if waiting else [])
        drafting = drafting and self._credit
        self._since_prompts += 1
        if any(self._due(r, now, drafting) for r in prompts):
            self._since_prompts = 0
            return Throttle(throttled)
        if drafting:
            # What prompts take of a step, drafts do not get, and those would bring the urgent ahead.
            spare = min(slack(r, now) for r in promised) - self._times.of(1)
            fill = self._times.within(spare)
        return Throttle(throttled, max(0, fill - min(slots, len(order))))

    def _tired(self, request: Request) -> bool:
        return self._throttled.get(request.id, 0) >= _PATIENCE

    def _due(self, request: Request, now: float, drafting: bool) -> bool:
        """Whether its prompt may not wait any more."""
        if request.slo.ttft is not None:
            # The step before may be as long: one of others' prompts.
            return now + 2 * self._times.of(request.remaining_known) >= request.arrival + request.slo.ttft
        return now - request.arrival >= self._patience and (not drafting or self._since_prompts >= _PROMPT_STEPS)

    def _misses_anyway(self, request: Request, now: float) -> bool:
        """Whether it will miss its target whatever is done, by its predicted length."""
        assert request.slo.tpot is not None
        left = max(1.0, request.expected_len - request.output_len)
        allowed = slack(request, now) + request.slo.tpot * (left - 1)
        return allowed / left < _FASTEST * self._times.of(1)


def build(policy: PolicyConfig, times: StepTimes | None) -> DecodeThrottle | None:
    """The pace that the configuration names; None where all decode in every step. Raises `ValueError` without times."""
    if policy.pace == "none":
        return None
    if times is None:
        raise ValueError(
            f"pace: {policy.pace} needs to know what steps take: give SchedulerConfig its `times`, or choose pace: none"
        )
    first = slack if policy.pace != "fcfs" else lambda request, now: request.number
    return DecodeThrottle(times, policy.prompt_patience_ms / 1000, first, credit=policy.pace == "deadline")
