"""Scheduler settings: `PolicyConfig` selects the policies, `SchedulerConfig` adds the limits of one engine."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Annotated, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, NonNegativeFloat, PositiveFloat, PositiveInt, model_validator

from jaxspec.sched.slo import Slo
from jaxspec.sched.timing import StepTimes, SwapCosts

if TYPE_CHECKING:
    from jaxspec.sched.kv.page_pool import PagePool
    from jaxspec.sched.request import Request


class Section(BaseModel):
    """Settings of one policy, as a nested mapping. Immutable; unknown names are refused."""

    model_config = ConfigDict(extra="forbid", frozen=True)


class PrioritySettings(Section):
    """`order: priority`: static priorities."""

    #: Whether a waiting request preempts a running request with lower priority. Ties never preempt.
    preemptive: bool = True


class PairwiseSettings(Section):
    """`order: pairwise`: shortest job first by comparing requests two at a time (SSJF §3.1)."""

    #: Fraction of pairs that the comparator gets wrong. Comparing the same pair again gives the same result.
    error_rate: float = Field(default=0.0, ge=0, le=1)


class LasSettings(Section):
    """`order: las`: least attained service, a baseline of LAPS-SD (§3)."""

    #: Attained service is rounded down to multiples of this many ms, so that requests do not alternate at every step.
    #: 0: no rounding.
    quantum_ms: float = Field(default=100.0, ge=0)


class LapsSdSettings(Section):
    """`order: laps_sd`: least attained, then least perceived service (LAPS-SD §4). Brackets: the paper's symbols."""

    #: Number of priority queues (K).
    queues: int = Field(default=4, ge=1, le=64)
    #: Upper service bound of a queue relative to that of the queue above it (M).
    growth: float = Field(default=2.0, gt=1, le=100)
    #: Attained service, in ms, up to which a request stays in the first queue (S_up of queue 1).
    first_threshold_ms: PositiveFloat = 500.0
    #: Steps over which the acceptance rate of a request must be stable (γ).
    window: int = Field(default=5, ge=2)
    #: The acceptance rate is stable if it varies by less than this within the window (δ).
    tolerance: PositiveFloat = 0.05
    #: Draft tokens per step (n) in the estimate of execution time. None: the request's own mean.
    draft_tokens: NonNegativeFloat | None = None
    #: Time to draft one token, in ms (T_ssm). None: fitted to the observed steps.
    draft_token_ms: NonNegativeFloat | None = None
    #: Time of a step without its drafting, in ms (T_llm). None: fitted to the observed steps.
    verify_ms: PositiveFloat | None = None
    #: observed: the acceptance rate is measured. oracle: it is known at arrival if the request states it, as in the
    #: simulator; needs draft_tokens, draft_token_ms and verify_ms.
    acceptance: Literal["observed", "oracle"] = "observed"
    #: Position of requests without a stable acceptance rate. fcfs: last in their queue, in order of arrival, as in the
    #: paper. typical: there is one queue, shortest estimated time first, and they are assumed to run at the mean speed
    #: of the requests with a stable rate.
    unknown: Literal["fcfs", "typical"] = "fcfs"

    @model_validator(mode="after")
    def _check_oracle(self) -> Self:
        missing = [n for n in ("draft_tokens", "draft_token_ms", "verify_ms") if getattr(self, n) is None]
        if self.acceptance == "oracle" and missing:
            raise ValueError(f"acceptance: oracle has no observed steps to fit, so set {', '.join(missing)}")
        return self


class AliseSettings(Section):
    """`order: alise`: priority queues by estimated remaining execution time (ALISE §3.1). Its aging is `aging_ms`."""

    #: Number of priority queues.
    queues: int = Field(default=16, ge=1, le=64)
    #: Longest estimated remaining time, in ms, of requests in the first queue.
    first_threshold_ms: PositiveFloat = 500.0
    #: Upper time bound of a queue relative to that of the queue above it.
    growth: float = Field(default=1.5, gt=1, le=100)


#: A latency in ms. 1 µs is below any step time, yet large enough that dividing by it never overflows.
Milliseconds = Annotated[float, Field(ge=0.001, allow_inf_nan=False)]


class LatencySlo(Section):
    """The SLO of a request or of a category of requests."""

    #: Mean time per output token after the first (TPOT), in ms. None: no TPOT SLO.
    tpot_ms: Milliseconds | None = None
    #: Time to first token (TTFT), in ms. None: no TTFT SLO.
    ttft_ms: Milliseconds | None = None

    @property
    def slo(self) -> Slo:
        """The same in seconds."""
        return Slo(*(None if ms is None else ms / 1000 for ms in (self.tpot_ms, self.ttft_ms)))


class SloSettings(LatencySlo):
    """The default SLO of requests that state none, SLO categories, and admission control."""

    #: SLOs by category name. A request may state a category instead of latencies.
    categories: dict[str, LatencySlo] = Field(default_factory=dict[str, LatencySlo])
    #: best_effort: every request is admitted. strict: a request is refused if its SLO cannot be met without breaking
    #: those of admitted requests. Mostly useful with a `pace`.
    admission: Literal["best_effort", "strict"] = "best_effort"


class RetrievalSettings(Section):
    """`predictor: retrieval`: output lengths of similar prompts (ALISE §3.1, Algorithm 1)."""

    #: Maximum number of similar prompts whose output lengths are averaged, weighted by similarity.
    k: int = Field(default=8, ge=1, le=256)
    #: Minimum cosine similarity of their embeddings. If no prompt reaches it, the proxy predicts.
    threshold: float = Field(default=0.9, gt=0, le=1)
    #: Maximum number of lengths stored, about 1.5 KB each. A full index evicts the least recently stored or found.
    capacity: int = Field(default=10_000, ge=1, le=1_000_000)
    #: File that keeps them across restarts. None: one file per model and encoder in the cache folder. "": none.
    path: str | None = None


class EpsilonGreedySettings(Section):
    """`draft_choice: epsilon_greedy`: the ε-greedy baseline of SPIN (§VI-B2)."""

    #: Probability that a request gets a random drafter in a step (ε).
    epsilon: float = Field(default=0.2, ge=0, le=1)


class LbssSettings(Section):
    """`draft_choice: lbss`: bandit that learns each request's drafter (SPIN §IV-B). Brackets: the paper's symbols."""

    #: Steps of each epoch in which random drafters are tried (α).
    exploration: PositiveInt = 2
    #: Consecutive exploration steps with the same drafter (β), at most `exploration`.
    chunk: PositiveInt = 2
    #: Weight of the time lost by switching drafters, relative to drafting time (λ). 0: switching is free.
    switch_weight: NonNegativeFloat = 1.0
    #: Whether new requests start from the results of requests with prompts of similar length.
    prior: bool = True
    #: Weight of these results, in steps of the request's own.
    prior_slots: NonNegativeFloat = 16.0
    #: Once these results cover every drafter, a new request skips exploration and starts with the exploitation phase of
    #: this epoch k, which has 2^k steps.
    prior_epoch: int = Field(default=4, ge=1, le=32)

    @model_validator(mode="after")
    def _check_chunk(self) -> Self:
        if self.chunk > self.exploration:
            raise ValueError(f"chunk ({self.chunk}) is longer than exploration ({self.exploration})")
        return self


class PolicyConfig(BaseModel):
    """One policy for each slot of the scheduler, with its parameters."""

    model_config = ConfigDict(extra="forbid", frozen=True, protected_namespaces=())

    #: Which request goes first. fcfs: first come, first served. sjf: shortest predicted output (SSJF). pairwise:
    #: shortest output by pairwise comparison. priority: smallest `priority` field. las: least attained service.
    #: laps_sd: least attained, then least perceived service. alise: shortest remaining time, in queues. The last three
    #: preempt, and so does priority by default.
    order: Literal["fcfs", "sjf", "pairwise", "priority", "las", "laps_sd", "alise"] = "fcfs"
    #: Source of output lengths, for sjf, laps_sd, alise, `pace: deadline` and swapping. none: max_tokens. oracle: the
    #: true length where the caller states it, else max_tokens. noisy_oracle: that with a random error. proxy: an
    #: encoder that reads the prompt (SSJF). retrieval: lengths of similar prompts, else the proxy (ALISE). auto: proxy
    #: if `predictor_model` is set or the package has one for the model, else none. proxy and retrieval run next to the
    #: engine, so a request may run before it is predicted.
    predictor: Literal["none", "auto", "oracle", "noisy_oracle", "proxy", "retrieval"] = "none"
    #: σ of the log-normal error of noisy_oracle. With 0.5, two of three predictions are within a factor of 1.65.
    predictor_noise: float = Field(default=0.5, ge=0)
    #: Trained predictor of proxy, retrieval and auto: a name or a file. None: the one in the package for the model.
    predictor_model: str | None = Field(default=None, min_length=1)
    #: Settings of `predictor: retrieval`.
    retrieval: RetrievalSettings = RetrievalSettings()
    #: Seed of policies that draw at random: noisy_oracle, pairwise, epsilon_greedy, lbss.
    policy_seed: int = 0
    #: When waiting requests are admitted (SSJF §3.2). continuous: in every step, to free slots. dynamic: in batches,
    #: each of which runs until all its requests have finished. none: one request at a time.
    batching: Literal["continuous", "dynamic", "none"] = "continuous"
    #: dynamic: requests in a batch; max_num_seqs if that is smaller.
    max_batch_size: PositiveInt = 8
    #: dynamic: a batch that is not full starts when a request has waited this long, in ms.
    batch_wait_timeout_ms: float = Field(default=50.0, ge=0)
    #: mixed: chunked prefill uses the tokens that decoding requests leave of a step. first: nothing decodes while
    #: prompts are computed.
    prefill: Literal["mixed", "first"] = "mixed"
    #: Which requests decode in a step while some have a TPOT SLO; the others are throttled. none: all decode. fcfs,
    #: stta: as many as fit in a step no longer than the tightest TPOT SLO, by arrival or by least slack (baselines of
    #: AdaServe, §6.3). deadline: as stta, but a step may take as long as the least slack.
    pace: Literal["none", "fcfs", "stta", "deadline"] = "none"
    #: With a pace: how long, in ms, prompts without a TTFT SLO may wait for decoding requests.
    prompt_patience_ms: float = Field(default=5000.0, ge=0)
    #: SLOs and admission control.
    slo: SloSettings = SloSettings()
    #: With any order: a request that has waited this long, in ms, since it arrived or last ran goes first and is no
    #: longer preemptible. None: no aging.
    aging_ms: PositiveFloat | None = None
    #: Settings of `order: priority`.
    priority: PrioritySettings = PrioritySettings()
    #: Settings of `order: pairwise`.
    pairwise: PairwiseSettings = PairwiseSettings()
    #: Settings of `order: las`.
    las: LasSettings = LasSettings()
    #: Settings of `order: laps_sd`.
    laps_sd: LapsSdSettings = LapsSdSettings()
    #: Settings of `order: alise`.
    alise: AliseSettings = AliseSettings()
    #: What happens to KV that does not fit in the pool. defer: a request is admitted only when there are pages for all
    #: its tokens, so it never loses any. recompute: it is freed and computed again later. swap: it moves to host memory
    #: ahead of need and back before its request runs; if the host is full, recompute. auto: whichever of swap and
    #: recompute is estimated to be faster for the request; without host memory, recompute.
    memory: Literal["auto", "defer", "recompute", "swap"] = "auto"

    @model_validator(mode="after")
    def _check_batching(self) -> Self:
        preempts = self.order in ("las", "laps_sd", "alise") or (self.order == "priority" and self.priority.preemptive)
        if self.batching == "dynamic" and preempts:
            raise ValueError(f"batching: dynamic runs a batch to its end, but order: {self.order} preempts")
        return self


@dataclass(frozen=True, slots=True)
class SchedulerConfig:
    """Policy, limits and measured costs of one scheduler. Raises `ValueError` if a limit is out of range.

    A step has at least one token and one logit row per running request. So every decoding request can advance in every
    step while the oldest prefill progresses.
    """

    #: Requests that run at once.
    max_num_seqs: int
    #: Token budget of a step, at least max_num_seqs.
    max_num_batched_tokens: int
    #: Prompt and output tokens of a request.
    max_model_len: int
    #: Requests that may wait. None: no limit.
    max_queued_requests: int | None
    #: Logit rows of a step, at least max_num_seqs.
    max_logit_rows: int
    policy: PolicyConfig = field(default_factory=PolicyConfig)
    #: Host pages that KV can be swapped to, as large as those of the pool. 0: no swapping.
    host_pages: int = 0
    #: Whether swapping preserves KV exactly. If not, a request that was swapped adds nothing to the prefix cache.
    exact_swap: bool = True
    #: Costs of swapping and recomputing. None: unknown; then KV is swapped whenever it fits on the host.
    costs: SwapCosts | None = None
    #: Maximum number of pages that one plan moves ahead of need in each direction, so that transfers do not delay the
    #: step; a single request may exceed it. None: no limit.
    swap_pages: int | None = None
    #: Step times. None: unknown; then `pace` must be none.
    times: StepTimes | None = None

    def __post_init__(self) -> None:
        for name in ("max_num_seqs", "max_model_len"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")
        for name in ("max_num_batched_tokens", "max_logit_rows"):
            if getattr(self, name) < self.max_num_seqs:
                raise ValueError(f"{name} ({getattr(self, name)}) must be at least max_num_seqs ({self.max_num_seqs})")
        if self.host_pages < 0:
            raise ValueError(f"host_pages must not be negative, got {self.host_pages}")
        if self.max_queued_requests is not None and self.max_queued_requests < 0:
            raise ValueError(f"max_queued_requests must not be negative, got {self.max_queued_requests}")

    def check(self, request: Request, pool: PagePool) -> None:
        """Raise `ValueError` if a new request could never finish within the limits."""
        total = request.prompt_len + request.max_tokens
        if request.prompt_len < 1 or request.prompt_len != len(request.tokens) or request.max_tokens < 1:
            raise ValueError("a new request needs a prompt of at least one token, no output, and max_tokens >= 1")
        if total > self.max_model_len:
            raise ValueError(f"prompt and max_tokens are {total} tokens, the limit is {self.max_model_len}")
        if pool.pages_for(total) > pool.num_pages:
            capacity = pool.num_pages * pool.page_size
            raise ValueError(f"prompt and max_tokens are {total} tokens, the KV pool holds {capacity}")
