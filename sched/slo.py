"""Latency targets of a request, and how it stands against them."""

from __future__ import annotations

from dataclasses import dataclass
from math import inf
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from jaxspec.sched.request import Request


@dataclass(frozen=True, slots=True)
class Slo:
    """Targets in seconds, None where nothing is promised. Raises `ValueError` naming the one that is not positive.

    `tpot` is the mean time per output token after the first, `ttft` the time to the first.
    """

    tpot: float | None = None
    ttft: float | None = None

    def __post_init__(self) -> None:
        for name in ("tpot", "ttft"):
            value = getattr(self, name)
            if value is not None and not 0 < value < inf:
                raise ValueError(f"slo.{name}_ms must be positive, got {1000 * value:g}")

    def __bool__(self) -> bool:
        """Whether anything is promised."""
        return self.tpot is not None or self.ttft is not None


#: Nothing is promised.
NONE = Slo()


def need(request: Request, now: float, seconds: float) -> float:
    """Tokens that a decoding request has to get from a step of so many seconds that begins now, to be at its target.

    A(r) of AdaServe's Eq. 5: `(l + t_spec) / tpot - o`, l and o being the time since its first token and the tokens
    after it. Minus infinity without a target.
    """
    if request.slo.tpot is None or request.first_token is None:
        return -inf
    return (now - request.first_token + seconds) / request.slo.tpot - (request.output_len - 1)


def slack(request: Request, now: float) -> float:
    """Seconds until a decoding request needs its next token to be at its target; infinity without one."""
    if request.slo.tpot is None or request.first_token is None:
        return inf
    return request.slo.tpot * request.output_len - (now - request.first_token)
