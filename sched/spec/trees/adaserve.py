"""AdaServe: first the nodes that requests need for their SLOs, then the likeliest ones over all requests."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt
from pydantic import PositiveInt

from jaxspec.sched import slo
from jaxspec.sched.request import Request
from jaxspec.sched.slots import TREES, Need, Section, SlotContext
from jaxspec.sched.spec.trees.forest import Forest, Ranked
from jaxspec.sched.spec.trees.policy import StepCandidates, TreePolicy
from jaxspec.sched.timing import StepTimes

#: A request that needs more tokens than this from a step to meet its SLO is late.
_LATE_NEED = 1.0


class AdaServeSettings(Section):
    """`tree: adaserve`: draft tokens by latency SLOs (AdaServe §4.3). Brackets: the paper's symbols."""

    #: Maximum number of draft nodes that a request gets for its SLO in a step (n_max).
    max_nodes: PositiveInt = 16
    #: True: draft, and use the verify budget, only where that raises the expected tokens per second or helps requests
    #: that are behind their SLO. False: draft in every step and use the whole budget, as in the paper.
    economic: bool = True


@TREES.register("adaserve", AdaServeSettings)
@dataclass(frozen=True, slots=True)
class AdaServe(TreePolicy):
    """SLO-customized selection, then throughput-optimized selection (AdaServe §4.3, Algorithm 2).

    In the first part requests, the neediest first, take their best nodes until their expected number of accepted tokens
    is what they need (A_cap: at most one per level and the bonus token), or they have `max_nodes`. In the second part
    the rest of the budget goes to the likeliest nodes over all requests. With `times`, the second part stops where
    another node would lower the expected tokens per second: on a device whose step times have no plateau, a free budget
    is no reason to use it. Where drafts do not pay at all, and in steps in which prompts use up the budget, requests
    that are late for their SLO still get some. Raises `ValueError` if `max_nodes` is negative.
    """

    max_nodes: int
    times: StepTimes | None = None
    calibrated: bool = False
    prompts_in_budget: bool = False
    shares_room = True
    needs = frozenset({Need.SLOS, Need.STEP_TIMES})

    def __post_init__(self) -> None:
        if self.max_nodes < 0:
            raise ValueError(f"max_nodes must not be negative, got {self.max_nodes}")

    @classmethod
    def build(cls, settings: AdaServeSettings, context: SlotContext) -> AdaServe:
        times = context.times if settings.economic else None
        return cls(settings.max_nodes, times, context.config.draft_calibration, context.config.prompts_in_budget)

    @property
    def adaptive(self) -> bool:
        return self.times is not None

    @property
    def by_budget(self) -> bool:
        return True

    def late(self, decoding: Sequence[Request], now: float, seconds: float, max_nodes: int) -> Sequence[Request]:
        if self.times is None:
            return ()
        needs = [(slo.need(r, now, seconds), r) for r in decoding]
        late = sorted((x for x in needs if x[0] > _LATE_NEED), key=lambda x: -x[0])
        return [r for _, r in late[:max_nodes]]

    def select(self, step: StepCandidates) -> list[npt.NDArray[np.bool_]]:
        forest, left = step.forest, max(0, min(step.budget, step.room))
        ranked = forest.ranked()
        ranked = replace(ranked, value=np.exp(ranked.value))
        most = np.clip(step.limits, 0, np.minimum(ranked.count, left))
        taken, expected = self._for_slos(forest, ranked, most, left, step.needs)
        for_slos = sum(taken)
        rest = forest.best(ranked, most, taken)[: left - for_slos]
        count = len(rest)
        if self.times is not None:
            tokens, expected = step.other_tokens + for_slos, expected + step.other_tokens
            overhead = 0.0 if for_slos else step.overhead  # drafts for SLOs cost it anyway
            count = self.times.best_node_count(ranked.value[rest], expected, tokens, step.context, overhead)
        more = np.bincount(forest.tree[rest[:count]], minlength=len(forest))
        return forest.take(ranked, taken + more)

    def _for_slos(
        self, forest: Forest, ranked: Ranked, most: npt.NDArray[np.intp], left: int, needs: Sequence[float]
    ) -> tuple[list[int], float]:
        """How many nodes each request takes for its SLO, and how many accepted draft tokens are expected of them."""
        taken, total = [0] * len(forest), 0.0
        levels, at_most = forest.levels().tolist(), np.minimum(most, self.max_nodes).tolist()
        for i in sorted(range(len(forest)), key=lambda i: -needs[i]):
            needed, expected = min(needs[i], levels[i] + 1), 1.0
            if expected >= needed:
                continue
            first = int(forest.first[i])
            for p in ranked.value[first : first + min(at_most[i], left)].tolist():
                if expected >= needed:
                    break
                expected += p
                taken[i] += 1
            left -= taken[i]
            total += expected - 1.0  # without the bonus token
        return taken, total
