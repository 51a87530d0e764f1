"""The interface of a batching mode."""

from __future__ import annotations

from jaxspec.sched.slots import Policy


class Batching(Policy):
    """Decides before each admission, and is informed of each."""

    #: Whether a batch runs to its end, which a preemptive order would interrupt.
    runs_to_end: bool = False

    def __init__(self, size: int) -> None:
        #: Most requests that run at once.
        self.size = size

    def free_slots(self, running: int, waiting: int, oldest: float | None, now: float) -> int:
        """How many requests may be admitted now; `oldest` is when the longest wait began."""
        return self.size - running

    def admitted(self) -> None:
        """A request was admitted."""

    def sent_back(self) -> None:
        """A running request was preempted and waits again."""

    def wake(self, running: int, oldest: float | None) -> float | None:
        """When requests may be admitted even if nothing happens until then; None: only after another event."""
        return None
