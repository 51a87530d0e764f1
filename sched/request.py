"""A request as the scheduler sees it: token ids, progress, pages."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

from jaxspec.sched.slo import NONE, Slo

#: Stands in `Request.tokens` for a token that a step under way is sampling (`Scheduler.advance`). If that step also
#: verifies drafts, it stands for the last of the new tokens, and up to `Request.pending_drafts` more come before it.
UNKNOWN = -1
#: (most tokens, guess) -> a draft that its grammar forces or `guess` continues: (token, stated chance) of each.
Forced = Callable[[int, Callable[[Sequence[int]], tuple[int, float] | None]], Sequence[tuple[int, float]]]


class RequestStatus(Enum):
    WAITING = "waiting"
    RUNNING = "running"
    #: Waiting with its pages: it lost its slot to others.
    PAUSED = "paused"
    #: Waiting with its KV in host memory.
    SWAPPED = "swapped"
    #: Ended by itself: at max_tokens, a stop token or a stop string.
    FINISHED = "finished"
    #: Ended by `Scheduler.cancel`.
    CANCELLED = "cancelled"


@dataclass(slots=True, eq=False, weakref_slot=True)
class Request:
    """`tokens` is prompt and output; the KV of the first `computed` tokens is committed, in `pages`.

    A step computes tokens `computed … computed + n`. If it reaches the end of `tokens`, it samples a new token there.
    So prefill, chunked prefill, decoding (n = 1) and recomputation after a preemption are the same. Invariant between
    steps: computed < len(tokens).
    """

    id: str
    prompt_len: int
    tokens: list[int]
    max_tokens: int
    arrival: float
    priority: int = 0
    #: Output tokens at the end of `tokens` that it had on arrival: another engine has generated them.
    resumed: int = 0
    #: Seconds that it has waited elsewhere; they count for aging.
    waited: float = 0.0
    #: Its latency SLOs.
    slo: Slo = NONE
    #: Whose it is, such as a hash of the API key. Drafts for one tenant are never made of another's answers.
    tenant: str = ""
    #: `Constraint.forced` of its structured output; None: it has none.
    forced: Forced | None = field(default=None, repr=False)
    #: False if the logits of every prompt token are needed, which a cached prefix would skip.
    reuse_prefix: bool = True
    #: Whether logits of all prompt positions are read (echo with logprobs).
    prompt_logprobs: bool = False
    #: Predicted output tokens; None: not known yet. Advisory; doubled when the output exceeds it.
    predicted_len: float | None = None
    #: The first prediction; it may exceed max_tokens. Later ones already know part of the output.
    first_prediction: float | None = None
    #: Later predictions: output tokens at the time, and how many were expected still to come.
    repredicted: list[tuple[int, float]] = field(default_factory=list[tuple[int, float]])
    #: Median and 90 % quantile of the output length, as known at the first prediction.
    predicted_quantiles: tuple[float, float] | None = None
    #: True output length, for oracles in benchmarks and the simulator.
    true_len: int | None = None
    #: True acceptance rate, likewise.
    true_acceptance: float | None = None

    status: RequestStatus = RequestStatus.WAITING
    #: How many of `tokens` have committed KV.
    computed: int = 0
    #: Device pages with that KV, and those reserved for the current step.
    pages: list[int] = field(default_factory=list[int])
    #: Most draft tokens that its step under way may accept: tokens before the one that is `UNKNOWN`.
    pending_drafts: int = 0
    #: Host pages with the KV of its `computed` tokens while it is swapped.
    host_pages: list[int] = field(default_factory=list[int])
    #: Prefix-cache keys of the leading full pages of `tokens`; still valid after a preemption.
    page_keys: list[bytes] = field(default_factory=list[bytes])
    #: How many of `pages` are in the prefix cache.
    registered: int = 0
    #: Prompt tokens found in the prefix cache at the first admission.
    cached_tokens: int = 0
    #: How often it was preempted: it lost its pages.
    preemptions: int = 0
    #: Preemptions that moved its KV to the host.
    swaps: int = 0
    #: How often it was paused: it lost only its slot.
    pauses: int = 0
    #: Tokens computed again after preemptions.
    recomputed: int = 0
    #: Tokens whose KV was lost by preemption and has to be computed again; None after the next new token.
    recompute_until: int | None = None
    #: Position in order of arrival, set by the scheduler.
    number: int = 0
    #: Attained service (LAPS-SD): seconds of its steps after the first token, drafting included.
    attained: float = 0.0
    #: Draft tokens verified so far.
    proposed: int = 0
    #: Draft tokens accepted so far.
    accepted: int = 0
    #: Values that policies and drafters keep (`jaxspec.sched.per_request`).
    kept: dict[Any, Any] = field(default_factory=dict[Any, Any], repr=False)
    #: When it was first part of a step.
    first_scheduled: float | None = None
    #: When its first token was sampled.
    first_token: float | None = None

    def lose_kv(self) -> None:
        """Back to a waiting request without KV and pages, after a failure. What policies keep of it is dropped."""
        if self.computed:
            self.recompute_until = max(self.recompute_until or 0, self.computed)
            self.preemptions += 1
        self.status, self.computed, self.registered, self.pending_drafts = RequestStatus.WAITING, 0, 0, 0
        self.pages, self.host_pages, self.page_keys = [], [], []
        self.kept.clear()

    @property
    def ended(self) -> bool:
        """Whether it has finished or was cancelled."""
        return self.status is RequestStatus.FINISHED or self.status is RequestStatus.CANCELLED

    @property
    def remaining_known(self) -> int:
        """Known tokens whose KV is not committed; 1 while decoding."""
        return len(self.tokens) - self.computed

    @property
    def output_len(self) -> int:
        """Output tokens so far."""
        return len(self.tokens) - self.prompt_len

    @property
    def num_known(self) -> int:
        """Tokens without one that is `UNKNOWN`."""
        return len(self.tokens) - (self.tokens[-1] == UNKNOWN)

    @property
    def most_output(self) -> int:
        """Output tokens if the step under way accepts all its drafts."""
        return self.output_len + self.pending_drafts

    @property
    def most_known(self) -> int:
        """Tokens if the step under way accepts all its drafts."""
        return len(self.tokens) + self.pending_drafts

    @property
    def new_len(self) -> int:
        """Output tokens so far that it did not have on arrival."""
        return self.output_len - self.resumed

    @property
    def expected_len(self) -> float:
        """Predicted output tokens; max_tokens without a prediction."""
        return self.max_tokens if self.predicted_len is None else self.predicted_len

    @property
    def decoding(self) -> bool:
        """Whether only its last token, an output token, has no KV."""
        return self.computed + 1 == len(self.tokens) > self.prompt_len
