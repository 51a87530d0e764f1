"""The host pool: what is offloaded comes back as it was, whatever happens to the pages in between."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import SingleDeviceSharding

from helpers import tiny
from jaxspec.config import EngineConfig
from jaxspec.sched import Plan, Request, ScheduledRequest, Transfer
from jaxspec.step.kv_cache import KVCache
from jaxspec.step.kv_host import GROUPS, HostKVCache
from jaxspec.step.packing import SamplingInputs, Tree
from jaxspec.step.quantization import quantize
from jaxspec.step.runner import ModelRunner
from jaxspec.step.warmup import WarmUp

PAGES, PAGE, HOST = 24, 16, 40


@dataclass
class Owner:
    kv_cache: KVCache

    def overwritten(self, pages: Sequence[int]) -> None: ...


def scribble(kv_cache: KVCache, page: jax.Array, value: jax.Array) -> KVCache:
    """A step: it writes a page."""
    wide = kv_cache._replace(keys=kv_cache.keys.at[:, page].set(value), values=kv_cache.values.at[:, page].set(value))
    return wide._replace(features=wide.features.at[page].set(value)) if kv_cache.features.shape[0] else wide


scribble = jax.jit(chex.assert_max_traces(scribble, n=2), donate_argnums=0)  # two pools


def contents(owners: list[Owner], page: int) -> list[np.ndarray]:
    """Copies of a page's rows."""
    return [
        np.array(x[page] if name == "features" else x[:, page])
        for owner in owners
        for name, x in zip(KVCache._fields, owner.kv_cache, strict=True)
        if x.size
    ]


@lru_cache
def host_kv_cache(quantized: bool = False, pinned: bool = False) -> tuple[list[Owner], HostKVCache]:
    """The target's pool with features and a drafter's of another size, over the same pages."""
    target, drafter = tiny.config(), tiny.config(num_layers=1, num_kv_heads=1, head_dim=32)
    owners = [
        Owner(KVCache.zeros(target, PAGES, PAGE, "float32", True)),
        Owner(KVCache.zeros(drafter, PAGES, PAGE, "float32")),
    ]  # fmt: skip
    kv_cache = HostKVCache(owners, 1e9, WarmUp(), quantized)
    kv_cache = HostKVCache(owners, HOST * kv_cache.page_bytes, WarmUp(), quantized)
    if pinned:  # as on a GPU: another kind of memory, to which arrays must be copied and from which they must come back
        far = SingleDeviceSharding(jax.devices()[0], memory_kind="pinned_host")
        kv_cache._far = (far,) * len(kv_cache._far)
    return owners, kv_cache


def fill(owners: list[Owner], seed: int) -> None:
    rng = np.random.default_rng(seed)
    for owner in owners:
        owner.kv_cache = jax.tree.map(lambda x: jnp.asarray(rng.normal(size=x.shape), x.dtype), owner.kv_cache)


def request(pages: list[int] | tuple[int, ...] = ()) -> Request:
    return Request("r", 1, [0], 1, 0.0, pages=list(pages))


@pytest.mark.parametrize("pinned", [False, True])
@settings(deadline=None, max_examples=40)
@given(data=st.data())
def test_pages_come_back_as_they_were(pinned: bool, data: Any) -> None:
    """Plans of offloads, uploads and writes, against a dictionary."""
    owners, kv_cache = host_kv_cache(pinned=pinned)
    assert kv_cache.num_pages == HOST
    kv_cache.carry_out(Plan(()))  # what an example that was broken off left under way
    fill(owners, data.draw(st.integers(0, 1000)))
    device = {page: contents(owners, page) for page in range(PAGES)}
    host: dict[int, list[np.ndarray]] = {}
    for _ in range(data.draw(st.integers(1, 6))):
        some = st.permutations(range(PAGES))
        out = data.draw(some)[: data.draw(st.integers(0, 10))]
        free = data.draw(st.permutations(sorted(set(range(HOST)) - set(host))))[: len(out)]
        out = out[: len(free)]
        back = data.draw(st.permutations(sorted(host)))[: data.draw(st.integers(0, 10))]
        into = data.draw(some)[: len(back)]
        read = data.draw(st.sampled_from([[], into, [PAGES - 1]]))
        plan = Plan(
            (ScheduledRequest(request(read), 0, 1),) if read else (),
            offload=(Transfer(request(), tuple(out), tuple(free)),) if out else (),
            upload=(Transfer(request(), tuple(into), tuple(back)),) if back else (),
        )
        kv_cache.carry_out(plan)
        host.update({h: device[p] for h, p in zip(free, out, strict=True)})
        device.update({p: host.pop(h) for h, p in zip(back, into, strict=True)})
        for page in set(read) & set(into):
            chex.assert_trees_all_equal(contents(owners, page), device[page])
        # The step writes pages that it reads, or others that no upload is under way to.
        for page in read or sorted(set(out) - set(into))[:2]:
            for owner in owners:
                owner.kv_cache = scribble(owner.kv_cache, jnp.int32(page), jnp.float32(page))
            device[page] = [np.full_like(x, page) for x in device[page]]
    kv_cache.carry_out(Plan(()))
    for page, rows in device.items():
        chex.assert_trees_all_equal(contents(owners, page), rows)


def test_an_empty_host_page_is_refused() -> None:
    _, kv_cache = host_kv_cache()
    kv_cache.offload([1], [3])
    kv_cache.upload([3], [2])
    with pytest.raises(ValueError, match="host page 3 is empty"):
        kv_cache.upload([3], [2])


def test_no_space_no_pages() -> None:
    owners, kv_cache = host_kv_cache()
    small = HostKVCache(owners, kv_cache.page_bytes - 1, WarmUp())
    assert small.num_pages == 0 and HostKVCache(owners, 1e30, WarmUp()).num_pages > 0
    out, back = kv_cache.seconds
    assert out > 0 and back > 0


def test_quantised_pages_come_back_within_half_a_step() -> None:
    owners, kv_cache = host_kv_cache(quantized=True)
    exact = host_kv_cache()[1]
    assert exact.page_bytes / kv_cache.page_bytes > 3  # pages of 16; of 32 and more it is above 3.5
    fill(owners, 3)
    count = GROUPS[0] + 2
    before = [contents(owners, page) for page in range(count)]
    steps = jax.jit(lambda x, axis: quantize(x, axis).scale, static_argnums=1)
    kv_cache.offload(range(count), range(count))
    kv_cache.upload(range(count), [page + count for page in range(count)])
    for page in range(count):
        # keys [L, K, D, P], values [L, K, P, D] and features [P, H] of the target, keys and values of the drafter
        for x, y, axis in zip(before[page], contents(owners, page + count), (-1, -2, -2, -1, -2), strict=True):
            scale = np.expand_dims(np.asarray(steps(x, axis), np.float32), axis)
            assert (np.abs(x - y) <= scale / 2 + 1e-6).all() and not (x == y).all()


def test_a_request_continues_where_it_was() -> None:
    """Prefill, swap to other pages and back while its own are overwritten, decode on."""
    config = EngineConfig(
        page_size=16, max_num_seqs=2, max_num_batched_tokens=16, token_buckets=[1, 16], max_model_len=96,
        compilation_cache_dir="", draft=[], dtype="float32",
    )  # fmt: skip
    loaded = tiny.model()
    model_runner = ModelRunner(config, loaded.config, loaded.weights, 12)
    kv_cache = HostKVCache([model_runner], 1e8, WarmUp())
    text = [int(t) for t in np.random.default_rng(4).integers(256, size=40)]
    expected = tiny.greedy(text, 20)  # compiles, too
    model_runner.startup_done()
    pages = [3, 1, 7, 9]

    def run(tokens: list[int], committed: int, at: list[int]) -> int:
        packed = model_runner.pack([Tree.chain(tokens, committed, np.asarray(at, np.int32), SamplingInputs())])
        return int(model_runner.execute(packed).wait()[packed.rows[0]])

    committed, token = 0, -1
    while committed < len(text):
        token = run(text[committed : committed + 16], committed, pages)
        committed = min(len(text), committed + 16)
    for i in range(20):
        assert token == expected[i]
        text.append(token)
        if i % 5 == 4:
            held, fresh = pages[: -(-committed // 16)], [(page + 5) % 12 for page in pages]
            kv_cache.carry_out(Plan((), offload=(Transfer(request(), tuple(held), tuple(range(len(held)))),)))
            run([9] * 16, 0, held)  # another request's
            run([8] * 16, 0, fresh)
            upload = (Transfer(request(), tuple(fresh[: len(held)]), tuple(range(len(held)))),)
            kv_cache.carry_out(Plan((ScheduledRequest(request(fresh), committed, 1),) if i % 2 else (), upload=upload))
            kv_cache.carry_out(Plan(()))
            pages = fresh
        token = run([token], committed, pages)
        committed += 1
    assert model_runner.compilations_after_warmup == 0
