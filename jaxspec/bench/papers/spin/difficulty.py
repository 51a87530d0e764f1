"""SPIN's requests: acceptance rates per draft model, from a model that reproduces the few published facts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from jaxspec.sched.sim.draft_cost import SPIN_SSMS
from jaxspec.sched.sim.workload import Lengths, Workload

SSMS = tuple(SPIN_SSMS)
#: Draft tokens per chain: the paper's prediction window, whose size it does not give.
WINDOW = 4
#: Logit of each draft model's acceptance rate at ease 0, and its slope in the ease.
CAPABILITY = (0.2, 0.49, 1.92, 3.43, 0.99)
USE_OF_EASE = (1.0, 1.29, 0.51, 0.49, 0.45)
#: Standard deviation of the residual, in logits.
RESIDUAL = 0.6


@dataclass(frozen=True, slots=True)
class Ease:
    """Normal distribution of the ease of a data set's requests; `spread`: standard deviation."""

    mean: float
    spread: float


#: Chosen to reproduce the facts below with the costs fitted to the paper's latencies. For CIP only the facts that hold
#: for all data sets are known.
EASE: Mapping[str, Ease] = {"alpaca": Ease(0.05, 0.1), "cp": Ease(2.1, 1.03), "cip": Ease(1.07, 0.56)}

#: Fig. 2: share of requests that 265M serves best.
BEST_WITH_265M: Mapping[str, float] = {"alpaca": 0.03, "cp": 0.40}
#: §VI-B1: the draft model that is best for all requests; 68M and 1.4B are the two worst everywhere.
BEST_FOR_ALL: Mapping[str, str] = {"alpaca": "1.1B", "cp": "265M"}
WORST_FOR_ALL = frozenset({"68M", "1.4B"})


def rates(ease: Ease, count: int, rng: np.random.Generator, residual: float = RESIDUAL) -> np.ndarray:
    """P(a draft token is accepted, given that those before it are) of requests with each model `[count, models]`:
    sigmoid(capability + slope · ease + `residual` · z) with a standard normal z for each pair."""
    drawn = rng.normal(ease.mean, ease.spread, (count, 1))
    logit = np.asarray(CAPABILITY) + np.asarray(USE_OF_EASE) * drawn
    logit += residual * rng.standard_normal(logit.shape)
    return np.clip(1 / (1 + np.exp(-logit)), 0.01, 0.99)


def accepted(rates: np.ndarray, window: int = WINDOW) -> np.ndarray:
    """Expected accepted tokens of a chain, for acceptance rates `[...]`."""
    return (rates[..., None] ** np.arange(1, window + 1)).sum(-1)


@dataclass(frozen=True, slots=True)
class Requests:
    """A workload, and the acceptance rates `[requests, models]` of each draft model for its requests."""

    work: Workload
    rates: np.ndarray


@dataclass(frozen=True, slots=True)
class Dataset:
    """Lengths and ease of one data set, or of several that are mixed equally."""

    lengths: Sequence[Lengths]
    ease: Sequence[Ease]
    residual: float = RESIDUAL

    def requests(self, count: int, seed: int) -> Requests:
        """Requests that all arrive at time 0. The same seed gives the same requests."""
        rng = np.random.default_rng(seed)
        kind = rng.integers(len(self.lengths), size=count)
        rows = [rng.integers(len(table), size=count) for table in self.lengths]
        pick = lambda name: np.choose(kind, [getattr(t, name)[r] for t, r in zip(self.lengths, rows, strict=True)])  # noqa: E731
        by_kind = np.array([rates(ease, count, rng, self.residual) for ease in self.ease])
        work = Workload(np.zeros(count), pick("input"), pick("output"), np.full(count, np.nan))
        return Requests(work, by_kind[kind, np.arange(count)])

    def differing(self, residual: float) -> Dataset:
        """A copy with another residual."""
        return replace(self, residual=residual)

    def writing(self, output: int) -> Dataset:
        """A copy with output lengths uniform between half and one and a half times `output` tokens."""
        lengths = np.arange(max(1, output // 2), 3 * output // 2)
        unknown = np.full(lengths.shape, np.nan)
        return replace(
            self, lengths=[Lengths(np.resize(t.input, lengths.shape), lengths, unknown) for t in self.lengths]
        )
