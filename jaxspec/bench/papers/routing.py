"""Compares routing policies from 1 to 1,000 replicas, simulated on the same requests.

Requests are Azure's conversations with lengths divided by four, so that 1,000 replicas can be simulated, at nine tenths
of what the replicas can do; further parts have whole lengths, a trace with shared prefixes (Mooncake's), rarer reports
and a replica that becomes slow. Each replica is LAPS-SD's device (LLaMA-7B on an L20) with 16 slots, in the part with
prefixes Llama-3.1-8B on an H200 with 64. Writes docs/results/routing.md.
"""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from random import Random
from typing import Any

import numpy as np

from jaxspec.bench import BenchError, options
from jaxspec.bench.estimates import estimate, means
from jaxspec.bench.papers import page
from jaxspec.bench.papers.page import File
from jaxspec.bench.papers.routing_report import NAME, TITLE, draw, sections
from jaxspec.bench.papers.runs import Result, Runs
from jaxspec.errors import explained
from jaxspec.sched.config import PolicyConfig, SchedulerConfig
from jaxspec.sched.kv.page_pool import PagePool
from jaxspec.sched.routing import Health, HealthSettings, Router, make_routing
from jaxspec.sched.scheduler import Scheduler
from jaxspec.sched.sim import arrivals
from jaxspec.sched.sim.arrivals import Arrival
from jaxspec.sched.sim.cluster import Change, Cluster, ClusterServed
from jaxspec.sched.sim.cost import LLAMA_3_8B_H200, LLAMA_7B_L20, Cost, Scaled, StepLoad, step_times
from jaxspec.sched.sim.ledger import Ledger
from jaxspec.sched.sim.simulator import Served, Simulation
from jaxspec.sched.sim.workload import Workload, join
from jaxspec.sched.slo import Slo

FILES = {
    "trace": File("traces/azure_llm_2023_conv.csv", "CSV", "Azure's conversations, with lengths"),
    "blocks": File("traces/mooncake_conversation.jsonl", "JSONL", "Mooncake's conversations, with hash_ids"),
}  # fmt: skip
ROUTINGS = ("round_robin", "power_of_two", "least_loaded", "prefix_aware", "predicted")
REPLICAS = (1, 2, 4, 16, 64, 256, 1000)
#: Requests per replica, and replicas over which a seed's numbers are at least: fewer are simulated several times.
EACH, TOGETHER = 16, 16
#: Replicas of the further parts, and requests per replica there; the same where the part needs a longer time.
SOME, MORE, FEW, LONG = 16, 40, 4, 100
LOAD, QUARTER = 0.9, 4
LARGE = 256
#: Share of the requests before those that are measured: replicas begin empty.
WARM = 0.5
INTERVALS = (0.1, 0.5, 2.0)
#: How much slower one replica becomes, and from and to which share of the run.
SLOWER, ILL = 10.0, (0.3, 0.7)
#: Error of the predicted lengths (as `predictor_noise`), tokens of a step, and of a page.
ERROR, BUDGET, PAGE = 0.5, 512, 128
#: Prompts of the trace that are longer are cut, and outputs.
LONGEST, MAX_TOKENS = 32_768, 2048


@dataclass(frozen=True, slots=True)
class Device:
    """A replica's device, its slots, its KV positions, and the SLO of its requests."""

    cost: Cost
    slots: int
    positions: int
    slo: Slo

    def capacity(self, inputs: float, outputs: float) -> float:
        """Requests per second of a full replica, for these mean lengths."""
        step = self.cost.seconds(StepLoad(self.slots, context=round(self.slots * (inputs + outputs / 2))))
        token = (self.cost.seconds(StepLoad(BUDGET)) - self.cost.seconds(StepLoad(1))) / BUDGET
        return 1 / (inputs * token + outputs * step / self.slots)


#: 48e9 bytes, less the weights and 1e9 bytes, at 0.5 MiB per position.
L20 = Device(LLAMA_7B_L20, 16, 60_000, Slo(ttft=0.5, tpot=0.1))
WHOLE_L20 = replace(L20, slo=Slo(ttft=2.0, tpot=0.1))
H200 = Device(LLAMA_3_8B_H200.cost, 64, LLAMA_3_8B_H200.positions, Slo(ttft=2.0, tpot=0.05))
#: By the part of the experiment.
DEVICES: Mapping[str, Device] = {"quarter": L20, "whole": WHOLE_L20, "prefixes": H200}


@dataclass(frozen=True, slots=True)
class Case:
    """One simulation. `part`: which requests; `ill`: whether a replica becomes slow; `health`: whether it is then taken
    out."""

    part: str
    routing: str
    replicas: int
    each: int
    seed: int
    interval: float = 0.1
    ill: bool = False
    health: bool = True

    @property
    def repeats(self) -> int:
        """Independent runs of this case whose requests are taken together."""
        return max(1, TOGETHER // self.replicas) if self.part == "quarter" and not self.ill else 1


@dataclass(frozen=True, slots=True)
class Data:
    trace: Sequence[Arrival]
    blocks: Sequence[Arrival]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--data", metavar="DIR", help="folder with the files of traces")
    page.add_files(parser, FILES)
    parser.add_argument(
        "--replicas", nargs="+", type=options.count, default=list(REPLICAS), metavar="N",
        help="numbers of replicas (default: 1 to 1,000)",
    )  # fmt: skip
    options.add_numbers(
        parser,
        ("--each N", EACH, "requests per replica"),
        ("--more N", MORE, "the same in the further parts"),
        ("--long N", LONG, "the same with prefixes or a slow replica"),
    )
    parser.add_argument("--seeds", type=options.count, default=5, metavar="N", help="default: 5")
    parser.add_argument(
        "--large-seeds", type=options.count, metavar="N", help=f"with more than {LARGE} replicas (default: --seeds)"
    )
    parser.add_argument(
        "--processes", type=options.count, default=os.cpu_count() or 1, metavar="N",
        help="simulations at the same time (default: one per core); the router's times are best with 1",
    )  # fmt: skip
    parser.add_argument(
        "--keep", default="build/papers", metavar="DIR", help="folder of single results, to go on after a stop"
    )
    parser.add_argument("--out", default="build/routing", metavar="DIR", help="output folder (default: %(default)s)")
    parser.add_argument("--json", metavar="FILE", help="write a copy of all numbers to this file")


def run(args: argparse.Namespace) -> int:
    """Simulate, write the page, and print its first table. Raises `BenchError` if the data cannot be read."""
    page.find_files(args, FILES)
    try:
        data = Data(arrivals.trace(args.trace), arrivals.trace(args.blocks))
        if any(a.blocks is None for a in data.blocks):
            raise ValueError(f"{args.blocks}: not every row has hash_ids")
    except (OSError, ValueError) as error:
        raise BenchError(explained(error)) from None
    numbers = simulated(args, Runs(Path(args.keep) / f"{NAME}.jsonl", args.processes), data)
    kept = page.publish(args, NAME, TITLE, "simulated", numbers, sections)
    draw(Path(args.out) / f"{NAME}.png", kept["simulated"]["scaling"])
    print(sections(kept)["latency"])
    print(f"\nTables: {Path(args.out) / 'routing.md'}")
    return 0


def simulated(args: argparse.Namespace, runs: Runs, data: Data) -> dict[str, Any]:
    """All numbers of the page."""

    parts: dict[str, list[Case]] = {
        # One replica is the same with every policy.
        "scaling": [
            Case("quarter", routing, n, args.each, 0)
            for n in args.replicas for routing in (ROUTINGS if n > 1 else ROUTINGS[:1])
        ],
        "whole": [Case("whole", routing, SOME, args.more, 0) for routing in ROUTINGS],
        "prefixes": [Case("prefixes", routing, FEW, args.long, 0) for routing in ROUTINGS],
        "reports": [
            Case("quarter", routing, SOME, args.more, 0, interval=seconds)
            for seconds in INTERVALS for routing in ("power_of_two", "least_loaded", "predicted")
        ],
        "slow": [
            Case("quarter", routing, SOME, args.long, 0, ill=True, health=health)
            for routing in ROUTINGS for health in (False, True)
        ],
    }  # fmt: skip

    def seeds(case: Case) -> list[Case]:
        count = args.seeds if case.replicas <= LARGE else args.large_seeds or args.seeds
        return [replace(case, seed=seed) for seed in range(count)]

    found = runs.results(
        "simulations", serve, data,
        sorted(
            (one for cases in parts.values() for case in cases for one in seeds(case)), key=lambda case: case.replicas
        ),
    )  # fmt: skip
    minutes = sum(one["seconds"] for one in found.values()) / 60
    out: dict[str, Any] = {"seeds": args.seeds, "load": LOAD, "minutes": round(minutes, 1)}
    for name, cases in parts.items():
        out[name] = [
            {"routing": c.routing, "replicas": c.replicas, "requests": c.repeats * c.replicas * c.each,
             "interval": c.interval, "health": c.health, **means([found[one] for one in seeds(c)])}
            for c in cases
        ]  # fmt: skip
    _relative(out["scaling"], [[found[one] for one in seeds(case)] for case in parts["scaling"]])
    return out


def _relative(rows: Sequence[dict[str, Any]], results: Sequence[Sequence[Result]]) -> None:
    """Add throughput and goodput relative to linear: to those of the smallest number of replicas with the first policy,
    the mean over the seeds. Both are relative to what was asked for already, so the number of replicas cancels.
    `results`: of each row, by seed."""
    first = min(range(len(rows)), key=lambda i: rows[i]["replicas"])
    for key in ("throughput", "goodput"):
        alone = float(np.mean([one[key] for one in results[first]]))
        for row, own in zip(rows, results, strict=True):
            row[f"linear {key}"] = estimate([one[key] / alone for one in own])


def trace_of(data: Data, part: str) -> list[Arrival]:
    """The trace with the lengths of this part of the experiment; those that exceed the context are cut."""
    divisor = QUARTER if part == "quarter" else 1
    return [
        replace(
            a, input_tokens=min(max(1, (a.input_tokens or 1) // divisor), LONGEST),
            output_tokens=min(max(1, (a.output_tokens or 1) // divisor), MAX_TOKENS),
        )
        for a in (data.blocks if part == "prefixes" else data.trace)
    ]  # fmt: skip


def requests(rows: Sequence[Arrival], case: Case, repeat: int) -> tuple[Workload, float]:
    """The requests of a run, the same for all policies, and how many of them come per second and replica.

    The traffic of n replicas is that of n random parts of the trace together, each at the rate of one replica and
    shifted by a random part of a gap. The part with prefixes is one part of its trace, which a cluster shares.
    """
    rng = np.random.default_rng([case.seed, case.replicas, repeat])
    device = DEVICES[case.part]
    inputs, outputs = np.array([(a.input_tokens, a.output_tokens) for a in rows], float).mean(0).tolist()
    rate = LOAD * device.capacity(inputs, outputs)
    if case.part == "prefixes":
        arrived = arrivals.part(rows, case.replicas * case.each, case.replicas * rate, rng)
    else:
        parts = [
            (arrivals.part(rows, case.each, rate, rng), float(rng.uniform(0, 1 / rate))) for _ in range(case.replicas)
        ]
        arrived = [replace(a, time=a.time + shift) for part, shift in parts for a in part]
        arrived.sort(key=lambda a: a.time)
    work = join(arrived, None, 1, rng)
    return replace(work, max_tokens=np.full(len(work), MAX_TOKENS)), rate


def serve(data: Data, case: Case) -> Result:
    """The numbers of a case: over all requests after the warm-up, mean seconds of TTFT and JCT, the TTFT's 99 %
    quantile, and the share that met their SLO; output tokens per second, and tokens of requests that met their SLO,
    relative to what is asked for; share of prefix hits, imbalance, decisions per second."""
    begun, rows = time.process_time(), trace_of(data, case.part)
    device, runs, rates = DEVICES[case.part], list[ClusterServed](), list[float]()
    for repeat in range(case.repeats):
        work, rate = requests(rows, case, repeat)
        runs.append(_run(work, device, case))
        rates.append(rate)
    warm = 0.0 if case.ill else WARM
    after = [int(warm * len(one.served.workload)) for one in runs]

    def all_of(values: Callable[[Served], np.ndarray]) -> np.ndarray:
        return np.concatenate([values(one.served)[first:] for one, first in zip(runs, after, strict=True)])

    ttft, tpot = all_of(lambda s: s.first_token - s.workload.arrival), all_of(lambda s: s.tpot)
    output = all_of(lambda s: s.workload.output)
    met = (ttft <= (device.slo.ttft or np.inf)) & ~(tpot > (device.slo.tpot or np.inf))
    throughput = [_throughput(one.served, case, rate, warm) for one, rate in zip(runs, rates, strict=True)]
    return {
        "throughput": float(np.mean(throughput)), "goodput": int(output[met].sum()) / int(output.sum()),
        "ttft": float(ttft.mean()), "p99": float(np.quantile(ttft, 0.99)), "jct": float(all_of(lambda s: s.jct).mean()),
        "met": float(met.mean()), "hits": float(np.mean([one.hit_share for one in runs])),
        "imbalance": float(np.mean([one.imbalance for one in runs])),
        "decisions": sum(one.decisions for one in runs) / sum(one.decision_seconds for one in runs),
        "seconds": time.process_time() - begun,
    }  # fmt: skip


def _throughput(served: Served, case: Case, rate: float, warm: float) -> float:
    """Output tokens per second while requests arrive, after the warm-up, relative to those that are asked for. A
    request's tokens are spread evenly over its decoding."""
    end = (case.each - 1) / rate
    begin = warm * end
    span = np.maximum(served.finished - served.first_token, 1e-9)
    within = np.clip(served.finished, begin, end) - np.clip(served.first_token, begin, end)
    output = served.workload.output
    return float((within / span * output).sum() / (end - begin) / (case.replicas * rate * output.mean()))


def _run(work: Workload, device: Device, case: Case) -> ClusterServed:
    policy = PolicyConfig(predictor="noisy_oracle", predictor_noise=ERROR, policy_seed=case.seed)
    room = LONGEST + MAX_TOKENS
    ledger = Ledger(work, min(room, device.positions), device.slo)
    parts: list[Simulation] = []
    for _ in range(case.replicas):
        limits = SchedulerConfig(device.slots, BUDGET, room, None, 64, policy, times=step_times(device.cost, BUDGET))
        pool = PagePool(device.positions // PAGE, PAGE, enable_prefix_caching=work.prompts is not None)
        parts.append(Simulation(Scheduler(limits, pool), work, device.cost, ledger=ledger))
    health = HealthSettings(out_for=2.0) if case.health else HealthSettings(slow_factor=1e9)
    router = Router(make_routing(case.routing, Random(case.seed)), Health(health))
    changes: list[Change] = []
    if case.ill:
        begin, end = (float(work.arrival[-1]) * share for share in ILL)
        changes = [Change(begin, 0, Scaled(device.cost, SLOWER)), Change(end, 0, device.cost)]
    return Cluster(parts, ledger, router, case.interval, changes, clock=time.perf_counter).run()
