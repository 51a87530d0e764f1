"""A micro-batch: requests packed into one program call, and what the device decided about them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from jaxspec.engine.request_state import RequestState
from jaxspec.sched.plan import ScheduledRequest
from jaxspec.sched.spec.ahead import AheadDrafts
from jaxspec.sched.spec.trees.candidates import Draft
from jaxspec.step.packing import Tree
from jaxspec.step.runner import ModelRunner, PendingStep


class VerifiedRequest(NamedTuple):
    """The device's decision about one scheduled request."""

    scheduled: ScheduledRequest
    state: RequestState
    #: New tokens; none for a prefill chunk that does not reach the end of the known tokens.
    tokens: list[int]
    #: Its first logit row in the decision vector.
    row: int
    #: The draft tree and its accepted nodes, root included, in preorder (they form one path); None without drafts.
    draft: Draft | None
    path: list[int] | None


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """Scheduled requests whose step is under way on the device."""

    scheduled: Sequence[ScheduledRequest]
    states: Sequence[RequestState]
    drafts: Mapping[str, Draft]
    pending: PendingStep
    #: What `drafts` are until they have been read; None: they were known.
    ahead: AheadDrafts | None = None

    @classmethod
    def launch(
        cls,
        scheduled: Sequence[ScheduledRequest],
        states: Sequence[RequestState],
        drafts: Mapping[str, Draft],
        penalty_rows: Mapping[str, int],
        model_runner: ModelRunner,
        before: MicroBatch | None = None,
        ahead: AheadDrafts | None = None,
    ) -> MicroBatch:
        """Build the requests' token trees, pack them and start the step. `drafts` and `penalty_rows` (see
        `Penalties.update`) are by request id; `before` is under way and samples the tokens that are not known yet;
        `ahead`: the drafts, which the host has not read, instead of `drafts`."""
        drafts = drafts if ahead is None else ahead.drafts
        trees: list[Tree] = []
        after = {} if before is None else before.trees
        for state, s in zip(states, scheduled, strict=True):
            name = s.request.id
            draft, row = drafts.get(name), penalty_rows.get(name)
            tree = after.get(name, -1)
            trees.append(state.draft_tree(s, draft, row, tree) if draft else state.tree(s, row, tree))
        chains = None if ahead is None else ahead.on_device
        pending = model_runner.execute(model_runner.pack(trees), None if before is None else before.pending, chains)
        return cls(scheduled, states, drafts, pending, ahead)

    @property
    def trees(self) -> dict[str, int]:
        """The places of the trees that give new tokens, by request id."""
        return {s.request.id: i for i, s in enumerate(self.scheduled) if s.samples}

    def requests(self, decision: np.ndarray) -> Iterator[VerifiedRequest]:
        """Split `decision [C + T]` int32 (`PendingStep.wait`) by request, in the order of `scheduled`."""
        packed = self.pending.packed
        sampled, accepted = decision[: packed.shape.rows].tolist(), decision[packed.shape.rows :].tolist()
        for i, (scheduled, state) in enumerate(zip(self.scheduled, self.states, strict=True)):
            tokens: list[int] = []
            path: list[int] | None = None
            node, row = packed.nodes[i], packed.rows[i]
            if (draft := self.drafts.get(scheduled.request.id)) is not None:
                # The token sampled at an accepted node is the one after it.
                path = [at for at, yes in enumerate(accepted[node : node + len(draft) + 1]) if yes]
                tokens = [sampled[row + at] for at in path]
            elif scheduled.samples:
                assert accepted[node]
                tokens = [sampled[row + scheduled.last_row]]
            yield VerifiedRequest(scheduled, state, tokens, row, draft, path)
