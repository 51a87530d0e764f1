"""LBSS, learning-based selection of drafters: SPIN's bandit (§IV-B), for requests that arrive and finish."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Self

import numpy as np
import numpy.typing as npt
from pydantic import Field, NonNegativeFloat, PositiveInt, model_validator

from jaxspec.sched.request import Request
from jaxspec.sched.slots import DRAFT_CHOICES, Section, SlotContext
from jaxspec.sched.spec.draft_choice.choice import Clock, DraftChoice, SwitchCost, batch_limits, generator
from jaxspec.sched.spec.draft_choice.matching import match, match_shared
from jaxspec.sched.spec.draft_choice.prior import Prior


class LbssSettings(Section):
    """`draft_choice: lbss`: bandit that learns each request's drafter (SPIN §IV-B). Brackets: the paper's symbols.

    The paper gives neither α nor λ, and β = 2 only as the example of its Fig. 8. With α = β a request tries one drafter
    per epoch, as in Algorithm 2 to the letter, which draws before its loop over the chunks; estimates of the others
    come from earlier epochs and from the `prior`. Longer explorations hardly change the result: in the simulator,
    requests of 50 to 500 tokens get 0.92 to 0.97 of an oracle's tokens per second with α = 2, 0.90 to 0.96 with α = 6.
    """

    #: Steps of each epoch in which random drafters are tried (α).
    exploration: PositiveInt = 2
    #: Consecutive exploration steps with the same drafter (β), at most `exploration`.
    chunk: PositiveInt = 2
    #: Weight of the time lost by switching drafters, relative to drafting time (λ). 0: switching is free.
    switch_weight: NonNegativeFloat = 1.0
    #: Whether new requests start from the results of requests with prompts of similar length.
    prior: bool = True
    #: Weight of these results, in steps of the request's own.
    prior_slots: NonNegativeFloat = 16.0
    #: Once these results cover every drafter, a new request skips exploration and starts with the exploitation phase of
    #: this epoch k, which has 2^k steps.
    prior_epoch: int = Field(default=4, ge=1, le=32)

    @model_validator(mode="after")
    def _check_chunk(self) -> Self:
        if self.chunk > self.exploration:
            raise ValueError(f"chunk ({self.chunk}) is longer than exploration ({self.exploration})")
        return self


@dataclass(slots=True)
class _Learner:
    """The bandit's state of one request."""

    clock: Clock
    #: Which requests are similar (`Prior.kind`).
    kind: int
    #: Tokens, seconds and slots with each drafter `[drafters, 3]`.
    seen: npt.NDArray[np.float64] = field(repr=False)
    #: Drafter drawn for the next chunk of exploration.
    drawn: int
    #: Assigned until the chunk ends or the matching is solved again; None: not yet, or every drafter is full.
    drafter: int | None = None
    #: Drafter of the last slot that had one.
    present: int | None = None


@DRAFT_CHOICES.register("lbss", LbssSettings)
class Lbss(DraftChoice):
    """Epochs of random exploration, in chunks, then of exploitation, twice as long each time (Algorithms 1 and 2).

    The paper's N requests share their epochs; here each has its own, counted in its own slots, because a server's
    requests arrive and finish. Exploring requests go first, in random order: each takes the drafter it drew, or if that
    one is full, a random one that is not (the paper drops it for the chunk). The remaining capacity is matched to
    the exploiting requests. The matching is solved again when one of them arrives or leaves, when a request finishes,
    when exploring requests need the capacity, and when capacity becomes free for one without a drafter.

    Goodput is estimated as tokens / seconds summed over all epochs, which is what time spent this way yields; a mean
    of per-slot rates would weigh short slots as much as long ones. In the matching a switch costs its share of the
    stage: `switch_weight` (λ) · goodput · seconds to switch / seconds left in the stage, also in tokens per second. It
    exceeds the goodput where the stage is too short to pay for it.

    The paper's drafters have their own devices. Where they share the target's (`share`), the round of each drafter in
    use delays all requests, and so does verifying more drafts. Exploiting requests are then matched to the set of
    drafters, maybe none, with most tokens per second for all exploiting ones together (`match_shared`).

    With a `prior`, the means of similar requests' exploration slots count as `prior_slots` slots of each request's own.
    Once the prior knows every drafter, new requests start in the exploitation of epoch `prior_epoch`, so that short
    outputs are not spent on exploring.
    """

    def __init__(self, limits: Sequence[int], rng: np.random.Generator, settings: LbssSettings) -> None:
        self._limits, self._rng, self._settings = list(limits), rng, settings
        self._prior = Prior(len(limits), settings.prior_slots) if settings.prior else None
        self._learners: dict[str, _Learner] = {}
        #: The requests that the matching was solved for; None: it must be solved again.
        self._matched: set[str] | None = None
        #: Capacity that the matching left.
        self._left = list(limits)
        #: Seconds of a step, of each drafter's round and of verifying its drafts, if they share one device.
        self._shared: tuple[float, Sequence[float], Sequence[float]] | None = None

    @classmethod
    def build(cls, settings: LbssSettings, context: SlotContext) -> Lbss:
        return cls(batch_limits(context), generator(context), settings)

    def share(self, step: float, rounds: Sequence[float], verify: Sequence[float]) -> None:
        self._shared = step, rounds, verify

    def assign(self, requests: Sequence[Request], cost: SwitchCost) -> list[int | None]:
        learners = [self._learner(r) for r in requests]
        capacity = list(self._limits)
        self._explore([x for x in learners if x.clock.exploring], capacity)
        exploiting = [(r, x) for r, x in zip(requests, learners, strict=True) if not x.clock.exploring]
        if not self._still_matched(exploiting, capacity):
            self._match(exploiting, capacity, cost)
        return [x.drafter for x in learners]

    def observe(self, request: Request, drafter: int | None, tokens: int, seconds: float) -> None:
        learner = self._learner(request)
        if drafter is not None:
            slot = tokens, seconds, 1
            learner.seen[drafter] += slot
            learner.present = drafter
            if self._prior is not None and learner.clock.exploring:
                self._prior.observe(learner.kind, drafter, slot)
        if learner.clock.tick():
            learner.drafter = None

    def ahead(self, request: Request) -> int | None:
        """While exploring: the drafter drawn for the next chunk, and in the last chunk the best by estimate (§IV-C).

        While exploiting: the best by estimate, and in the last β slots the one drawn for the next exploration.
        """
        learner = self._learners.get(request.id)
        if learner is None:
            return None
        clock, assigned = learner.clock, learner.drafter is not None
        if clock.exploring != (assigned and clock.left <= clock.chunk):
            likely = learner.drawn
        else:
            likely = int(_goodput(self._estimates([learner]))[0].argmax())
        return None if likely == (learner.drafter if assigned else learner.present) else likely

    def ended(self, request: Request) -> None:
        self._learners.pop(request.id, None)
        self._matched = None

    def _learner(self, request: Request) -> _Learner:
        learner = self._learners.get(request.id)
        if learner is None:
            clock = Clock(self._settings.exploration, self._settings.chunk)
            if self._prior is not None and self._prior.informed:
                clock.exploring, clock.epoch = False, self._settings.prior_epoch
            seen = np.zeros((len(self._limits), 3))
            learner = _Learner(clock, Prior.kind(request.prompt_len), seen, self._draw())
            self._learners[request.id] = learner
        return learner

    def _draw(self) -> int:
        return int(self._rng.integers(len(self._limits)))

    def _explore(self, learners: Sequence[_Learner], capacity: list[int]) -> None:
        """Assign a drafter to each exploring request while there is `capacity`, and reduce it."""
        beginning: list[_Learner] = []
        for x in learners:
            if x.drafter is not None and capacity[x.drafter]:
                capacity[x.drafter] -= 1
            else:  # a new chunk, or the request skipped a step and others filled its drafter
                x.drafter = None
                beginning.append(x)
        self._rng.shuffle(beginning)
        without = [x for x in beginning if not self._take(x, x.drawn, capacity)]
        for x in without:
            if free := [j for j, n in enumerate(capacity) if n]:
                self._take(x, free[int(self._rng.integers(len(free)))], capacity)

    def _take(self, learner: _Learner, drafter: int, capacity: list[int]) -> bool:
        if not capacity[drafter]:
            return False
        capacity[drafter] -= 1
        learner.drafter, learner.drawn = drafter, self._draw()
        return True

    def _still_matched(self, exploiting: Sequence[tuple[Request, _Learner]], capacity: Sequence[int]) -> bool:
        """Whether the last matching holds: same requests, within the capacity, and no more of it for one without."""
        if self._matched != {r.id for r, _ in exploiting}:
            return False
        left = _remaining(capacity, [x for _, x in exploiting])
        more = any(now > then for now, then in zip(left, self._left, strict=True))
        return min(left) >= 0 and not (more and any(x.drafter is None for _, x in exploiting))

    def _match(self, exploiting: Sequence[tuple[Request, _Learner]], capacity: Sequence[int], cost: SwitchCost) -> None:
        self._matched = {r.id for r, _ in exploiting}
        if not exploiting:
            return
        learners = [x for _, x in exploiting]
        costs = np.array([[0.0 if j == x.present else cost(r, j) for j in range(len(capacity))] for r, x in exploiting])
        known = self._estimates(learners)
        slots_left = np.array([x.clock.left for x in learners])[:, None]
        seconds_left = slots_left * _ratio(known[..., 1], known[..., 2])
        after_switch = 1 - self._settings.switch_weight * _ratio(costs, seconds_left)
        if self._shared:
            busy = {x.drafter for x in self._learners.values() if x.clock.exploring and x.drafter is not None}
            tokens = _ratio(known[..., 0], known[..., 2])
            matched = match_shared(tokens * after_switch, capacity, *self._shared, busy)
        else:
            matched = match(_goodput(known) * after_switch, capacity)
        for x, drafter in zip(learners, matched, strict=True):
            x.drafter = drafter
        self._left = _remaining(capacity, learners)

    def _estimates(self, learners: Sequence[_Learner]) -> npt.NDArray[np.float64]:
        """Tokens, seconds and slots, the prior's included, `[learners, drafters, 3]`."""
        seen = np.array([x.seen for x in learners])
        if (prior := self._prior) is None:
            return seen
        means = {kind: prior.mean(kind) for kind in {x.kind for x in learners}}
        return seen + self._settings.prior_slots * np.array([means[x.kind] for x in learners])


def _remaining(capacity: Sequence[int], learners: Sequence[_Learner]) -> list[int]:
    """Requests that each drafter could take besides these."""
    left = list(capacity)
    for x in learners:
        if x.drafter is not None:
            left[x.drafter] -= 1
    return left


def _goodput(known: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    """Tokens per second `[…, drafters]`; 0 where nothing is known."""
    return _ratio(known[..., 0], known[..., 1])


def _ratio(a: npt.NDArray[np.float64], b: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    """a / b, 0 where b is 0."""
    return np.divide(a, b, out=np.zeros(a.shape), where=b > 0)
