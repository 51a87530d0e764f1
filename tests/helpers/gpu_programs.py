"""The engine's programs in the shapes of real models, compiled for a card without weights (`gpu_compiler`)."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from helpers.gpu_compiler import CARDS, Compiled, compile_for
from jaxspec.draft.growth import Beam
from jaxspec.draft.round import make_round
from jaxspec.models.config import DecoderConfig
from jaxspec.models.drafter import DraftDecoder, feature_width
from jaxspec.models.load.parts import weight_shapes
from jaxspec.step.batch import BatchShape
from jaxspec.step.gpu import GpuLayers
from jaxspec.step.kv_cache import KVCache
from jaxspec.step.kv_int8 import AnyKVCache, Int8KVCache, most_written
from jaxspec.step.masks import MaskBuffers
from jaxspec.step.penalties import PenaltyTable
from jaxspec.step.rejection import DraftDistributions
from jaxspec.step.step import make_step, split
from jaxspec.step.temporaries import Program

PAGE, PAGES, SEQS = 32, 4096, 64
#: Tokens that the drafter `smollm2-eagle` can propose.
DRAFT_VOCAB = 8192


def _zeros(shapes: dict[str, tuple[int, ...]], dtype: str) -> Any:
    return {name: jnp.zeros(shape, dtype) for name, shape in shapes.items()}


def kv_cache_of(c: DecoderConfig, dtype: str, int8: bool = False, features: bool = False) -> AnyKVCache:
    """Shapes of the KV cache, without memory."""
    if int8:
        return jax.eval_shape(lambda: Int8KVCache.zeros(c, PAGES, PAGE, dtype, features, SEQS))
    return jax.eval_shape(lambda: KVCache.zeros(c, PAGES, PAGE, dtype, features))


def compile_step(
    card: str, c: DecoderConfig, tokens: int, dtype: str = "bfloat16", pages: int = 64, int8: bool = False,
    features: bool = False,
) -> tuple[Compiled, BatchShape, AnyKVCache, int]:  # fmt: skip
    """The target's step of `tokens` tokens and up to 64 requests, with the bound of its temporaries in bytes."""
    layers = GpuLayers()
    model = nnx.eval_shape(lambda: layers.decoder(c, _zeros(weight_shapes(c), dtype), dtype))
    graph, treedef, leaves = split(model)
    cache = kv_cache_of(c, dtype, int8, features)
    trees = min(tokens, SEQS)
    written = most_written(tokens, trees, PAGE) if int8 else 0
    shape = BatchShape(tokens, min(tokens, 512), trees, pages, written=written)
    program = compile_for(
        card, make_step(graph, treedef, shape, layers), leaves, cache,
        jax.eval_shape(lambda: PenaltyTable.empty(SEQS, c.vocab_size)), jax.eval_shape(DraftDistributions.empty),
        jax.ShapeDtypeStruct((shape.size,), jnp.int32), MaskBuffers(c.vocab_size).shape(shape.rows), donate=1,
    )  # fmt: skip
    return program, shape, cache, _sizes(c, dtype, card).step_bytes(shape)


def _sizes(c: DecoderConfig, dtype: str, card: str) -> Program:
    return Program(c, dtype, PAGE, kernel=True, cores=CARDS[card]["cores"])


def compile_round(
    card: str, target: DecoderConfig, requests: int, width: int = 4, depth: int = 8
) -> tuple[Compiled, BatchShape, int]:
    """A draft round of a one-layer drafter that reads the target's features (EAGLE), in bfloat16, with the bound of its
    temporaries in bytes."""
    layers, c = GpuLayers(), replace(target, num_layers=1, tie_embeddings=False)
    shapes = weight_shapes(c) | {"head": (c.hidden_size, DRAFT_VOCAB)}
    shapes |= {"mix": (feature_width(c), c.hidden_size), "fuse": (2 * c.hidden_size, c.hidden_size)}

    def build() -> DraftDecoder:
        weights = _zeros(shapes, "bfloat16")
        weights["vocab"] = jnp.zeros(DRAFT_VOCAB, jnp.int32)
        return layers.drafter(c, weights, "bfloat16", {})

    graph, treedef, leaves = split(nnx.eval_shape(build))
    shape = BatchShape(4 * requests, requests, requests, 64)
    features = kv_cache_of(target, "bfloat16", features=True).features
    program = compile_for(
        card, make_round(graph, treedef, shape, layers, Beam(width), depth), leaves, kv_cache_of(c, "bfloat16"),
        jax.eval_shape(DraftDistributions.empty), features, jax.ShapeDtypeStruct((shape.size,), jnp.int32),
        jax.ShapeDtypeStruct((), jnp.int32), donate=(1, 2),
    )  # fmt: skip
    return program, shape, _sizes(c, "bfloat16", card).round_bytes(shape, DRAFT_VOCAB, width, depth)
