"""The limits of prediction from the prompt: known ones are found, from normal and from transformed lengths."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from scipy.stats import kendalltau

from jaxspec.train_predictor.ceiling import ceiling


@pytest.mark.parametrize("shape", [np.exp, lambda x: np.exp(x) ** 3, lambda x: np.minimum(np.exp(x), 4.0)])
@pytest.mark.parametrize("share", [0.2, 0.5, 0.8])
def test_the_best_prediction_is_the_prompts_own_part(shape: Callable[[np.ndarray], np.ndarray], share: float) -> None:
    rng = np.random.default_rng(3)
    own = share**0.5 * rng.normal(size=4000)
    length, other = (shape(own + (1 - share) ** 0.5 * rng.normal(size=4000)) for _ in range(2))
    found = ceiling(length, other, 5, rng)
    assert found.best[0] == pytest.approx(kendalltau(own, length)[0], abs=0.04)
    assert found.low[0] < found.best[0] < found.high[0] and found.high[0] - found.low[0] < 0.08
    assert found.twins[0] < found.best[0] and found.twins[1] < found.best[1] + 0.02
    # The best class of five, if all depends on the prompt, is certain.
    assert 0.2 < found.best[1] < 1


def test_lengths_without_and_with_chance() -> None:
    rng = np.random.default_rng(0)
    own = rng.permutation(500).astype(float)
    sure = ceiling(own, own, 5, rng)
    assert sure.best[0] > 0.97 and sure.best[1] > 0.95 and sure.twins == (pytest.approx(1), 1)
    blind = ceiling(rng.normal(size=500), rng.normal(size=500), 5, rng)
    assert blind.best[0] < 0.2 and blind.best[1] < 0.28
