"""AdaServe's workloads (§6.1): requests of three categories, each with its TPOT SLO."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from jaxspec.sched.sim.arrivals import Arrival
from jaxspec.sched.sim.workload import Lengths, Workload, join

NAMES = ("strict", "moderate", "relaxed")
#: Shares of the categories in Fig. 4 and 5.
MIX = (0.6, 0.2, 0.2)
#: Table 2: TPOT SLOs in seconds of moderate and relaxed requests. That of strict ones depends on the baseline latency.
TARGETS: Mapping[str, tuple[float, float]] = {
    "llama-2-7b": (0.03, 0.1), "llama-2-13b": (0.03, 0.1), "llama-2-70b": (0.06, 0.1),
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Categories:
    """Each category's table of lengths and its TPOT SLO in seconds."""

    lengths: tuple[Lengths, Lengths, Lengths]
    targets: tuple[float, float, float]

    def workload(
        self, arrivals: Sequence[Arrival], shares: Sequence[float], rng: np.random.Generator
    ) -> tuple[Workload, np.ndarray]:
        """One request per arrival, with its category drawn by `shares`. Returns the categories `[requests]` too."""
        kind = rng.choice(3, size=len(arrivals), p=shares)
        by_kind = [join(arrivals, table, 32, rng) for table in self.lengths]
        pick = lambda name: np.choose(kind, [getattr(one, name) for one in by_kind])  # noqa: E731
        tpot = np.asarray(self.targets)[kind]
        return replace(by_kind[0], input=pick("input"), output=pick("output"), tpot=tpot), kind


def capped(table: Lengths, context: int) -> Lengths:
    """Lengths cut to the context: the output to at most half of it, the prompt to the rest."""
    output = np.minimum(table.output, context // 2)
    return Lengths(np.clip(table.input, 1, context - output), output, table.predicted)


def strict_share(share: float) -> tuple[float, float, float]:
    """Shares of the categories for a share of strict requests (Fig. 6); the other two get half of the rest each."""
    return share, (1 - share) / 2, (1 - share) / 2
