"""Length oracles: output lengths for benchmarks and simulators, and how a prediction is corrected."""

from __future__ import annotations

from math import exp
from random import Random
from typing import Protocol

from jaxspec.sched.config import PolicyConfig
from jaxspec.sched.request import Request

__all__ = ["LengthOracle", "NoisyOracle", "Nothing", "Oracle", "build", "check", "corrected"]


class LengthOracle(Protocol):
    def predict(self, request: Request) -> float | None:
        """Output tokens of a request that has just arrived; None if it is not known, or not yet."""
        ...


class Nothing:
    """Predicts nothing; somebody else may (`Scheduler.predicted`)."""

    def predict(self, request: Request) -> float | None:
        return None


def check(predicted: float) -> None:
    """Raise `ValueError` unless this may be a length."""
    if not predicted > 0:
        raise ValueError(f"a predicted length is a positive number of tokens, not {predicted}")


def corrected(predicted: float, request: Request) -> float:
    """A prediction doubled until the request has not outlived it; never more than it may write."""
    while predicted <= request.output_len:
        predicted *= 2
    return min(predicted, request.max_tokens)


def build(policy: PolicyConfig) -> LengthOracle:
    """The predictor that the configuration names."""
    match policy.predictor:
        case "none" | "auto" | "proxy" | "retrieval":  # the last three read texts, which the scheduler does not know
            return Nothing()
        case "oracle":
            return Oracle()
        case "noisy_oracle":
            return NoisyOracle(policy.predictor_noise, Random(policy.policy_seed))


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
