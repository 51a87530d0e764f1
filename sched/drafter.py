"""What a drafter offers to whoever decides for whom it drafts."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

from jaxspec.sched.plan import Work
from jaxspec.sched.request import Request
from jaxspec.sched.trees.candidates import Candidates

#: How a request's tokens are chosen: only a drafter that draws its own in the same way looks at that.
ChoosingOf = Callable[[Request], Any]


class Drafter(Protocol):
    """Proposes candidates; is told nothing, because a request's tokens say what was accepted."""

    @property
    def name(self) -> str: ...

    @property
    def widths(self) -> Sequence[int]:
        """Beams it can grow, ascending."""
        ...

    def behind(self, request: Request) -> int:
        """Tokens of the request that the drafter has not seen."""
        ...

    def propose(self, works: Sequence[Work], choosing: ChoosingOf, levels: int, width: int) -> list[Candidates | None]:
        """Candidates for each request, None for those that it does not get to in this round."""
        ...

    def seconds(self, requests: int, catch_up: int, levels: int, width: int) -> float:
        """What a round takes."""
        ...

    def forget(self, request: Request) -> None: ...
