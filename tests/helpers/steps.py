"""A scheduler that a test runs step by step."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from jaxspec.sched import PagePool, Plan, PolicyConfig, Request, RequestResult, Scheduler, SchedulerConfig, SwapCosts
from jaxspec.sched.plan import Lookahead


class Steps:
    """A scheduler with its requests and a clock, `now`. Prompts share no prefix and have one token by default."""

    def __init__(
        self,
        seqs: int = 1,
        pages: int = 256,
        page: int = 4,
        tokens: int = 64,
        host: int = 0,
        exact: bool = True,
        costs: SwapCosts | None = None,
        **policy: Any,
    ) -> None:
        config = SchedulerConfig(seqs, tokens, 400, None, 64, PolicyConfig(**policy), host, exact, costs)
        self.scheduler = Scheduler(config, PagePool(pages, page))
        self.requests: dict[str, Request] = {}
        self.done: dict[str, float] = {}  # when each request ended
        self.now = 0.0

    def add(self, name: str, max_tokens: int = 50, prompt: int = 1, **more: Any) -> Request:
        tokens = [len(self.requests) * 1000 + i for i in range(prompt)]
        request = self.requests[name] = Request(name, prompt, tokens, max_tokens, self.now, **more)
        self.scheduler.add(request, self.now)
        return request

    def plan(self, drafts: int = 0) -> Plan:
        return self.scheduler.plan(self.now, Lookahead(drafts, drafts))

    def answer(self, plan: Plan, seconds: float = 1.0, drafts: Mapping[str, tuple[int, int]] | None = None) -> None:
        """Finish the step of `plan`: each sampling request gets one token and ends at its true length.

        `drafts` gives (proposed, accepted) draft tokens by request id; they are only counted.
        """
        self.now += seconds
        results = []
        for scheduled in plan.scheduled:
            request = scheduled.request
            last = request.output_len + 1 == (request.true_len or request.max_tokens)
            proposed, accepted = (drafts or {}).get(request.id, (0, 0))
            reason = "length" if last and scheduled.samples else None
            results.append(RequestResult((7,) if scheduled.samples else (), reason, proposed, accepted))
            if reason:
                self.done[request.id] = self.now
        self.scheduler.update(plan, results, self.now, seconds)
        self.check()

    def step(self, seconds: float = 1.0, **drafts: tuple[int, int]) -> list[str]:
        """Run one step. Returns the ids of the scheduled requests, sorted."""
        plan = self.plan()
        ran = sorted(scheduled.request.id for scheduled in plan.scheduled)
        self.answer(plan, seconds, drafts)
        return ran

    def steps(self, count: int, seconds: float = 1.0) -> str:
        """Run `count` steps. Returns the scheduled ids of each step, joined by spaces."""
        return " ".join("".join(self.step(seconds)) for _ in range(count))

    def finish(self) -> list[str]:
        """Run until no work is left. Returns the ids in the order in which the requests ended."""
        for _ in range(10_000):
            if not self.scheduler.has_work:
                return sorted(self.done, key=lambda name: self.done[name])
            self.step()
        raise AssertionError("no end")

    def check(self) -> None:
        """Only running and paused requests hold pages."""
        s = self.scheduler
        s.pool.check([request.pages for request in (*s.running, *s.waiting)])
        held = sum(len(request.pages) for request in s.waiting)
        assert held == s.waiting.paused_pages
        if not s.has_work:
            assert s.pool.num_used == 0 and not s.waiting.num_paused
