"""A straight line through observations that keep coming."""

from __future__ import annotations


class Regression:
    """Least squares of y on x; an observation weighs 1/e after `memory` later ones."""

    def __init__(self, memory: int) -> None:
        self._memory = memory
        self.count = 0
        #: Means.
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
        """None as long as x has not varied."""
        return self._product / self._square if self._square > 1e-9 else None
