"""Draft models: a few layers that share the target's embedding and, for a reduced vocabulary, its head.

Two kinds in one module. A plain drafter reads tokens. A conditioned drafter reads each token together with the target's
final hidden state ("feature") at the previous position, as in EAGLE (Li et al. 2024, §4.1). Where the target has not
computed that position yet, the drafter's own output replaces the feature.
"""

from __future__ import annotations

from collections.abc import Mapping

import jax
import jax.numpy as jnp
from flax import nnx

from jaxspec.models.config import DecoderConfig
from jaxspec.models.layers import (
    XLA,
    Operations,
    dense_attention,
    inverse_frequencies,
    rope_tables,
)
from jaxspec.models.llama import Rope, blocks


class DraftDecoder(nnx.Module):
    """A draft model. `config` is the target's with fewer layers. Weights as in `jaxspec.models.load`, and

    fuse [2 * hidden, hidden] (conditioned drafters only): projects the token's embedding and the previous feature;
    vocab [V'] int32: target token of each column of `head [hidden, V']`.
    """

    def __init__(
        self,
        config: DecoderConfig,
        weights: Mapping[str, jax.Array],
        ops: Operations = XLA,
    ):
        self.config, self.ops = config, ops
        self.embedding = nnx.Param(weights["embed"])
        self.fuse = nnx.Param(weights["fuse"]) if "fuse" in weights else None
        self.layers = blocks(config, weights, ops)
        self.norm = nnx.Param(weights["norm"])
        self.head = nnx.Param(weights["head"])
        self.vocab = nnx.Param(weights["vocab"])

    @property
    def conditioned(self) -> bool:
        """Whether the drafter reads the target's features."""
        return self.fuse is not None

    def embed(self, tokens: jax.Array, features: jax.Array) -> jax.Array:
        """`tokens [T]` int32, `features [T, hidden]` of the previous positions -> `[T, hidden]`.

        Plain drafters ignore the features.
        """
        x = self.ops.lookup(self.embedding[...], tokens, self.config.vocab_size, self.config.hidden_size)
        if self.fuse is None:
            return x
        both = jnp.concatenate([x, features.astype(x.dtype)], -1)
        return self.ops.product(both, self.fuse[...], self.config.hidden_size, None).astype(x.dtype)

    def rope(self, positions: jax.Array) -> Rope:
        """Rotary tables of `positions [T]`, see `rope_tables`."""
        return rope_tables(positions, inverse_frequencies(self.config))

    def finish(self, x: jax.Array) -> jax.Array:
        """Final norm: `x [T, hidden]` of the last layer -> the drafter's features `[T, hidden]`."""
        return self.ops.norm(x, self.norm[...], self.config.norm_eps)

    def logits(self, features: jax.Array) -> jax.Array:
        """`features [T, hidden]` -> logits `[T, V']` float32; column i is token `vocab[i]`."""
        return self.ops.product(features, self.head[...], self.vocab.shape[0], None)


def draft_forward(model: DraftDecoder, tokens: jax.Array, features: jax.Array) -> jax.Array:
    """The drafter's features `[T, hidden]` of one sequence `tokens [T]`, without a KV cache (training, tests).

    `features [T, hidden]`: the target's at positions 0 … T - 1. Position p reads the one at p - 1, position 0 zeros.
    """
    rope = model.rope(jnp.arange(tokens.shape[0]))
    x = model.embed(tokens, jnp.concatenate([jnp.zeros_like(features[:1]), features[:-1]]))
    for layer in model.layers:
        x = layer(x, rope, dense_attention)
    return model.finish(x)
