"""The engine's counters and step timer, and a snapshot of all counters."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from jaxspec.outputs import SpeculationCounts
from jaxspec.predict.service import PredictionCounts
from jaxspec.sched.admission import LoadStats

if TYPE_CHECKING:
    from jaxspec.engine.loop import EngineLoop
    from jaxspec.sched.plan import RequestResult, ScheduledRequest
    from jaxspec.step.packing import Packed


#: Least weight of the latest step in the means that admission control uses.
_LATEST = 1 / 64


class StepTimer:
    """Splits the seconds of one step: drafting, swapping and length probe, host work, waiting for the device."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self.begun = self.launched = self.read = clock()
        self._outside = 0.0
        self._since = self.begun

    @contextmanager
    def outside_step(self) -> Iterator[None]:
        """For drafting, swapping and the length probe: the block's time is not part of the plain step."""
        begun = self._clock()
        yield
        self._outside += self._clock() - begun

    @property
    def plain_begun(self) -> float:
        """When the step would have begun without what was done outside it."""
        return self.begun + self._outside

    def follows(self, finished: float) -> None:
        """The device was busy with the step before until `finished`: only the time after it counts."""
        if finished > self.begun:
            self._outside, self.begun = 0.0, finished
            self.launched, self._since = max(self.launched, finished), max(self._since, finished)

    def mark_launched(self, micro_batches: int) -> None:
        """All micro-batches are on the device. The host work before counts only for a step in one piece."""
        self.launched = self._clock()
        self._since = self.plain_begun if micro_batches == 1 else self.launched

    def mark_read(self) -> float:
        """A micro-batch's result is here. -> the seconds that it took."""
        since, self.read = self._since, self._clock()
        self._since = self.read
        return self.read - since

    def now(self) -> float:
        return self._clock()


@dataclass(slots=True)
class Counters:
    """Counted by the engine loop."""

    prompt_tokens: int = 0
    generation_tokens: int = 0
    steps: int = 0
    #: KV positions that attention read, and those of them that held the request's KV.
    read_positions: int = 0
    used_positions: int = 0
    #: Tokens of all steps with padding, and without.
    step_tokens: int = 0
    real_tokens: int = 0
    host_seconds: float = 0.0
    step_seconds: float = 0.0
    speculation: SpeculationCounts = field(default_factory=SpeculationCounts)
    #: What admission control knows: means over the latest steps.
    load: LoadStats = field(default_factory=LoadStats)
    _proposed: int = 0  # draft tokens before the latest step
    _observed: int = 0  # steps that `load` is of

    def count(self, scheduled: Sequence[ScheduledRequest], packed: Packed, read: int) -> None:
        """Count a step of these requests that reads `read` positions of committed KV."""
        self.steps += 1
        self.read_positions += read
        self.used_positions += int(packed.committed.sum())
        self.step_tokens += packed.shape.tokens
        self.real_tokens += packed.real_tokens
        for s in scheduled:  # what is computed again was counted before
            self.prompt_tokens += max(0, min(s.start + s.count, s.request.prompt_len) - s.start - s.recomputes)

    def add_times(
        self, timer: StepTimer, results: Sequence[RequestResult], overlapped: bool = False, ahead: float = 0.0
    ) -> None:
        """Count the seconds of a step that ends now with these results. `overlapped`: the device has the next one, so
        that what the host does after reading the results is part of that. `ahead`: estimated seconds of the draft
        round, part of the step's time."""
        done = timer.read if overlapped else timer.now()
        self.host_seconds += (timer.launched - timer.plain_begun) + (done - timer.read)
        self.step_seconds += done - timer.begun
        self._observe(results, (timer.plain_begun - timer.begun) + (done - timer.read) + ahead)

    def _observe(self, results: Sequence[RequestResult], outside: float) -> None:
        """Update `load` with a step.

        `outside`: seconds of drafting, swapping and the length probe, and those after the results were read. Requests
        that verified no draft count, too: with load, drafts become fewer.
        """
        new = [len(result.tokens) for result in results if result.tokens]
        drafts, self._proposed = self.speculation.proposed - self._proposed, self.speculation.proposed
        if new:
            self._observed += 1
            seen, weight = self.load, max(_LATEST, 1 / self._observed)
            self.load = LoadStats(
                seen.gain + weight * (sum(new) / len(new) - seen.gain),
                seen.drafts + weight * (drafts / len(new) - seen.drafts),
                seen.overhead + weight * (max(0.0, outside) - seen.overhead),
            )


@dataclass(frozen=True, slots=True)
class EngineStats:
    """Counters since the last `reset_stats`. Padding fractions: padded / total, for KV positions and step tokens."""

    running: int = 0
    waiting: int = 0
    #: Waiting requests whose KV is in host memory.
    swapped: int = 0
    #: Pages of the KV pool, and the fraction of them in use.
    kv_pages: int = 0
    kv_usage: float = 0.0
    prefix_queries: int = 0
    prefix_hits: int = 0
    #: Preemptions (a request lost its pages), those of them by swapping, pauses (a request lost its slot but kept its
    #: pages), and the cost of recomputation.
    preemptions: int = 0
    swaps: int = 0
    pauses: int = 0
    recomputed_tokens: int = 0
    recompute_seconds: float = 0.0
    #: Host pages: fraction in use, number, and pages swapped out and in so far.
    host_usage: float = 0.0
    host_pages: int = 0
    pages_swapped_out: int = 0
    pages_swapped_in: int = 0
    prompt_tokens: int = 0
    generation_tokens: int = 0
    steps: int = 0
    #: Compilations that were not ahead of time; should stay 0.
    compilations_after_warmup: int = 0
    #: Compiled programs, and all that will be compiled.
    programs_ready: int = 0
    programs_total: int = 0
    #: Whether all programs are compiled and measured.
    programs_measured: bool = False
    padded_fraction: float = 0.0
    token_padded_fraction: float = 0.0
    host_seconds: float = 0.0
    step_seconds: float = 0.0
    peak_memory_bytes: int = 0
    #: Draft tokens verified and accepted, verifications (requests × steps with drafts), accepted tokens by depth.
    draft_tokens: int = 0
    accepted_tokens: int = 0
    verifications: int = 0
    accepted_by_level: tuple[int, ...] = ()
    #: Changes of a request's drafter (with a `draft_choice`), and the seconds to compute its KV for the new drafter.
    drafter_switches: int = 0
    drafter_switch_seconds: float = 0.0
    #: Since the start: steps without drafts because those had lost time; lengths predicted again by the probe, and the
    #: seconds that it took between steps.
    steps_drafts_off: int = 0
    predicted_again: int = 0
    predicted_again_seconds: float = 0.0
    predictions: PredictionCounts = field(default_factory=PredictionCounts)
    #: Requests refused since the start: by the limit of the queue, and by strict admission.
    queue_refused: int = 0
    slo_refused: int = 0
    #: Restarts in place after a failed step, since the start.
    restarts: int = 0


def snapshot(loop: EngineLoop, queued: int, queue_refused: int, slo_refused: int) -> EngineStats:
    """The counters of an engine now. `queued` requests have not reached the scheduler yet."""
    scheduler, model_runner, host, warm_up = loop.scheduler, loop.model_runner, loop.host, loop.warm_up
    speculator, predictions = loop.speculator, loop.predictions
    c = loop.counters
    return EngineStats(
        running=scheduler.num_running,
        waiting=loop.num_waiting + queued,
        swapped=scheduler.num_swapped,
        kv_pages=scheduler.pool.num_pages,
        kv_usage=scheduler.pool.usage,
        prefix_queries=scheduler.prefix_queries,
        prefix_hits=scheduler.prefix_hits,
        preemptions=scheduler.num_preemptions,
        swaps=scheduler.num_swaps,
        pauses=scheduler.num_pauses,
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
        drafter_switches=speculator.switches[0],
        drafter_switch_seconds=speculator.switches[1],
        steps_drafts_off=speculator.steps_off,
        predicted_again=0 if loop.repredictor is None else loop.repredictor.made,
        predicted_again_seconds=loop.repredicting_seconds,
        predictions=replace(predictions.counts),
        queue_refused=queue_refused,
        slo_refused=slo_refused,
        restarts=loop.recovery.count,
    )


def peak_memory() -> int:
    """Peak resident memory of the process, in bytes."""
    import resource  # Unix only; Linux counts in KiB

    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
