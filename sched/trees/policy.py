"""What every tree policy offers, and the one that never drafts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np

from jaxspec.sched.trees.candidates import Candidates


class TreePolicy(Protocol):
    """Chooses, for all requests of a step at once, which candidates the target verifies."""

    def select(
        self, candidates: Sequence[Candidates], limits: Sequence[int], budget: int, needs: Sequence[float], others: int
    ) -> list[np.ndarray]:
        """One `[n]` bool mask per request, closed under parents and with at most `limits[i]` nodes.

        `limits` bounds what the request may still write and what the step can hold; a limit below 1 is no draft.
        `budget` draft nodes fit in the step before it becomes slow, `others` tokens of it are no drafts, and a request
        has to get `needs[i]` tokens from it to keep its latency target (minus infinity without one): each policy heeds
        what it knows of.
        """
        ...


class Off:
    """No speculation: chooses nothing."""

    def select(
        self, candidates: Sequence[Candidates], limits: Sequence[int], budget: int, needs: Sequence[float], others: int
    ) -> list[np.ndarray]:
        return [c.mask() for c in candidates]
