"""Outputs of the engine: `OutputDelta` per step, `RequestOutput` of a finished request, and request metrics."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace

from jaxspec.sched.slo import NONE, Slo


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """Log-probability of a token; `top` are the most likely tokens there as (token id, logprob), likeliest first."""

    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()


@dataclass(slots=True)
class SpeculationCounts:
    """Draft tokens of a request: proposed, accepted, verifications (steps that verified drafts), and accepted by level;
    `by_level[0]` is the first level."""

    proposed: int = 0
    accepted: int = 0
    verifications: int = 0
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
    first_scheduled: float | None = None
    first_token: float | None = None
    finished: float | None = None
    prompt_tokens: int = 0
    cached_tokens: int = 0
    output_tokens: int = 0
    #: Those of `output_tokens` that the request had on arrival, see `Engine.submit`.
    resumed_tokens: int = 0
    #: Limit on its output tokens.
    max_tokens: int = 0
    preemptions: int = 0
    #: First prediction of its output tokens; None if there was none before it ended, or no need for one.
    predicted_tokens: float | None = None
    #: With that prediction: tokens that its output does not exceed in half of all cases, and in 90 %.
    predicted_quantiles: tuple[float, float] | None = None
    #: Whether some of its KV was rounded to INT8, so that its output may differ from that of a run without.
    kv_quantized: bool = False
    #: Its latency SLOs.
    slo: Slo = NONE
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
    `logprobs` has one entry per token of `token_ids`, or none if they were not requested. `stop_reason` is the stop
    string or token id that ended the output. `error` is the message if `finish_reason` is "error", and `refused` then
    what `submit` would have raised: of an engine elsewhere, which answers later, or of a grammar that turned out to
    take too much work.
    `texts` is `text` by the token that released it, and `drafted` whether each token is an accepted draft.
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
    texts: tuple[str, ...] = ()
    drafted: tuple[bool, ...] = ()
    refused: Exception | None = None

    def by_token(self) -> Iterator[OutputDelta]:
        """The same as one delta for each token; itself if it has none."""
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
    """One of a request's `n` outputs."""

    index: int
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprob] | None = None
    finish_reason: str | None = None
    stop_reason: str | int | None = None


@dataclass(slots=True)
class RequestOutput:
    """A prompt of `LLM.generate` with its `n` outputs.

    `metrics`, `speculation` included, are those of the output that ended last.
    """

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    metrics: RequestMetrics
    prompt_logprobs: list[TokenLogprob | None] | None = None
