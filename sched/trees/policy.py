"""What every tree policy offers, and the one that never drafts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np

from jaxspec.sched.trees.candidates import Candidates


class TreePolicy(Protocol):
    """Chooses, for all requests of a step at once, which candidates the target verifies.

    What stays the same from step to step (a budget, a shape) belongs to the constructor. AdaServe's selection needs one
    number more, each request's A(r), which changes at every step: it would come as a further argument parallel to
    `candidates`, `needs: Sequence[float] | None = None`, that the other policies accept and ignore. Its budget and
    n_max are the constructor's, and what a step or request cannot hold is in `limits` already.
    """

    def select(self, candidates: Sequence[Candidates], limits: Sequence[int]) -> list[np.ndarray]:
        """One `[n]` bool mask per request, closed under parents and with at most `limits[i]` nodes.

        `limits` bounds what the request may still write and what the step can hold; a limit below 1 is no draft.
        """
        ...


class Off:
    """No speculation: chooses nothing."""

    def select(self, candidates: Sequence[Candidates], limits: Sequence[int]) -> list[np.ndarray]:
        return [c.mask() for c in candidates]
