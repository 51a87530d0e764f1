"""Orders: which request goes first, and whether it preempts. One policy per file."""

from __future__ import annotations

from jaxspec.sched.config import PolicyConfig
from jaxspec.sched.order.aging import Aging
from jaxspec.sched.order.alise import Alise
from jaxspec.sched.order.fcfs import Fcfs
from jaxspec.sched.order.laps_sd import LapsSd
from jaxspec.sched.order.las import Las
from jaxspec.sched.order.order import Order
from jaxspec.sched.order.pairwise import OracleComparator, Pairwise
from jaxspec.sched.order.priority import Priority
from jaxspec.sched.order.sjf import Sjf
from jaxspec.sched.timing import Runtime

__all__ = [
    "Aging",
    "Alise",
    "Fcfs",
    "LapsSd",
    "Las",
    "OracleComparator",
    "Order",
    "Pairwise",
    "Priority",
    "Sjf",
    "build",
]


def build(policy: PolicyConfig, runtime: Runtime) -> Order:
    """The order that `policy.order` names, without aging. `runtime` estimates execution times; only ALISE uses it."""
    match policy.order:
        case "fcfs":
            return Fcfs()
        case "sjf":
            return Sjf()
        case "pairwise":
            return Pairwise(OracleComparator(policy.pairwise.error_rate, policy.policy_seed))
        case "priority":
            return Priority(policy.priority.preemptive)
        case "las":
            return Las(policy.las.quantum_ms / 1000)
        case "laps_sd":
            return LapsSd(policy.laps_sd)
        case "alise":
            return Alise(policy.alise, runtime)
