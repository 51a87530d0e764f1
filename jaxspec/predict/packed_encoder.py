"""A BERT encoder on the CPU kernels: its matrices stay as they are stored and are widened while they are used."""

from __future__ import annotations

from collections.abc import Mapping

import jax
from flax import nnx

from jaxspec.kernels import cpu
from jaxspec.kernels.build import KernelsUnavailable
from jaxspec.kernels.packed import pack
from jaxspec.models.bert import BertEncoder
from jaxspec.models.load.stored import StoredMatrix


class PackedLinear(nnx.Module):
    """`nnx.Linear` with a matrix `[out, in]` in its stored form. Float32."""

    def __init__(self, matrix: StoredMatrix, bias: jax.Array):
        """`bias [out]`."""
        self.weight, self.bias = nnx.Param(jax.device_put(pack([[matrix]]))), nnx.Param(bias)

    def __call__(self, x: jax.Array) -> jax.Array:
        """`x [..., in]` -> `[..., out]`."""
        bias = self.bias[...]
        product = cpu.linear(x.reshape(-1, x.shape[-1]), self.weight[...], bias.size)
        return product.reshape(*x.shape[:-1], bias.size) + bias


class PackedEmbed(nnx.Module):
    """`nnx.Embed` with a matrix `[vocab, hidden]` in its stored form. Float32."""

    def __init__(self, matrix: StoredMatrix):
        self._shape, self.weight = matrix.shape, nnx.Param(jax.device_put(pack([[matrix]])))

    def __call__(self, ids: jax.Array) -> jax.Array:
        """`ids [...]` int32 -> `[..., hidden]`."""
        vocab, hidden = self._shape
        return cpu.lookup(self.weight[...], ids.reshape(-1), vocab, hidden).reshape(*ids.shape, hidden)


def available() -> bool:
    """Whether the CPU kernels can run encoders here."""
    if jax.default_backend() != "cpu":
        return False
    try:
        return bool(cpu.load())
    except KernelsUnavailable:
        return False


def use_packed(encoder: BertEncoder, matrices: Mapping[str, StoredMatrix]) -> None:
    """Replace the layers of `encoder` whose matrices are given by packed ones.

    `matrices`: by the dotted name of the weight, `[out, in]`, of the token embedding `[vocab, hidden]`. Others stay.
    """
    if (tokens := matrices.get("tokens.embedding")) is not None:
        encoder.tokens = PackedEmbed(tokens)
    for i, block in enumerate(encoder.layers):
        for name in ("qkv", "o", "up", "down"):
            if (matrix := matrices.get(f"layers.{i}.{name}.kernel")) is not None:
                setattr(block, name, PackedLinear(matrix, getattr(block, name).bias[...]))
