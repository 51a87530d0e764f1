"""The host scheduler in pure Python: the engine drives it with the wall clock, a simulator with a virtual one."""

from jaxspec.sched.config import SchedulerConfig
from jaxspec.sched.pages import OutOfPages, PagePool
from jaxspec.sched.plan import Outcome, Plan, Work
from jaxspec.sched.policy import PolicyConfig
from jaxspec.sched.request import Request, State
from jaxspec.sched.scheduler import QueueFull, Scheduler

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
    "Work",
]
