"""Compare the native CPU kernels with XLA's operations at the sizes of SmolLM2-135M.

Measures all matrix products of a step, and attention of a decode step over committed KV. The variants alternate in one
run; the tables show medians.

--compilers cc zig compares kernels built by different compilers.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import gguf
import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from rich.console import Console

from jaxspec.bench import BenchError, options
from jaxspec.bench.plot import lines
from jaxspec.bench.table import median, terminal
from jaxspec.compilation import compile_ahead
from jaxspec.kernels import cpu
from jaxspec.kernels.build import KernelsUnavailable
from jaxspec.kernels.packed import pack
from jaxspec.models.load.stored import FLOATS, StoredMatrix
from jaxspec.progress import progress

LAYERS, HIDDEN, INNER, VOCAB, KV_HEADS, GROUPS, DIM, PAGE = 30, 576, 1536, 49152, 3, 3, 64, 32
WIDTHS = (HIDDEN + 2 * KV_HEADS * DIM, HIDDEN, 2 * INNER, HIDDEN)
DEPTHS = (HIDDEN, HIDDEN, HIDDEN, INNER)
_WEIGHTS = LAYERS * sum(d * w for d, w in zip(DEPTHS, WIDTHS, strict=True)) + HIDDEN * VOCAB
#: What the probes of the CPU's limits read, and how often they multiply.
_PROBE_BYTES, _PROBE_ROUNDS = 1 << 28, 20_000
#: Those that the `gguf` package can write and that need no superblocks of 256.
_FORMATS = ("F32", "BF16", "F16", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--tokens", type=options.count, nargs="+", metavar="N", default=[1, 2, 4, 8, 16, 32, 64, 128],
        help="step sizes for the matrix products, in tokens (default: 1 2 4 8 16 32 64 128)",
    )  # fmt: skip
    parser.add_argument(
        "--contexts", type=options.count, nargs="+", metavar="N", default=[128, 512],
        help="committed KV positions of each request for attention (default: 128 512)",
    )  # fmt: skip
    options.add_numbers(
        parser, ("--requests N", 16, "requests for attention"),
        ("--query-tokens N", 1, "tokens of each request for attention: 1, or a chunk of a prompt (not with XLA)"),
        ("--repeats N", 15, "measured rounds"),
    )  # fmt: skip
    parser.add_argument(
        "--formats", nargs="+", choices=_FORMATS, metavar="FORMAT", default=["F32", "Q4_1"],
        help=f"stored forms of the weights: {', '.join(_FORMATS)} (default: F32 Q4_1)",
    )  # fmt: skip
    parser.add_argument(
        "--compilers", nargs="+", metavar="COMMAND",
        help="compilers to compare: commands, or zig for the ziglang package (default: the one used when serving)",
    )  # fmt: skip
    parser.add_argument("--no-xla", action="store_true", help="do not measure XLA's operations")
    parser.add_argument(
        "--cpu-time", action="store_true",
        help="measure CPU time of all threads instead of wall time; for busy machines, together with JAXSPEC_THREADS=1",
    )  # fmt: skip
    parser.add_argument("--json", metavar="FILE", help="write all measured times as JSON")
    parser.add_argument("--plot", metavar="PNG", help="plot the times of the matrix products")


#: Milliseconds of each round, by variant.
Times = dict[str, list[float]]
#: Variant -> (function, its two arguments).
Cases = dict[str, tuple[Callable[..., Any], Any, Any]]


def run(args: argparse.Namespace) -> int:
    """Print and write the times. Raises `BenchError` if the kernels cannot be built."""
    try:
        for compiler in ("", *(args.compilers or [])):  # the default one for the probes
            cpu.load(compiler)
    except KernelsUnavailable as error:
        raise BenchError(str(error)) from None
    rng = np.random.default_rng(0)
    products: dict[int, Times] = {}
    shares: dict[int, dict[str, float]] = {}
    with progress("products", len(args.tokens)) as advance:
        matrices = [
            rng.normal(size=(LAYERS, d, w)).astype(np.float32) * 0.02 for d, w in zip(DEPTHS, WIDTHS, strict=True)
        ]
        head = rng.normal(size=(1, HIDDEN, VOCAB)).astype(np.float32) * 0.02
        packed = {kind: [_packed(kind, m) for m in [*matrices, head]] for kind in args.formats}
        # What the CPU does at most takes turns with the rest: the bandwidth of shared machines varies.
        probe = jnp.ones(_PROBE_BYTES // 4, jnp.float32)
        limits: Cases = {
            "reading": (lambda data, _: cpu.probe(data, 0), probe, None),
            "multiplying": (lambda data, _: cpu.probe(data, _PROBE_ROUNDS), probe, None),
        }
        multiplied = float(cpu.probe(probe, _PROBE_ROUNDS).sum())
        plain = None
        if not args.no_xla:
            plain = [[jnp.asarray(m[i]) for m in matrices] for i in range(LAYERS)], jnp.asarray(head[0])
        for t in args.tokens:
            x = jnp.asarray(rng.normal(size=(t, HIDDEN)), jnp.float32)
            cases = {} if args.no_xla else {"XLA": (_xla_products, x, plain)}
            for kind, weights in packed.items():
                cases |= _kernels(_kernel_products, x, weights, args, kind)
            times = _take_turns({**limits, **cases}, args)
            reading, multiplying = (float(np.median(times.pop(name))) for name in limits)
            products[t] = times
            shares[t] = {
                name: max(
                    sum(w.nbytes for w in packed[name.split()[0]]) / _PROBE_BYTES * reading,
                    t * _WEIGHTS / multiplied * multiplying,
                )
                / float(np.median(found))
                for name, found in times.items()
                if name != "XLA"
            }
            advance()
    attention: dict[int, Times] = {}
    with progress("attention", len(args.contexts)) as advance:
        for context in args.contexts:
            attention[context] = _attention(context, rng, args)
            advance()
    _show("matrix products of a step, ms", "tokens", products)
    each = f" of {args.query_tokens} tokens" if args.query_tokens > 1 else ""
    _show(f"attention of {args.requests} requests{each} over committed KV, {LAYERS} layers, ms", "positions", attention)
    rows = ([t, *(f"{share:.0%}" for share in found.values())] for t, found in shares.items())
    names = list(next(iter(shares.values())))
    Console().print(terminal(rows, "tokens", *names, title="the nearer limit (reading, multiplying) over the time"))
    if args.json:
        found = {"products_ms": products, "share_of_limit": shares, "attention_ms": attention}
        Path(args.json).write_text(json.dumps(found) + "\n")
    if args.plot:
        names = next(iter(products.values()))
        series = {name: {t: float(np.median(row[name])) for t, row in products.items()} for name in names}
        lines(args.plot, series, "tokens in the step", "matrix products, ms", "SmolLM2-135M, float32")
    return 0


def _packed(kind: str, matrices: np.ndarray) -> jax.Array:
    """Matrices `[layers, in, out]`, quantised as `kind`."""
    to = gguf.GGMLQuantizationType[kind]

    def quantized(matrix: np.ndarray, to: gguf.GGMLQuantizationType) -> np.ndarray:
        blocks = gguf.quants.quantize(np.ascontiguousarray(matrix), to)
        return blocks.view(FLOATS[kind]) if kind in FLOATS else blocks

    parts = [StoredMatrix(kind, (w.shape[1], w.shape[0]), partial(quantized, w.T, to)) for w in matrices]
    return jnp.asarray(pack([[part] for part in parts]))


def _kernels(function: Callable[..., Any], a: Any, b: Any, args: argparse.Namespace, name: str = "kernel") -> Cases:
    """A case for each of `args.compilers`."""

    def with_compiler(compiler: str) -> Callable[..., Any]:  # a new function each: JAX caches traces by function
        def call(a: Any, b: Any) -> Any:
            with cpu.built_by(compiler):
                return function(a, b)

        return call

    return {f"{name} {compiler}".strip(): (with_compiler(compiler), a, b) for compiler in args.compilers or [""]}


def _take_turns(cases: Cases, args: argparse.Namespace) -> Times:
    """Measure all cases in each round, starting with a different one each time. Two warm-up rounds are not counted."""
    compiled = {name: compile_ahead(f, a, b) for name, (f, a, b) in cases.items()}
    times: Times = {name: [] for name in cases}
    names, clock = list(cases), time.process_time if args.cpu_time else time.perf_counter
    for i in range(args.repeats + 2):
        for name in names[i % len(names) :] + names[: i % len(names)]:
            begin = clock()
            jax.block_until_ready(compiled[name](*cases[name][1:]))
            if i >= 2:
                times[name].append((clock() - begin) * 1e3)
    return times


def _xla_products(x: jax.Array, weights: tuple[list[list[jax.Array]], jax.Array]) -> jax.Array:
    layers, head = weights
    for qkv, o, gate_up, down in layers:
        x = x + (x @ qkv)[:, :HIDDEN] @ o
        x = x + (x @ gate_up)[:, :INNER] @ down
    return x @ head


def _kernel_products(x: jax.Array, weights: list[jax.Array]) -> jax.Array:
    qkv, o, gate_up, down, head = weights

    def layer(x: jax.Array, i: jax.Array) -> tuple[jax.Array, None]:
        x = x + cpu.linear(cpu.linear(x, qkv, WIDTHS[0], i)[:, :HIDDEN], o, HIDDEN, i)
        return x + cpu.linear(cpu.linear(x, gate_up, 2 * INNER, i)[:, :INNER], down, HIDDEN, i), None

    return cpu.linear(lax.scan(layer, x, jnp.arange(LAYERS))[0], head, VOCAB)


def _attention(context: int, rng: np.random.Generator, args: argparse.Namespace) -> Times:
    """Attention of each request's query tokens, a chain; all pages are full except perhaps each request's last."""
    requests, queries = args.requests, args.query_tokens
    pages_each = -(-context // PAGE)
    pages = requests * pages_each
    table = jnp.asarray(rng.permutation(pages).reshape(requests, pages_each), jnp.int32)
    q = jnp.asarray(rng.normal(size=(requests * queries, KV_HEADS * GROUPS, DIM)), jnp.float32)
    kv = jnp.asarray(rng.normal(size=(requests * queries, KV_HEADS, DIM)), jnp.float32)
    keys = jnp.asarray(rng.normal(size=(LAYERS, pages, KV_HEADS, DIM, PAGE)), jnp.float32)
    values = jnp.asarray(rng.normal(size=(LAYERS, pages, KV_HEADS, PAGE, DIM)), jnp.float32)
    first, depth = jnp.arange(requests) * queries, jnp.tile(jnp.arange(queries), requests)
    nodes, committed = jnp.full_like(first, queries), jnp.full_like(first, context)

    def kernel(q: jax.Array, pool: tuple[jax.Array, jax.Array]) -> jax.Array:
        def layer(q: jax.Array, i: jax.Array) -> tuple[jax.Array, None]:
            none = jnp.int32(0)
            return q + cpu.attention(
                q, kv, kv, *pool, i, none, context + depth, queries - depth, first, nodes, committed, table
            )[0], None  # fmt: skip

        return lax.scan(layer, q, jnp.arange(LAYERS))[0]

    def per_layer(attend: Callable[..., jax.Array]) -> Callable[..., jax.Array]:
        def step(q: jax.Array, pool: list[tuple[jax.Array, jax.Array]]) -> jax.Array:
            for k, v in pool:
                q = q + attend(q.reshape(requests, KV_HEADS, GROUPS, DIM), k, v).reshape(q.shape)
            return q

        return step

    def gathered(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
        weights = jax.nn.softmax(jnp.einsum("rkgd,rjkdp->rkgjp", q, k[table]), axis=(-2, -1))
        return jnp.einsum("rkgjp,rjkpd->rkgd", weights, v[table])

    def in_place(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
        """Reads the whole pool in memory order, without a page table: XLA's best case, valid only for a full pool."""
        rows = jnp.repeat(q, pages_each, axis=0)
        weights = jax.nn.softmax(jnp.einsum("nkgd,nkdp->nkgp", rows, k))
        return jnp.einsum("nkgp,nkpd->nkgd", weights, v).reshape(requests, pages_each, KV_HEADS, GROUPS, DIM).sum(1)

    cases = _kernels(kernel, q, (keys, values), args)
    if not args.no_xla and queries == 1:
        layers = [(keys[i], values[i]) for i in range(LAYERS)]
        xla = {"XLA, gathered": (per_layer(gathered), q, layers), "XLA, in place": (per_layer(in_place), q, layers)}
        cases = {**xla, **cases}
    return _take_turns(cases, args)


def _show(title: str, first: str, rows: dict[int, Times]) -> None:
    """Print medians and, in brackets, their ratio to the last variant's with the quartiles of the rounds' ratios."""
    *others, last = next(iter(rows.values()))

    def compared(times: list[float], base: list[float]) -> str:
        low, high = np.percentile(np.asarray(times) / base, (25, 75))
        return f"{np.median(times):.1f} ({np.median(times) / np.median(base):.2f}; {low:.2f}–{high:.2f})"

    caption = f"in brackets: relative to {last} (ratio of medians; quartiles of the ratios per round)"
    found = ([key, *(compared(row[name], row[last]) for name in others), row[last]] for key, row in rows.items())
    Console().print(terminal(found, first, *others, (last, median("{:.1f}")), title=title, caption=caption))
