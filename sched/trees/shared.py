"""What policies have in common whose draft nodes are counted over all requests."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class SharedNodes:
    """`nodes` bounds the draft nodes of all requests together, roots not among them; None: the step's budget does."""

    nodes: int | None = None

    def __post_init__(self) -> None:
        if self.nodes is not None and self.nodes < 0:
            raise ValueError(f"the number of nodes is negative: {self.nodes}")

    def within(self, budget: int) -> int:
        """Draft nodes of a step that has room for `budget`."""
        return max(budget, 0) if self.nodes is None else self.nodes
