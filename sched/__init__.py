"""The host scheduler in pure Python: the engine drives it with the wall clock, a simulator with a virtual one."""

from jaxspec.sched.config import PolicyConfig, SchedulerConfig
from jaxspec.sched.kv.page_pool import OutOfPages, PagePool
from jaxspec.sched.plan import Plan, RequestResult, ScheduledRequest, Transfer
from jaxspec.sched.request import Request, RequestStatus
from jaxspec.sched.scheduler import QueueFull, Scheduler
from jaxspec.sched.timing import SwapCosts

__all__ = [
    "OutOfPages",
    "PagePool",
    "Plan",
    "PolicyConfig",
    "QueueFull",
    "Request",
    "RequestResult",
    "RequestStatus",
    "ScheduledRequest",
    "Scheduler",
    "SchedulerConfig",
    "SwapCosts",
    "Transfer",
]
