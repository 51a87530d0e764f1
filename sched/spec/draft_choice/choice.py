"""The interface of a draft choice, and the epochs in which bandits explore and exploit."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from jaxspec.sched.request import Request

#: (request, drafter) -> seconds to compute the KV that the drafter lacks, if the request changes to it.
SwitchCost = Callable[[Request, int], float]


class DraftChoice(Protocol):
    """Assigns drafters, by index, to requests (SPIN §IV).

    A time slot of a request is a step in which it decodes, between `assign` and `observe`. `assign` may be called
    several times before the same `observe` and returns the same drafters as long as the requests are the same.
    """

    def assign(self, requests: Sequence[Request], cost: SwitchCost) -> list[int | None]:
        """The drafter of each request in its next slot; None where every drafter is full.

        A drafter j gets at most B_j requests, its batch limit. Empty for no requests.
        """
        ...

    def share(self, step: float, rounds: Sequence[float]) -> None:
        """Called before each `assign` if drafters and target share one device: every request waits for each round.

        Verifying takes `step` seconds, and drafter j's round `rounds[j]` seconds.
        """
        ...

    def observe(self, request: Request, drafter: int | None, tokens: int, seconds: float) -> None:
        """The result of the request's slot with `drafter`, as `assign` returned it.

        It got `tokens` tokens, bonus token included, in `seconds` of drafting and verifying; computing KV after a
        change of drafter is not included.
        """
        ...

    def ahead(self, request: Request) -> int | None:
        """The drafter the request is most likely to change to next, None if to none.

        Its KV may be computed while that drafter is idle (§IV-C).
        """
        ...

    def forget(self, request: Request) -> None:
        """The request has finished."""
        ...


class Unlearned:
    """Base of policies that do not learn: ignores observations and expects no change of drafter."""

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

    If β does not divide α, the first chunk is shorter.
    """

    exploration: int
    chunk: int
    exploring: bool = True
    epoch: int = 1
    #: Slots of the current stage (exploring or exploiting) that are over.
    slot: int = 0

    @property
    def left(self) -> int:
        """Slots left in the current stage, including the next one: at least 1."""
        return (self.exploration if self.exploring else 2**self.epoch) - self.slot

    def tick(self) -> bool:
        """Count a finished slot; returns whether a chunk or a stage ended with it."""
        self.slot += 1
        if not self.left:
            self.epoch += not self.exploring
            self.exploring, self.slot = not self.exploring, 0
            return True
        return self.exploring and self.left % self.chunk == 0
