"""Serving one workload under one policy, simulated or on the engine: what the papers' experiments have in common."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Any

import numpy as np

from jaxspec.bench import BenchError, options
from jaxspec.bench.record import drive
from jaxspec.outputs import RequestMetrics
from jaxspec.sampling_params import SamplingParams
from jaxspec.sched.config import PolicyConfig, SchedulerConfig
from jaxspec.sched.kv.page_pool import PagePool
from jaxspec.sched.scheduler import Scheduler
from jaxspec.sched.sim.acceptance import Acceptance
from jaxspec.sched.sim.cost import Cost
from jaxspec.sched.sim.simulator import Served, Simulation
from jaxspec.sched.sim.workload import Workload

if TYPE_CHECKING:
    from jaxspec.llm import LLM

PAGE_SIZE = 16


def simulate(
    policy: PolicyConfig,
    concurrency: int,
    workload: Workload,
    cost: Cost,
    acceptance: Acceptance | None = None,
    draft_length: int = 0,
) -> Served:
    """With `concurrency` requests at once and memory for all: the papers' loads are about time, not memory."""
    limit = int((workload.input + workload.output).max())
    budget = max(2048, concurrency)
    pages = len(workload) * -(-limit // PAGE_SIZE)
    config = SchedulerConfig(concurrency, budget, limit, None, max(concurrency, 64), policy)
    scheduler = Scheduler(config, PagePool(pages, PAGE_SIZE, enable_prefix_caching=False))
    return Simulation(scheduler, workload, cost, acceptance, draft_length).run()


@contextmanager
def engines(presets: Mapping[str, Mapping[str, Any]], model: str | None) -> Iterator[dict[str, LLM]]:
    """An engine for each preset of settings, by its name; they are closed at the end. Raises `BenchError`."""
    from jaxspec.llm import LLM

    with ExitStack() as stack:
        loaded = {}
        for name, settings in presets.items():
            chosen = {"model": model, **settings} if model else dict(settings)
            try:
                loaded[name] = stack.enter_context(LLM(show_progress=True, **{**options.COMPILE_ALL_FIRST, **chosen}))
            except (OSError, ValueError, RuntimeError) as error:
                raise BenchError(f"{name}: {error}") from None
        yield loaded


def turns(
    contenders: Mapping[str, LLM],
    workload: Callable[[int], tuple[Workload, Sequence[Sequence[int]]]],
    repeats: int,
    advance: Callable[[], None],
) -> dict[str, list[list[RequestMetrics]]]:
    """`repeats` measured turns of each contender after one that warms up, one after the other on the same requests.

    `workload` gives each turn's requests and their prompts' token ids. Every request writes exactly its output length,
    and has the target that the workload says.
    """
    results: dict[str, list[list[RequestMetrics]]] = {name: [] for name in contenders}
    for repeat in range(repeats + 1):
        work, ids = workload(repeat)
        for name, llm in contenders.items():
            metrics = once(llm, work, ids)
            if repeat:
                results[name].append(metrics)
            advance()
    return results


def once(llm: LLM, work: Workload, ids: Sequence[Sequence[int]]) -> list[RequestMetrics]:
    """What became of the workload's requests, whose prompts are `ids`."""
    params = [SamplingParams(temperature=0, max_tokens=n, ignore_eos=True) for n in work.output.tolist()]
    return drive(llm.engine, work.arrival.tolist(), ids, params, slos=work.slos)


def mean_jct(metrics: Sequence[RequestMetrics]) -> float:
    """Mean job completion time in seconds."""
    return float(np.mean([m.e2e for m in metrics if m.e2e is not None]))


def prompt_ids(vocabulary: int, lengths: Sequence[int], rng: np.random.Generator) -> list[list[int]]:
    """Random tokens: what they say does not matter where lengths are given."""
    low = min(256, vocabulary // 2)  # special tokens tend to be first
    return [rng.integers(low, vocabulary, n).tolist() for n in lengths]
