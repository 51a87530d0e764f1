"""The engine's counters, and a snapshot of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from jaxspec.outputs import SpeculationCounts
from jaxspec.predict.service import PredictionCounts
from jaxspec.sched.admission import Experience

if TYPE_CHECKING:
    from jaxspec.sched.plan import ScheduledRequest
    from jaxspec.sched.scheduler import Scheduler
    from jaxspec.sched.spec.speculator import Speculator
    from jaxspec.step.kv_host import HostKVCache
    from jaxspec.step.packing import Packed
    from jaxspec.step.runner import ModelRunner
    from jaxspec.step.warmup import WarmUp


@dataclass(slots=True)
class Counters:
    """What the engine's loop counts."""

    prompt_tokens: int = 0
    generation_tokens: int = 0
    steps: int = 0
    read_positions: int = 0
    used_positions: int = 0
    step_tokens: int = 0
    real_tokens: int = 0
    host_seconds: float = 0.0
    step_seconds: float = 0.0
    #: Of those, what steps take without drafting and swapping.
    plain_seconds: float = 0.0
    speculation: SpeculationCounts = field(default_factory=SpeculationCounts)

    @property
    def experience(self) -> Experience:
        """What the steps so far say of those to come."""
        beside = (self.step_seconds - self.plain_seconds) / self.steps if self.steps else 0.0
        return Experience(self.speculation.mean_accepted_length, self.speculation.mean_proposed, max(0.0, beside))

    def count(self, scheduled: Sequence[ScheduledRequest], packed: Packed, read: int) -> None:
        """A step of this work that reads `read` positions of committed KV."""
        self.steps += 1
        self.read_positions += read
        self.used_positions += int(packed.committed.sum())
        self.step_tokens += packed.shape.tokens
        self.real_tokens += packed.real_tokens
        self.prompt_tokens += sum(max(0, min(w.start + w.count, w.request.prompt_len) - w.start) for w in scheduled)


@dataclass(frozen=True, slots=True)
class EngineStats:
    """Counters since warm-up. Padding fractions are padded over all positions: of KV work items, and of step tokens."""

    running: int = 0
    waiting: int = 0
    #: Those that wait with their KV on the host.
    swapped: int = 0
    kv_usage: float = 0.0
    prefix_queries: int = 0
    prefix_hits: int = 0
    #: Times a request lost its pages, how often to the host, times one lost only its seat, and what computing anew what
    #: was lost for good has cost.
    preemptions: int = 0
    swaps: int = 0
    switches: int = 0
    recomputed_tokens: int = 0
    recompute_seconds: float = 0.0
    #: Share of the host pages in use, how many there are, and pages moved out to them and in again.
    host_usage: float = 0.0
    host_pages: int = 0
    pages_swapped_out: int = 0
    pages_swapped_in: int = 0
    prompt_tokens: int = 0
    generation_tokens: int = 0
    steps: int = 0
    #: Compilations that a request may have waited for; should stay 0.
    compilations_after_warmup: int = 0
    #: Programs that are compiled, of those that are prepared in all.
    programs_ready: int = 0
    programs_total: int = 0
    #: Whether all of them are, and what they take is measured.
    programs_measured: bool = False
    padded_fraction: float = 0.0
    token_padded_fraction: float = 0.0
    host_seconds: float = 0.0
    step_seconds: float = 0.0
    peak_memory_bytes: int = 0
    #: Draft tokens verified, those accepted, requests' steps that verified any, and accepted ones by level.
    draft_tokens: int = 0
    accepted_tokens: int = 0
    verifications: int = 0
    accepted_by_level: tuple[int, ...] = ()
    #: Requests' changes from one drafter to another (with a `draft_choice`), and seconds of computing their KV anew.
    drafter_switches: int = 0
    drafter_switch_seconds: float = 0.0
    predictions: PredictionCounts = field(default_factory=PredictionCounts)
    #: Requests that strict admission has turned away, since the start.
    slo_refused: int = 0


def snapshot(
    counters: Counters,
    scheduler: Scheduler,
    model_runner: ModelRunner,
    host: HostKVCache,
    queued: int,
    refused: int,
    predictions: PredictionCounts | None,
    speculator: Speculator | None,
    warm_up: WarmUp,
) -> EngineStats:
    """How an engine's parts stand now. `queued` requests have not come to the scheduler yet."""
    c = counters
    return EngineStats(
        running=scheduler.num_running,
        waiting=scheduler.num_waiting + queued,
        swapped=scheduler.num_swapped,
        kv_usage=scheduler.pool.usage,
        prefix_queries=scheduler.prefix_queries,
        prefix_hits=scheduler.prefix_hits,
        preemptions=scheduler.num_preemptions,
        swaps=scheduler.num_swaps,
        switches=scheduler.num_switches,
        recomputed_tokens=scheduler.recomputed_tokens,
        recompute_seconds=scheduler.recompute_seconds,
        host_usage=scheduler.host_usage,
        host_pages=host.num_pages,
        pages_swapped_out=host.offloaded,
        pages_swapped_in=host.uploaded,
        prompt_tokens=c.prompt_tokens,
        generation_tokens=c.generation_tokens,
        steps=c.steps,
        compilations_after_warmup=model_runner.compilations_after_warmup,
        programs_ready=warm_up.ready,
        programs_total=warm_up.total,
        programs_measured=warm_up.wait(0),
        padded_fraction=1 - c.used_positions / c.read_positions if c.read_positions else 0.0,
        token_padded_fraction=1 - c.real_tokens / c.step_tokens if c.step_tokens else 0.0,
        host_seconds=c.host_seconds,
        step_seconds=c.step_seconds,
        peak_memory_bytes=peak_memory(),
        draft_tokens=c.speculation.proposed,
        accepted_tokens=c.speculation.accepted,
        verifications=c.speculation.verifications,
        accepted_by_level=tuple(c.speculation.by_level),
        drafter_switches=speculator.switches if speculator else 0,
        drafter_switch_seconds=speculator.switch_seconds if speculator else 0.0,
        predictions=replace(predictions) if predictions else PredictionCounts(),
        slo_refused=refused,
    )


def peak_memory() -> int:
    """Most bytes that the process has held."""
    import resource  # Unix only; Linux counts in KiB

    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
