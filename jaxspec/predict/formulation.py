"""What a head's outputs mean, and what it is trained to (SSJF, §3.1 and Table 2)."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np

#: reg_l1, reg_mse: a regression of the length. cls: percentile classes. ord_mse, ord_l1: a regression of the class's
#: number. binary: below the median or not. pairwise: a score that is higher for the longer of two.
NAMES = ("reg_l1", "reg_mse", "cls", "ord_mse", "ord_l1", "binary", "pairwise")


class Formulation(ABC):
    """Immutable. `outputs`: width of the head."""

    name: str
    outputs: int

    @abstractmethod
    def loss(self, raw: jax.Array, length: jax.Array, weights: jax.Array, capped: jax.Array | None = None) -> jax.Array:
        """`raw [B, outputs]`, `length [B]` tokens, `weights [B]` (0 leaves a row out) -> weighted mean, a scalar.

        `capped [B]` bool: the answer was cut at `length`, so a prediction of more is no error. Traceable by JAX.
        """

    @abstractmethod
    def lengths(self, raw: np.ndarray) -> np.ndarray:
        """`raw [B, outputs]` -> predicted tokens `[B]` float64, on the host."""

    def calibrated(self, raw: np.ndarray) -> Formulation:
        """After training, given `raw [N, outputs]` of the training rows: pairwise learns which score means which
        length, all others are themselves."""
        return self

    @abstractmethod
    def to_dict(self) -> dict[str, Any]:
        """Plain JSON values; `from_dict` is the inverse."""

    @staticmethod
    def fit(name: str, lengths: Sequence[float] | np.ndarray, classes: int = 5, scale: str = "log") -> Formulation:
        """The formulation `name` for training `lengths [N]`. `scale` "log" (of length + 1) or "linear" is what
        regressions work on. Raises `ValueError` naming the argument."""
        raise NotImplementedError

    @staticmethod
    def from_dict(spec: Mapping[str, Any]) -> Formulation:
        """Raises `ValueError` saying what is wrong with `spec`."""
        raise NotImplementedError
