"""SPIN's experiments in the simulator: goodput (Fig. 10), draft choice (Fig. 11), verification (Fig. 4 and 12),
pipeline (Fig. 13), and their dependence on the assumptions."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from jaxspec.bench.papers.spin import systems
from jaxspec.bench.papers.spin.difficulty import EASE, SSMS, WINDOW, Dataset, accepted
from jaxspec.bench.papers.spin.oracle import Heard
from jaxspec.bench.papers.spin.systems import (
    AS_MEASURED,
    CALIBRATIONS,
    CHOICES,
    CONCURRENCY,
    SYSTEMS,
    VANILLA,
    Costs,
    System,
)
from jaxspec.sched.sim.cost import LLAMA_V100, Cost, StepLoad
from jaxspec.sched.sim.workload import CHARACTERS_PER_TOKEN, Lengths, no_turns, read_lengths

LLM = "llama-7b"
#: Target models of Fig. 10 by calibration, and of Fig. 11.
LLMS: Mapping[str, Sequence[str]] = {"as measured": tuple(LLAMA_V100), "roofline": (LLM,)}
CHOSEN_FOR = (LLM, "llama-30b")
#: Longest answer, in tokens.
LONGEST = 512
#: Fig. 4 and 12: batch sizes.
BATCHES = (1, 2, 4, 8, 16, 32)
PADDING = {"padded": True, "packed": False}
#: Fig. 13: micro-batches (None: as many as the heuristic finds), and requests at once. Nine micro-batches need nine
#: requests on one draft model, so the paper's batch size must have exceeded the 8 of Fig. 10.
PARTS, CROWDS = (1, 2, 3, 4, 5, 7, 9, None), (8, 32)
#: Standard deviations of the residual of a request's rates, in logits.
RESIDUALS = (0.0, 0.3, 0.6, 1.0, 1.5, 2.5)
ORACLES = {name: CHOICES[name] for name in (systems.ORACLE, systems.TOGETHER)}
#: Output lengths in tokens, and settings of LBSS to compare.
ANSWERS = (50, 150, 500)
LBSS_SETTINGS: Sequence[Mapping[str, Any]] = (
    {"exploration": 2, "chunk": 2},
    {"exploration": 2, "chunk": 2, "prior_epoch": 1},
    {"exploration": 2, "chunk": 2, "prior": False},
    {"exploration": 12, "chunk": 4},
    {"exploration": 6, "chunk": 2},
    {"exploration": 6, "chunk": 2, "prior": False},
    {"exploration": 2, "chunk": 1},
    {"exploration": 2, "chunk": 1, "prior": False},
    {"exploration": 1, "chunk": 1},
    {"exploration": 1, "chunk": 1, "prior": False},
    {"exploration": 1, "chunk": 1, "prior_slots": 1.0},
    {"exploration": 1, "chunk": 1, "prior_slots": 16.0},
)

Point = dict[str, float]
Advance = Callable[[], None]


def read_datasets(args: argparse.Namespace) -> dict[str, Dataset]:
    """The data sets of the options, by name. Raises OSError or ValueError."""
    alpaca, chatbot, answers = (
        capped(read_lengths(path)) for path in (args.alpaca, args.chatbot, args.chat_answers)
    )  # fmt: skip
    cp = replace(answers, input=np.resize(prompts(args.chat), len(answers)))
    one = {"alpaca": alpaca, "cp": cp, "cip": chatbot}
    return {
        **{name: Dataset([lengths], [EASE[name]]) for name, lengths in one.items()},
        "mix": Dataset([*one.values()], [EASE[name] for name in one]),
    }


def prompts(path: str | Path) -> np.ndarray:
    """Tokens of each line's first turn `[rows]`. Raises OSError, or ValueError if a line has none."""
    try:
        texts = [json.loads(line)["turns"][0] for line in Path(path).read_text(encoding="utf-8").splitlines()]
        return np.array([max(1, round(len(text) / CHARACTERS_PER_TOKEN)) for text in texts])
    except (json.JSONDecodeError, KeyError, IndexError, TypeError) as error:
        raise ValueError(f"{path}: {no_turns(error)}") from None


def capped(table: Lengths) -> Lengths:
    return replace(table, output=np.minimum(table.output, LONGEST))


@dataclass(frozen=True, slots=True)
class Bench:
    """Runs systems on the same requests."""

    jobs: int
    seeds: Sequence[int]
    advance: Advance

    def point(
        self, system: System, data: Dataset, costs: Costs = AS_MEASURED, llm: str = LLM, concurrency: int = CONCURRENCY
    ) -> Point:  # fmt: skip
        """Metrics of a system, means over the seeds: `goodput`'s, accepted tokens per verification (`round`), and all
        tokens per second of the slots' own time (`own`, see `Heard`)."""
        found = []
        for seed in self.seeds:
            requests = data.requests(max(self.jobs, 6 * concurrency), seed)
            run = systems.simulation(system, costs, llm, requests, seed, concurrency)
            heard = None
            if run.speculator is not None and run.speculator.choice is not None:
                heard = run.speculator.choice = Heard(run.speculator.choice)
            served = run.run()
            own = {"own": concurrency * heard.tokens / heard.seconds} if heard else {}
            rounds = max(1, int(served.rounds.sum()))
            found.append({**systems.goodput(served), "round": float(served.accepted.sum()) / rounds, **own})
        self.advance()
        return {key: float(np.mean([one[key] for one in found])) for key in found[0]}

    def each(self, systems: Mapping[str, System], data: Dataset, *where: Any) -> dict[str, Point]:
        return {name: self.point(system, data, *where) for name, system in systems.items()}


def simulate(args: argparse.Namespace, advance: Advance = lambda: None) -> dict[str, Any]:
    """The numbers of all experiments; calls `advance` once per run (`points()` in total). Raises OSError or ValueError
    if the data cannot be read."""
    data = read_datasets(args)
    bench = Bench(args.jobs, range(args.seed, args.seed + (args.seeds or 1)), advance)
    return {
        "jobs": args.jobs, "repeats": len(bench.seeds), "window": WINDOW,
        "lengths": {name: [float(np.mean([t.input.mean() for t in own.lengths])),
                           float(np.mean([t.output.mean() for t in own.lengths]))] for name, own in data.items()},
        "facts": {name: facts(own) for name, own in data.items()},
        "goodput": {kind: {llm: {name: bench.each(SYSTEMS, own, CALIBRATIONS[kind], llm) for name, own in data.items()}
                           for llm in llms} for kind, llms in LLMS.items()},
        "selection": {llm: {name: bench.each(CHOICES, own, AS_MEASURED, llm) for name, own in data.items()}
                      for llm in CHOSEN_FOR},
        "verification": {name: verification(bench, own, AS_MEASURED) for name, own in data.items()},
        "speedup": {kind: speedup(bench, data["alpaca"], costs) for kind, costs in CALIBRATIONS.items()},
        "pipeline": {str(concurrency): {name: pipeline(bench, data[name], concurrency) for name in ("alpaca", "cp")}
                     for concurrency in CROWDS},
        "residual": {str(s): residual(bench, data["alpaca"].differing(s)) for s in RESIDUALS},
        "settings": {str(n): settings(bench, data["alpaca"].writing(n)) for n in ANSWERS},
    }  # fmt: skip


def facts(data: Dataset) -> dict[str, Any]:
    """Share of requests that each draft model serves fastest (Fig. 2) in a batch as in Fig. 10, and mean rates."""
    drawn = data.requests(20_000, 0).rates
    step = usual_step(AS_MEASURED.targets[LLM])
    seconds = np.array(
        [step + AS_MEASURED.drafts[name].seconds(CONCURRENCY, 2 * CONCURRENCY, WINDOW, 1) for name in SSMS]
    )
    best = ((1 + accepted(drawn)) / seconds).argmax(1)
    return {
        "best": (np.bincount(best, minlength=len(SSMS)) / len(best)).tolist(), "rates": drawn.mean(0).tolist(),
    }  # fmt: skip


def usual_step(cost: Cost) -> float:
    """Seconds to verify a batch of Alpaca requests, padded."""
    return cost.seconds(StepLoad(CONCURRENCY * (1 + WINDOW), 0, 189 * CONCURRENCY))


# --- Fig. 4 and 12 ----------------------------------------------------------------------------------------------------


class Log:
    """Wraps a cost model and records the loads."""

    def __init__(self, cost: Cost) -> None:
        self._cost = cost
        self.loads: list[StepLoad] = []

    def seconds(self, load: StepLoad) -> float:
        self.loads.append(load)
        return self._cost.seconds(load)

    def verifying(self) -> list[StepLoad]:
        """Decode steps while requests waited for a slot, without the loads of `step_times`, which have no context."""
        last = max(i for i, load in enumerate(self.loads) if load.starting)
        return [load for load in self.loads[:last] if load.context and not load.starting]


def verification(bench: Bench, data: Dataset, costs: Costs) -> dict[str, dict[str, Point]]:
    """Padded and packed, by batch size: mean milliseconds, tokens and KV positions of a verification of 68M's drafts,
    and peak gigabytes of KV."""
    found: dict[str, dict[str, Point]] = {}
    for name, padded in PADDING.items():
        for concurrency in BATCHES:
            log = Log(costs.targets[LLM])
            bench.point(
                replace(VANILLA["68M"], padded=padded), data, replace(costs, targets={LLM: log}), LLM, concurrency
            )
            loads = log.verifying()
            found.setdefault(name, {})[str(concurrency)] = {
                "ms": 1e3 * float(np.mean([costs.targets[LLM].seconds(load) for load in loads])),
                "tokens": float(np.mean([load.tokens for load in loads])),
                "positions": float(np.mean([load.context for load in loads])),
                "gigabytes": max(load.context for load in loads) * LLAMA_V100[LLM].kv_bytes / 1e9,
            }
    return found


def speedup(bench: Bench, data: Dataset, costs: Costs) -> dict[str, dict[str, Point]]:
    """All tokens/s padded and packed, by batch size, without drafts and with two draft models."""
    compared = {"none": systems.NONE, **{name: VANILLA[name] for name in ("68M", "1.1B")}}
    return {
        name: {
            str(concurrency): {
                key: bench.point(replace(own, padded=padded), data, costs, LLM, concurrency)["tokens"]
                for key, own in compared.items()
            }
            for concurrency in BATCHES
        }
        for name, padded in PADDING.items()
    }


# --- Fig. 13, and the assumptions -------------------------------------------------------------------------------------


def pipeline(bench: Bench, data: Dataset, concurrency: int) -> dict[str, dict[str, Point]]:
    """Packed, by number of micro-batches: finishing with their step as in the engine, and flowing across steps."""

    def point(parts: int | None, flowing: bool) -> Point:
        system = replace(SYSTEMS[systems.SPIN], micro_batches=parts, flowing=flowing)
        return bench.point(system, data, AS_MEASURED, LLM, concurrency)

    return {
        name: {str(parts): point(parts, flowing) for parts in PARTS}
        for name, flowing in (("steps", False), ("flowing", True))
    }


def residual(bench: Bench, data: Dataset) -> dict[str, Point]:
    """Each draft model alone, LBSS, and both oracles."""
    return bench.each({**VANILLA, systems.LEARNED: CHOICES[systems.LEARNED], **ORACLES}, data)


def settings(bench: Bench, data: Dataset) -> dict[str, Any]:
    """LBSS with each of `LBSS_SETTINGS`, both oracles, and each draft model alone."""
    compared = {str(i): System(systems.LBSS.but(lbss=own)) for i, own in enumerate(LBSS_SETTINGS)}
    found = bench.each({**compared, **ORACLES, **VANILLA}, data)
    return {"settings": [found.pop(name) for name in compared], **found}


def points() -> int:
    """Number of runs of `simulate`."""
    runs = 4 * sum(map(len, LLMS.values())) * len(SYSTEMS) + 4 * len(CHOSEN_FOR) * len(CHOICES)
    runs += (4 + 3 * len(CALIBRATIONS)) * len(PADDING) * len(BATCHES) + 4 * len(CROWDS) * len(PARTS)
    return runs + len(RESIDUALS) * (len(SSMS) + 3) + len(ANSWERS) * (len(LBSS_SETTINGS) + 2 + len(SSMS))
