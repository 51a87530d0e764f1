"""The loss that drafters are trained with counts only the positions in use."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from helpers.distillation import TARGET, settings
from jaxspec.draft.distill.begin import begin
from jaxspec.draft.distill.train import Batch, loss_and_hits

LENGTH = 12


def rows(length: int) -> Batch:
    """Two rows of random text, padded to `length` with zeros as the data are."""
    rng = np.random.default_rng(0)
    tokens, use = np.zeros((2, length), np.int32), np.zeros((2, length), bool)
    features = np.zeros((2, length, TARGET.config.hidden_size), np.float32)
    tokens[:, :LENGTH], use[:, 3 : LENGTH - 1] = rng.integers(0, 200, (2, LENGTH)), True
    features[:, :LENGTH] = rng.normal(size=(2, LENGTH, TARGET.config.hidden_size))
    return Batch(jnp.asarray(tokens), jnp.asarray(features), jnp.asarray(use))


@pytest.mark.parametrize("regression", [0.0, 0.5, 2.0])
def test_padding_does_not_change_the_loss(regression: float) -> None:
    model = begin(settings(), TARGET, np.arange(64, dtype=np.int32))
    run = jax.jit(lambda model, batch: loss_and_hits(model, batch, 2, regression)[0])
    assert float(run(model, rows(2 * LENGTH))) == pytest.approx(float(run(model, rows(LENGTH))), rel=1e-5)


def test_the_regression_is_relative_to_the_features_size() -> None:
    """A drafter that predicts zeros has the relative error 1."""
    model = begin(settings(), TARGET, np.arange(64, dtype=np.int32))
    model.norm[...] = jnp.zeros_like(model.norm[...])
    losses = [float(loss_and_hits(model, rows(2 * LENGTH), 1, weight)[0]) for weight in (0.0, 1.0)]
    assert losses[1] - losses[0] == pytest.approx(1.0, rel=1e-5)


def test_a_batch_without_positions_in_use_has_no_loss() -> None:
    batch = rows(LENGTH)
    loss, _ = loss_and_hits(
        begin(settings(), TARGET, np.arange(64, dtype=np.int32)),
        Batch(batch.tokens, batch.features, jnp.zeros_like(batch.use)), 1, 1.0,
    )  # fmt: skip
    assert float(loss) == 0.0
