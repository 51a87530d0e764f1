"""SPIN's experiments in the simulator: draft models (Fig. 2 and 3), verification (Fig. 4 and 12), goodput (Fig. 10),
draft choice (Fig. 11), pipeline (Fig. 13), arrivals over time, and what the results depend on."""

from __future__ import annotations

import argparse
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from jaxspec.bench import prompts
from jaxspec.bench.estimates import Estimate, estimate, means, ratio
from jaxspec.bench.papers.runs import Result, Runs
from jaxspec.bench.papers.spin import cases, fit
from jaxspec.bench.papers.spin.cases import LONG, THREE, Alone, Case, Data
from jaxspec.bench.papers.spin.difficulty import FITTED, SSMS, WINDOW, Dataset, accepted
from jaxspec.bench.papers.spin.systems import (
    ALL,
    AS_FITTED,
    CHOICES,
    CONCURRENCY,
    EPSILON_WRITTEN,
    FLOWING,
    GREEDY,
    LEARNED,
    ORACLE,
    OURS,
    PARTS,
    SET,
    SPIN,
    STEPS,
    SYSTEMS,
    TOGETHER,
    UNPIPED,
    VANILLA,
    WAYS,
    System,
)
from jaxspec.bench.papers.spin.times import (
    AS_MEASURED,
    FAST_DRAFTS,
    FROM_SHEETS,
    LLM,
    MEASURED,
    SLOW_DRAFTS,
)
from jaxspec.bench.papers.variants import Variants
from jaxspec.sched.sim.workload import CHARACTERS_PER_TOKEN, Lengths, read_lengths

SEEDS, QUICK = 5, 2
#: Longest answer, in tokens.
LONGEST = 512
#: Target models and times of Fig. 10 other than LLaMA-7B's as measured, and the data sets that they are run on.
OTHERS: Mapping[str, tuple[str, str]] = {
    "llama-13b": ("llama-13b", MEASURED), "llama-30b": ("llama-30b", MEASURED),
    f"{LLM}, {FROM_SHEETS}": (LLM, FROM_SHEETS),
}  # fmt: skip
PUBLISHED_FOR = ("alpaca", "cp")
#: Fig. 4 and 12: batch sizes.
BATCHES: Sequence[int] = (1, 2, 4, 8, 16, 32)
#: Fig. 13: requests at once. Nine micro-batches need nine requests on one draft model, so the paper's batch size must
#: have exceeded the 8 of Fig. 10.
CROWDS: Sequence[int] = (8, 32)
#: Micro-batches with --quick.
FEW_PARTS = (1, 2, 4, None)
#: Arrival rates, relative to the requests per second that the mean single draft model serves.
LOADS: Sequence[float] = (0.5, 0.8, 1.0, 1.3, 1.6, 2.0, 2.5)
#: Output lengths in tokens for which settings of LBSS are compared.
ANSWERS: Sequence[int] = (50, 200)
#: What a result may depend on: residual of a request's rates in logits, draft times, length of answers.
VARIATIONS: Mapping[str, Mapping[str, Any]] = {
    AS_FITTED: {}, "no residual": {"residual": 0.0}, "residual σ = 1.5": {"residual": 1.5},
    "residual σ = 2.5": {"residual": 2.5}, SLOW_DRAFTS: {"times": SLOW_DRAFTS}, FAST_DRAFTS: {"times": FAST_DRAFTS},
    "answers of 500 tokens": {"output": 500},
}  # fmt: skip
COMPARED = (*VANILLA, GREEDY, EPSILON_WRITTEN, LEARNED, ORACLE, TOGETHER, UNPIPED, SPIN)


def read_datasets(args: argparse.Namespace) -> dict[str, Dataset]:
    """The data sets of the options, by name. Raises OSError or ValueError."""
    alpaca, chatbot, answers = (
        capped(read_lengths(path)) for path in (args.alpaca, args.chatbot, args.chat_answers)
    )  # fmt: skip
    cp = replace(answers, input=np.resize(prompt_lengths(args.chat), len(answers)))
    one = {"alpaca": alpaca, "cp": cp, "cip": chatbot}
    return {
        **{name: Dataset([lengths], [FITTED.ease[name]]) for name, lengths in one.items()},
        "mix": Dataset([*one.values()], [FITTED.ease[name] for name in one]),
    }


def prompt_lengths(path: str | Path) -> np.ndarray:
    """Tokens of each line's first turn `[rows]`. Raises OSError, or ValueError naming the line without one."""
    return np.array([max(1, round(len(text) / CHARACTERS_PER_TOKEN)) for text in prompts.load(path)])


def capped(table: Lengths) -> Lengths:
    return replace(table, output=np.minimum(table.output, LONGEST))


def simulated(args: argparse.Namespace, runs: Runs, datasets: Mapping[str, Dataset]) -> dict[str, Any]:
    """Run all simulated experiments: estimates over the seeds."""
    return Experiment(args, runs, datasets).measure()


class Experiment:
    """The simulations of one run of the command."""

    def __init__(self, args: argparse.Namespace, runs: Runs, datasets: Mapping[str, Dataset]) -> None:
        variants = Variants.of(args)
        presets = variants.apply({name: system.preset for name, system in ALL.items()})
        own = {name: System(presets[name], padded=False, micro_batches=None) for name in variants.systems}
        systems = {name: replace(one, preset=presets[name]) for name, one in ALL.items()} | own
        #: The systems of Fig. 10, with the user's.
        self._systems = (*SYSTEMS, *own)
        self._runs, self._data = runs, Data(systems, datasets, variants)
        self._jobs, self._quick = args.jobs, args.quick
        self._seeds = range(args.seed, args.seed + (args.seeds or (QUICK if args.quick else SEEDS)))
        self._found: dict[Case, Result] = {}

    def measure(self) -> dict[str, Any]:
        names = PUBLISHED_FOR if self._quick else tuple(self._data.datasets)
        sizes = (1, 16) if self._quick else BATCHES
        return {
            "jobs": self._jobs, "seeds": len(self._seeds), "window": WINDOW,
            "lengths": {name: [float(np.mean([t.input.mean() for t in own.lengths])),
                               float(np.mean([t.output.mean() for t in own.lengths]))]
                        for name, own in self._data.datasets.items()},
            "models": {name: models(own) for name, own in self._data.datasets.items()},
            "fit": {name: fit.Scene(name, 1000).published(FITTED)[0] for name in fit.PUBLISHED},
            "three": self._three(), "goodput": self._goodput(names), "selection": self._selection(names),
            "verification": self._verification(names, sizes), "speedup": self._speedup(sizes),
            "pipeline": self._pipeline(), "loads": self._loads(), "variations": self._variations(),
            "settings": {} if self._quick else self._settings(),
        }  # fmt: skip

    # --- runs ---------------------------------------------------------------------------------------------------------

    def _serve(self, what: str, systems: Iterable[str], datas: Iterable[str], **where: Any) -> None:
        """Run the systems on the data sets with every seed."""
        tasks = [self._case(s, d, seed, **where) for s in systems for d in datas for seed in self._seeds]
        self._found |= self._runs.results(what, cases.serve, self._data, tasks)

    def _case(self, system: str, data: str, seed: int, **where: Any) -> Case:
        return Case(system, data, seed, self._jobs, **where)

    def _values(self, metric: str, system: str, data: str, **where: Any) -> list[float]:
        """A metric of each seed's run; NaN where a system does not have it."""
        cases = [self._case(system, data, seed, **where) for seed in self._seeds]
        return [self._found[case].get(metric, float("nan")) for case in cases]

    def _point(self, system: str, data: str, **where: Any) -> dict[str, Estimate | None]:
        """Metrics, and the goodput relative to the mean, the best and the worst single draft model."""
        metrics = ("accepted", "tokens", "ttft", "requests", "own")
        out = {metric: estimate(self._values(metric, system, data, **where)) for metric in metrics}
        own = self._values("accepted", system, data, **where)
        single = [self._values("accepted", ssm, data, **where) for ssm in SSMS]
        by_mean = sorted(single, key=lambda values: float(np.mean(values)))
        return out | {
            "by mean": ratio(own, np.mean(single, axis=0).tolist()), "by best": ratio(own, by_mean[-1]),
            "by worst": ratio(own, by_mean[0]),
        }  # fmt: skip

    # --- experiments --------------------------------------------------------------------------------------------------

    def _three(self) -> dict[str, Any]:
        """Fig. 3: three random Alpaca requests with each draft model, and how often one model is best for all three."""
        draws = range(self._seeds[0], self._seeds[0] + 2 * len(self._seeds))
        tasks = [Alone(ssm, "alpaca", draw, i) for draw in draws for i in range(THREE) for ssm in SSMS]
        found = self._runs.results("three requests (Fig. 3)", cases.alone, self._data, tasks)
        best = {
            draw: {
                min(SSMS, key=lambda ssm, d=draw, i=i: found[Alone(ssm, "alpaca", d, i)]["latency"])
                for i in range(THREE)
            }
            for draw in draws
        }
        first = draws[0]
        return {
            "tokens": LONG, "draws": len(draws),
            "differ": estimate([float(len(models) > 1) for models in best.values()]),
            "speed": {s: estimate([found[t]["speed"] for t in tasks if t.ssm == s]) for s in SSMS},
            "requests": [{s: dict(found[Alone(s, "alpaca", first, i)]) for s in SSMS} for i in range(THREE)],
        }  # fmt: skip

    def _goodput(self, names: Sequence[str]) -> dict[str, Any]:
        """Fig. 10: `{target model: {data set: {system: estimates}}}`."""
        self._serve("goodput (Fig. 10)", self._systems, names)
        out = {LLM: {data: {name: self._point(name, data) for name in self._systems} for data in names}}
        gains = [[self._values("accepted", name, data) for name in (SPIN, *SSMS)] for data in names]
        relative = [[v / m for v, m in zip(own, np.mean(ssms, axis=0), strict=True)] for own, *ssms in gains]
        out[LLM]["all"] = {SPIN: {"by mean": estimate(np.mean(relative, axis=0).tolist())}}
        for name, (llm, times) in {} if self._quick else OTHERS.items():
            self._serve(f"goodput, {name} (Fig. 10)", SYSTEMS, PUBLISHED_FOR, llm=llm, times=times)
            out[name] = {
                data: {system: self._point(system, data, llm=llm, times=times) for system in SYSTEMS}
                for data in PUBLISHED_FOR
            }
        return out

    def _selection(self, names: Sequence[str]) -> dict[str, Any]:
        """Fig. 11: LLaMA-7B, and with LLaMA-30B CP only, which the paper's text gives a number of."""
        out = {}
        for llm, datas in ({LLM: names} | ({} if self._quick else {"llama-30b": ("cp",)})).items():
            self._serve(f"draft choice, {llm} (Fig. 11)", CHOICES, datas, llm=llm)
            out[llm] = {d: {name: self._choice(name, d, llm=llm) for name in CHOICES} for d in datas}
        return out

    def _choice(self, name: str, data: str, **where: Any) -> dict[str, Estimate | None]:
        """Metrics, and LBSS relative to this choice: in goodput, and in tokens of the slots' own time."""
        out = {m: estimate(self._values(m, name, data, **where)) for m in ("accepted", "tokens", "own", "ttft")}
        for key, metric in (("gain", "accepted"), ("own gain", "own")):
            own, learned = (self._values(metric, system, data, **where) for system in (name, LEARNED))
            out[key] = ratio(learned, own)
        learned = self._values("accepted", LEARNED, data, **where)
        others = [self._values("accepted", other, data, **where) for other in (GREEDY, EPSILON_WRITTEN)]
        return out | {"gain over both": ratio(learned, np.mean(others, axis=0).tolist())}

    def _verification(self, names: Sequence[str], sizes: Sequence[int]) -> dict[str, Any]:
        """Fig. 12: a verification of 68M's drafts by batch size, and the gain of packing."""
        tasks = {
            (data, way, size, seed): self._case(f"68M, {way}", data, seed, concurrency=size)
            for data in names for way in WAYS for size in sizes for seed in self._seeds
        }  # fmt: skip
        found = self._runs.results("verification (Fig. 12)", cases.verify, self._data, tasks.values())
        out: dict[str, Any] = {}
        for data in names:
            for size in sizes:
                by_way = [[found[tasks[data, way, size, seed]] for seed in self._seeds] for way in WAYS]
                for way, own in zip(WAYS, by_way, strict=True):
                    out.setdefault(data, {}).setdefault(way, {})[str(size)] = means(own)
                times = [[one["ms"] for one in own] for own in by_way]
                out[data].setdefault("gain", {})[str(size)] = ratio(*times)
        return out

    def _speedup(self, sizes: Sequence[int]) -> dict[str, Any]:
        """Fig. 4: all tokens per second relative to no drafts, on Alpaca."""
        out: dict[str, Any] = {}
        by_times = {MEASURED: sizes} | ({} if self._quick else {FROM_SHEETS: (sizes[0], sizes[-1])})
        for times, own in by_times.items():
            for way in WAYS:
                names = [f"{name}, {way}" for name in ("none", "68M", "1.1B")]
                for size in own:
                    where = {"concurrency": size, "times": times}
                    self._serve(f"speedup, {times}, {way}, {size} at once (Fig. 4)", names, ("alpaca",), **where)
                    none, *drafts = (self._values("tokens", name, "alpaca", **where) for name in names)
                    gains = {name: ratio(d, none) for name, d in zip(("68M", "1.1B"), drafts, strict=True)}
                    out.setdefault(times, {}).setdefault(way, {})[str(size)] = gains
        return out

    def _pipeline(self) -> dict[str, Any]:
        """Fig. 13: goodput relative to one micro-batch, by number; they flow, or end with their step."""
        out: dict[str, Any] = {}
        for crowd in CROWDS[:1] if self._quick else CROWDS:
            for data in PUBLISHED_FOR if crowd == CONCURRENCY and not self._quick else ("alpaca",):
                for kind in (STEPS, FLOWING):
                    names = {parts: f"{parts}, {kind}" for parts in (FEW_PARTS if self._quick else PARTS)}
                    self._serve(
                        f"pipeline, {crowd}, {data}, {kind} (Fig. 13)", names.values(), (data,), concurrency=crowd
                    )
                    one = self._values("accepted", names[1], data, concurrency=crowd)
                    out.setdefault(str(crowd), {}).setdefault(data, {})[kind] = {
                        str(parts): ratio(self._values("accepted", name, data, concurrency=crowd), one)
                        for parts, name in names.items()
                    }
        return out

    def _loads(self) -> dict[str, Any]:
        """Arrivals over time instead of a full queue, on Alpaca: latencies by rate."""
        served = [np.mean(self._values("requests", ssm, "alpaca")) for ssm in SSMS]
        names = ("68M", "1.1B", UNPIPED, SPIN, OURS, *self._systems[len(SYSTEMS) :])
        out: dict[str, Any] = {name: {} for name in names}
        for load in LOADS[1::3] if self._quick else LOADS:
            rate = round(load * float(np.mean(served)), 3)
            self._serve(f"{rate:g} requests/s", names, ("alpaca",), rate=rate)
            for name in names:
                out[name][f"{rate:g}"] = {
                    m: estimate(self._values(m, name, "alpaca", rate=rate)) for m in ("ttft", "jct", "requests")
                }
        return out

    def _variations(self) -> dict[str, Any]:
        """The gains on Alpaca where something else is assumed."""
        out: dict[str, Any] = {}
        for what, where in VARIATIONS.items():
            if self._quick and what not in (AS_FITTED, "residual σ = 2.5", SLOW_DRAFTS):
                continue
            self._serve(what, COMPARED, ("alpaca",), **where)
            accepted_of = {name: self._values("accepted", name, "alpaca", **where) for name in COMPARED}
            single = [accepted_of[ssm] for ssm in SSMS]
            best = max(single, key=lambda values: float(np.mean(values)))
            out[what] = {
                "SPIN / mean": ratio(accepted_of[SPIN], np.mean(single, axis=0).tolist()),
                "SPIN / best": ratio(accepted_of[SPIN], best), "LBSS / best": ratio(accepted_of[LEARNED], best),
                "LBSS / greedy": ratio(accepted_of[LEARNED], accepted_of[GREEDY]),
                "LBSS / ε-greedy": ratio(accepted_of[LEARNED], accepted_of[EPSILON_WRITTEN]),
                "oracle / best": ratio(accepted_of[ORACLE], best),
                "oracle / greedy": ratio(accepted_of[ORACLE], accepted_of[GREEDY]),
                "SPIN / w/o pipe.": ratio(accepted_of[SPIN], accepted_of[UNPIPED]),
            }  # fmt: skip
        return out

    def _settings(self) -> dict[str, Any]:
        """Settings of LBSS: all tokens per second relative to the oracle, and the same of the slots' own time."""
        names = (*SET, TOGETHER, "1.1B")
        out: dict[str, Any] = {}
        for output in ANSWERS:
            self._serve(f"LBSS's settings, {output} tokens", (*names, ORACLE), ("alpaca",), output=output)
            for metric in ("tokens", "own"):
                oracle = self._values(metric, ORACLE, "alpaca", output=output)
                for name in names:
                    own = self._values(metric, name, "alpaca", output=output)
                    out.setdefault(str(output), {}).setdefault(name, {})[metric] = ratio(own, oracle)
        return out


def models(data: Dataset) -> dict[str, Any]:
    """Share of requests that each draft model serves fastest (Fig. 2) in a batch as in Fig. 10, and mean rates."""
    drawn = data.requests(20_000, 0).rates
    step = AS_MEASURED.targets[LLM].seconds(fit.LOADS["alpaca"].padded)
    seconds = [step + AS_MEASURED.drafts[name].seconds(CONCURRENCY, 2 * CONCURRENCY, WINDOW, 1) for name in SSMS]
    best = ((1 + accepted(drawn)) / np.array(seconds)).argmax(1)
    return {
        "best": (np.bincount(best, minlength=len(SSMS)) / len(best)).tolist(), "rates": drawn.mean(0).tolist(),
    }  # fmt: skip
