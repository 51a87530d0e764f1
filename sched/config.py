"""Scheduler settings: `PolicyConfig` selects the policies, `SchedulerConfig` adds the limits of one engine."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Annotated, Any, Literal, Self

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    PositiveFloat,
    PositiveInt,
    ValidationInfo,
    create_model,
    field_validator,
    model_validator,
)

from jaxspec.sched.slo import Slo
from jaxspec.sched.slots import BATCHINGS, ORDERS, SLOTS, TREES, Section
from jaxspec.sched.timing import StepTimes, SwapCosts

if TYPE_CHECKING:
    from jaxspec.sched.kv.page_pool import PagePool
    from jaxspec.sched.request import Request


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
        """These latency targets in seconds."""
        return Slo(*(None if ms is None else ms / 1000 for ms in (self.tpot_ms, self.ttft_ms)))


class SloSettings(LatencySlo):
    """The default SLO of requests that state none, SLO categories, and admission control."""

    #: SLOs by category name. A request may state a category instead of latencies.
    categories: dict[str, LatencySlo] = Field(default_factory=dict[str, LatencySlo])
    #: best_effort: every request is admitted. strict: a request is refused if its SLO cannot be met without breaking
    #: those of admitted requests. Mostly useful with a `pace`.
    admission: Literal["best_effort", "strict"] = "best_effort"


class PolicyFields(BaseModel):
    """One policy for each slot, and the settings that several of them share.

    `PolicyConfig` adds the names of the registered policies and the sections of those that have settings of their own.
    """

    model_config = ConfigDict(extra="forbid", frozen=True, protected_namespaces=())

    #: Which request goes first, and whether it preempts (`sched/order`).
    order: str = "fcfs"
    #: Source of output lengths (`sched/length`), for sjf, laps_sd, alise, srpt, gittins, boost, `memory: defer`,
    #: `pace: deadline` and swapping. Those that read prompts run next to the engine, so a request may run before it is
    #: predicted.
    predictor: str = "none"
    #: σ of the log-normal error of noisy_oracle. With 0.5, two of three predictions are within a factor of 1.65.
    predictor_noise: float = Field(default=0.5, ge=0)
    #: Trained predictor of proxy, retrieval and auto: a name or a file. None: the one in the package for the model.
    predictor_model: str | None = Field(default=None, min_length=1)
    #: Seed of policies that draw at random: noisy_oracle, pairwise, epsilon_greedy, lbss.
    policy_seed: int = 0
    #: When waiting requests are admitted (SSJF §3.2, `sched/batching`).
    batching: str = "continuous"
    #: dynamic: requests in a batch; max_num_seqs if that is smaller.
    max_batch_size: PositiveInt = 8
    #: dynamic: a batch that is not full starts when a request has waited this long, in ms.
    batch_wait_timeout_ms: float = Field(default=50.0, ge=0)
    #: mixed: chunked prefill uses the tokens that decoding requests leave of a step. first: nothing decodes while
    #: prompts are computed.
    prefill: Literal["mixed", "first"] = "mixed"
    #: Which requests decode in a step while some have a TPOT SLO (`sched/pace`); the others are throttled.
    pace: str = "none"
    #: With a pace: how long, in ms, prompts without a TTFT SLO may wait for decoding requests.
    prompt_patience_ms: float = Field(default=5000.0, ge=0)
    #: SLOs and admission control.
    slo: SloSettings = SloSettings()
    #: With any order: a request that has waited this long, in ms, since it arrived or last ran goes first and is no
    #: longer preemptible; so does one that has waited for half of its TTFT SLO. None: no aging.
    aging_ms: PositiveFloat | None = None
    #: What happens to KV that does not fit in the pool (`sched/kv`).
    memory: str = "auto"
    #: With several drafters, which one drafts for a request (`sched/spec/draft_choice`).
    draft_choice: str = "fastest"
    #: Maximum number of requests per step and drafter, by drafter name (SPIN's B_j). Drafters that are not named take
    #: all. Not used by `draft_choice: fastest`.
    draft_limits: dict[str, PositiveInt] = Field(default_factory=dict[str, PositiveInt])
    #: Tree policy: which candidates are verified (`sched/spec/trees`).
    tree: str = "auto"
    #: Maximum depth of a draft tree; chain and fixed always use it. More than 8, and None, count as 8.
    draft_depth: PositiveInt | None = None
    #: equal_greedy, global_greedy: draft nodes of a step, over all requests. None: what `verify_budget` leaves.
    draft_nodes: PositiveInt | None = None
    #: equal_greedy, global_greedy, adaserve: largest step, in tokens with drafts, that is hardly slower than one of one
    #: token (AdaServe's B). None: from profiled step times. Ignored if `draft_nodes` is set.
    verify_budget: PositiveInt | None = None
    #: equal_greedy, global_greedy, adaserve: while requests decode (adaserve: while one with a TPOT SLO does), prompts
    #: get at most three quarters of what these leave of `verify_budget`, so that steps stay short and have room for
    #: drafts. Prompts take longer. Not used with `draft_nodes`, with a `pace`, which limits prompts itself, with
    #: `prefill: first`, and where a step of `verify_budget` tokens takes over 1.75 times as long as one of one token.
    prompts_in_budget: bool = True
    #: equal_greedy, global_greedy, adaserve: rank nodes by observed acceptance rates (true) or by the drafter's
    #: probabilities (false).
    draft_calibration: bool = True
    #: When a draft token is accepted. match: the target itself chooses that token. rejection: by rejection sampling,
    #: which preserves the target's distribution; at most one draft model, and not with every tree policy.
    acceptance: Literal["match", "rejection"] = "match"

    @field_validator("draft_nodes")
    @classmethod
    def _check_draft_nodes(cls, value: int | None, info: ValidationInfo) -> int | None:
        tree = info.data.get("tree")
        if value is not None and tree is not None and not TREES[tree].shares_nodes:
            usable = " and ".join(name for name in TREES.names if TREES[name].shares_nodes)
            raise ValueError(f"only tree: {usable} use it, not {tree}")
        return value

    @field_validator("acceptance")
    @classmethod
    def _check_acceptance(cls, value: str, info: ValidationInfo) -> str:
        tree = info.data.get("tree")
        if value == "rejection" and tree is not None and TREES[tree].sampled_widths is None:
            usable = [name for name in TREES.names if TREES[name].sampled_widths is not None]
            raise ValueError(f"rejection works with tree: {', '.join(usable[:-1])} or {usable[-1]}, not {tree}")
        return value

    @model_validator(mode="after")
    def _check_batching(self) -> Self:
        if BATCHINGS.selected(self).runs_to_end and ORDERS.selected(self).preempts(ORDERS.section_of(self)):
            raise ValueError(f"batching: {self.batching} runs a batch to its end, but order: {self.order} preempts")
        return self


def _slot_fields() -> dict[str, Any]:
    """The fields that policies register: each slot's names, and a section for each policy with settings."""
    for slot in SLOTS:
        slot.load()
    fields: dict[str, Any] = {
        slot.setting: (Literal[slot.names], PolicyFields.model_fields[slot.setting].default) for slot in SLOTS
    }
    for slot in SLOTS:
        for name, section in slot.section_types.items():
            if name in fields or name in PolicyFields.model_fields:
                module = slot[name].__module__
                raise ValueError(f"{module}: a policy with settings cannot be called {name}: that is a setting already")
            fields[name] = section, section()
    return fields


if TYPE_CHECKING:
    PolicyConfig = PolicyFields
else:
    PolicyConfig = create_model("PolicyConfig", __base__=PolicyFields, __module__=__name__, **_slot_fields())


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
    #: Step times. None: unknown; then no policy may need them.
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
        if request.prompt_len < 1 or request.new_len or not 0 <= request.resumed < request.max_tokens:
            raise ValueError("a new request needs a prompt of at least one token, and output only below max_tokens")
        if total > self.max_model_len:
            raise ValueError(f"prompt and max_tokens are {total} tokens, the limit is {self.max_model_len}")
        if pool.pages_for(total) > pool.num_pages:
            capacity = pool.num_pages * pool.page_size
            raise ValueError(f"prompt and max_tokens are {total} tokens, the KV pool holds {capacity}")
