"""SPIN's requests: how well each draft model guesses for them, by a model that has the few published facts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from jaxspec.sched.sim.draft_cost import SPIN_SSMS
from jaxspec.sched.sim.workload import Lengths, Workload

SSMS = tuple(SPIN_SSMS)
#: Draft tokens of a chain, the paper's prediction window, which it does not give.
WINDOW = 4
#: What each draft model makes of a request of ease 0, in logits, and how much ease counts with it.
CAPABILITY = (0.2, 0.49, 1.92, 3.43, 0.99)
USE_OF_EASE = (1.0, 1.29, 0.51, 0.49, 0.45)
#: Standard deviation of what neither explains, in logits.
RESIDUAL = 0.6


@dataclass(frozen=True, slots=True)
class Ease:
    """How easy a data set's requests are: normally distributed."""

    mean: float
    spread: float


#: Chosen so that the facts below come out with the costs fitted to the paper's latencies; of CIP there are only those
#: that hold for all.
EASE: Mapping[str, Ease] = {"alpaca": Ease(0.05, 0.1), "cp": Ease(2.1, 1.03), "cip": Ease(1.07, 0.56)}

#: Fig. 2: share of requests that are best served with 265M.
BEST_WITH_265M: Mapping[str, float] = {"alpaca": 0.03, "cp": 0.40}
#: §VI-B1: the draft model that is best for all requests; 68M and 1.4B are the two worst everywhere.
BEST_FOR_ALL: Mapping[str, str] = {"alpaca": "1.1B", "cp": "265M"}
WORST_FOR_ALL = frozenset({"68M", "1.4B"})


def rates(ease: Ease, count: int, rng: np.random.Generator, residual: float = RESIDUAL) -> np.ndarray:
    """P(a draft token is accepted, those before it were) of so many requests with each model `[count, models]`:
    sigmoid(capability + use · ease + `residual` · z) with a standard normal z for each pair."""
    own = rng.normal(ease.mean, ease.spread, (count, 1))
    logit = np.asarray(CAPABILITY) + np.asarray(USE_OF_EASE) * own
    logit += residual * rng.standard_normal(logit.shape)
    return np.clip(1 / (1 + np.exp(-logit)), 0.01, 0.99)


def accepted(rates: np.ndarray, window: int = WINDOW) -> np.ndarray:
    """Tokens accepted of a chain, on average `[...]`, by the rate."""
    return (rates[..., None] ** np.arange(1, window + 1)).sum(-1)


@dataclass(frozen=True, slots=True)
class Requests:
    """A workload, and how well each draft model guesses for its requests `[requests, models]`."""

    work: Workload
    rates: np.ndarray


@dataclass(frozen=True, slots=True)
class Dataset:
    """Where requests come from: lengths and ease of one or more data sets in equal parts."""

    lengths: Sequence[Lengths]
    ease: Sequence[Ease]
    residual: float = RESIDUAL

    def requests(self, count: int, seed: int) -> Requests:
        """All there at time 0. The same seed gives the same ones."""
        rng = np.random.default_rng(seed)
        kind = rng.integers(len(self.lengths), size=count)
        rows = [rng.integers(len(table), size=count) for table in self.lengths]
        pick = lambda name: np.choose(kind, [getattr(t, name)[r] for t, r in zip(self.lengths, rows, strict=True)])  # noqa: E731
        each = np.array([rates(ease, count, rng, self.residual) for ease in self.ease])
        work = Workload(np.zeros(count), pick("input"), pick("output"), np.full(count, np.nan))
        return Requests(work, each[kind, np.arange(count)])

    def differing(self, residual: float) -> Dataset:
        return replace(self, residual=residual)

    def writing(self, output: int) -> Dataset:
        """Answers of about so many tokens: half to one and a half times."""
        near = np.arange(max(1, output // 2), 3 * output // 2)
        return replace(
            self,
            lengths=[Lengths(np.resize(t.input, near.shape), near, np.full(near.shape, np.nan)) for t in self.lengths],
        )
