"""Which replicas a policy is offered."""

from __future__ import annotations

from random import Random

import pytest

from helpers.fake_fleet import InTurn
from jaxspec.deploy.choice import Choice
from jaxspec.sched.routing import Health, HealthSettings, NoReplica, Replica, ReplicaReport, RoutedRequest
from jaxspec.sched.routing.health import HealthState
from jaxspec.sched.slo import NONE, Slo


def reporting(name: str, time: float) -> Replica:
    return Replica(name, ReplicaReport(time, 0, 0, 8, 0, 0.0, 0.001, 0.01))


def request(id: str = "x", slo: Slo = NONE) -> RoutedRequest:
    return RoutedRequest(id, 4, 8, slo=slo)


def test_replicas_that_a_request_has_tried_are_left_out() -> None:
    tried = {"x": {"a"}, "y": {"a", "b"}}
    choice = Choice(InTurn(None, Random(0)), Health(), lambda id: tried.get(id, ()))
    replicas = [Replica("a"), Replica("b")]
    assert [choice.choose(request(id), replicas, 0.0).name for id in ("z", "x")] == ["a", "b"]
    with pytest.raises(NoReplica):
        choice.choose(request("y"), replicas, 0.0)


def test_a_replica_on_probation_gets_a_request() -> None:
    health = Health(HealthSettings(silent_after=3.0, out_for=1.0))
    choice = Choice(InTurn(None, Random(0)), health, lambda id: ())
    a, b = reporting("a", 10.0), reporting("b", 0.0)
    health.check([a, b], 10.0)
    assert health.state(b) is HealthState.OUT and health.available([a, b]) == [a]
    b.update(ReplicaReport(12.0, 0, 0, 8, 0, 0.0, 0.001, 9.0))  # its last step was long
    health.check([a, b], 12.0)
    assert health.state(b) is HealthState.PROBATION
    assert choice.choose(request(), health.available([a, b]), 12.0) is b
    assert choice.choose(request(slo=Slo(tpot=1.0)), health.available([a, b]), 12.0) is a
