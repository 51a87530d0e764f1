"""The tree policy of rejection sampling: verify candidates as they were sampled, without selecting among them."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from jaxspec.sched.spec.trees.candidates import Candidates
from jaxspec.sched.spec.trees.policy import StepCandidates, TreePolicy


@dataclass(frozen=True, slots=True)
class SampledTree(TreePolicy):
    """All candidates down to `levels` levels, or as many of the first as the limit allows.

    It replaces the configured policy with `acceptance: rejection`, and is `adaptive` if that one is. Rejection sampling
    keeps the target's distribution only if the selection does not depend on the sampled tokens.
    """

    levels: int
    varies_depth: bool = False
    merges = False

    @property
    def adaptive(self) -> bool:
        return self.varies_depth

    def select(self, step: StepCandidates) -> list[npt.NDArray[np.bool_]]:
        return [c.mask(self._first(c, max(limit, 0))) for c, limit in step]

    def _first(self, candidates: Candidates, limit: int) -> list[int]:
        usable = np.isfinite(candidates.logprob) & (np.asarray(candidates.depths()) <= self.levels)
        return np.flatnonzero(usable)[:limit].tolist()
