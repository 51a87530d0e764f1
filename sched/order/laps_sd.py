"""Least attained, then least perceived service: LAPS-SD (§4)."""

from __future__ import annotations

from bisect import bisect_left
from collections import deque
from dataclasses import dataclass
from typing import Any

from jaxspec.sched.config import LapsSdSettings
from jaxspec.sched.order.order import Order
from jaxspec.sched.plan import RequestResult
from jaxspec.sched.request import Request
from jaxspec.sched.timing import RoundCost


@dataclass(slots=True)
class _Progress:
    """What is known of one request."""

    rates: deque[float]
    queue: int = 1
    rounds: int = 0
    #: Once perceptible: seconds an output token will take, and the whole request of `length` tokens.
    per_token: float | None = None
    length: float = 0.0
    seconds: float = 0.0
    #: Of `per_token` to that of the requests perceived so far.
    pace: float = 1.0
    #: Has run since it became perceptible, and so is not preempted any more.
    settled: bool = False


class LapsSd(Order):
    """K queues by attained service, and in each the requests whose execution time is known before the others.

    A request starts in queue 1, non-perceptible, and moves down as it is served. Its acceptance rate after a round is
    accepted / proposed so far; when that has varied by less than δ over the last γ rounds, their mean A makes it
    perceptible: it will take T = L (n T_ssm + T_llm) / (n A + 1), with L output tokens and n drafted a round, and moves
    to the queue whose range holds T. There it competes once more, shortest T first; from its next round on it keeps its
    seat. The non-perceptible are served in order of arrival and preempted. Rounds without drafts leave the rate as it
    is; where nothing was ever drafted, n and A are 0 and T = L T_llm.

    That is the paper's order, in which finding out costs a turn for everybody before the first may end. With
    `unknown: typical`, which is ours, nobody waits for that: all compete by T in one queue, and whose rate is not
    known yet is taken to go at the mean pace of those perceived before.
    """

    preemptive = True

    def __init__(self, settings: LapsSdSettings) -> None:
        self._settings = s = settings
        self.cost = RoundCost(_seconds(s.draft_token_ms), _seconds(s.verify_ms))
        # S_up of each queue but the last, which has no end; S_up of one is S_down of the next.
        self._up = [s.first_threshold_ms / 1000 * s.growth**j for j in range(s.queues - 1)]
        self._progress: dict[str, _Progress] = {}
        self._perceived, self._typical = 0, 0.0  # how many, and their mean seconds a token

    def key(self, request: Request) -> Any:
        p = self._of(request)
        if self._settings.unknown == "typical":
            # In units of the typical seconds a token: what waits keeps its key while that changes.
            return (0, 0, request.expected_len * p.pace)
        if p.per_token is None:
            return (p.queue, 1, request.number)
        if p.length != request.expected_len:  # predicted anew
            self._place(p, request)
        return (p.queue, 0, p.seconds)

    def queue(self, request: Request) -> int:
        """1 … K."""
        return self._of(request).queue

    def perceived(self, request: Request) -> float | None:
        """T, in seconds; None while the request is non-perceptible."""
        p = self._of(request)
        return None if p.per_token is None else p.per_token * request.expected_len

    def preemptible(self, request: Request) -> bool:
        return not self._of(request).settled

    def observe(self, request: Request, result: RequestResult, seconds: float) -> None:
        p, s = self._of(request), self._settings
        self.cost.observe(result.proposed, seconds)
        p.rounds += 1
        while p.queue < s.queues and request.attained > self._up[p.queue - 1]:
            p.queue += 1
        if p.per_token is not None:
            p.settled = True
            return
        p.rates.append(request.accepted / request.proposed if request.proposed else 0.0)
        if len(p.rates) == s.window and max(p.rates) - min(p.rates) < s.tolerance:
            n = request.proposed / p.rounds
            if s.draft_tokens is not None and request.proposed:
                n = s.draft_tokens
            self._perceive(p, request, n, sum(p.rates) / len(p.rates))

    def forget(self, request: Request) -> None:
        self._progress.pop(request.id, None)

    def _of(self, request: Request) -> _Progress:
        p = self._progress.get(request.id)
        if p is None:
            s = self._settings
            p = self._progress[request.id] = _Progress(deque(maxlen=s.window))
            if s.acceptance == "oracle" and request.true_acceptance is not None:
                self._perceive(p, request, s.draft_tokens or 0.0, request.true_acceptance)
        return p

    def _perceive(self, p: _Progress, request: Request, n: float, rate: float) -> None:
        p.per_token = self.cost.seconds(n) / (n * rate + 1)
        self._perceived += 1
        self._typical += (p.per_token - self._typical) / self._perceived
        p.pace = p.per_token / self._typical if self._typical > 0 else 1.0
        self._place(p, request)

    def _place(self, p: _Progress, request: Request) -> None:
        assert p.per_token is not None
        p.length = request.expected_len
        p.seconds = p.length * p.per_token
        p.queue = bisect_left(self._up, p.seconds) + 1


def _seconds(ms: float | None) -> float | None:
    return None if ms is None else ms / 1000
