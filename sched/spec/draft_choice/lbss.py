"""Learning-based selection of drafters: SPIN's bandit (§IV-B), for requests that come and go."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from jaxspec.sched.config import LbssSettings
from jaxspec.sched.request import Request
from jaxspec.sched.spec.draft_choice.choice import Clock, SwitchCost, Unlearned
from jaxspec.sched.spec.draft_choice.matching import match, match_shared
from jaxspec.sched.spec.draft_choice.prior import Prior


@dataclass(slots=True)
class _Learner:
    """One request: its clock, what it has seen, and its drafters."""

    clock: Clock
    kind: int
    #: Tokens, seconds and slots on each drafter `[drafters, 3]`.
    seen: np.ndarray = field(repr=False)
    #: Drawn for the next chunk of exploration that begins.
    drawn: int
    #: Assigned until the chunk ends or the matching is solved again; None: nothing yet, or no room.
    drafter: int | None = None
    #: That of the last slot that it had one in.
    present: int | None = None


class Lbss(Unlearned):
    """Epochs of random exploration, in chunks, and of exploitation twice as long each time (Algorithms 1 and 2).

    The paper's N requests share their epochs; here each has its own, counted in its own slots, since a server's come
    and go. Those who explore go first: in random order they take what they drew, those for whom it has no room then
    any that has (the paper drops them for the chunk). What they leave of the limits is matched to those who exploit:
    anew when one of them comes or goes, when a request ends, when explorers need the room, and when room comes free
    for one without.

    A goodput is estimated as tokens over seconds, in sum over all epochs: that is what time spent so brings, whereas a
    mean of the slots' rates would count short slots as much as long ones. In the matching, switching costs the share
    of the stage that it takes: `switch_weight` (λ) · goodput · seconds to switch / seconds the stage still lasts, in
    tokens per second too. It is more than the whole goodput where the stage is too short to pay for it.

    The paper's drafters have devices of their own. Where they take turns with the target on one (`share`), each that
    is used at all takes its round from everybody, and those who exploit are matched to the set of drafters with which
    all together get most (`match_shared`).

    With a `prior`, `prior_slots` mean slots of similar requests, from their explorations, count as if they were each
    request's own. Once they say something about every drafter, newcomers begin in the exploitation of epoch
    `prior_epoch`: short answers are not spent on exploring.
    """

    def __init__(self, limits: Sequence[int], rng: np.random.Generator, settings: LbssSettings) -> None:
        self._limits, self._rng, self._settings = list(limits), rng, settings
        self._prior = Prior(len(limits), settings.prior_slots) if settings.prior else None
        self._learners: dict[str, _Learner] = {}
        #: Whom the matching was solved for; None: it is to be solved.
        self._matched: set[str] | None = None
        #: Seconds of verifying, and of each drafter's round, where they take turns on one device.
        self._shared: tuple[float, Sequence[float]] | None = None

    def share(self, step: float, rounds: Sequence[float]) -> None:
        self._shared = step, rounds

    def assign(self, requests: Sequence[Request], cost: SwitchCost) -> list[int | None]:
        learners = [self._learner(r) for r in requests]
        room = list(self._limits)
        self._explore([x for x in learners if x.clock.exploring], room)
        exploiting = [(r, x) for r, x in zip(requests, learners, strict=True) if not x.clock.exploring]
        if not self._settled(exploiting, room):
            self._match(exploiting, room, cost)
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
        """While exploring the next chunk's drafter, and then the best by estimate, as in §IV-C; while exploiting the
        best, but in the last β slots what was drawn for the exploration that follows."""
        learner = self._learners.get(request.id)
        if learner is None:
            return None
        clock, begun = learner.clock, learner.drafter is not None
        if clock.exploring != (begun and clock.left <= clock.chunk):
            likely = learner.drawn
        else:
            likely = int(_goodput(self._known([learner]))[0].argmax())
        return None if likely == (learner.drafter if begun else learner.present) else likely

    def forget(self, request: Request) -> None:
        self._learners.pop(request.id, None)
        self._matched = None

    def _learner(self, request: Request) -> _Learner:
        learner = self._learners.get(request.id)
        if learner is None:
            skips = self._prior is not None and self._prior.informed
            clock = Clock(self._settings.exploration, self._settings.chunk)
            if skips:
                clock.exploring, clock.epoch = False, self._settings.prior_epoch
            seen = np.zeros((len(self._limits), 3))
            learner = _Learner(clock, Prior.kind(request.prompt_len), seen, self._draw())
            self._learners[request.id] = learner
        return learner

    def _draw(self) -> int:
        return int(self._rng.integers(len(self._limits)))

    def _explore(self, learners: Sequence[_Learner], room: list[int]) -> None:
        """Gives every one a drafter while `room` lasts, and takes that from it."""
        beginning: list[_Learner] = []
        for x in learners:
            if x.drafter is not None and room[x.drafter]:
                room[x.drafter] -= 1
            else:  # those that sat out a step may have lost their place
                x.drafter = None
                beginning.append(x)
        self._rng.shuffle(beginning)
        without = [x for x in beginning if not self._take(x, x.drawn, room)]
        for x in without:
            if free := [j for j, n in enumerate(room) if n]:
                self._take(x, free[int(self._rng.integers(len(free)))], room)

    def _take(self, learner: _Learner, drafter: int, room: list[int]) -> bool:
        if not room[drafter]:
            return False
        room[drafter] -= 1
        learner.drafter, learner.drawn = drafter, self._draw()
        return True

    def _settled(self, exploiting: Sequence[tuple[Request, _Learner]], room: Sequence[int]) -> bool:
        """Whether those who exploit can stay as they are."""
        if self._matched != {r.id for r, _ in exploiting}:
            return False
        left = list(room)
        for _, x in exploiting:
            if x.drafter is not None:
                left[x.drafter] -= 1
        return min(left) >= 0 and not (any(left) and any(x.drafter is None for _, x in exploiting))

    def _match(self, exploiting: Sequence[tuple[Request, _Learner]], room: Sequence[int], cost: SwitchCost) -> None:
        self._matched = {r.id for r, _ in exploiting}
        if not exploiting:
            return
        learners = [x for _, x in exploiting]
        costs = np.array([[0.0 if j == x.present else cost(r, j) for j in range(len(room))] for r, x in exploiting])
        known = self._known(learners)
        left = np.array([x.clock.left for x in learners])[:, None]
        lasts = left * _ratio(known[..., 1], known[..., 2])
        kept = 1 - self._settings.switch_weight * _ratio(costs, lasts)
        if self._shared:
            busy = {x.drafter for x in self._learners.values() if x.clock.exploring and x.drafter is not None}
            found = match_shared(_ratio(known[..., 0], known[..., 2]) * kept, room, *self._shared, busy)
        else:
            found = match(_goodput(known) * kept, room)
        for x, drafter in zip(learners, found, strict=True):
            x.drafter = drafter

    def _known(self, learners: Sequence[_Learner]) -> np.ndarray:
        """Tokens, seconds and slots, the prior's among them `[learners, drafters, 3]`."""
        seen = np.array([x.seen for x in learners])
        if (prior := self._prior) is None:
            return seen
        means = {kind: prior.mean(kind) for kind in {x.kind for x in learners}}
        return seen + self._settings.prior_slots * np.array([means[x.kind] for x in learners])


def _goodput(known: np.ndarray) -> np.ndarray:
    """Tokens a second `[…, drafters]`; 0 where nothing is known."""
    return _ratio(known[..., 0], known[..., 1])


def _ratio(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """a / b, 0 where b is 0."""
    return np.divide(a, b, out=np.zeros(a.shape), where=b > 0)
