"""What retrieval gains over its proxy where prompts come back: ALISE's Table 2, on a workload made of repeats."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

import numpy as np

from jaxspec.predict.index import LengthIndex
from jaxspec.predict.predictor import TextPredictor
from jaxspec.predict.retrieval import RetrievalPredictor
from jaxspec.sched.policy import RetrievalSettings


def retrieval_against_proxy(
    proxy: TextPredictor,
    rows: Sequence[tuple[str, int]],
    served: int = 1000,
    asked: int = 200,
    seed: int = 0,
    settings: RetrievalSettings | None = None,
    skew: float = 1.0,
    batch: int = 8,
    bins: int = 10,
    advance: Callable[[int], None] = lambda done: None,
) -> dict[str, dict[str, float]]:
    """Serve `served` requests drawn from `rows` (prompt, true output tokens), then ask about `asked` more.

    Prompts come back as popular things do: that of rank r is drawn with weight r ** -skew (0: all alike). They come in
    batches, predicted before any of the batch is learned. The proxy must be warm, with embeddings.

    -> for "proxy" and "retrieval" `mae` in tokens, `relative_error` (mean of |error| / length), `bin_accuracy` (share
    of predictions in the true length's bin, of so many equal `bins` up to the longest), `ms` a prediction; for
    retrieval also `found`, the share of requests with neighbours. Raises `ValueError` without rows.
    """
    if not rows:
        raise ValueError("there are no prompts to serve")
    settings = settings or RetrievalSettings()
    rng = np.random.default_rng(seed)
    order = rng.permutation(len(rows))  # which prompts are popular has nothing to do with where they stand
    weights = np.arange(1, len(rows) + 1, dtype=float) ** -skew
    drawn = order[rng.choice(len(rows), size=served + asked, p=weights / weights.sum())]
    retrieval = RetrievalPredictor(proxy, LengthIndex(settings.k, settings.threshold, settings.capacity), "workload")
    for begin in range(0, served, batch):
        now = [rows[i] for i in drawn[begin : min(begin + batch, served)]]
        retrieval.predict([text for text, _ in now])
        retrieval.learn([text for text, _ in now], [length for _, length in now])
        advance(len(now))
    before = retrieval.found
    questions = [rows[i] for i in drawn[served:]]
    truth = np.array([length for _, length in questions], float)
    out = {
        "proxy": _errors(proxy.predict, questions, truth, batch, bins),
        "retrieval": _errors(retrieval.predict, questions, truth, batch, bins),
    }
    out["retrieval"]["found"] = (retrieval.found - before) / len(questions)
    return out


def _errors(
    predict: Callable[[Sequence[str]], np.ndarray],
    questions: Sequence[tuple[str, int]],
    truth: np.ndarray,
    batch: int,
    bins: int,
) -> dict[str, float]:
    predicted: list[float] = []
    begun = time.perf_counter()
    for begin in range(0, len(questions), batch):
        predicted += predict([text for text, _ in questions[begin : begin + batch]]).tolist()
    seconds = time.perf_counter() - begun
    errors = np.abs(np.array(predicted) - truth)
    bounds = np.linspace(0, truth.max(), bins + 1)[1:-1]
    return {
        "mae": float(errors.mean()),
        "relative_error": float((errors / truth).mean()),
        "bin_accuracy": float((np.digitize(predicted, bounds) == np.digitize(truth, bounds)).mean()),
        "ms": 1000 * seconds / len(questions),
    }
