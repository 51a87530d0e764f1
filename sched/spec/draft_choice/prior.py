"""What requests like this one did on each drafter."""

from __future__ import annotations

import numpy as np

#: How much of what was seen still counts a slot later: a memory of about 1000 slots.
_KEPT = 1 - 1 / 1000
#: Slots on each drafter from which on something is known.
_INFORMED = 20


class Prior:
    """The mean slot on each drafter: its tokens, its seconds, and 1, or 0s where nothing is known.

    Requests are alike whose prompts' lengths are of the same kind, a power of two. The mean over all requests backs a
    kind's as if it were `backing` slots of its own. It should learn from slots whose drafter was drawn at random: in
    others a drafter shows what it does for those who chose it for being good.
    """

    def __init__(self, drafters: int, backing: float) -> None:
        self._backing = backing
        # Sums [drafters, 3].
        self._all = np.zeros((drafters, 3))
        self._kinds: dict[int, np.ndarray] = {}

    @staticmethod
    def kind(prompt_len: int) -> int:
        return prompt_len.bit_length()

    @property
    def informed(self) -> bool:
        """Whether enough is known about every drafter."""
        return bool((self._all[:, 2] >= _INFORMED).all())

    def observe(self, kind: int, drafter: int, slot: tuple[int, float, int]) -> None:
        """`slot`: tokens, seconds, 1."""
        for sums in (self._all, self._kinds.setdefault(kind, np.zeros_like(self._all))):
            sums *= _KEPT
            sums[drafter] += slot

    def mean(self, kind: int) -> np.ndarray:
        """`[drafters, 3]`."""
        overall = _per_slot(self._all)
        known = self._kinds.get(kind)
        return overall if known is None else _per_slot(known + self._backing * overall)


def _per_slot(sums: np.ndarray) -> np.ndarray:
    return sums / np.maximum(sums[:, 2:], 1e-9)
