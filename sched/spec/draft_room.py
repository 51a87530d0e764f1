"""What a step has left for drafts."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Self

from jaxspec.sched.plan import Plan
from jaxspec.sched.spec.micro_batches import committed_positions


@dataclass(slots=True)
class DraftRoom:
    """What a step has left for drafts. Its micro-batches share it, so that together they keep to the step's bounds.

    Each micro-batch gets a part of what is left, in proportion to its requests that may draft. What one does not use
    goes to the later ones.
    """

    #: Tokens of the whole step that are not drafts.
    known_tokens: int
    #: Draft nodes that fit in the step.
    nodes: int
    #: Requests that may draft and whose micro-batch has not been drafted.
    requests: int
    #: Draft nodes selected so far.
    drafted: int = 0
    #: Committed positions that the whole step reads.
    context: int = 0

    @classmethod
    def of(cls, plan: Plan) -> Self:
        sharing = sum(s.levels > 0 for s in plan.scheduled)
        return cls(plan.num_tokens, plan.draft_nodes, sharing, context=committed_positions(plan.scheduled))

    def share(self, nodes: int, requests: int) -> int:
        """How many of the step's `nodes` draft nodes a micro-batch may select in which `requests` may draft."""
        return (nodes - self.drafted) * requests // max(self.requests, 1)

    def take(self, requests: int, nodes: int) -> None:
        """A micro-batch with `requests` that may draft has selected `nodes` draft nodes."""
        self.requests -= requests
        self.drafted += nodes
