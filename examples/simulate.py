"""Compare presets in the simulator: the engine's own scheduler, on a virtual clock, with a model of the step times.

    python examples/simulate.py
    python examples/simulate.py --request-rate 3 configs/fcfs.yaml configs/las.yaml

It needs no model, no JAX and no GPU. `python -m jaxspec.bench simulate` does the same with drafts and recorded loads.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from jaxspec.config import EngineConfig
from jaxspec.sched import PagePool, Scheduler, SchedulerConfig
from jaxspec.sched.sim.arrivals import poisson
from jaxspec.sched.sim.cost import load_cost, step_times
from jaxspec.sched.sim.simulator import Served, Simulation
from jaxspec.sched.sim.workload import Synthetic, Workload, join
from jaxspec.sched.slo import Slo
from jaxspec.sched.slots import PREDICTORS

CONFIGS = Path(__file__).parents[1] / "configs"
PRESETS = [str(CONFIGS / f"{name}.yaml") for name in ("fcfs", "ssjf", "las")]
#: Step times of Llama-2-7b on one A100; `python -m jaxspec.bench record` measures those of the engine.
COST = load_cost("llama-2-7b-a100")
#: The SLOs of every request, in seconds.
TTFT, TPOT = 2.0, 0.03


def simulated(preset: str, workload: Workload) -> Served:
    config = EngineConfig.load(preset, draft=[], max_num_seqs=16)
    if PREDICTORS.selected(config).reader:  # simulated requests have no text: the true length with a random error
        config = config.model_copy(update={"predictor": "noisy_oracle"})
    longest, budget = int((workload.input + workload.output).max()), config.token_budget
    limits = SchedulerConfig(
        config.max_num_seqs, budget, longest, None, config.max_num_seqs, config.policy, times=step_times(COST, budget)
    )
    pool = PagePool(config.max_num_seqs * -(-longest // config.page_size), config.page_size)
    return Simulation(Scheduler(limits, pool), workload, COST, slo=Slo(tpot=TPOT, ttft=TTFT)).run()


def main(argv: Sequence[str]) -> None:
    parser = argparse.ArgumentParser(description="Compare presets in the simulator.")
    parser.add_argument("presets", nargs="*", default=PRESETS, metavar="PRESET")
    parser.add_argument("--num-requests", type=int, default=1000)
    parser.add_argument("--request-rate", type=float, default=6.0, help="requests per second")
    args = parser.parse_args(argv)

    # The same requests for every preset: Poisson arrivals, prompts of 64 tokens, log-normal output lengths.
    rng = np.random.default_rng(0)
    arrivals = Synthetic().draw(poisson(args.num_requests, args.request_rate, rng), rng)
    workload = join(arrivals, None, 64, rng)
    within = f"share with TTFT {TTFT:g} s and TPOT {TPOT:g} s"
    print(f"{'preset':12} {'mean':>8} {'p99':>8} {'attainment':>11}   (completion time; {within})")
    for preset in args.presets:
        served = simulated(preset, workload)
        jct, ttft = served.jct, served.first_token - workload.arrival
        met = (ttft <= TTFT) & ~(served.tpot > TPOT)  # TPOT is NaN for an answer of one token, which meets any
        print(f"{Path(preset).stem:12} {jct.mean():6.2f} s {np.percentile(jct, 99):6.2f} s {met.mean():11.1%}")


if __name__ == "__main__":
    main(sys.argv[1:])
