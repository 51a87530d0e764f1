"""SPIN's pipeline as in its Fig. 6(b): micro-batches that go on from step to step without waiting for one another."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from jaxspec.sched.sim.tree_simulator import TreeSimulation
from jaxspec.sched.spec.micro_batches import Timeline


@dataclass(slots=True)
class Flow(Timeline):
    """One for all steps: each micro-batch is drafted anew as soon as it is verified and the draft models are free.

    Times are from the begin of the step under way, which is when the one before was verified: drafting may begin
    earlier.
    """

    #: When each micro-batch was last verified, and how many the step has had.
    ready: list[float] = field(default_factory=list)
    part: int = 0

    def begin(self) -> Flow:
        self.drafted -= self.verified
        self.ready = [at - self.verified for at in self.ready]
        self.verified, self.part = 0.0, 0
        return self

    def add(self, own_device: Iterable[float], beside: Iterable[float], verifying: float) -> None:
        if self.part == len(self.ready):
            self.ready.append(0.0)
        self.drafted = max(self.drafted, self.ready[self.part]) + max(own_device, default=0.0)
        self.verified = max(self.drafted, self.verified) + verifying
        self.ready[self.part] = self.verified
        self.part += 1


class Flowing(TreeSimulation):
    """With draft models that all have devices of their own."""

    def _timeline(self) -> Timeline:
        if not hasattr(self, "_flow"):
            self._flow = Flow()
        return self._flow.begin()
