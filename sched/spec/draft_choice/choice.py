"""What a draft choice is: which drafter drafts for which request."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from jaxspec.sched.request import Request

#: Seconds that a request's change to a drafter costs: those of computing the KV that the drafter lacks.
SwitchCost = Callable[[Request, int], float]


class DraftChoice(Protocol):
    """Which drafter, by its index, drafts for which request (SPIN §IV).

    A time slot of a request is a step in which it decodes: `assign` comes before it, `observe` after it. Between two
    `observe` of a request `assign` may come several times, and answers the same as long as the same requests ask.
    """

    def assign(self, requests: Sequence[Request], cost: SwitchCost) -> list[int | None]:
        """The drafter of each request in its next slot; None for one that no drafter has room for.

        Never more of them than a drafter's batch limit B_j. Empty for no requests.
        """
        ...

    def share(self, step: float, rounds: Sequence[float]) -> None:
        """Drafters and target take turns on one device: verifying takes so many seconds, and each drafter's round so
        many from everybody. Comes before `assign`, where that is so."""
        ...

    def observe(self, request: Request, drafter: int | None, tokens: int, seconds: float) -> None:
        """In its slot the request got so many tokens, the target's own among them, from drafting and verifying that
        took so long, catching up left out; the drafter is the one that `assign` said."""
        ...

    def ahead(self, request: Request) -> int | None:
        """The drafter that the request is likeliest to change to next, None if to none: its KV may be computed while
        that one idles (§IV-C)."""
        ...

    def forget(self, request: Request) -> None:
        """The request has ended."""
        ...


class Unlearned:
    """What a policy has that learns nothing: nothing is made of what is told, and nobody is expected to change."""

    def share(self, step: float, rounds: Sequence[float]) -> None:
        pass

    def observe(self, request: Request, drafter: int | None, tokens: int, seconds: float) -> None:
        pass

    def ahead(self, request: Request) -> int | None:
        return None

    def forget(self, request: Request) -> None:
        pass


@dataclass(slots=True)
class Clock:
    """Epochs k = 1, 2, …: `exploration` slots (α) of exploring in chunks of `chunk` (β), then 2^k of exploiting.

    A first chunk is shorter where β does not divide α.
    """

    exploration: int
    chunk: int
    exploring: bool = True
    epoch: int = 1
    #: Slots of the stage that are over.
    slot: int = 0

    @property
    def left(self) -> int:
        """Slots that the stage still has, the one to come among them: at least 1."""
        return (self.exploration if self.exploring else 2**self.epoch) - self.slot

    def tick(self) -> bool:
        """A slot is over; -> whether a chunk or a stage is."""
        self.slot += 1
        if not self.left:
            self.epoch += not self.exploring
            self.exploring, self.slot = not self.exploring, 0
            return True
        return self.exploring and self.left % self.chunk == 0
