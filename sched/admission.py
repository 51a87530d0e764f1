"""Which latency targets can be promised: what the engine could reach at all, and what it can beside its promises."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from math import ceil

from jaxspec.sched.request import Request
from jaxspec.sched.slo import Slo
from jaxspec.sched.timing import StepTimes

#: Share of a target that may be planned for. The rest is for what is not foreseen, above all prompts in the steps.
MARGIN = 0.9
#: Measured times vary: only less than this share of them is called impossible.
_POSSIBLE = 0.5


class SloRefused(RuntimeError):
    """A target that could not be kept beside those promised already; try again later."""


@dataclass(frozen=True, slots=True)
class Experience:
    """Means over what an engine has done: tokens that a verification gave, its draft tokens, and the seconds of a step
    for drafting and swapping."""

    gain: float = 1.0
    drafts: float = 0.0
    overhead: float = 0.0


def least(times: StepTimes, levels: int, prompt_tokens: int) -> Slo:
    """The tightest targets that a request may hope for with the engine to itself.

    Half of the measured times: of a step of one token, with all of `levels` draft tokens accepted (0: none are
    drafted), and of computing the prompt's tokens, as far as they are not cached.
    """
    return Slo(_POSSIBLE * times.of(1) / (1 + levels), _POSSIBLE * times.of(prompt_tokens))


class SloAdmission:
    """The targets for the time per output token (TPOT) that are being kept, and whether one more can be.

    Let t be the tightest of the targets t_i, the new one's included, and g the tokens that a verification gives. With
    steps of g·t seconds, request i is at its target if it is in a share t / t_i of them; where nobody ever rests
    (`paced` false), it is in all. So such a step holds n = Σ t / t_i requests, and they can be kept if it is so fast:

        overhead + step(⌈n⌉) ≤ 0.9 t                      without drafts, or
        overhead + step(⌈n (1 + drafts)⌉) ≤ 0.9 g t       with as many draft tokens a verification as gave g

    Conservative: everyone is taken to decode from now on, although some only wait yet or are ahead of their targets,
    and loads are rounded up. Not conservative: all was measured under another load, long prompts and requests without a
    target (which are let in always, and rest only where `paced`) take more of the steps than the margin, and there may
    be no KV pages. So the promise is kept mostly, not always.

    A target for the first token (TTFT) is promised if a seat is free, and the step under way and then everything that
    is known and not computed (prompts ahead, one token of each that decodes, the new prompt) take at most 0.9 of it, at
    the pace of full steps where it is more than one. Conservative: some of it may be cached. Not conservative: an order
    other than fcfs may let later requests go first.

    Not thread-safe; the engine calls it under its lock.
    """

    def __init__(self, times: StepTimes, *, strict: bool, paced: bool, max_num_seqs: int) -> None:
        """`max_num_seqs`: requests that may run at once. Unless `strict`, nothing is refused, and nothing kept."""
        self._times, self._strict, self._paced, self._max_num_seqs = times, strict, paced, max_num_seqs
        self._tpot: dict[str, float] = {}
        #: Requests refused so far.
        self.refused = 0

    def __len__(self) -> int:
        """TPOT targets that are being kept."""
        return len(self._tpot)

    def admit(
        self, request: Request, prompt_tokens: int, others: Iterable[Request], seen: Experience = Experience()
    ) -> None:
        """Promise a new request its targets, until `release`. Raises `SloRefused`, and then nothing is promised.

        `prompt_tokens`: those of its prompt to be computed; `others`: all that wait or run.
        """
        if not self._strict or not request.slo:
            return
        slo = request.slo
        reason = self._too_slow(slo.tpot, seen) or self._too_late(slo.ttft, prompt_tokens, others, seen)
        if reason:
            self.refused += 1
            raise SloRefused(reason)
        if slo.tpot is not None:
            self._tpot[request.id] = slo.tpot

    def release(self, request_id: str) -> None:
        """The request has ended, in whatever way. Unknown ids are ignored."""
        self._tpot.pop(request_id, None)

    def _too_slow(self, tpot: float | None, seen: Experience) -> str | None:
        if tpot is None:
            return None
        targets = [*self._tpot.values(), tpot]
        tightest = min(targets)
        load = sum(tightest / t for t in targets) if self._paced else len(targets)
        plain, drafted = (self._step(ceil(load * (1 + k) - 1e-9), seen) for k in (0.0, seen.drafts))
        if plain <= MARGIN * tightest or drafted <= MARGIN * tightest * seen.gain:
            return None
        return (
            f"slo.tpot_ms: {_ms(tpot)} cannot be kept beside {len(self)} requests with such a target: a step for "
            f"all takes about {_ms(plain)} ms, and may take {_ms(MARGIN * tightest)} ms"
        )

    def _too_late(
        self, ttft: float | None, prompt_tokens: int, others: Iterable[Request], seen: Experience
    ) -> str | None:
        if ttft is None:
            return None
        others = list(others)
        if len(others) >= self._max_num_seqs:
            return f"slo.ttft_ms: {_ms(ttft)} cannot be promised while all {self._max_num_seqs} running slots are taken"
        decoding, ahead = sum(r.decoding for r in others), sum(r.remaining_known for r in others)
        seconds = (self._step(decoding, seen) if decoding else 0.0) + self._step(ahead + prompt_tokens, seen)
        if seconds <= MARGIN * ttft:
            return None
        return (
            f"slo.ttft_ms: {_ms(ttft)} cannot be kept: {ahead} tokens are to be computed before the prompt's "
            f"{prompt_tokens}, which takes about {_ms(seconds)} ms, and may take {_ms(MARGIN * ttft)} ms"
        )

    def _step(self, tokens: int, seen: Experience) -> float:
        return seen.overhead + self._times.of(tokens)


def _ms(seconds: float) -> str:
    return f"{round(1000 * seconds, 3):g}"
