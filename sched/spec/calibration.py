"""Calibration: acceptance rates observed for a drafter's stated probabilities."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from jaxspec.sched.spec.trees.candidates import Candidates
from jaxspec.sched.spec.trees.forest import Forest

#: Edges of the bins in which acceptance is counted, by the drafter's probability of a node given its parent.
BIN_EDGES = (0.02, 0.05, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 0.97)
_LOG_EDGES: list[float] = np.log(BIN_EDGES).tolist()
#: Replaces the log-probability -inf of an empty place, so that differences stay finite.
_EMPTY = -1e3
#: Observations that a prior counts for, and after how many an observation weighs 1/e.
_PRIOR, _MEMORY = 4.0, 1000.0
#: Accepted nodes that the prior of a level's correction counts for.
_LEVEL_PRIOR = 20.0
#: Weights of the old value and of the prior when an `AcceptanceRecord` takes in an observation.
_KEEP, _RETURN = 0.97, 0.03


@dataclass(slots=True)
class FadingRate:
    """A success rate in which older observations fade; `prior` counts as a few observations."""

    prior: float
    trials: float = 0.0
    successes: float = 0.0

    @property
    def value(self) -> float:
        return (self.successes + _PRIOR * self.prior) / (self.trials + _PRIOR)

    def observe(self, success: bool) -> None:
        keep = 1 - 1 / _MEMORY
        self.trials, self.successes = self.trials * keep + 1, self.successes * keep + success


@dataclass(slots=True)
class AcceptanceRecord:
    """Expected and actual number of accepted draft nodes, of one request or of one level; both fade."""

    expected: float = _PRIOR
    accepted: float = _PRIOR

    @property
    def factor(self) -> float:
        """Actual / expected acceptance: above 1 where drafts do better than average."""
        return self.accepted / self.expected

    def observe(self, expected: float, accepted: int) -> None:
        self.expected = _KEEP * self.expected + _RETURN * _PRIOR + expected
        self.accepted = _KEEP * self.accepted + _RETURN * _PRIOR + accepted


class Verified(NamedTuple):
    """A candidate that is verified, or would be: its index, its parent's (-1: the root), its level from 1 on, and its
    log-probability given its parent."""

    node: int
    parent: int
    level: int
    logprob: float


def verified_nodes(candidates: Candidates, nodes: Iterable[int]) -> list[Verified]:
    """These candidates as `Verified`."""
    parents, paths = list[int](candidates.parent.tolist()), list[float](candidates.logprob.tolist())
    levels, out = candidates.depths(), list[Verified]()
    for i in nodes:
        above = parents[i]
        own = max(paths[i], _EMPTY) - (max(paths[above], _EMPTY) if above >= 0 else 0.0)
        out.append(Verified(i, above, levels[i], own))
    return out


class Calibration:
    """P(node accepted | parent accepted) of one drafter, from its stated probability and the node's level.

    Small drafters are overconfident, and more so the more of their own tokens they condition on. Acceptance is counted
    per probability bin, and each level's rate is scaled by observed / predicted acceptance at that level.
    """

    def __init__(self) -> None:
        middles = [0.01, *((a + b) / 2 for a, b in zip(BIN_EDGES, [*BIN_EDGES[1:], 1.0], strict=True))]
        self._bins = [FadingRate(m) for m in middles]
        self._levels: list[AcceptanceRecord] = []

    def rates(self) -> npt.NDArray[np.float64]:
        """Acceptance rate of each probability bin, `[bins]`, before the correction by level."""
        return np.asarray([b.value for b in self._bins])

    def of_level(self, level: int) -> float:
        """Correction factor of the rates at `level` (1, 2, …); 1 for a level without observations."""
        return self._levels[level - 1].factor if 0 < level <= len(self._levels) else 1.0

    def observe(self, logprob: float, accepted: bool, level: int) -> None:
        """Count one verified node whose parent was accepted; `logprob` is its own, given the parent."""
        rate = self._bins[bisect_left(_LOG_EDGES, logprob)]
        self._levels += [AcceptanceRecord(_LEVEL_PRIOR, _LEVEL_PRIOR) for _ in range(level - len(self._levels))]
        keep = 1 - 1 / _MEMORY
        record = self._levels[level - 1]
        record.expected = keep * record.expected + (1 - keep) * _LEVEL_PRIOR + rate.value
        record.accepted = keep * record.accepted + (1 - keep) * _LEVEL_PRIOR + accepted
        rate.observe(accepted)

    def expected_accepted(self, nodes: Iterable[Verified]) -> float:
        """Expected number of accepted ones among `nodes` of one tree: the sum of their `chances` if the request's
        drafts are accepted as often as those of the others. Parents come first, all are there, and no node is an empty
        place."""
        chance, total = {-1: 1.0}, 0.0
        for node, parent, level, logprob in nodes:
            rate = self._bins[bisect_left(_LOG_EDGES, logprob)].value * self.of_level(level)
            chance[node] = chance[parent] * min(1.0, rate)
            total += chance[node]
        return total


def chances(
    forest: Forest, calibrations: Sequence[Calibration], records: Sequence[AcceptanceRecord]
) -> npt.NDArray[np.float64]:
    """P(accepted) of each candidate, `[N]`: calibrated rates multiplied along its path; 0 for empty places.

    One entry per tree: `calibrations` of the drafter that proposed it, `records` of its request with that drafter,
    whose factor scales the chances of the first level, at most to 1.
    """
    distinct = list({id(c): c for c in calibrations}.values())
    index = {id(c): i for i, c in enumerate(distinct)}
    rates = np.stack([c.rates() for c in distinct])
    levels = np.asarray([[c.of_level(level) for level in range(forest.height + 1)] for c in distinct])
    row = np.asarray([index[id(c)] for c in calibrations])[forest.tree]
    path = np.maximum(forest.logprob, _EMPTY)
    conditional = path - np.append(path, path.dtype.type(0))[forest.parent]
    chance = rates[row, np.searchsorted(_LOG_EDGES, conditional)] * levels[row, forest.depth]
    chance[path <= _EMPTY] = 0.0
    factor = np.asarray([record.factor for record in records])[forest.tree]
    chance = np.minimum(1.0, np.where(forest.depth == 1, factor * chance, chance))
    return forest.propagate(chance, 1.0, np.multiply)
