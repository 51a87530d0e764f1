"""Steps of the whole model: the device's time, the time of one after the other with the host's work, and a prompt."""

from __future__ import annotations

import time
from typing import Any

import numpy as np

from jaxspec.bench.gpu import costs, forests
from jaxspec.bench.gpu.card import Card, chained
from jaxspec.step.buckets import GPU
from jaxspec.step.packing import SamplingInputs, Tree
from jaxspec.step.runner import ModelRunner


def step(card: Card, batch: int, nodes: int, context: int, graph: bool) -> dict[str, Any]:
    """A step that verifies `batch` trees of `nodes` nodes each, in requests of `context` positions, padded to the size
    that an engine compiles. graph: as one CUDA graph."""
    begun = time.perf_counter()
    size = max(batch * nodes, GPU.tokens[0])
    runner = card.runner(card.model, (size,), batch, context, card.dtype, one_graph=graph)
    built = time.perf_counter() - begun
    runner.kv_cache = card.fill(runner.kv_cache)
    parents, rows = forests.shaped(nodes, batch, runner.shapes[-1].rows)
    rng = np.random.default_rng(card.seed)
    trees = [
        forests.tree(parents, rng.integers(card.config.vocab_size, size=nodes).tolist(), context - nodes, pages, rows)
        for pages in _pages(runner, batch, context)
    ]
    cost = costs.step(card.config, card.itemsize, context - nodes, [forests.depths(parents)] * batch, batch * len(rows))
    return {
        "batch": batch, "nodes": nodes, "context": context, "graph": graph, "layers": runner.layers.name,
        "rows": batch * len(rows), "bytes": cost.bytes, "flops": cost.flops, "build_s": built,
        **_times(card, runner, trees),
    }  # fmt: skip


def prefill(card: Card, tokens: int) -> dict[str, Any]:
    """A prompt of `tokens`, computed in one step."""
    begun = time.perf_counter()
    runner = card.runner(card.model, (tokens,), 1, tokens, card.dtype)
    built = time.perf_counter() - begun
    (pages,) = _pages(runner, 1, tokens)
    prompt = np.random.default_rng(card.seed).integers(card.config.vocab_size, size=tokens).tolist()
    cost = costs.step(card.config, card.itemsize, 0, [range(tokens)], 1)
    trees = [Tree.chain(prompt, 0, pages, SamplingInputs())]
    return {
        "tokens": tokens, "layers": runner.layers.name, "bytes": cost.bytes, "flops": cost.flops, "build_s": built,
        **_times(card, runner, trees),
    }  # fmt: skip


def _pages(runner: ModelRunner, requests: int, context: int) -> np.ndarray:
    """Pages of each request `[requests, pages]`, spread over the pool as after a while of serving."""
    each = -(-context // runner.page_size)
    return np.random.default_rng(0).permutation(requests * each).astype(np.int32).reshape(requests, each)


def _times(card: Card, runner: ModelRunner, trees: list[Tree]) -> dict[str, Any]:
    """Milliseconds of steps in a row, and of single steps: packing, launching, and waiting for the decision."""
    packed = runner.pack(trees)
    found: dict[str, Any] = chained(
        lambda: runner.execute(packed), lambda pending: pending.wait(), card.sizes.chain, card.sizes.repeats
    )
    single: dict[str, list[float]] = {"wall_ms": [], "pack_ms": [], "launch_ms": []}
    for _ in range(card.sizes.chain):
        begun = time.perf_counter()
        packed = runner.pack(trees)
        ready = time.perf_counter()
        pending = runner.execute(packed)
        launched = time.perf_counter()
        pending.wait()
        for name, seconds in (
            ("wall_ms", time.perf_counter() - begun), ("pack_ms", ready - begun), ("launch_ms", launched - ready),
        ):  # fmt: skip
            single[name].append(1e3 * seconds)
    return {**found, **single}
