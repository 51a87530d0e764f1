"""How long a step takes by the number of its tokens: profiled, and kept up to date."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Mapping

import numpy as np


class StepTimes:
    """Seconds by a ladder of step sizes, to which steps are padded. Raises `ValueError` for an empty one."""

    def __init__(self, seconds: Mapping[int, float]) -> None:
        if not seconds or min(seconds) < 1 or min(seconds.values()) <= 0:
            raise ValueError("step times need at least one size, and positive seconds")
        self.sizes = sorted(seconds)
        # A larger step is never taken to be the faster one: that is noise.
        self._seconds: list[float] = []
        for size in self.sizes:
            self._seconds.append(max(seconds[size], self._seconds[-1] if self._seconds else 0.0))
        #: How much longer a step takes than its profile says. One number for all: where plain steps have become slower,
        #: those with drafts have too, although none was seen of late.
        self.scale = 1.0

    def of(self, tokens: int) -> float:
        last = self.sizes[-1]
        if tokens > last:  # more than one step's: as many steps
            return self.scale * self._seconds[-1] * tokens / last
        return self.scale * self._seconds[bisect_left(self.sizes, tokens)]

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
        last, seconds = self.sizes[-1], np.asarray(self._seconds)
        within = seconds[np.searchsorted(self.sizes, np.minimum(tokens, last))]
        return self.scale * np.where(tokens > last, within * tokens / last, within)

    def observe(self, tokens: int, seconds: float) -> None:
        """A step of so many took so long; outliers (a pause of the machine) count as twice the usual."""
        i = bisect_left(self.sizes, tokens)
        if i < len(self.sizes):
            self.scale += 0.05 * (min(seconds / self._seconds[i], 2 * self.scale) - self.scale)

    def within(self, seconds: float) -> int:
        """The most tokens of a step that takes no longer; 0 if none is so fast."""
        i = bisect_right(self._seconds, seconds / self.scale)
        return self.sizes[i - 1] if i else 0

    @property
    def budget(self) -> int:
        """AdaServe's B (§3): tokens at which a step stops being bound by memory and begins to be bound by arithmetic.

        Its Table 1 divides a device's arithmetic by its bandwidth. This is the same from what was measured: a step of
        one token is all memory, the share of one in the largest step all arithmetic, and B where the two lines
        meet, rounded up to a size.
        """
        one, largest = self._seconds[0], self._seconds[-1]
        meet = one * self.sizes[-1] / largest
        return self.sizes[min(bisect_left(self.sizes, round(meet)), len(self.sizes) - 1)]
