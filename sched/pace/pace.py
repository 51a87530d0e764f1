"""The interface of a pace, and the pace that throttles nothing."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from jaxspec.sched.request import Request
from jaxspec.sched.slots import PACES, Policy


@dataclass(frozen=True, slots=True)
class Throttle:
    """Decoding requests (ids) that skip this step, and the most prompt tokens it may compute (None: no limit)."""

    throttled: frozenset[str] = frozenset()
    prompt_tokens: int | None = None


#: No request skips the step.
FREE = Throttle()


class Pace(Policy):
    """Lets decoding requests skip a step so that it stays short enough for TPOT SLOs."""

    #: Whether any request is ever throttled.
    throttles: bool = True

    def choose(
        self, running: Sequence[Request], waiting: Request | None, now: float, drafting: bool = False
    ) -> Throttle:
        """Throttle the step that begins now. `waiting`: the next request to admit; `drafting`: the step may draft."""
        raise NotImplementedError


@PACES.register("none")
class Unthrottled(Pace):
    """All requests decode in every step."""

    throttles = False

    def choose(
        self, running: Sequence[Request], waiting: Request | None, now: float, drafting: bool = False
    ) -> Throttle:
        return FREE
