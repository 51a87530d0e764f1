"""Some of a step's work on its way through the device: all of it, or a micro-batch."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from jaxspec.engine.request_state import RequestState
from jaxspec.sched.plan import ScheduledRequest
from jaxspec.sched.spec.trees.candidates import Draft
from jaxspec.step.runner import ModelRunner, PendingStep


class VerifiedRequest(NamedTuple):
    """What became of one request's work."""

    scheduled: ScheduledRequest
    state: RequestState
    #: New tokens, none where the work does not reach the end of what is known.
    tokens: list[int]
    #: Where its choices begin in the decision vector.
    row: int
    #: Of a draft tree: the tree, and its accepted nodes with the root, in preorder: one path.
    draft: Draft | None
    path: list[int] | None


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """Packed and launched work."""

    scheduled: Sequence[ScheduledRequest]
    states: Sequence[RequestState]
    drafts: Mapping[str, Draft]
    pending: PendingStep

    @classmethod
    def launch(
        cls,
        scheduled: Sequence[ScheduledRequest],
        states: Sequence[RequestState],
        drafts: Mapping[str, Draft],
        model_runner: ModelRunner,
    ) -> MicroBatch:
        trees = [
            state.draft_tree(w, draft, model_runner)
            if (draft := drafts.get(w.request.id))
            else state.tree(w, model_runner)
            for state, w in zip(states, scheduled, strict=True)
        ]
        return cls(scheduled, states, drafts, model_runner.execute(model_runner.pack(trees)))

    def requests(self, decision: np.ndarray) -> Iterator[VerifiedRequest]:
        """By the flight's decision vector, in the order of the work."""
        packed = self.pending.packed
        sampled, accepted = decision[: packed.shape.rows], decision[packed.shape.rows :]
        for i, (scheduled, state) in enumerate(zip(self.scheduled, self.states, strict=True)):
            tokens: list[int] = []
            path: list[int] | None = None
            node, row = packed.nodes[i], packed.rows[i]
            if (draft := self.drafts.get(scheduled.request.id)) is not None:
                # Each accepted node's choice is the token after it.
                path = np.flatnonzero(accepted[node : node + len(draft) + 1]).tolist()
                tokens = sampled[row : row + len(draft) + 1][path].tolist()
            elif scheduled.samples:
                assert accepted[node]
                tokens = [int(sampled[row + scheduled.last_row])]
            yield VerifiedRequest(scheduled, state, tokens, row, draft, path)
