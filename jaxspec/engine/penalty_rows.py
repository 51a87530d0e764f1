"""Allocation of rows in the device's penalty table (`step/penalties.py`)."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from jaxspec.engine.request_state import RequestState


class PenaltyRows:
    """Free rows: one for each of `max_num_seqs` requests, numbered from 1. Row 0 stays zero. `len`: free rows."""

    def __init__(self, max_num_seqs: int) -> None:
        self._free = list(range(1, max_num_seqs + 1))

    def __len__(self) -> int:
        return len(self._free)

    def give(self, states: Iterable[RequestState]) -> None:
        """Give a row to each of these running requests that has penalties and no row yet."""
        for state in states:
            if state.penalty_row is None and state.params.penalised:
                state.penalty_row = self._free.pop()

    def take(self, state: RequestState) -> None:
        """Take the row back from a request that stops running, if it has one."""
        if (row := state.release_penalty_row()) is not None:
            self._free.append(row)
