"""One layer of a decoder, made of the parts that its configuration names.

The caller supplies attention: every layer passes its queries, new keys and new values to an `attend` function. So the
same module serves the packed token-tree step and a plain forward pass.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial

import jax
import jax.numpy as jnp
from flax import nnx

from jaxspec.models.config import DecoderConfig
from jaxspec.models.experts import mixture
from jaxspec.models.layers import ACTIVATIONS, Operations
from jaxspec.models.load.parts import layer_shapes
from jaxspec.models.rotary import Rope, rope_of, rotate

#: (query [T, heads, head_dim], key [T, kv_heads, head_dim], value) -> [T, heads, head_dim]. Scores are multiplied by
#: head_dim ** -0.5.
Attend = Callable[[jax.Array, jax.Array, jax.Array], jax.Array]


class Block(nnx.Module):
    """One layer, or all layers stacked: then weights have a leading layer axis, and calls pass a layer index.

    Its parameters are those of `parts.layer_shapes`. Projections are fused (q|k|v and gate|up) for fewer and larger
    matrix products.
    """

    def __init__(self, config: DecoderConfig, weights: Mapping[str, jax.Array], ops: Operations):
        self.config, self.ops = config, ops
        for name in layer_shapes(config):
            setattr(self, name, nnx.Param(weights[name]))

    def __call__(
        self, x: jax.Array, rope: Rope, attend: Attend, kind: jax.Array | int = 0, layer: jax.Array | None = None
    ) -> jax.Array:
        """`x [T, hidden]` -> `[T, hidden]`. `rope`: from `rope_tables`; `kind`: of the layer, `DecoderConfig.rope_of`;
        `layer`: index (`[]` int32) if the weights are stacked."""
        c = self.config
        attended = self._norm(self._attention(x, rope, attend, kind, layer), "post_attn_norm", layer)
        if c.parallel_residual:
            return x + _scaled(attended + self._mlp(x, layer), c.residual_scale)
        x = x + _scaled(attended, c.residual_scale)
        return x + _scaled(self._norm(self._mlp(x, layer), "post_mlp_norm", layer), c.residual_scale)

    def _attention(
        self, x: jax.Array, rope: Rope, attend: Attend, kind: jax.Array | int, layer: jax.Array | None
    ) -> jax.Array:
        c = self.config
        h = self._product(self._norm(x, "attn_norm", layer), "qkv", c.q_size + 2 * c.kv_size, layer)
        q, k, v = jnp.split(h, [c.q_size, c.q_size + c.kv_size], axis=-1)
        if c.qk_norm == "all":
            q, k = self._norm(q, "q_norm", layer), self._norm(k, "k_norm", layer)
        q = q.reshape(-1, c.num_heads, c.head_dim)
        k = k.reshape(-1, c.num_kv_heads, c.head_dim)
        v = v.reshape(-1, c.num_kv_heads, c.head_dim)
        if c.qk_norm == "head":
            q, k = self._norm(q, "q_norm", layer), self._norm(k, "k_norm", layer)
        if c.positions == "rotary":
            tables = rope_of(rope, kind)
            q, k = rotate(q, tables), rotate(k, tables)
        if c.attention_scale is not None:
            q = _scaled(q, c.attention_scale * c.head_dim**0.5)
        return self._summed(attend(q, k, v).reshape(-1, c.q_size), "o", layer)

    def _mlp(self, x: jax.Array, layer: jax.Array | None) -> jax.Array:
        c, act = self.config, ACTIVATIONS[self.config.activation]
        x = self._norm(x, "mlp_norm", layer)
        if c.experts is not None:
            logits = self._product(x, "router", c.experts.count, layer)
            total = mixture(c.experts, act, x, logits, partial(self._grouped, layer=layer))
            if shared := c.experts.shared_width:
                total = total + self._shared_expert(x, shared, layer)
            return self.ops.total(total)
        h = self._product(x, "gate_up", (1 + c.gated) * c.intermediate_size, layer)
        if c.gated:
            gate, up = jnp.split(h, 2, axis=-1)
            return self._summed(act(gate) * up, "down", layer)
        return self._summed(act(h), "down", layer)

    def _shared_expert(self, x: jax.Array, width: int, layer: jax.Array | None) -> jax.Array:
        """The output of the expert that all tokens use, each with a weight of its own (Qwen2-MoE)."""
        act = ACTIVATIONS[self.config.activation]
        gate, up = jnp.split(self._product(x, "shared_gate_up", 2 * width, layer), 2, axis=-1)
        out = self._product(act(gate) * up, "shared_down", self.config.hidden_size, layer)
        return jax.nn.sigmoid(self._product(x, "shared_router", 1, layer)) * out

    def _vector(self, name: str, layer: jax.Array | None) -> jax.Array | None:
        """A vector of the layer; None if the configuration has none of this name."""
        if (param := getattr(self, name, None)) is None:
            return None
        return param[...] if layer is None else param[...][layer]

    def _norm(self, x: jax.Array, name: str, layer: jax.Array | None) -> jax.Array:
        """`x` normalised over its last axis; `x` itself if the configuration has no norm of this name."""
        if (weight := self._vector(name, layer)) is None:
            return x
        return self.ops.norm(x, weight, self.config.norm_eps, self._vector(f"{name}_bias", layer))

    def _product(self, x: jax.Array, name: str, width: int, layer: jax.Array | None) -> jax.Array:
        """`x [T, in]` times a matrix, plus its bias -> `[T, width]`."""
        return self._biased(self.ops.product(x, getattr(self, name)[...], width, layer).astype(x.dtype), name, layer)

    def _summed(self, x: jax.Array, name: str, layer: jax.Array | None) -> jax.Array:
        """`x [T, in]` times a matrix `[in, hidden]` with rows split over devices, plus its bias -> `[T, hidden]`."""
        y = self.ops.product(x, getattr(self, name)[...], self.config.hidden_size, layer).astype(x.dtype)
        return self._biased(self.ops.total(y), name, layer)

    def _biased(self, y: jax.Array, name: str, layer: jax.Array | None) -> jax.Array:
        bias = self._vector(f"{name}_bias", layer)
        return y if bias is None else y + bias

    def _grouped(self, x: jax.Array, name: str, width: int, counts: jax.Array, layer: jax.Array | None) -> jax.Array:
        """Rows `[N, in]`, grouped by expert with `counts [experts]` rows each, times their experts' matrices."""
        return self.ops.grouped(x, getattr(self, name)[...], width, layer, counts).astype(x.dtype)


def _scaled(x: jax.Array, by: float) -> jax.Array:
    return x if by == 1.0 else x * jnp.asarray(by, x.dtype)


def blocks(config: DecoderConfig, weights: Mapping[str, jax.Array], ops: Operations) -> nnx.List[Block]:
    """One Block per layer from `device_weights`, one Block for all layers from `stacked_weights`."""
    prefixes = ["layers."] if "layers.qkv" in weights else [f"layers.{i}." for i in range(config.num_layers)]
    return nnx.List(
        Block(config, {k.removeprefix(p): w for k, w in weights.items() if k.startswith(p)}, ops) for p in prefixes
    )
