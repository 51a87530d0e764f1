"""Who has which row of the table of penalties."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from jaxspec.engine.request_state import RequestState


class PenaltyRows:
    """As many rows as requests may run, from 1 on: row 0 is nobody's. Its length is that of the free ones."""

    def __init__(self, max_num_seqs: int) -> None:
        self._free = list(range(1, max_num_seqs + 1))

    def __len__(self) -> int:
        return len(self._free)

    def give(self, states: Iterable[RequestState]) -> None:
        """A row to each that needs one and has none; for requests that run."""
        for state in states:
            if state.penalty_row is None and state.params.penalised:
                state.penalty_row = self._free.pop()

    def take(self, state: RequestState) -> None:
        """Back from a request that stops running, if it has one."""
        if (row := state.drop_penalty_row()) is not None:
            self._free.append(row)
