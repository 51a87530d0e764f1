"""Where a request stands in its epochs (SPIN §IV-B, Fig. 8)."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True)
class Clock:
    """Epochs k = 1, 2, …: `exploration` slots (α) of exploring in chunks of `chunk` (β), then 2^k of exploiting.

    A first chunk is shorter where β does not divide α.
    """

    exploration: int
    chunk: int
    exploring: bool = True
    epoch: int = 1
    #: Slots of the stage that are over.
    slot: int = 0

    @property
    def left(self) -> int:
        """Slots that the stage still has, the one to come among them: at least 1."""
        return (self.exploration if self.exploring else 2**self.epoch) - self.slot

    def tick(self) -> bool:
        """A slot is over; -> whether a chunk or a stage is."""
        self.slot += 1
        if not self.left:
            self.epoch += not self.exploring
            self.exploring, self.slot = not self.exploring, 0
            return True
        return self.exploring and self.left % self.chunk == 0
