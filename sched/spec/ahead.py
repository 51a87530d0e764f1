"""Drafts that are verified before the host has read them: chains that stay on the device between round and step.

With a step under way the host knows neither the tokens that the drafts continue nor the drafts themselves. So a chain
is verified whole, without a look at its probabilities, and its tokens are filled in later.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from jaxspec.sched.plan import FIRST_DRAFT, ScheduledRequest
from jaxspec.sched.spec.assignment import Assignment
from jaxspec.sched.spec.depth import DepthController
from jaxspec.sched.spec.draft_room import DraftRoom
from jaxspec.sched.spec.drafter import AheadProposal, Drafter, SamplingOf
from jaxspec.sched.spec.merging import Drafted, Part
from jaxspec.sched.spec.proposals import Proposals
from jaxspec.sched.spec.trees.candidates import Candidates, Draft
from jaxspec.sched.spec.trees.policy import TreePolicy


@dataclass(frozen=True, slots=True)
class AheadDrafts:
    """The chains of a step by request id; until `read` has returned, their tokens are names for the device.

    drafter    index of the drafter
    seconds    estimated time of the round
    on_device  the tokens, for the step's program
    """

    drafter: int
    seconds: float
    drafted: dict[str, Drafted]
    on_device: Any
    read: Callable[[], None]

    @property
    def drafts(self) -> dict[str, Draft]:
        """The draft trees."""
        return {name: drafted.draft for name, drafted in self.drafted.items()}


class AheadDrafting:
    """Drafts ahead where one drafter alone drafts, and chains; the arguments are those of `Proposals`."""

    def __init__(
        self, drafters: Sequence[Drafter], controllers: Sequence[DepthController], policy: TreePolicy,
        assignment: Assignment | None, proposals: Proposals,
    ) -> None:  # fmt: skip
        self._drafters, self._controllers, self._policy = drafters, controllers, policy
        self._assignment, self._proposals = assignment, proposals

    @property
    def possible(self) -> bool:
        """Whether there may be a `drafter`."""
        return self._policy.whole_chains and self._assignment is None and any(d.drafts_ahead for d in self._drafters)

    @property
    def drafter(self) -> int | None:
        """The drafter (index) that drafts ahead in this step, of which the depths have been decided; None: none."""
        on = [i for i, controller in enumerate(self._controllers) if controller.levels]
        if not self.possible or len(on) != 1 or not self._drafters[on[0]].drafts_ahead:
            return None
        return on[0] if self._controllers[on[0]].width == 1 else None

    def draft(
        self, scheduled: Sequence[ScheduledRequest], sampling: SamplingOf, room: DraftRoom, after: Mapping[str, int],
        before: Any,
    ) -> AheadDrafts | None:  # fmt: skip
        """Start to draft chains for a step; `room` is what it has left for them. None: there are none.

        `after`, `before`: see `Drafter.propose_ahead`.
        """
        if (i := self.drafter) is None:
            return None
        controller = self._controllers[i]
        batch = [s for s in scheduled if s.levels and controller.drafts_for(s.request.id)]
        if not batch or room.nodes <= 0:
            return None
        share = max(1, room.nodes // len(batch))
        levels = min(controller.levels, share, max(s.levels for s in batch))
        with self._proposals.blaming(i):
            proposal = self._drafters[i].propose_ahead(batch, sampling, levels, after, before)
        drafts = AheadDrafts(i, proposal.seconds, *_chains(i, batch, proposal, levels, room.nodes))
        if drafts.drafted:  # else it only caught up with prompts
            controller.count_round(True)
        return drafts

    def read(self, drafts: AheadDrafts) -> None:
        """Read the drafts of a step."""
        with self._proposals.blaming(drafts.drafter):
            drafts.read()
        self._proposals.succeeded(drafts.drafter)


def _chains(
    drafter: int, scheduled: Sequence[ScheduledRequest], proposal: AheadProposal, levels: int, nodes: int
) -> tuple[dict[str, Drafted], Any, Callable[[], None]]:
    """The chains of a round of `levels` levels, with `nodes` nodes at most; the rest of `AheadDrafts`."""
    drafted = dict[str, Drafted]()
    for s, first in zip(scheduled, proposal.first, strict=True):
        count = min(levels, s.levels, s.drafts, nodes)
        if first is not None and count > 0:
            drafted[s.request.id] = _chain(drafter, FIRST_DRAFT - first, count)
            nodes -= count

    def read() -> None:
        for s, candidates in zip(scheduled, proposal.read(), strict=True):
            if (found := drafted.get(s.request.id)) is None:
                continue
            assert candidates is not None
            (own,) = found.parts
            own.candidates.token[:] = found.draft.token[:] = candidates.token[: len(found.draft)]
            own.candidates.logprob[:] = candidates.logprob[: len(found.draft)]

    return drafted, proposal.on_device, read


def _chain(drafter: int, name: int, count: int) -> Drafted:
    """A chain of nodes whose tokens are named `name`, `name` - 1, …"""
    index = np.arange(count, dtype=np.int32)
    candidates = Candidates(name - index, index - 1, np.zeros(count, np.float32))
    draft = Draft(token=name - index, depth=index + 1, subtree=count - index, parent=index - 1, source=index)
    return Drafted([Part(drafter, candidates, np.arange(count), width=1)], np.ones(count, bool), draft)
