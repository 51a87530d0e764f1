"""The cases of LAPS-SD's simulated experiments, by name."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import product
from typing import Any, TypeVar

from jaxspec.bench.papers.laps_sd import cases
from jaxspec.bench.papers.laps_sd.cases import CHAT, PROCESSES, Case
from jaxspec.bench.papers.laps_sd.report import LAS, LATE, SHRUNK, STABILITY, TITLES
from jaxspec.bench.papers.laps_sd.systems import BLIND, COMPARED
from jaxspec.sched.sim.acceptance import Process

#: Requests of Fig. 5 and of Fig. 6, of all other experiments, and of two variations.
COUNTS, CROWDS = (10, 20, 30, 40, 50), (10, 30, 50)
REQUESTS, SIZES = 50, (20, 200)
QUEUES = (2, 3, 4, 5, 6, 8, 10)
#: Fig. 6: upper service bound of the last queue but one, in ms, for any number of queues: about twice the mean
#: execution time of the data set.
RANGE_MS = {"chat": 4000.0, "code": 800.0, "math": 3000.0}
#: The map: arrivals (the load relative to the capacity; None: all at once), errors of the predicted lengths, and
#: spreads of the acceptance rate over requests.
ARRIVALS: Sequence[float | None] = (None, 0.7, 1.0, 1.5)
SIGMAS = (0.0, 0.25, 0.5, 1.0)
SPREADS = (0.0, 0.1, 0.15, 0.2, 0.26, 0.33, 0.4)
LOADS: Sequence[float | None] = (0.3, 0.5, 0.7, 0.9, 1.2, 1.5, 2.0, 3.0, None)
MEANS, LONGEST_CHAINS = (0.3, 0.5, 0.64, 0.8), (2, 4, 8, 16, 32)
QUANTA = (20.0, 40.0, 80.0, 160.0, 320.0)
#: Fig. 2: output lengths, and the number of requests that alternate.
SWITCHED, ALTERNATING = (100, 200, 300, 400, 500), 10
#: SpecInfer's requests end after 128 tokens.
SHORT = 128
#: The variations differ from this in one setting.
MIDDLE: Mapping[str, Any] = {"load": 1.5, "process": replace(CHAT, spread=0.2)}
#: Answers of vicuna-13b with a trained predictor's lengths.
ANSWERS = "answers"
T = TypeVar("T")


def thin(values: Sequence[T], quick: bool) -> Sequence[T]:
    """All values, or two or three of them from the first on."""
    return values[:: max(1, len(values) // 2)] if quick else values


def in_chat(seeds: Sequence[int], systems: Sequence[str] = COMPARED, **settings: Any) -> list[Case]:
    """Cases with the lengths of Chatbot Instruction Prompts."""
    return cases.cases(systems, seeds, "chat", BLIND, **{"count": REQUESTS, **settings})


def map_of(seeds: Sequence[int], quick: bool) -> dict[tuple[str, str, str], list[Case]]:
    """Cases by arrivals, error of the lengths and spread."""
    return {
        (str(load), str(sigma), str(spread)): in_chat(
            seeds, load=load, sigma=sigma, process=replace(CHAT, spread=spread)
        )
        for load, sigma, spread in product(
            *(thin(values, quick) for values in (ARRIVALS, SIGMAS, SPREADS))
        )
    }  # fmt: skip


def loads(seeds: Sequence[int], systems: Sequence[str], quick: bool) -> dict[str, list[Case]]:
    """Cases for each load, by load."""
    return {str(load): in_chat(seeds, systems, **{**MIDDLE, "load": load}) for load in thin(LOADS, quick)}


def variations(seeds: Sequence[int], quick: bool) -> dict[str, list[Case]]:
    """Cases that differ in one setting from `MIDDLE`."""
    middle = MIDDLE["process"]
    found: dict[str, dict[str, Any]] = {"nothing": {}}
    found |= {f"mean acceptance {mean}": {"process": replace(middle, mean=mean)} for mean in thin(MEANS, quick)}
    found |= {f"{n} drafts": {"drafts": n} for n in thin(LONGEST_CHAINS, quick)}
    found |= {f"{n} requests": {"count": n} for n in SIZES}
    found |= {f"at most {n} tokens": {"cap": n} for n in (SHORT, 2 * SHORT)}
    found |= {
        f"γ = {gamma}, δ = {delta}": {"laps": (("window", gamma), ("tolerance", delta))} for gamma, delta in STABILITY
    }
    found["shrinkage"] = {"laps": (("shrinkage", True),)}
    found["acceptance settles at once"] = {"process": replace(middle, wander=0.0)}
    found["switching costs nothing"] = {"swap": False}
    found |= {f"LAS with {q:g} ms": {"quantum_ms": q} for q in (*thin(QUANTA, quick), 100.0)}
    parts = {name: in_chat(seeds, **{**MIDDLE, **settings}) for name, settings in found.items()}
    for name in ("code", "math"):
        parts[f"lengths of {TITLES[name]}"] = cases.cases(COMPARED, seeds, name, BLIND, count=REQUESTS, **MIDDLE)
    return parts


#: Acceptance of this project's drafts for SmolLM2-135M, fitted as by `bench record`: 24 prompts each, greedy, chains of
#: 8, answers to EOS or 192 tokens. Forced past EOS, HumanEval's answers had a mean of 0.82 and a spread of 0.26.
MEASURED: Mapping[str, Process] = {
    "n-gram, HumanEval": Process(0.865, 0.206, wander=1.3, settle=152, memory=0.97),
    "smollm2-eagle, HumanEval": Process(0.505, 0.088, wander=1.45, settle=91, memory=0.09),
    "n-gram, MBPP": Process(0.790, 0.167, wander=1.5, settle=128, memory=0.85),
    "n-gram, MATH-500": Process(0.800, 0.146, wander=2.05, settle=54, memory=0.50),
    "n-gram, Alpaca": Process(0.863, 0.182, wander=4.0, settle=13, memory=0.79),
}


def measured(seeds: Sequence[int], quick: bool) -> dict[str, list[Case]]:
    """Cases with measured acceptance and a trained predictor's lengths, with answers to EOS or a cap."""
    found = {}
    for name in thin(tuple(MEASURED), quick):
        for cap, load in product((256, None), thin(ARRIVALS, quick)):
            key = f"{name} | {cap or 'EOS'} | {load}"
            found[key] = cases.cases(
                (*COMPARED, SHRUNK), seeds, ANSWERS, BLIND, count=REQUESTS, load=load, sigma=None,
                process=MEASURED[name], cap=cap,
            )  # fmt: skip
    return found


def switching(seeds: Sequence[int], quick: bool) -> dict[str, list[Case]]:
    """Fig. 2: requests of the same length alternate under LAS."""
    steady = replace(CHAT, spread=0.0, wander=0.0)
    return {
        f"{quantum:g} | {n}": cases.cases(
            [LAS], seeds, f"{n} tokens", BLIND, count=ALTERNATING, process=steady, quantum_ms=quantum
        )
        for quantum in thin(QUANTA, quick) for n in thin(SWITCHED, quick)
    }  # fmt: skip


def queues(seeds: Sequence[int], quick: bool) -> dict[str, list[Case]]:
    """Fig. 6: a fixed range of service divided into more or fewer queues, with requests that become stable late."""
    return {
        f"{name} | {n} | {k}": cases.cases(
            [LATE], seeds, name, count=n, process=PROCESSES[name],
            laps=(("queues", k), ("first_threshold_ms", RANGE_MS[name] / 2 ** (k - 2))),
        )
        for name in PROCESSES for n in CROWDS for k in thin(QUEUES, quick)
    }  # fmt: skip
