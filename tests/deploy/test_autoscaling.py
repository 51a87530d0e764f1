"""How many replicas are wanted, and that Ray Serve's metrics are read."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from jaxspec.deploy.autoscaling import ReplicaLoad, Scaling, ScalingSettings, loads_of, wanted

SETTINGS = ScalingSettings(target_waiting_tokens=1000, target_attainment=0.9, least_finished=10)
IDLE = ReplicaLoad()
BUSY = ReplicaLoad(occupancy=0.9)

loads = st.builds(
    ReplicaLoad, waiting_tokens=st.floats(0, 1e6), occupancy=st.floats(0, 5), slo_finished=st.integers(0, 99),
    slo_attained=st.integers(0, 99),
)  # fmt: skip


@pytest.mark.parametrize(
    ("each", "expected", "why"),
    [
        ([BUSY], 1, "one replica stays"),
        ([BUSY, BUSY], 2, "busy, but nothing waits"),
        ([ReplicaLoad(1001, 1)], 2, "more waits than should"),
        ([ReplicaLoad(1500, 1), ReplicaLoad(1400, 1)], 3, "as many as the waiting tokens ask for"),
        ([ReplicaLoad(1e6, 1)] * 4, 8, "at most twice as many"),
        ([ReplicaLoad(0, 0.9, 20, 17)], 2, "SLOs are missed"),
        ([ReplicaLoad(0, 0.9, 9, 0)], 1, "too few have finished to tell"),
        ([IDLE, ReplicaLoad(0, 0.1, 20, 17)], 3, "missed SLOs count before idleness"),
        ([IDLE, IDLE, IDLE], 2, "one goes at a time"),
        ([ReplicaLoad(0, 0.5)] * 3, 3, "the others would have too many"),
        ([ReplicaLoad(0, 0.4)] * 3, 2, "the others have room"),
        ([ReplicaLoad(600, 0.1)] * 2, 2, "the waiting tokens would want it back"),
        ([IDLE], 1, "never none"),
        ([], 3, "nothing is known"),
    ],
)
def test_cases(each: list[ReplicaLoad], expected: int, why: str) -> None:
    assert wanted(each, len(each) or 3, SETTINGS) == expected, why


def test_replicas_that_do_not_report_count_like_the_others() -> None:
    assert wanted([ReplicaLoad(900, 1)], 4, SETTINGS) == 4
    assert wanted([ReplicaLoad(1100, 1)], 4, SETTINGS) == 5


@given(st.lists(loads, min_size=1, max_size=9), st.floats(1, 1e5))
def test_more_waiting_never_means_fewer(each: list[ReplicaLoad], more: float) -> None:
    now = wanted(each, len(each), SETTINGS)
    assert 1 <= now <= max(2 * len(each), len(each) + 1) and now >= len(each) - 1
    grown = replace(each[0], waiting_tokens=each[0].waiting_tokens + more)
    assert wanted([grown, *each[1:]], len(each), SETTINGS) >= min(now, len(each))


def test_as_a_policy_of_ray_serve() -> None:
    metrics = {
        "waiting_tokens": {"a": 3000.0, "b": 0.0}, "occupancy": {"a": 1.0, "b": 1.0},
        "slo_finished": {"a": 0.0, "b": 0.0}, "slo_attained": {"a": 0.0},
    }  # fmt: skip
    assert loads_of(metrics) == [ReplicaLoad(3000.0, 1.0)], "b has not reported everything"
    policy = Scaling(target_waiting_tokens=1000)
    assert policy(SimpleNamespace(aggregated_metrics=metrics, current_num_replicas=2)) == (4, {})
    assert policy(SimpleNamespace(aggregated_metrics=None, current_num_replicas=2)) == (2, {})
    with pytest.raises(ValidationError, match="target_tokens"):
        Scaling(target_tokens=1)
