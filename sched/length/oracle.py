"""Oracles: true output lengths, exact or with errors."""

from __future__ import annotations

from math import exp
from random import Random

from jaxspec.sched.length.length import LengthSource, true_len
from jaxspec.sched.request import Request
from jaxspec.sched.slots import PREDICTORS, SlotContext


@PREDICTORS.register("oracle")
class Oracle(LengthSource):
    """Predicts the true length."""

    def predict(self, request: Request) -> float | None:
        return float(true_len(request))


@PREDICTORS.register("noisy_oracle")
class NoisyOracle(LengthSource):
    """The true length times a log-normal error with parameter `sigma`, at least 1.

    max_tokens does not bound it: where it equals the true length, every prediction that is too long would be exact.
    """

    def __init__(self, sigma: float, random: Random) -> None:
        self._sigma, self._random = sigma, random

    @classmethod
    def build(cls, settings: None, context: SlotContext) -> NoisyOracle:
        return cls(context.config.predictor_noise, Random(context.config.policy_seed))

    def predict(self, request: Request) -> float | None:
        return max(1.0, true_len(request) * exp(self._random.gauss(0.0, self._sigma)))
