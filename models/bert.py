"""The BERT encoder (Devlin et al. 2019): learned positions, post-norm, bidirectional attention.

Weights are float32, matrices `[in, out]`, with fused q|k|v. There is no dropout and no pooler: length prediction reads
the first token (`BertEncoder.first`), retrieval the mean of all tokens (`mean_pool`).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import jax
import jax.numpy as jnp
from flax import nnx

#: `hidden_act` of config.json -> activation function.
ACTIVATIONS: dict[str, Callable[[jax.Array], jax.Array]] = {
    "gelu": partial(jax.nn.gelu, approximate=False),
    "gelu_new": partial(jax.nn.gelu, approximate=True),
    "gelu_pytorch_tanh": partial(jax.nn.gelu, approximate=True),
    "relu": jax.nn.relu,
}


#: A linear layer or an embedding: an `nnx.Linear` or `nnx.Embed`, or what replaces it after loading.
Layer = Callable[[jax.Array], jax.Array]


@dataclass(frozen=True, slots=True)
class BertConfig:
    """Sizes of an encoder. `eps`: of the layer norms; `activation`: a key of `ACTIVATIONS`."""

    vocab_size: int
    hidden: int
    layers: int
    heads: int
    intermediate: int
    max_positions: int = 512
    type_vocab: int = 2
    eps: float = 1e-12
    activation: str = "gelu"


class BertBlock(nnx.Module):
    """One layer: attention and feed-forward, each with residual and post-norm."""

    def __init__(self, config: BertConfig, rngs: nnx.Rngs):
        c = self.config = config
        linear = partial(nnx.Linear, kernel_init=nnx.initializers.normal(0.02), rngs=rngs)
        self.qkv: Layer = linear(c.hidden, 3 * c.hidden)
        self.o: Layer = linear(c.hidden, c.hidden)
        self.attn_norm = layer_norm(c, rngs)
        self.up: Layer = linear(c.hidden, c.intermediate)
        self.down: Layer = linear(c.intermediate, c.hidden)
        self.mlp_norm = layer_norm(c, rngs)

    def __call__(self, x: jax.Array, mask: jax.Array, queries: int | None = None) -> jax.Array:
        """`x [B, T, H]`, `mask [B, T]` bool -> `[B, T, H]`, or `[B, queries, H]` for the first `queries` positions."""
        c = self.config
        q, k, v = (part.reshape(*x.shape[:2], c.heads, -1) for part in jnp.split(self.qkv(x), 3, -1))
        attended = jax.nn.dot_product_attention(q[:, :queries], k, v, mask=mask[:, None, None, :])
        x = x[:, :queries]
        x = self.attn_norm(x + self.o(attended.reshape(x.shape)))
        return self.mlp_norm(x + self.down(ACTIVATIONS[c.activation](self.up(x))))


class BertEncoder(nnx.Module):
    """Embeddings and layers. Initialised like BERT (normal, 0.02)."""

    def __init__(self, config: BertConfig, rngs: nnx.Rngs):
        c = self.config = config
        embed = partial(nnx.Embed, features=c.hidden, embedding_init=nnx.initializers.normal(0.02), rngs=rngs)
        self.tokens: Layer = embed(c.vocab_size)
        self.positions = embed(c.max_positions)
        self.types = embed(c.type_vocab)
        self.norm = layer_norm(c, rngs)
        self.layers = nnx.List(BertBlock(c, rngs) for _ in range(c.layers))

    def __call__(self, ids: jax.Array, mask: jax.Array) -> jax.Array:
        """`ids [B, T]` int32, `mask [B, T]` bool (True for tokens) -> `[B, T, H]` float32.

        All tokens have type 0. Outputs at masked positions are undefined.
        """
        x = self.embed(ids)
        for layer in self.layers:
            x = layer(x, mask)
        return x

    def first(self, ids: jax.Array, mask: jax.Array) -> jax.Array:
        """Hidden state of the first token `[B, H]`; the last layer skips the other tokens."""
        x = self.embed(ids)
        for i, layer in enumerate(self.layers):
            x = layer(x, mask, 1 if i == len(self.layers) - 1 else None)
        return x[:, 0]

    def embed(self, ids: jax.Array) -> jax.Array:
        """`ids [B, T]` -> embeddings `[B, T, H]`, the input of the first layer."""
        positions = self.positions.embedding[...][: ids.shape[1]]
        return self.norm(self.tokens(ids) + positions + self.types.embedding[...][0])


def layer_norm(config: BertConfig, rngs: nnx.Rngs) -> nnx.LayerNorm:
    return nnx.LayerNorm(config.hidden, epsilon=config.eps, use_fast_variance=False, rngs=rngs)


def mean_pool(hidden: jax.Array, mask: jax.Array) -> jax.Array:
    """`hidden [B, T, H]`, `mask [B, T]` -> sentence embeddings `[B, H]`: mean over tokens, normalised to length 1."""
    weight = mask[..., None].astype(hidden.dtype)
    mean = jnp.sum(hidden * weight, 1) / jnp.maximum(jnp.sum(weight, 1), 1)
    return mean / jnp.maximum(jnp.linalg.norm(mean, axis=-1, keepdims=True), 1e-12)
