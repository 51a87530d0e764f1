"""The length probe: hazards, their median, the loss of answers that ended or were cut, and its file."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from safetensors.numpy import save_file

from helpers import tiny
from jaxspec.errors import ModelLoadError
from jaxspec.models.drafter import feature_width
from jaxspec.models.hazards import negative_log_likelihood
from jaxspec.models.length_probe import ENDS, LengthProbe, median_left
from jaxspec.models.load.probe_file import load_probe, save_probe


def logits_of(hazards: list[float]) -> jax.Array:
    h = np.asarray(hazards + [0.5] * (len(ENDS) - len(hazards)))
    return jnp.asarray(np.log(h / (1 - h)), jnp.float32)[None]


@pytest.mark.parametrize(
    ("hazards", "wanted"),
    [
        ([0.5], 2.0),  # half end by 2
        ([1 / 3, 0.25], 4.0),  # S = 2/3, 1/2
        ([0.25, 0.5], 2 + 2 * (0.25 / 0.375)),  # in the middle of the second range
        ([0.999], 1.001001),
        ([0.0001] * 20, 2048.0),  # longer than all ranges
    ],
)
def test_the_median(hazards: list[float], wanted: float) -> None:
    assert float(median_left(logits_of(hazards))[0]) == pytest.approx(wanted, rel=1e-3)


def test_the_loss_is_the_likelihood_of_what_was_seen() -> None:
    hazards = [0.1, 0.3, 0.2, 0.6]
    logits = jnp.repeat(logits_of(hazards), 4, 0)
    left, ended = jnp.asarray([2.0, 5.0, 5.0, 1.0]), jnp.asarray([True, True, False, False])
    wanted = [-np.log(0.1), -np.log(0.9 * 0.7 * 0.2), -np.log(0.9 * 0.7), 0.0]
    np.testing.assert_allclose(negative_log_likelihood(logits, left, ended, ENDS), wanted, rtol=1e-5)
    beyond = negative_log_likelihood(logits[:1], jnp.asarray([5000.0]), None, ENDS)
    assert float(beyond[0]) == pytest.approx(-np.log(1 - np.asarray(hazards + [0.5] * (len(ENDS) - 4))).sum(), rel=1e-5)


def test_a_probe_comes_back_from_its_file(tmp_path: Path) -> None:
    c = tiny.config()
    probe = LengthProbe(feature_width(c), 8, nnx.Rngs(3))
    save_probe(probe, "tiny", path := tmp_path / "new" / "p.safetensors")
    x = jnp.asarray(np.random.default_rng(0).normal(size=(5, feature_width(c))), jnp.float32)
    chex.assert_trees_all_close(load_probe(path, c)(x), probe(x), rtol=1e-2, atol=1e-2)  # stored in float16
    with pytest.raises(ModelLoadError, match=r"is for tiny, not for features of 192"):
        load_probe(path, replace(c, hidden_size=64))
    with pytest.raises(ModelLoadError, match=r"cannot read length probe .*: there is no such file"):
        load_probe(tmp_path / "none", c)
    save_file({"inner.kernel": np.zeros((1, 1))}, other := tmp_path / "other")
    with pytest.raises(ModelLoadError, match="is not a length probe"):
        load_probe(other, c)
