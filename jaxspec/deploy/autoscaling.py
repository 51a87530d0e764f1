"""How many replicas a deployment needs: by the tokens that wait and by the SLOs that are met."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from math import ceil
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, PositiveFloat, PositiveInt


class ScalingSettings(BaseModel):
    """When replicas are added and taken away. Delays and limits are those of Ray Serve's `autoscaling_config`."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    #: Tokens that may wait per replica: prompt tokens to compute and output tokens expected of requests without a slot.
    target_waiting_tokens: PositiveFloat = 4096.0
    #: Share of the requests with an SLO that must meet it, and how many must have finished for it to count.
    target_attainment: float = Field(default=0.9, gt=0, le=1)
    least_finished: PositiveInt = 20
    #: A decision has at most this many times the replicas.
    most_growth: float = Field(default=2.0, gt=1)
    #: A replica is taken away if the others then have at most this share of their slots taken, and nothing waits.
    occupancy_after: float = Field(default=0.7, gt=0, lt=1)


@dataclass(frozen=True, slots=True)
class ReplicaLoad:
    """Load of one replica. occupancy: its requests / its slots. The SLO counts are of the last minute."""

    waiting_tokens: float = 0.0
    occupancy: float = 0.0
    slo_finished: float = 0.0
    slo_attained: float = 0.0


def wanted(loads: Sequence[ReplicaLoad], replicas: int, settings: ScalingSettings) -> int:
    """The number of replicas for this load. `replicas`: how many there are, `loads`: of those that report."""
    if not loads or replicas < 1:
        return replicas
    # Replicas that do not report yet are as loaded as the others.
    waiting = sum(load.waiting_tokens for load in loads) / len(loads) * replicas
    most = max(replicas + 1, int(replicas * settings.most_growth))
    if waiting > settings.target_waiting_tokens * replicas:
        return min(most, ceil(waiting / settings.target_waiting_tokens))
    finished = sum(load.slo_finished for load in loads)
    attained = sum(load.slo_attained for load in loads)
    counts = finished >= settings.least_finished
    if counts and attained < settings.target_attainment * finished:
        return replicas + 1
    occupied = sum(load.occupancy for load in loads) / len(loads) * replicas
    # Half of the target: else the replica would be wanted back at once.
    fits = occupied <= settings.occupancy_after * (replicas - 1)
    if replicas > 1 and fits and waiting <= settings.target_waiting_tokens / 2 * (replicas - 1):
        return replicas - 1
    return replicas


class Scaling:
    """`wanted` as a policy of Ray Serve: `policy_function: jaxspec.deploy.autoscaling:Scaling`, with the settings as
    `policy_kwargs`."""

    def __init__(self, **settings: Any) -> None:
        self._settings = ScalingSettings(**settings)

    def __call__(self, context: Any) -> tuple[int, dict[str, Any]]:
        """The number of replicas, and no state. `context`: Ray Serve's `AutoscalingContext`."""
        loads = loads_of(context.aggregated_metrics or {})
        return wanted(loads, context.current_num_replicas, self._settings), {}


def loads_of(metrics: Mapping[str, Mapping[Any, float]]) -> list[ReplicaLoad]:
    """The loads in Ray Serve's metrics, which are by name and then by replica."""
    names = [field.name for field in fields(ReplicaLoad)]
    found: dict[Any, dict[str, float]] = {}
    for name in names:
        for replica, value in metrics.get(name, {}).items():
            found.setdefault(replica, {})[name] = value
    return [ReplicaLoad(**values) for values in found.values() if len(values) == len(names)]
