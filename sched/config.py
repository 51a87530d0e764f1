"""The settings of the scheduler: one policy for each slot, and the limits of the engine."""

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
    """Settings of one choice; unknown names are refused."""

    model_config = ConfigDict(extra="forbid", frozen=True)


class PrioritySettings(Section):
    #: Whether a waiting request of higher priority takes a running one's place. Never on a tie.
    preemptive: bool = True


class PairwiseSettings(Section):
    #: Chance that the comparator is wrong about two requests; the same two always get the same answer.
    error_rate: float = Field(default=0.0, ge=0, le=1)


class LasSettings(Section):
    #: Attained service is compared in whole quanta: the least time between two switches. 0: exactly.
    quantum_ms: float = Field(default=100.0, ge=0)


class LapsSdSettings(Section):
    """LAPS-SD §4; the paper's symbols in brackets."""

    #: Priority queues (K).
    queues: int = Field(default=4, ge=1, le=64)
    #: How many times as much service each queue holds as the one above it (M).
    growth: float = Field(default=2.0, gt=1, le=100)
    #: Most attained service of a request in the first queue (S_up of queue 1).
    first_threshold_ms: PositiveFloat = 500.0
    #: Rounds over which the acceptance rate must be stable (γ), and by how much less than this it may vary (δ).
    window: int = Field(default=5, ge=2)
    tolerance: PositiveFloat = 0.05
    #: Tokens drafted a round (n); unset: the mean of what was drafted for the request.
    draft_tokens: NonNegativeFloat | None = None
    #: Time to draft a token (T_ssm) and to verify a round's (T_llm); unset: learned from the rounds.
    draft_token_ms: NonNegativeFloat | None = None
    verify_ms: PositiveFloat | None = None
    #: "oracle": the acceptance rate is known at arrival where the request tells it: what full knowledge would give.
    acceptance: Literal["observed", "oracle"] = "observed"
    #: Where requests stand whose rate is not stable yet: first come, first served among themselves, as in the paper, or
    #: with the others, as if they went at a typical pace.
    unknown: Literal["fcfs", "typical"] = "fcfs"

    @model_validator(mode="after")
    def _an_oracle_needs_costs(self) -> Self:
        unknown = [n for n in ("draft_tokens", "draft_token_ms", "verify_ms") if getattr(self, n) is None]
        if self.acceptance == "oracle" and unknown:
            raise ValueError(f"acceptance: oracle reckons before any round has been seen, so set {', '.join(unknown)}")
        return self


class AliseSettings(Section):
    """ALISE §3.1: queues by estimated remaining execution time. Its aging is `aging_ms`."""

    #: Priority queues.
    queues: int = Field(default=16, ge=1, le=64)
    #: Most remaining time of a request in the first queue.
    first_threshold_ms: PositiveFloat = 500.0
    #: How many times as much remaining time each queue holds as the one above it.
    growth: float = Field(default=1.5, gt=1, le=100)


#: A microsecond is less than any step takes, and far from where a division gives 0.
Milliseconds = Annotated[float, Field(ge=0.001, allow_inf_nan=False)]


class LatencySlo(Section):
    """Latency targets of a request."""

    #: Mean time per output token after the first.
    tpot_ms: Milliseconds | None = None
    #: Time to first token.
    ttft_ms: Milliseconds | None = None

    @property
    def slo(self) -> Slo:
        return Slo(*(None if ms is None else ms / 1000 for ms in (self.tpot_ms, self.ttft_ms)))


class SloSettings(LatencySlo):
    """Targets of requests that name none, and what becomes of targets that cannot be met."""

    #: Targets by a name that requests give instead of their own.
    categories: dict[str, LatencySlo] = Field(default_factory=dict)
    #: strict: a request whose target cannot be met without breaking others' is refused.
    admission: Literal["best_effort", "strict"] = "best_effort"


class RetrievalSettings(Section):
    """ALISE §3.1: answers to similar prompts say how long this one will be."""

    #: Most neighbours that are asked.
    k: int = Field(default=8, ge=1, le=256)
    #: Least similarity (cosine) of a neighbour; where nobody is so near, the proxy predicts.
    threshold: float = Field(default=0.9, gt=0, le=1)
    #: Most answers remembered; then those that were least recently put in or found make room.
    capacity: int = Field(default=10_000, ge=1, le=1_000_000)
    #: The file that they are kept in; unset: one for each model and encoder in the cache folder, "": none.
    path: str | None = None


class EpsilonGreedySettings(Section):
    #: Chance that a request explores in a slot (ε).
    epsilon: float = Field(default=0.2, ge=0, le=1)


class LbssSettings(Section):
    """SPIN §IV-B; the paper's symbols in brackets."""

    #: Slots of each epoch in which random drafters are tried (α), and how many in a row are one drafter's (β).
    exploration: PositiveInt = 2
    chunk: PositiveInt = 2
    #: What a second spent on changing the drafter counts, in seconds of drafting (λ).
    switch_weight: NonNegativeFloat = 1.0
    #: Whether a request starts from what similar ones did on each drafter, and how many slots of its own that counts.
    prior: bool = True
    prior_slots: NonNegativeFloat = 16.0
    #: Where that says something of every drafter, the epoch in whose exploitation requests begin.
    prior_epoch: int = Field(default=4, ge=1, le=32)

    @model_validator(mode="after")
    def _a_chunk_is_part_of_an_exploration(self) -> Self:
        if self.chunk > self.exploration:
            raise ValueError(f"chunk ({self.chunk}) is longer than exploration ({self.exploration})")
        return self


class PolicyConfig(BaseModel):
    """One choice for each slot of the scheduler, with its parameters."""

    model_config = ConfigDict(extra="forbid", frozen=True, protected_namespaces=())

    #: Who goes first.
    order: Literal["fcfs", "sjf", "pairwise", "priority", "las", "laps_sd", "alise"] = "fcfs"
    #: Who says how many tokens a request will write. The oracles need its true length, or else take its max_tokens;
    #: proxy and retrieval read its prompt, and tell when it may be running already; auto: proxy, where one comes with
    #: the package for the model or is named, else none.
    predictor: Literal["none", "auto", "oracle", "noisy_oracle", "proxy", "retrieval"] = "none"
    #: noisy_oracle: σ of its log-normal error. 0.5: two of three predictions are within a factor of 1.65.
    predictor_noise: float = Field(default=0.5, ge=0)
    #: proxy, retrieval, auto: name or file of a trained predictor; unset: the one that comes with the package for the
    #: model.
    predictor_model: str | None = Field(default=None, min_length=1)
    retrieval: RetrievalSettings = RetrievalSettings()
    #: Seeds whatever a policy draws at random.
    policy_seed: int = 0
    #: continuous: whoever ends is replaced in the next step; dynamic: a batch runs to its end; none: one at a time.
    batching: Literal["continuous", "dynamic", "none"] = "continuous"
    #: dynamic: requests of a batch, and how long it waits for them to come. At most max_num_seqs run in any case.
    max_batch_size: PositiveInt = 8
    batch_wait_timeout_ms: float = Field(default=50.0, ge=0)
    #: Whether prompts are computed beside those that decode, in what a step has left, or before all else.
    prefill: Literal["mixed", "first"] = "mixed"
    #: Who decodes in a step while some have a TPOT target. none: all. fcfs, stta: as many as keep a step within the
    #: tightest target, by arrival or those nearest to missing theirs. deadline: as stta, by what they have got ahead.
    pace: Literal["none", "fcfs", "stta", "deadline"] = "none"
    #: With a pace: how long the prompts of requests without a TTFT target wait for those who decode.
    prompt_patience_ms: float = Field(default=5000.0, ge=0)
    slo: SloSettings = SloSettings()
    #: A request that has waited so long goes before all that have not; unset: no aging.
    aging_ms: PositiveFloat | None = None
    priority: PrioritySettings = PrioritySettings()
    pairwise: PairwiseSettings = PairwiseSettings()
    las: LasSettings = LasSettings()
    laps_sd: LapsSdSettings = LapsSdSettings()
    alise: AliseSettings = AliseSettings()
    #: What becomes of KV for which there is no room. defer: nobody is let in who might need another's pages. recompute:
    #: it is given up and computed anew later. swap: it is moved to the host ahead of need and back ahead of its turn,
    #: and given up where the host is full. auto: whichever is faster by measured costs; without host pages, recompute.
    memory: Literal["auto", "defer", "recompute", "swap"] = "auto"

    @model_validator(mode="after")
    def _batches_run_to_their_end(self) -> Self:
        preempts = self.order in ("las", "laps_sd", "alise") or (self.order == "priority" and self.priority.preemptive)
        if self.batching == "dynamic" and preempts:
            raise ValueError(f"batching: dynamic runs a batch to its end, but order: {self.order} preempts")
        return self


@dataclass(frozen=True, slots=True)
class SchedulerConfig:
    """Limits of one step (requests, tokens, logit slots), of one request and of the queue. Raises `ValueError`.

    A step has at least one token and one logit slot for each request it may run: that is what lets every decoding
    request advance in every step while the oldest prefill still moves. `max_queued_requests=None`: no limit.
    """

    max_num_seqs: int
    max_num_batched_tokens: int
    max_model_len: int
    max_queued_requests: int | None
    max_logit_rows: int
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
        for name in ("max_num_batched_tokens", "max_logit_rows"):
            if getattr(self, name) < self.max_num_seqs:
                raise ValueError(f"{name} ({getattr(self, name)}) must be at least max_num_seqs ({self.max_num_seqs})")
        if self.host_pages < 0:
            raise ValueError(f"host_pages must not be negative, got {self.host_pages}")
        if self.max_queued_requests is not None and self.max_queued_requests < 0:
            raise ValueError(f"max_queued_requests must not be negative, got {self.max_queued_requests}")

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
