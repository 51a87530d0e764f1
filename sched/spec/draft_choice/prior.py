"""Prior: how earlier, similar requests did with each drafter."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

#: Weight that past slots keep when one is added: a memory of about 1000 slots.
_KEEP = 1 - 1 / 1000
#: Slots with each drafter from which on the prior is used.
_INFORMED = 20


class Prior:
    """The mean slot of similar requests with each drafter: its tokens, its seconds, and 1; all 0 where none was seen.

    Requests are similar if their prompt lengths have the same `kind`, a power of two. The mean over all requests counts
    as `backing` slots of each kind. Only slots whose drafter was drawn at random should be observed: otherwise a
    drafter is seen only with requests that chose it for being good.
    """

    def __init__(self, drafters: int, backing: float) -> None:
        self._backing = backing
        # Sums `[drafters, 3]`, over all requests and by kind.
        self._all = np.zeros((drafters, 3))
        self._kinds: dict[int, npt.NDArray[np.float64]] = {}

    @staticmethod
    def kind(prompt_len: int) -> int:
        return prompt_len.bit_length()

    @property
    def informed(self) -> bool:
        """Whether enough slots were observed with every drafter."""
        return bool((self._all[:, 2] >= _INFORMED).all())

    def observe(self, kind: int, drafter: int, slot: tuple[int, float, int]) -> None:
        """Add a slot of a drafter, and let older ones fade. `slot`: (tokens with the bonus token, seconds, 1)."""
        for sums in (self._all, self._kinds.setdefault(kind, np.zeros_like(self._all))):
            sums *= _KEEP
            sums[drafter] += slot

    def mean(self, kind: int) -> npt.NDArray[np.float64]:
        """`[drafters, 3]`: tokens, seconds, 1."""
        overall = _per_slot(self._all)
        sums = self._kinds.get(kind)
        return overall if sums is None else _per_slot(sums + self._backing * overall)


def _per_slot(sums: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    return sums / np.maximum(sums[:, 2:], 1e-9)
