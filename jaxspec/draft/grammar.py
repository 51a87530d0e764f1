"""Grammar drafting: the tokens that a structured output leaves no choice about, without a model."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from jaxspec.draft.suffix import SuffixDrafter
from jaxspec.sched.plan import ScheduledRequest
from jaxspec.sched.request import Request
from jaxspec.sched.spec.drafter import Proposal, SamplingOf, SharedDevice
from jaxspec.sched.spec.trees.candidates import Candidates


class GrammarDrafter(SharedDevice):
    """Proposes keys, quotes and brackets that a JSON schema fixes, and whatever else a grammar forces.

    Where the grammar leaves a choice, such as that of whitespace, suffix drafting says how the chain goes on (`suffix`;
    None: it does not), or else the layout of the output so far (`Constraint.forced`).

    Other engines write such tokens unverified ("jump-forward decoding"; Zheng et al., SGLang, arXiv 2312.07104). Here
    the target verifies them as drafts, because it may write the same text with other tokens, so they change no answer.
    """

    free = True
    widths = (1,)

    def __init__(self, name: str, suffix: SuffixDrafter | None = None) -> None:
        self.name, self._suffix = name, suffix

    def serves(self, request: Request) -> bool:
        return request.forced is not None

    def uncached_tokens(self, request: Request) -> int:
        return 0

    def propose(
        self, scheduled: Sequence[ScheduledRequest], sampling: SamplingOf, levels: int, width: int, least: float = 0.0
    ) -> Proposal:
        candidates = [self._candidates(s.request, levels, least) for s in scheduled]
        return lambda: candidates

    def seconds(self, requests: int, uncached: int, levels: int, width: int) -> float:
        return 5e-5 * requests

    def _candidates(self, request: Request, levels: int, least: float) -> Candidates | None:
        """A chain of at most `levels` tokens."""
        if request.forced is None:
            return None

        def guess(path: Sequence[int]) -> tuple[int, float] | None:
            return None if self._suffix is None else self._suffix.after(request, path, least)

        if not (found := request.forced(levels, guess)):
            return None
        tokens, chances = zip(*found, strict=True)
        parents = np.arange(-1, len(tokens) - 1, dtype=np.int32)
        return Candidates(np.asarray(tokens, np.int32), parents, np.cumsum(np.log(chances)).astype(np.float32))
