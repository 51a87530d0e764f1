"""Reports: what a replica tells the routers about its load, its speed and its cache."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from jaxspec.sched.request import Request
from jaxspec.sched.routing.prefixes import short_keys
from jaxspec.sched.scheduler import Scheduler

#: Prefix keys in a report: enough for all pages of most pools, and 32 KiB to send.
MOST_PREFIXES = 4096


@dataclass(frozen=True, slots=True)
class ReplicaReport:
    """What a replica reports about itself. Small and picklable. Counts include all of its requests."""

    #: Seconds on the router's clock at which it was made.
    time: float
    #: Requests that have a slot.
    running: int
    #: Requests that wait for one.
    waiting: int
    #: Slots in all, `max_num_seqs`.
    slots: int
    #: Prompt tokens of all its requests that are still to be computed, without those found in its cache.
    prompt_tokens: int
    #: Output tokens that all its requests are predicted to generate from now on; without a prediction the median.
    output_tokens: float
    #: Seconds of a prompt token in a full step.
    seconds_per_prompt_token: float
    #: Seconds of a step in which one request decodes.
    seconds_per_step: float
    #: Seconds that each further decoding request adds to a step.
    seconds_per_request: float = 0.0
    #: Output tokens that a step gives a request: above 1 with drafts.
    tokens_per_step: float = 1.0
    #: The tightest TPOT SLO of its requests in seconds; None: there is none.
    tightest_tpot: float | None = None
    #: Tokens of a page.
    page_size: int = 16
    #: Prefix keys (`short_key`) of the most recently used cached pages.
    prefixes: frozenset[int] = frozenset()

    @property
    def requests(self) -> int:
        """Requests of the replica, running and waiting."""
        return self.running + self.waiting

    def token_seconds(self, requests: float) -> float:
        """Seconds per output token of a request while this many decode; no more than the slots do."""
        others = max(0.0, min(requests, self.slots) - 1)
        return (self.seconds_per_step + others * self.seconds_per_request) / self.tokens_per_step


def report_of(
    scheduler: Scheduler, now: float, tokens_per_step: float = 1.0, queued: Sequence[Request] = ()
) -> ReplicaReport:
    """The report of a replica with this scheduler. `now`: seconds on the router's clock; `tokens_per_step`: as in the
    report, `LoadStats.gain` of the engine; `queued`: requests that have arrived and that the scheduler does not have
    yet. To be called in the scheduler's thread, not during its methods.

    Time in proportion to the requests and to the cached pages.
    """
    waiting = [*(request for _, request in scheduler.waiting.longest()), *queued]
    prompt, output, context, tightest = 0, 0.0, 0, None
    for request in (*scheduler.running, *waiting):
        prompt += max(0, request.prompt_len - request.computed)
        if (length := request.predicted_len) is None:
            length = scheduler.lengths.quantile(request, 0.5)
        output += max(1.0, length - request.output_len)
        context += len(request.tokens)
        tpot = request.slo.tpot
        if tpot is not None and (tightest is None or tpot < tightest):
            tightest = tpot
    limits, pool, count = scheduler.config, scheduler.pool, len(scheduler.running) + len(waiting)
    if (times := limits.times) is None:  # not profiled: what the scheduler has learned, or guesses
        per_prompt, per_step, per_request = scheduler.runtime.a, scheduler.runtime.d, 0.0
    else:
        slots, budget = limits.max_num_seqs, limits.max_num_batched_tokens
        each = context / count if count else 0.0
        per_prompt, per_step = times.of(budget) / budget, times.of(1, each)
        per_request = max(0.0, times.of(slots, slots * each) - per_step) / max(1, slots - 1)
    return ReplicaReport(
        now, len(scheduler.running), len(waiting), limits.max_num_seqs, prompt, output, per_prompt, per_step,
        per_request, tokens_per_step, tightest, pool.page_size, frozenset(short_keys(pool.recent_keys(MOST_PREFIXES))),
    )  # fmt: skip
