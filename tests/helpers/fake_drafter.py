"""A drafter with fixed proposals and fixed times."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from jaxspec.sched.plan import Plan, ScheduledRequest
from jaxspec.sched.request import Request
from jaxspec.sched.spec.draft_room import DraftRoom
from jaxspec.sched.spec.drafter import Proposal, SamplingOf, SharedDevice
from jaxspec.sched.spec.speculator import Speculator
from jaxspec.sched.spec.trees.candidates import Candidates
from jaxspec.sched.timing import StepTimes
from jaxspec.step.packing import SamplingInputs

STEP = StepTimes({1: 10e-3, 4: 11e-3, 16: 12e-3, 64: 30e-3})


class Fake(SharedDevice):
    """Proposes the chain `first`, `first + 1`, … for requests whose id is in `knows`, and nothing for others."""

    widths = (1,)
    #: Its probability of each token, given the one before.
    stated = 0.9

    def __init__(self, name: str, first: int, cost: float, knows: Sequence[str]):
        self.name, self.first, self.cost, self.knows = name, first, cost, knows

    def uncached_tokens(self, request: Request) -> int:
        return 1

    def propose(
        self, scheduled: Sequence[ScheduledRequest], sampling: SamplingOf, levels: int, width: int, least: float = 0.0
    ) -> Proposal:
        ahead = np.arange(levels, dtype=np.int32)
        chain = Candidates(self.first + ahead, ahead - 1, ((ahead + 1) * np.log(self.stated)).astype(np.float32))
        return lambda: [chain if w.request.id in self.knows else None for w in scheduled]

    def seconds(self, requests: int, uncached: int, levels: int, width: int) -> float:
        return self.cost * levels


def requests(count: int) -> list[Request]:
    return [Request(str(i), 3, [1, 2, 3, 4], 100, 0.0, computed=3) for i in range(count)]


def round_of(speculator: Speculator, running: list[Request]) -> dict[str, int]:
    """Draft one round. Returns the first draft token of each request that has drafts, by request id."""
    ahead = speculator.lookahead(running, 0.0)
    scheduled = [ScheduledRequest(r, 3, 1, ahead.drafts, ahead.levels) for r in running]
    drafts = speculator.draft(
        scheduled, lambda _: SamplingInputs(), DraftRoom.of(Plan(tuple(scheduled), draft_nodes=99)), 0.0
    )
    return {id: int(draft.token[0]) for id, draft in drafts.items()}
