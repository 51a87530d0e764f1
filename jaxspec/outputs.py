"""What comes back from the engine: deltas while a request runs, a `RequestOutput` when it has ended."""

from __future__ import annotations

from dataclasses import dataclass, field

from jaxspec.sched.slo import NONE, Slo


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """One position's log-probabilities: the token there and the most likely ones as (token id, logprob), best first."""

    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()


@dataclass(slots=True)
class SpeculationCounts:
    """Draft tokens proposed and accepted, steps that verified some, and accepted ones by level (the first is 0)."""

    proposed: int = 0
    accepted: int = 0
    verifications: int = 0
    by_level: list[int] = field(default_factory=list)

    def add(self, proposed: int, accepted: int) -> None:
        self.proposed += proposed
        self.accepted += accepted
        self.verifications += 1
        self.by_level += [0] * (accepted - len(self.by_level))
        for level in range(accepted):
            self.by_level[level] += 1

    def merge(self, other: SpeculationCounts) -> None:
        """Add what another sequence counted."""
        self.proposed += other.proposed
        self.accepted += other.accepted
        self.verifications += other.verifications
        self.by_level += [0] * (len(other.by_level) - len(self.by_level))
        for level, count in enumerate(other.by_level):
            self.by_level[level] += count

    @property
    def mean_proposed(self) -> float:
        """Draft tokens of a verification."""
        return self.proposed / self.verifications if self.verifications else 0.0

    @property
    def mean_accepted_length(self) -> float:
        """Tokens a verification gave, the target's own included."""
        return 1 + self.accepted / self.verifications if self.verifications else 1.0


@dataclass(slots=True)
class RequestMetrics:
    """Times in seconds on the engine's clock; counts in tokens."""

    arrival: float
    first_scheduled: float | None = None
    first_token: float | None = None
    finished: float | None = None
    prompt_tokens: int = 0
    cached_tokens: int = 0
    output_tokens: int = 0
    preemptions: int = 0
    #: Output tokens as first predicted; None: nobody said, or not before its end.
    predicted_tokens: float | None = None
    #: Some of its KV went through INT8: it may have written something else than it would have alone.
    kv_quantized: bool = False
    #: The latency targets it had.
    slo: Slo = NONE
    speculation: SpeculationCounts = field(default_factory=SpeculationCounts)

    @property
    def ttft(self) -> float | None:
        """Time to first token."""
        return None if self.first_token is None else self.first_token - self.arrival

    @property
    def e2e(self) -> float | None:
        """End-to-end latency, the job completion time."""
        return None if self.finished is None else self.finished - self.arrival

    @property
    def tpot(self) -> float | None:
        """Mean time per output token after the first."""
        if self.first_token is None or self.finished is None or self.output_tokens < 2:
            return None
        return (self.finished - self.first_token) / (self.output_tokens - 1)

    @property
    def tpot_slack(self) -> float | None:
        """Target minus measured: positive is good. None without a target, or where nothing could be measured."""
        return None if self.slo.tpot is None or self.tpot is None else self.slo.tpot - self.tpot

    @property
    def ttft_slack(self) -> float | None:
        return None if self.slo.ttft is None or self.ttft is None else self.slo.ttft - self.ttft

    @property
    def tpot_attained(self) -> bool | None:
        """Whether it was at its target; None as with the slack, but an answer of one token is at any."""
        if self.slo.tpot is not None and self.finished is not None and self.output_tokens == 1:
            return True
        return None if self.tpot_slack is None else self.tpot_slack >= 0

    @property
    def ttft_attained(self) -> bool | None:
        return None if self.ttft_slack is None else self.ttft_slack >= 0


@dataclass(frozen=True, slots=True)
class OutputDelta:
    """What one step added to a request. The last delta has `finish_reason` set: stop, length, abort or error.

    `text` may lag behind `token_ids`: bytes of an unfinished UTF-8 character and a possible start of a stop string are
    held back. `logprobs` has one entry a token of `token_ids`, or is empty if none were asked for. `stop_reason` is the
    stop string or token id that ended the output. `error` holds the message when `finish_reason` is "error".
    """

    request_id: str
    text: str
    token_ids: tuple[int, ...]
    logprobs: tuple[TokenLogprob, ...] = ()
    prompt_logprobs: tuple[TokenLogprob | None, ...] | None = None
    finish_reason: str | None = None
    stop_reason: str | int | None = None
    metrics: RequestMetrics | None = None
    error: str | None = None


@dataclass(slots=True)
class CompletionOutput:
    index: int
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprob] | None = None
    finish_reason: str | None = None
    stop_reason: str | int | None = None


@dataclass(slots=True)
class RequestOutput:
    """A finished request of `LLM.generate`: one `CompletionOutput` for each of `n`.

    `metrics`, its `speculation` included, are those of the output that ended last.
    """

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    metrics: RequestMetrics
    prompt_logprobs: list[TokenLogprob | None] | None = None
