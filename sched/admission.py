"""Admission control by latency SLO: which SLOs are possible at all, and which can be met with the present load."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from math import ceil, inf, isfinite

from jaxspec.sched.length.distribution import LengthDistribution
from jaxspec.sched.request import Request
from jaxspec.sched.slo import Slo
from jaxspec.sched.timing import StepTimes

#: Share of an SLO that admission plans with. The rest covers what it does not foresee, above all prefill.
MARGIN = 0.9
#: `MARGIN` of the TPOT of a tenant that has fewer requests than another.
_FEWER = 0.95
#: Measured times vary: an SLO is impossible only below this share of them.
_POSSIBLE = 0.5
#: Probability with which a request ends by the time that its slot is counted on.
_ENDS_BY = 0.9
#: Most room that a tenant leaves for others, as a share of its own requests.
_ROOM = 0.25


class SloRefused(RuntimeError):
    """The SLO cannot be met together with those already admitted; try again later."""


@dataclass(frozen=True, slots=True)
class LoadStats:
    """Means over an engine's latest steps: tokens that a step gives a request (`gain`), its draft tokens, and the
    seconds of a step for drafting, swapping, the length probe, and after reading the results (`overhead`)."""

    gain: float = 1.0
    drafts: float = 0.0
    overhead: float = 0.0


def tightest_slo(times: StepTimes, levels: int, prompt_tokens: int) -> Slo:
    """The tightest SLO a request can get on an otherwise idle engine.

    Half of the measured times of a step of one token with all of `levels` draft tokens accepted (0: no drafts), and of
    computing `prompt_tokens`, the uncached tokens of the prompt.
    """
    return Slo(_POSSIBLE * times.of(1) / (1 + levels), _POSSIBLE * times.of(prompt_tokens))


class SloAdmission:
    """Keeps the TPOT SLOs of admitted requests and decides whether one more can be met.

    Let t be the tightest of the TPOTs t_i, the new one included, and g the tokens that a step gives a request. With
    steps of g·t seconds, request i meets its TPOT if it takes part in a share t / t_i of them; without throttling
    (`paced` false) it takes part in all. So a step holds n = Σ t / t_i requests. As requests end, others like them
    come, whose prompts take p = Σ t / t_i · prompt_i / output_i tokens of a step, counted for the requests admitted
    before. All SLOs can be met if

        overhead + step(⌈n + p⌉) ≤ 0.9 t                        without drafts, or
        overhead + step(⌈n (1 + drafts) + g p⌉) ≤ 0.9 g t       with as many draft tokens as gave g.

    Prompts are counted without what is cached, outputs by the median of what is expected. Steps read the committed
    positions of n requests of average length. Conservative: all requests count as decoding from now on, although some
    still wait or have slack, loads are rounded up, and prompts are long for short answers. Optimistic: the means were
    measured under less load; longer prompts and requests without an SLO (always admitted, throttled only if `paced`)
    may take more than the margin; pages may run out. So SLOs of admitted requests are met mostly, not always.

    A TTFT is accepted if the wait for a slot, the step under way and everything known and not computed (prompts ahead,
    one token per decoding request, the new prompt) take at most 0.9 of it; if that exceeds one step, at the speed of
    full steps. If all slots are taken, enough requests must end first: the decoding ones end at the 90 % quantile of
    their output, waiting ones take the slots before. Conservative: part of it may be cached. Optimistic: an order other
    than fcfs may let later requests go first.

    Tenants share what can be met: a request leaves room for one like it of each other tenant that asks and has fewer
    requests than its own tenant, but for a quarter of what that has at most, rounded up. The TPOTs of those are planned
    with 0.95 instead of 0.9, since estimates vary. So a client that sends without pause does not keep the others out.

    Not thread-safe: the engine calls it under its lock.
    """

    def __init__(
        self, times: StepTimes, lengths: LengthDistribution, *, strict: bool, paced: bool, max_num_seqs: int
    ) -> None:
        """`max_num_seqs`: requests that may run at once. Unless `strict`, every request is admitted."""
        self._lengths = lengths
        self._times, self._strict, self._paced, self._max_num_seqs = times, strict, paced, max_num_seqs
        #: TPOT of each request, and its prompt tokens per output token.
        self._admitted: dict[str, tuple[float, float]] = {}
        #: Requests refused so far.
        self.refused = 0

    def __len__(self) -> int:
        """Admitted requests with a TPOT."""
        return len(self._admitted)

    def admit(
        self,
        request: Request,
        prompt_tokens: int,
        others: Iterable[Request],
        seen: LoadStats = LoadStats(),
        admitted: bool = False,
        tenants: Collection[str] = (),
    ) -> None:
        """Admit a request; its SLO counts until `release`. Raises `SloRefused`, unless it was `admitted` elsewhere.

        `prompt_tokens`: uncached tokens of its prompt; `others`: all waiting and running requests; `tenants`: those
        that have asked lately.
        """
        if not self._strict or not request.slo:
            return
        slo, others = request.slo, list(others)
        tpot = slo.tpot if request.max_tokens > 1 else None  # a single token has no TPOT
        each = (len(request.tokens) + sum(len(r.tokens) for r in others)) / (1 + len(others))
        has = Counter(r.tenant for r in others)
        own = has[request.tenant]
        room = 1 + min(ceil(_ROOM * own), sum(has[tenant] < own for tenant in tenants))
        ratio = prompt_tokens / self._lengths.quantile(request, 0.5)
        margin = _FEWER if own < max(has.values(), default=0) else MARGIN
        reason = self._too_slow(tpot, ratio, each, seen, room, margin)
        reason = reason or self._too_late(slo.ttft, prompt_tokens, others, seen, room)
        if reason and not admitted:
            self.refused += 1
            raise SloRefused(reason)
        if tpot is not None:
            self._admitted[request.id] = tpot, ratio

    def release(self, request_id: str) -> None:
        """The request has ended. Unknown ids are ignored."""
        self._admitted.pop(request_id, None)

    def _too_slow(
        self, tpot: float | None, ratio: float, each: float, seen: LoadStats, room: int, margin: float
    ) -> str | None:
        """`ratio`: prompt tokens of the new request per output token; `each`: mean tokens of a request; `room`:
        requests like the new one that there must be room for; `margin`: share of the SLO to plan with."""
        if tpot is None:
            return None
        # The prompt of the last one comes before its own TPOT.
        load = [*self._admitted.values(), *[(tpot, ratio)] * (room - 1), (tpot, 0.0)]
        tightest = min(t for t, _ in load)
        shares = [tightest / t if self._paced else 1.0 for t, _ in load]
        n, p = sum(shares), sum(share * r for share, (_, r) in zip(shares, load, strict=True))
        plain = self._step(ceil(n + p - 1e-9), n * each, seen)
        drafted = self._step(ceil(n * (1 + seen.drafts) + seen.gain * p - 1e-9), n * each, seen)
        if plain <= margin * tightest or drafted <= margin * tightest * seen.gain:
            return None
        others = f" and room for those of {room - 1} other clients" if room > 1 else ""
        return (
            f"slo.tpot_ms: {_ms(tpot)} cannot be met together with {len(self)} requests that have a TPOT SLO{others}: "
            f"a step for all takes about {_ms(plain)} ms and may take {_ms(margin * tightest)} ms"
        )

    def _too_late(
        self, ttft: float | None, prompt_tokens: int, others: Sequence[Request], seen: LoadStats, room: int
    ) -> str | None:
        if ttft is None:
            return None
        until_slot = self._until_slot(others, seen, room)
        if until_slot > MARGIN * ttft:
            about = f": one is free in about {_ms(until_slot)} ms" if isfinite(until_slot) else ""
            left = f" or left for {room - 1} other clients" if room > 1 else ""
            return f"slo.ttft_ms: {_ms(ttft)} cannot be met while all {self._max_num_seqs} slots are taken{left}{about}"
        decoding, ahead = sum(r.decoding for r in others), sum(r.remaining_known for r in others)
        read = sum(r.computed for r in others if r.decoding)
        seconds = until_slot + self._step(ahead + prompt_tokens, read, seen)
        seconds += self._step(decoding, read, seen) if decoding else 0.0
        if seconds <= MARGIN * ttft:
            return None
        return (
            f"slo.ttft_ms: {_ms(ttft)} cannot be met: {ahead} tokens are to be computed before the prompt's "
            f"{prompt_tokens}, which takes about {_ms(seconds)} ms and may take {_ms(MARGIN * ttft)} ms"
        )

    def _until_slot(self, others: Sequence[Request], seen: LoadStats, room: int) -> float:
        """Seconds until `room` slots are free for requests after these; infinite if more must end than are decoding."""
        needed = len(others) + room - self._max_num_seqs
        if needed <= 0:
            return 0.0
        decoding = [r for r in others if r.decoding]
        if needed > len(decoding):
            return inf
        left = sorted(self._lengths.quantile(r, _ENDS_BY) - r.output_len for r in decoding)
        step = self._step(ceil(len(decoding) * (1 + seen.drafts)), sum(r.computed for r in decoding), seen)
        return left[needed - 1] / seen.gain * step

    def _step(self, tokens: int, context: float, seen: LoadStats) -> float:
        return seen.overhead + self._times.of(tokens, context)


def _ms(seconds: float) -> str:
    return f"{round(1000 * seconds, 3):g}"
