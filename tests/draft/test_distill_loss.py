"""What drafters are trained with: passes that equal drafting, and a loss that counts only the positions in use."""

from __future__ import annotations

from dataclasses import replace

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from helpers.distillation import TARGET, settings
from helpers.tiny_drafters import as_decoder, conditioned
from jaxspec.draft.distill.begin import begin
from jaxspec.draft.distill.train import Batch, loss_and_hits
from jaxspec.draft.distill.unroll import unroll
from jaxspec.draft.registry import truncated
from jaxspec.models.decoder import Decoder, device_weights, forward_features
from jaxspec.models.drafter import DraftDecoder, draft_forward, feature_width, target_features

LENGTH = 12
NORM = jnp.asarray(TARGET.weights["norm"])


def rows(length: int) -> Batch:
    """Two rows of random text, padded to `length` with zeros as the data are."""
    rng = np.random.default_rng(0)
    tokens, use = np.zeros((2, length), np.int32), np.zeros((2, length), bool)
    features = np.zeros((2, length, feature_width(TARGET.config)), np.float32)
    tokens[:, :LENGTH], use[:, 3 : LENGTH - 1] = rng.integers(0, 200, (2, LENGTH)), True
    features[:, :LENGTH] = rng.normal(size=(2, LENGTH, feature_width(TARGET.config)))
    return Batch(jnp.asarray(tokens), jnp.asarray(features), jnp.asarray(use))


def drafter() -> DraftDecoder:
    return begin(settings(), TARGET, np.arange(64, dtype=np.int32))


@pytest.mark.parametrize("layers", [1, 2])
@pytest.mark.parametrize("reads_features", [True, False])
def test_a_pass_equals_a_draft(layers: int, reads_features: bool) -> None:
    """Pass j at position p: the text before p, with the target's conditions up to p - j - 1 and the drafter's after."""
    _, weights = conditioned(TARGET) if reads_features else truncated(TARGET, 1)
    model = as_decoder(replace(TARGET.config, num_layers=layers), {**TARGET.weights, **weights})
    tokens, features = jnp.asarray(rows(LENGTH).tokens[0]), rows(LENGTH).features[0]
    outputs = jax.jit(lambda t, f: unroll(model, t, f, 4))(tokens, features)
    chex.assert_shape(outputs, (4, LENGTH, TARGET.config.hidden_size))
    forward = jax.jit(lambda t, c: draft_forward(model, t, c))
    target = model.condition(features)
    for j in range(4):
        for p in range(j, LENGTH):
            conditions = target
            for i in range(j):  # the draft at depth i + 1 stands at p - j + i
                conditions = conditions.at[p - j + i].set(forward(tokens, conditions)[p - j + i])
            np.testing.assert_allclose(outputs[j, p], forward(tokens, conditions)[p], rtol=1e-4, atol=1e-4)


def test_a_parallel_draft_reads_no_token_after_the_first() -> None:
    """The output of pass j at p depends on the tokens up to p - j, and on their features up to p - j - 1."""
    _, weights = conditioned(TARGET)
    model = as_decoder(replace(TARGET.config, num_layers=1), {**TARGET.weights, **weights})
    tokens, features = jnp.asarray(rows(LENGTH).tokens[0]), rows(LENGTH).features[0]
    run = jax.jit(lambda t, f: unroll(model, t, f, 4, parallel=True))
    outputs = run(tokens, features)
    np.testing.assert_allclose(outputs[0], unroll(model, tokens, features, 1)[0], rtol=1e-5, atol=1e-5)
    for last in (3, 7):  # the last token that is known
        other = run(tokens.at[last + 1 :].add(5), features.at[last:].add(1.0))
        for j in range(4):
            np.testing.assert_array_equal(other[j, last + j], outputs[j, last + j])
            assert j == 0 or not np.array_equal(other[j, last + j + 1], outputs[j, last + j + 1])
        assert not np.array_equal(run(tokens.at[last].add(5), features)[3, last + 3], outputs[3, last + 3])


def test_features_hold_what_the_head_reads() -> None:
    """The last part, times the final norm's weight, is the target's final hidden state."""
    target = Decoder(TARGET.config, device_weights(TARGET.config, TARGET.weights, "float32"))
    tokens = rows(LENGTH).tokens[0]
    features = target_features(target, tokens)
    chex.assert_shape(features, (LENGTH, feature_width(TARGET.config)))
    np.testing.assert_allclose(features[:, -NORM.size :] * NORM, forward_features(target, tokens), rtol=1e-5)


@pytest.mark.parametrize("discount", [1.0, 0.5])
def test_padding_does_not_change_the_loss(discount: float) -> None:
    run = jax.jit(lambda model, batch: loss_and_hits(model, batch, NORM, 2, discount)[0])
    assert float(run(drafter(), rows(2 * LENGTH))) == pytest.approx(float(run(drafter(), rows(LENGTH))), rel=1e-5)


def test_deeper_passes_count_less() -> None:
    loss, (_, (first, second)) = loss_and_hits(drafter(), rows(LENGTH), NORM, 2, 0.5)
    assert float(first) != float(second)
    assert float(loss) == pytest.approx(float(2 * first + second) / 3, rel=1e-5)


def test_a_batch_without_positions_in_use_has_no_loss() -> None:
    batch = rows(LENGTH)
    loss, _ = loss_and_hits(drafter(), batch._replace(use=jnp.zeros_like(batch.use)), NORM, 1, 1.0)
    assert float(loss) == 0.0
