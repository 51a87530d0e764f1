"""Which requests decode in a step while some have an SLO for the time per output token."""

from __future__ import annotations

from unittest.mock import patch

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxspec.sched.config import PolicyConfig, SchedulerConfig
from jaxspec.sched.kv.page_pool import PagePool
from jaxspec.sched.pace import Pace
from jaxspec.sched.request import Request
from jaxspec.sched.scheduler import Scheduler
from jaxspec.sched.sim.cost import Linear
from jaxspec.sched.sim.simulator import Simulation
from jaxspec.sched.sim.workload import Workload
from jaxspec.sched.slo import Slo
from jaxspec.sched.slots import PACES, SlotContext
from jaxspec.sched.timing import StepTimes

THROTTLING = [name for name in PACES.names if PACES[name].throttles]
#: 10 ms and 2 ms a token.
TIMES = {n: 1e-3 * (10 + 2 * n) for n in range(1, 257)}


def decoding(number: int, tpot: float | None, output: int = 1, first: float = 0.0, limit: int = 50) -> Request:
    tokens = [0] * (4 + output)
    return Request(
        str(number), 4, tokens, limit, 0.0, number=number, computed=len(tokens) - 1, slo=Slo(tpot), first_token=first
    )


def made(kind: str, times: StepTimes | None = None) -> Pace:
    config = PolicyConfig(pace=kind, prompt_patience_ms=500)
    return PACES.build(SlotContext(config, 1, times=times or StepTimes(TIMES)))


def throttled(kind: str, requests: list[Request], now: float = 0.0) -> list[str]:
    return sorted(made(kind).choose(requests, None, now).throttled)


def test_a_step_is_kept_within_the_tightest_slo():
    """20 ms hold five tokens: the first five to arrive, or those nearest to missing their SLO, others last."""
    requests = [decoding(i, 0.2) for i in range(4)] + [decoding(4, None)] + [decoding(i, 0.02) for i in (5, 6, 7)]
    assert throttled("fcfs", requests) == ["4", "6", "7"]
    assert throttled("stta", requests) == ["2", "3", "4"]
    assert throttled("deadline", requests) == ["2", "3", "4"]
    assert throttled("deadline", [decoding(i, None) for i in range(40)]) == []
    assert throttled("none", requests) == []
    with pytest.raises(ValueError, match="pace: stta: it needs step times"):
        PACES.build(SlotContext(PolicyConfig(pace="stta"), 1))


def test_no_request_is_throttled_where_that_shortens_nothing():
    """A step takes 10 ms up to 64 tokens: with a TPOT of 8 ms throttling is useless below 64 requests."""
    plateau = StepTimes({n: 10e-3 if n <= 64 else 20e-3 for n in range(1, 257)})
    requests = [decoding(i, 0.008) for i in range(70)]
    for kind in THROTTLING:
        assert len(made(kind, plateau).choose(requests, None, 0.0).throttled) == 6


def test_prompts_leave_steps_to_drafts_until_urgent_requests_have_slack():
    """What is left of a step belongs to the drafts; prompts that have waited long get every fourth step."""
    chosen = made("deadline")
    prompt = Request("p", 100, [0] * 100, 10, 0.0)
    urgent = [decoding(i, 0.03) for i in range(3)]
    assert chosen.choose(urgent, prompt, 0.0).prompt_tokens == 7
    assert chosen.choose(urgent, prompt, 0.0, drafting=True).prompt_tokens == 0
    ahead = [decoding(i, 0.03, output=3) for i in range(3)]  # 90 ms, of which a shortest step is kept
    assert chosen.choose(ahead, prompt, 0.0, drafting=True).prompt_tokens == 31
    late = [decoding(i, 0.03, first=0.6) for i in range(3)]
    given = [chosen.choose(late, prompt, 0.6, drafting=True).prompt_tokens for _ in range(9)]
    assert given == [None if i % 4 == 0 else 0 for i in range(9)]
    assert [chosen.choose(late, prompt, 0.6).prompt_tokens for _ in range(2)] == [None, None]


def test_credit_is_spent():
    """Requests ahead of their SLO leave time for the others: 40 ms hold fifteen tokens."""
    requests = [decoding(i, 0.0205, output=3) for i in range(3)] + [decoding(i, 0.5) for i in range(3, 20)]
    assert len(throttled("stta", requests, 0.02)) == 15
    assert len(throttled("deadline", requests, 0.02)) == 5


def test_a_request_that_cannot_meet_its_slo_is_not_urgent():
    """One second behind with nine tokens to go, at a TPOT of 15 ms: it waits with those that have no SLO."""
    lost = decoding(0, 0.015, output=1, limit=10)
    others = [decoding(i, 0.03, first=1.0) for i in range(1, 12)]
    assert throttled("deadline", [lost, *others], 1.0) == ["0", "11"]
    assert "0" not in throttled("stta", [lost, *others], 1.0)


def test_no_request_is_throttled_for_long():
    chosen = made("deadline")
    requests = [decoding(0, None), *(decoding(i, 0.02) for i in range(1, 7))]
    throttled = [("0" in chosen.choose(requests, None, 0.0).throttled) for _ in range(40)]
    assert throttled.count(False) == 2 and not throttled[16] and not throttled[33]


def test_prompts_wait_for_urgent_requests_but_not_for_long():
    chosen = made("deadline")
    prompt = Request("p", 100, [0] * 100, 10, 0.0)
    assert chosen.choose([decoding(i, 0.02) for i in range(5)], prompt, 0.0).prompt_tokens == 0
    assert chosen.choose([decoding(i, 0.02) for i in range(3)], prompt, 0.0).prompt_tokens == 2
    assert chosen.choose([decoding(i, 0.02, first=0.5) for i in range(5)], prompt, 0.5).prompt_tokens is None
    urgent = Request("q", 100, [0] * 100, 10, 0.0, slo=Slo(ttft=0.6))
    assert chosen.choose([decoding(i, 0.02) for i in range(5)], urgent, 0.1).prompt_tokens == 0
    assert chosen.choose([decoding(i, 0.02) for i in range(5)], urgent, 0.2).prompt_tokens is None


@settings(deadline=None, max_examples=40)
@given(st.integers(0, 2**32), st.sampled_from(PACES.names), st.sampled_from(["mixed", "first"]))
def test_every_request_ends(seed, kind, prefill):
    """With any SLOs, under memory pressure too; no page is lost."""
    rng = np.random.default_rng(seed)
    n = 25
    policy = PolicyConfig(pace=kind, prefill=prefill)
    pool = PagePool(24, 16, enable_prefix_caching=False)
    config = SchedulerConfig(8, 64, 200, None, 64, policy, times=StepTimes(TIMES))
    scheduler = Scheduler(config, pool)
    arrival = np.sort(rng.uniform(0, 2, n))
    scheduled = Workload(arrival, rng.integers(1, 90, n), rng.integers(1, 60, n), np.full(n, np.nan))
    simulation = Simulation(scheduler, scheduled, Linear(step=10e-3, token=2e-3))
    made, limits = simulation.ledger.request, (None, 0.012, 0.03, 0.2)

    def with_slo(i):
        request = made(i)
        request.slo = Slo(*(limits[int(n)] for n in rng.integers(len(limits), size=2)))
        return request

    with patch.object(simulation.ledger, "request", with_slo):
        served = simulation.run()
    assert np.isfinite(served.finished).all() and pool.num_free == 24
    assert (served.jct < 60).all()


def test_reading_long_contexts_leaves_less_of_a_step_to_prompts_but_throttles_no_more_requests():
    """10 ms a step, 2 ms a token, and 1 ms per 100 positions: three requests of 333 positions read for 10 ms."""
    times, prompt = StepTimes(TIMES, 10e-6), Request("p", 100, [0] * 100, 10, 0.0)
    for kind in ("fcfs", "stta"):
        for output, room in ((1, 6), (330, 2)):
            requests = [decoding(i, 0.03, output) for i in range(3)]
            assert made(kind, times).choose(requests, prompt, 0.0).prompt_tokens == room
    plateau = StepTimes({n: 10e-3 for n in (1, 256)}, 10e-6)
    for kind in THROTTLING:
        requests = [decoding(i, 0.012, 330) for i in range(64)]
        assert not made(kind, plateau).choose(requests, None, 0.0).throttled
