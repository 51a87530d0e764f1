"""Transfers in the simulator: parallel to steps, one at a time in each direction, and only their requests wait."""

from __future__ import annotations

import numpy as np
import pytest

from jaxspec.sched import (
    PagePool,
    Plan,
    PolicyConfig,
    Request,
    ScheduledRequest,
    Scheduler,
    SchedulerConfig,
    SwapCosts,
    Transfer,
)
from jaxspec.sched.sim.cost import OPT_V100, Linear, Roofline, StepLoad, load_cost
from jaxspec.sched.sim.link import Link
from jaxspec.sched.sim.simulator import Served, Simulation
from jaxspec.sched.sim.workload import Workload

COSTS = SwapCosts(offload_page=2.0, upload_page=3.0, prefill_token=0.1, decode_step=1.0)


def request(*pages: int) -> Request:
    return Request("r", 1, [0, 0], 9, 0.0, pages=list(pages), computed=1)


def scheduled(*pages: int) -> tuple[ScheduledRequest, ...]:
    return (ScheduledRequest(request(*pages), 1, 1),)


def moved(device: tuple[int, ...], host: tuple[int, ...]) -> tuple[Transfer, ...]:
    return (Transfer(request(), device, host),)


def test_a_step_waits_for_uploads_to_its_own_pages_only():
    link = Link(COSTS)
    plan = Plan(scheduled(7, 8), upload=moved((1, 2), (0, 1)))
    link.start(plan, 10.0)
    assert link.ready(plan, 10.0) == 10.0
    assert link.ready(Plan(scheduled(2)), 12.0) == 16.0
    assert link.ready(Plan(scheduled(1)), 12.0) == 13.0
    assert link.ready(Plan(scheduled(1, 2)), 17.0) == 17.0
    assert link.moved == 2


def test_a_page_is_free_for_others_when_it_has_left():
    link = Link(COSTS)
    plan = Plan(scheduled(4), offload=moved((3, 4), (0, 1)))
    link.start(plan, 0.0)
    assert link.ready(plan, 0.0) == 4.0 and link.ready(Plan(scheduled(3)), 0.0) == 2.0


def test_transfers_queue_each_way_and_what_comes_back_has_first_to_have_left():
    link = Link(COSTS)
    link.start(Plan((), offload=moved((0,), (0,))), 0.0)
    link.start(Plan((), offload=moved((1,), (1,)), upload=moved((5,), (9,))), 1.0)
    assert link.ready(Plan(scheduled(1)), 1.0) == 4.0 and link.ready(Plan(scheduled(5)), 1.0) == 4.0
    # To page 1, which is leaving until 4, and after the other upload, which ends then too.
    link.start(Plan((), upload=moved((1,), (0,))), 1.5)
    assert link.ready(Plan(scheduled(1)), 1.5) == 7.0
    link.start(Plan(()), 20.0)
    assert link.ready(Plan(scheduled(1)), 20.0) == 20.0


def simulate(memory: str, costs: SwapCosts = COSTS, host: int = 64, order: str = "fcfs") -> Served:
    policy = PolicyConfig.model_validate({"order": order, "memory": memory, "predictor": "oracle"})
    config = SchedulerConfig(4, 64, 200, None, 64, policy, host, True, costs)
    n = 30
    rng = np.random.default_rng(0)
    jobs = Workload(np.sort(rng.uniform(0, 60, n)), rng.integers(4, 40, n), rng.integers(5, 80, n), np.full(n, np.nan))
    scheduler = Scheduler(config, PagePool(14, 16, enable_prefix_caching=False))
    return Simulation(scheduler, jobs, Linear(1.0, token=0.1)).run()


@pytest.mark.parametrize("order", ["fcfs", "alise"])
def test_swapping_for_free_beats_recomputing_which_beats_swapping_at_any_price(order: str):
    free, dear = SwapCosts(0.0, 0.0, 0.1, 1.0), SwapCosts(40.0, 40.0, 0.1, 1.0)
    swap, again, slow, auto = (
        simulate("swap", free, order=order), simulate("recompute", order=order), simulate("swap", dear, order=order),
        simulate("auto", dear, order=order),
    )  # fmt: skip
    assert swap.swaps > 5 and swap.moved > 10 and swap.stalled == swap.recomputed == 0 < again.recomputed
    assert swap.busy < again.busy and swap.duration <= again.duration < slow.duration
    assert slow.stalled > 0 and (auto.swaps, auto.duration) == (0, pytest.approx(again.duration, rel=0.05))


def test_deferring_recomputes_nothing():
    served = simulate("defer", order="alise")
    assert served.recomputed == served.swaps == served.preemptions.sum() == 0


def test_waiting_for_transfers_is_no_work():
    served = simulate("swap")
    assert served.stalled > 0 and served.busy + served.stalled <= served.duration + 1e-6


def test_opt_on_a_v100():
    machine = OPT_V100["opt-13b"]
    # The weights at 720 GB/s; a prompt of 1,000 tokens is bound by arithmetic.
    assert machine.cost.seconds(StepLoad(1)) == pytest.approx(0.0357, rel=0.01)
    assert machine.cost.seconds(StepLoad(1000)) == pytest.approx(0.411, rel=0.01)
    small = machine.with_kv(0.5)
    assert 4500 < machine.positions < 5200 and small.positions == pytest.approx(2 * machine.positions, abs=1)
    # Half the bytes are stored, moved and read.
    assert small.cost.position == machine.cost.position / 2 and small.cost.weights == machine.cost.weights
    costs = machine.swap_costs(16)
    assert costs.upload_page == pytest.approx(16 * 819_200 / 12.6e9) and costs.prefill_token == machine.cost.token
    assert small.swap_costs(16).upload_page == costs.upload_page / 2
    assert isinstance(load_cost("opt-13b-v100"), Roofline)
