"""The CPU kernels' products with experts, and norms, against float64."""

from __future__ import annotations

import ctypes
import mmap
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from helpers.packed import packed, stored_matrix
from jaxspec.kernels import cpu
from jaxspec.kernels.packed import pack


@pytest.fixture(autouse=True, scope="module")
def kernels() -> None:
    cpu.load()


def grouped(x: np.ndarray, weight: jax.Array, width: int, layer: int, counts: list[int]) -> np.ndarray:
    product = jax.jit(cpu.grouped, static_argnums=2)
    return np.asarray(product(jnp.asarray(x), weight, width, jnp.int32(layer), jnp.asarray(counts, jnp.int32)))


@settings(deadline=None, max_examples=30)
@given(
    counts=st.lists(st.integers(0, 20), min_size=1, max_size=6), depth=st.integers(1, 70), width=st.integers(1, 100),
    layers=st.integers(1, 2), data=st.data(),
)  # fmt: skip
def test_rows_are_multiplied_by_their_experts(
    counts: list[int], depth: int, width: int, layers: int, data: Any
) -> None:
    rng = np.random.default_rng(data.draw(st.integers(0, 2**32)))
    layer = data.draw(st.integers(0, layers - 1))
    matrices = rng.normal(size=(layers, len(counts), depth, width)).astype(np.float32)
    x = rng.normal(size=(sum(counts), depth)).astype(np.float32)
    out = grouped(x, packed(matrices.reshape(-1, depth, width)), width, layer, counts)
    ends = np.cumsum(counts)
    for e, (end, count) in enumerate(zip(ends, counts, strict=True)):
        exact = x[end - count : end].astype(np.float64) @ matrices[layer, e]
        np.testing.assert_allclose(out[end - count : end], exact, atol=2e-4)


@pytest.mark.parametrize("kind", ["F32", "BF16", "Q4_1", "Q6_K"])
def test_a_row_has_the_bits_of_a_product_of_its_own(kind: str) -> None:
    """Whatever other rows there are, and however they are spread over the experts."""
    rng = np.random.default_rng(0)
    weight = jnp.asarray(pack([[stored_matrix(kind, 96, 256, rng)] for _ in range(4)]))
    x = rng.normal(size=(31, 256)).astype(np.float32)
    counts = [9, 0, 20, 2]
    out = grouped(x, weight, 96, 0, counts)
    expert = np.repeat(np.arange(4), counts)
    for i in (0, 8, 9, 30):
        alone = np.asarray(cpu.linear(jnp.asarray(x[i : i + 1]), weight, 96, jnp.int32(expert[i])))
        np.testing.assert_array_equal(out[i], alone[0])


def test_only_the_experts_that_were_chosen_are_read() -> None:
    """Counted in pages of memory: those of the other experts are never touched."""
    rng, depth, width, experts = np.random.default_rng(0), 1024, 256, 8
    whole = pack([[stored_matrix("F32", width, depth, rng)] for _ in range(experts)])
    head, each = 4096, 4 * depth * width
    memory = mmap.mmap(-1, len(whole) + 2 * mmap.PAGESIZE)
    start = np.frombuffer(memory, np.uint8)
    begin = -start.ctypes.data % mmap.PAGESIZE
    view = start[begin : begin + len(whole)]
    first = int(whole[64:68].view(np.uint32)[0]) * 64  # where the first expert's panels begin
    chosen = (2, 5)
    view[:head] = whole[:head]
    for e in chosen:
        at = slice(first + e * each, first + (e + 1) * each)
        view[at] = whole[at]
    weight = jax.device_put(view)
    if weight.unsafe_buffer_pointer() != view.ctypes.data:
        pytest.fail("the buffer was copied, so nothing can be said of what is read")
    x = rng.normal(size=(5, depth)).astype(np.float32)
    counts = [3 if e == 2 else 2 if e == 5 else 0 for e in range(experts)]
    out = grouped(x, weight, width, 0, counts)
    np.testing.assert_array_equal(out, grouped(x, jnp.asarray(whole), width, 0, counts))
    touched = np.zeros(-(-len(whole) // mmap.PAGESIZE), np.uint8)
    libc = ctypes.CDLL(None, use_errno=True)
    address = ctypes.c_void_p(view.ctypes.data)
    assert libc.mincore(address, ctypes.c_size_t(len(whole)), touched.ctypes.data_as(ctypes.c_void_p)) == 0
    used = int((touched & 1).sum()) * mmap.PAGESIZE
    assert len(chosen) * each <= used < (len(chosen) + 0.5) * each


@pytest.mark.parametrize("size", [1, 48, 576, 1000])
def test_norms_in_float64(size: int) -> None:
    rng = np.random.default_rng(size)
    x, weight, bias = rng.normal(2.0, size=(70, size)), rng.normal(size=size), rng.normal(size=size)
    x, weight, bias = (a.astype(np.float32) for a in (x, weight, bias))
    wide = x.astype(np.float64)
    by_square = wide / np.sqrt((wide**2).mean(-1, keepdims=True) + 1e-5) * weight
    np.testing.assert_allclose(cpu.norm(x, weight, 1e-5), by_square, rtol=2e-5, atol=2e-5)
    centred = wide - wide.mean(-1, keepdims=True)
    by_variance = centred / np.sqrt((centred**2).mean(-1, keepdims=True) + 1e-5) * weight + bias
    out = np.asarray(cpu.norm(jnp.asarray(x), jnp.asarray(weight), 1e-5, jnp.asarray(bias)))
    np.testing.assert_allclose(out, by_variance, rtol=2e-5, atol=2e-5)
    one = np.asarray(cpu.norm(jnp.asarray(x[7:8]), jnp.asarray(weight), 1e-5, jnp.asarray(bias)))
    np.testing.assert_array_equal(one[0], out[7])
