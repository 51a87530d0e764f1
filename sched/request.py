"""A request as the scheduler sees it: token ids, progress and the pages it holds."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum

from jaxspec.sched.slo import NONE, Slo


class RequestStatus(Enum):
    WAITING = "waiting"
    RUNNING = "running"
    #: Waiting for its turn with its pages: others go before it.
    PAUSED = "paused"
    #: Waiting with its KV on the host.
    SWAPPED = "swapped"
    FINISHED = "finished"


@dataclass(slots=True, eq=False)
class Request:
    """`tokens` is prompt and output together; `computed` of them have their KV committed, in `pages`.

    A step computes tokens `computed … computed + n`. When it reaches the end of `tokens`, the choice at the last one is
    a new token: so prefill, chunked prefill, plain decoding (n = 1) and recomputing after a preemption are the same
    thing. Invariant between steps: computed < len(tokens).
    """

    id: str
    prompt_len: int
    tokens: list[int]
    max_tokens: int
    arrival: float
    priority: int = 0
    #: Its latency targets.
    slo: Slo = NONE
    #: False for requests that need the logits of every prompt token, which a cached prefix would skip.
    reuse_prefix: bool = True
    #: Prompt positions whose choice is read too (echo with logprobs).
    prompt_logprobs: bool = False
    #: Output tokens it will write, as predicted; None: not known yet. Advisory, doubled when outlived.
    predicted_len: float | None = None
    #: The first that was predicted, as far as it may write so much; what came later knew how far it had got.
    first_prediction: float | None = None
    #: Output tokens it will write, and the share of its draft tokens that will be accepted, where somebody knows:
    #: benchmarks and simulators, for the oracles.
    true_len: int | None = None
    true_acceptance: float | None = None

    status: RequestStatus = RequestStatus.WAITING
    computed: int = 0
    pages: list[int] = field(default_factory=list)
    #: Host pages that hold the KV of its `computed` tokens while it is swapped out.
    host_pages: list[int] = field(default_factory=list)
    #: Prefix-cache keys of the leading full pages of `tokens`; they stay true when the request is preempted.
    page_keys: list[bytes] = field(default_factory=list)
    #: How many of `pages` came from the prefix cache or have been offered to it.
    registered: int = 0
    #: Prompt tokens that the prefix cache spared at the first admission.
    cached_tokens: int = 0
    #: Times it lost its pages, to the host (swaps) or for good, times it lost only its seat, and tokens computed again
    #: for lack of pages.
    preemptions: int = 0
    swaps: int = 0
    switches: int = 0
    recomputed: int = 0
    #: Tokens whose KV it had when it lost its pages, until a new token shows that it is past them.
    recompute_until: int | None = None
    #: Its place in the order of arrival, given by the scheduler.
    number: int = 0
    #: Seconds of the rounds (steps after the first token, drafting included) that it took part in.
    attained: float = 0.0
    #: Draft tokens verified and accepted so far.
    proposed: int = 0
    accepted: int = 0
    first_scheduled: float | None = None
    #: When its first token came.
    first_token: float | None = None

    @property
    def remaining_known(self) -> int:
        """Known tokens whose KV is not committed yet; 1 while decoding."""
        return len(self.tokens) - self.computed

    @property
    def output_len(self) -> int:
        return len(self.tokens) - self.prompt_len

    @property
    def expected_len(self) -> float:
        """Output tokens, as well as anybody knows: the prediction, or else the most it may write."""
        return self.max_tokens if self.predicted_len is None else self.predicted_len

    @property
    def decoding(self) -> bool:
        return self.computed + 1 == len(self.tokens) > self.prompt_len
