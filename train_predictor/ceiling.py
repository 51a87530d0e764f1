"""How well any predictor that reads the prompt alone could do, from two sampled answers to each prompt."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from scipy.stats import kendalltau, norm, rankdata

#: Repetitions of the bootstrap, and the interval that is quoted.
REPEATS, INTERVAL = 500, (0.025, 0.975)


class Ceiling(NamedTuple):
    """Kendall's τ and the accuracy over equally frequent classes; `low` and `high` bound the best predictor's.

    twins         of a prompt's other answer, as a predictor
    best          of the best predictor
    low, high     95 % interval of `best`, over prompts
    """

    twins: tuple[float, float]
    best: tuple[float, float]
    low: tuple[float, float]
    high: tuple[float, float]


def ceiling(length: np.ndarray, other: np.ndarray, classes: int, rng: np.random.Generator) -> Ceiling:
    """The limits for two answers' tokens to each prompt, `length [N]` and `other [N]`, drawn alike.

    Lengths are taken to be a prompt's own part and chance, normal after a monotonic transformation (a Gaussian copula).
    Two answers then correlate by the share ρ of the prompt's part, and the best prediction, that part itself, with an
    answer by √ρ. Answers that were cut tie at the cap.
    """
    draws = [rng.integers(len(length), size=len(length)) for _ in range(REPEATS)]
    values = np.asarray([_best(_correlation(length[rows], other[rows]), classes) for rows in draws])
    low, high = (tuple(np.quantile(values, at, axis=0).tolist()) for at in INTERVAL)
    return Ceiling(_twins(length, other, classes), _best(_correlation(length, other), classes), low, high)


def _correlation(length: np.ndarray, other: np.ndarray) -> float:
    """Correlation of the normal scores; both orders of a pair count, because neither answer is the first."""
    ranks = rankdata(np.concatenate([length, other]))
    scores = norm.ppf((ranks - 0.5) / len(ranks))
    a, b = np.split(scores, 2)
    return float(np.clip(np.corrcoef(np.concatenate([a, b]), np.concatenate([b, a]))[0, 1], 0.0, 0.999))


def _best(correlation: float, classes: int) -> tuple[float, float]:
    """τ and accuracy of the prompt's own part as a prediction."""
    r = correlation**0.5
    inner = norm.ppf(np.arange(1, classes) / classes)
    # The most probable class given the prompt's part, over a grid of its quantiles.
    part = norm.ppf((np.arange(2000) + 0.5) / 2000) * r
    spread = (1 - correlation) ** 0.5
    bounds = norm.cdf((inner[None] - part[:, None]) / spread)
    shares = np.diff(np.concatenate([np.zeros((2000, 1)), bounds, np.ones((2000, 1))], 1))
    return float(2 / np.pi * np.arcsin(r)), float(shares.max(1).mean())


def _twins(length: np.ndarray, other: np.ndarray, classes: int) -> tuple[float, float]:
    bounds = np.quantile(np.concatenate([length, other]), np.arange(1, classes) / classes, method="higher")
    same = np.digitize(length, bounds) == np.digitize(other, bounds)
    tau: Any = kendalltau(length, other)[0]
    return float(tau), float(same.mean())
