"""What INT8 KV costs in quality, and what moving pages costs beside a step.

Perplexity of a text and the share of positions where the likeliest token changes, with KV as computed and as INT8;
and a decoding step with pages moved out and in before it, alternated with steps without."""

from __future__ import annotations

import argparse
import math
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from rich.console import Console
from rich.table import Table

from jaxspec.bench import BenchError, options
from jaxspec.bench.report import machine, write_json
from jaxspec.errors import explained
from jaxspec.progress import progress

if TYPE_CHECKING:
    from jaxspec.config import EngineConfig
    from jaxspec.models.load import LoadedModel
    from jaxspec.step.packing import Tree

#: Of the KV pool, that are compared.
KINDS = ("auto", "int8")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--model", default="smollm2-135m", help="as of the server (default: %(default)s)")
    parser.add_argument("--text", metavar="FILE", help="plain text to score; without one only steps are measured")
    parser.add_argument("--tokens", type=options.count, default=20_000, help="of the text (default: %(default)s)")
    parser.add_argument("--context", type=options.count, default=512, help="tokens scored at a go (default: 512)")
    parser.add_argument(
        "--chunk", type=options.count, default=32,
        help="tokens a step computes: all that came before is read from the pool (default: 32)",
    )  # fmt: skip
    parser.add_argument("--requests", type=options.count, default=16, help="of the step that is timed (default: 16)")
    parser.add_argument("--committed", type=options.count, default=272, help="positions of each (default: 272)")
    parser.add_argument(
        "--pages", type=options.count, nargs="+", default=[1, 2, 4, 8], help="moved out, and in, a step"
    )
    parser.add_argument("--repeats", type=options.count, default=15)
    parser.add_argument("--json", metavar="FILE")


def run(args: argparse.Namespace) -> int:
    """Raises `BenchError` where nothing can be measured."""
    from jaxspec.models.load import ModelLoadError, load_model

    try:
        model = load_model(args.model)
        ids = model.tokenizer.encode(Path(args.text).read_text(encoding="utf-8")) if args.text else []
    except (ModelLoadError, OSError, UnicodeDecodeError) as error:
        raise BenchError(explained(error)) from None
    if args.text and len(ids) < args.tokens:
        raise BenchError(f"{args.text} has {len(ids)} tokens, {args.tokens} are asked for")
    found: dict[str, Any] = {"machine": machine(), "options": options.plain(args)}
    if args.text:
        found["quality"] = quality(model, ids[: args.tokens], args)
    found["pool_step_ms"] = pools(model, args)
    found["steps"] = [steps(model, swap_dtype, args) for swap_dtype in ("same", "int8")]
    _show(found)
    if args.json:
        write_json(args.json, found)
    return 0


def quality(model: LoadedModel, ids: list[int], args: argparse.Namespace) -> dict[str, Any]:
    """Perplexity by kind of KV, and how often INT8 changes the likeliest token."""
    from jaxspec.llm import LLM
    from jaxspec.sampling_params import SamplingParams

    windows = [ids[i : i + args.context] for i in range(0, len(ids), args.context)]
    windows = [w for w in windows if len(w) > 1]
    out: dict[str, Any] = {}
    logprobs: dict[str, np.ndarray] = {}
    likeliest: dict[str, np.ndarray] = {}
    for kind in KINDS:
        begun = time.perf_counter()
        with LLM(
            model, draft=[], kv_cache_dtype=kind, max_num_seqs=1, max_num_batched_tokens=args.chunk,
            enable_prefix_caching=False,
            token_buckets=[args.chunk], max_model_len=args.context + 1, swap_space=0, **options.COMPILE_ALL_FIRST,
        ) as llm, progress(f"KV {kind}", len(windows)) as advance:  # fmt: skip
            entries = []
            for window in windows:
                result = llm.generate([window], SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=1))[0]
                entries += (result.prompt_logprobs or [])[1:]
                advance()
        logprobs[kind] = np.array([e.logprob for e in entries])
        likeliest[kind] = np.array([e.top[0][0] for e in entries])
        out[kind] = {
            "perplexity": math.exp(-logprobs[kind].mean()),
            "positions": len(entries),
            "seconds": time.perf_counter() - begun,
        }
    exact, other = (logprobs[kind] for kind in KINDS)
    out["likeliest_changed"] = float((likeliest["auto"] != likeliest["int8"]).mean())
    out["logprob_change_mean"] = float(np.abs(other - exact).mean())
    out["logprob_change_max"] = float(np.abs(other - exact).max())
    return out


def setting(args: argparse.Namespace, **more: Any) -> EngineConfig:
    """An engine whose only step is the one that is timed."""
    from jaxspec.config import EngineConfig

    n = args.requests
    return EngineConfig(
        max_num_seqs=n, max_num_batched_tokens=n, token_buckets=[n], draft=[], max_model_len=args.committed + 64, **more
    )


def trees_of(config: EngineConfig, args: argparse.Namespace) -> tuple[list[Tree], int]:
    """A decoding token of each request over its committed positions, and how many pages they have."""
    from jaxspec.step.packing import SamplingInputs, Tree

    each = -(-(args.committed + 1) // config.page_size)
    pages = args.requests * each
    tables = np.random.default_rng(0).permutation(pages).reshape(-1, each).astype(np.int32)
    return [Tree.chain([1], args.committed, row, SamplingInputs()) for row in tables], pages


def pools(model: LoadedModel, args: argparse.Namespace) -> dict[str, float]:
    """Milliseconds of a decoding step by kind of KV, in turns."""
    from jaxspec.step.runner import ModelRunner

    times: dict[str, list[float]] = {kind: [] for kind in KINDS}
    executors: dict[str, ModelRunner] = {}
    for kind in KINDS:
        config = setting(args, kv_cache_dtype=kind)
        trees, pages = trees_of(config, args)
        executors[kind] = ModelRunner(config, model.config, dict(model.weights), pages)
    with progress("steps by kind of KV", args.repeats) as advance:
        for i in range(args.repeats + 2):
            for kind, model_runner in executors.items():
                begun = time.perf_counter()
                model_runner.execute(model_runner.pack(trees)).wait()
                if i >= 2:
                    times[kind].append(time.perf_counter() - begun)
            if i >= 2:
                advance()
    return {kind: 1e3 * float(np.median(t)) for kind, t in times.items()}


def steps(model: LoadedModel, swap_dtype: str, args: argparse.Namespace) -> dict[str, Any]:
    """Seconds of a decoding step by pages moved before it, and of moving a page by itself."""
    import jax

    from jaxspec.sched.plan import Plan, Transfer
    from jaxspec.sched.request import Request
    from jaxspec.step.kv_host import host_pool
    from jaxspec.step.profiles import ProfileStore
    from jaxspec.step.runner import ModelRunner
    from jaxspec.step.warmup import WarmUp

    most = max(args.pages)
    config = setting(args, swap_dtype=swap_dtype)
    trees, pages = trees_of(config, args)
    model_runner = ModelRunner(config, model.config, dict(model.weights), pages + 2 * most)
    pool = host_pool(config, model_runner, (), WarmUp(), ProfileStore())
    nobody = Request("swapped", 1, [0], 1, 0.0)
    out, back = range(pages, pages + most), range(pages + most, pages + 2 * most)

    def plan(pages: int, to: int | None, come: int) -> Plan:
        """Offloads to host pages from `to` on, and uploads those from `come` on."""
        host = lambda first: tuple(range(first, first + pages))  # noqa: E731
        gone = () if to is None else (Transfer(nobody, tuple(out[:pages]), host(to)),)
        return Plan((), offload=gone, upload=(Transfer(nobody, tuple(back[:pages]), host(come)),))

    def step(pages: int) -> float:
        """One in a row of steps that each move so many pages out and in."""
        for host in (0, most):
            pool.offload(out[:pages], range(host, host + pages))
        pool.carry_out(plan(pages, None, 0))
        jax.block_until_ready(model_runner.pool)
        begun = time.perf_counter()
        pool.carry_out(plan(pages, 2 * most, most))  # those of the step before are put in their places here
        model_runner.execute(model_runner.pack(trees)).wait()
        return time.perf_counter() - begun

    times: dict[int, list[float]] = {pages: [] for pages in (0, *args.pages)}
    with progress(f"steps, swapped as {swap_dtype}", args.repeats) as advance:
        for i in range(args.repeats + 2):
            for pages in times:
                seconds = step(pages)
                if i >= 2:
                    times[pages].append(seconds)
            if i >= 2:
                advance()
    out_seconds, in_seconds = pool.seconds
    full = model_runner.shapes[-1].tokens
    return {
        "swap_dtype": swap_dtype,
        "page_bytes": pool.page_bytes,
        "out_ms": 1e3 * out_seconds,
        "in_ms": 1e3 * in_seconds,
        "prefill_token_ms": 1e3 * model_runner.profile.seconds[str(full)] / full,
        "step_ms": {str(pages): 1e3 * float(np.median(t)) for pages, t in times.items()},
    }


def _show(found: dict[str, Any]) -> None:
    console = Console()
    if "quality" in found:
        quality = found["quality"]
        table = Table("KV", "perplexity", "positions", "s", title="the text, scored", title_justify="left")
        for kind in KINDS:
            row = quality[kind]
            table.add_row(kind, f"{row['perplexity']:.4f}", f"{row['positions']:,}", f"{row['seconds']:.0f}")
        console.print(table)
        console.print(
            f"INT8 changes the likeliest token at {quality['likeliest_changed']:.2%} of the positions, and its "
            f"log-probability by {quality['logprob_change_mean']:.4f} (at most {quality['logprob_change_max']:.3f})"
        )
    kinds = ", ".join(f"KV {kind} {ms:.2f} ms" for kind, ms in found["pool_step_ms"].items())
    console.print(f"a decoding step: {kinds}")
    for row in found["steps"]:
        table = Table("pages out and in", "ms", "against none", title_justify="left")
        table.title = f"a decoding step, swapped as {row['swap_dtype']}"
        alone = row["step_ms"]["0"]
        for pages, ms in row["step_ms"].items():
            table.add_row(pages, f"{ms:.2f}", f"{ms / alone - 1:+.1%}")
        console.print(table)
        console.print(
            f"a page: {row['page_bytes'] / 2**20:.2f} MiB, {row['out_ms']:.2f} ms out and {row['in_ms']:.2f} ms in; "
            f"a token of a full step: {row['prefill_token_ms']:.2f} ms"
        )
