"""How to read committed KV with XLA: gather first, row by row, or in place; all layers of one decode step, alternated.

This is the measurement behind the layout of `jaxspec.step.pool`. Each variant attends from one query token a request to
`--context` positions, `--requests` requests, in pages of `--page-size`.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from rich.console import Console
from rich.table import Table

from jaxspec.bench import options

KV_HEADS, GROUPS, DIM, LAYERS = 3, 3, 64, 30  # SmolLM2-135M


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--requests", type=options.count, default=16)
    parser.add_argument("--context", type=options.count, default=128)
    parser.add_argument("--page-size", type=options.count, default=32)
    parser.add_argument("--repeats", type=options.count, default=9)
    parser.add_argument("--json", metavar="FILE")


def run(args: argparse.Namespace) -> int:
    rows = args.requests * -(-args.context // args.page_size)
    rng = np.random.default_rng(0)
    ids = jnp.asarray(rng.permutation(rows), jnp.int32)

    def random(*shape: int) -> jax.Array:
        return jnp.asarray(rng.normal(size=shape), jnp.float32)

    q = random(rows, KV_HEADS, GROUPS, DIM)
    keys = [random(rows, KV_HEADS, args.page_size, DIM) for _ in range(LAYERS)]
    turned = [random(rows, KV_HEADS, DIM, args.page_size) for _ in range(LAYERS)]
    values = [random(rows, KV_HEADS, args.page_size, DIM) for _ in range(LAYERS)]
    cases: dict[str, tuple[Callable[..., Any], list[jax.Array]]] = {
        "gather, then product": (_gathered, keys),
        "row by row in a loop": (_looped, turned),
        "in place, keys [page, dim]": (_in_place, keys),
        "in place, keys [dim, page]": (_in_place_turned, turned),
    }
    compiled = {name: jax.jit(_layers(fn)).lower(q, ids, k, values).compile() for name, (fn, k) in cases.items()}
    times: dict[str, list[float]] = {name: [] for name in cases}
    with options.progress("repeats", args.repeats) as advance:
        for i in range(args.repeats + 2):
            for name, (_, k) in cases.items():
                begin = time.perf_counter()
                jax.block_until_ready(compiled[name](q, ids, k, values))
                if i >= 2:
                    times[name].append(time.perf_counter() - begin)
            if i >= 2:
                advance()
    medians = {name: float(np.median(t)) * 1e3 for name, t in times.items()}
    megabytes = 2 * LAYERS * rows * KV_HEADS * args.page_size * DIM * 4 / 1e6
    table = Table(
        "reading", "ms a step", "GB/s", title=f"{args.requests} × {args.context} positions, {megabytes:.0f} MB"
    )
    for name, ms in medians.items():
        table.add_row(name, f"{ms:.1f}", f"{megabytes / ms:.1f}")
    Console().print(table)
    if args.json:
        Path(args.json).write_text(json.dumps({"megabytes": megabytes, "median_ms": medians}, indent=1) + "\n")
    return 0


def _layers(fn: Callable[..., jax.Array]) -> Callable[..., jax.Array]:
    def step(q: jax.Array, ids: jax.Array, keys: list[jax.Array], values: list[jax.Array]) -> jax.Array:
        for k, v in zip(keys, values, strict=True):
            q = q + fn(q, ids, k, v)
        return q

    return step


def _gathered(q: jax.Array, ids: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
    k, v = (x.at[ids].get(mode="promise_in_bounds") for x in (k, v))
    weights = jax.nn.softmax(jnp.einsum("nkgd,nkld->nkgl", q, k))
    return jnp.einsum("nkgl,nkld->nkgd", weights, v)


def _looped(q: jax.Array, ids: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
    def row(args: tuple[jax.Array, jax.Array]) -> jax.Array:
        query, i = args
        keys, values = (lax.dynamic_index_in_dim(x, i, 0, False) for x in (k, v))
        return jnp.einsum("kgl,kld->kgd", jax.nn.softmax(jnp.einsum("kgd,kdl->kgl", query, keys)), values)

    return lax.map(row, (q, ids))


def _in_place(q: jax.Array, ids: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
    weights = jax.nn.softmax(jnp.einsum("nkgd,nkld->nkgl", q[ids], k))
    return jnp.einsum("nkgl,nkld->nkgd", weights, v)[ids]


def _in_place_turned(q: jax.Array, ids: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
    weights = jax.nn.softmax(jnp.einsum("nkgd,nkdl->nkgl", q[ids], k))
    return jnp.einsum("nkgl,nkld->nkgd", weights, v)[ids]
