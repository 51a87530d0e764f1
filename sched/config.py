"""The limits that a scheduler keeps, and the policy it follows."""

from __future__ import annotations

from dataclasses import dataclass, field

from jaxspec.sched.pages import PagePool
from jaxspec.sched.policy import PolicyConfig
from jaxspec.sched.request import Request
from jaxspec.sched.steptimes import StepTimes
from jaxspec.sched.swapcosts import SwapCosts


@dataclass(frozen=True, slots=True)
class SchedulerConfig:
    """Limits of one step (requests, tokens, logit slots), of one request and of the queue. Raises `ValueError`.

    A step has at least one token and one logit slot for each request it may run: that is what lets every decoding
    request advance in every step while the oldest prefill still moves. `max_waiting=None` means an unbounded queue.
    """

    max_num_seqs: int
    max_num_batched_tokens: int
    max_model_len: int
    max_waiting: int | None
    max_logit_slots: int
    policy: PolicyConfig = field(default_factory=PolicyConfig)
    #: Host pages that KV may be swapped to, of the size of the pool's; 0: nothing is swapped.
    host_pages: int = 0
    #: Whether KV comes back from the host as it was. If not, it is not offered to other requests' prefixes.
    exact_swap: bool = True
    #: What swapping and computing anew take; None: not known, then what fits the host is swapped.
    costs: SwapCosts | None = None
    #: Pages that a plan moves ahead of need, each way, unless one request has more: what a step can bear beside its own
    #: work. None: any number.
    swap_pages: int | None = None
    #: What steps take; None: not known, then there is no pace.
    times: StepTimes | None = None

    def __post_init__(self) -> None:
        for name in ("max_num_seqs", "max_model_len"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")
        for name in ("max_num_batched_tokens", "max_logit_slots"):
            if getattr(self, name) < self.max_num_seqs:
                raise ValueError(f"{name} ({getattr(self, name)}) must be at least max_num_seqs ({self.max_num_seqs})")
        if self.host_pages < 0:
            raise ValueError(f"host_pages must not be negative, got {self.host_pages}")
        if self.max_waiting is not None and self.max_waiting < 0:
            raise ValueError(f"max_waiting must not be negative, got {self.max_waiting}")

    def check(self, request: Request, pool: PagePool) -> None:
        """Raise `ValueError` if a new request could never run to its end."""
        longest = request.prompt_len + request.max_tokens
        if request.prompt_len < 1 or request.prompt_len != len(request.tokens) or request.max_tokens < 1:
            raise ValueError("a request starts with a prompt of at least one token and asks for at least one more")
        if longest > self.max_model_len:
            raise ValueError(f"prompt and max_tokens are {longest} tokens, the limit is {self.max_model_len}")
        if pool.pages_for(longest) > pool.num_pages:
            room = pool.num_pages * pool.page_size
            raise ValueError(f"prompt and max_tokens are {longest} tokens, the KV pool holds {room}")
