"""The device's own rates, which rooflines are computed with: memory bandwidth and matrix products."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxspec.bench.gpu.card import Card, chained

#: Runs in a row between two looks at the clock.
_CHAIN = 8


def rate(card: Card, what: str) -> dict[str, Any]:
    """The rate of a "copy" or a "matmul"."""
    return {"copy": copy, "matmul": matmul}[what](card)


def copy(card: Card) -> dict[str, Any]:
    """Bytes per second of an array read and another written."""
    invert = jax.jit(lambda x: ~x)  # a plain copy might be left out by the compiler
    size = min(card.sizes.copied, (card.memory or card.sizes.copied * 8) // 8)
    x = jnp.arange(size // 4, dtype=jnp.uint32)
    times = chained(lambda: invert(x), jax.block_until_ready, _CHAIN, 3 * card.sizes.repeats)["device_ms"]
    return {"what": "copy", "bytes": 2 * size, "ms": times, **_rate(2 * size, times)}


def matmul(card: Card) -> dict[str, Any]:
    """Operations per second of a large product of square bfloat16 matrices of random values, summed in float32."""
    n = card.sizes.width
    a, b = (
        jax.random.normal(jax.random.key(i), (n, n), jnp.bfloat16) / jnp.asarray(n**0.5, jnp.bfloat16) for i in (0, 1)
    )

    def product(a: jax.Array, b: jax.Array) -> jax.Array:
        return jnp.matmul(a, b, preferred_element_type=jnp.float32).astype(jnp.bfloat16)

    compiled = jax.jit(product)
    times = chained(lambda: compiled(a, b), jax.block_until_ready, _CHAIN, 3 * card.sizes.repeats)["device_ms"]
    return {"what": "matmul", "flops": 2 * n**3, "ms": times, **_rate(2 * n**3, times)}


def _rate(amount: int, times: list[float]) -> dict[str, float]:
    return {"best_per_s": 1e3 * amount / min(times), "median_per_s": 1e3 * amount / float(np.median(times))}
