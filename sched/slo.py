"""Latency SLOs of a request, and its progress relative to them."""

from __future__ import annotations

from dataclasses import dataclass
from math import inf
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from jaxspec.sched.request import Request


@dataclass(frozen=True, slots=True)
class Slo:
    """Latency targets in seconds; None: no target. Raises `ValueError` naming a target that is not positive.

    `tpot` is the mean time per output token after the first, `ttft` the time to the first token.
    """

    tpot: float | None = None
    ttft: float | None = None

    def __post_init__(self) -> None:
        for name in ("tpot", "ttft"):
            value = getattr(self, name)
            if value is not None and not 0 < value < inf:
                raise ValueError(f"slo.{name}_ms must be positive, got {1000 * value:g}")

    def __bool__(self) -> bool:
        """Whether there is any target."""
        return self.tpot is not None or self.ttft is not None


#: No target.
NONE = Slo()


def need(request: Request, now: float, seconds: float) -> float:
    """Tokens a decoding request needs from a step of `seconds` that begins now to meet its TPOT.

    A(r) of AdaServe's Eq. 5: `(l + t_spec) / tpot - o`, with l the time since its first token and o the tokens after
    it. Of a resumed request, only the tokens of this engine count. Minus infinity without a TPOT.
    """
    if request.slo.tpot is None or request.first_token is None:
        return -inf
    return (now - request.first_token + seconds) / request.slo.tpot - (request.new_len - 1)


def slack(request: Request, now: float) -> float:
    """Seconds until a decoding request needs its next token to meet its TPOT; infinity without one."""
    if request.slo.tpot is None or request.first_token is None:
        return inf
    return request.slo.tpot * request.new_len - (now - request.first_token)


def current_slack(request: Request, now: float) -> tuple[str, float] | None:
    """The target that counts now, "ttft" until the first token and then "tpot", and the seconds until it is missed.

    None without such a target.
    """
    if request.first_token is None:
        ttft = request.slo.ttft
        return None if ttft is None else ("ttft", ttft - (now - request.arrival))
    return None if request.slo.tpot is None else ("tpot", slack(request, now))
