"""Measure what INT8 KV costs in quality and what swapping pages costs in step time.

Quality: perplexity of a text with exact and with INT8 KV, and the share of positions where the most likely token
changes. Swapping: time of a decoding step with KV pages moved to and from the host before it, alternating with steps
without.
"""

from __future__ import annotations

import argparse
import math
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from rich.console import Console

from jaxspec.bench import BenchError, options
from jaxspec.bench.report import machine, write_json
from jaxspec.bench.table import terminal
from jaxspec.errors import explained
from jaxspec.progress import progress

if TYPE_CHECKING:
    from jaxspec.config import EngineConfig
    from jaxspec.models.load import LoadedModel
    from jaxspec.step.packing import Tree

#: Values of `kv_cache_dtype` that are compared.
KINDS = ("auto", "int8")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--model", default="smollm2-135m",
        help="built-in name, Hugging Face directory, .gguf file or hub id (default: %(default)s)",
    )  # fmt: skip
    scoring = parser.add_argument_group("quality")
    scoring.add_argument("--text", metavar="FILE", help="plain text to score (default: none, only steps are measured)")
    options.add_numbers(
        scoring,
        ("--tokens N", 20_000, "tokens of the text to score"),
        ("--context N", 512, "the text is scored in windows of N tokens"),
        ("--chunk N", 32, "tokens computed per step; earlier tokens are read from the KV cache"),
    )
    swapping = parser.add_argument_group("step time")
    options.add_numbers(
        swapping,
        ("--requests N", 16, "decoding requests in the measured step"),
        ("--committed N", 272, "committed KV positions of each request"),
        ("--repeats N", 15, "measured steps of each kind"),
    )
    swapping.add_argument(
        "--pages", type=options.count, nargs="+", default=[1, 2, 4, 8], metavar="N",
        help="pages moved per step, each way; several values are compared (default: 1 2 4 8)",
    )  # fmt: skip
    parser.add_argument("--json", metavar="FILE", help="write all measurements as JSON")


def run(args: argparse.Namespace) -> int:
    """Print and write the results. Raises `BenchError` if nothing can be measured."""
    from jaxspec.models.load import ModelLoadError, load_model

    try:
        model = load_model(args.model)
        ids = model.tokenizer.encode(Path(args.text).read_text(encoding="utf-8")) if args.text else []
    except (ModelLoadError, OSError, UnicodeDecodeError) as error:
        raise BenchError(explained(error)) from None
    if args.text and len(ids) < args.tokens:
        raise BenchError(f"{args.text} has only {len(ids)} tokens, --tokens is {args.tokens}")
    found: dict[str, Any] = {"machine": machine(), "options": options.plain(args)}
    if args.text:
        found["quality"] = quality(model, ids[: args.tokens], args)
    found["pool_step_ms"] = kv_dtype_times(model, args)
    found["steps"] = [steps(model, swap_dtype, args) for swap_dtype in ("same", "int8")]
    _show(found)
    if args.json:
        write_json(args.json, found)
    return 0


def quality(model: LoadedModel, ids: list[int], args: argparse.Namespace) -> dict[str, Any]:
    """Perplexity for each of `KINDS`, the share of positions where INT8 changes the most likely token, and by how much
    it changes the log-probability of the text's tokens."""
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


def step_config(args: argparse.Namespace, **more: Any) -> EngineConfig:
    """The config of an engine with one bucket, the size of the measured step."""
    from jaxspec.config import EngineConfig
    from jaxspec.engine.startup import for_device

    n = args.requests
    sizes = dict(max_num_seqs=n, max_num_batched_tokens=n, token_buckets=[n], max_model_len=args.committed + 64)
    return for_device(EngineConfig(draft=[], **sizes, **more))


def decode_trees(config: EngineConfig, args: argparse.Namespace) -> tuple[list[Tree], int]:
    """One decoding token per request after its committed positions, and the number of pages of all requests."""
    from jaxspec.step.packing import SamplingInputs, Tree

    pages_each = -(-(args.committed + 1) // config.page_size)
    pages = args.requests * pages_each
    tables = np.random.default_rng(0).permutation(pages).reshape(-1, pages_each).astype(np.int32)
    return [Tree.chain([1], args.committed, row, SamplingInputs()) for row in tables], pages


def kv_dtype_times(model: LoadedModel, args: argparse.Namespace) -> dict[str, float]:
    """Median milliseconds of a decoding step for each of `KINDS`, measured alternately."""
    from jaxspec.step.runner import ModelRunner

    times: dict[str, list[float]] = {kind: [] for kind in KINDS}
    model_runners: dict[str, ModelRunner] = {}
    trees: list[Tree] = []
    for kind in KINDS:
        config = step_config(args, kv_cache_dtype=kind)
        trees, pages = decode_trees(config, args)
        model_runners[kind] = ModelRunner(config, model.config, model.weights, pages)
    with progress("steps by KV dtype", args.repeats) as advance:
        for i in range(args.repeats + 2):
            for kind, model_runner in model_runners.items():
                begun = time.perf_counter()
                model_runner.execute(model_runner.pack(trees)).wait()
                if i >= 2:
                    times[kind].append(time.perf_counter() - begun)
            if i >= 2:
                advance()
    return {kind: 1e3 * float(np.median(t)) for kind, t in times.items()}


def steps(model: LoadedModel, swap_dtype: str, args: argparse.Namespace) -> dict[str, Any]:
    """Median milliseconds of a decoding step by the number of pages moved before it, of moving one page in each
    direction, and of one token in a full prefill step."""
    import jax

    from jaxspec.sched.plan import Plan, Transfer
    from jaxspec.sched.request import Request
    from jaxspec.step.kv_host import host_kv_cache
    from jaxspec.step.profiles import ProfileStore
    from jaxspec.step.runner import ModelRunner
    from jaxspec.step.warmup import WarmUp

    max_pages = max(args.pages)
    config = step_config(args, swap_dtype=swap_dtype)
    trees, pages = decode_trees(config, args)
    model_runner = ModelRunner(config, model.config, model.weights, pages + 2 * max_pages)
    kv_cache = host_kv_cache(config, model_runner, (), WarmUp(), ProfileStore())
    swapped = Request("swapped", 1, [0], 1, 0.0)
    out, back = range(pages, pages + max_pages), range(pages + max_pages, pages + 2 * max_pages)

    def plan(pages: int, offload_to: int | None, upload_from: int) -> Plan:
        """Offloads to host pages from `offload_to` on, and uploads host pages from `upload_from` on."""
        host = lambda first: tuple(range(first, first + pages))  # noqa: E731
        offload = () if offload_to is None else (Transfer(swapped, tuple(out[:pages]), host(offload_to)),)
        return Plan((), offload=offload, upload=(Transfer(swapped, tuple(back[:pages]), host(upload_from)),))

    def step(pages: int) -> float:
        """Seconds of a step in a series in which each step moves `pages` pages out and in."""
        for host in (0, max_pages):
            kv_cache.offload(out[:pages], range(host, host + pages))
        kv_cache.carry_out(plan(pages, None, 0))
        jax.block_until_ready(model_runner.kv_cache)
        begun = time.perf_counter()
        kv_cache.carry_out(plan(pages, 2 * max_pages, max_pages))  # also stores the pages uploaded by the plan before
        model_runner.execute(model_runner.pack(trees)).wait()
        return time.perf_counter() - begun

    times: dict[int, list[float]] = {pages: [] for pages in (0, *args.pages)}
    with progress(f"steps, swap_dtype {swap_dtype}", args.repeats) as advance:
        for i in range(args.repeats + 2):
            for pages in times:
                seconds = step(pages)
                if i >= 2:
                    times[pages].append(seconds)
            if i >= 2:
                advance()
    out_seconds, in_seconds = kv_cache.seconds
    full = model_runner.shapes[-1].tokens
    return {
        "swap_dtype": swap_dtype,
        "page_bytes": kv_cache.page_bytes,
        "out_ms": 1e3 * out_seconds,
        "in_ms": 1e3 * in_seconds,
        "prefill_token_ms": 1e3 * model_runner.profile.seconds[str(full)] / full,
        "step_ms": {str(pages): 1e3 * float(np.median(t)) for pages, t in times.items()},
    }


def _show(found: dict[str, Any]) -> None:
    console = Console()
    if "quality" in found:
        quality = found["quality"]
        rows = [{"kind": kind, **quality[kind]} for kind in KINDS]
        columns = ("perplexity", "{:.4f}", "perplexity"), ("positions", "{:,}", "positions"), ("s", "{:.0f}", "seconds")
        console.print(terminal(rows, ("KV", "{}", "kind"), *columns, title="quality on the text"))
        console.print(
            f"INT8 changes the most likely token at {quality['likeliest_changed']:.2%} of the positions, and the "
            f"log-probability of the text's token by {quality['logprob_change_mean']:.4f} on average (at most "
            f"{quality['logprob_change_max']:.3f})"
        )
    kinds = ", ".join(f"{ms:.2f} ms with KV {kind}" for kind, ms in found["pool_step_ms"].items())
    console.print(f"decoding step: {kinds}")
    for row in found["steps"]:
        times, title = row["step_ms"], f"decoding step with swapping, swap_dtype {row['swap_dtype']}"
        rows = ([pages, ms, ms / times["0"] - 1] for pages, ms in times.items())
        columns = "pages moved each way", ("ms", "{:.2f}"), ("vs. 0 pages", "{:+.1%}")
        console.print(terminal(rows, *columns, title=title))
        console.print(
            f"one page: {row['page_bytes'] / 2**20:.2f} MiB, {row['out_ms']:.2f} ms to the host, {row['in_ms']:.2f} ms "
            f"to the device; one token of a full prefill step: {row['prefill_token_ms']:.2f} ms"
        )
