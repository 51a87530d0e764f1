"""The LLaMA-family decoder: Llama, Mistral, Qwen2, Qwen3 and SmolLM2.

The caller supplies attention: every layer passes its queries, new keys and new values to an `attend` function. So the
same module serves the packed token-tree step and a plain forward pass.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from types import MappingProxyType

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from jaxspec.models.config import DecoderConfig
from jaxspec.models.layers import (
    XLA,
    Operations,
    dense_attention,
    inverse_frequencies,
    rope_tables,
    rotate,
)
from jaxspec.models.load.weights import MATRICES, Stored, layer_shapes, stored_parts

#: (query [T, heads, head_dim], key [T, kv_heads, head_dim], value) -> [T, heads, head_dim]
Attend = Callable[[jax.Array, jax.Array, jax.Array], jax.Array]
Rope = tuple[jax.Array, jax.Array]


class Block(nnx.Module):
    """One layer, or all layers stacked: then weights have a leading layer axis, and calls pass a layer index.

    Projections are fused (q|k|v and gate|up) for fewer and larger matrix products.
    """

    def __init__(self, config: DecoderConfig, weights: Mapping[str, jax.Array], ops: Operations):
        self.config, self.ops = config, ops
        self.attn_norm = nnx.Param(weights["attn_norm"])
        self.qkv = nnx.Param(weights["qkv"])
        self.qkv_bias = nnx.Param(weights["qkv_bias"]) if config.qkv_bias else None
        self.q_norm = nnx.Param(weights["q_norm"]) if config.qk_norm else None
        self.k_norm = nnx.Param(weights["k_norm"]) if config.qk_norm else None
        self.o = nnx.Param(weights["o"])
        self.mlp_norm = nnx.Param(weights["mlp_norm"])
        self.gate_up = nnx.Param(weights["gate_up"])
        self.down = nnx.Param(weights["down"])

    def __call__(self, x: jax.Array, rope: Rope, attend: Attend, layer: jax.Array | None = None) -> jax.Array:
        """`x [T, hidden]` -> `[T, hidden]`. `layer`: index (`[]` int32) if the weights are stacked."""
        c, ops = self.config, self.ops

        def vector(p: nnx.Param) -> jax.Array:
            return p[...] if layer is None else p[...][layer]

        def product(x: jax.Array, p: nnx.Param, width: int) -> jax.Array:
            return ops.product(x, p[...], width, layer).astype(x.dtype)

        h = product(ops.norm(x, vector(self.attn_norm), c.norm_eps), self.qkv, c.q_size + 2 * c.kv_size)
        if self.qkv_bias is not None:
            h = h + vector(self.qkv_bias)
        q, k, v = jnp.split(h, [c.q_size, c.q_size + c.kv_size], axis=-1)
        q = q.reshape(-1, c.num_heads, c.head_dim)
        k = k.reshape(-1, c.num_kv_heads, c.head_dim)
        v = v.reshape(-1, c.num_kv_heads, c.head_dim)
        if self.q_norm is not None and self.k_norm is not None:
            q, k = ops.norm(q, vector(self.q_norm), c.norm_eps), ops.norm(k, vector(self.k_norm), c.norm_eps)
        attended = attend(rotate(q, rope), rotate(k, rope), v)
        x = x + product(attended.reshape(-1, c.q_size), self.o, c.hidden_size)
        h = product(ops.norm(x, vector(self.mlp_norm), c.norm_eps), self.gate_up, 2 * c.intermediate_size)
        gate, up = jnp.split(h, 2, axis=-1)
        return x + product(jax.nn.silu(gate) * up, self.down, c.hidden_size)


def blocks(config: DecoderConfig, weights: Mapping[str, jax.Array], ops: Operations) -> nnx.List[Block]:
    """One Block per layer from `device_weights`, one Block for all layers from `stacked_weights`."""
    prefixes = ["layers."] if "layers.qkv" in weights else [f"layers.{i}." for i in range(config.num_layers)]
    return nnx.List(
        Block(config, {k.removeprefix(p): w for k, w in weights.items() if k.startswith(p)}, ops) for p in prefixes
    )


class Decoder(nnx.Module):
    """Embedding, layers, final norm and head.

    `weights`: from `device_weights`, or from `stacked_weights` with the operations that read their layout.
    """

    def __init__(
        self,
        config: DecoderConfig,
        weights: Mapping[str, jax.Array],
        ops: Operations = XLA,
    ):
        self.config, self.ops = config, ops
        self.embedding = nnx.Param(weights["embed"])
        self.layers = blocks(config, weights, ops)
        self.norm = nnx.Param(weights["norm"])
        self.head = nnx.Param(weights["head"])

    def embed(self, tokens: jax.Array) -> jax.Array:
        """`tokens [T]` int32 -> `[T, hidden]`."""
        return self.ops.lookup(self.embedding[...], tokens, self.config.vocab_size, self.config.hidden_size)

    def rope(self, positions: jax.Array) -> Rope:
        """Rotary tables of `positions [T]`, see `rope_tables`."""
        return rope_tables(positions, inverse_frequencies(self.config))

    def finish(self, x: jax.Array) -> jax.Array:
        """Final norm: `x [T, hidden]` of the last layer -> final hidden states `[T, hidden]`, the head's input."""
        return self.ops.norm(x, self.norm[...], self.config.norm_eps)

    def logits(self, final: jax.Array) -> jax.Array:
        """Final hidden states `[C, hidden]` -> logits `[C, vocab]` float32."""
        return self.ops.product(final, self.head[...], self.config.vocab_size, None)


def window_of(config: DecoderConfig, layer: int) -> int | None:
    """Sliding window of a layer in positions, or None."""
    windowed = not config.windowed_layers or layer in config.windowed_layers
    return config.sliding_window if windowed else None


def device_weights(
    config: DecoderConfig, weights: Mapping[str, np.ndarray] | Mapping[str, jax.Array], dtype: str,
    shared: Mapping[str, jax.Array] = MappingProxyType({}),
) -> dict[str, jax.Array]:  # fmt: skip
    """Put weights on the device as `dtype`, matrices `[in, out]`; a tied embedding is copied to the head.

    One weight at a time is read (`LazyWeights`), put on the device in its stored dtype and cast there, so the host
    holds one weight. Arrays that are already on the device stay there. `shared` are used as they are, instead of those
    in `weights`.
    """
    out = {name: shared[name] if name in shared else _put(weights[name], dtype) for name in weights}
    if config.tie_embeddings:
        out["head"] = out["embed"].T.copy()
    return out


def _put(weight: np.ndarray | jax.Array, dtype: str) -> jax.Array:
    """The weight on the device. Waits for the copy: the host's memory is then free for the next."""
    return jax.block_until_ready(jax.device_put(weight).astype(dtype))


def head_of(config: DecoderConfig, weights: Mapping[str, np.ndarray]) -> np.ndarray:
    """The head `[hidden, vocab]`: the transposed embedding if they are tied."""
    return weights["embed"].T if config.tie_embeddings else weights["head"]


def stacked_weights(
    config: DecoderConfig, weights: Mapping[str, np.ndarray], pack: Callable[[Sequence[Stored]], np.ndarray],
    shared: Mapping[str, jax.Array] = MappingProxyType({}),
) -> dict[str, jax.Array]:  # fmt: skip
    """Put weights on the device, stacked over layers as `layers.<part>`: vectors as float32, matrices as packed by
    `pack` from their parts in each layer, as they are stored. The embedding is packed like a head `[hidden, vocab]`;
    if they are tied, they are one array. A matrix is read (`LazyWeights`) when `pack` takes it. `shared`: embedding and
    head that are already packed.
    """
    c, shapes = config, layer_shapes(config)

    def packed(names: Sequence[str], size: Sequence[int]) -> jax.Array:
        if names[0] in shared:
            return shared[names[0]]
        return jax.device_put(pack([stored_parts(weights, name, (size[1], size[0])) for name in names]))

    out = {"embed": packed(["embed"], (c.hidden_size, c.vocab_size)), "norm": _put(weights["norm"], "float32")}
    if c.tie_embeddings:
        out["head"] = out["embed"]
    else:
        out["head"] = packed(["head"], (c.hidden_size, weights["vocab"].size if "vocab" in weights else c.vocab_size))
    for part, shape in shapes.items():
        names = [f"layers.{i}.{part}" for i in range(c.num_layers)]
        if part in MATRICES:
            out[f"layers.{part}"] = packed(names, shape)
        else:
            out[f"layers.{part}"] = jax.device_put(np.stack([np.asarray(weights[n], np.float32) for n in names]))
    return out


def forward(model: Decoder, tokens: jax.Array) -> jax.Array:
    """Logits `[T, vocab]` of one sequence `tokens [T]` without a KV cache: the reference for the step."""
    return model.logits(forward_features(model, tokens))


def forward_features(model: Decoder, tokens: jax.Array) -> jax.Array:
    """Final hidden states `[T, hidden]` (input of the head) of one sequence `tokens [T]`, without a KV cache."""
    return model.finish(run_layers(model, tokens)[-1])


def run_layers(model: Decoder, tokens: jax.Array) -> list[jax.Array]:
    """The output `[T, hidden]` of each layer for one sequence `tokens [T]`, without a KV cache."""
    rope, x = model.rope(jnp.arange(tokens.shape[0])), model.embed(tokens)
    outputs = []
    for i, layer in enumerate(model.layers):
        x = layer(x, rope, partial(dense_attention, window=window_of(model.config, i)))
        outputs.append(x)
    return outputs
