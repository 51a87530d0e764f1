"""Drafts are off where steps with them give fewer tokens per second than plain ones, whatever was estimated."""

from __future__ import annotations

from random import Random

import pytest

from helpers.fake_drafter import Fake, requests, round_of
from jaxspec.sched.plan import Plan, ScheduledRequest
from jaxspec.sched.spec.host_times import DRAFTED, PLAIN, UNUSED, HostTimes, StepTook
from jaxspec.sched.spec.payoff import Payoff
from jaxspec.sched.spec.speculator import Speculator
from jaxspec.sched.spec.trees.chain import Chain
from jaxspec.sched.timing import StepTimes

FLAT = StepTimes({1: 10e-3, 16: 10e-3, 64: 40e-3})


def share_allowed(tokens: float, seconds: float, steps: int = 4000) -> float:
    """Of steps with one request, where those with drafts give and take so much; plain ones give 1 and take 1."""
    payoff, random, allowed = Payoff(), Random(0), 0
    for _ in range(steps):
        if payoff.allows():
            allowed += 1
            payoff.observe(1 + (random.random() < tokens - 1), 1, seconds * random.uniform(0.95, 1.05), 1.0)
    return allowed / steps


@pytest.mark.parametrize(("tokens", "seconds"), [(1.5, 1.2), (1.1, 1.05), (1.0, 1.0)])
def test_drafts_that_pay_or_cost_nothing_stay_on(tokens: float, seconds: float) -> None:
    assert share_allowed(tokens, seconds) > 0.9


@pytest.mark.parametrize(("tokens", "seconds"), [(1.0, 1.03), (1.1, 1.3), (1.5, 1.8)])
def test_drafts_that_do_not_pay_are_nearly_always_off(tokens: float, seconds: float) -> None:
    assert 0 < share_allowed(tokens, seconds) < 0.05


def test_drafts_are_tried_again_and_stay_on_once_they_pay() -> None:
    payoff = Payoff()

    def run(steps: int, seconds: float) -> int:
        allowed = 0
        for _ in range(steps):
            if payoff.allows():
                allowed += 1
                payoff.observe(1, 1, seconds, 1.0)
        return allowed

    assert run(1000, 1.1) < 150
    assert run(2000, 0.8) > 500
    assert run(500, 0.8) == 500
    assert run(100, 1.1) < 100  # and off again within a hundred steps


def test_a_pause_of_the_machine_says_nothing_about_drafts() -> None:
    payoff = Payoff()
    for _ in range(100):
        payoff.observe(1, 1, 50.0, 1.0)
    assert payoff.allows()


class Free(Fake):
    free = True


@pytest.mark.parametrize("policy", [None, Chain(3)])
def test_a_batch_size_at_which_drafts_lose_time_decodes_plainly(policy: Chain | None) -> None:
    """Only there, and only if speed decides: other policies draft as they are told."""
    speculator = Speculator([Free("free", 100, 0, list("0123"))], FLAT, policy)
    for count in (4, 2):
        running = requests(count)
        plan = Plan(tuple(ScheduledRequest(r, 3, 1) for r in running))
        took = 30e-3 if count == 4 else 10e-3
        for _ in range(60):
            drafted = bool(round_of(speculator, running))
            speculator.step_took(plan, speculator.terms, count, StepTook(took, took, drafted))
    assert bool(round_of(speculator, requests(4))) == (policy is not None)
    assert round_of(speculator, requests(2)) and round_of(speculator, requests(1))


@pytest.mark.parametrize(("overlapping", "on"), [(False, True), (True, False)])
def test_steps_with_drafts_are_compared_with_plain_ones_that_overlap(overlapping: bool, on: bool) -> None:
    """Half a token more in steps of 10 ms of the device and 8 ms of the host, which overlapping plain steps hide."""
    speculator = Speculator([Free("free", 100, 0, list("0123"))], FLAT)
    speculator.host.overlapping = overlapping
    plan = Plan(tuple(ScheduledRequest(r, 3, 1) for r in requests(1)))
    for i in range(100):
        if round_of(speculator, requests(1)):
            speculator.step_took(plan, speculator.terms, 1 + (i % 2), StepTook(18e-3, 10e-3, True))
    assert bool(round_of(speculator, requests(1))) == on


def test_the_hosts_time_in_plain_steps() -> None:
    host = HostTimes()
    assert host.overhead(PLAIN) == host.without_drafts == 0
    host.observe(DRAFTED, StepTook(12e-3, 8e-3, True), rounds=1e-3)
    assert host.without_drafts == pytest.approx(3e-3) and host.overhead(PLAIN) == 0
    host.observe(PLAIN, StepTook(10e-3, 9e-3, False), rounds=0)
    assert host.without_drafts == pytest.approx(1e-3) and host.overhead(PLAIN) == pytest.approx(2e-3)
    host.overlapping = True
    for _ in range(300):
        host.observe(PLAIN, StepTook(11e-3, 9e-3, False), rounds=0)
    assert host.of(PLAIN) == pytest.approx(1e-3), "plain steps would overlap without drafts"
    for _ in range(300):
        host.observe(PLAIN, StepTook(9e-3, 9e-3, False, overlaps=True), rounds=0)
    assert host.of(PLAIN) == pytest.approx(0, abs=1e-6) and host.of(UNUSED) is None
