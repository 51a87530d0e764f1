"""What a tree policy is: which candidates of the drafters the target verifies."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from jaxspec.sched.spec.trees.candidates import Candidates


class TreePolicy(Protocol):
    """Chooses, for all requests of a step at once, which candidates the target verifies."""

    def select(
        self, candidates: Sequence[Candidates], limits: Sequence[int], room: int, needs: Sequence[float], others: int
    ) -> list[np.ndarray]:
        """One `[n]` bool mask per request, closed under parents and with at most `limits[i]` nodes.

        `limits` bounds what the request may still write and what the step can hold; a limit below 1 is no draft.
        `room` draft nodes fit in the step before it becomes slow, `others` tokens of it are no drafts, and a request
        has to get `needs[i]` tokens from it to keep its latency target (minus infinity without one): each policy heeds
        what it knows of.
        """
        ...


class Off:
    """No speculation: chooses nothing."""

    def select(
        self, candidates: Sequence[Candidates], limits: Sequence[int], room: int, needs: Sequence[float], others: int
    ) -> list[np.ndarray]:
        return [c.mask() for c in candidates]


@dataclass(frozen=True, slots=True)
class SharedNodes:
    """`nodes` bounds the draft nodes of all requests together, roots not among them; None: the step's budget does."""

    nodes: int | None = None

    def __post_init__(self) -> None:
        if self.nodes is not None and self.nodes < 0:
            raise ValueError(f"the number of nodes is negative: {self.nodes}")

    def within(self, room: int) -> int:
        """Draft nodes of a step that has room for `room`."""
        return max(room, 0) if self.nodes is None else self.nodes
