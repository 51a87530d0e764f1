"""ALISE's Table 2: a predictor that looks served prompts up beside the proxy, asked for the same requests."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Protocol

import numpy as np

#: Evenly divided bins of the lengths: the paper does not say how many; S3, which it compares with, has ten.
BINS = 10
#: The repeating workload: requests served before the comparison and in it, how many prompts they come from, and the
#: exponent of how unevenly they come.
SERVED, ASKED, PROMPTS, SKEW = 1000, 500, 200, 1.0


class PredictorFile(Protocol):
    """As `jaxspec.predict`'s; one that learns has `learn(texts, lengths)` besides."""

    def predict(self, texts: Sequence[str]) -> np.ndarray: ...


def repeating(rows: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """`SERVED + ASKED` of `rows`, at most `PROMPTS` of them, the i-th coming in proportion to 1 / i**SKEW."""
    few = rng.permutation(rows)[:PROMPTS]
    share = np.arange(1, len(few) + 1) ** -SKEW
    return rng.choice(few, SERVED + ASKED, p=share / share.sum())


def serve(
    predictor: PredictorFile, texts: Sequence[str], length: np.ndarray, capped: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Ask for each request and then, if the predictor learns, tell how long its answer `length [n]` was, unless it was
    cut when as much or more had been predicted: then it teaches nothing, and the engine does not tell of it either.

    -> predicted tokens `[n]`, and what each prediction took in milliseconds, tokenising included.
    """
    learn = getattr(predictor, "learn", None)
    predicted, taken = np.zeros(len(texts)), np.zeros(len(texts))
    for i, text in enumerate(texts):
        begin = time.perf_counter()
        predicted[i] = predictor.predict([text])[0]
        taken[i] = 1e3 * (time.perf_counter() - begin)
        if learn is not None and (not capped[i] or predicted[i] < length[i]):
            learn([text], [int(length[i])])
    return predicted, taken


def compare(
    predictors: Mapping[str, PredictorFile],
    texts: Sequence[str],
    length: np.ndarray,
    capped: np.ndarray,
    served: int = 0,
) -> dict[str, dict[str, float]]:
    """For each predictor: accuracy over even bins, error as a share of the mean length (cut answers left out), and mean
    and maximal latency in milliseconds, all of them after the first `served` requests. All `[n]`, in the order of
    serving."""
    edges = np.linspace(0, length.max(), BINS + 1)[1:-1]
    out = {}
    for name, predictor in predictors.items():
        predicted, taken = (of[served:] for of in serve(predictor, texts, length, capped))
        true, known = length[served:], ~capped[served:]
        out[name] = {
            "accuracy": float((np.digitize(predicted, edges) == np.digitize(true, edges)).mean()),
            "error_ratio": float(np.abs(predicted - true)[known].mean() / true[known].mean()),
            "latency_ms": float(taken.mean()),
            "latency_max_ms": float(taken.max()),
        }
    return out
