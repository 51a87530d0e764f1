"""The interface of a draft choice, and the epochs in which bandits explore and exploit."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from jaxspec.sched.request import Request
from jaxspec.sched.slots import DRAFT_CHOICES, Policy, SlotContext

#: (request, drafter) -> seconds to compute the KV that the drafter lacks, if the request changes to it.
SwitchCost = Callable[[Request, int], float]


class DraftChoice(Policy):
    """Assigns drafters, by index, to requests (SPIN §IV). The default methods suit a policy that does not learn.

    A time slot of a request is a step in which it decodes, between `assign` and `observe`. `assign` may be called
    several times before the same `observe` and returns the same drafters as long as the requests are the same.
    """

    #: False: the speculator takes the drafter that it expects to be fastest for a request, or the next best one.
    assigns: bool = True

    def assign(self, requests: Sequence[Request], cost: SwitchCost) -> list[int | None]:
        """The drafter of each request in its next slot; None where every drafter is full.

        A drafter j gets at most B_j requests, its batch limit. Empty for no requests.
        """
        raise NotImplementedError

    def share(self, step: float, rounds: Sequence[float], verify: Sequence[float]) -> None:
        """Called before each `assign` if drafters and target share one device: every request waits for all work.

        In seconds: a step of the decoding requests without drafts or prompts, each drafter's round, and what verifying
        each drafter's drafts for one request adds to the step.
        """

    def observe(self, request: Request, drafter: int | None, tokens: int, seconds: float) -> None:
        """The result of the request's slot with `drafter`, as `assign` returned it.

        It got `tokens` tokens, bonus token included, in `seconds` of drafting and verifying; computing KV after a
        change of drafter is not included.
        """

    def ahead(self, request: Request) -> int | None:
        """The drafter the request is most likely to change to next, None if to none.

        Its KV may be computed while that drafter is idle (§IV-C).
        """
        return None

    def ended(self, request: Request) -> None:
        """The request has finished or was cancelled: its drafter has room for another one."""


@DRAFT_CHOICES.register("fastest")
class Fastest(DraftChoice):
    """Leaves the choice to the speculator's estimates: because `assigns` is false, it is never built."""

    assigns = False


def batch_limits(context: SlotContext) -> list[int]:
    """Batch limit B_j of each drafter: `draft_limits`, or else all requests."""
    limits = context.config.draft_limits
    return [limits.get(drafter.name, context.max_num_seqs) for drafter in context.drafters]


def generator(context: SlotContext) -> np.random.Generator:
    """The random numbers of a policy that draws, from `policy_seed`."""
    return np.random.default_rng(context.config.policy_seed)


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
