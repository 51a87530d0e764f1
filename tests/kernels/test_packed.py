"""Products with packed weights: exact weights, the same sums for any number of rows, every instruction set."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from helpers import tiny
from helpers.builds import BUILDS, TILES, features, use
from helpers.packed import packed, stored_matrix
from jaxspec.config import EngineConfig
from jaxspec.draft.registry import truncated
from jaxspec.kernels import cpu
from jaxspec.kernels.build import KernelsUnavailable
from jaxspec.kernels.packed import FORMATS, SUPER, pack
from jaxspec.models.load.stored import StoredMatrix
from jaxspec.step.runner import pick_layers


@pytest.fixture(scope="module", params=BUILDS)
def built(request: pytest.FixtureRequest) -> Iterator[str]:
    """Kernels for an architecture. The compiler's command."""
    yield from use(request.param)


def is_tiled(build: str, kind: str) -> bool:
    """Whether products are made on tiles: their sums differ from those of float32 weights."""
    return kind not in ("F32", "F16") and (build == TILES or (not build and "amx_bf16" in features()))


def product(x: np.ndarray, weight: jax.Array, width: int, layer: int = 0) -> np.ndarray:
    return np.asarray(cpu.linear(jnp.asarray(x), weight, width, jnp.int32(layer)))


@pytest.mark.parametrize("kind", FORMATS)
def test_weights_are_exactly_the_checkpoints(built: str, kind: str) -> None:
    """Products with unit vectors and embeddings show every weight; few rows and many take different ways."""
    depth, out, rng = 2 * SUPER, 70, np.random.default_rng(1)
    matrices = [stored_matrix(kind, out, depth, rng) for _ in range(2)]
    weight, unit = jnp.asarray(pack([[m] for m in matrices])), np.eye(depth, dtype=np.float32)
    for layer, matrix in enumerate(matrices):
        expected = matrix.floats()
        np.testing.assert_array_equal(product(unit, weight, out, layer), expected.T)
        for rows in (1, 2, 3, 4, 5, 6, 7, 8, 9, 12):
            first = rng.integers(depth - rows)
            np.testing.assert_array_equal(
                product(unit[first : first + rows], weight, out, layer), expected.T[first : first + rows]
            )
    tokens = jnp.asarray([0, 69, 31, 32, -5, 500])
    np.testing.assert_array_equal(
        cpu.lookup(weight, tokens, out, depth), matrices[0].floats()[np.clip(tokens, 0, out - 1)]
    )


@pytest.mark.parametrize("kind", FORMATS)
def test_a_row_does_not_depend_on_the_others_nor_on_the_form(built: str, kind: str) -> None:
    """Bit for bit: any number of rows, packed or float32, and as close to float64 as a plain float32 product. The depth
    takes several widened pieces, the last of one group where the form allows it."""
    depth, out, rng = 4 * SUPER + (0 if kind.endswith("_K") else 32), 40, np.random.default_rng(2)
    matrix = stored_matrix(kind, out, depth, rng)
    weight, wide = jnp.asarray(pack([[matrix]])), packed([matrix.floats().T])
    x = rng.normal(size=(70, depth)).astype(np.float32)
    alone = np.concatenate([product(row[None], weight, out) for row in x])
    for rows in (*range(1, 34), 67, 70):
        np.testing.assert_array_equal(product(x[:rows], weight, out), alone[:rows])
    if is_tiled(built, kind):
        assert (product(x, wide, out) != alone).any()
    else:
        np.testing.assert_array_equal(product(x, wide, out), alone)
    exact = x.astype(np.float64) @ matrix.floats().T.astype(np.float64)
    plain = np.zeros_like(alone)
    for d, column in enumerate(matrix.floats().T):
        plain += x[:, d, None] * column  # rounded once more than with a fused multiply-add
    assert np.abs(alone - exact).mean() <= 1.05 * np.abs(plain - exact).mean()


@pytest.mark.parametrize("groups", [1, 2, 3])
@pytest.mark.parametrize("kind", ["Q8_0", "Q4_1"])
def test_weights_of_few_groups(built: str, kind: str, groups: int) -> None:
    """So few that the stages of products on tiles hardly overlap."""
    depth, out, rng = 32 * groups, 40, np.random.default_rng(6)
    matrix = stored_matrix(kind, out, depth, rng)
    weight, x = jnp.asarray(pack([[matrix]])), rng.normal(size=(133, depth)).astype(np.float32)
    found = product(x, weight, out)
    for rows in (1, 5, 6, 33, 129):
        np.testing.assert_array_equal(product(x[:rows], weight, out), found[:rows])
    exact = x.astype(np.float64) @ matrix.floats().T.astype(np.float64)
    np.testing.assert_allclose(found, exact, rtol=1e-5, atol=1e-5 * np.abs(exact).max())


@pytest.mark.parametrize("kind", ["BF16", "I8", "Q4_1", "Q6_K", "Q8_0"])
def test_few_rows_without_tiles_have_the_bits_of_float32_weights(built: str, kind: str) -> None:
    """And more rows those of tiles, if the CPU has them."""
    depth, out, rng = 2 * SUPER, 40, np.random.default_rng(4)
    matrix = stored_matrix(kind, out, depth, rng)
    weight, wide = jnp.asarray(pack([[matrix]])), packed([matrix.floats().T])
    x = rng.normal(size=(9, depth)).astype(np.float32)
    for rows in (1, 8, 9):
        found = np.asarray(cpu.linear(jnp.asarray(x[:rows]), weight, out, untiled=8))
        np.testing.assert_array_equal(found, product(x[:rows], wide if rows <= 8 else weight, out))
    counts = jnp.asarray([8, 1])
    both = jnp.asarray(pack([[matrix], [matrix]]))
    found = np.asarray(cpu.grouped(jnp.asarray(x), both, out, None, counts, untiled=2))
    np.testing.assert_array_equal(found[:8], product(x[:8], weight, out))
    np.testing.assert_array_equal(found[8:], product(x[8:], wide, out))


def test_batch_invariance_is_a_setting_of_the_target_and_none_of_drafters(built: str) -> None:
    target, rng = tiny.model(), np.random.default_rng(5)
    matrix = stored_matrix("Q4_1", 40, SUPER, rng)
    weight, wide = jnp.asarray(pack([[matrix]])), packed([matrix.floats().T])
    x = rng.normal(size=(3, SUPER)).astype(np.float32)
    untiled = product(x, wide, 40)
    assert (product(x, weight, 40) != untiled).any() == is_tiled(built, "Q4_1")
    for invariant in (True, False):
        layers = pick_layers(EngineConfig(dtype="float32", batch_invariant=invariant), target.config)
        decoder = layers.decoder(target.config, target.weights, "float32")
        drafter = layers.drafter(*truncated(target, 1), "float32", {})
        for model, bits in ((decoder, product(x, weight, 40) if invariant else untiled), (drafter, untiled)):
            np.testing.assert_array_equal(model.ops.product(jnp.asarray(x), weight, 40, None), bits)
            np.testing.assert_array_equal(model.ops.grouped(jnp.asarray(x), weight, 40, None, jnp.asarray([3])), bits)


@pytest.mark.skipif(not shutil.which("cc") or "amx_bf16" not in features(), reason="no C compiler or AMX tiles")
@pytest.mark.parametrize("kind", [kind for kind in FORMATS if is_tiled(TILES, kind)])
def test_tiles_of_the_cpu_round_like_emulated_ones(kind: str) -> None:
    """So tests with emulated tiles say what this CPU computes."""
    depth, out, rng = 2 * SUPER, 40, np.random.default_rng(3)
    weight = jnp.asarray(pack([[stored_matrix(kind, out, depth, rng)]]))
    x = rng.normal(size=(37, depth)).astype(np.float32)
    results = []
    for build in ("cc -march=native", TILES):  # not $CC, which may contract sums and products differently
        cpu.load(build)
        with cpu.built_by(build):
            results.append([product(x[:rows], weight, out) for rows in (1, 5, 6, 16, 37)])
    chex.assert_trees_all_equal(*results)


@settings(deadline=None, max_examples=25, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    rows=st.integers(1, 40) | st.sampled_from((65, 129)),
    depth=st.integers(1, 170) | st.sampled_from((224, 256, 288, 512, 544)),
    layers=st.integers(1, 3), widths=st.lists(st.integers(1, 90), min_size=1, max_size=3), data=st.data(),
)  # fmt: skip
def test_products_of_every_shape(built: str, rows: int, depth: int, layers: int, widths: list[int], data: Any) -> None:
    """Parts of different forms are fused; panels with columns of two parts become float32."""
    rng = np.random.default_rng(data.draw(st.integers(0, 2**32)))
    kinds = [k for k in FORMATS if depth % (SUPER if k.endswith("_K") else 32 if k.startswith("Q") else 1) == 0]
    fused = [
        [stored_matrix(data.draw(st.sampled_from(kinds)), width, depth, rng) for width in widths] for _ in range(layers)
    ]
    layer, x = data.draw(st.integers(0, layers - 1)), rng.normal(size=(rows, depth)).astype(np.float32)
    y = product(x, jnp.asarray(pack(fused)), sum(widths), layer)
    chex.assert_shape(y, (rows, sum(widths)))
    weights = np.concatenate([m.floats() for m in fused[layer]]).T
    # weights of K-quants, which need such a depth, are large here
    bound = 2e-4 if depth % SUPER else 2e-6 * (np.abs(x) @ np.abs(weights))
    assert np.isclose(y, x @ weights, rtol=1e-7, atol=bound).all()


def test_k_quants_of_depths_that_are_no_superblock_and_other_types_become_float32() -> None:
    cpu.load()
    rng = np.random.default_rng(3)
    matrix = stored_matrix("Q3_K", 50, SUPER, rng)
    np.testing.assert_array_equal(
        product(np.eye(SUPER, dtype=np.float32), jnp.asarray(pack([[matrix]])), 50), matrix.floats().T
    )


def test_chosen_rows_of_a_stored_matrix() -> None:
    rng, chosen = np.random.default_rng(4), np.asarray([5, 2, 60, 2])
    for kind in FORMATS:
        matrix = stored_matrix(kind, 64, SUPER, rng)
        np.testing.assert_array_equal(matrix.rows(chosen).floats(), matrix.floats()[chosen])


def test_a_buffer_is_about_as_large_as_the_checkpoint() -> None:
    rng = np.random.default_rng(5)
    for kind in FORMATS:
        matrix = stored_matrix(kind, 320, 2 * SUPER, rng)
        stored = matrix.read().nbytes + (0 if matrix.scale is None else matrix.scale.nbytes)
        assert stored <= pack([[matrix]]).nbytes <= 1.03 * stored + 256, kind


def test_a_product_large_enough_for_threads() -> None:
    cpu.load()
    rng = np.random.default_rng(0)
    x, w = rng.normal(size=(33, 512)).astype(np.float32), rng.normal(size=(2, 512, 1000)).astype(np.float32)
    weight = packed(w)
    run = jax.jit(chex.assert_max_traces(lambda x, i: cpu.linear(x, weight, 1000, i), n=1))
    for layer in (0, 1, 0):
        np.testing.assert_allclose(run(x, jnp.int32(layer)), x @ w[layer], atol=5e-4)


def test_what_does_not_fit_is_refused() -> None:
    cpu.load()
    weight = packed(np.ones((2, 64, 40), np.float32))
    for x, width, layer in (((3, 96), 40, 0), ((3, 64), 72, 0), ((3, 64), 40, 2), ((3, 64), 40, -1)):
        with pytest.raises(Exception, match=r"packed weights of 2 layers \[64, 2 \* 32\] do not fit"):
            jax.block_until_ready(cpu.linear(jnp.zeros(x), weight, width, jnp.int32(layer)))
    with pytest.raises(Exception, match="do not fit"):
        jax.block_until_ready(cpu.linear(jnp.zeros((3, 64)), jnp.zeros(4096, jnp.uint8), 40))
    with pytest.raises(ValueError, match="uint8"):
        cpu.linear(jnp.zeros((3, 8)), jnp.zeros((8, 64)), 64)
    with pytest.raises(ValueError, match="float32"):
        cpu.linear(jnp.zeros((3, 64), jnp.bfloat16), weight, 40)
    parts = [StoredMatrix.of(np.ones((8, depth), np.float32)) for depth in (32, 64)]
    with pytest.raises(ValueError, match="cannot be fused"):
        pack([parts])
    with pytest.raises(ValueError, match="cannot share a buffer"):
        pack([[part] for part in parts])


@pytest.mark.slow
def test_half_precision_of_every_kind() -> None:
    """Subnormal and large float16 numbers, and signed zeros, with and without the CPU's conversion."""
    values = np.arange(2**16, dtype=np.uint16).view(np.float16)
    values = values[np.isfinite(values)].reshape(-1, 64)
    matrix = StoredMatrix.of(values)
    for name in ("", "cc -march=x86-64"):
        if name and not shutil.which("cc"):
            continue
        try:
            cpu.load(name)
        except KernelsUnavailable:
            continue
        with cpu.built_by(name):
            found = cpu.lookup(jnp.asarray(pack([[matrix]])), jnp.arange(len(values)), len(values), 64)
        np.testing.assert_array_equal(found, values.astype(np.float32))


def test_a_stored_matrix_is_read_when_it_is_packed() -> None:
    reads: list[str] = []
    matrix = stored_matrix("Q4_1", 64, 64, np.random.default_rng(6))

    def read() -> np.ndarray:
        reads.append("")
        return matrix.read()

    watched = replace(matrix, read=read)
    assert not reads
    np.testing.assert_array_equal(pack([[watched]]), pack([[matrix]]))
    assert len(reads) == 1
