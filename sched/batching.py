"""When waiting requests are let in: SSJF §3.2's three modes."""

from __future__ import annotations

from typing import Protocol

from jaxspec.sched.config import PolicyConfig


class Batching(Protocol):
    """Asked before each admission, told of each."""

    #: Requests that run at once.
    size: int

    def free_slots(self, running: int, waiting: int, oldest: float | None, now: float) -> int:
        """How many may be let in now; `oldest` is when the longest wait began."""
        ...

    def admitted(self) -> None: ...

    def sent_back(self) -> None:
        """A running request lost its pages and waits again."""
        ...

    def wake(self, running: int, oldest: float | None) -> float | None:
        """When requests may be let in although nothing happens until then; None: not before something does."""
        ...


class Continuous:
    """Whoever ends is replaced in the next step. With a size of 1: no batching, one request after the other."""

    def __init__(self, size: int) -> None:
        self.size = size

    def free_slots(self, running: int, waiting: int, oldest: float | None, now: float) -> int:
        return self.size - running

    def admitted(self) -> None:
        pass

    def sent_back(self) -> None:
        pass

    def wake(self, running: int, oldest: float | None) -> float | None:
        return None


class Dynamic:
    """A batch starts when `size` requests wait, or one has waited for `timeout` seconds, and runs to its end.

    A batch's seats are given out once: nobody takes the place of a request that ends early. Requests that the step's
    token budget or the memory does not let in at once come in as soon as it does.
    """

    def __init__(self, size: int, timeout: float) -> None:
        self.size, self.timeout = size, timeout
        self._left = 0  # seats of the batch that nobody has taken yet

    def free_slots(self, running: int, waiting: int, oldest: float | None, now: float) -> int:
        self._left = min(self._left, waiting)  # whoever was to take one may have been cancelled
        ended = not (running or self._left)
        if ended and oldest is not None and (waiting >= self.size or now >= oldest + self.timeout):
            self._left = min(self.size, waiting)
        return self._left

    def admitted(self) -> None:
        self._left -= 1

    def sent_back(self) -> None:
        self._left += 1

    def wake(self, running: int, oldest: float | None) -> float | None:
        return None if running or self._left or oldest is None else oldest + self.timeout


def build(policy: PolicyConfig, max_num_seqs: int) -> Batching:
    """The batching that the configuration names, for at most `max_num_seqs` requests."""
    match policy.batching:
        case "none":
            return Continuous(1)
        case "dynamic":
            return Dynamic(min(policy.max_batch_size, max_num_seqs), policy.batch_wait_timeout_ms / 1000)
        case "continuous":
            return Continuous(max_num_seqs)
