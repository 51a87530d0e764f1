"""When waiting requests are admitted: the three modes of SSJF §3.2."""

from __future__ import annotations

from typing import Protocol

from jaxspec.sched.config import PolicyConfig


class Batching(Protocol):
    """Decides before each admission, and is informed of each."""

    #: Most requests that run at once.
    size: int

    def free_slots(self, running: int, waiting: int, oldest: float | None, now: float) -> int:
        """How many requests may be admitted now; `oldest` is when the longest wait began."""
        ...

    def admitted(self) -> None:
        """A request was admitted."""
        ...

    def sent_back(self) -> None:
        """A running request was preempted and waits again."""
        ...

    def wake(self, running: int, oldest: float | None) -> float | None:
        """When requests may be admitted even if nothing happens until then; None: only after another event."""
        ...


class Continuous:
    """A finished request is replaced in the next step. A size of 1 means no batching."""

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
    """A batch starts when `size` requests wait, or one has waited `timeout` seconds, and runs until all have finished.

    Each slot of a batch is used once: a request that finishes early is not replaced. Requests of the batch that do not
    fit the token budget or the KV pool at once are admitted as soon as they do.
    """

    def __init__(self, size: int, timeout: float) -> None:
        self.size, self.timeout = size, timeout
        self._left = 0  # slots of the batch not used yet

    def free_slots(self, running: int, waiting: int, oldest: float | None, now: float) -> int:
        self._left = min(self._left, waiting)  # waiting requests may have been cancelled
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
    """The batching mode for `policy.batching`, with at most `max_num_seqs` requests."""
    match policy.batching:
        case "none":
            return Continuous(1)
        case "dynamic":
            return Dynamic(min(policy.max_batch_size, max_num_seqs), policy.batch_wait_timeout_ms / 1000)
        case "continuous":
            return Continuous(max_num_seqs)
