"""The interface of a tree policy."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt

from jaxspec.sched.spec.trees.candidates import Candidates


class TreePolicy(Protocol):
    """Selects, for all requests of a step at once, which candidates the target verifies."""

    def select(
        self,
        candidates: Sequence[Candidates],
        limits: Sequence[int],
        budget: int,
        needs: Sequence[float],
        other_tokens: int,
    ) -> list[npt.NDArray[np.bool_]]:
        """One `[n]` mask per request, closed under parents and with at most `limits[i]` nodes.

        limits        maximum draft nodes of each request, by its max_tokens and by the step; below 1: no draft
        budget        draft nodes that the verify budget leaves; may be negative
        needs         tokens that each request must get from this step to meet its SLO; -inf without one
        other_tokens  tokens of the step that are not drafts

        Every policy keeps to `limits` and may ignore the other arguments.
        """
        ...


@dataclass(frozen=True, slots=True)
class SharedNodes:
    """Base of policies that share a number of draft nodes among all requests.

    `nodes`: that number, roots not included; None: what the verify budget leaves. Raises `ValueError` if it is
    negative.
    """

    nodes: int | None = None

    def __post_init__(self) -> None:
        if self.nodes is not None and self.nodes < 0:
            raise ValueError(f"nodes must not be negative, got {self.nodes}")

    def within(self, budget: int) -> int:
        """Draft nodes of a step whose verify budget leaves `budget`."""
        return max(budget, 0) if self.nodes is None else self.nodes
