"""A step that the device has not finished, and whether the next one may be planned before."""

from __future__ import annotations

from dataclasses import dataclass, field

from jaxspec.engine.metrics import StepTimer
from jaxspec.engine.micro_batch import MicroBatch
from jaxspec.sched.plan import Plan
from jaxspec.sched.spec.speculator import StepTerms


@dataclass(slots=True)
class StepUnderWay:
    """A plan whose step has been launched."""

    plan: Plan
    timer: StepTimer
    batches: list[MicroBatch] = field(default_factory=list[MicroBatch])
    #: Whether the next step may follow although the host does not know which drafts are accepted.
    may_be_followed: bool = False
    #: Whether another step was under way in the meantime.
    overlaps: bool = False
    #: What the speculator decided for it.
    terms: StepTerms | None = None

    @property
    def drafted(self) -> bool:
        """Whether it verifies any drafts."""
        return any(batch.drafts for batch in self.batches)

    @property
    def depths(self) -> dict[str, int]:
        """The most drafts that may be accepted, by id of the requests that have drafts."""
        return {name: int(draft.depth.max()) for batch in self.batches for name, draft in batch.drafts.items()}

    @property
    def predictable(self) -> bool:
        """Whether the host needs none of its results for the next step.

        It needs the tokens with penalties or token masks, and the accepted lengths unless the step `may_be_followed`.
        """
        if len(self.batches) > 1 or (not self.may_be_followed and any(s.levels for s in self.plan.scheduled)):
            return False
        return not any(state.penalised or state.constraint for state in self.batches[0].states)
