"""The drafter of a paper: EAGLE-3 for Llama-3.1-8B, as a random process fitted to the published acceptance lengths."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from jaxspec.sched.plan import ScheduledRequest
from jaxspec.sched.request import Request
from jaxspec.sched.sim.acceptance import Process
from jaxspec.sched.sim.draft_cost import FREE
from jaxspec.sched.sim.drafter import Rates, SimulatedDrafter, TreeProcess
from jaxspec.sched.spec.trees.forest import Forest
from jaxspec.sched.spec.trees.preorder import preorders

#: EAGLE-3 (Li et al. 2025, arXiv 2503.01840), Table 1: mean acceptance length τ, the bonus token included, of
#: Llama-3.1-8B-Instruct at temperature 0, by data set. Quoted from memory.
PUBLISHED: Mapping[str, float] = {
    "MT-bench": 6.13, "HumanEval": 6.74, "GSM8K": 6.23, "Alpaca": 6.70, "CNN/DM": 5.34,
}  # fmt: skip
#: Their trees are EAGLE-2's: 8 levels, of which the 10 likeliest nodes each are extended, and the 60 likeliest nodes
#: are verified.
LEVELS, WIDTH, NODES = 8, 10, 60
#: Mean chance that the first candidate is right, with which such trees get the published lengths (`fitted`).
FITTED: Mapping[str, float] = {
    "MT-bench": 0.800, "HumanEval": 0.837, "GSM8K": 0.805, "Alpaca": 0.834, "CNN/DM": 0.744,
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Tasks(Rates):
    """Requests of the data sets in turn, the first one of number `first`; or all with the same `chance`."""

    first: int = 0
    chance: float | None = None

    def rates(self, count: int, rng: np.random.Generator) -> np.ndarray:
        chances = [*FITTED.values()] if self.chance is None else [self.chance]
        return np.resize(np.roll(chances, -self.first), count)


def process(rates: Rates, choices: int = WIDTH) -> TreeProcess:
    """The drafter with these chances of its first candidate. The other constants are the process's, by assumption."""
    return TreeProcess(rates, choices=choices)


def acceptance_length(chance: float, seed: int, requests: int = 64, tokens: int = 256) -> float:
    """Mean acceptance length of the published trees, the bonus token included, with this chance of the first
    candidate."""
    outputs, rng = [tokens] * requests, np.random.default_rng([seed, LEVELS])
    drafter = SimulatedDrafter(process(Process(chance)), outputs, FREE, rng, (WIDTH,))
    running = [Request(str(i), 1, [0, 0], tokens, 0.0, computed=1) for i in range(requests)]
    rounds = produced = 0
    # The last rounds of a text are cut short by its end.
    while running := [r for r in running if r.output_len + LEVELS < tokens]:
        scheduled = [ScheduledRequest(r, r.computed, 1, NODES, LEVELS) for r in running]
        forest = Forest([c for c in drafter.propose(scheduled, lambda _: None, LEVELS, WIDTH)() if c is not None])
        drafts = preorders(forest, [c.mask(c.best(NODES)[0]) for c in forest])
        for request, draft in zip(running, drafts, strict=True):
            new = 1 + len(drafter.accepted(request, draft))
            request.tokens += [0] * new
            request.computed += new
            produced += new
        rounds += len(running)
    return produced / rounds


def fitted(length: float, seed: int = 0) -> float:
    """The chance of the first candidate that gives this acceptance length, by bisection."""
    low, high = 0.3, 0.98
    for _ in range(12):
        middle = (low + high) / 2
        low, high = (middle, high) if acceptance_length(middle, seed) < length else (low, middle)
    return (low + high) / 2
