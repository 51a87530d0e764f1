"""Acceptance of draft tokens as a process of each request: it wanders early and settles (LAPS-SD Fig. 3)."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields
from math import exp, log, log1p, sqrt
from pathlib import Path
from random import Random
from typing import Protocol

import numpy as np

#: Output tokens over which fitting pools rounds.
_BIN = 16


class Acceptance(Protocol):
    """Says what comes of drafting a chain of tokens."""

    def round(self, request: int, produced: int, most: int) -> tuple[int, int]:
        """(drafted, accepted) for the request of this number, which has `produced` tokens of output; `most` tokens may
        be drafted."""
        ...

    def share(self, request: int, most: int) -> float | None:
        """What accepted / drafted will settle at in rounds of `most` drafts; None where nobody knows."""
        ...

    def forget(self, request: int) -> None:
        """The request has ended."""
        ...


@dataclass(frozen=True, slots=True)
class Process:
    """Distribution of requests' acceptance and how it settles.

    A request has a rate p that it settles at, Beta-distributed over requests with mean `mean` and standard deviation
    `spread`. After t output tokens its drafts are accepted, each given the one before, with the chance
    `sigmoid(logit(p) + wander · exp(-t / settle) · z)`, where z is a standard normal autoregressive process with the
    correlation `memory` from one round to the next. Raises `ValueError` naming the parameter that is out of range.
    """

    mean: float
    spread: float = 0.0
    wander: float = 0.0
    #: Output tokens after which the wandering has shrunk to 1/e.
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
        """What `count` requests settle at `[count]`."""
        if not self.spread:
            return np.full(count, self.mean)
        concentration = self.mean * (1 - self.mean) / self.spread**2 - 1
        drawn = rng.beta(self.mean * concentration, (1 - self.mean) * concentration, count)
        return np.clip(drawn, 1e-4, 1 - 1e-4)

    def save(self, path: str | Path) -> None:
        """Raises OSError."""
        Path(path).write_text(json.dumps(asdict(self), indent=1) + "\n", encoding="utf-8")


class Sampled:
    """Draws from a `Process` for `count` requests.

    Each has random numbers of its own: its n-th round comes out the same whatever the order of service, so policies are
    compared on the very same jobs.
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
        # A geometric number: the chance of k or more is sigmoid(x)**k.
        return most, min(most, int(live.random.expovariate(1.0) / max(_softplus(-x), 1e-9)))

    def share(self, request: int, most: int) -> float | None:
        p = float(self.rates[request])
        return p * (1 - p**most) / (1 - p) / most if most else None

    def forget(self, request: int) -> None:
        self._live.pop(request, None)


class _Wanderer:
    """One request's random numbers and where it has wandered to, in standard deviations."""

    __slots__ = ("at", "random")

    def __init__(self, random: Random) -> None:
        self.random = random
        self.at: float | None = None

    def step(self, memory: float) -> float:
        new = self.random.gauss(0.0, 1.0)
        self.at = new if self.at is None else memory * self.at + sqrt(1 - memory**2) * new
        return self.at


def _softplus(x: float) -> float:
    """log(1 + exp(x)): of a logit's negative, minus the logarithm of its chance."""
    return x if x > 30 else log1p(exp(x))


def fit(traces: Sequence[Sequence[tuple[int, int]]]) -> Process:
    """The process by moments, from `traces` of requests: (drafted, accepted) of each round, in order.

    A round of a chain with k accepted is k successes and, unless all were accepted, one failure. A request's late half
    gives the rate it settles at. In the early half, products of different rounds' distances from it hold no chance of
    the draw: they say how far it wanders, how soon that dies down, and, neighbours against next but one, how long it
    remembers. Raises `ValueError` where no request has 8 rounds.
    """
    long = [t for t in traces if len(t) >= 8]
    if not long:
        raise ValueError("acceptance is fitted to requests of at least 8 rounds; there is none")
    held, tried = np.array([_share(t[len(t) // 2 :]) for t in long], float).T
    mean = float(np.clip(held.sum() / tried.sum(), 0.01, 0.99))
    by_chance = mean * (1 - mean) / tried
    excess = float((held / tried).var() - by_chance.mean())
    spread = sqrt(min(max(0.0, excess), 0.9 * mean * (1 - mean)))

    # Per bin of output tokens: products of distances one and two rounds apart, and the tokens they are over.
    bins: dict[int, np.ndarray] = {}
    for trace, rate, blur in zip(long, held / tried, by_chance, strict=True):
        counts, produced = [(a, a + (a < d)) for d, a in trace[: len(trace) // 2]], 0
        for i, (accepted, n) in enumerate(counts):
            total = bins.setdefault(produced // _BIN, np.zeros(4))
            for apart in (1, 2):
                if i + apart < len(counts):
                    other, m = counts[i + apart]
                    off = (accepted - rate * n) * (other - rate * m) - blur * n * m
                    total[2 * apart - 2 : 2 * apart] += off, n * m
            produced += accepted + 1
    table = np.array([(_BIN * (i + 0.5), *total) for i, total in sorted(bins.items()) if total[1] and total[3]])
    if not len(table):
        return Process(mean, spread)
    near, far = table[:, 1] / table[:, 2], table[:, 3] / table[:, 4]
    weight = table[:, 2] * near  # bins count as far as something is left of the wandering
    memory = float(np.clip((weight * far).sum() / (weight * near).sum(), 0.0, 0.98))
    if near[0] <= 0 or memory < 0.05:
        return Process(mean, spread)
    wander, settle = _decay(table[:, 0], near / memory, table[:, 2], mean)
    return Process(mean, spread, wander, settle, memory)


def _decay(at: np.ndarray, variance: np.ndarray, weight: np.ndarray, mean: float) -> tuple[float, float]:
    """(wander, settle) for which the chances' variance after `at` tokens fits `variance` best, all `[bins]`."""
    nodes, shares = np.polynomial.hermite_e.hermegauss(21)
    sizes = np.linspace(0, 4, 81)
    chances = 1 / (1 + np.exp(-(log(mean / (1 - mean)) + sizes[:, None] * nodes)))
    variances = ((chances - mean) ** 2 * shares / shares.sum()).sum(1)
    best = (np.inf, 0.0, 50.0)
    for settle in np.geomspace(8, 512, 25):
        for wander in sizes:
            expected = np.interp(wander * np.exp(-at / settle), sizes, variances)
            best = min(best, (float((weight * (variance - expected) ** 2).sum()), float(wander), float(settle)))
    return best[1], best[2]


def _share(rounds: Sequence[tuple[int, int]]) -> tuple[int, int]:
    """(accepted, tried) tokens: those after the first rejected one of a round were never looked at."""
    return sum(a for _, a in rounds), max(1, sum(a + (a < d) for d, a in rounds))


def load_process(text: str) -> Process:
    """A number, the rate of all requests, or the file of a fitted process. Raises OSError, or ValueError naming what is
    wrong."""
    try:
        return Process(float(text))
    except ValueError:
        if not Path(text).exists():
            raise ValueError(f"acceptance {text!r} is neither a rate between 0 and 1 nor a file") from None
    try:
        content = json.loads(Path(text).read_text(encoding="utf-8"))
        known = {f.name for f in fields(Process)}
        if not isinstance(content, dict) or not set(content) <= known or "mean" not in content:
            raise ValueError(f"needs the field mean, and may have {', '.join(sorted(known))}")
        return Process(**{name: float(value) for name, value in content.items()})
    except (ValueError, TypeError) as error:
        raise ValueError(f"acceptance {text}: {error}") from None
