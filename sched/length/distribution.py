"""The distribution of an output length, given its prediction and the tokens so far."""

from __future__ import annotations

from collections import deque
from math import exp
from statistics import NormalDist
from typing import Any

import numpy as np
import numpy.typing as npt

from jaxspec.sched.request import Request

_Floats = npt.NDArray[np.floating[Any]]

#: Ended requests that count, and how many change the distribution before it is computed again.
_MEMORY, _REFRESH = 1024, 32
#: Of an answer's later predictions at most this many are observed, when it ends. Memory and refresh are as many times
#: larger, so that they are of as many requests.
_AGAIN = 8
#: Before any request has ended: this number of made-up ones, log-normal around the prediction with this deviation.
_PRIOR, _DEVIATION = 32, 0.7
#: The same without predictions: median and deviation of the output length in tokens.
_MEDIAN, _SPREAD = 150.0, 1.2


class RatioDistribution:
    """Distribution of true / predicted length, by the Kaplan-Meier estimate over ended requests.

    An answer that was cut, at `max_tokens` or by its client, is censored: it would have been at least as long.
    """

    def __init__(self, median: float = 1.0, deviation: float = _DEVIATION, times: int = 1) -> None:
        """`times`: factor on the numbers of observations that count and that change the distribution."""
        normal = NormalDist(0.0, deviation)
        prior = (median * exp(normal.inv_cdf((i + 0.5) / _PRIOR)) for i in range(_PRIOR))
        # (ratio, whether the request ended by itself)
        self._seen: deque[tuple[float, bool]] = deque(((ratio, True) for ratio in prior), times * _MEMORY)
        self._new, self._refresh = 0, times * _REFRESH
        #: Counts how often the distribution has changed.
        self.version = 0
        self._compute()

    def observe(self, ratio: float, ended: bool) -> None:
        """A request has ended with this ratio: by itself, or else it was cut (`ended` false)."""
        self._seen.append((ratio, ended))
        self._new += 1
        if self._new >= self._refresh:
            self._new = 0
            self.version += 1
            self._compute()

    def _compute(self) -> None:
        ratios, ended = (np.asarray(x) for x in zip(*self._seen, strict=True))
        order = np.lexsort((~ended, ratios))  # of equal ratios, those that ended count before those that were cut
        ratios, ended = ratios[order].astype(float), ended[order]
        at_risk = np.arange(len(ratios), 0, -1)
        ended[-1] = True  # what is left lies at the largest ratio
        #: Ratios at which requests end, ascending, and the share of requests with larger ones, `[n]` each. Replaced as
        #: one object, because admission reads it in another thread.
        self.curve: tuple[_Floats, _Floats] = ratios[ended], np.cumprod(1 - ended / at_risk)[ended]

    def quantile(self, share: float, above: float = 0.0) -> float | None:
        """Smallest ratio that `share` of the requests with ratios larger than `above` do not exceed; None if none have
        been so large."""
        ratios, survival = curve = self.curve
        left = _above(curve, above)
        if left <= 0:
            return None
        i = int(np.searchsorted(-survival, -(1 - share) * left * (1 + 1e-12), "left"))
        return float(ratios[min(i, len(ratios) - 1)])


def _above(curve: tuple[_Floats, _Floats], ratio: float) -> float:
    i = int(np.searchsorted(curve[0], ratio, "right"))
    return float(curve[1][i - 1]) if i else 1.0


class LengthDistribution:
    """Distributions of output lengths.

    Of requests with a prediction: relative to it. Of requests that were predicted again: what was left then, relative
    to what that prediction said. Of those without one yet: in tokens, as all that have ended.
    """

    def __init__(self) -> None:
        self._predicted, self._repredicted = RatioDistribution(), RatioDistribution(times=_AGAIN)
        self._unpredicted = RatioDistribution(_MEDIAN, _SPREAD)

    def of(self, request: Request, at_arrival: bool = False) -> tuple[RatioDistribution, float, int]:
        """(distribution, unit, start): a length is start + unit × a ratio of the distribution, in tokens."""
        if request.repredicted and not at_arrival:
            start, left = request.repredicted[-1]
            return self._repredicted, left, start
        if request.first_prediction is None:
            return self._unpredicted, 1.0, 0
        return self._predicted, request.first_prediction, 0

    def ended(self, request: Request, ended: bool) -> None:
        """Learn from a request that has ended, by itself or else cut."""
        if not request.output_len:
            return
        self._unpredicted.observe(request.output_len, ended)
        if request.first_prediction is not None:
            self._predicted.observe(request.output_len / request.first_prediction, ended)
        step = -(-len(request.repredicted) // _AGAIN) or 1
        for start, left in request.repredicted[::step]:
            self._repredicted.observe((request.output_len - start) / left, ended)

    def quantile(self, request: Request, share: float, at_arrival: bool = False) -> float:
        """The output tokens that its answer does not exceed with this probability, given those so far; at most
        max_tokens, at least one more than so far. `at_arrival`: later predictions do not count."""
        distribution, unit, start = self.of(request, at_arrival)
        ratio = distribution.quantile(share, (request.output_len - start) / unit)
        # Longer than any before: as for predictions, it is thought to be half done (ALISE §3.1) since it was predicted.
        tokens = 2 * request.output_len - start if ratio is None else start + ratio * unit
        return min(max(tokens, request.output_len + 1), request.max_tokens)
