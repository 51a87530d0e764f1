"""Time estimates: step times, draft rounds, execution time of a request, page transfers."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from math import log1p

import numpy as np

from jaxspec.sched.plan import Plan, RequestResult
from jaxspec.sched.request import Request
from jaxspec.sched.step_fit import rising


class Regression:
    """Least squares of y on x. An observation's weight falls to 1/e after `memory` later ones."""

    def __init__(self, memory: int) -> None:
        self._memory = memory
        self.count = 0
        #: Means of x and y.
        self.x = self.y = 0.0
        self._square = self._product = 0.0  # variance of x, covariance of both

    def observe(self, x: float, y: float) -> None:
        self.count += 1
        weight = 1 / min(self.count, self._memory)
        dx, dy = x - self.x, y - self.y
        self.x += weight * dx
        self.y += weight * dy
        self._square = (1 - weight) * (self._square + weight * dx * dx)
        self._product = (1 - weight) * (self._product + weight * dx * dy)

    @property
    def slope(self) -> float | None:
        """Slope of the fitted line; None until x has varied."""
        return self._product / self._square if self._square > 1e-9 else None


@dataclass(frozen=True, slots=True)
class SwapCosts:
    """Costs in seconds, profiled on the engine or those of a paper's machine. Raises `ValueError` if negative.

    They decide between swapping and recomputing, and are the start values of the runtime model (ALISE §3.1), so
    `order: alise` needs them even if nothing is swapped.
    """

    #: Moving a page to the host, and back; drafters' KV and quantisation included.
    offload_page: float
    upload_page: float
    #: One prompt token in a step full of prompt tokens.
    prefill_token: float
    #: A step in which requests only decode.
    decode_step: float

    def __post_init__(self) -> None:
        for field in fields(self):
            if not getattr(self, field.name) >= 0:
                raise ValueError(f"{field.name} must not be negative, got {getattr(self, field.name)}")

    def swap(self, pages: int) -> float:
        """Seconds to move `pages` out and in again."""
        return pages * (self.offload_page + self.upload_page)

    def pages_within(self, share: float) -> int:
        """Pages, at least one, that can be moved out and in within this share of a decode step."""
        page = self.swap(1)
        return max(1, int(share * self.decode_step / page)) if page else 2**31

    def recompute(self, tokens: int) -> float:
        """Seconds to recompute the KV of `tokens`."""
        return tokens * self.prefill_token


#: Learning rates: of the deviation that all sizes share, and of the observed size's own deviation.
_ALL, _OWN = 0.03, 0.02
#: Learning rate of the seconds per committed position.
_POSITION = 0.03
#: An outlier (a pause of the machine) counts as at most this many times the expected time.
_OUTLIER = 2.0
#: Decay of a size's weight per step, the weight below which a size counts as not seen recently, and what its profiled
#: time counts besides.
_FADE, _SEEN, _PROFILED = 0.02, 1e-3, 0.02


class StepTimes:
    """Seconds of a step: those of its bucket size, plus `position` for each committed KV position that it reads.

    Times never fall with size: where a larger step was faster, which is noise, all sizes concerned get their mean, in
    which those that have run recently count most. Raises `ValueError` without any size.
    """

    def __init__(self, seconds: Mapping[int, float], position: float = 0.0) -> None:
        self._profiled: dict[int, float] = {}
        #: Seconds per committed position. 0: not measured; then the sizes' times include what attention usually takes.
        self.position = position
        #: Ascending sizes and their seconds `[sizes]`. Replaced as one object, because other threads read it.
        self._ladder: tuple[list[int], np.ndarray] = [], np.zeros(0)
        self._own = self._weight = np.zeros(0)
        #: Log of the deviation from the profile that all sizes share.
        self._all = 0.0
        self.learn(seconds)

    def learn(self, seconds: Mapping[int, float], position: float | None = None) -> None:
        """Add profiled seconds by size, of steps that read no KV; a size measured again replaces its old time.

        `position`: profiled seconds per committed position; None: unchanged.
        """
        if position is not None:
            self.position = position
        profiled = {**self._profiled, **seconds}
        if not profiled or min(profiled) < 1 or min(profiled.values()) <= 0:
            raise ValueError("step times need at least one size, and positive seconds")
        kept = {n: (self._own[i], self._weight[i]) for i, n in enumerate(self.sizes) if n not in seconds}
        if not kept:  # the whole profile is new: drop the correction of the old one
            self._all = 0.0
        self._profiled, sizes = profiled, sorted(profiled)
        #: Log of each size's own deviation from the profile, and its recent frequency `[sizes]`.
        self._own, self._weight = (np.asarray([kept.get(n, (0.0, 0.0))[k] for n in sizes]) for k in (0, 1))
        self._update(sizes)

    def _update(self, sizes: list[int]) -> None:
        profiled = np.asarray([self._profiled[n] for n in sizes])
        self._ladder = sizes, rising(profiled * np.exp(self._own + self._all), self._weight + _PROFILED)

    @property
    def sizes(self) -> list[int]:
        """Bucket sizes in tokens, ascending."""
        return self._ladder[0]

    def of(self, tokens: int, context: float = 0.0) -> float:
        """Seconds of a step of `tokens` that reads `context` committed positions of all its requests together.

        Beyond the largest bucket, of as many steps as it takes; each position is read once.
        """
        sizes, seconds = self._ladder
        read = self.position * context
        if tokens > sizes[-1]:
            return float(seconds[-1]) * tokens / sizes[-1] + read
        return float(seconds[bisect_left(sizes, tokens)]) + read

    def of_each(self, tokens: np.ndarray, context: np.ndarray | float = 0.0) -> np.ndarray:
        """`of`, vectorised: `[n]` -> `[n]`; `context` is `[n]` or one number for all."""
        ladder, seconds = self._ladder
        last = ladder[-1]
        within = seconds[np.searchsorted(ladder, np.minimum(tokens, last))]
        return np.where(tokens > last, within * tokens / last, within) + self.position * context

    def best_node_count(
        self, chances: np.ndarray, expected: float, tokens: int, context: float = 0.0, overhead: float = 0.0
    ) -> int:
        """Number of draft nodes that maximises expected tokens per second; ties prefer more nodes.

        `chances [n]` are the nodes' acceptance probabilities, descending. A step without drafts has `tokens` tokens and
        gives `expected` new ones. With drafts or without, it reads `context` committed positions. `overhead`: seconds
        that drafts add, however few they are.
        """
        expecting = np.cumsum(np.append(expected, chances))
        sizes = tokens + np.arange(len(expecting))
        sizes[0] = max(tokens, 1)
        seconds = self.of_each(sizes, context)
        seconds[1:] += overhead
        speeds = expecting / seconds
        return int(len(speeds) - 1 - speeds[::-1].argmax())

    def least_chance(self, tokens: int, context: float = 0.0, most: int = 8, overhead: float = 0.0) -> float:
        """The acceptance probability from which draft nodes, at most `most` of them, raise the tokens per second of a
        step of `tokens` plain tokens: of k nodes, a share of (time with them / time without - 1) * tokens / k.

        `overhead`: as in `best_node_count`.
        """
        count = np.arange(1, most + 1)
        longer = (self.of_each(tokens + count, context) + overhead) / self.of(tokens, context) - 1
        return float((longer * tokens / count).min())

    def observe(self, tokens: int, seconds: float, context: float = 0.0) -> None:
        """Correct the profile by a step of `tokens` that read `context` committed positions and took `seconds`.

        An error counts for the size and for the positions in proportion to their shares of the expected time
        (normalised least mean squares): steps of short requests say little about positions. Of the size's part, the
        deviation that recently seen sizes share moves all sizes: when plain steps become slower, steps with drafts
        do too, even if none has run. The rest stays with each size, so a profile that is wrong about one size is
        corrected once that size and another one have run.
        """
        sizes = self.sizes
        i = bisect_left(sizes, tokens)
        if i == len(sizes) or seconds <= 0:
            return
        own, read = self._profiled[sizes[i]] * float(np.exp(self._own[i] + self._all)), self.position * context
        error = min(seconds / (own + read), _OUTLIER) - 1  # not its log: the mean time counts
        share = read / (own + read)
        error /= share**2 + (1 - share) ** 2
        self.position *= 1 + _POSITION * share * error
        self._all += log1p(_ALL * (1 - share) * error)
        self._own[i] += log1p(_OWN * (1 - share) * error)
        self._weight *= 1 - _FADE
        self._weight[i] += _FADE
        common = float(self._weight @ self._own / self._weight.sum())
        self._own[self._weight > _SEEN] -= common
        self._all += common
        self._update(sizes)

    def within(self, seconds: float, context: float = 0.0) -> int:
        """Largest step size in tokens that takes at most `seconds` with these committed positions; 0 if none does."""
        sizes, of_sizes = self._ladder
        i = bisect_right(of_sizes.tolist(), seconds - self.position * context)
        return sizes[i - 1] if i else 0

    def verify_budget(self, context: float = 0.0) -> int:
        """AdaServe's B (§3): step size in tokens where the step changes from memory-bound to compute-bound.

        Table 1 of the paper divides FLOPs by bandwidth. Here both come from the profile: a step of one token is
        memory-bound, one token's share of the largest step is compute-bound, and B is where the two lines meet,
        rounded up to a bucket. Reading committed positions leaves that point where it is, but is the same for all
        sizes, so larger steps are less longer than one of one token. With a `context`, B is the largest step that is
        longer by no larger factor than B is without.
        """
        sizes, seconds = self._ladder
        meet = float(seconds[0] / seconds[-1]) * sizes[-1]
        plain = sizes[min(bisect_left(sizes, round(meet)), len(sizes) - 1)]
        return max(plain, self.within(self.of(plain) / self.of(1) * self.of(1, context), context))


def between(seconds: Mapping[int, float], tokens: int) -> float:
    """Seconds of a step of `tokens`, interpolated linearly between `{tokens: seconds}`."""
    sizes = sorted(seconds)
    return float(np.interp(tokens, sizes, [seconds[n] for n in sizes]))


#: Requests that the means of response times are over.
_RESPONSES = 256


class ResponseTimes:
    """Mean seconds from arrival to end that the last arrivals would take first come, first served.

    Forecast when a request arrives, from the number that wait for one of the `slots` and from the mean time that
    requests run. The times of requests that have ended would lag behind while a queue grows. `start`: before any.
    """

    def __init__(self, slots: int, start: float = 10.0) -> None:
        self.mean = self._running = start
        self._slots, self._arrived, self._ended = slots, 0, 0

    def arrived(self, waiting: int) -> None:
        """A request has arrived while `waiting` others wait for a slot."""
        self._arrived += 1
        forecast = self._running * (1 + waiting / self._slots)
        self.mean += (forecast - self.mean) / min(self._arrived, _RESPONSES)

    def ended(self, seconds: float) -> None:
        """A request has ended that long after it was scheduled first."""
        self._ended += 1
        self._running += (max(seconds, 1e-6) - self._running) / min(self._ended, _RESPONSES)


#: Steps after which an observation's weight is 1/e, and the observations that the start values count for.
_RUNTIME_MEMORY, _PRIOR = 2000, 16
#: Without a profile: seconds of a prompt token and of a step. Only their ratio matters for the order of requests.
_PREFILL_TOKEN, _DECODE_STEP = 1e-3, 0.03


class Runtime:
    """ALISE's runtime model (§3.1): `prefill = a·s_in + b`, `decode = (c·s_in + d)·s_out` seconds.

    s_in and s_out are prompt and output tokens. Both lines are fitted by least squares: the extra time of a step with
    prefill on its prompt tokens, and the time per token of a decode-only step on the mean prompt length of its
    requests. They start from `costs`, or from a guess. Requests run in batches: these are the times a request
    experiences, not its share of the step.
    """

    def __init__(self, costs: SwapCosts | None = None) -> None:
        self._start = (costs.prefill_token, costs.decode_step) if costs else (_PREFILL_TOKEN, _DECODE_STEP)
        self._prefill, self._decode = Regression(_RUNTIME_MEMORY), Regression(_RUNTIME_MEMORY)
        self.a, self.b, self.c, self.d = self._start[0], 0.0, 0.0, self._start[1]

    def observe(self, plan: Plan, results: Sequence[RequestResult], seconds: float) -> None:
        """Learn from a step. Call it before the results are appended to the requests."""
        decoding = prompts = produced = prefilled = 0
        for scheduled, result in zip(plan.scheduled, results, strict=True):
            if scheduled.decodes:
                decoding += 1
                prompts += scheduled.request.prompt_len
                produced += len(result.tokens)
            else:
                prefilled += scheduled.count
        if prefilled:
            usual = self.c * prompts / decoding + self.d if decoding else 0.0
            self._prefill.observe(prefilled, max(0.0, seconds - usual))
            self.a, self.b = _fitted(self._prefill, self._start[0], 0.0)
        elif produced:
            self._decode.observe(prompts / decoding, seconds * decoding / produced)
            self.c, self.d = _fitted(self._decode, 0.0, self._start[1])

    def remaining(self, request: Request) -> float:
        """Predicted seconds until the request ends once it runs; at least one more token."""
        left = max(1.0, request.expected_len - request.output_len)
        seconds = (self.c * request.prompt_len + self.d) * left
        return seconds if request.output_len else seconds + self.a * request.prompt_len + self.b


def _fitted(line: Regression, slope: float, offset: float) -> tuple[float, float]:
    """Slope and offset of the line, blended with the start values; never negative."""
    share = line.count / (line.count + _PRIOR)
    found = line.slope
    slope += share * (max(0.0, slope if found is None else found) - slope)
    offset += share * (max(0.0, line.y - slope * line.x) - offset)
    return slope, offset


#: Rounds after which an observation's weight is 1/e.
_ROUND_MEMORY = 1000


class DraftedStepTimes:
    """Seconds of a round, a step with its drafting, that drafts n tokens: `n · draft + verify` (LAPS-SD §4).

    Values that are not given are learned by least squares over recent rounds. While all rounds draft the same number
    of tokens, all time counts as `verify`, which is correct for that number.
    """

    def __init__(self, draft: float | None = None, verify: float | None = None) -> None:
        self._given = draft, verify
        self._line = Regression(_ROUND_MEMORY)

    def observe(self, n: int, seconds: float) -> None:
        self._line.observe(n, seconds)

    @property
    def draft(self) -> float:
        """T_ssm: seconds per drafted token."""
        return self._given[0] if self._given[0] is not None else max(0.0, self._line.slope or 0.0)

    @property
    def verify(self) -> float:
        """T_llm: seconds of a round without drafting."""
        line = self._line
        return self._given[1] if self._given[1] is not None else max(0.0, line.y - line.x * self.draft)

    def seconds(self, n: float) -> float:
        """Seconds of a round that drafts n tokens."""
        return n * self.draft + self.verify


#: Learning rate of the deviation of draft rounds.
_ROUND_RATE = 0.05


class DraftRoundTimes:
    """Seconds of a draft model's rounds: as profiled, times the deviation that all observed rounds share.

    The profile lacks attention to committed KV and host time.
    """

    def __init__(self, profiled: Callable[[int, int, int, int], float]) -> None:
        """`profiled`: (requests, uncached tokens, levels, width) -> seconds."""
        self._profiled, self._deviation = profiled, 1.0

    def of(self, requests: int, uncached: int, levels: int, width: int) -> float:
        return self._deviation * self._profiled(requests, uncached, levels, width)

    def observe(
        self, requests: int, uncached: int, levels: int, width: int, seconds: float, at_most: bool = False
    ) -> None:
        """Learn from a round that took `seconds`, or `at_most` that."""
        expected = self._profiled(requests, uncached, levels, width)
        ratio = seconds / expected if expected else 1.0
        ratio = min(ratio, self._deviation if at_most else _OUTLIER * self._deviation)
        self._deviation += _ROUND_RATE * (ratio - self._deviation)
