"""The host scheduler in pure Python: the engine drives it with the wall clock, a simulator with a virtual one."""

from jaxspec.sched.config import SchedulerConfig
from jaxspec.sched.pages import OutOfPages, PagePool
from jaxspec.sched.plan import Outcome, Plan, Transfer, Work
from jaxspec.sched.policy import PolicyConfig
from jaxspec.sched.request import Request, State
from jaxspec.sched.scheduler import QueueFull, Scheduler
from jaxspec.sched.swapcosts import SwapCosts

__all__ = [
    "OutOfPages",
    "Outcome",
    "PagePool",
    "Plan",
    "PolicyConfig",
    "QueueFull",
    "Request",
    "Scheduler",
    "SchedulerConfig",
    "State",
    "SwapCosts",
    "Transfer",
    "Work",
]
