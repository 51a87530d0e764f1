"""How long a step takes by the number of its tokens: profiled, and corrected by every step that runs."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Mapping
from math import log1p

import numpy as np

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
    def budget(self) -> int:
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
