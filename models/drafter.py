"""Draft models: a few layers that share the target's embedding and, over a trimmed vocabulary, its head.

Two kinds in one module. A plain drafter reads tokens. A conditioned one reads beside each token the target's final
hidden state (its "feature") at the position before, after EAGLE (Li et al. 2024, §4.1); where the target has not been
yet, its own output takes the feature's place.
"""

from __future__ import annotations

from collections.abc import Mapping

import jax
import jax.numpy as jnp
from flax import nnx

from jaxspec.models.config import DecoderConfig
from jaxspec.models.layers import Product, inverse_frequencies, linear, rms_norm, rope_tables
from jaxspec.models.llama import Rope, blocks


class DraftDecoder(nnx.Module):
    """`config` is the target's with fewer layers. Weights: `jaxspec.models.load`'s names, and

    fuse [2 * hidden, hidden] (conditioned drafters only): of the token's embedding and the feature before it;
    vocab [V'] int32: the target's token of each column of `head [hidden, V']`.
    """

    def __init__(self, config: DecoderConfig, weights: Mapping[str, jax.Array], product: Product = linear):
        self.config, self.product = config, product
        self.embedding = nnx.Param(weights["embed"])
        self.fuse = nnx.Param(weights["fuse"]) if "fuse" in weights else None
        self.layers = blocks(config, weights, product)
        self.norm = nnx.Param(weights["norm"])
        self.head = nnx.Param(weights["head"])
        self.vocab = nnx.Param(weights["vocab"])

    @property
    def conditioned(self) -> bool:
        return self.fuse is not None

    def embed(self, tokens: jax.Array, features: jax.Array) -> jax.Array:
        """`tokens [T]` int32, `features [T, hidden]` of the positions before -> `[T, hidden]`.

        Plain drafters leave the features unread.
        """
        x = self.embedding[...].at[tokens].get(mode="clip")
        if self.fuse is None:
            return x
        both = jnp.concatenate([x, features.astype(x.dtype)], -1)
        return self.product(both, self.fuse[...], self.config.hidden_size, None)

    def rope(self, positions: jax.Array) -> Rope:
        return rope_tables(positions, inverse_frequencies(self.config))

    def finish(self, x: jax.Array) -> jax.Array:
        """Final norm: `[T, hidden]` of the last layer -> the drafter's own features."""
        return rms_norm(x, self.norm[...], self.config.norm_eps)

    def logits(self, features: jax.Array) -> jax.Array:
        """`[T, hidden]` -> `[T, V']`, float32; column i stands for token `vocab[i]`."""
        return self.product(features, self.head[...], self.vocab.shape[0], None).astype(jnp.float32)


def draft_forward(model: DraftDecoder, tokens: jax.Array, features: jax.Array) -> jax.Array:
    """The drafter's features `[T, hidden]` for one sequence `tokens [T]`, without a cache (for training and tests).

    `features [T, hidden]`: the target's at positions 0 … T - 1; position p reads that of p - 1, position 0 zeros.
    """
    c = model.config
    positions = jnp.arange(tokens.shape[0])
    rope = model.rope(positions)
    x = model.embed(tokens, jnp.concatenate([jnp.zeros_like(features[:1]), features[:-1]]))
    mask = positions[:, None] >= positions[None, :]

    def attend(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
        grouped = q.reshape(q.shape[0], c.num_kv_heads, -1, c.head_dim)
        scores = jnp.einsum("tkgd,skd->kgts", grouped, k) * c.head_dim**-0.5
        weights = jax.nn.softmax(jnp.where(mask, scores, -jnp.inf))
        return jnp.einsum("kgts,skd->tkgd", weights, v).reshape(q.shape)

    for layer in model.layers:
        x = layer(x, rope, attend)
    return model.finish(x)
