"""Rotary embeddings: frequencies, tables, rotation."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

from jaxspec.models.config import DecoderConfig, RopeScaling

#: Cosines and sines of positions, see `rope_tables`.
Rope = tuple[jax.Array, jax.Array]


def inverse_frequencies(config: DecoderConfig) -> np.ndarray:
    """Inverse frequencies `[rotated / 2]` float32, with the model's `rope_scaling` applied."""
    return _scaled(_plain(config.rope_theta, config.rotated), config).astype(np.float32)


def _plain(theta: float, dim: int) -> np.ndarray:
    return 1.0 / theta ** (np.arange(0, dim, 2, dtype=np.float64) / dim)


def _scaled(inv: np.ndarray, config: DecoderConfig) -> np.ndarray:
    scaling = config.rope_scaling
    if scaling is None:
        return inv
    match scaling.kind:
        case "linear":
            return inv / scaling.factor
        case "llama3":
            return _llama3(inv, scaling)
        case "yarn":
            return _yarn(inv, scaling, config.rope_theta)
        case "longrope":
            return inv / np.asarray(scaling.long, np.float64)


def _llama3(inv: np.ndarray, s: RopeScaling) -> np.ndarray:
    """Llama 3.1 scaling: low frequencies are divided by `factor`, high ones kept, those in between interpolated."""
    rotations = s.original_max_position * inv / (2 * np.pi)
    blend = np.clip((rotations - s.low_freq_factor) / (s.high_freq_factor - s.low_freq_factor), 0, 1)
    return (1 - blend) * inv / s.factor + blend * inv


def _yarn(inv: np.ndarray, s: RopeScaling, theta: float) -> np.ndarray:
    """YaRN (arXiv 2309.00071, §3.2): a ramp over the indices of frequencies between two numbers of rotations."""
    dim = 2 * len(inv)

    def index(rotations: float) -> float:
        return dim * np.log(s.original_max_position / (rotations * 2 * np.pi)) / (2 * np.log(theta))

    low, high = index(s.beta_fast), index(s.beta_slow)
    if s.truncate:
        low, high = np.floor(low), np.ceil(high)
    low, high = max(low, 0), min(high, dim - 1)
    ramp = np.clip((np.arange(len(inv)) - low) / max(high - low, 1e-3), 0, 1)
    return ramp * inv / s.factor + (1 - ramp) * inv


def rope_tables(config: DecoderConfig, positions: jax.Array) -> Rope:
    """Cosines and sines `[kinds, T, rotated / 2]` float32 of `positions [T]`.

    Kind 0 is for most layers. Where the model has other layers (`DecoderConfig.rope_of`), kind 1 is theirs: with
    another base, or without a rotation.
    """
    kinds = [inverse_frequencies(config)]
    if config.local_rope_theta is not None:
        kinds.append(_plain(config.local_rope_theta, config.rotated).astype(np.float32))
    elif config.unrotated_layers:
        kinds.append(np.zeros_like(kinds[0]))
    angles = positions.astype(jnp.float32)[:, None] * jnp.asarray(np.stack(kinds))[:, None]
    factor = 1.0 if config.rope_scaling is None else config.rope_scaling.attention_factor
    if factor == 1.0:
        return jnp.cos(angles), jnp.sin(angles)
    factors = jnp.asarray([factor, 1.0][: len(kinds)])[:, None, None]
    return jnp.cos(angles) * factors, jnp.sin(angles) * factors


def rope_of(rope: Rope, kind: jax.Array | int) -> Rope:
    """The tables `[T, rotated / 2]` of a layer of this kind."""
    cos, sin = rope
    return (cos[0], sin[0]) if len(cos) == 1 else (cos[kind], sin[kind])


def rotate(x: jax.Array, rope: Rope) -> jax.Array:
    """Apply rotary embeddings to the leading dimensions of each head of `x [T, heads, head_dim]`, halves paired as in
    Hugging Face. `rope`: from `rope_of`.

    The halves are swapped by flipping an axis of size two: XLA on CPU compiles a concatenation to a branch per element.
    """
    cos, sin = (t[:, None, None, :].astype(x.dtype) for t in rope)
    rotated = 2 * cos.shape[-1]
    if rotated < x.shape[-1]:
        return jnp.concatenate([rotate(x[..., :rotated], rope), x[..., rotated:]], -1)
    halves = x.reshape(*x.shape[:-1], 2, -1)
    sign = jnp.asarray([[-1], [1]], x.dtype)
    return (halves * cos + jnp.flip(halves, -2) * (sign * sin)).reshape(x.shape)
