"""Draft models: a few layers that share the target's embedding and, for a reduced vocabulary, its head.

Two kinds in one module. A plain drafter reads tokens. A conditioned drafter reads each token together with a condition
`[hidden]` of the previous position, as in EAGLE-3 (Li et al. 2025, §3.1). Where the target has computed that position,
the condition is made from its features: the outputs of a low, a middle and a high layer. Elsewhere it is the drafter's
own output.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial

import jax
import jax.numpy as jnp
from flax import nnx

from jaxspec.models.config import DecoderConfig
from jaxspec.models.decoder import Body, Decoder, run_layers
from jaxspec.models.layers import XLA, Operations, dense_attention

#: Layers of the target that features consist of.
TAPS = 3


def tapped_layers(config: DecoderConfig) -> tuple[int, ...]:
    """The target's layers whose outputs are its features: one near the first, the middle one and the last."""
    last = config.num_layers - 1
    return min(2, last), config.num_layers // 2, last


def feature_width(config: DecoderConfig) -> int:
    """Numbers per position in the feature pool."""
    return TAPS * config.hidden_size


def features_of(outputs: jax.Array, ops: Operations, eps: float) -> jax.Array:
    """Features `[T, TAPS * hidden]` from the outputs `[TAPS, T, hidden]` of the tapped layers.

    Each output is divided by its root mean square, so all layers have the same weight.
    """
    normed = ops.norm(outputs, jnp.ones(outputs.shape[-1], outputs.dtype), eps, None)
    return normed.swapaxes(0, 1).reshape(outputs.shape[1], -1)


def target_features(target: Decoder, tokens: jax.Array) -> jax.Array:
    """Features `[T, TAPS * hidden]` of one sequence `tokens [T]`, without a KV cache (training, tests)."""
    layers = run_layers(target, tokens)
    outputs = jnp.stack([layers[i] for i in tapped_layers(target.config)])
    return features_of(outputs, target.ops, target.config.norm_eps)


class DraftDecoder(Body):
    """A draft model. `config` is the target's with fewer layers. Weights as in `jaxspec.models.load`, and

    mix [TAPS * hidden, hidden] (conditioned drafters only): makes a condition from the target's features;
    fuse [2 * hidden, hidden] (conditioned drafters only): projects the token's embedding and the previous condition;
    vocab [V'] int32: target token of each column of `head [hidden, V']`.
    """

    def __init__(self, config: DecoderConfig, weights: Mapping[str, jax.Array], ops: Operations = XLA):
        super().__init__(config, weights, ops)
        self.mix = nnx.Param(weights["mix"]) if "mix" in weights else None
        self.fuse = nnx.Param(weights["fuse"]) if "fuse" in weights else None
        self.vocab = nnx.Param(weights["vocab"])

    @property
    def conditioned(self) -> bool:
        """Whether the drafter reads the target's features."""
        return self.fuse is not None

    def condition(self, features: jax.Array) -> jax.Array:
        """The target's features `[T, TAPS * hidden]` -> conditions `[T, hidden]`; zeros stay zeros. Plain drafters
        return zeros."""
        hidden = self.config.hidden_size
        if self.mix is None:
            return jnp.zeros((features.shape[0], hidden), features.dtype)
        dtype = self.norm[...].dtype
        return self.ops.product(features.astype(dtype), self.mix[...], hidden, None).astype(dtype)

    def embed(self, tokens: jax.Array, positions: jax.Array, conditions: jax.Array) -> jax.Array:
        """`tokens [T]`, `positions [T]` int32, `conditions [T, hidden]` of the previous positions -> `[T, hidden]`.

        Plain drafters ignore the conditions.
        """
        x = self.embed_tokens(tokens, positions)
        if self.fuse is None:
            return x
        both = jnp.concatenate([x, conditions.astype(x.dtype)], -1)
        return self.ops.product(both, self.fuse[...], self.config.hidden_size, None).astype(x.dtype)

    def logits(self, output: jax.Array) -> jax.Array:
        """`output [T, hidden]` -> logits `[T, V']` float32; column i is token `vocab[i]`."""
        return self.head_logits(output, self.vocab.shape[0])


def draft_forward(model: DraftDecoder, tokens: jax.Array, conditions: jax.Array) -> jax.Array:
    """The drafter's outputs `[T, hidden]` of one sequence `tokens [T]`, without a KV cache (tests).

    `conditions [T, hidden]`: of positions 0 … T - 1. Position p reads the one at p - 1, position 0 zeros.
    """
    c, positions = model.config, jnp.arange(tokens.shape[0])
    rope, x = model.rope(positions), model.embed(tokens, positions, previous(conditions))
    for i, layer in enumerate(model.layers):
        x = layer(x, rope, partial(dense_attention, c, i), c.rope_of(i))
    return model.finish(x)


def previous(x: jax.Array) -> jax.Array:
    """Each row `[T, …]` moved to the next position; zeros at position 0."""
    return jnp.concatenate([jnp.zeros_like(x[:1]), x[:-1]])
