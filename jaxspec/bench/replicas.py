"""`bench simulate --replicas N`: several replicas behind a router, and routing policies on the same requests."""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from random import Random

from rich.console import Console
from rich.table import Table

from jaxspec.bench import options
from jaxspec.bench.report import Report, write_json
from jaxspec.bench.scenario import Scenario
from jaxspec.bench.table import Column, share, terminal
from jaxspec.config import ConfigError, EngineConfig
from jaxspec.progress import progress
from jaxspec.sched.routing import Health, HealthSettings, Router, make_routing, routing_names
from jaxspec.sched.routing.routing import ROUTINGS
from jaxspec.sched.scheduler import Scheduler
from jaxspec.sched.sim.acceptance import Acceptance
from jaxspec.sched.sim.cluster import REPORT_INTERVAL, Cluster, ClusterServed
from jaxspec.sched.sim.cost import Cost
from jaxspec.sched.sim.ledger import Ledger
from jaxspec.sched.sim.simulator import Simulation
from jaxspec.sched.sim.workload import Workload
from jaxspec.sched.slo import NONE, Slo
from jaxspec.sched.slots import Need

#: The policy without `--routing`.
DEFAULT = "predicted"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of several replicas."""
    group = parser.add_argument_group(
        "replicas",
        "Several replicas behind a router. --request-rate and --num-requests are then those of each replica.",
    )
    group.add_argument("--replicas", type=options.count, metavar="N", help="number of replicas")
    group.add_argument(
        "--routing", type=_names, metavar="POLICY[,POLICY...]",
        help=f"routing policies to compare: {', '.join(routing_names())} (default: {DEFAULT})",
    )  # fmt: skip
    group.add_argument(
        "--report-interval", type=options.finite, default=REPORT_INTERVAL, metavar="S",
        help="seconds between two reports of a replica (default: %(default)s)",
    )  # fmt: skip


def _names(text: str) -> tuple[str, ...]:
    names, known = tuple(dict.fromkeys(text.split(","))), routing_names()
    if wrong := [name for name in names if name not in known]:
        raise argparse.ArgumentTypeError(f"{wrong[0] or 'an empty name'} is not one of {', '.join(known)}")
    return names


@dataclass(frozen=True, slots=True)
class Fleet:
    """What the replicas have in common. `draft_length`: as for `Simulation`."""

    workload: Workload
    cost: Cost
    slo: Slo = NONE
    acceptance: Acceptance | None = None
    draft_length: int = 0

    def cluster(self, schedulers: Sequence[Scheduler], routing: str, seed: int, interval: float) -> Cluster:
        """Replicas with these schedulers, behind a router with this policy; its decisions are timed."""
        first = schedulers[0]
        room = min(first.config.max_model_len, first.pool.num_pages * first.pool.page_size)
        ledger = Ledger(self.workload, room, self.slo)
        parts = [
            Simulation(one, self.workload, self.cost, self.acceptance, self.draft_length, ledger=ledger)
            for one in schedulers
        ]
        # Reports that are rare on purpose are no silence.
        health = Health(HealthSettings(silent_after=max(HealthSettings().silent_after, 4 * interval)))
        router = Router(make_routing(routing, Random(seed)), health)
        return Cluster(parts, ledger, router, interval, clock=time.perf_counter)


def checked(args: argparse.Namespace, config: EngineConfig) -> list[str]:
    """Notes on what several replicas do otherwise. Raises `ValueError` or `ConfigError` for options that don't fit."""
    if args.replicas is None:
        if args.routing:
            raise ValueError("--routing needs --replicas")
        return []
    if config.draft and args.draft_length is None:
        raise ConfigError("draft: drafters are not simulated with --replicas: draft a chain (--draft-length N, or 0)")
    for name in ("plot", "timeline"):
        if getattr(args, name):
            raise ValueError(f"--{name} shows one run and cannot be combined with --replicas")
    notes = []
    if config.predictor == "none":
        for name in args.routing or (DEFAULT,):
            if Need.LENGTHS in ROUTINGS[name].needs:
                notes.append(
                    f"routing: {name}: predictor: none, so usual output lengths are expected of all requests "
                    "(for predictions: --set predictor=noisy_oracle or oracle)"
                )
    return notes


def run(scenario: Scenario) -> int:
    """Serve the same requests with each policy, print one table, and write the JSON file. Returns the exit code.

    Raises as `Cluster.run`.
    """
    for note in scenario.notes:
        print(note, flush=True)
    args, slo = scenario.args, options.seconds(scenario.slo)
    fleet = Fleet(scenario.workload, scenario.cost, slo, scenario.acceptance(), scenario.draft_length)
    reports: list[Report] = []
    for name in args.routing or (DEFAULT,):
        schedulers = [scenario.scheduler() for _ in range(args.replicas)]
        cluster = fleet.cluster(schedulers, name, args.seed, args.report_interval)
        with progress(f"{name}: percent of requests", 100) as advance:
            served = cluster.run(advance)
        report = scenario.report(served.served)
        report.extra["busy_fraction"] /= args.replicas
        report.extra |= {"replicas": args.replicas, "routing": name, **routed(served)}
        reports.append(report)
    Console().print(table(reports))
    if args.json:
        policies = {report.extra["routing"]: report.to_json() for report in reports}
        write_json(args.json, {"kind": "simulate", "notes": scenario.notes, "policies": policies})
    return 0


def routed(served: ClusterServed) -> dict[str, float]:
    """What only a cluster has: prefix hits, imbalance, and the router's decisions per second of wall time."""
    seconds = served.decision_seconds
    return {
        "prefix_hit_share": served.hit_share, "imbalance": served.imbalance,
        "decisions_per_s": served.decisions / seconds if seconds > 0 else 0.0,
    }  # fmt: skip


def table(reports: Iterable[Report]) -> Table:
    """One row per policy."""
    columns: list[Column] = [
        ("routing", "{}", lambda r: r.extra["routing"]),
        ("tokens/s", "{:,.0f}", lambda r: r.output_tokens_per_s),
        ("TTFT ms", "{:,.0f}", lambda r: r.ttft_ms.mean), ("p99", "{:,.0f}", lambda r: r.ttft_ms.p99),
        ("JCT ms", "{:,.0f}", lambda r: r.e2e_ms.mean), ("SLO", share, lambda r: r.slo_attainment),
        ("hits", share, lambda r: r.extra["prefix_hit_share"]),
        ("imbalance", "{:.2f}", lambda r: r.extra["imbalance"]),
        ("decisions/s", "{:,.0f}", lambda r: r.extra["decisions_per_s"]),
    ]  # fmt: skip
    return terminal(
        reports, *columns, title="routing policies, simulated",
        caption="p99: of the TTFT; SLO: attainment; hits: prompt tokens found in prefix caches; decisions/s: wall time",
        caption_justify="left",
    )  # fmt: skip
