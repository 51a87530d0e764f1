"""What a round of drafting and verifying takes."""

from __future__ import annotations

#: Rounds after which an observation weighs 1/e.
_MEMORY = 1000


class RoundCost:
    """Seconds of a round as `n · draft + verify`, n tokens drafted; what is not given is learned from the rounds.

    Learned by least squares over recent rounds. As long as all draft the same number, all time counts as `verify`,
    which is right for that number.
    """

    def __init__(self, draft: float | None = None, verify: float | None = None) -> None:
        self._given = draft, verify
        self._count = 0
        self._n = self._seconds = 0.0  # means
        self._square = self._product = 0.0  # variance of n, covariance of both

    def observe(self, n: int, seconds: float) -> None:
        self._count += 1
        weight = 1 / min(self._count, _MEMORY)
        dn, ds = n - self._n, seconds - self._seconds
        self._n += weight * dn
        self._seconds += weight * ds
        self._square = (1 - weight) * (self._square + weight * dn * dn)
        self._product = (1 - weight) * (self._product + weight * dn * ds)

    @property
    def draft(self) -> float:
        """T_ssm: seconds a drafted token."""
        if self._given[0] is not None:
            return self._given[0]
        return max(0.0, self._product / self._square) if self._square > 1e-9 else 0.0

    @property
    def verify(self) -> float:
        """T_llm: seconds of a round beside its drafting."""
        return self._given[1] if self._given[1] is not None else max(0.0, self._seconds - self._n * self.draft)

    def seconds(self, n: float) -> float:
        """Of a round that drafts n tokens."""
        return n * self.draft + self.verify
