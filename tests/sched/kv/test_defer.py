"""`memory: defer`: what is reserved for the requests that are admitted, and what happens when it is too little."""

from __future__ import annotations

from helpers.steps import Steps
from jaxspec.sched import RequestStatus


def test_deferring_admits_no_request_that_might_need_anothers_pages():
    run = Steps(order="priority", memory="defer", seqs=2, pages=8)
    run.add("low", 8, prompt=20, priority=1)  # may come to need 7 pages of 8
    run.step()
    run.add("high", 4, prompt=4)
    assert run.steps(2) == "low low"
    run.add("tiny", 2, prompt=2, priority=2)
    assert run.step() == ["low"]  # it would fit, but stands behind high
    assert run.finish() == ["low", "tiny", "high"] and run.scheduler.num_preemptions == 0


def test_deferring_changes_slots_among_those_admitted_and_continues_when_the_first_does_not_fit():
    run = Steps(order="priority", memory="defer", seqs=1, pages=8)
    low = run.add("low", 8, prompt=4, priority=2)
    run.step()
    run.add("mid", 3, prompt=4, priority=1)
    assert run.steps(2) == "mid mid" and low.status is RequestStatus.PAUSED
    run.add("high", 20, prompt=8)
    assert run.finish() == ["mid", "low", "high"]


def test_deferring_reserves_what_is_predicted_and_not_what_is_allowed():
    run = Steps(memory="defer", seqs=2, pages=8)
    a = run.add("a", 28, prompt=4, predicted_len=8, true_len=8)  # 3 pages of 8, where max_tokens would be all
    run.add("b", 28, prompt=4, predicted_len=16, true_len=16)  # 5
    c = run.add("c", 28, prompt=4, predicted_len=4, true_len=4)  # 2: it waits for a
    assert run.steps(8) == " ".join(["ab"] * 8) and a.ended and not c.output_len
    assert run.finish() == ["a", "c", "b"] and run.scheduler.num_preemptions == 0
    allowed = Steps(memory="defer", seqs=2, pages=8)
    for name in "ab":
        allowed.add(name, 28, prompt=4, true_len=4)  # without a prediction it may need all pages
    assert allowed.steps(8) == "a a a a b b b b"


def test_a_quantile_reserves_for_longer_outputs_than_predicted():
    """Of the lengths seen, one in four is three times as long as predicted: it matters at 90 % and not at 50."""
    for quantile, together in ((0.9, "a a a"), (0.5, "ab ab ab")):
        run = Steps(memory="defer", seqs=2, pages=9, defer={"quantile": quantile})
        for i in range(2048):
            run.scheduler.lengths._predicted.observe(3.0 if i % 4 == 0 else 1.0, True)
        for name in "ab":
            run.add(name, 28, prompt=4, predicted_len=8, true_len=8)  # 3 pages of 8, or 7
        assert run.steps(3) == together


def test_outputs_longer_than_predicted_cost_the_last_request_its_pages():
    run = Steps(memory="defer", seqs=2, pages=8)
    liars = [run.add(name, 28, prompt=4, predicted_len=2, true_len=28) for name in "ab"]
    assert run.finish() == ["a", "b"]
    assert [r.preemptions > 0 for r in liars] == [False, True] and liars[1].recomputed


def test_paused_requests_that_outgrew_their_reservations_go_on():
    run = Steps(order="priority", memory="defer", seqs=1, pages=8)
    for priority, name in enumerate("cba"):  # each preempts those before it
        run.add(name, 24, prompt=4, predicted_len=2, true_len=12, priority=-priority)
        run.steps(4)
    assert run.finish() == ["a", "b", "c"]


def test_drafts_take_no_pages_that_another_request_has_reserved():
    run = Steps(memory="defer", seqs=2, pages=6)
    run.add("a", 20, prompt=4, predicted_len=3, true_len=3)  # 2 pages
    run.add("b", 20, prompt=4, predicted_len=12, true_len=12)  # 4
    run.step()
    drafted = {s.request.id: s.levels for s in run.plan(drafts=8).scheduled}
    assert drafted == {"a": 3, "b": 8}  # what fits into its pages, and all
