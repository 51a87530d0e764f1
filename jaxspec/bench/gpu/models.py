"""Models without files: the sizes of known models, with random weights that are made on the device.

Speed does not depend on the values of weights. What a trained model alone can show, such as how many drafts are
accepted, cannot be measured with them.
"""

from __future__ import annotations

from functools import partial
from zlib import crc32

import jax
import jax.numpy as jnp

from jaxspec.models.config import DecoderConfig, RopeScaling
from jaxspec.models.load.parts import weight_shapes

#: Sizes by name. The heads have weights of their own: tied to random embeddings, they would answer every token with
#: itself.
MODELS = {
    "llama-3.1-8b": DecoderConfig(
        family="llama", vocab_size=128256, hidden_size=4096, intermediate_size=14336, num_layers=32, num_heads=32,
        num_kv_heads=8, head_dim=128, max_position=131072, rope_theta=500000.0,
        rope_scaling=RopeScaling("llama3", 8.0, 1.0, 4.0, 8192),
    ),
    "smollm2-135m": DecoderConfig(
        family="llama", vocab_size=49152, hidden_size=576, intermediate_size=1536, num_layers=30, num_heads=9,
        num_kv_heads=3, head_dim=64, max_position=8192, rope_theta=100000.0,
    ),
    # For checks of the benchmark itself.
    "tiny": DecoderConfig(
        family="llama", vocab_size=257, hidden_size=32, intermediate_size=48, num_layers=2, num_heads=4, num_kv_heads=2,
        head_dim=16, max_position=512,
    ),
}  # fmt: skip
#: Standard deviation of a tensor's values times the square root of its input size. Larger queries and keys make
#: attention look at few positions, as that of trained models does; the logits' standard deviation is that of the head.
_GAIN = {
    "qkv": 1.5, "o": 1.0, "gate_up": 1.5, "down": 1.0, "head": 4.0, "router": 1.0, "experts_gate_up": 1.5,
    "experts_down": 1.0,
}  # fmt: skip


def random_weights(config: DecoderConfig, seed: int = 0, dtype: str = "bfloat16") -> dict[str, jax.Array]:
    """Weights as in `jaxspec.models.load`, made on the device one tensor after another. They depend on the seed alone.

    Norms are one and biases zero. Activations stay finite through all layers, and logits differ by several units.
    """
    key = jax.random.key(seed)
    return {name: _tensor(jax.random.fold_in(key, crc32(name.encode())), name.rsplit(".", 1)[-1], shape, dtype)
            for name, shape in weight_shapes(config).items()}  # fmt: skip


def _tensor(key: jax.Array, part: str, shape: tuple[int, ...], dtype: str) -> jax.Array:
    if len(shape) == 1:
        return jnp.zeros(shape, dtype) if part.endswith("bias") else jnp.ones(shape, dtype)
    deviation = _GAIN[part] / shape[-2] ** 0.5 if part in _GAIN else 1.0
    return _normal(key, deviation, shape=shape, dtype=dtype)


@partial(jax.jit, static_argnames=("shape", "dtype"))
def _normal(key: jax.Array, deviation: float, shape: tuple[int, ...], dtype: str) -> jax.Array:
    return jax.random.normal(key, shape, dtype) * jnp.asarray(deviation, dtype)
