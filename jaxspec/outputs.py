"""Outputs of the engine: `OutputDelta` per step, `RequestOutput` of a finished request, and request metrics."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace

from jaxspec.sched.slo import NONE, Slo


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """Log-probability of a token; `top` are the most likely tokens there as (token id, logprob), likeliest first."""

    token_id: int
    #: Natural logarithm of its probability.
    logprob: float
    top: tuple[tuple[int, float], ...] = ()


@dataclass(slots=True)
class SpeculationCounts:
    """Draft tokens of a request."""

    #: Draft tokens verified.
    proposed: int = 0
    #: Draft tokens accepted.
    accepted: int = 0
    #: Steps that verified drafts.
    verifications: int = 0
    #: Draft tokens accepted at each level of the tree; the first entry is level 1.
    by_level: list[int] = field(default_factory=list)

    def add(self, proposed: int, accepted: int) -> None:
        """Count one verification."""
        self.proposed += proposed
        self.accepted += accepted
        self.verifications += 1
        self.by_level += [0] * (accepted - len(self.by_level))
        for level in range(accepted):
            self.by_level[level] += 1

    def merge(self, other: SpeculationCounts) -> None:
        """Add another request's counts."""
        self.proposed += other.proposed
        self.accepted += other.accepted
        self.verifications += other.verifications
        self.by_level += [0] * (len(other.by_level) - len(self.by_level))
        for level, count in enumerate(other.by_level):
            self.by_level[level] += count

    @property
    def mean_proposed(self) -> float:
        """Mean draft tokens per verification."""
        return self.proposed / self.verifications if self.verifications else 0.0

    @property
    def mean_accepted_length(self) -> float:
        """Mean accepted length: tokens per verification, bonus token included."""
        return 1 + self.accepted / self.verifications if self.verifications else 1.0


@dataclass(slots=True)
class RequestMetrics:
    """Metrics of one request. Times are in seconds on the engine's clock."""

    arrival: float
    #: When it was first part of a step.
    first_scheduled: float | None = None
    #: When its first token was sampled.
    first_token: float | None = None
    #: When it ended.
    finished: float | None = None
    prompt_tokens: int = 0
    #: Prompt tokens found in the prefix cache.
    cached_tokens: int = 0
    output_tokens: int = 0
    #: Those of `output_tokens` that the request had on arrival, see `Engine.submit`.
    resumed_tokens: int = 0
    #: Limit on its output tokens.
    max_tokens: int = 0
    #: How often it lost its KV pages to other requests.
    preemptions: int = 0
    #: First prediction of its output tokens; None if there was none before it ended, or no need for one.
    predicted_tokens: float | None = None
    #: With that prediction: tokens that its output does not exceed in half of all cases, and in 90 %.
    predicted_quantiles: tuple[float, float] | None = None
    #: Whether some of its KV was rounded to INT8, so that its output may differ from that of a run without.
    kv_quantized: bool = False
    #: Its latency SLOs.
    slo: Slo = NONE
    #: Its draft tokens.
    speculation: SpeculationCounts = field(default_factory=SpeculationCounts)

    @property
    def new_tokens(self) -> int:
        """Output tokens that this engine has generated."""
        return self.output_tokens - self.resumed_tokens

    @property
    def ttft(self) -> float | None:
        """Time to first token."""
        return None if self.first_token is None else self.first_token - self.arrival

    @property
    def e2e(self) -> float | None:
        """End-to-end latency (job completion time)."""
        return None if self.finished is None else self.finished - self.arrival

    @property
    def tpot(self) -> float | None:
        """Mean time per output token after the first. None for an answer of one token."""
        if self.first_token is None or self.finished is None or self.new_tokens < 2:
            return None
        return (self.finished - self.first_token) / (self.new_tokens - 1)

    @property
    def tpot_slack(self) -> float | None:
        """SLO minus measured TPOT, so negative if missed. None without an SLO or a measured TPOT."""
        return None if self.slo.tpot is None or self.tpot is None else self.slo.tpot - self.tpot

    @property
    def ttft_slack(self) -> float | None:
        """SLO minus measured TTFT, so negative if missed. None without an SLO or a first token."""
        return None if self.slo.ttft is None or self.ttft is None else self.slo.ttft - self.ttft

    @property
    def tpot_attained(self) -> bool | None:
        """Whether the TPOT SLO was met. None like `tpot_slack`, except that an answer of one token meets any."""
        if self.slo.tpot is not None and self.finished is not None and self.new_tokens == 1:
            return True
        return None if self.tpot_slack is None else self.tpot_slack >= 0

    @property
    def ttft_attained(self) -> bool | None:
        """Whether the TTFT SLO was met. None like `ttft_slack`."""
        return None if self.ttft_slack is None else self.ttft_slack >= 0

    @property
    def slo_attained(self) -> bool | None:
        """Whether all its SLOs were met. None if none was measured."""
        judged = [a for a in (self.ttft_attained, self.tpot_attained) if a is not None]
        return all(judged) if judged else None


@dataclass(frozen=True, slots=True)
class OutputDelta:
    """Output that one step added to a request. `finish_reason` is set in the last delta: stop, length, abort or error.

    `text` may lag behind `token_ids`: incomplete UTF-8 characters and possible starts of stop strings are held back.
    """

    request_id: str
    #: Text that this step released.
    text: str
    #: New token ids.
    token_ids: tuple[int, ...]
    #: One entry per token of `token_ids`; empty if they were not requested.
    logprobs: tuple[TokenLogprob, ...] = ()
    #: In the first delta, if requested: one entry per prompt token, None for the first one.
    prompt_logprobs: tuple[TokenLogprob | None, ...] | None = None
    finish_reason: str | None = None
    #: The stop string or token id that ended the output.
    stop_reason: str | int | None = None
    metrics: RequestMetrics | None = None
    #: The message if `finish_reason` is "error".
    error: str | None = None
    #: `text` split by the token that released each part.
    texts: tuple[str, ...] = ()
    #: Whether each token is an accepted draft.
    drafted: tuple[bool, ...] = ()
    #: With an error: what `submit` would have raised, had it known. A remote engine answers later, and a grammar may
    #: turn out to take too much work.
    refused: Exception | None = None

    def by_token(self) -> Iterator[OutputDelta]:
        """Split into one delta per token. Yields the delta itself if it has no token."""
        last = len(self.token_ids) - 1
        if last < 0:
            yield self
        for i, token in enumerate(self.token_ids):
            part = replace(
                self, text=self.texts[i], token_ids=(token,), texts=self.texts[i : i + 1],
                drafted=self.drafted[i : i + 1], logprobs=self.logprobs[i : i + 1],
                prompt_logprobs=None if i else self.prompt_logprobs,
            )  # fmt: skip
            yield part if i == last else replace(part, finish_reason=None, stop_reason=None)


@dataclass(slots=True)
class CompletionOutput:
    """One output of a request that asks for `n` of them."""

    #: Its number, 0 to n - 1.
    index: int
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    #: One entry per token; None: not requested.
    logprobs: list[TokenLogprob] | None = None
    #: stop, length, abort or error.
    finish_reason: str | None = None
    #: The stop string or token id that ended the output.
    stop_reason: str | int | None = None


@dataclass(slots=True)
class RequestOutput:
    """A prompt of `LLM.generate` with its `n` outputs."""

    request_id: str
    #: The prompt's text; None if token ids were given.
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    #: Metrics of the output that ended last.
    metrics: RequestMetrics
    #: One entry per prompt token, None for the first one. None: not requested.
    prompt_logprobs: list[TokenLogprob | None] | None = None
