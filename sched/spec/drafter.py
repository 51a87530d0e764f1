"""What a drafter offers to whoever decides for whom it drafts."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

from jaxspec.sched.plan import ScheduledRequest
from jaxspec.sched.request import Request
from jaxspec.sched.spec.trees.candidates import Candidates

#: How a request's tokens are chosen: only a drafter that draws its own in the same way looks at that.
SamplingOf = Callable[[Request], Any]
#: Waits for the candidates of each request, None for those that the drafter does not get to in this round.
Proposal = Callable[[], list[Candidates | None]]


class Drafter(Protocol):
    """Proposes candidates; is told nothing, because a request's tokens say what was accepted."""

    @property
    def name(self) -> str: ...

    @property
    def widths(self) -> Sequence[int]:
        """Beams it can grow, ascending."""
        ...

    @property
    def ready(self) -> bool:
        """Whether its programs are compiled; until then it must be asked for nothing but its name."""
        ...

    def uncached_tokens(self, request: Request) -> int:
        """Tokens of the request that the drafter has not seen."""
        ...

    @property
    def own_device(self) -> bool:
        """Whether it has a device of its own, which idles while the target's is busy."""
        ...

    def prefetch_features(self, scheduled: Sequence[ScheduledRequest]) -> None:
        """Before the target's step begins: fetch from its device what later rounds of the step need for these."""
        ...

    def propose(self, scheduled: Sequence[ScheduledRequest], sampling: SamplingOf, levels: int, width: int) -> Proposal:
        """Begin a round for these requests."""
        ...

    def precompute_kv(self, scheduled: Sequence[ScheduledRequest], sampling: SamplingOf) -> None:
        """Begin to catch up with these requests, which were staged, in the time in which the target verifies."""
        ...

    def seconds(self, requests: int, catch_up: int, levels: int, width: int) -> float:
        """What a round takes."""
        ...

    def forget(self, request: Request) -> None: ...


class SharedDevice:
    """A drafter that takes turns with the target: there is nothing to bring over, and no time in which it idles."""

    own_device = False
    ready = True

    def prefetch_features(self, scheduled: Sequence[ScheduledRequest]) -> None:
        pass

    def precompute_kv(self, scheduled: Sequence[ScheduledRequest], sampling: SamplingOf) -> None:
        pass
