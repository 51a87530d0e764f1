"""SPIN's pipeline as in its Fig. 6(b): micro-batches continue from step to step without waiting for one another."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from jaxspec.sched.sim.tree_simulator import TreeSimulation
from jaxspec.sched.spec.micro_batches import Timeline


@dataclass(slots=True)
class Flow(Timeline):
    """A timeline across all steps: a micro-batch is drafted as soon as it has been verified and the drafters are free.

    Times are relative to the start of the current step, which is when the last one was verified; drafting may start
    earlier.
    """

    #: When each micro-batch was last verified, and the number of micro-batches added to this step.
    ready: list[float] = field(default_factory=list)
    part: int = 0

    def begin(self) -> Flow:
        """Start the next step: shift all times to its start."""
        self.drafted -= self.verified
        self.ready = [at - self.verified for at in self.ready]
        self.verified, self.part = 0.0, 0
        return self

    def add(self, own_device: Iterable[float], target_device: Iterable[float], verifying: float) -> None:
        if self.part == len(self.ready):
            self.ready.append(0.0)
        self.drafted = max(self.drafted, self.ready[self.part]) + max(own_device, default=0.0)
        self.verified = max(self.drafted, self.verified) + verifying
        self.ready[self.part] = self.verified
        self.part += 1


class Flowing(TreeSimulation):
    """A simulation with this pipeline. All drafters must have their own device."""

    def _timeline(self) -> Timeline:
        if not hasattr(self, "_flow"):
            self._flow = Flow()
        return self._flow.begin()
