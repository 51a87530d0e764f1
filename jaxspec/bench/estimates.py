"""Means over seeds with 95 % confidence intervals, and the load at which a system saturates."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from math import exp, inf, log, nan, sqrt
from typing import Any, NamedTuple

import numpy as np
from scipy.special import stdtrit

from jaxspec.bench.table import TIMES, UNKNOWN, Form, share, shown

#: Probability that an interval contains the true mean.
CONFIDENCE = 0.95
#: Significant digits of numbers in the files of results.
_DIGITS = 5


class Estimate(NamedTuple):
    """A mean and the ends of its 95 % confidence interval. In JSON files a list of the three."""

    mean: float
    low: float
    high: float


def estimate(values: Sequence[float | None], digits: int = _DIGITS) -> Estimate | None:
    """Mean and interval by Student's t over independent `values`; those that are None or NaN do not count. Rounded to
    `digits` significant digits.

    None without values. A single value has no interval: its ends are the value itself.
    """
    known = np.array([v for v in values if v is not None and v == v], float)
    if not known.size:
        return None
    mean, half = float(known.mean()), 0.0
    if known.size > 1:
        half = float(stdtrit(known.size - 1, (1 + CONFIDENCE) / 2) * known.std(ddof=1) / sqrt(known.size))
    return Estimate(*(float(f"{x:.{digits}g}") for x in (mean, mean - half, mean + half)))


def means(results: Sequence[Mapping[str, Any]], metrics: Iterable[str] | None = None) -> dict[str, Estimate | None]:
    """The estimate of each metric, by default all, over the results of the seeds or turns."""
    return {metric: estimate([one[metric] for one in results]) for metric in metrics or results[0]}


def ratio(own: Sequence[float], base: Sequence[float]) -> Estimate | None:
    """Own by base. Values are paired: the i-th ones are of the same requests, so their common chance cancels."""
    return estimate([a / b if b else nan for a, b in zip(own, base, strict=True)])


def relative(own: Sequence[float | None], base: Sequence[float | None]) -> Estimate | None:
    """The geometric mean of own by base, paired as in `ratio`. None if a value is 0 or not known."""
    if not all((*own, *base)):
        return None
    found = estimate([log(a / b) for a, b in zip(own, base, strict=True) if a and b])
    return found and Estimate(*map(exp, found))


def differs(own: Sequence[float | None], base: Sequence[float | None]) -> bool:
    """Whether paired values differ by more than noise: there are two pairs or more, and the 95 % interval of their mean
    difference leaves out 0."""
    gaps = [a - b for a, b in zip(own, base, strict=True) if a is not None and b is not None]
    found = estimate(gaps) if len(gaps) > 1 else None
    return found is not None and not found.low <= 0 <= found.high


def reduction(own: Sequence[float], base: Sequence[float]) -> Estimate | None:
    """By how many per cent own is below base; values are paired as in `ratio`."""
    return estimate([100 * (1 - a / b) if b else nan for a, b in zip(own, base, strict=True)])


def interval(form: Form = "{:.1f}", least: float = -inf, most: float = inf) -> Form:
    """A form for tables: the mean in this form and the interval's ends, or the mean alone if it has no interval.

    The ends are shown within `least` and `most`, what the quantity can be: of the form `share` 0 to 1, of `TIMES` at
    least 0.
    """
    if form is share or form == TIMES:
        least, most = 0.0, 1.0 if form is share else inf

    def both(found: Sequence[float]) -> str:
        mean, low, high = found[0], max(found[1], least), min(found[2], most)
        text = shown(mean, form)
        return text if low == high else f"{text} ({_bare(low, form)} … {_bare(high, form)})"

    return lambda found: UNKNOWN if found is None else both(found)


def _bare(value: float, form: Form) -> str:
    """The value without the unit that the form adds."""
    return shown(value, form).removesuffix("%").removesuffix("×").strip()


def knee(
    measure: Callable[[float], float], limit: float, start: float, tolerance: float = 0.03, most: int = 24,
    growth: float = 2.0,
) -> float:  # fmt: skip
    """The largest load at which `measure(load)` is at most `limit`: from `start` by steps of `growth`, then bisection.

    `measure` should grow with the load. A smaller `growth` goes less far beyond the limit, where runs take longest. The
    result is one of the loads tried, within the relative `tolerance` of one that exceeds the limit; 0 if `most`
    measurements find no load within it.
    """
    low, high, load = 0.0, 0.0, start
    for _ in range(most):
        if measure(load) <= limit:
            low = load
        else:
            high = load
        if low and high and high / low <= 1 + tolerance:
            break
        load = sqrt(low * high) if low and high else growth * low if low else high / growth
    return low
