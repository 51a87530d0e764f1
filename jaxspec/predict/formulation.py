"""Formulations of length prediction: loss and interpretation of the head's outputs (SSJF, §3.1 and Table 2; survival).

A capped answer, cut at L tokens, has a true length of at least L. No formulation penalises predicting more.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from itertools import pairwise
from statistics import NormalDist
from typing import Any, Self

import jax
import jax.numpy as jnp
import numpy as np

from jaxspec.models.hazards import negative_log_likelihood

SCALES = ("log", "linear")
#: Points of the curve that maps a pairwise score to a length.
_KNOTS = 64
#: Ranges of lengths that have a hazard of their own, at most.
_RANGES = 32


@dataclass(frozen=True)
class Formulation(ABC):
    """One of `NAMES`, fitted to training lengths. Raises `ValueError` for inconsistent fields."""

    name: str

    @property
    def outputs(self) -> int:
        """Number of the head's outputs."""
        return 1

    @abstractmethod
    def loss(self, raw: jax.Array, length: jax.Array, weights: jax.Array, capped: jax.Array | None = None) -> jax.Array:
        """Weighted mean loss, a scalar, of `raw [B, outputs]` for answers of `length [B]` tokens. Traced.

        `weights [B]` of 0 leave rows out; `capped [B]` bool says that an answer was cut at `length`.
        """

    @abstractmethod
    def lengths(self, raw: np.ndarray) -> np.ndarray:
        """Predicted tokens `[B]` float64 of `raw [B, outputs]`, on the host."""

    def calibrated(self, raw: np.ndarray) -> Self:
        """The formulation calibrated with the trained head's `raw [N, outputs]` for the training rows; changes only
        `pairwise`."""
        return self

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON values; `from_dict` is the inverse."""
        return {key: list(v) if isinstance(v, tuple) else v for key, v in asdict(self).items()}

    @staticmethod
    def fit(
        name: str, lengths: Sequence[float] | np.ndarray, classes: int = 5, scale: str = "log", ranking: float = 0.0
    ) -> Formulation:
        """The formulation `name`, fitted to training `lengths [N]`.

        `scale`: regressions fit "log" (log(length + 1)) or "linear". Classes hold equal shares of the lengths, except
        for ties. `ranking`: weight of the pairwise loss that `survival` adds. Raises `ValueError` naming the argument.
        """
        values = np.asarray(lengths, np.float64)
        if name not in KINDS:
            raise ValueError(f"formulation {name!r} is not known; choose from {', '.join(KINDS)}")
        if values.ndim != 1 or not values.size or not np.isfinite(values).all() or values.min() < 1:
            raise ValueError("lengths must be one or more finite numbers of at least 1")
        if classes < 2:
            raise ValueError(f"classes must be at least 2, not {classes}")
        if scale not in SCALES:
            raise ValueError(f"scale {scale!r} is not known; choose from {', '.join(SCALES)}")
        kind = KINDS[name]
        if kind is Regression:
            return _regression(name, values, scale)
        if kind is Pairwise:
            return _pairwise(name, values)
        if kind is Survival:
            ends = np.unique(np.quantile(values, np.arange(_RANGES + 1) / _RANGES, method="higher"))
            return Survival(name, tuple(float(end) for end in ends), float(ranking))
        bounds = class_bounds(values, 2 if name == "binary" else classes)
        if not bounds:
            raise ValueError("all lengths are equal, so there are no classes")
        label = np.searchsorted(bounds, values, side="right")
        means = tuple(float(values[label == i].mean()) for i in range(len(bounds) + 1))
        return kind(name, bounds, means)  # type: ignore[call-arg]

    @staticmethod
    def from_dict(spec: Mapping[str, Any]) -> Formulation:
        """The inverse of `to_dict`. Raises `ValueError` with the reason if `spec` is invalid."""
        kind = KINDS.get(str(spec.get("name")))
        if kind is None:
            raise ValueError(f"formulation {spec.get('name')!r} is not known; choose from {', '.join(KINDS)}")
        if (expected := {f.name for f in fields(kind)}) != spec.keys():
            raise ValueError(f"formulation {spec['name']} must have the fields {', '.join(sorted(expected))}")
        values: dict[str, Any] = {key: tuple(v) if isinstance(v, list) else v for key, v in spec.items()}
        try:
            return kind(**values)
        except TypeError as error:
            raise ValueError(f"formulation {spec['name']}: {error}") from None


@dataclass(frozen=True)
class Regression(Formulation):
    """Regression of the length by L1 or squared error.

    The head predicts the length on `scale`, standardised by the training lengths' `mean` and `spread` on that scale.
    Predictions are clipped to 1 … `longest`, the longest training length.
    """

    scale: str
    mean: float
    spread: float
    longest: float

    def loss(self, raw: jax.Array, length: jax.Array, weights: jax.Array, capped: jax.Array | None = None) -> jax.Array:
        scaled = jnp.log1p(length) if self.scale == "log" else length
        error = _below(raw[:, 0] - (scaled - self.mean) / self.spread, capped)
        return _mean(jnp.abs(error) if self.name == "reg_l1" else error**2, weights)

    def lengths(self, raw: np.ndarray) -> np.ndarray:
        scaled = raw[:, 0].astype(np.float64) * self.spread + self.mean
        if self.scale == "log":
            scaled = np.expm1(np.minimum(scaled, np.log1p(self.longest)))
        return np.clip(scaled, 1.0, self.longest)

    def __post_init__(self) -> None:
        _numbers(self.name, (self.mean, self.spread, self.longest))
        if self.scale not in SCALES or self.spread <= 0 or self.longest < 1:
            raise ValueError(f"formulation {self.name}: scale, spread or longest is out of range")


@dataclass(frozen=True)
class Classes(Formulation):
    """Classification into percentile classes by cross-entropy.

    Class i holds the lengths in `[bounds[i - 1], bounds[i])`; it predicts their mean, `means[i]`. For a capped answer,
    its class and all longer ones are correct.
    """

    bounds: tuple[float, ...]
    means: tuple[float, ...]

    @property
    def outputs(self) -> int:
        return len(self.means)

    def loss(self, raw: jax.Array, length: jax.Array, weights: jax.Array, capped: jax.Array | None = None) -> jax.Array:
        label = _label(self.bounds, length)[:, None]
        classes = jnp.arange(self.outputs)
        correct = classes == label
        if capped is not None:
            correct |= capped[:, None] & (classes > label)
        log_correct = jax.nn.logsumexp(jnp.where(correct, raw, -jnp.inf), -1)
        return _mean(jax.nn.logsumexp(raw, -1) - log_correct, weights)

    def lengths(self, raw: np.ndarray) -> np.ndarray:
        return np.asarray(self.means, np.float64)[raw.argmax(-1)]

    def __post_init__(self) -> None:
        _check_classes(self.name, self.bounds, self.means)


@dataclass(frozen=True)
class Ordinal(Formulation):
    """Ordinal classification (Winship & Mare 1984, cited by SSJF, §3.1): regression of the class index relative to the
    middle class, rounded to a class for prediction. Bounds and means as in `Classes`."""

    bounds: tuple[float, ...]
    means: tuple[float, ...]

    def loss(self, raw: jax.Array, length: jax.Array, weights: jax.Array, capped: jax.Array | None = None) -> jax.Array:
        error = _below(raw[:, 0] + len(self.bounds) / 2 - _label(self.bounds, length), capped)
        return _mean(jnp.abs(error) if self.name == "ord_l1" else error**2, weights)

    def lengths(self, raw: np.ndarray) -> np.ndarray:
        label = np.rint(raw[:, 0] + len(self.bounds) / 2)
        return np.asarray(self.means, np.float64)[np.clip(label, 0, len(self.bounds)).astype(int)]

    def __post_init__(self) -> None:
        _check_classes(self.name, self.bounds, self.means)


@dataclass(frozen=True)
class Pairwise(Formulation):
    """Ranking by a score: logistic loss of the score difference, over all pairs of a batch whose longer one is known.

    SSJF's pairwise predictor reads two prompts at once. With a score per prompt, ordering a queue takes one encoder
    pass per prompt. A score of `scores[i]` predicts `quantiles[i]` tokens: the quantiles of scores and lengths over the
    training rows are matched.
    """

    scores: tuple[float, ...]
    quantiles: tuple[float, ...]

    def loss(self, raw: jax.Array, length: jax.Array, weights: jax.Array, capped: jax.Array | None = None) -> jax.Array:
        return _ranking_loss(raw[:, 0], length, weights, capped)

    def lengths(self, raw: np.ndarray) -> np.ndarray:
        return np.interp(raw[:, 0].astype(np.float64), self.scores, self.quantiles)

    def calibrated(self, raw: np.ndarray) -> Self:
        scores = np.quantile(raw[:, 0].astype(np.float64), _shares())
        return replace(self, scores=tuple(float(s) for s in scores))

    def __post_init__(self) -> None:
        _numbers(self.name, (*self.scores, *self.quantiles))
        if not self.scores or len(self.scores) != len(self.quantiles):
            raise ValueError(f"formulation {self.name}: scores and quantiles must be of equal, non-zero number")
        for values in (self.scores, self.quantiles):
            if any(b < a for a, b in pairwise(values)):
                raise ValueError(f"formulation {self.name}: scores and quantiles must ascend")


@dataclass(frozen=True)
class Survival(Formulation):
    """Survival analysis in ranges of lengths (Kvamme & Borgan 2021, discrete time): for each range a hazard, the chance
    that an answer which reaches it ends within it.

    Range i holds the lengths in `(ends[i - 1], ends[i]]`. The loss is the negative log-likelihood: of a capped answer
    it is known that it survived the ranges before its cut. `ranking` adds that many times the pairwise loss of the mean
    log-length. It predicts the median length.
    """

    ends: tuple[float, ...]
    ranking: float

    @property
    def outputs(self) -> int:
        return len(self.ends)

    def loss(self, raw: jax.Array, length: jax.Array, weights: jax.Array, capped: jax.Array | None = None) -> jax.Array:
        ended = None if capped is None else ~capped
        loss = _mean(negative_log_likelihood(raw, length, ended, np.asarray(self.ends, np.float32)), weights)
        if not self.ranking:
            return loss
        return loss + self.ranking * _ranking_loss(self._mean_log(raw), length, weights, capped)

    def _mean_log(self, raw: jax.Array) -> jax.Array:
        """Mean logarithm of the length `[B]`, of one beyond all ranges their end's."""
        survival = jnp.exp(jnp.cumsum(jax.nn.log_sigmoid(-raw), -1))
        logs = jnp.log(jnp.asarray(self.ends))
        return logs[0] + survival[:, :-1] @ jnp.diff(logs)

    def quantile(self, raw: np.ndarray, share: float) -> np.ndarray:
        """Length `[B]` float64 that the answer does not exceed with this probability, at most the last range's end."""
        survival = np.exp(np.cumsum(-np.logaddexp(0.0, raw.astype(np.float64)), -1))
        logs = np.log(np.asarray((1.0, *self.ends)))
        ended = np.concatenate([np.zeros((len(raw), 1)), 1 - survival], -1)
        return np.exp([np.interp(share, row, logs) for row in ended])

    def lengths(self, raw: np.ndarray) -> np.ndarray:
        return self.quantile(raw, 0.5)

    def __post_init__(self) -> None:
        _numbers(self.name, (*self.ends, self.ranking))
        if not self.ends or self.ends[0] < 1 or any(b <= a for a, b in pairwise(self.ends)) or self.ranking < 0:
            raise ValueError(f"formulation {self.name}: ends must ascend from 1, and ranking must not be negative")


#: reg_l1, reg_mse: regression of the length. cls: percentile classes. ord_mse, ord_l1: regression of the class index.
#: binary: below the median or not. pairwise: a score that is higher for longer answers. survival: hazards.
KINDS: dict[str, type[Formulation]] = {
    "reg_l1": Regression,
    "reg_mse": Regression,
    "cls": Classes,
    "ord_mse": Ordinal,
    "ord_l1": Ordinal,
    "binary": Classes,
    "pairwise": Pairwise,
    "survival": Survival,
}
NAMES = tuple(KINDS)


def class_bounds(lengths: np.ndarray, classes: int) -> tuple[float, ...]:
    """Lower bounds of the percentile classes except the first, ascending. Ties give fewer classes; none is empty."""
    inner = np.quantile(lengths, np.arange(1, classes) / classes, method="higher")
    return tuple(float(b) for b in np.unique(inner) if b > lengths.min())


def _regression(name: str, lengths: np.ndarray, scale: str) -> Regression:
    scaled = np.log1p(lengths) if scale == "log" else lengths
    return Regression(name, scale, float(scaled.mean()), float(scaled.std()) or 1.0, float(lengths.max()))


def _pairwise(name: str, lengths: np.ndarray) -> Pairwise:
    """Until `calibrated`, scores are taken to be standard normal."""
    normal = tuple(NormalDist().inv_cdf(share) for share in _shares())
    return Pairwise(name, normal, tuple(float(q) for q in np.quantile(lengths, _shares())))


def _shares() -> list[float]:
    return [(i + 0.5) / _KNOTS for i in range(_KNOTS)]


def _label(bounds: tuple[float, ...], length: jax.Array) -> jax.Array:
    return jnp.searchsorted(jnp.asarray(bounds), length, side="right")


def _ranking_loss(score: jax.Array, length: jax.Array, weights: jax.Array, capped: jax.Array | None) -> jax.Array:
    """Logistic loss of the differences of scores `[B]`, over the pairs whose longer answer is known."""
    longer = length[:, None] > length[None, :]
    if capped is not None:
        longer &= ~capped[None, :]  # a capped answer might be the longer one
    pairs = weights[:, None] * weights[None, :] * longer
    return _mean(jax.nn.softplus(score[None, :] - score[:, None]), pairs)


def _below(error: jax.Array, capped: jax.Array | None) -> jax.Array:
    """The error, with 0 for capped rows predicted too long."""
    return error if capped is None else jnp.where(capped, jnp.minimum(error, 0), error)


def _mean(each: jax.Array, weights: jax.Array) -> jax.Array:
    return jnp.sum(each * weights) / jnp.maximum(jnp.sum(weights), 1e-9)


def _numbers(name: str, values: tuple[object, ...]) -> None:
    if not all(isinstance(v, int | float) and np.isfinite(v) for v in values):
        raise ValueError(f"formulation {name}: all its values must be finite numbers")


def _check_classes(name: str, bounds: tuple[float, ...], means: tuple[float, ...]) -> None:
    _numbers(name, (*bounds, *means))
    if not bounds or len(means) != len(bounds) + 1:
        raise ValueError(f"formulation {name}: there must be one more mean than bounds")
    if any(b <= a for a, b in pairwise(bounds)):
        raise ValueError(f"formulation {name}: bounds must ascend")
