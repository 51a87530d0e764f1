"""Time estimates: step times, draft rounds, execution time of a request, page transfers."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from math import log1p

import numpy as np

from jaxspec.sched.plan import Plan, RequestResult
from jaxspec.sched.request import Request


class Regression:
    """Least squares of y on x; an observation weighs 1/e after `memory` later ones."""

    def __init__(self, memory: int) -> None:
        self._kv = memory
        self.count = 0
        #: Means.
        self.x = self.y = 0.0
        self._square = self._product = 0.0  # variance of x, covariance of both

    def observe(self, x: float, y: float) -> None:
        self.count += 1
        weight = 1 / min(self.count, self._kv)
        dx, dy = x - self.x, y - self.y
        self.x += weight * dx
        self.y += weight * dy
        self._square = (1 - weight) * (self._square + weight * dx * dx)
        self._product = (1 - weight) * (self._product + weight * dx * dy)

    @property
    def slope(self) -> float | None:
        """None as long as x has not varied."""
        return self._product / self._square if self._square > 1e-9 else None


@dataclass(frozen=True, slots=True)
class SwapCosts:
    """Seconds, profiled on the engine or at the scale of a paper's machine. Raises `ValueError`.

    They decide between swapping and computing anew, and are what the runtime model (ALISE §3.1) starts from: give them
    where `order` is alise too, although nothing is swapped there.
    """

    #: To move a page from the device to the host, and back, drafters' rows and quantising included.
    offload_page: float
    upload_page: float
    #: A prompt token's share of a step that is full of them.
    prefill_token: float
    #: A step in which requests only decode.
    decode_step: float

    def __post_init__(self) -> None:
        for field in fields(self):
            if not getattr(self, field.name) >= 0:
                raise ValueError(f"{field.name} must not be negative, got {getattr(self, field.name)}")

    def swap(self, pages: int) -> float:
        """Of moving so many pages out and in again."""
        return pages * (self.offload_page + self.upload_page)

    def beside(self, share: float) -> int:
        """Pages, at least one, that go out and others in while a step takes no longer than by this share."""
        page = self.swap(1)
        return max(1, int(share * self.decode_step / page)) if page else 2**31

    def recompute(self, tokens: int) -> float:
        """Of computing the KV of so many tokens anew."""
        return tokens * self.prefill_token


#: Share of an observed deviation that moves the time of all sizes, and of the observed size alone.
_ALL, _OWN = 0.03, 0.02
#: An outlier (a pause of the machine) counts as a step that took this many times longer than expected.
_OUTLIER = 2.0
#: How fast a size that no longer occurs is forgotten, and the weight below which it counts as not seen of late.
_FADE, _SEEN = 0.02, 1e-3


class StepTimes:
    """Seconds by a ladder of step sizes, to which steps are padded. Raises `ValueError` for an empty one.

    A larger step is never taken to be the faster one: that is noise.
    """

    def __init__(self, seconds: Mapping[int, float]) -> None:
        self._profiled: dict[int, float] = {}
        #: Ascending sizes and their seconds `[sizes]`; replaced as one, since other threads read it.
        self._ladder: tuple[list[int], np.ndarray] = [], np.zeros(0)
        self._own = self._weight = np.zeros(0)
        #: Logarithm of the deviation from the profile that all sizes have in common.
        self._all = 0.0
        self.learn(seconds)

    def learn(self, seconds: Mapping[int, float]) -> None:
        """Take in profiled times of sizes, new ones or known ones that were measured again."""
        profiled = {**self._profiled, **seconds}
        if not profiled or min(profiled) < 1 or min(profiled.values()) <= 0:
            raise ValueError("step times need at least one size, and positive seconds")
        kept = {n: (self._own[i], self._weight[i]) for i, n in enumerate(self.sizes) if n not in seconds}
        if not kept:  # all of it is new, so what corrected the old is void
            self._all = 0.0
        self._profiled, sizes = profiled, sorted(profiled)
        #: Logarithm of each size's own deviation from the profile, and how often it was seen of late `[sizes]`.
        self._own, self._weight = (np.asarray([kept.get(n, (0.0, 0.0))[k] for n in sizes]) for k in (0, 1))
        self._update(sizes)

    def _update(self, sizes: list[int]) -> None:
        profiled = np.asarray([self._profiled[n] for n in sizes])
        self._ladder = sizes, np.maximum.accumulate(profiled * np.exp(self._own + self._all))

    @property
    def sizes(self) -> list[int]:
        """The ladder, ascending."""
        return self._ladder[0]

    def of(self, tokens: int) -> float:
        """Seconds of a step of so many tokens; of as many steps as it takes where one cannot hold them."""
        sizes, seconds = self._ladder
        if tokens > sizes[-1]:
            return float(seconds[-1]) * tokens / sizes[-1]
        return float(seconds[bisect_left(sizes, tokens)])

    def worth(self, chances: np.ndarray, expected: float, tokens: int) -> int:
        """How many draft nodes with these falling `chances [n]` of being accepted to add to a step of `tokens` that is
        expected to give so many: those that raise the expected tokens per second, of equals the most."""
        expecting = np.cumsum(np.append(expected, chances))
        sizes = tokens + np.arange(len(expecting))
        sizes[0] = max(tokens, 1)
        speeds = expecting / self._of_each(sizes)
        return int(len(speeds) - 1 - speeds[::-1].argmax())

    def _of_each(self, tokens: np.ndarray) -> np.ndarray:
        """As `of`, `[n]` of `[n]`."""
        ladder, seconds = self._ladder
        last = ladder[-1]
        within = seconds[np.searchsorted(ladder, np.minimum(tokens, last))]
        return np.where(tokens > last, within * tokens / last, within)

    def observe(self, tokens: int, seconds: float) -> None:
        """A step of `tokens` took `seconds`.

        What the sizes seen of late have in common moves all sizes: where plain steps have become slower, those with
        drafts have too, although none was seen. What tells them apart stays each size's own, so a profile that is
        wrong about one size is corrected as soon as that size and another one occur.
        """
        sizes = self.sizes
        i = bisect_left(sizes, tokens)
        if i == len(sizes) or seconds <= 0:
            return
        expected = self._profiled[sizes[i]] * float(np.exp(self._own[i] + self._all))
        error = min(seconds / expected, _OUTLIER) - 1  # not its logarithm: it is the mean time that counts
        self._all += log1p(_ALL * error)
        self._own[i] += log1p(_OWN * error)
        self._weight *= 1 - _FADE
        self._weight[i] += _FADE
        common = float(self._weight @ self._own / self._weight.sum())
        self._own[self._weight > _SEEN] -= common
        self._all += common
        self._update(sizes)

    def within(self, seconds: float) -> int:
        """The most tokens of a step that takes no longer; 0 if none is so fast."""
        sizes, of_sizes = self._ladder
        i = bisect_right(of_sizes.tolist(), seconds)
        return sizes[i - 1] if i else 0

    @property
    def verify_budget(self) -> int:
        """AdaServe's B (§3): tokens at which a step stops being bound by memory and begins to be bound by arithmetic.

        Its Table 1 divides a device's arithmetic by its bandwidth. This is the same from what was measured: a step of
        one token is all memory, the share of one in the largest step all arithmetic, and B where the two lines
        meet, rounded up to a size.
        """
        sizes, seconds = self._ladder
        meet = float(seconds[0] / seconds[-1]) * sizes[-1]
        return sizes[min(bisect_left(sizes, round(meet)), len(sizes) - 1)]


def between(seconds: Mapping[int, float], tokens: int) -> float:
    """Seconds of a step of `tokens` by those of smaller and larger ones, `{tokens: seconds}`, on straight lines."""
    sizes = sorted(seconds)
    return float(np.interp(tokens, sizes, [seconds[n] for n in sizes]))


#: Steps after which an observation weighs 1/e, and those that what was known before counts for.
_MEMORY, _PRIOR = 2000, 16
#: Where nothing was profiled: seconds of a prompt token and of a step. Their ratio is what orders requests.
_PREFILL_TOKEN, _DECODE_STEP = 1e-3, 0.03


class Runtime:
    """`prefill = a·s_in + b`, `decode = (c·s_in + d)·s_out`: seconds, for s_in prompt and s_out output tokens.

    Both lines are fitted to steps by least squares: a step's prefill (what it takes longer than one that only decodes)
    on its prompt tokens, the time of a token in a step that only decodes on the mean prompt length of its requests.
    They start at what was profiled, or at a guess. Requests run in batches: these are the times that one sees, not its
    share of them.
    """

    def __init__(self, costs: SwapCosts | None = None) -> None:
        self._start = (costs.prefill_token, costs.decode_step) if costs else (_PREFILL_TOKEN, _DECODE_STEP)
        self._prefill, self._decode = Regression(_MEMORY), Regression(_MEMORY)
        self.a, self.b, self.c, self.d = self._start[0], 0.0, 0.0, self._start[1]

    def observe(self, plan: Plan, results: Sequence[RequestResult], seconds: float) -> None:
        """Take in a step, before its outcomes have been added to its requests."""
        decoding = prompts = produced = prefilled = 0
        for scheduled, result in zip(plan.scheduled, results, strict=True):
            if scheduled.request.decoding:
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
        """Seconds until the request ends once it runs, by its predicted length; at least those of one more token."""
        left = max(1.0, request.expected_len - request.output_len)
        seconds = (self.c * request.prompt_len + self.d) * left
        return seconds if request.output_len else seconds + self.a * request.prompt_len + self.b


def _fitted(line: Regression, slope: float, offset: float) -> tuple[float, float]:
    """The line, its start counting for `_PRIOR` observations; neither is negative."""
    share = line.count / (line.count + _PRIOR)
    found = line.slope
    slope += share * (max(0.0, slope if found is None else found) - slope)
    offset += share * (max(0.0, line.y - slope * line.x) - offset)
    return slope, offset


#: Rounds after which an observation weighs 1/e.
_MEMORY = 1000


class RoundCost:
    """Seconds of a round as `n · draft + verify`, n tokens drafted; what is not given is learned from the rounds.

    Learned by least squares over recent rounds. As long as all draft the same number, all time counts as `verify`,
    which is right for that number.
    """

    def __init__(self, draft: float | None = None, verify: float | None = None) -> None:
        self._given = draft, verify
        self._line = Regression(_MEMORY)

    def observe(self, n: int, seconds: float) -> None:
        self._line.observe(n, seconds)

    @property
    def draft(self) -> float:
        """T_ssm: seconds a drafted token."""
        return self._given[0] if self._given[0] is not None else max(0.0, self._line.slope or 0.0)

    @property
    def verify(self) -> float:
        """T_llm: seconds of a round beside its drafting."""
        line = self._line
        return self._given[1] if self._given[1] is not None else max(0.0, line.y - line.x * self.draft)

    def seconds(self, n: float) -> float:
        """Of a round that drafts n tokens."""
        return n * self.draft + self.verify
