"""The INT8 pool: every page is within half a step of what was computed, however it filled up."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from helpers import tiny
from helpers.generation import GREEDY, check_clean, tokens_of
from jaxspec import SamplingParams
from jaxspec.kernels import cpu
from jaxspec.step.attention import attend
from jaxspec.step.batch import Batch, BatchBuffers, BatchShape
from jaxspec.step.kv_cache import page_bytes
from jaxspec.step.kv_int8 import Int8KVCache, OpenPages, most_written
from jaxspec.step.native import NativeLayers
from jaxspec.step.packing import SamplingInputs, Tree, pack
from jaxspec.step.tree import ancestors
from jaxspec.step.xla import XlaLayers

PAGE, PAGES, SLOTS = 16, 24, 3
CONFIG = tiny.config()
SHAPE = BatchShape(48, 48, SLOTS, 8, written=most_written(48, SLOTS, PAGE))
BUFFERS = BatchBuffers([SHAPE])
LAYERS = {"xla": XlaLayers(), "native": NativeLayers()}
KV = tuple[np.ndarray, np.ndarray]


@lru_cache
def commit(kind: str) -> Any:
    layers = LAYERS[kind]
    cpu.load()

    def step(kv_cache: Int8KVCache, buffer: jax.Array, new: KV, accepted: jax.Array) -> Int8KVCache:
        return layers.commit(kv_cache, new, Batch.unpack(buffer, SHAPE), accepted, accepted)

    return jax.jit(chex.assert_max_traces(step, n=len(LAYERS)), donate_argnums=0)  # chex counts both kinds as one


@lru_cache
def attention(kind: str) -> Any:
    """`[T, heads, dim]` of layer 1."""

    def run(kv_cache: Int8KVCache, buffer: jax.Array, q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
        batch, layer = Batch.unpack(buffer, SHAPE), jnp.int32(1)
        if kind == "xla":
            return attend(q, k, v, kv_cache, layer, batch, ancestors(batch.subtree))
        return cpu.attention(
            q, k, v, kv_cache.keys, kv_cache.values, layer, jnp.int32(0), batch.position, batch.subtree, batch.first,
            batch.nodes, batch.committed, batch.table, kv_cache.channels,
        )[0]  # fmt: skip

    return jax.jit(run)


@jax.jit
@chex.assert_max_traces(n=1)
def read(kv_cache: Int8KVCache, layer: jax.Array, pages: jax.Array) -> tuple[Any, Any]:
    """Keys and values of these pages, and the steps of both."""
    return kv_cache.read(layer, pages), (kv_cache.key_scale[layer, pages], kv_cache.value_scale[layer, pages])


class Requests:
    """Texts that grow step by step over a pool of their own, with the exact KV next to it."""

    def __init__(self, seed: int, slots: int, kind: str):
        self.kind = kind
        self.rng = np.random.default_rng(seed)
        self.kv_cache = Int8KVCache.zeros(CONFIG, PAGES, PAGE, "float32", False, SLOTS)
        garbage = lambda x: jnp.full_like(x, jnp.nan) if jnp.issubdtype(x.dtype, jnp.floating) else x  # noqa: E731
        self.kv_cache = jax.tree.map(garbage, self.kv_cache)
        self.opened = OpenPages(slots)
        self.free = [int(p) for p in self.rng.permutation(PAGES)]
        self.pages: dict[int, list[int]] = {}
        self.exact: dict[int, KV] = {}

    def step(self, work: dict[int, tuple[int, int]]) -> None:
        """`work`: request -> (nodes, how many of them are accepted), at most three of them."""
        trees = []
        for key, (nodes, _) in work.items():
            empty = np.zeros((CONFIG.num_layers, 0, CONFIG.num_kv_heads, CONFIG.head_dim), np.float32)
            held = self.exact.setdefault(key, (empty, empty))[0].shape[1]
            pages = self.pages.setdefault(key, [])
            while len(pages) * PAGE < held + nodes:
                pages.append(self.free.pop())
            trees.append(Tree.chain([0] * nodes, held, np.asarray(pages, np.int32), SamplingInputs()))
        packed = pack(trees, [SHAPE], BUFFERS, PAGE, self.opened)
        shape = (CONFIG.num_layers, SHAPE.tokens, CONFIG.num_kv_heads, CONFIG.head_dim)
        size = 10.0 ** self.rng.uniform(-2, 2, shape[2:])
        new = tuple((self.rng.normal(size=shape) * size).astype(np.float32) for _ in range(2))
        accepted = np.zeros(SHAPE.tokens, bool)
        for (key, (_, taken)), first in zip(work.items(), packed.nodes, strict=True):
            accepted[first : first + taken] = True
            keys, values = (
                np.concatenate([old, x[:, first : first + taken]], 1)
                for old, x in zip(self.exact[key], new, strict=True)
            )
            self.exact[key] = keys, values
        self.kv_cache = commit(self.kind)(self.kv_cache, packed.buffer, new, accepted)

    def end(self, key: int) -> None:
        self.free += self.pages.pop(key)
        del self.exact[key]

    def check(self, roundings: int = 1) -> None:
        for key, pages in self.pages.items():
            for layer in range(CONFIG.num_layers):
                filled = np.resize(pages, SHAPE.pages)  # one shape, however many there are
                (keys, values), scales = jax.tree.map(np.asarray, read(self.kv_cache, np.int32(layer), filled))
                # [B, K, D, P] and [B, K, P, D] -> [positions, K, D]
                found = keys.transpose(0, 3, 1, 2), values.transpose(0, 2, 1, 3)
                for x, exact, scale in zip(found, self.exact[key], scales, strict=True):
                    exact = exact[layer]
                    x = x.reshape(-1, *x.shape[2:])[: len(exact)]
                    steps = np.repeat(np.asarray(scale, np.float32), PAGE, 0)[: len(exact)]
                    assert (np.abs(x - exact) <= roundings * steps / 2 * (1 + 1e-4) + 1e-6 * np.abs(exact)).all()
                    for page in range(-(-len(exact) // PAGE)):  # no step is larger than the page's own range asks for
                        part = exact[page * PAGE : (page + 1) * PAGE]
                        most = np.maximum(np.ptp(part, 0) / 255, np.abs(part).max(0) / 32000)
                        assert (steps[page * PAGE] <= 1.03 * roundings * most + 1e-20).all()


@settings(deadline=None, max_examples=40)
@given(data=st.data())
@pytest.mark.parametrize("kind", ["xla", "native"])
@pytest.mark.parametrize("slots", [SLOTS, 1])
def test_pages_fill_up_within_half_a_step(kind: str, slots: int, data: Any) -> None:
    """Chunks, single tokens and drafts of which some are refused; requests end and others take their pages. With one
    open page for all, each is read again from the pool at every turn, and rounded again when its range has grown."""
    requests = Requests(data.draw(st.integers(0, 2**32)), slots, kind)
    for turn in range(data.draw(st.integers(1, 8))):
        keys = data.draw(st.permutations(range(4)))[: data.draw(st.integers(1, slots))]
        work = {}
        for key in keys:
            nodes = data.draw(st.sampled_from([1, 1, 1, 2, 5, 16]))
            work[key] = nodes, data.draw(st.integers(1, nodes))
            if len(requests.pages.get(key, ())) * PAGE > 80:
                requests.end(key)
        requests.step(work)
        if slots == SLOTS and len(requests.pages) <= slots:
            requests.check()
        else:
            requests.check(1 + turn)


def test_both_ways_to_attend_to_it_agree() -> None:
    requests = Requests(5, SLOTS, "native")
    for _ in range(3):
        requests.step({key: (14, 14) for key in range(3)})
    trees = [Tree.chain([0] * 4, 42, np.asarray(requests.pages[key], np.int32), SamplingInputs()) for key in range(2)]
    packed = pack(trees, [SHAPE], BUFFERS, PAGE, requests.opened)
    sizes = ((CONFIG.num_heads, CONFIG.head_dim), *((CONFIG.num_kv_heads, CONFIG.head_dim),) * 2)
    qkv = [requests.rng.normal(size=(SHAPE.tokens, *size)).astype(np.float32) for size in sizes]
    out = [np.asarray(attention(kind)(requests.kv_cache, packed.buffer, *qkv))[:8] for kind in ("xla", "native")]
    chex.assert_tree_all_finite(out)  # what was not written is NaN
    chex.assert_trees_all_close(out[0], out[1], rtol=1e-4, atol=1e-4)


def test_bytes_of_a_token() -> None:
    for size in (32, 64, 128):
        assert page_bytes(CONFIG, size, "float32") >= 3.5 * page_bytes(CONFIG, size, "int8")
    kv_cache = Int8KVCache.zeros(CONFIG, PAGES, 32, "float32", False, 0)
    assert sum(x.nbytes for x in kv_cache) == PAGES * page_bytes(CONFIG, 32, "int8")


def test_the_books_of_open_pages() -> None:
    books = OpenPages(2)
    slots, again = books.assign([([5, 6], False, None), ([7], False, None)])
    assert len(set(slots.tolist())) == 2 and not again.any()
    next_slots, again = books.assign([([7], True, None), ([6], True, 5)])  # the second went on to its next page
    assert next_slots.tolist() == slots[::-1].tolist() and not again.any()
    assert books.assign([([9], False, None)])[0] == slots[1]  # of the one that was used first
    assert books.assign([([7], True, None)])[1].all()
    books.forget([7])
    assert books.assign([([7], True, None)])[1].all() and not books.assign([([7], True, None)])[1].any()


@pytest.mark.parametrize("kind", ["xla", "native"])
def test_a_new_page_takes_the_open_page_of_the_full_one(kind: str) -> None:
    """Request 0 fills a page and begins the next: it must not take the open page of request 1, whose page would be
    rounded a second time."""
    requests = Requests(0, SLOTS, kind)
    for step in ({0: (1, 1)}, {0: (1, 1), 1: (1, 1)}, {0: (16, 9)}, {2: (1, 1), 0: (5, 5)}, {0: (1, 1)}, {1: (1, 1)}):
        requests.step(step)
        requests.check()


@pytest.mark.slow
@pytest.mark.parametrize("kernels", ["xla", "native"])
def test_the_engine_on_int8(kernels: str) -> None:
    common: dict[str, Any] = dict(
        page_size=16, max_num_seqs=4, token_buckets=[4, 16], max_num_batched_tokens=16, max_model_len=96,
        compilation_cache_dir="", kv_cache_tokens=160,
    )  # fmt: skip
    texts = [list(range(i, i + 20)) for i in range(0, 80, 10)]
    scored = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=1)
    with tiny.llm(draft=[], **common) as exact:
        expected = exact.generate(texts, scored)
    with tiny.llm(
        draft=["ngram"], kernels=kernels, kv_cache_dtype="int8", memory="swap", order="las",
        las={"quantum_ms": 1}, **common,
    ) as llm:  # fmt: skip
        for out, exact_out in zip(llm.generate(texts, scored), expected, strict=True):
            assert out.metrics.kv_quantized and not exact_out.metrics.kv_quantized
            pairs = zip(out.prompt_logprobs or [], exact_out.prompt_logprobs or [], strict=True)
            off = [abs(a.logprob - b.logprob) for a, b in pairs if a and b]
            assert len(off) == 19 and 0 < np.mean(off) < 0.2
        outputs = llm.generate(texts, GREEDY)
        assert all(len(tokens_of(o)) == 12 for o in outputs)
        stats = llm.engine.stats()
        assert stats.pages_swapped_in > 0 and stats.compilations_after_warmup == 0
        check_clean(llm)
