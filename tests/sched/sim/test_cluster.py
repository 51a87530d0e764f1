"""Clusters in the simulator: one replica is the plain simulation, several share the work, slow ones are left out."""

from __future__ import annotations

from random import Random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxspec.sched import PagePool, PolicyConfig, Scheduler, SchedulerConfig
from jaxspec.sched.plan import Lookahead, Plan
from jaxspec.sched.routing import Health, HealthSettings, Router, make_routing, routing_names
from jaxspec.sched.scheduler import NO_DRAFTS
from jaxspec.sched.sim.cluster import Change, Cluster, ClusterServed
from jaxspec.sched.sim.cost import Linear, Scaled, step_times
from jaxspec.sched.sim.ledger import Ledger
from jaxspec.sched.sim.prompts import Prompts, shared
from jaxspec.sched.sim.simulator import Served, Simulation, Stuck
from jaxspec.sched.sim.workload import Workload
from jaxspec.sched.slo import Slo

COST = Linear(step=0.02, token=0.001)
FCFS, HEALTH = PolicyConfig(), HealthSettings()
PAGE, ROOM = 16, 4096


def scheduler(policy: PolicyConfig, pages: int = ROOM // PAGE, cache: bool = False, slots: int = 4) -> Scheduler:
    limits = SchedulerConfig(slots, 64, ROOM, None, 64, policy, times=step_times(COST, 64))
    return Scheduler(limits, PagePool(pages, PAGE, enable_prefix_caching=cache))


def workload(rows: list[tuple[float, int, int]], prompts: Prompts | None = None) -> Workload:
    arrival, inputs, outputs = (np.array(column) for column in zip(*sorted(rows), strict=True))
    return Workload(arrival.astype(float), inputs, outputs, np.full(len(rows), np.nan), prompts=prompts)


def cluster(
    work: Workload, count: int, routing: str = "round_robin", policy: PolicyConfig = FCFS,
    cache: bool = False, pages: int = ROOM // PAGE, interval: float = 0.1, changes: tuple[Change, ...] = (),
    health: HealthSettings = HEALTH, settings: dict[str, float] | None = None, slots: int = 4,
) -> Cluster:  # fmt: skip
    ledger = Ledger(work, pages * PAGE, Slo(ttft=1.0))
    parts = [Simulation(scheduler(policy, pages, cache, slots), work, COST, ledger=ledger) for _ in range(count)]
    router = Router(make_routing(routing, Random(0), settings), Health(health))
    return Cluster(parts, ledger, router, interval, changes)


def poisson(count: int, rate: float, seed: int = 0, output: int = 20) -> list[tuple[float, int, int]]:
    rng = np.random.default_rng(seed)
    times = np.cumsum(rng.exponential(1 / rate, count))
    return [(float(t), int(rng.integers(1, 80)), 1 + int(rng.integers(1, 2 * output))) for t in times]


def assert_same(one: Served, other: Served) -> None:
    for name in Served.__dataclass_fields__:
        if name != "workload":
            np.testing.assert_array_equal(getattr(one, name), getattr(other, name), name)


# Times in tenths: many arrive together, and while a step ends.
rows = st.lists(
    st.tuples(st.integers(0, 60).map(lambda t: t / 50), st.integers(1, 60), st.integers(1, 30)), min_size=1, max_size=20
)
policies = st.sampled_from([
    PolicyConfig(), PolicyConfig(order="srpt", predictor="noisy_oracle", policy_seed=3),
    PolicyConfig(batching="dynamic", max_batch_size=3, batch_wait_timeout_ms=70), PolicyConfig(order="las"),
    PolicyConfig(aging_ms=100, order="sjf", predictor="oracle"),
])  # fmt: skip


@given(rows, policies, st.sampled_from(routing_names()), st.integers(8, 40))
@settings(max_examples=60, deadline=None)
def test_one_replica_is_the_plain_simulation(
    rows: list[tuple[float, int, int]], policy: PolicyConfig, routing: str, pages: int
) -> None:
    work = workload(rows)
    plain = Simulation(scheduler(policy, pages), work, COST, slo=Slo(ttft=1.0)).run()
    found = cluster(work, 1, routing, policy, pages=pages).run()
    assert_same(found.served, plain)
    assert found.replica.tolist() == [0] * len(work) and found.decisions == len(work)
    assert found.imbalance == 1.0


@given(rows, policies, st.sampled_from(routing_names()), st.integers(2, 5))
@settings(max_examples=40, deadline=None)
def test_every_request_is_served_once_by_some_replica(
    rows: list[tuple[float, int, int]], policy: PolicyConfig, routing: str, count: int
) -> None:
    work, percents = workload(rows), [0]
    found = cluster(work, count, routing, policy).run(lambda: percents.append(1))
    served = found.served
    assert sum(percents) == 100
    assert (served.first_token > work.arrival).all() and (served.finished >= served.first_token).all()
    assert set(found.replica.tolist()) <= set(range(count))
    # Each replica's requests alone, at the same times, are served the same.
    for i in range(count):
        own = [row for row, at in zip(sorted(rows), found.replica.tolist(), strict=True) if at == i]
        if own and policy.predictor == "none":
            alone = Simulation(scheduler(policy), workload(own), COST, slo=Slo(ttft=1.0)).run()
            np.testing.assert_allclose(np.sort(alone.finished), np.sort(served.finished[found.replica == i]))


def test_round_robin_takes_turns() -> None:
    found = cluster(workload(poisson(20, 5)), 4).run()
    assert found.replica.tolist() == [0, 1, 2, 3] * 5


def mean_ttft(found: ClusterServed) -> float:
    return float((found.served.first_token - found.served.workload.arrival).mean())


def test_knowing_the_load_shortens_the_wait() -> None:
    work = workload(poisson(400, 22))
    predicting = PolicyConfig(predictor="oracle")
    found = {name: mean_ttft(cluster(work, 4, name, predicting).run()) for name in routing_names()}
    assert found["predicted"] < found["power_of_two"] < found["round_robin"]
    assert found["least_loaded"] < found["round_robin"]


def test_shared_prefixes_are_found_where_they_were_computed() -> None:
    rng = np.random.default_rng(0)
    rows = poisson(160, 8)
    inputs, prompts = shared([n for _, n, _ in rows], 8, 96, rng)
    work = workload([(t, n, m) for (t, _, m), n in zip(rows, inputs.tolist(), strict=True)], prompts)
    policy = PolicyConfig(predictor="oracle")
    found = {
        name: cluster(work, 4, name, policy, cache=True).run() for name in ("round_robin", "prefix_aware", "predicted")
    }
    hits = {name: one.hit_share for name, one in found.items()}
    assert 0 < hits["round_robin"] < hits["prefix_aware"]
    assert hits["round_robin"] < hits["predicted"]
    assert mean_ttft(found["predicted"]) < mean_ttft(found["round_robin"])


def test_a_slow_replica_gets_few_requests_and_comes_back() -> None:
    work = workload(poisson(800, 20))
    slow = (Change(4.0, 1, Scaled(COST, 10.0)), Change(18.0, 1, COST))
    policy = PolicyConfig(predictor="oracle")
    for routing in ("round_robin", "predicted"):
        ill = cluster(work, 4, routing, policy, changes=slow, health=HealthSettings(out_for=3.0)).run()
        before, during, after = (
            float((ill.replica[(work.arrival >= low) & (work.arrival < high)] == 1).mean())
            for low, high in ((0, 4), (11, 18), (30, 40))
        )
        assert before == pytest.approx(0.25, abs=0.06) and during < 0.05 and after > 0.15
        patient = cluster(work, 4, routing, policy, changes=slow, health=HealthSettings(slow_factor=1e9)).run()
        # The policy that forecasts avoids the replica anyway.
        assert mean_ttft(ill) < {"round_robin": 0.8, "predicted": 1.2}[routing] * mean_ttft(patient)


def test_a_cluster_needs_replicas_that_share_its_ledger() -> None:
    work = workload(poisson(3, 5))
    ledger = Ledger(work, ROOM)
    router = Router(make_routing("round_robin", Random(0)))
    with pytest.raises(ValueError, match="share"):
        Cluster([Simulation(scheduler(PolicyConfig()), work, COST)], ledger, router)
    with pytest.raises(ValueError, match="a replica"):
        Cluster([], ledger, router)
    with pytest.raises(ValueError, match="positive"):
        Cluster([Simulation(scheduler(PolicyConfig()), work, COST, ledger=ledger)], ledger, router, interval=0.0)


def test_a_replica_that_never_plans_is_a_bug() -> None:
    class Idle(Scheduler):
        def plan(self, now: float, lookahead: Lookahead = NO_DRAFTS) -> Plan:
            return Plan(())

    work = workload([(0.0, 4, 4)])
    ledger, inner = Ledger(work, ROOM), scheduler(PolicyConfig())
    part = Simulation(Idle(inner.config, inner.pool), work, COST, ledger=ledger)
    with pytest.raises(Stuck, match="1 requests wait"):
        Cluster([part], ledger, Router(make_routing("round_robin", Random(0)))).run()
