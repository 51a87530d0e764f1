"""Predictors that look the true length up, with or without a stated error."""

from __future__ import annotations

from math import exp
from random import Random

from jaxspec.sched.request import Request


def true_len(request: Request) -> int:
    """Output tokens where somebody told them, else the most the request may write: true where it ignores EOS."""
    return request.max_tokens if request.true_len is None else request.true_len


class Oracle:
    def predict(self, request: Request) -> float | None:
        return float(true_len(request))


class NoisyOracle:
    """The true length times a log-normal error of parameter `sigma`, within what the request may write."""

    def __init__(self, sigma: float, random: Random) -> None:
        self._sigma, self._random = sigma, random

    def predict(self, request: Request) -> float | None:
        guess = true_len(request) * exp(self._random.gauss(0.0, self._sigma))
        return min(max(1.0, guess), float(request.max_tokens))
