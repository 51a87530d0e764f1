"""The engine's programs in the shapes of real models, compiled for a card without weights (`gpu_compiler`)."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from helpers.gpu_compiler import CARDS, Compiled, compile_for, devices
from jaxspec.draft.growth import Beam
from jaxspec.draft.round import MOVING as round_moving
from jaxspec.draft.round import make_round
from jaxspec.models.config import DecoderConfig
from jaxspec.models.decoder import Decoder
from jaxspec.models.drafter import DraftDecoder, feature_width
from jaxspec.models.load.parts import weight_shapes
from jaxspec.models.shards import split_axis
from jaxspec.sched.spec.trees.policy import DEPTH
from jaxspec.step.addresses import ProgramSpec
from jaxspec.step.ahead import NewTokens
from jaxspec.step.batch import BatchShape
from jaxspec.step.gpu import GpuLayers
from jaxspec.step.kv_cache import KVCache
from jaxspec.step.kv_int8 import AnyKVCache, Int8KVCache, most_written
from jaxspec.step.masks import MaskBuffers
from jaxspec.step.penalties import PenaltyTable
from jaxspec.step.rejection import DraftDistributions
from jaxspec.step.step import MOVING as step_moving
from jaxspec.step.step import make_step, split
from jaxspec.step.temporaries import Program
from jaxspec.step.tensor_parallel import SHARDED, TensorParallel

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
    features: bool = False, cards: int = 1,
) -> tuple[Compiled, BatchShape, AnyKVCache, int]:  # fmt: skip
    """The target's step of `tokens` tokens and up to 64 requests, split over `cards` cards, with the KV cache of all
    cards and the bound of the temporaries of one, in bytes."""
    split_over = _Cards(card, cards)
    layers = split_over.layers
    graph, treedef, leaves = split(split_over.decoder(c, dtype))
    cache = split_over.pool(c, dtype, int8, features)
    trees = min(tokens, SEQS)
    written = most_written(tokens, trees, PAGE) if int8 else 0
    shape = BatchShape(tokens, min(tokens, 512), trees, pages, written=written)
    others = split_over.copied(
        (
            jax.eval_shape(lambda: PenaltyTable.empty(SEQS, c.vocab_size)), jax.eval_shape(DraftDistributions.empty),
            jax.ShapeDtypeStruct((shape.size,), jnp.int32), MaskBuffers(c.vocab_size).shape(shape.rows),
            jax.eval_shape(lambda: NewTokens.none(SEQS)),
            jax.ShapeDtypeStruct((SEQS, DEPTH), jnp.int32),
        )
    )  # fmt: skip
    step = make_step(graph, treedef, shape, layers)
    spec = ProgramSpec.of(layers, step, (leaves, cache, *others), 2, donate=[1], moving=step_moving)
    program = compile_for(card, spec)
    return program, shape, cache, _sizes(split_over.local(c), dtype, card).step_bytes(shape)


class _Cards:
    """Models split over several cards of one machine, as shapes."""

    def __init__(self, card: str, count: int) -> None:
        self._parallel = None if count == 1 else TensorParallel(devices(card, count))
        self.layers = GpuLayers(parallel=self._parallel)

    def local(self, c: DecoderConfig) -> DecoderConfig:
        return c if self._parallel is None else self._parallel.shards(c).local

    def decoder(self, c: DecoderConfig, dtype: str) -> Decoder:
        if self._parallel is None:
            return nnx.eval_shape(lambda: self.layers.decoder(c, _zeros(weight_shapes(c), dtype), dtype))
        weights = self._weights(c, weight_shapes(replace(c, tie_embeddings=False)), dtype)
        return Decoder(self.local(c), weights, SHARDED)

    def drafter(self, c: DecoderConfig) -> DraftDecoder:
        shapes = weight_shapes(c) | {"head": (c.hidden_size, DRAFT_VOCAB)}
        shapes |= {"mix": (feature_width(c), c.hidden_size), "fuse": (2 * c.hidden_size, c.hidden_size)}
        vocab = jax.ShapeDtypeStruct((DRAFT_VOCAB,), jnp.int32)
        if self._parallel is not None:
            weights = self._weights(c, shapes, "bfloat16")
            return DraftDecoder(self.local(c), weights | {"vocab": self.copied(vocab)}, SHARDED)

        def build() -> DraftDecoder:
            weights = _zeros(shapes, "bfloat16")
            return self.layers.drafter(c, weights | {"vocab": jnp.zeros(DRAFT_VOCAB, jnp.int32)}, "bfloat16", {})

        return nnx.eval_shape(build)

    def _weights(self, c: DecoderConfig, shapes: dict[str, tuple[int, ...]], dtype: str) -> dict[str, Any]:
        parallel = self._parallel
        assert parallel is not None
        weights: dict[str, Any] = {}
        for name, shape in shapes.items():
            local, axis = list(parallel.shards(c).local_shape(name, shape)), split_axis(name)
            if axis is not None:
                local[axis] *= parallel.size
            weights[name] = jax.ShapeDtypeStruct(local, jnp.dtype(dtype), sharding=parallel.weight_sharding(name))
        return weights

    def pool(self, c: DecoderConfig, dtype: str, int8: bool = False, features: bool = False) -> Any:
        cache = kv_cache_of(self.layers.pooled(c), dtype, int8, features)
        if (parallel := self._parallel) is None:
            return cache
        return jax.tree.map(
            lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=parallel.pool_sharding(x.ndim)), cache
        )

    def copied(self, tree: Any) -> Any:
        if (parallel := self._parallel) is None:
            return tree
        return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=parallel.everywhere), tree)


def _sizes(c: DecoderConfig, dtype: str, card: str) -> Program:
    return Program(c, dtype, PAGE, kernel=True, cores=CARDS[card]["cores"])


def compile_round(
    card: str, target: DecoderConfig, requests: int, width: int = 4, depth: int = 8, cards: int = 1
) -> tuple[Compiled, BatchShape, int]:
    """A draft round of a one-layer drafter that reads the target's features (EAGLE), in bfloat16, split over `cards`
    cards, with the bound of one card's temporaries in bytes."""
    split_over, c = _Cards(card, cards), replace(target, num_layers=1, tie_embeddings=False)
    layers = split_over.layers
    graph, treedef, leaves = split(split_over.drafter(c))
    cache, shape = split_over.pool(c, "bfloat16"), BatchShape(4 * requests, requests, requests, 64)
    others = split_over.copied(
        (
            jax.eval_shape(DraftDistributions.empty), kv_cache_of(target, "bfloat16", features=True).features,
            jax.ShapeDtypeStruct((shape.size,), jnp.int32), jax.ShapeDtypeStruct((), jnp.int32),
            jax.eval_shape(lambda: NewTokens.none(SEQS)),
        )
    )  # fmt: skip
    one = make_round(graph, treedef, shape, layers, Beam(width), depth)
    spec = ProgramSpec.of(layers, one, (leaves, cache, *others), 3, donate=[1, 2], moving=round_moving)
    program = compile_for(card, spec)
    local = split_over.local(c)
    return program, shape, _sizes(local, "bfloat16", card).round_bytes(shape, DRAFT_VOCAB, width, depth)
