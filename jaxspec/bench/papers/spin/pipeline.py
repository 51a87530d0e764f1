"""SPIN's pipeline on the engine (Fig. 13): a drafter on its own device, and steps split into micro-batches."""

from __future__ import annotations

import argparse
import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from jaxspec.bench import BenchError, options, prompts
from jaxspec.bench.papers.presets import Preset, engines, overrides
from jaxspec.errors import explained
from jaxspec.progress import progress
from jaxspec.sampling_params import SamplingParams

if TYPE_CHECKING:
    from jaxspec.llm import LLM

#: Micro-batches per step by name; None: as many as the heuristic finds.
PARTS: Mapping[str, int | None] = {"1": 1, "2": 2, "3": 3, "4": 4, "5": 5, "6": 6, "heuristic": None}
#: Two groups of requests in turns, instead of micro-batches.
TURNS = "turns"
APART, BESIDE = "device of its own", "the target's device"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    pipeline = parser.add_argument_group(
        "with --pipeline",
        "The drafter gets its own device. On a CPU set XLA_FLAGS='--xla_force_host_platform_device_count=2"
        " --xla_cpu_multi_thread_eigen=false' JAXSPEC_THREADS=1, so that each device has one core.",
    )
    draft = "draft model (default: truncated:15, half of the default target)"
    pipeline.add_argument("--pipeline-draft", default="truncated:15", metavar="D", help=draft)
    options.add_numbers(
        pipeline,
        ("--pipeline-levels N", 4, "draft tokens per chain"),
        ("--pipeline-concurrency N", 16, "requests at once"),
        ("--pipeline-tokens N", 32, "output tokens per request"),
    )


def pipelined(args: argparse.Namespace) -> dict[str, Any]:
    """Output tokens/s and target steps of each turn, by the drafter's device and the number of micro-batches.

    Raises `BenchError` if there is only one device.
    """
    import jax

    from jaxspec.models.load.tokenizer import chat_ids

    if len(jax.devices()) < 2:
        raise BenchError("--pipeline needs two devices; for a CPU see --help")
    try:
        texts = prompts.load(args.alpaca) if args.alpaca else list(prompts.PROMPTS)
    except (OSError, ValueError) as error:
        raise BenchError(explained(error)) from None
    common = Preset("spin").but(
        draft=[args.pipeline_draft], draft_choice="fastest", tree="chain", draft_depth=args.pipeline_levels,
        max_num_seqs=args.pipeline_concurrency, max_model_len=1024,
    )  # fmt: skip
    common = common.but(**overrides(args))
    presets = {APART: common.but(draft_devices={args.pipeline_draft: 1}), BESIDE: common}
    repeats = args.repeats or 3
    with engines(presets, args.model) as loaded:
        tokenizer = loaded[APART].tokenizer
        ids = [chat_ids(tokenizer, text) for text in texts[: args.pipeline_concurrency]]
        params = SamplingParams(temperature=0, max_tokens=args.pipeline_tokens, ignore_eos=True)
        turns = [(APART, name) for name in (*PARTS, TURNS)] + [(BESIDE, "1"), (BESIDE, "heuristic")]
        found: dict[str, dict[str, list[dict[str, float]]]] = {APART: {}, BESIDE: {}}
        with progress("turns", (repeats + 1) * len(turns)) as advance:
            for repeat in range(repeats + 1):
                for place, name in turns:
                    one = turn(loaded[place], ids, params, PARTS.get(name), name == TURNS)
                    if repeat:
                        found[place].setdefault(name, []).append(one)
                    advance()
    return {
        "draft": args.pipeline_draft, "levels": args.pipeline_levels, "concurrency": args.pipeline_concurrency,
        "tokens": args.pipeline_tokens, "places": found,
    }  # fmt: skip


def turn(
    llm: LLM, ids: list[list[int]], params: SamplingParams, parts: int | None, in_turns: bool = False
) -> dict[str, float]:
    """Serve all requests with `parts` micro-batches per step, or with two groups in turns."""
    engine = llm.engine
    engine.set_speculation(engine.speculator, parts, in_turns)
    engine.reset_stats()
    begun = time.perf_counter()
    outputs = llm.generate(ids, params)
    seconds = time.perf_counter() - begun
    return {
        "tokens_per_s": sum(len(o.outputs[0].token_ids) for o in outputs) / seconds, "steps": engine.stats().steps,
    }  # fmt: skip
