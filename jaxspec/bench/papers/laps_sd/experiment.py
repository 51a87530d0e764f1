"""LAPS-SD (Li et al. 2025): speculative decoding ordered by attained service, then by estimated execution time.

N requests arrive at once and are served one at a time (§3) by LLaMA-7B with LLaMA-68M on an L20 (§5.1). Chains of 8
drafts as in SpecInfer, whose setup the paper follows. Output lengths are those of the prompt files' answers, at four
characters per token.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from jaxspec.bench import options, prompts
from jaxspec.bench.papers import page
from jaxspec.bench.papers.headlines import Headline
from jaxspec.bench.papers.laps_sd import report
from jaxspec.bench.papers.laps_sd.report import LAPS_SD, LAS, LATE, LP_SJF, STABILITY, TYPICAL
from jaxspec.bench.papers.page import File
from jaxspec.bench.papers.presets import Preset, engines, overrides
from jaxspec.bench.papers.serving import answered, mean_jct, simulate, to_eos, turns
from jaxspec.progress import progress
from jaxspec.sched.config import PolicyConfig
from jaxspec.sched.order.laps_sd import LapsSd, LapsSdSettings
from jaxspec.sched.plan import RequestResult
from jaxspec.sched.request import Request
from jaxspec.sched.sim import arrivals
from jaxspec.sched.sim.acceptance import Process, Sampled
from jaxspec.sched.sim.cost import LLAMA_7B_L20, Linear, StepLoad
from jaxspec.sched.sim.workload import Lengths, Workload, join, read_lengths
from jaxspec.sched.slots import ORDERS

COUNTS = (10, 20, 30, 40, 50)
QUEUES = (2, 3, 4, 5, 6, 8, 10)
SPREADS = (0.0, 0.1, 0.2, 0.3, 0.4)
#: SpecInfer's requests end after this many tokens.
CAP = 128
REPEATS, DRAFTS = 40, 8
#: Probability that a draft token is accepted if the one before it is. SpecInfer (Miao et al. 2024), Table 2: with
#: chains of 8 from LLaMA-68M, LLaMA-7B has a mean accepted length of 2.73 on Chatbot Instruction Prompts, that is 0.64.
#: LAPS-SD §5.2 says that MBPP has higher rates (assumed: 0.75) and nothing of MiniThinky (assumed: as the first). How
#: rates differ between requests and settle is shown for three requests without numbers, so the spread, and the
#: settling within about 150 tokens as in Fig. 3, are assumptions.
PROCESSES = {
    "chat": Process(0.64, 0.15, wander=1.0, settle=50), "code": Process(0.75, 0.12, wander=1.0, settle=50),
    "math": Process(0.64, 0.15, wander=1.0, settle=50),
}  # fmt: skip
#: With a switch every 80 ms of service, LAS spends as much time on switches as in Fig. 2 (see `sched/sim/cost.py`).
QUANTUM_MS = 80.0


def stable_at(stability: tuple[int, float]) -> dict[str, Any]:
    """γ and δ as `LapsSdSettings` fields."""
    return {"window": stability[0], "tolerance": stability[1]}


#: With known output lengths.
PRESETS: Mapping[str, Preset] = {
    report.FCFS: Preset("fcfs"),
    LP_SJF: Preset("lp_sjf").but(predictor="oracle"),
    LAS: Preset("las"),
    LAPS_SD: Preset("laps_sd").but(predictor="oracle", laps_sd=stable_at(STABILITY[0])),
    TYPICAL: Preset("laps_sd_typical").but(predictor="oracle"),
}


TITLE = "LAPS-SD"
FILES = {
    "chat": File("prompts/alpaca_gpt4.jsonl", "JSONL", "stand-in for Chatbot Instruction Prompts"),
    "code": File("prompts/mbpp.jsonl", "JSONL", "MBPP"),
    "math": File("prompts/math500.jsonl", "JSONL", "stand-in for MiniThinky"),
}


def headlines(kept: Mapping[str, Any]) -> list[Headline]:
    return []


def add_arguments(parser: argparse.ArgumentParser) -> None:
    engine = parser.add_argument_group("with --engine")
    options.add_numbers(engine, ("--engine-tokens N", 256, "max_tokens of the requests"))
    engine.add_argument("--engine-draft", default="ngram", metavar="D", help="the drafter (default: ngram)")


def read(args: argparse.Namespace) -> tuple[dict[str, Lengths], dict[str, list[str]]]:
    """Lengths and prompts by data set. Raises OSError or ValueError."""
    tables = {name: read_lengths(getattr(args, name)) for name in PROCESSES}
    return tables, {name: prompts.load(getattr(args, name)) for name in PROCESSES}


def run(args: argparse.Namespace) -> None:
    """Run the experiments and write the page. Raises `BenchError` if the data cannot be read or a run fails."""
    page.run(
        args, TITLE, FILES, read, lambda args, _, tables, __: simulated(args, tables), on_engine, report.sections,
        report.draw,
    )  # fmt: skip


# --- simulated --------------------------------------------------------------------------------------------------------


def orders(
    queues: int = 4, stability: tuple[int, float] = STABILITY[0], cost: Linear = LLAMA_7B_L20
) -> dict[str, PolicyConfig]:
    """The policies of Fig. 5 with known output lengths, plus variants: late stability, known acceptance rates, and
    `unknown: typical`."""
    verify = cost.seconds(StepLoad(1 + DRAFTS))
    laps = {
        "queues": queues, "draft_tokens": DRAFTS, "draft_token_ms": 1e3 * cost.draft_level, "verify_ms": 1e3 * verify,
        **stable_at(stability),
    }  # fmt: skip
    presets = {
        LP_SJF: PRESETS[LP_SJF],
        LAS: PRESETS[LAS].but(las={"quantum_ms": QUANTUM_MS}),
        LAPS_SD: PRESETS[LAPS_SD].but(laps_sd=laps),
        LATE: PRESETS[LAPS_SD].but(laps_sd={**laps, **stable_at(STABILITY[-1])}),
        report.KNOWN: PRESETS[LAPS_SD].but(laps_sd={**laps, "acceptance": "oracle"}),
        TYPICAL: PRESETS[TYPICAL].but(laps_sd=laps),
    }
    return {name: preset.load().policy for name, preset in presets.items()}


def simulated(args: argparse.Namespace, tables: Mapping[str, Lengths]) -> dict[str, Any]:
    """Run all simulated experiments. Returns mean latencies in seconds, and the errors of Fig. 7."""
    repeats, seed = args.seeds or REPEATS, args.seed
    free = replace(LLAMA_7B_L20, swap=0.0)
    chat, chats = tables["chat"], PROCESSES["chat"]
    equal = Lengths(chat.input, np.full(len(chat), CAP), chat.predicted)
    total = len(tables) * (len(COUNTS) + 3 * len(QUEUES) + len(STABILITY)) + 2 * len(SPREADS) + len(STABILITY) + 2
    with progress("experiments", total) as advance:

        def point(
            table: Lengths,
            process: Process,
            count: int,
            policies: Mapping[str, PolicyConfig] | None = None,
            **more: Any,
        ) -> dict[str, float]:
            advance()
            return mean_latency(table, process, count, policies or orders(), repeats=repeats, seed=seed, **more)

        by_count = {name: {str(n): point(tables[name], PROCESSES[name], n) for n in COUNTS} for name in tables}
        by_queues: dict[str, dict[str, dict[str, float]]] = {}
        errors: dict[str, dict[str, dict[str, float | None]]] = {}
        for name, table in tables.items():
            process = PROCESSES[name]
            by_queues[name] = {
                str(n): {str(k): point(table, process, n, {LATE: orders(k)[LATE]})[LATE] for k in QUEUES}
                for n in (10, 30, 50)
            }
            errors[name] = {}
            for stability in STABILITY:
                settings = ORDERS.section_of(orders(stability=stability)[LAPS_SD])
                found = estimation_error(table, process, LLAMA_7B_L20, settings, 40 * repeats, seed)
                errors[name][str(stability[1])] = found
                advance()
        by_spread = {
            "lengths of the answers": {str(s): point(chat, replace(chats, spread=s), 30) for s in SPREADS},
            f"{CAP} tokens each": {str(s): point(equal, replace(chats, spread=s), 30) for s in SPREADS},
        }
        variations = {
            f"γ = {window}, δ = {tolerance}": point(chat, chats, 30, orders(stability=(window, tolerance)))
            for window, tolerance in STABILITY
        } | {
            "switching costs nothing": point(chat, chats, 30, cost=free),
            "LP-SJF's lengths wrong by σ = 0.5": point(chat, chats, 30, noise=0.5),
        }
    return {
        "repeats": repeats, "by_count": by_count, "by_queues": by_queues, "by_spread": by_spread, "errors": errors,
        "variations": variations,
    }  # fmt: skip


def mean_latency(
    table: Lengths, process: Process, count: int, policies: Mapping[str, PolicyConfig], repeats: int, seed: int,
    cost: Linear = LLAMA_7B_L20, noise: float = 0.0,
) -> dict[str, float]:  # fmt: skip
    """Mean latency in seconds over `repeats` runs per policy; all policies get the same requests and acceptances.

    noise: log-normal error (σ) of the lengths that LP-SJF sees.
    """
    found: dict[str, list[float]] = {name: [] for name in policies}
    for repeat in range(repeats):
        for name, policy in policies.items():
            rng = np.random.default_rng([seed, count, repeat])
            work = join(arrivals.burst(count), table, 32, rng)
            drafts = Sampled(process, count, rng)
            if noise and name == LP_SJF:
                policy = policy.model_copy(update={"predictor": "noisy_oracle", "predictor_noise": noise})
            found[name].append(float(simulate(policy, 1, work, cost, drafts, DRAFTS).jct.mean()))
    return {name: float(np.mean(values)) for name, values in found.items()}


def estimation_error(
    table: Lengths, process: Process, cost: Linear, settings: LapsSdSettings, count: int, seed: int
) -> dict[str, float | None]:
    """Serves `count` requests alone, with known lengths.

    Returns `mean`: mean absolute error of the first estimate in per cent, None without estimates; `perceived`: share of
    requests that get an estimate; `stable_after`: mean share of their rounds after which they get it.
    """
    rng, drafts = np.random.default_rng(seed), round(settings.draft_tokens or 0)
    outputs, sampled = rng.choice(table.output, count).tolist(), Sampled(process, count, rng)
    errors, shares = [], []
    for i, output in enumerate(outputs):
        order, request = LapsSd(settings), Request(str(i), 32, [0] * 32, output, 0.0)
        request.predicted_len = output
        estimate: float | None = None
        took, rounds, stable, produced = 0.0, 0, 0, 1  # prefill generates the first token
        while produced < output:
            drafted, accepted = sampled.round(i, produced, drafts)
            load = StepLoad(1 + drafted, context=request.prompt_len + produced, drafting=1, levels=drafted)
            seconds = cost.seconds(load)
            request.proposed += drafted
            request.accepted += accepted
            request.attained += seconds
            order.observe(request, RequestResult((0,) * (accepted + 1), proposed=drafted, accepted=accepted), seconds)
            produced += accepted + 1
            took += seconds
            rounds += 1
            if estimate is None and (estimate := order.perceived(request)) is not None:
                stable = rounds
        sampled.forget(i)
        if estimate is not None:
            errors.append(abs(estimate / took - 1))
            shares.append(stable / rounds)
    if not errors:
        return {"mean": None, "perceived": 0.0, "stable_after": 1.0}
    return {
        "mean": 100 * float(np.mean(errors)), "perceived": len(errors) / count, "stable_after": float(np.mean(shares)),
    }  # fmt: skip


# --- on the engine ----------------------------------------------------------------------------------------------------


def on_engine(
    args: argparse.Namespace, tables: Mapping[str, Lengths], texts: Mapping[str, Sequence[str]]
) -> dict[str, Any]:
    """Mean latencies in seconds, `{data: {order: [turns]}}`: real prompts, 32 of all three kinds and 20 of each.

    They are answered to EOS or `--engine-tokens`. A run before each turn gives the oracles the answers' lengths.
    """
    from jaxspec.models.load.tokenizer import chat_ids

    repeats = args.repeats or 5
    counts = {report.MIXED: 32, **dict.fromkeys(tables, 20)}
    settings = {
        "max_num_seqs": 1, "draft": [args.engine_draft], "tree": "chain", "draft_depth": DRAFTS,
        "enable_prefix_caching": False,  # only the first engine serves all prompts beforehand
        **overrides(args),
    }  # fmt: skip
    results: dict[str, Any] = {}
    with (
        progress("turns", len(counts) * len(PRESETS) * (repeats + 1)) as advance,
        engines({name: preset.but(**settings) for name, preset in PRESETS.items()}, args.model) as loaded,
    ):
        first = next(iter(loaded.values()))
        for name, count in counts.items():

            def workload(repeat: int, kind: str = name, count: int = count) -> tuple[Workload, list[list[int]]]:
                rng = np.random.default_rng([args.seed, repeat])
                kinds = list(tables) if kind == report.MIXED else [kind]
                drawn = [kinds[i % len(kinds)] for i in range(count)]
                rng.shuffle(drawn)
                ids = [chat_ids(first.tokenizer, prompts.choose(texts[k], 1, rng)[0]) for k in drawn]
                return answered(first, np.zeros(count), ids, args.engine_tokens), ids

            measured = turns(loaded, workload, repeats, advance, to_eos)
            results[name] = {order: [mean_jct(turn) for turn in metrics] for order, metrics in measured.items()}
    return {"requests": counts, "max_tokens": args.engine_tokens, "draft": args.engine_draft, "latency": results}
