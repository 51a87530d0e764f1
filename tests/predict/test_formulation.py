"""What heads are trained to, and what their outputs mean."""

from __future__ import annotations

import json
from typing import Any

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jaxspec.predict.formulation import NAMES, Formulation, Pairwise, Survival, class_bounds

LENGTHS = np.asarray([2, 4, 8, 16, 32, 64, 128, 256, 512, 1024], np.float64)


def ones(count: int) -> jax.Array:
    return jnp.ones(count)


def loss(f: Formulation, raw: Any, lengths: Any, capped: Any = None, weights: Any = None) -> float:
    raw = jnp.asarray(raw, jnp.float32).reshape(len(lengths), -1)
    weights = ones(len(lengths)) if weights is None else jnp.asarray(weights, jnp.float32)
    capped = None if capped is None else jnp.asarray(capped, bool)
    return float(f.loss(raw, jnp.asarray(lengths, jnp.float32), weights, capped))


@pytest.mark.parametrize("scale", ["log", "linear"])
@pytest.mark.parametrize("name", NAMES)
def test_outputs_free_to_move_learn_the_lengths(name: str, scale: str) -> None:
    """One output a row, nothing shared: what the loss wants is what `lengths` reads, up to classes."""
    f = Formulation.fit(name, LENGTHS, classes=5, scale=scale)
    raw = jnp.zeros((len(LENGTHS), f.outputs))
    lengths = jnp.asarray(LENGTHS, jnp.float32)
    optimizer = optax.adam(optax.cosine_decay_schedule(0.1, 300))
    state = optimizer.init(raw)
    chex.clear_trace_counter()  # chex counts this function of all parameters together

    @jax.jit
    @chex.assert_max_traces(n=1)
    def step(raw: jax.Array, state: Any) -> tuple[jax.Array, Any, jax.Array]:
        value, slope = jax.value_and_grad(f.loss)(raw, lengths, ones(len(LENGTHS)))
        updates, state = optimizer.update(slope, state)
        return optax.apply_updates(raw, updates), state, value  # type: ignore[return-value]

    first = value = loss(f, raw, LENGTHS)
    for _ in range(300):
        raw, state, value = step(raw, state)
    assert float(value) < 0.3 * first
    f = f.calibrated(np.asarray(raw))
    found = f.lengths(np.asarray(raw))
    chex.assert_type(found, np.float64)
    chex.assert_shape(found, LENGTHS.shape)
    if name.startswith("reg"):
        np.testing.assert_allclose(found, LENGTHS, rtol=0.2, atol=3)
    elif name == "survival":  # the middle of the range that ends with the length
        np.testing.assert_allclose(found, LENGTHS / 2**0.5, rtol=0.1)
    elif name == "pairwise":
        assert (np.diff(found) > 0).all() and np.corrcoef(np.log(found), np.log(LENGTHS))[0, 1] > 0.98
    else:
        np.testing.assert_array_equal(found, np.repeat(f.means, len(LENGTHS) // len(f.means)))  # type: ignore[attr-defined]


def test_widths() -> None:
    widths = {name: Formulation.fit(name, LENGTHS, classes=4).outputs for name in NAMES}
    assert widths.pop("survival") == len(LENGTHS)
    assert widths == {"reg_l1": 1, "reg_mse": 1, "cls": 4, "ord_mse": 1, "ord_l1": 1, "binary": 2, "pairwise": 1}


def test_losses_by_hand() -> None:
    log = Formulation.fit("reg_l1", LENGTHS)
    mean, spread = np.log1p(LENGTHS).mean(), np.log1p(LENGTHS).std()
    raw = (np.log1p([10, 20]) - mean) / spread
    assert loss(log, raw, [10, 20]) == pytest.approx(0, abs=1e-6)
    assert loss(log, raw + np.asarray([1, -2]), [10, 20]) == pytest.approx(1.5)
    linear = Formulation.fit("reg_mse", LENGTHS, scale="linear")
    assert loss(linear, [0.0], [LENGTHS.mean() + LENGTHS.std()]) == pytest.approx(1)
    classes = Formulation.fit("cls", LENGTHS, classes=5)
    assert loss(classes, np.zeros((1, 5)), [100]) == pytest.approx(np.log(5))
    # Five classes; 0 means the middle one, number 2: here lengths of 32 and 64.
    ordinal = Formulation.fit("ord_mse", LENGTHS, classes=5)
    assert loss(ordinal, [0.0], [32]) == 0 and loss(ordinal, [0.0], [2]) == 4 and loss(ordinal, [0.0], [1000]) == 4
    assert loss(Formulation.fit("ord_l1", LENGTHS, classes=5), [0.5], [2]) == 2.5
    pairs = Formulation.fit("pairwise", LENGTHS)
    assert loss(pairs, [1.0, 0.0], [9, 3]) == pytest.approx(np.log1p(np.exp(-1)))
    assert loss(pairs, [1.0, 0.0], [3, 9]) == pytest.approx(np.log1p(np.exp(1)))
    assert loss(pairs, [1.0, 0.0], [9, 9]) == 0, "who is longer of equals is no question"


@pytest.mark.parametrize("name", NAMES)
def test_weights(name: str) -> None:
    """A row of weight nothing is as if it were not there."""
    f = Formulation.fit(name, LENGTHS)
    raw = np.random.default_rng(0).normal(size=(4, f.outputs))
    without = loss(f, raw[:3], LENGTHS[[1, 7, 4]])
    assert loss(f, raw, LENGTHS[[1, 7, 4, 0]], weights=[1, 1, 1, 0]) == pytest.approx(without, rel=1e-5)
    assert loss(f, raw, LENGTHS[[1, 7, 4, 0]], weights=[0, 0, 0, 0]) == 0


@pytest.mark.parametrize("name", ["reg_l1", "reg_mse", "ord_l1", "ord_mse"])
def test_more_than_a_cap_is_no_error(name: str) -> None:
    f = Formulation.fit(name, LENGTHS)
    high, low = [5.0], [-5.0]
    assert loss(f, high, [64], capped=[True]) == 0 < loss(f, high, [64], capped=[False])
    assert loss(f, low, [64], capped=[True]) == loss(f, low, [64]) > 0
    slope = jax.grad(lambda raw: f.loss(raw, jnp.asarray([64.0]), ones(1), jnp.asarray([True])))
    assert float(slope(jnp.asarray([high]))[0, 0]) == 0 and float(slope(jnp.asarray([low]))[0, 0]) < 0


def test_classes_above_a_cap_are_no_error() -> None:
    f = Formulation.fit("cls", LENGTHS, classes=5)
    raw = [[0.0, 0, 0, 0, 50]]
    assert loss(f, raw, [32], capped=[True]) == pytest.approx(0, abs=1e-6)
    assert loss(f, raw, [32], capped=[False]) == pytest.approx(50)
    assert loss(f, np.zeros((1, 5)), [32], capped=[True]) == pytest.approx(np.log(5 / 3))
    slope = jax.grad(lambda r: f.loss(r, jnp.asarray([32.0]), ones(1), jnp.asarray([True])))(jnp.asarray(raw))
    chex.assert_tree_all_finite(slope)


def test_pairs_with_a_shorter_answer_that_was_cut_are_unknown() -> None:
    f = Formulation.fit("pairwise", LENGTHS)
    assert loss(f, [1.0, 0.0], [9, 3], capped=[False, True]) == 0
    assert loss(f, [1.0, 0.0], [9, 3], capped=[True, False]) > 0


def test_survival_by_hand() -> None:
    """Hazards of 1/2 in each of ten ranges."""
    f = Formulation.fit("survival", LENGTHS)
    assert isinstance(f, Survival) and f.ends == tuple(LENGTHS)
    half = np.zeros((1, 10))
    assert loss(f, half, [2]) == pytest.approx(np.log(2)), "ended in the first range"
    assert loss(f, half, [7]) == pytest.approx(3 * np.log(2)), "survived two and ended in the third"
    assert loss(f, half, [7], capped=[True]) == pytest.approx(2 * np.log(2)), "how it went on is not known"
    assert loss(f, half, [5000]) == pytest.approx(10 * np.log(2)), "survived all"
    assert f.quantile(half, 0.5)[0] == pytest.approx(2) and f.quantile(half, 0.75)[0] == pytest.approx(4)
    assert f.quantile(half, 0.625)[0] == pytest.approx(8**0.5)
    assert f.lengths(np.full((1, 10), -50.0))[0] == pytest.approx(1024), "never ends"


def test_survival_adds_a_ranking_loss() -> None:
    """Of the mean log-length, for which the first hazard of one row is 1 and of the other 0."""
    plain, ranked = (Formulation.fit("survival", LENGTHS, ranking=r) for r in (0.0, 2.0))
    raw = np.stack([np.full(10, 50.0), np.full(10, -50.0)])
    far = np.log(1024 / 2)
    for lengths, expected in (([2, 1024], np.log1p(np.exp(-far))), ([1024, 2], np.log1p(np.exp(far)))):
        added = loss(ranked, raw, lengths) - loss(plain, raw, lengths)
        assert added == pytest.approx(2 * expected, rel=1e-3, abs=1e-5)
    slope = jax.grad(lambda r: ranked.loss(r, jnp.asarray([2.0, 9.0]), ones(2), jnp.asarray([False, True])))(
        jnp.asarray(raw, jnp.float32)
    )
    chex.assert_tree_all_finite(slope)


def test_pairwise_scores_become_training_quantiles() -> None:
    f = Formulation.fit("pairwise", LENGTHS)
    raw = np.linspace(-3, 5, 1000)[:, None]
    told = f.calibrated(raw)
    assert isinstance(told, Pairwise)
    middle = told.lengths(np.asarray([[1.0]]))[0]
    assert middle == pytest.approx(np.median(LENGTHS), rel=0.1)
    assert (np.diff(told.lengths(raw)) >= 0).all()
    assert f.lengths(np.asarray([[0.0]]))[0] == pytest.approx(np.median(LENGTHS), rel=0.1), "before: standard normal"
    assert Formulation.fit("reg_l1", LENGTHS).calibrated(raw) == Formulation.fit("reg_l1", LENGTHS)


def test_predictions_stay_within_the_training_lengths() -> None:
    for scale in ("log", "linear"):
        f = Formulation.fit("reg_l1", LENGTHS, scale=scale)
        np.testing.assert_allclose(f.lengths(np.asarray([[-1e9], [1e9]], np.float32)), [1, 1024])


def test_classes_of_tied_lengths() -> None:
    """Half of the answers were cut at 8: classes become fewer, and none is empty."""
    lengths = np.asarray([1, 1, 1, 2, 5, 8, 8, 8, 8, 8], np.float64)
    bounds = class_bounds(lengths, 5)
    assert bounds == (5, 8)
    f = Formulation.fit("cls", lengths, classes=5)
    assert f.outputs == 3
    np.testing.assert_allclose(f.lengths(np.eye(3)), [1.25, 5, 8])


@pytest.mark.parametrize("name", NAMES)
def test_through_json_and_back(name: str) -> None:
    f = Formulation.fit(name, LENGTHS, classes=3, scale="linear")
    assert Formulation.from_dict(json.loads(json.dumps(f.to_dict()))) == f


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("reg_l2", LENGTHS), "formulation 'reg_l2' is not known; choose from reg_l1"),
        (("cls", []), "lengths must be"),
        (("cls", [1.0, float("nan")]), "lengths must be"),
        (("cls", [0.0, 3.0]), "lengths must be .* at least 1"),
        (("cls", [7.0, 7.0]), "all lengths are equal"),
        (("cls", LENGTHS, 1), "classes must be at least 2, not 1"),
        (("reg_l1", LENGTHS, 5, "cubic"), "scale 'cubic' is not known; choose from log, linear"),
    ],
)
def test_fits_that_are_refused(arguments: tuple[Any, ...], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Formulation.fit(*arguments)


@pytest.mark.parametrize(
    ("name", "changes", "message"),
    [
        ("cls", {"name": "other"}, "'other' is not known"),
        ("cls", {"name": ["cls"]}, "is not known"),
        ("cls", {"more": 1}, "must have the fields bounds, means, name"),
        ("cls", {"means": [1.0]}, "one more mean than bounds"),
        ("cls", {"means": 3}, "cls"),
        ("cls", {"bounds": [9.0, 3.0]}, "bounds must ascend"),
        ("ord_l1", {"bounds": []}, "one more mean"),
        ("reg_l1", {"mean": float("nan")}, "finite"),
        ("reg_l1", {"spread": 0.0}, "out of range"),
        ("reg_l1", {"scale": "cubic"}, "out of range"),
        ("pairwise", {"scores": [1.0]}, "equal, non-zero number"),
        ("pairwise", {"scores": [2.0, 1.0], "quantiles": [1.0, 2.0]}, "must ascend"),
    ],
)
def test_specs_that_are_refused(name: str, changes: dict[str, Any], message: str) -> None:
    spec = Formulation.fit(name, LENGTHS, classes=3).to_dict() | changes
    with pytest.raises(ValueError, match=message):
        Formulation.from_dict(spec)
