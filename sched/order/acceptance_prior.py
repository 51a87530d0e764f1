"""The Beta prior of acceptance rates, learned from finished requests (an addition to LAPS-SD)."""

from __future__ import annotations

#: Finished requests from which the prior is used.
_ENOUGH = 8


class AcceptancePrior:
    """Beta prior of the requests' acceptance rates, by the method of moments.

    A rate measured over few rounds is noisy: the highest and lowest ones are mostly luck. Its posterior mean under the
    prior lies closer to the mean of all requests, the more so the fewer rounds it was measured over.
    """

    def __init__(self) -> None:
        self._count = 0
        # Means over finished requests: their final rate, its square, one round's variance, and 1 / rounds.
        self._rate = self._square = self._noise = self._inverse = 0.0

    def learn(self, estimate: float, rounds: int, final: float, total: int) -> None:
        """A request has finished with acceptance rate `final` after `total` rounds; after `rounds` it was estimated as
        `estimate`."""
        self._count += 1
        weight = 1 / self._count
        self._rate += weight * (final - self._rate)
        self._square += weight * (final**2 - self._square)
        self._noise += weight * (rounds * (estimate - final) ** 2 - self._noise)
        self._inverse += weight * (1 / total - self._inverse)

    @property
    def concentration(self) -> float | None:
        """The prior's weight in rounds; None if it is unknown or if the requests' true rates do not differ."""
        # The final rates vary more than the true ones, by the noise of their own rounds.
        spread = self._square - self._rate**2 - self._noise * self._inverse
        return self._noise / spread if self._count >= _ENOUGH and spread > 0 else None

    def posterior(self, estimate: float, rounds: int) -> float:
        """The mean rate of requests with this estimate after `rounds`. It stays as it is until enough have finished."""
        if self._count < _ENOUGH:
            return estimate
        if (concentration := self.concentration) is None:
            return self._rate
        return (rounds * estimate + concentration * self._rate) / (rounds + concentration)
