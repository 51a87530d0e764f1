"""Decoders: embedding, layers (`block.py`), final norm and head; their weights on the device; a plain forward pass."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from types import MappingProxyType

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from jaxspec.models.block import blocks
from jaxspec.models.config import DecoderConfig
from jaxspec.models.layers import XLA, Operations, dense_attention, softcap
from jaxspec.models.load.parts import EXPERTS, MATRICES, layer_shapes
from jaxspec.models.load.weights import Stored, stored_parts
from jaxspec.models.rotary import Rope, rope_tables


class Body(nnx.Module):
    """Embedding, layers, final norm and head.

    `weights`: from `device_weights`, or from `stacked_weights` with the operations that read their layout.
    """

    def __init__(self, config: DecoderConfig, weights: Mapping[str, jax.Array], ops: Operations = XLA):
        self.config, self.ops = config, ops
        self.embedding = nnx.Param(weights["embed"])
        self.positions = nnx.Param(weights["positions"]) if config.positions == "learned" else None
        self.layers = blocks(config, weights, ops)
        self.norm = nnx.Param(weights["norm"])
        self.norm_bias = nnx.Param(weights["norm_bias"]) if config.norm == "layer" else None
        self.head = nnx.Param(weights["head"])

    def embed_tokens(self, tokens: jax.Array, positions: jax.Array) -> jax.Array:
        """`tokens [T]`, `positions [T]` int32 -> `[T, hidden]`."""
        c = self.config
        x = self.ops.lookup(self.embedding[...], tokens, c.vocab_size, c.hidden_size)
        x = self.ops.gather(x, c.hidden_size)
        if c.embedding_scale != 1.0:
            x = x * jnp.asarray(c.embedding_scale, x.dtype)
        return x if self.positions is None else x + self.positions[...].at[positions].get(mode="clip")

    def rope(self, positions: jax.Array) -> Rope:
        """Rotary tables of `positions [T]`, see `rope_tables`; empty ones for a model without rotary embeddings."""
        if self.config.positions == "learned":
            return jnp.zeros((1, 0)), jnp.zeros((1, 0))
        return rope_tables(self.config, positions)

    def finish(self, x: jax.Array) -> jax.Array:
        """Final norm: `x [T, hidden]` of the last layer -> final hidden states `[T, hidden]`, the head's input."""
        bias = None if self.norm_bias is None else self.norm_bias[...]
        return self.ops.norm(x, self.norm[...], self.config.norm_eps, bias)

    def head_logits(self, final: jax.Array, width: int) -> jax.Array:
        """Final hidden states `[C, hidden]` -> logits `[C, width]` float32."""
        products = self.ops.gather(self.ops.product(final, self.head[...], width, None), width)
        return scaled_logits(self.config, products)


def scaled_logits(config: DecoderConfig, products: jax.Array) -> jax.Array:
    """Logits from the head's products `[…, width]`."""
    scaled = products if config.logit_scale == 1.0 else products * config.logit_scale
    return softcap(scaled, config.logit_softcap)


class Decoder(Body):
    """A language model: token embeddings, decoder layers and output head."""

    def embed(self, tokens: jax.Array, positions: jax.Array) -> jax.Array:
        """`tokens [T]`, `positions [T]` int32 -> `[T, hidden]`."""
        return self.embed_tokens(tokens, positions)

    def logits(self, final: jax.Array) -> jax.Array:
        """Final hidden states `[C, hidden]` -> logits `[C, vocab]` float32."""
        return self.head_logits(final, self.config.vocab_size)


#: (name, weight) -> the weight on its device or devices.
Put = Callable[[str, np.ndarray | jax.Array], jax.Array]


def device_weights(
    config: DecoderConfig, weights: Mapping[str, np.ndarray] | Mapping[str, jax.Array], dtype: str,
    shared: Mapping[str, jax.Array] = MappingProxyType({}), put: Put | None = None,
) -> dict[str, jax.Array]:  # fmt: skip
    """Put weights on the device as `dtype`, matrices `[in, out]`; a tied embedding is copied to the head.

    One weight at a time is read (`LazyWeights`), put on the device in its stored dtype and cast there, so the host
    holds one weight. Arrays that are already on the device stay there. `shared` are used as they are, instead of those
    in `weights`. `put` splits weights over several devices; None: one device.
    """

    def placed(name: str, weight: np.ndarray | jax.Array) -> jax.Array:
        return _put(weight, dtype) if put is None else jax.block_until_ready(put(name, weight).astype(dtype))

    out = {name: shared[name] if name in shared else placed(name, weights[name]) for name in weights}
    if config.tie_embeddings:
        out["head"] = out["embed"].T.copy() if put is None else placed("head", np.asarray(weights["embed"]).T)
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

    out = {"embed": packed(["embed"], (c.hidden_size, c.vocab_size))}
    out |= {name: _put(weights[name], "float32") for name in ("norm", "norm_bias", "positions") if name in weights}
    if c.tie_embeddings:
        out["head"] = out["embed"]
    else:
        out["head"] = packed(["head"], (c.hidden_size, weights["vocab"].size if "vocab" in weights else c.vocab_size))
    for part, shape in shapes.items():
        names = [f"layers.{i}.{part}" for i in range(c.num_layers)]
        if part in EXPERTS:
            out[f"layers.{part}"] = packed([f"{name}.{e}" for name in names for e in range(shape[0])], shape[1:])
        elif part in MATRICES:
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
    c, positions = model.config, jnp.arange(tokens.shape[0])
    rope, x = model.rope(positions), model.embed(tokens, positions)
    outputs = []
    for i, layer in enumerate(model.layers):
        x = layer(x, rope, partial(dense_attention, c, i), c.rope_of(i))
        outputs.append(x)
    return outputs
