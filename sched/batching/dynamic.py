"""Dynamic batching: batches that run to their end."""

from __future__ import annotations

from jaxspec.sched.batching.batching import Batching
from jaxspec.sched.slots import BATCHINGS, SlotContext


@BATCHINGS.register("dynamic")
class Dynamic(Batching):
    """A batch starts when `size` requests wait, or one has waited `timeout` seconds, and runs until all have finished.

    Each slot of a batch is used once: a request that finishes early is not replaced. Requests of the batch that do not
    fit the token budget or the KV pool at once are admitted as soon as they do.
    """

    runs_to_end = True

    def __init__(self, size: int, timeout: float) -> None:
        super().__init__(size)
        self.timeout = timeout
        self._left = 0  # slots of the batch not used yet

    @classmethod
    def build(cls, settings: None, context: SlotContext) -> Dynamic:
        policy = context.config
        return cls(min(policy.max_batch_size, context.max_num_seqs), policy.batch_wait_timeout_ms / 1000)

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
