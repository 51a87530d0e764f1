"""Plans that are made while a step is under way: `Scheduler.advance`, on a fake device with paged memory."""

from __future__ import annotations

from collections import deque
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from helpers.drive import TIMES, Drive, policies
from helpers.paged import Job, Slice, crowd, jobs
from jaxspec.sched import PagePool, Plan, PolicyConfig, Request, RequestResult, Scheduler, SchedulerConfig
from jaxspec.sched.plan import Lookahead
from jaxspec.sched.request import UNKNOWN


class Ahead(Drive):
    """Plans one step ahead now and then, with unknown tokens or with the requests of the step under way held."""

    planned_ahead = 0
    unknown = 0
    shifted = 0  # requests that went on after drafts that were accepted meanwhile

    def run(self) -> None:
        self.device = self.device_kind(self.scheduler.pool.page_size, self.random)
        under_way: deque[tuple[Plan, list[Slice]]] = deque()
        now, patience = 0, 200 + sum(80 * (len(job.prompt) + job.max_tokens) for job in self.jobs)
        while now <= 45 or self.scheduler.has_work or under_way:
            assert now < patience, "no end"
            self.arrive(now)
            self.cancel(now, during_step=False)
            if under_way:
                last, _ = under_way[-1]
                self.scheduler.advance(last, hold=self.random.random() < 0.3)
            drafts = Lookahead(self.random.randint(0, 3), self.random.randint(0, 3), True)
            plan = self.scheduler.plan(float(now), drafts if self.random.random() < 0.5 else Lookahead())
            self.check_writes(plan)
            assert not {s.request.id for s in plan.scheduled} & {r.id for r in (*plan.preempted, *plan.paused)}
            if plan.scheduled:
                self.planned_ahead += bool(under_way)
                under_way.append((plan, self.device.launch(plan)))
            self.cancel(now, during_step=True)
            keep = int(bool(plan.scheduled) and self.random.random() < 0.8)
            while len(under_way) > keep:
                self.read(*under_way.popleft(), float(now))
                self.check_books()
            now += 1
        self.check_end()

    def read(self, plan: Plan, pending: list[Slice], now: float) -> None:
        for s, part in zip(plan.scheduled, pending, strict=True):
            if part.tokens[-1] == UNKNOWN:  # the device knows it
                self.unknown += 1
                *accepted, part.tokens[-1] = self.sampled[s.request.id]
                part.start, part.left = part.start + len(accepted), part.left - len(accepted)
                self.shifted += bool(accepted)
        results = self.device.read(pending)
        self.sampled = {s.request.id: r.tokens for s, r in zip(plan.scheduled, results, strict=True) if r.tokens}
        self.scheduler.update(plan, results, now, self.random.choice([0.0, 0.5, 2.0]))


def scheduler(policy: PolicyConfig, pages: int = 12) -> Scheduler:
    config = SchedulerConfig(4, 10, 40, None, 12, policy, times=TIMES)
    return Scheduler(config, PagePool(pages, 4, True))


@settings(max_examples=200, deadline=None)
@given(st.data(), st.lists(jobs, min_size=1, max_size=10), st.integers(0, 99))
def test_every_request_writes_what_it_writes_alone(data: st.DataObject, jobs: list[Job], seed: int) -> None:
    memory = data.draw(st.sampled_from(["recompute", "defer"]))
    policy = data.draw(policies(batching="continuous", memory=memory))
    Ahead(scheduler(policy, data.draw(st.integers(8, 24))), jobs, Random(seed)).run()


def test_the_property_meets_what_it_is_about() -> None:
    """Steps ahead, unknown tokens, and preemptions of requests whose step is under way."""
    ahead = unknown = shifted = preempted = pauses = 0
    for seed in range(20):
        random = Random(seed)
        policy = PolicyConfig(order="las" if seed % 2 else "fcfs", memory="recompute")
        drive = Ahead(scheduler(policy, 8), crowd(random), random)
        drive.run()
        ahead, unknown, shifted = ahead + drive.planned_ahead, unknown + drive.unknown, shifted + drive.shifted
        preempted, pauses = preempted + drive.scheduler.num_preemptions, pauses + drive.scheduler.num_pauses
    assert min(ahead, unknown, shifted, preempted, pauses) > 20


def two_requests() -> Scheduler:
    found = scheduler(PolicyConfig())
    for name in "ab":
        found.add(Request(name, 3, [1, 2, 3], 4, 0.0), 0.0)
    return found


def test_the_next_plan_goes_on_after_the_token_that_is_not_known() -> None:
    s = two_requests()
    first = s.plan(0.0)
    with pytest.raises(RuntimeError, match="advance"):
        s.plan(0.0)
    s.advance(first)
    with pytest.raises(ValueError, match="advanced already"):
        s.advance(first)
    second = s.plan(0.0)
    assert [(x.start, x.count, x.samples) for x in second.scheduled] == [(3, 1, True)] * 2
    with pytest.raises(ValueError, match="not the plan in flight"):
        s.update(second, [RequestResult((8,))] * 2, 1.0)
    s.update(first, [RequestResult((7,)), RequestResult((9,), "stop")], 1.0)
    (a,) = s.running
    assert a.tokens == [1, 2, 3, 7] and a.computed == 3
    s.update(second, [RequestResult((8,)), RequestResult((6,))], 2.0)  # b has ended: its result is ignored
    assert a.tokens == [1, 2, 3, 7, 8] and a.computed == 4


def test_the_first_request_waits_for_pages_that_a_step_under_way_will_free() -> None:
    s = scheduler(PolicyConfig(), pages=6)
    s.add(Request("first", 11, list(range(11)), 8, 0.0), 0.0)
    s.add(Request("second", 8, list(range(50, 58)), 2, 0.0), 0.0)
    plans, tokens = [s.plan(0.0)], {"first": iter(range(100, 120)), "second": iter(range(200, 220))}

    def answer(plan: Plan) -> None:
        results = []
        for x in plan.scheduled:
            new = (next(tokens[x.request.id]),) if x.samples else ()
            last = x.samples and x.end - x.request.prompt_len + 1 == x.request.max_tokens
            results.append(RequestResult(new, "length" if last else None))
        s.update(plan, results, 1.0)

    while plans:
        s.advance(plans[-1])
        following = s.plan(1.0)
        answer(plans.pop(0))
        if following.scheduled:
            plans.append(following)
        elif s.has_work:
            plans.append(s.plan(1.0))
    assert s.num_preemptions == 0 and not s.has_work


def test_a_request_does_not_run_beyond_its_last_token() -> None:
    s = scheduler(PolicyConfig())
    s.add(Request("a", 2, [1, 2], 1, 0.0), 0.0)
    first = s.plan(0.0)
    s.advance(first)
    assert not s.ready and not s.plan(0.0).scheduled
    s.update(first, [RequestResult((7,), "length")], 1.0)
    assert not s.has_work


def test_the_next_plan_has_pages_for_drafts_that_may_be_accepted() -> None:
    s = scheduler(PolicyConfig())
    s.add(request := Request("a", 3, [1, 2, 3], 20, 0.0), 0.0)
    s.update(s.plan(0.0), [RequestResult((7,))], 1.0)
    s.advance(first := s.plan(1.0, Lookahead(4, 3, True)))
    assert request.tokens == [1, 2, 3, 7, UNKNOWN] and (request.computed, request.pending_drafts) == (4, 3)
    second = s.plan(1.0, Lookahead(4, 3, True))
    assert len(request.pages) == s.pool.pages_for(4 + 3 + 1 + 3)
    s.update(first, [RequestResult((5, 6, 8), None, 3, 2)], 2.0)
    assert request.tokens == [1, 2, 3, 7, 5, 6, 8] and (request.computed, request.pending_drafts) == (6, 0)
    s.advance(second)
    assert request.tokens == [1, 2, 3, 7, 5, 6, 8, UNKNOWN] and (request.computed, request.pending_drafts) == (7, 3)
    s.update(second, [RequestResult((9,), None, 3, 0)], 2.0)
    assert request.tokens == [1, 2, 3, 7, 5, 6, 8, 9] and request.computed == 7


def test_only_drafts_that_were_found_are_pending() -> None:
    s = scheduler(PolicyConfig())
    s.add(request := Request("a", 3, [1, 2, 3], 5, 0.0), 0.0)
    s.update(s.plan(0.0), [RequestResult((7,))], 1.0)
    s.advance(s.plan(1.0, Lookahead(4, 3, True)), drafted={"a": 1})
    assert request.pending_drafts == 1 and s.ready == [request]


def test_a_request_that_may_end_in_the_step_under_way_waits_for_it() -> None:
    s = scheduler(PolicyConfig())
    s.add(request := Request("a", 3, [1, 2, 3], 5, 0.0), 0.0)
    s.update(s.plan(0.0), [RequestResult((7,))], 1.0)
    s.advance(first := s.plan(1.0, Lookahead(4, 3, True)))
    assert request.pending_drafts == 3 and not s.ready and not s.plan(1.0).scheduled
    s.update(first, [RequestResult((5,), None, 3, 0)], 2.0)
    assert s.ready == [request]


def test_groups_take_turns() -> None:
    s = two_requests()
    s.update(plan := s.plan(0.0), [RequestResult((7,))] * len(plan.scheduled), 1.0)
    order, half = [], Lookahead(4, 2, True, max_decoding=1)
    under_way = s.plan(1.0, half)
    for _ in range(2):
        s.advance(under_way, hold=True)
        other = s.plan(1.0, half)
        s.update(under_way, [RequestResult((5,), None, 2, 0)], 2.0)
        order += [x.request.id for x in under_way.scheduled]
        under_way = other
    assert [*order, under_way.scheduled[0].request.id] == ["a", "b", "a"]
