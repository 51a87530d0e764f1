"""Length oracles (true output lengths, for benchmarks and the simulator), and the correction of predictions."""

from __future__ import annotations

from math import exp
from random import Random
from typing import Protocol

from jaxspec.sched.config import PolicyConfig
from jaxspec.sched.request import Request

__all__ = ["LengthOracle", "NoisyOracle", "Nothing", "Oracle", "build", "check", "corrected"]


class LengthOracle(Protocol):
    def predict(self, request: Request) -> float | None:
        """Output tokens of a request that has just arrived; None if unknown."""
        ...


class Nothing:
    """Predicts nothing. A length predictor may report lengths later (`Scheduler.predicted`)."""

    def predict(self, request: Request) -> float | None:
        return None


def check(predicted: float) -> None:
    """Raises `ValueError` unless the length is positive."""
    if not predicted > 0:
        raise ValueError(f"a predicted length is a positive number of tokens, not {predicted}")


def corrected(predicted: float, request: Request) -> float:
    """The prediction, doubled until it exceeds the request's output length; at most max_tokens (ALISE §3.1)."""
    while predicted <= request.output_len:
        predicted *= 2
    return min(predicted, request.max_tokens)


def build(policy: PolicyConfig) -> LengthOracle:
    """The length oracle for `policy.predictor`."""
    match policy.predictor:
        case "none" | "auto" | "proxy" | "retrieval":  # the last three read the prompt's text, outside the scheduler
            return Nothing()
        case "oracle":
            return Oracle()
        case "noisy_oracle":
            return NoisyOracle(policy.predictor_noise, Random(policy.policy_seed))


def true_len(request: Request) -> int:
    """The request's true output length; if unknown, max_tokens, which is right for requests that ignore EOS."""
    return request.max_tokens if request.true_len is None else request.true_len


class Oracle:
    """Predicts the true length."""

    def predict(self, request: Request) -> float | None:
        return float(true_len(request))


class NoisyOracle:
    """The true length times a log-normal error with parameter `sigma`, between 1 and max_tokens."""

    def __init__(self, sigma: float, random: Random) -> None:
        self._sigma, self._random = sigma, random

    def predict(self, request: Request) -> float | None:
        guess = true_len(request) * exp(self._random.gauss(0.0, self._sigma))
        return min(max(1.0, guess), float(request.max_tokens))
