"""Serves a workload under a policy, simulated or on the engine: shared by the papers' experiments."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np

from jaxspec.bench.record import drive
from jaxspec.outputs import RequestMetrics
from jaxspec.sampling_params import SamplingParams
from jaxspec.sched.config import PolicyConfig, SchedulerConfig
from jaxspec.sched.kv.page_pool import PagePool
from jaxspec.sched.request import Request
from jaxspec.sched.scheduler import Scheduler
from jaxspec.sched.sim import arrivals
from jaxspec.sched.sim.acceptance import Acceptance
from jaxspec.sched.sim.cost import Cost
from jaxspec.sched.sim.simulator import Served, Simulation
from jaxspec.sched.sim.workload import Lengths, Workload, join

if TYPE_CHECKING:
    from jaxspec.llm import LLM

PAGE_SIZE = 16
#: From the turn to its requests, with their SLOs, and the prompts' token ids.
Jobs = Callable[[int], tuple[Workload, Sequence[Sequence[int]]]]
#: Serves a workload with its prompts on an engine: `once` or `to_eos`.
Serve = Callable[["LLM", Workload, Sequence[Sequence[int]]], list[RequestMetrics]]


def simulate(
    policy: PolicyConfig, concurrency: int, workload: Workload, cost: Cost, acceptance: Acceptance | None = None,
    draft_length: int = 0, probe: tuple[int, Callable[[Request], float]] | None = None,
) -> Served:  # fmt: skip
    """Simulate `concurrency` requests at once, with enough KV pages for all requests."""
    limit = int((workload.input + workload.caps).max())
    token_budget = max(2048, concurrency)
    pages = len(workload) * -(-limit // PAGE_SIZE)
    config = SchedulerConfig(concurrency, token_budget, limit, None, max(concurrency, 64), policy)
    scheduler = Scheduler(config, PagePool(pages, PAGE_SIZE, enable_prefix_caching=False))
    return Simulation(scheduler, workload, cost, acceptance, draft_length, probe=probe).run()


def once(llm: LLM, work: Workload, ids: Sequence[Sequence[int]]) -> list[RequestMetrics]:
    """Serve the workload with the prompts `ids`; returns each request's metrics.

    Every request generates exactly its output length, which only oracles know: its `max_tokens` is the workload's, or
    without one `MAX_TOKENS` or what the context leaves.
    """
    caps = work.caps
    if work.max_tokens is None:
        caps = np.maximum(work.output, np.minimum(caps, llm.engine.max_model_len - work.input))
    params = [SamplingParams(temperature=0, max_tokens=n, ignore_eos=True) for n in caps.tolist()]
    return drive(
        llm.engine, work.arrival.tolist(), ids, params, expected=work.output.tolist(), end_as_expected=True,
        slos=work.slos,
    )  # fmt: skip


def to_eos(llm: LLM, work: Workload, ids: Sequence[Sequence[int]]) -> list[RequestMetrics]:
    """As `once`, but requests end at EOS or at their `max_tokens`; only oracles use the workload's output lengths."""
    params = [SamplingParams(temperature=0, max_tokens=n) for n in work.caps.tolist()]
    return drive(llm.engine, work.arrival.tolist(), ids, params, expected=work.output.tolist(), slos=work.slos)


def answered(llm: LLM, arrival: np.ndarray, ids: Sequence[Sequence[int]], max_tokens: int) -> Workload:
    """A workload for `to_eos` from the arrival times `[requests]` and the prompts `ids`, with `max_tokens` or what the
    context leaves.

    Its output lengths are those of the greedy answers. They do not depend on the policy, so one run gives them for all.
    Text that is forced past EOS repeats itself, which drafters predict too well.
    """
    inputs = np.array([len(prompt) for prompt in ids])
    caps = np.minimum(max_tokens, llm.engine.max_model_len - inputs)
    params = [SamplingParams(temperature=0, max_tokens=n) for n in caps.tolist()]
    outputs = np.array([m.output_tokens for m in drive(llm.engine, [0.0] * len(ids), ids, params)])
    return Workload(arrival, inputs, outputs, np.full(len(ids), np.nan), max_tokens=caps)


def turns(
    contenders: Mapping[str, LLM], jobs: Jobs, repeats: int, advance: Callable[[], None], serve: Serve = once
) -> dict[str, list[list[RequestMetrics]]]:
    """Metrics of `repeats` turns of each contender, after one for warm-up.

    In a turn all contenders serve the same requests one after the other, with `serve`.
    """
    results: dict[str, list[list[RequestMetrics]]] = {name: [] for name in contenders}
    for repeat in range(repeats + 1):
        work, ids = jobs(repeat)
        for name, llm in contenders.items():
            metrics = serve(llm, work, ids)
            if repeat:
                results[name].append(metrics)
            advance()
    return results


def mean_jct(metrics: Sequence[RequestMetrics]) -> float:
    """Mean job completion time in seconds."""
    return float(np.mean([m.e2e for m in metrics if m.e2e is not None]))


def random_jobs(contenders: Mapping[str, LLM], table: Lengths, count: int, rate: float, seed: int) -> Jobs:
    """`count` requests per turn at `rate` per second with the table's lengths, for which the text does not matter."""
    vocabulary = next(iter(contenders.values())).engine.model_config.vocab_size
    low = min(256, vocabulary // 2)  # skips special tokens, which usually have the lowest ids

    def turn(repeat: int) -> tuple[Workload, list[list[int]]]:
        rng = np.random.default_rng([seed, repeat])
        work = join(arrivals.poisson(count, rate, rng), table, 32, rng)
        return work, [rng.integers(low, vocabulary, n).tolist() for n in work.input.tolist()]

    return turn
