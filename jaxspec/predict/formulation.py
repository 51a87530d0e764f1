"""What a head's outputs mean, and what it is trained to (SSJF, §3.1 and Table 2).

An answer that was cut at a cap is known to be at least so long: a prediction of more is then no error, in any of them.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from itertools import pairwise
from statistics import NormalDist
from typing import Any, ClassVar, Self

import jax
import jax.numpy as jnp
import numpy as np

SCALES = ("log", "linear")
#: Points of the curve from a pairwise score to a length.
_KNOTS = 64


@dataclass(frozen=True)
class Formulation(ABC):
    """One of `NAMES`, fitted to training lengths; `outputs` is the width of the head.

    Fields that make no sense together raise `ValueError`.
    """

    name: str

    @property
    @abstractmethod
    def outputs(self) -> int: ...

    @abstractmethod
    def loss(self, raw: jax.Array, length: jax.Array, weights: jax.Array, capped: jax.Array | None = None) -> jax.Array:
        """`raw [B, outputs]`, `length [B]` tokens, `weights [B]` (0 leaves a row out) -> weighted mean, a scalar.

        `capped [B]` bool: the answer was cut at `length`. Traceable by JAX.
        """

    @abstractmethod
    def lengths(self, raw: np.ndarray) -> np.ndarray:
        """`raw [B, outputs]` -> predicted tokens `[B]` float64, on the host."""

    def calibrated(self, raw: np.ndarray) -> Self:
        """Itself, told `raw [N, outputs]` of the training rows after training: only `pairwise` has use for them."""
        return self

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON values; `from_dict` is the inverse."""
        return {key: list(v) if isinstance(v, tuple) else v for key, v in asdict(self).items()}

    @staticmethod
    def fit(name: str, lengths: Sequence[float] | np.ndarray, classes: int = 5, scale: str = "log") -> Formulation:
        """The formulation `name` for training `lengths [N]`.

        `scale`, "log" (of length + 1) or "linear", is what regressions work on. Classes hold equal shares of the
        lengths where ties allow. Raises `ValueError` naming the argument.
        """
        values = np.asarray(lengths, np.float64)
        if name not in KINDS:
            raise ValueError(f"formulation {name!r} is not known; {', '.join(KINDS)} are")
        if values.ndim != 1 or not values.size or not np.isfinite(values).all() or values.min() < 1:
            raise ValueError("lengths must be one or more finite numbers of at least 1")
        if classes < 2:
            raise ValueError(f"classes must be at least 2, not {classes}")
        if scale not in SCALES:
            raise ValueError(f"scale {scale!r} is not known; {', '.join(SCALES)} are")
        kind = KINDS[name]
        if kind is Regression:
            return _regression(name, values, scale)
        if kind is Pairwise:
            return _pairwise(name, values)
        bounds = class_bounds(values, 2 if name == "binary" else classes)
        if not bounds:
            raise ValueError("lengths are all alike, so they make no classes")
        label = np.searchsorted(bounds, values, side="right")
        means = tuple(float(values[label == i].mean()) for i in range(len(bounds) + 1))
        return kind(name, bounds, means)  # type: ignore[call-arg]

    @staticmethod
    def from_dict(spec: Mapping[str, Any]) -> Formulation:
        """Raises `ValueError` saying what is wrong with `spec`."""
        kind = KINDS.get(str(spec.get("name")))
        if kind is None:
            raise ValueError(f"formulation {spec.get('name')!r} is not known; {', '.join(KINDS)} are")
        if (wanted := {f.name for f in fields(kind)}) != spec.keys():
            raise ValueError(f"formulation {spec['name']} must have the fields {', '.join(sorted(wanted))}")
        values: dict[str, Any] = {key: tuple(v) if isinstance(v, list) else v for key, v in spec.items()}
        try:
            return kind(**values)
        except TypeError as error:
            raise ValueError(f"formulation {spec['name']}: {error}") from None


@dataclass(frozen=True)
class Regression(Formulation):
    """Of the length, on `scale`, standardised by the training lengths' mean and spread there. L1 or squared error.

    Predictions stay between 1 and the `longest` of training.
    """

    scale: str
    mean: float
    spread: float
    longest: float
    outputs: ClassVar[int] = 1

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
    """Percentile classes by cross-entropy: class i holds the lengths in `[bounds[i - 1], bounds[i])`, `means[i]` on
    average. Of a cut answer all classes from its own upwards are right."""

    bounds: tuple[float, ...]
    means: tuple[float, ...]

    @property
    def outputs(self) -> int:
        return len(self.means)

    def loss(self, raw: jax.Array, length: jax.Array, weights: jax.Array, capped: jax.Array | None = None) -> jax.Array:
        label = _label(self.bounds, length)[:, None]
        each = jnp.arange(self.outputs)
        right = each == label
        if capped is not None:
            right |= capped[:, None] & (each > label)
        of_right = jax.nn.logsumexp(jnp.where(right, raw, -jnp.inf), -1)
        return _mean(jax.nn.logsumexp(raw, -1) - of_right, weights)

    def lengths(self, raw: np.ndarray) -> np.ndarray:
        return np.asarray(self.means, np.float64)[raw.argmax(-1)]

    def __post_init__(self) -> None:
        _check_classes(self.name, self.bounds, self.means)


@dataclass(frozen=True)
class Ordinal(Formulation):
    """A regression of the class's number, counted from the middle class; rounded to one when read (Winship & Mare 1984
    by way of SSJF, §3.1). Bounds and means as in `Classes`."""

    bounds: tuple[float, ...]
    means: tuple[float, ...]
    outputs: ClassVar[int] = 1

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
    """A score, and the logistic loss of its difference over all pairs of a batch of which it is known who is longer.

    SSJF's pairwise predictor reads both prompts at once; a score of each orders a queue with one reading a prompt. The
    score at `scores[i]` means `quantiles[i]` tokens: both curves hold the same shares of the training rows.
    """

    scores: tuple[float, ...]
    quantiles: tuple[float, ...]
    outputs: ClassVar[int] = 1

    def loss(self, raw: jax.Array, length: jax.Array, weights: jax.Array, capped: jax.Array | None = None) -> jax.Array:
        score = raw[:, 0]
        longer = length[:, None] > length[None, :]
        if capped is not None:
            longer &= ~capped[None, :]  # how long the shorter one would have become is not known
        pairs = weights[:, None] * weights[None, :] * longer
        return _mean(jax.nn.softplus(score[None, :] - score[:, None]), pairs)

    def lengths(self, raw: np.ndarray) -> np.ndarray:
        return np.interp(raw[:, 0].astype(np.float64), self.scores, self.quantiles)

    def calibrated(self, raw: np.ndarray) -> Self:
        scores = np.quantile(raw[:, 0].astype(np.float64), _shares())
        return replace(self, scores=tuple(float(s) for s in scores))

    def __post_init__(self) -> None:
        _numbers(self.name, (*self.scores, *self.quantiles))
        if not self.scores or len(self.scores) != len(self.quantiles):
            raise ValueError(f"formulation {self.name}: scores and quantiles must be as many as each other")
        for values in (self.scores, self.quantiles):
            if any(b < a for a, b in pairwise(values)):
                raise ValueError(f"formulation {self.name}: scores and quantiles must ascend")


#: reg_l1, reg_mse: a regression of the length. cls: percentile classes. ord_mse, ord_l1: a regression of the class's
#: number. binary: below the median or not. pairwise: a score that is higher for the longer of two.
KINDS: dict[str, type[Formulation]] = {
    "reg_l1": Regression,
    "reg_mse": Regression,
    "cls": Classes,
    "ord_mse": Ordinal,
    "ord_l1": Ordinal,
    "binary": Classes,
    "pairwise": Pairwise,
}
NAMES = tuple(KINDS)


def class_bounds(lengths: np.ndarray, classes: int) -> tuple[float, ...]:
    """The lower bounds of percentile classes but the first, ascending; fewer where lengths are tied. No class is
    empty."""
    inner = np.quantile(lengths, np.arange(1, classes) / classes, method="higher")
    return tuple(float(b) for b in np.unique(inner) if b > lengths.min())


def _regression(name: str, lengths: np.ndarray, scale: str) -> Regression:
    scaled = np.log1p(lengths) if scale == "log" else lengths
    return Regression(name, scale, float(scaled.mean()), float(scaled.std()) or 1.0, float(lengths.max()))


def _pairwise(name: str, lengths: np.ndarray) -> Pairwise:
    """Until it is calibrated, scores count as standard normal."""
    normal = tuple(NormalDist().inv_cdf(share) for share in _shares())
    return Pairwise(name, normal, tuple(float(q) for q in np.quantile(lengths, _shares())))


def _shares() -> list[float]:
    return [(i + 0.5) / _KNOTS for i in range(_KNOTS)]


def _label(bounds: tuple[float, ...], length: jax.Array) -> jax.Array:
    return jnp.searchsorted(jnp.asarray(bounds), length, side="right")


def _below(error: jax.Array, capped: jax.Array | None) -> jax.Array:
    """The error, less what of it lies above a cap."""
    return error if capped is None else jnp.where(capped, jnp.minimum(error, 0), error)


def _mean(each: jax.Array, weights: jax.Array) -> jax.Array:
    return jnp.sum(each * weights) / jnp.maximum(jnp.sum(weights), 1e-9)


def _numbers(name: str, values: tuple[object, ...]) -> None:
    if not all(isinstance(v, int | float) and np.isfinite(v) for v in values):
        raise ValueError(f"formulation {name}: all its values must be finite numbers")


def _check_classes(name: str, bounds: tuple[float, ...], means: tuple[float, ...]) -> None:
    _numbers(name, (*bounds, *means))
    if not bounds or len(means) != len(bounds) + 1:
        raise ValueError(f"formulation {name}: there must be one mean more than bounds")
    if any(b <= a for a, b in pairwise(bounds)):
        raise ValueError(f"formulation {name}: bounds must ascend")
