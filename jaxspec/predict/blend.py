"""Retrieval and proxy together: each counts by its precision."""

from __future__ import annotations

from collections.abc import Sequence
from math import exp, log
from typing import Any

import numpy as np

from jaxspec.predict.index import Neighbours
from jaxspec.predict.retrieval import RetrievalPredictor

#: Mean squared error of the proxy's log-lengths before it is known, and the learning rate of the known one.
_ERROR, _RATE = 0.5, 0.02


class BlendedPredictor(RetrievalPredictor):
    """The geometric mean of the proxy's prediction and of similar prompts' lengths, weighted by inverse variances.

    The proxy's variance is its mean squared error on the answers that have ended. The neighbours' is their own, drawn
    to the proxy's while they are few: so answers that agree count more than answers that differ.
    """

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._error = _ERROR

    @property
    def name(self) -> str:
        return f"blend of {super().name}"

    def _asks_proxy(self, near: Neighbours) -> bool:
        return True

    def _length(self, near: Neighbours, proxied: float | None) -> float:
        assert proxied is not None
        if not len(near):
            return proxied
        logs, weights = np.log(near.lengths), near.similarity
        mean = np.average(logs, weights=weights)
        variance = (len(near) * np.average((logs - mean) ** 2, weights=weights) + self._error) / (len(near) + 1)
        own, theirs = 1 / self._error, float(weights.sum() ** 2 / (weights**2).sum() / variance)
        return exp((own * log(proxied) + theirs * float(mean)) / (own + theirs))

    def learn(self, texts: Sequence[str], lengths: Sequence[int]) -> None:
        """Learn the true output tokens of these prompts, and how wrong the proxy was."""
        for text, length in zip(texts, lengths, strict=True):
            read = self._read.get(text)
            if read is not None and read.proxied is not None:
                self._error += _RATE * (log(length / read.proxied) ** 2 - self._error)
        super().learn(texts, lengths)
