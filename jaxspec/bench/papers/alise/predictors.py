"""ALISE's Table 2: the retrieval predictor compared with the proxy on the same requests."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Protocol

import numpy as np

#: Equal-width bins of the lengths. The paper does not say how many; S3, which it compares with, has ten.
BINS = 10
#: The repeating workload: requests served before the comparison and in it, number of prompts, and exponent of their
#: Zipf distribution.
SERVED, ASKED, PROMPTS, SKEW = 1000, 500, 200, 1.0


class PredictorFile(Protocol):
    """A predictor of `jaxspec.predict`; one that learns also has `learn(texts, lengths)`."""

    def predict(self, texts: Sequence[str]) -> np.ndarray: ...


def repeating(rows: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """`SERVED + ASKED` draws from at most `PROMPTS` of `rows`, the i-th with weight 1 / i**SKEW."""
    few = rng.permutation(rows)[:PROMPTS]
    share = np.arange(1, len(few) + 1) ** -SKEW
    return rng.choice(few, SERVED + ASKED, p=share / share.sum())


def serve(
    predictor: PredictorFile, texts: Sequence[str], length: np.ndarray, capped: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Predict each request in turn, and let a predictor that learns learn the answer's `length [n]`.

    As in the engine it does not learn from a truncated answer (`capped [n]`) whose predicted length was not exceeded.
    Returns predicted tokens `[n]`, and milliseconds of each prediction `[n]`, tokenising included.
    """
    learn = getattr(predictor, "learn", None)
    predicted, times = np.zeros(len(texts)), np.zeros(len(texts))
    for i, text in enumerate(texts):
        begin = time.perf_counter()
        predicted[i] = predictor.predict([text])[0]
        times[i] = 1e3 * (time.perf_counter() - begin)
        if learn is not None and (not capped[i] or predicted[i] < length[i]):
            learn([text], [int(length[i])])
    return predicted, times


def compare(
    predictors: Mapping[str, PredictorFile],
    texts: Sequence[str],
    length: np.ndarray,
    capped: np.ndarray,
    served: int = 0,
) -> dict[str, dict[str, float]]:
    """For each predictor: accuracy over equal-width bins, mean absolute error relative to the mean length (without
    truncated answers), and mean and maximal latency in milliseconds, all after the first `served` requests.

    texts, length, capped `[n]` are in serving order.
    """
    edges = np.linspace(0, length.max(), BINS + 1)[1:-1]
    out = {}
    for name, predictor in predictors.items():
        predicted, times = (column[served:] for column in serve(predictor, texts, length, capped))
        true, known = length[served:], ~capped[served:]
        out[name] = {
            "accuracy": float((np.digitize(predicted, edges) == np.digitize(true, edges)).mean()),
            "error_ratio": float(np.abs(predicted - true)[known].mean() / true[known].mean()),
            "latency_ms": float(times.mean()),
            "latency_max_ms": float(times.max()),
        }
    return out
