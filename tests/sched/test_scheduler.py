"""The scheduler's policy by example."""

from __future__ import annotations

from typing import Any

import pytest

from jaxspec.sched import PagePool, Plan, QueueFull, Request, RequestResult, RequestStatus, Scheduler, SchedulerConfig
from jaxspec.sched.plan_builder import PlanBuilder
from jaxspec.sched.token_budget import TokenBudget

PAGE = 4


def scheduler(pages: int = 64, seqs: int = 4, waiting: int | None = None, slots: int = 16) -> Scheduler:
    return Scheduler(SchedulerConfig(seqs, 16, 100, waiting, slots), PagePool(pages, PAGE))


def add(sched: Scheduler, name: str, prompt: int | list[int], max_tokens: int = 8, **more: Any) -> Request:
    """Queue a request; a prompt given as a length shares no prefix with others."""
    tokens = [ord(name[0]) * 1000 + i for i in range(prompt)] if isinstance(prompt, int) else list(prompt)
    request = Request(name, len(tokens), tokens, max_tokens, 0.0, **more)
    sched.add(request, 0.0)
    return request


def shares(plan: Plan) -> list[tuple[str, int, int]]:
    return [(scheduled.request.id, scheduled.start, scheduled.count) for scheduled in plan.scheduled]


def answer(sched: Scheduler, plan: Plan) -> None:
    """One new token, 7, to each piece of work that samples; requests end at their max_tokens."""
    results = []
    for scheduled in plan.scheduled:
        last = scheduled.request.output_len + 1 == scheduled.request.max_tokens
        results.append(RequestResult((7,), "length" if last else None) if scheduled.samples else RequestResult())
    sched.update(plan, results, 0.0)


def step(sched: Scheduler, now: float = 0.0) -> list[tuple[str, int, int]]:
    plan = sched.plan(now)
    seen = shares(plan)
    answer(sched, plan)
    return seen


def test_a_long_prompt_is_computed_in_chunks_and_then_decoded():
    sched = scheduler()
    request = add(sched, "a", 35, max_tokens=3)
    assert [step(sched, t) for t in (5.0, 6.0, 7.0)] == [[("a", 0, 16)], [("a", 16, 16)], [("a", 32, 3)]]
    assert [step(sched), step(sched)] == [[("a", 35, 1)], [("a", 36, 1)]]
    assert request.status is RequestStatus.FINISHED and request.tokens[35:] == [7, 7, 7]
    assert request.first_scheduled == 5.0
    assert not sched.has_work and sched.pool.num_used == 0
    assert step(sched) == []


def test_decoding_goes_before_prefill():
    sched = scheduler()
    add(sched, "a", 20)
    add(sched, "b", 2)
    assert step(sched) == [("a", 0, 16)]
    assert step(sched) == [("a", 16, 4), ("b", 0, 2)]
    add(sched, "c", 40)
    assert step(sched) == [("a", 20, 1), ("b", 2, 1), ("c", 0, 14)]
    assert step(sched) == [("a", 21, 1), ("b", 3, 1), ("c", 14, 14)]


def test_first_come_is_first_served_even_if_a_later_one_would_fit():
    sched = scheduler(pages=6)
    add(sched, "a", 14, max_tokens=2)
    add(sched, "b", 12, max_tokens=2)
    add(sched, "c", 1, max_tokens=2)
    assert step(sched) == [("a", 0, 14)]
    assert step(sched) == [("a", 14, 1)]
    assert step(sched) == [("b", 0, 12), ("c", 0, 1)]


@pytest.mark.parametrize(
    ("prompts", "pages", "matters"),
    [
        ([10], 64, False),
        ([10, 10, 10], 64, False),  # the third waits for the next step
        ([60, 60, 60, 60], 64, False),
        ([80, 90, 90, 90], 99, True),  # 284 tokens wait for steps of 16
        ([10, 10, 10, 10, 10], 64, True),  # four slots
        ([14, 12, 1], 6, True),  # no pages
    ],
)
def test_the_order_matters_if_requests_wait_long(prompts: list[int], pages: int, matters: bool) -> None:
    sched = scheduler(pages)
    for name, prompt in zip("abcde", prompts, strict=False):
        add(sched, name, prompt)
    plan = sched.plan(0.0)
    assert sched.order_matters(plan) is matters


def test_no_more_requests_run_than_may():
    sched = scheduler(seqs=2)
    for name in "abc":
        add(sched, name, 1, max_tokens=2)
    assert [len(step(sched)) for _ in range(5)] == [2, 2, 1, 1, 0]


def test_the_last_admitted_makes_room_and_comes_back_in_order():
    sched = scheduler(pages=5)
    a, b, c = (add(sched, name, n) for name, n in (("a", 4), ("b", 6), ("c", 5)))
    assert step(sched) == [("a", 0, 4), ("b", 0, 6), ("c", 0, 5)]  # all five pages
    plan = sched.plan(0.0)
    assert plan.preempted == (c,) and shares(plan) == [("a", 4, 1), ("b", 6, 1)]
    assert (c.status, c.computed, c.pages, c.output_len, c.preemptions) == (RequestStatus.WAITING, 0, [], 1, 1)
    add(sched, "d", 1)
    assert [request.id for request in sched.waiting] == ["c", "d"]
    answer(sched, plan)
    while sched.has_work:
        step(sched)
    assert a.tokens[4:] == b.tokens[6:] == c.tokens[5:] == [7] * 8
    assert sched.pool.num_used == 0


def test_a_request_that_came_last_preempts_itself():
    sched = scheduler(pages=4)
    add(sched, "a", 5)
    b = add(sched, "b", 8)
    step(sched)
    plan = sched.plan(0.0)
    assert plan.preempted == (b,) and shares(plan) == [("a", 5, 1)]
    assert sched.num_preemptions == 1


def test_recomputing_after_a_preemption_starts_from_what_is_still_cached():
    sched = scheduler(pages=6)
    add(sched, "a", 8, max_tokens=3)
    b = add(sched, "b", 12)
    assert step(sched) == [("a", 0, 8), ("b", 0, 8)]
    assert step(sched) == [("a", 8, 1), ("b", 8, 4)]
    assert step(sched) == [("a", 9, 1)] and b.preemptions == 1  # all pages are taken and b's 13th token needs one
    assert step(sched) == [("b", 12, 1)]
    assert (b.cached_tokens, sched.prefix_hits) == (0, 0)  # counted at the first admission


def test_a_prefix_is_computed_once():
    sched = scheduler()
    prompt = list(range(11))
    a = add(sched, "a", prompt)
    step(sched)
    b = add(sched, "b", [*prompt[:9], 99, 99])
    assert step(sched) == [("a", 11, 1), ("b", 8, 3)]
    assert b.pages[:2] == a.pages[:2] and b.pages[2] != a.pages[2]
    assert (b.cached_tokens, sched.prefix_queries, sched.prefix_hits) == (8, 22, 8)


def test_the_last_token_is_computed_even_if_it_is_cached():
    sched = scheduler()
    add(sched, "a", list(range(8)), max_tokens=1)
    step(sched)
    add(sched, "b", list(range(8)))
    assert step(sched) == [("b", 4, 4)]


def test_output_is_cached_too():
    sched = scheduler()
    a = add(sched, "a", list(range(6)), max_tokens=4)
    while sched.has_work:
        step(sched)
    add(sched, "b", [*a.tokens, 5])
    assert step(sched) == [("b", 8, 3)]


def test_prompt_logprobs_pass_by_the_cache_and_take_a_logit_slot_a_token():
    sched = scheduler(slots=6)
    prompt = list(range(12))
    add(sched, "a", prompt, max_tokens=20)
    step(sched)
    add(sched, "b", prompt, prompt_logprobs=True, reuse_prefix=False)
    add(sched, "c", 3)
    plan = sched.plan(0.0)
    assert shares(plan) == [("a", 12, 1), ("b", 0, 5)]
    assert [scheduled.logit_rows for scheduled in plan.scheduled] == [1, 5]
    answer(sched, plan)
    assert step(sched) == [("a", 13, 1), ("b", 5, 5)]
    plan = sched.plan(0.0)
    assert shares(plan) == [("a", 14, 1), ("b", 10, 2), ("c", 0, 3)]
    assert [scheduled.logit_rows for scheduled in plan.scheduled] == [
        1,
        2,
        1,
    ]  # the prompt's last token is the one that samples
    answer(sched, plan)
    assert [scheduled.logit_rows for scheduled in sched.plan(0.0).scheduled] == [1, 1, 1]


def test_no_request_is_admitted_after_one_that_took_all_logit_rows():
    sched = scheduler(slots=4)
    add(sched, "a", 6, prompt_logprobs=True, reuse_prefix=False)
    add(sched, "b", 3)
    assert step(sched) == [("a", 0, 4)]
    assert step(sched) == [("a", 4, 2), ("b", 0, 3)]


def test_a_chunk_stops_short_of_sampling_when_no_logit_slot_is_left():
    budget = TokenBudget(SchedulerConfig(2, 16, 100, None, 2))
    chain, short, one = (Request(str(n), n, [1] * n, 8, 0.0) for n in (3, 5, 1))
    chain.prompt_logprobs = True
    assert (share := budget.take(chain)) and (share.count, share.samples) == (2, False)
    assert not budget and budget.logit_rows == 0
    assert (share := budget.take(short)) and (share.count, share.samples) == (4, False)
    assert budget.take(one) is None and budget.tokens == 10


def test_decoding_is_served_before_prefill_and_else_in_order():
    decoding, prefilling = ([Request(f"{kind}{i}", 2, [1] * 3, 8, 0.0) for i in range(2)] for kind in "dp")
    for request in decoding:
        request.computed = 2
    sched = scheduler()
    sched.running = [prefilling[0], decoding[0], prefilling[1], decoding[1]]
    assert PlanBuilder(sched, 0.0)._service_order() == decoding + prefilling


@pytest.mark.parametrize("in_flight", [False, True])
def test_cancelling_frees_everything(in_flight: bool):
    sched = scheduler(seqs=1)
    a, b, c = (add(sched, name, 6) for name in "abc")
    step(sched)
    plan = sched.plan(0.0) if in_flight else Plan(())
    assert sched.cancel("c", 0.0) and c.status is RequestStatus.CANCELLED and sched.num_waiting == 1
    assert sched.cancel("a", 0.0) and a.status is RequestStatus.CANCELLED and sched.pool.num_used == 0
    sched.update(plan, [RequestResult((7,))] * len(plan.scheduled), 0.0)
    assert a.output_len == 1 and sched.pool.num_used == 0
    assert step(sched) == [("b", 0, 6)]
    assert not sched.cancel("a", 0.0) and not sched.cancel("nobody", 0.0)
    assert sched.cancel("b", 0.0) and b.status is RequestStatus.CANCELLED
    assert not sched.has_work and step(sched) == []
    sched.pool.check([])


def test_a_cancelled_id_may_come_again_while_its_step_runs():
    sched = scheduler()
    add(sched, "a", 6)
    plan = sched.plan(0.0)
    sched.cancel("a", 0.0)
    again = add(sched, "a", 5)
    sched.update(plan, [RequestResult((7,))], 0.0)
    assert again.output_len == 0
    assert step(sched) == [("a", 0, 5)]


def test_several_tokens_of_one_outcome_commit_the_drafts_among_them():
    sched = scheduler()
    request = add(sched, "a", 5, max_tokens=10)
    plan = sched.plan(0.0)
    sched.update(plan, [RequestResult((7, 8, 9))], 0.0)
    assert request.tokens[5:] == [7, 8, 9] and request.computed == 7
    plan = sched.plan(0.0)
    assert shares(plan) == [("a", 7, 1)]
    with pytest.raises(ValueError, match="pages"):
        sched.update(plan, [RequestResult((7, 8))], 0.0)  # no third page was planned


@pytest.mark.parametrize(
    ("results", "message"),
    [
        ([], "0 results for 2"),
        ([RequestResult(), RequestResult()], "0 tokens"),
        ([RequestResult((7,)), RequestResult((7,))], "1 tokens"),
        ([RequestResult((7,) * 8), RequestResult()], "max_tokens"),
    ],
)
def test_outcomes_that_do_not_fit_the_plan_are_refused(results: list[RequestResult], message: str):
    sched = scheduler()
    add(sched, "a", 4)
    add(sched, "b", 40)
    with pytest.raises(ValueError, match=message):
        sched.update(sched.plan(0.0), results, 0.0)


def test_plans_and_updates_alternate():
    sched = scheduler()
    add(sched, "a", 4)
    plan = sched.plan(0.0)
    with pytest.raises(RuntimeError):
        sched.plan(0.0)
    answer(sched, plan)
    with pytest.raises(ValueError, match="in flight"):
        sched.update(plan, [RequestResult((7,))], 0.0)


def test_a_request_may_end_before_its_max_tokens_and_without_a_token():
    sched = scheduler()
    request = add(sched, "a", 40)
    sched.update(sched.plan(0.0), [RequestResult((), "error")], 0.0)
    assert request.status is RequestStatus.FINISHED and not sched.has_work and sched.pool.num_used == 0


@pytest.mark.parametrize(("prompt", "max_tokens"), [(0, 1), (4, 0), (95, 6), (20, 13)])
def test_what_could_never_run_is_refused(prompt: int, max_tokens: int):
    sched = scheduler(pages=8 if prompt == 20 else 64)
    with pytest.raises(ValueError, match=r"a new request needs|the limit is|the KV pool holds"):
        add(sched, "a", prompt, max_tokens)
    assert not sched.has_work


def test_the_queue_is_bounded_and_ids_are_unique():
    sched = scheduler(waiting=2)
    add(sched, "a", 1)
    with pytest.raises(ValueError, match="already"):
        add(sched, "a", 1)
    add(sched, "b", 1)
    with pytest.raises(QueueFull):
        add(sched, "c", 1)
    step(sched)
    add(sched, "c", 1)
    assert (sched.num_running, sched.num_waiting) == (2, 1)


@pytest.mark.parametrize(
    "limits", [(0, 8, 8, 0, 8), (8, 4, 8, 0, 8), (8, 8, 0, 0, 8), (8, 8, 8, -1, 8), (8, 8, 8, 0, 4)]
)
def test_limits_that_could_starve_a_request_are_refused(limits: tuple[int, int, int, int, int]):
    with pytest.raises(ValueError, match="must"):
        SchedulerConfig(*limits)


def test_a_late_prediction_does_not_replace_one_that_knows_the_output() -> None:
    sched = scheduler()
    request = add(sched, "a", 3, max_tokens=90)
    sched.predicted("a", 60.0, 0.0, again=True)
    sched.predicted("a", 10.0, 0.0)
    assert (request.predicted_len, request.first_prediction) == (60.0, 10.0)
    sched.predicted("a", 50.0, 0.0, again=True)
    assert (request.predicted_len, request.first_prediction) == (50.0, 10.0)
