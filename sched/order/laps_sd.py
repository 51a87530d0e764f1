"""LAPS-SD (§4): least attained, then least perceived service."""

from __future__ import annotations

from bisect import bisect_left
from collections import deque
from dataclasses import dataclass
from typing import Any

from jaxspec.sched.config import LapsSdSettings
from jaxspec.sched.order.order import Order
from jaxspec.sched.plan import RequestResult
from jaxspec.sched.request import Request
from jaxspec.sched.timing import RoundTimes


@dataclass(slots=True)
class _Progress:
    """What the policy knows of one request."""

    #: Its acceptance rate after each of its last γ decoding steps.
    rates: deque[float]
    queue: int = 1
    rounds: int = 0
    #: Once perceptible: estimated seconds per output token, and of the whole request with `length` output tokens.
    per_token: float | None = None
    length: float = 0.0
    seconds: float = 0.0
    #: `per_token` relative to the mean of the requests that were perceptible when it became so.
    relative_cost: float = 1.0
    #: Has run since it became perceptible: it is not preempted any more.
    settled: bool = False


class LapsSd(Order):
    """K queues by attained service; within a queue, perceptible requests (known execution time) before the others.

    A round is a step in which the request decodes, with or without drafts. A request starts in queue 1,
    non-perceptible, and moves down as it is served. Its acceptance rate after a round is accepted / proposed so far.
    Once that has varied by less than δ over the last γ rounds, the request is perceptible:
    with the mean rate A of those rounds, L output tokens and n draft tokens per round, its execution time is
    T = L (n T_ssm + T_llm) / (n A + 1), and it moves to the queue whose range contains T. There it competes once more,
    shortest T first; from its next round on it is not preempted. Non-perceptible requests go in order of arrival and
    are preemptible. Rounds without drafts leave the rate unchanged; if nothing was ever drafted, n and A are 0 and
    T = L T_llm.

    That is the paper's order, in which every request must first run for a while before any can finish. With
    `unknown: typical`, an addition to the paper, requests do not wait for that: all compete by T in one queue, and a
    non-perceptible request is assumed to take the mean time per token of those perceived so far.
    """

    preemptive = True

    def __init__(self, settings: LapsSdSettings) -> None:
        self._settings = s = settings
        self.cost = RoundTimes(_seconds(s.draft_token_ms), _seconds(s.verify_ms))
        # S_up of each queue but the last, which has none; S_up of a queue is S_down of the next.
        self._upper = [s.first_threshold_ms / 1000 * s.growth**j for j in range(s.queues - 1)]
        self._progress: dict[str, _Progress] = {}
        # Number of requests that became perceptible, and their mean seconds per token.
        self._perceived, self._mean_per_token = 0, 0.0

    def key(self, request: Request) -> Any:
        p = self._progress_of(request)
        if self._settings.unknown == "typical":
            # Relative to the mean time per token, so that a waiting request keeps its key while the mean changes.
            return (0, 0, request.expected_len * p.relative_cost)
        if p.per_token is None:
            return (p.queue, 1, request.number)
        if p.length != request.expected_len:  # there is a new prediction
            self._place(p, request)
        return (p.queue, 0, p.seconds)

    def queue(self, request: Request) -> int:
        """The request's queue, 1 … K."""
        return self._progress_of(request).queue

    def perceived(self, request: Request) -> float | None:
        """T in seconds; None while the request is non-perceptible."""
        p = self._progress_of(request)
        return None if p.per_token is None else p.per_token * request.expected_len

    def preemptible(self, request: Request) -> bool:
        return not self._progress_of(request).settled

    def observe(self, request: Request, result: RequestResult, seconds: float) -> None:
        p, s = self._progress_of(request), self._settings
        self.cost.observe(result.proposed, seconds)
        p.rounds += 1
        while p.queue < s.queues and request.attained > self._upper[p.queue - 1]:
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

    def _progress_of(self, request: Request) -> _Progress:
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
        self._mean_per_token += (p.per_token - self._mean_per_token) / self._perceived
        p.relative_cost = p.per_token / self._mean_per_token if self._mean_per_token > 0 else 1.0
        self._place(p, request)

    def _place(self, p: _Progress, request: Request) -> None:
        assert p.per_token is not None
        p.length = request.expected_len
        p.seconds = p.length * p.per_token
        p.queue = bisect_left(self._upper, p.seconds) + 1


def _seconds(ms: float | None) -> float | None:
    return None if ms is None else ms / 1000
