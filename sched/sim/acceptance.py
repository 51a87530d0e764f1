"""Acceptance of draft tokens as a random process per request: it varies early and settles (LAPS-SD Fig. 3)."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields
from math import exp, log, log1p, sqrt
from pathlib import Path
from random import Random
from typing import Any, Protocol, cast

import numpy as np
from numpy.typing import NDArray

#: `fit` pools the rounds of this many output tokens.
_BIN = 16


class Acceptance(Protocol):
    """Acceptance model: how many tokens of a drafted chain the target model accepts."""

    def round(self, request: int, produced: int, most: int) -> tuple[int, int]:
        """(drafted, accepted) of the request's next draft of at most `most` tokens, after `produced` output tokens.

        `request` is its index in the workload.
        """
        ...

    def share(self, request: int, most: int) -> float | None:
        """The request's long-run acceptance rate (accepted / drafted) with `most` draft tokens; None if unknown."""
        ...

    def forget(self, request: int) -> None:
        """Drop the state of a finished request."""
        ...


@dataclass(frozen=True, slots=True)
class Process:
    """Distribution of the requests' acceptance rates and how they settle.

    A request's long-run rate p is Beta-distributed over requests with mean `mean` and standard deviation `spread`.
    After t output tokens each draft token is accepted, given that the one before it is, with probability
    `sigmoid(logit(p) + wander · exp(-t / settle) · z)`, where z is a standard normal autoregressive process with
    correlation `memory` between successive rounds. Raises `ValueError` naming the parameter that is out of range.
    """

    mean: float
    spread: float = 0.0
    wander: float = 0.0
    #: Output tokens after which the deviation from p has decayed to 1/e.
    settle: float = 50.0
    memory: float = 0.8

    def __post_init__(self) -> None:
        if not 0 < self.mean < 1:
            raise ValueError(f"mean must be between 0 and 1, got {self.mean}")
        if not 0 <= self.spread**2 < self.mean * (1 - self.mean):
            raise ValueError(f"spread must be below {sqrt(self.mean * (1 - self.mean)):.3f}, got {self.spread}")
        if self.wander < 0 or self.settle <= 0:
            raise ValueError("wander must not be negative and settle must be positive")
        if not 0 <= self.memory < 1:
            raise ValueError(f"memory must be at least 0 and below 1, got {self.memory}")

    def rates(self, count: int, rng: np.random.Generator) -> np.ndarray:
        """Long-run acceptance rates of `count` requests `[count]`."""
        if not self.spread:
            return np.full(count, self.mean)
        concentration = self.mean * (1 - self.mean) / self.spread**2 - 1
        drawn = rng.beta(self.mean * concentration, (1 - self.mean) * concentration, count)
        return np.clip(drawn, 1e-4, 1 - 1e-4)

    def save(self, path: str | Path) -> None:
        """Raises OSError."""
        Path(path).write_text(json.dumps(asdict(self), indent=1) + "\n", encoding="utf-8")


class Sampled:
    """Acceptance model that draws from a `Process` for `count` requests.

    Each request has its own random numbers, so its n-th round has the same result in any order of service and policies
    are compared on identical requests.
    """

    def __init__(self, process: Process, count: int, rng: np.random.Generator) -> None:
        self.rates = process.rates(count, rng)
        self._process = process
        self._logit = np.log(self.rates / (1 - self.rates)).tolist()
        self._seed = int(rng.integers(2**62))
        self._live: dict[int, _Wanderer] = {}

    def round(self, request: int, produced: int, most: int) -> tuple[int, int]:
        live = self._live.get(request)
        if live is None:
            live = self._live[request] = _Wanderer(Random(self._seed + request))
        x = self._logit[request]
        if self._process.wander:
            x += self._process.wander * exp(-produced / self._process.settle) * live.step(self._process.memory)
        # Geometric: the probability of k or more is sigmoid(x)**k.
        return most, min(most, int(live.random.expovariate(1.0) / max(_softplus(-x), 1e-9)))

    def share(self, request: int, most: int) -> float | None:
        p = float(self.rates[request])
        return p * (1 - p**most) / (1 - p) / most if most else None

    def forget(self, request: int) -> None:
        self._live.pop(request, None)


class _Wanderer:
    """The random generator and current deviation, in standard deviations, of one request."""

    __slots__ = ("at", "random")

    def __init__(self, random: Random) -> None:
        self.random = random
        self.at: float | None = None

    def step(self, memory: float) -> float:
        new = self.random.gauss(0.0, 1.0)
        self.at = new if self.at is None else memory * self.at + sqrt(1 - memory**2) * new
        return self.at


def _softplus(x: float) -> float:
    """log(1 + exp(x)); `_softplus(-x)` is -log(sigmoid(x))."""
    return x if x > 30 else log1p(exp(x))


def fit(traces: Sequence[Sequence[tuple[int, int]]]) -> Process:
    """Fit a process by the method of moments to `traces`: (drafted, accepted) of each round of each request, in order.

    A round with k accepted tokens is k successes and, unless all were accepted, one failure. The late half of a trace
    gives the request's long-run rate. In the early half, products of the deviations of two different rounds are free of
    sampling noise: they give `wander` and `settle`, and the products one round apart relative to those two apart give
    `memory`. Raises `ValueError` if no request has 8 rounds.
    """
    long = [t for t in traces if len(t) >= 8]
    if not long:
        raise ValueError("fitting acceptance needs requests with at least 8 rounds; there is none")
    accepted_late, tried = np.array([_share(t[len(t) // 2 :]) for t in long], float).T
    mean = float(np.clip(accepted_late.sum() / tried.sum(), 0.01, 0.99))
    noise = mean * (1 - mean) / tried  # sampling variance of each request's rate
    excess = float((accepted_late / tried).var() - noise.mean())
    spread = sqrt(min(max(0.0, excess), 0.9 * mean * (1 - mean)))

    # Per bin of output tokens: sums of (product, weight) of deviations one round apart, and of those two apart.
    bins: dict[int, np.ndarray] = {}
    for trace, rate, variance in zip(long, accepted_late / tried, noise, strict=True):
        counts, produced = [(a, a + (a < d)) for d, a in trace[: len(trace) // 2]], 0
        for i, (accepted, n) in enumerate(counts):
            total = bins.setdefault(produced // _BIN, np.zeros(4))
            for apart in (1, 2):
                if i + apart < len(counts):
                    other, m = counts[i + apart]
                    product = (accepted - rate * n) * (other - rate * m) - variance * n * m
                    total[2 * apart - 2 : 2 * apart] += product, n * m
            produced += accepted + 1
    table = np.array([(_BIN * (i + 0.5), *total) for i, total in sorted(bins.items()) if total[1] and total[3]])
    if not len(table):
        return Process(mean, spread)
    near, far = table[:, 1] / table[:, 2], table[:, 3] / table[:, 4]
    weight = table[:, 2] * near  # bins in which the deviation has decayed count less
    memory = float(np.clip((weight * far).sum() / (weight * near).sum(), 0.0, 0.98))
    if near[0] <= 0 or memory < 0.05:
        return Process(mean, spread)
    wander, settle = _decay(table[:, 0], near / memory, table[:, 2], mean)
    return Process(mean, spread, wander, settle, memory)


def _decay(at: np.ndarray, variance: np.ndarray, weight: np.ndarray, mean: float) -> tuple[float, float]:
    """The (wander, settle) that fit the acceptance rate's variance `variance` after `at` tokens best, weighted by
    `weight`; all `[bins]`."""
    nodes, shares = np.polynomial.hermite_e.hermegauss(21)
    sizes = np.linspace(0, 4, 81)
    chances = 1 / (1 + np.exp(-(log(mean / (1 - mean)) + sizes[:, None] * nodes)))
    variances: NDArray[np.float64] = ((chances - mean) ** 2 * shares / shares.sum()).sum(1)
    wanders: list[float] = sizes.tolist()
    settles: list[float] = np.geomspace(8, 512, 25).tolist()
    best = (np.inf, 0.0, 50.0)
    for settle in settles:
        for wander in wanders:
            deviation: NDArray[np.float64] = wander * np.exp(-at / settle)
            expected = np.interp(deviation, sizes, variances)
            best = min(best, (float((weight * (variance - expected) ** 2).sum()), wander, settle))
    return best[1], best[2]


def _share(rounds: Sequence[tuple[int, int]]) -> tuple[int, int]:
    """(accepted, tried) tokens; those after a round's first rejected token do not count as tried."""
    return sum(a for _, a in rounds), max(1, sum(a + (a < d) for d, a in rounds))


def load_process(text: str) -> Process:
    """The process of a number, the acceptance rate of all requests, or of a file with a fitted process. Raises OSError,
    or ValueError naming what is wrong."""
    try:
        return Process(float(text))
    except ValueError:
        if not Path(text).exists():
            raise ValueError(f"acceptance {text!r} is neither a rate between 0 and 1 nor a file") from None
    try:
        content: Any = json.loads(Path(text).read_text(encoding="utf-8"))
        values = cast("dict[str, Any]", content) if isinstance(content, dict) else {}
        known = {f.name for f in fields(Process)}
        if not set(values) <= known or "mean" not in values:
            raise ValueError(f"needs the field mean, and may have {', '.join(sorted(known))}")
        return Process(**{name: float(value) for name, value in values.items()})
    except (ValueError, TypeError, OverflowError, RecursionError) as error:
        raise ValueError(f"acceptance {text}: {error!s:.300}") from None
