"""LAPS-SD (§4): least attained, then least perceived service."""

from __future__ import annotations

from bisect import bisect_left
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, Self

from pydantic import Field, NonNegativeFloat, PositiveFloat, model_validator

from jaxspec.sched.order.acceptance_prior import AcceptancePrior
from jaxspec.sched.order.order import Order
from jaxspec.sched.per_request import PerRequest
from jaxspec.sched.plan import RequestResult
from jaxspec.sched.request import Request
from jaxspec.sched.slots import ORDERS, Need, Section, SlotContext
from jaxspec.sched.timing import DraftedStepTimes


class LapsSdSettings(Section):
    """`order: laps_sd`: least attained, then least perceived service (LAPS-SD §4). Brackets: the paper's symbols."""

    #: Number of priority queues (K).
    queues: int = Field(default=4, ge=1, le=64)
    #: Upper service bound of a queue relative to that of the queue above it (M).
    growth: float = Field(default=2.0, gt=1, le=100)
    #: Attained service, in ms, up to which a request stays in the first queue (S_up of queue 1).
    first_threshold_ms: PositiveFloat = 500.0
    #: Steps over which the acceptance rate of a request must be stable (γ).
    window: int = Field(default=5, ge=2)
    #: The acceptance rate is stable if it varies by less than this within the window (δ).
    tolerance: PositiveFloat = 0.05
    #: Draft tokens per step (n) in the estimate of execution time. None: the request's own mean.
    draft_tokens: NonNegativeFloat | None = None
    #: Time to draft one token, in ms (T_ssm). None: fitted to the observed steps.
    draft_token_ms: NonNegativeFloat | None = None
    #: Time of a step without its drafting, in ms (T_llm). None: fitted to the observed steps.
    verify_ms: PositiveFloat | None = None
    #: observed: the acceptance rate is measured. oracle: it is known at arrival if the request states it, as in the
    #: simulator; needs draft_tokens, draft_token_ms and verify_ms.
    acceptance: Literal["observed", "oracle"] = "observed"
    #: Position of requests without a stable acceptance rate. fcfs: last in their queue, in order of arrival, as in the
    #: paper. typical: there is one queue, shortest estimated time first, and they are assumed to run at the mean speed
    #: of the requests with a stable rate.
    unknown: Literal["fcfs", "typical"] = "fcfs"
    #: Whether an acceptance rate is drawn towards the mean of finished requests, the more the fewer steps it was
    #: measured over: its posterior mean under a Beta prior that is learned from them. Not in the paper.
    shrinkage: bool = False

    @model_validator(mode="after")
    def _check_oracle(self) -> Self:
        missing = [n for n in ("draft_tokens", "draft_token_ms", "verify_ms") if getattr(self, n) is None]
        if self.acceptance == "oracle" and missing:
            raise ValueError(f"acceptance: oracle has no observed steps to fit, so set {', '.join(missing)}")
        return self


@dataclass(slots=True)
class _Progress:
    """What the policy knows of one request."""

    #: Its acceptance rate after each of its last γ decoding steps.
    rates: deque[float]
    queue: int = 1
    rounds: int = 0
    #: Acceptance rate and rounds when it became perceptible by them.
    stable: tuple[float, int] | None = None
    #: Once perceptible: estimated seconds per output token, and of the whole request with `length` output tokens.
    per_token: float | None = None
    length: float = 0.0
    seconds: float = 0.0
    #: `per_token` relative to the mean of all requests perceived so far.
    relative_cost: float = 1.0
    #: Has run since it became perceptible: it is not preempted any more.
    settled: bool = False


@ORDERS.register("laps_sd", LapsSdSettings)
class LapsSd(Order):
    """K queues by attained service; within a queue, perceptible requests (known execution time) before the others.

    A round is a step in which the request decodes, with or without drafts. A request starts in queue 1,
    non-perceptible, and moves down as it is served. Its acceptance rate after a round is accepted / proposed so far.
    Once that has varied by less than δ over the last γ rounds, the request is perceptible:
    with the mean rate A of those rounds, L output tokens and n draft tokens per round, its execution time is
    T = L (n T_ssm + T_llm) / (n A + 1), and it moves to the queue whose range contains T. There it competes once more,
    shortest T first; from its next round on it is not preempted. Non-perceptible requests go in order of arrival and
    are preemptible. Rounds without drafts leave the rate unchanged; if nothing was ever drafted, n and A are 0 and
    T = L T_llm. A is not updated after that (§4.3).

    That is the paper's order, in which every request must first run for a while before any can finish. With
    `unknown: typical`, an addition to the paper, requests do not wait for that: all compete by T in one queue, and a
    non-perceptible request is assumed to take the mean time per token of those perceived so far. `shrinkage`, another
    one, corrects A for the chance in a few rounds.
    """

    preemptive = True
    rule = "requests with less service, had or expected, go first"
    needs = frozenset({Need.LENGTHS})

    def __init__(self, settings: LapsSdSettings) -> None:
        self._settings = s = settings
        self.cost = DraftedStepTimes(_seconds(s.draft_token_ms), _seconds(s.verify_ms))
        # S_up of each queue but the last, which has none; S_up of a queue is S_down of the next.
        self._upper = [s.first_threshold_ms / 1000 * s.growth**j for j in range(s.queues - 1)]
        self._progress = PerRequest(self._begin)
        # Number of requests that became perceptible, and their mean seconds per token.
        self._perceived, self._mean_per_token = 0, 0.0
        # With `unknown: typical`: the perceptible requests, and those whose `relative_cost` has changed.
        self._perceptible: list[tuple[Request, _Progress]] = []
        self._rekeyed: list[Request] = []
        self._prior = AcceptancePrior()

    @classmethod
    def build(cls, settings: LapsSdSettings, context: SlotContext) -> LapsSd:
        return cls(settings)

    def key(self, request: Request) -> Any:
        p = self._progress.of(request)
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
        return self._progress.of(request).queue

    def perceived(self, request: Request) -> float | None:
        """T in seconds; None while the request is non-perceptible."""
        p = self._progress.of(request)
        return None if p.per_token is None else p.per_token * request.expected_len

    def preemptible(self, request: Request) -> bool:
        return not self._progress.of(request).settled

    def rekeyed(self) -> Sequence[Request]:
        changed, self._rekeyed = self._rekeyed, []
        return changed

    def observe(self, request: Request, result: RequestResult, seconds: float) -> None:
        p, s = self._progress.of(request), self._settings
        self.cost.observe(result.proposed, seconds)
        p.rounds += 1
        while p.queue < s.queues and request.attained > self._upper[p.queue - 1]:
            p.queue += 1
        if result.finish_reason is not None and p.stable is not None:
            self._prior.learn(*p.stable, request.accepted / request.proposed, p.rounds)
        if p.per_token is not None:
            p.settled = True
            return
        p.rates.append(request.accepted / request.proposed if request.proposed else 0.0)
        if len(p.rates) == s.window and max(p.rates) - min(p.rates) < s.tolerance:
            n = request.proposed / p.rounds
            if s.draft_tokens is not None and request.proposed:
                n = s.draft_tokens
            rate = sum(p.rates) / len(p.rates)
            if request.proposed:
                p.stable = rate, p.rounds
            if s.shrinkage and request.proposed:
                rate = self._prior.posterior(rate, p.rounds)
            self._perceive(p, request, n, rate)

    def _begin(self, request: Request) -> _Progress:
        p, s = _Progress(deque(maxlen=self._settings.window)), self._settings
        if s.acceptance == "oracle" and request.true_acceptance is not None:
            self._perceive(p, request, s.draft_tokens or 0.0, request.true_acceptance)
        return p

    def _perceive(self, p: _Progress, request: Request, n: float, rate: float) -> None:
        p.per_token = self.cost.seconds(n) / (n * rate + 1)
        self._perceived += 1
        self._mean_per_token += (p.per_token - self._mean_per_token) / self._perceived
        self._place(p, request)
        if self._settings.unknown == "typical":
            self._perceptible = [(r, q) for r, q in self._perceptible if not r.ended] + [(request, p)]
            self._compare()

    def _compare(self) -> None:
        """Compare all perceptible requests with the new mean: the first ones were compared with a mean of few."""
        for _, p in self._perceptible:
            assert p.per_token is not None
            p.relative_cost = p.per_token / self._mean_per_token if self._mean_per_token > 0 else 1.0
        self._rekeyed = [request for request, _ in self._perceptible]

    def _place(self, p: _Progress, request: Request) -> None:
        assert p.per_token is not None
        p.length = request.expected_len
        p.seconds = p.length * p.per_token
        p.queue = bisect_left(self._upper, p.seconds) + 1


def _seconds(ms: float | None) -> float | None:
    return None if ms is None else ms / 1000
